"""Scenes for the disk tier's tests: chains of keys, blocks whose content follows from their key, aligned memory."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from at_the_end import at_the_end
from kvpact.errors import TierError
from kvpact.identity.keys import BlockKey, Namespace
from kvpact.tiers.base import BlockBuffer, Entry, chained, leading
from kvpact.tiers.disk.superblock import PAGE_BYTES, SLAB_FORMAT, SLAB_MAGIC, Superblock
from kvpact.tiers.disk.tier import DiskTier
from kvpact_testkit.peers.own import overwrite as overwrite

SLOT = 8192
NAMESPACE = Namespace({"model": "tiny", "dtype": "bfloat16", "block_size": "16"})
OTHER = Namespace({"model": "other", "dtype": "bfloat16", "block_size": "16"})


def chain(name: str, length: int, stem: Sequence[BlockKey] = ()) -> list[BlockKey]:
    """`length` keys of one request, the first of them those of `stem`."""
    return [*stem, *(hashlib.sha256(f"{name}/{block}".encode()).digest() for block in range(len(stem), length))]


def content(key: BlockKey, slot_bytes: int = SLOT) -> bytes:
    """What the block named `key` holds."""
    return hashlib.shake_128(key).digest(64) * (slot_bytes // 64)


def memory(count: int, slot_bytes: int = SLOT, ranks: int = 2) -> list[BlockBuffer]:
    """Page-aligned buffers for `count` blocks, each rank's pieces in a segment of its own."""
    piece = slot_bytes // ranks
    segments = [memoryview(mmap.mmap(-1, max(1, count * piece))) for _ in range(ranks)]
    return [[segment[block * piece : (block + 1) * piece] for segment in segments] for block in range(count)]


def filled(keys: Sequence[BlockKey], slot_bytes: int = SLOT) -> list[BlockBuffer]:
    """Buffers that hold the content of `keys`."""
    buffers = memory(len(keys), slot_bytes)
    for key, buffer in zip(keys, buffers, strict=True):
        whole, at = content(key, slot_bytes), 0
        for piece in buffer:
            piece[:] = whole[at : at + piece.nbytes]
            at += piece.nbytes
    return buffers


class Told(list[int]):
    """The progress that a read has told of; it wants all."""

    def __call__(self, arrived: int) -> bool:
        self.append(arrived)
        return True


def bytes_of(buffer: BlockBuffer) -> bytes:
    return b"".join(buffer)


def capacity_for(slots: int, slot_bytes: int = SLOT) -> int:
    """The smallest capacity that gives a slab exactly `slots` slots."""
    capacity = slots * slot_bytes
    while Superblock.for_capacity(NAMESPACE, slot_bytes, capacity).slots_in(capacity) < slots:
        capacity += 4096
    return capacity


def bare_tier(
    directory: Path, slots: int = 64, namespace: Namespace = NAMESPACE, timeout: float = 0.0, capacity: int = 0
) -> DiskTier:
    """With room for `slots` blocks, or for what goes into `capacity`; to be closed, or left to die, by its caller."""
    return DiskTier.open(directory, namespace, SLOT, capacity or capacity_for(slots), timeout=timeout)


def open_tier(directory: Path, slots: int = 64, namespace: Namespace = NAMESPACE, **settings: Any) -> DiskTier:
    """Like `bare_tier`; it is checked and closed with the test."""
    return opened(bare_tier(directory, slots, namespace, **settings))


def opened(tier: DiskTier) -> DiskTier:
    """The tier, to be checked and closed with the test."""
    at_the_end(tier.close)
    at_the_end(tier.check)
    return tier


def slab_path(directory: Path, namespace: Namespace = NAMESPACE) -> Path:
    return directory / "kvpact" / f"{namespace.name}.slab"


def files_in(directory: Path) -> int:
    """Bytes of all files in kvpact's folder: what counts of each, or what it takes of the disk if that is more."""
    found = []
    for path in (directory / "kvpact").glob("*"):
        with suppress(FileNotFoundError):  # another process removed it
            status = path.stat()
            found.append(max(status.st_size, on_disk(path)))
            with suppress(TierError):  # it is no slab
                found[-1] = max(layout(path).taken_bytes(status), on_disk(path))
    return sum(found)


def on_disk(path: Path) -> int:
    """Bytes of a file that are not holes."""
    return 512 * path.stat().st_blocks


def refuse_holes(*_: object) -> None:
    """In place of `Slab.punch`: the file system makes no holes in files."""
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def store(tier: DiskTier, keys: Sequence[BlockKey], start: int = 0) -> int:
    """Put a chain from block `start` on; how many are held then, in a row."""
    return leading(tier.put(chained(keys[start:], filled(keys[start:]), keys[:start])))


def stored_alone(tier: DiskTier, keys: Sequence[BlockKey], slot_bytes: int = SLOT) -> list[bool]:
    """Put blocks without parents, the n-th at depth n; which are held then."""
    entries = enumerate(zip(keys, filled(keys, slot_bytes), strict=True))
    return tier.put([Entry(key, buffer, depth=depth) for depth, (key, buffer) in entries])


def served(tier: DiskTier, keys: Sequence[BlockKey]) -> int:
    """How many blocks the tier serves of `keys`, in a row; every one of them must hold what its key says."""
    return leading(served_each(tier, keys))


def served_each(tier: DiskTier, keys: Sequence[BlockKey], slot_bytes: int = SLOT) -> list[bool]:
    """Which blocks the tier serves of `keys`; every one of them must hold what its key says."""
    buffers = memory(len(keys), slot_bytes)
    arrived = tier.get(keys, buffers)
    for there, key, buffer in zip(arrived, keys, buffers, strict=True):
        assert not there or bytes_of(buffer) == content(key, slot_bytes), f"damage was served for {key.hex()[:8]}"
    return arrived


def slot_of(tier: DiskTier, key: BlockKey) -> int:
    return next(header.slot for header in tier.scan() if header.key == key)


def layout(path: Path) -> Superblock:
    with path.open("rb") as file:
        return Superblock.decode(file.read(PAGE_BYTES), path)


def superblock_page(
    text: bytes, slot_bytes: int = SLOT, table_slots: int = 64, digest: bytes = bytes(32), text_bytes: int | None = None
) -> bytes:
    """A page that begins as a slab does, with the right checksum over whatever it says."""
    fixed = struct.pack("<8sIIQQ32s", SLAB_MAGIC, SLAB_FORMAT, 0, slot_bytes, table_slots, digest)
    size = (len(text) if text_bytes is None else text_bytes).to_bytes(4, "little")
    checked = (fixed + size + text).ljust(PAGE_BYTES - 24, b"\0")
    return checked + struct.pack("<QQQ", xxhash.xxh3_64_intdigest(checked), 0, 0)


def header_at(slot: int) -> int:
    return 4096 + 256 * slot


def payload_at(path: Path, slot: int) -> int:
    return layout(path).file_bytes(slot)
