"""The order in which an index evicts: least recently used first.

Owns the recency of every slot and the queue of candidates. Does not decide whether a slot may be evicted (the index
passes a condition), and knows no keys and no chains.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable

from kvpact.errors import PactViolation


class LeastRecentlyUsed:
    """Recency of `num_slots` slots and a queue of those that were once evictable.

    The queue keeps at most one record for a slot, however often the slot is used, filled and emptied, so its memory is
    bounded by `num_slots` (H51). A record may be out of date: uses only ever make a slot younger, so a record is a
    lower bound, corrected when it comes up.
    """

    __slots__ = ("_cold", "_is_cold", "_queue", "_queued", "_tick", "_used")

    def __init__(self, num_slots: int) -> None:
        self._tick = 0
        self._used = array("q", bytes(8 * num_slots))
        self._queue: list[tuple[int, int]] = []
        self._queued = bytearray(num_slots)
        self._cold: list[int] = []
        """Those that were evictable and cold: they go before all others, the lowest first."""
        self._is_cold = bytearray(num_slots)
        """Whether a slot is in `_cold`."""

    def touch(self, slot: int) -> None:
        """Make `slot` the most recently used."""
        self._tick += 1
        self._used[slot] = self._tick

    def cool(self, slot: int) -> None:
        """Make `slot` cold: older than all others, until it is used."""
        self._used[slot] = 0

    def inherit(self, parent: int, child: int) -> None:
        """Count the last use of `child` as one of `parent` too; called when the child is removed, so that a touch costs
        O(1)."""
        self._used[parent] = max(self._used[parent], self._used[child])

    def offer(self, slot: int) -> None:
        """`slot` became evictable. O(log n); nothing happens if it is queued already."""
        if not self._used[slot]:
            if not self._is_cold[slot]:
                self._is_cold[slot] = 1
                heapq.heappush(self._cold, slot)
        elif not self._queued[slot]:
            self._queued[slot] = 1
            heapq.heappush(self._queue, (self._used[slot], slot))

    def take(self, evictable: Callable[[int], bool]) -> int | None:
        """Remove and return the least recently used slot for which `evictable` holds; None if none is queued.

        Amortised O(log n): a stale record is dropped once for each time that it was queued, and corrected at most once
        between two uses of its slot.
        """
        while self._cold:
            slot = heapq.heappop(self._cold)
            self._is_cold[slot] = 0
            if evictable(slot):
                if not self._used[slot]:
                    return slot
                self.offer(slot)
        while self._queue:
            recorded, slot = self._queue[0]
            if not evictable(slot):
                heapq.heappop(self._queue)
                self._queued[slot] = 0
            elif recorded < self._used[slot]:
                heapq.heapreplace(self._queue, (self._used[slot], slot))
            else:
                heapq.heappop(self._queue)
                self._queued[slot] = 0
                return slot
        return None

    def check(self) -> None:
        """Verify that no slot has two records, and none that is younger than the slot; raises PactViolation."""
        slots = [slot for _, slot in self._queue]
        if len(set(self._cold)) < len(self._cold) or sum(self._is_cold) != len(self._cold):
            raise PactViolation(f"the cold slots and their marks disagree: {len(self._cold)} records")
        if (
            len(set(slots)) < len(slots)
            or sum(self._queued) != len(slots)
            or not all(map(self._queued.__getitem__, slots))
        ):
            raise PactViolation(f"the eviction queue and its marks disagree: {len(slots)} records")
        for recorded, slot in self._queue:
            if recorded > self._used[slot] > 0:
                raise PactViolation(f"slot {slot} is queued as younger than its last use")

    def used(self, slot: int) -> int:
        """When `slot` was last used, in uses since the start (an order, not a time)."""
        return self._used[slot]

    def queued(self, slot: int) -> bool:
        """Whether `slot` has a record in the queue."""
        return bool(self._queued[slot] if self._used[slot] else self._is_cold[slot])

    def __len__(self) -> int:
        """Records in the longer queue, stale ones included; never more than the number of slots."""
        return max(len(self._queue), len(self._cold))
