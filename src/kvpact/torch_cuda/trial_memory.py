"""Host memory for trials and measurements: memfds as the arena's, pinned piece by piece and given back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from kvpact.memory.arena import ArenaSegment
from kvpact.worker.cuda.driver import Driver


def filled_segment(num_slots: int, slot_bytes: int) -> ArenaSegment:
    """An arena whose pages are all there; every byte is 1."""
    segment = ArenaSegment.create(num_slots, slot_bytes)
    np.frombuffer(segment.memory, np.uint8)[:] = 1
    return segment


@contextlib.contextmanager
def pinned_segment(driver: Driver, num_slots: int, slot_bytes: int, chunk_slots: int) -> Iterator[ArenaSegment]:
    """Slots that are pinned `chunk_slots` at a time. Raises CudaError if that fails."""
    segment = filled_segment(num_slots, slot_bytes)
    pinned: list[int] = []
    try:
        for slot in range(0, num_slots, chunk_slots):
            address = segment.mapped_at + slot * slot_bytes
            driver.register(address, min(chunk_slots, num_slots - slot) * slot_bytes)
            pinned.append(address)
        yield segment
    finally:
        for address in pinned:
            driver.unregister(address)
        segment.close()
