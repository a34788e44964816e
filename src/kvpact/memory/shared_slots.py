"""Slots of a rank in another rank's segment, because both hold the same bytes in every block.

Owns the rank's own parts: the notice of its weights, and its count of usable slots. The slots' memory belongs to the
rank that made it, and exists as long as any process maps it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import Self

from kvpact.memory.arena import ArenaSegment, SegmentAddress
from kvpact.memory.layout import PAGE_BYTES


@contextlib.contextmanager
def take_turn(segment: ArenaSegment) -> Iterator[None]:
    """Lock a segment's slots, before they have content, against other ranks; a process's end releases the lock."""
    descriptor = os.open(f"/proc/self/fd/{segment.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class SharedSlots(ArenaSegment):
    """Slots of another rank, mapped here. Its address is that of this rank's own memory, which has no usable slots."""

    _own: ArenaSegment

    @classmethod
    def attach(cls, address: SegmentAddress) -> Self:
        """Map the slots of the segment at `address`. Raises KvpactError as `ArenaSegment.attach`."""
        shared = super().attach(address)
        assert isinstance(shared, cls)
        own = ArenaSegment.create(1, PAGE_BYTES)  # the smallest; its one slot is not used
        shared.notice.release()
        shared._usable.release()
        shared.notice = own.notice
        shared._usable = own._usable
        shared._own = own
        shared.usable_slots = shared.num_slots
        return shared

    def address(self) -> SegmentAddress:
        """Address of this rank's notice and count, for the scheduler's process."""
        return self._own.address()

    def place_pages(self, *, huge: bool, node: int | None = None) -> None:
        """See `ArenaSegment.place_pages`. The owner chooses the node, which counts for every process."""
        super().place_pages(huge=huge)

    def close(self) -> None:
        """Unmap the slots, and free this rank's own memory."""
        self._own.close()
        self.notice = self._own.notice
        self._usable = self._own._usable
        super().close()
