"""A rank whose slots lie in another rank's segment, because both hold the same bytes in every block.

Owns what such a rank has of its own: the notice of its weights, and its count of usable slots. The slots' memory
belongs to the rank that made it, and is there as long as any process maps it.
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
def grant_turn(segment: ArenaSegment) -> Iterator[None]:
    """Be the only one that works with a segment's slots, before they have content; a turn ends with its process."""
    descriptor = os.open(f"/proc/self/fd/{segment.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class SharedSlots(ArenaSegment):
    """Another rank's slots, mapped here. Its address is that of this rank's own memory, which has no slots to use."""

    _own: ArenaSegment

    @classmethod
    def attach(cls, address: SegmentAddress) -> Self:
        """Map the slots of the segment at `address`. Raises KvpactError as `ArenaSegment.attach`."""
        shared = super().attach(address)
        assert isinstance(shared, cls)
        own = ArenaSegment.create(1, PAGE_BYTES)  # the smallest; its one slot is not used
        shared.notice.release()
        shared._usable.release()
        shared.notice, shared._usable, shared._own = own.notice, own._usable, own
        shared.usable_slots = shared.num_slots
        return shared

    def address(self) -> SegmentAddress:
        """Where the scheduler's process finds this rank's notice and count."""
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
