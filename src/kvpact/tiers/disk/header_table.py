"""The header table of a slab, read piece by piece and judged many headers at a time.

Owns the order of the pieces. `record.py` decides which headers are valid, the caller what becomes of a record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpact.tiers.base import HEADER_BYTES
from kvpact.tiers.disk.slab import SlabReader
from kvpact.tiers.disk.superblock import Superblock
from kvpact.tiers.record import FIELDS, valid_in_slab

PIECE_SLOTS: Final = 1 << 12
"""Headers that are read and judged at once: 1 MiB, 2 ms of CPU time."""

_AHEAD: Final = 8
"""Pieces that the kernel reads while one is judged."""


def pieces_of(slab: SlabReader, start: int = 0) -> Iterator[tuple[int, bytearray]]:
    """(first slot, headers) of neighbouring slots from `start` on, in order. Raises OSError.

    Also of slots beyond the end of the file. What was never written is left out where the file system says so.
    """
    for first, end in slab.written_headers():
        for at in range(max(first, start), end, PIECE_SLOTS):
            if (ahead := min(_AHEAD * PIECE_SLOTS, end - at - PIECE_SLOTS)) > 0:
                slab.read_ahead(at + PIECE_SLOTS, ahead)
            yield at, slab.read_headers(at, min(PIECE_SLOTS, end - at))


def judged(superblock: Superblock, first: int, table: bytearray) -> tuple[np.ndarray, NDArray[np.bool_]]:
    """The headers of neighbouring slots from `first` on, as an array of `FIELDS`, and which of them are valid."""
    headers = np.frombuffer(table, FIELDS)
    slots = np.arange(first, first + len(headers))
    return headers, valid_in_slab(
        headers, superblock.namespace.digest, superblock.slot_bytes, slots, superblock.refuted
    )


def occupied(table: bytes | bytearray, first: int = 0) -> Iterator[tuple[int, memoryview]]:
    """(slot, raw header) of every slot in a header table, or the part of it from slot `first` on, whose header is not
    empty."""
    view = memoryview(table)[: len(table) // HEADER_BYTES * HEADER_BYTES]
    words = np.frombuffer(view, np.uint64).reshape(-1, HEADER_BYTES // 8)
    for slot in np.flatnonzero(words.any(axis=1)).tolist():
        yield first + slot, view[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES]
