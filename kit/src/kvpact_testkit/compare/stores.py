"""Stores on this disk: what they take, and one flipped bit in each of their blocks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvpact.tiers.disk.inspection import payload_places, scan_directory


def files_of(store: Path) -> list[Path]:
    """All files of a store, in one order."""
    return sorted(path for path in store.rglob("*") if path.is_file()) if store.exists() else []


def disk_bytes(store: Path) -> int:
    """Bytes that they take on disk. A file may vanish meanwhile."""
    total = 0
    for path in files_of(store):
        with suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def blocks_of(store: Path) -> Iterator[tuple[Path, int, int]]:
    """File, offset and length of each block: kvpact's slabs have many, other stores one in each file."""
    slabs = {slab.path for slab in scan_directory(store)} if store.exists() else set()
    for path in sorted(slabs):
        for offset, length in payload_places(path):
            yield path, offset, length
    for path in files_of(store) if not slabs else ():
        if size := path.stat().st_size:
            yield path, 0, size


def flip_bit(path: Path, at: int, bit: int) -> None:
    """Flip one bit of the byte at this offset."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def flip_in_blocks(store: Path, seed: int = 0) -> int:
    """Flip one bit in each block of a store, at a random place; return how many blocks that were."""
    choose = random.Random(seed)
    blocks = list(blocks_of(store))
    for path, offset, length in blocks:
        flip_bit(path, offset + choose.randrange(length), choose.randrange(8))
    return len(blocks)
