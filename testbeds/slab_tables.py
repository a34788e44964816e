"""Slabs with as many records as one likes: real header tables, and payloads that are holes in the file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from kvpact.identity.keys import KEY_BYTES, Namespace
from kvpact.tiers.base import HEADER_BYTES
from kvpact.tiers.disk.slab_directory import SlabDirectory
from kvpact.tiers.disk.superblock import Superblock
from kvpact.tiers.record import FIELDS, RECORD_FORMAT, RECORD_MAGIC

_AT_ONCE = 1 << 16


def write_slab(
    directory: Path,
    namespace: Namespace,
    blocks: int,
    *,
    chain_blocks: int = 250,
    slot_bytes: int = 4096,
    seed: int = 0,
) -> tuple[Path, int]:
    """A closed slab of `blocks` records in chains of `chain_blocks`; returns its file and a capacity that holds it.

    Key `i` is `keys_of(seed, i, i + 1)[0]`; each chain was used a second after the one before it. Neighbouring chains
    lie in neighbouring slots.
    """
    superblock = Superblock(slot_bytes, 4 * blocks, namespace)
    capacity = superblock.file_bytes(blocks)
    path = SlabDirectory.prepare(directory, capacity).slab_path(namespace, 0)
    with path.open("wb") as file:
        os.chmod(path, 0o600)
        file.write(superblock.encode())
        for first in range(0, blocks, _AT_ONCE):
            file.write(headers_of(superblock, seed, first, min(first + _AT_ONCE, blocks), chain_blocks))
        file.truncate(superblock.file_bytes(blocks))
        file.flush()
        os.fsync(file.fileno())
    return path, capacity


def keys_of(seed: int, first: int, end: int) -> np.ndarray:
    """Keys [first, end), of shape (keys, 4); the same whatever is asked for beside them."""
    numbers = np.arange(4 * first, 4 * end, dtype=np.uint64) + np.uint64(seed << 40) + np.uint64(1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 0x9E3779B97F4A7C15)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return (numbers ^ (numbers >> np.uint64(29))).reshape(-1, 4)


def chain_keys(seed: int, first: int, count: int) -> list[bytes]:
    """Keys [first, first + count) as bytes."""
    raw = keys_of(seed, first, first + count).tobytes()
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]


def headers_of(superblock: Superblock, seed: int, first: int, end: int, chain_blocks: int) -> bytes:
    """The headers of slots [first, end)."""
    headers = np.zeros(end - first, FIELDS)
    numbers = np.arange(first, end)
    depth = numbers % chain_blocks
    headers["magic"], headers["version"] = np.frombuffer(RECORD_MAGIC, "<u8")[0], RECORD_FORMAT
    headers["depth"], headers["slot"], headers["length"] = depth, numbers, superblock.slot_bytes
    headers["written"] = headers["used"] = 1.7e9 + numbers // chain_blocks
    headers["namespace"] = np.frombuffer(superblock.namespace.digest, "<u8")
    headers["key"] = keys_of(seed, first, end)
    before = keys_of(seed, max(0, first - 1), end - 1)
    headers["parent"] = before if first else np.concatenate([np.zeros((1, 4), np.uint64), before])
    headers["parent"][depth == 0] = 0
    sealed(headers)
    return headers.tobytes()


def sealed(headers: np.ndarray) -> None:
    """Give headers their checksums."""
    checked: Sequence[bytes] = np.ndarray(len(headers), f"V{HEADER_BYTES - 8}", headers, 0, (HEADER_BYTES,)).tolist()
    headers["checksum"] = np.fromiter(map(xxhash.xxh3_64_intdigest, checked), np.uint64, len(headers))
