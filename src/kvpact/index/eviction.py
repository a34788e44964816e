"""The order in which an index evicts: least recently used first.

Owns the recency of every slot and the queue of candidates. Does not decide whether a slot may be evicted (the index
passes a condition), and knows no keys and no chains.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable

from kvpact.errors import PactViolation


class LeastRecentlyUsed:
    """Recency of `num_slots` slots and, for each of several classes, a queue of those that were once evictable.

    A queue keeps at most one record for a slot, however often the slot is used, filled and emptied, so its memory is
    bounded by `num_slots` (H51); a slot that changes its class may leave one behind. A record may be out of date: uses
    only ever make a slot younger, so a record is a lower bound, corrected when it comes up.
    """

    __slots__ = ("_queued", "_queues", "_used", "tick")

    def __init__(self, num_slots: int, classes: int = 1) -> None:
        self.tick = 0
        """Uses since the start. For reading only."""
        self._used = array("q", bytes(8 * num_slots))
        self._queues: list[list[tuple[int, int]]] = [[] for _ in range(classes)]
        self._queued = bytearray(num_slots)
        """Per slot the class in whose queue its record counts, plus 1; 0 without one."""

    def touch(self, slot: int) -> None:
        """Make `slot` the most recently used."""
        self.tick += 1
        self._used[slot] = self.tick

    def touch_each(self, slots: Iterable[int]) -> None:
        """Make each of `slots` the most recently used, one after the other."""
        for tick, slot in enumerate(slots, self.tick + 1):
            self._used[slot] = self.tick = tick

    def inherit(self, parent: int, child: int) -> None:
        """Count the last use of `child` as one of `parent` too; called when the child is removed, so that a touch costs
        O(1)."""
        used = self._used[child]
        if used > self._used[parent]:
            self._used[parent] = used

    def offer(self, slot: int, slot_class: int = 0) -> None:
        """`slot` became evictable. O(log n); nothing happens if it is queued already."""
        if self._queued[slot] != slot_class + 1:
            self._queued[slot] = slot_class + 1
            heapq.heappush(self._queues[slot_class], (self._used[slot], slot))

    def take(self, evictable: Callable[[int], bool], slot_class: int = 0) -> int | None:
        """Remove and return the least recently used slot of a class for which `evictable` holds; None if none is
        queued.

        Amortised O(log n): a stale record is dropped once for each time that it was queued, and corrected at most once
        between two uses of its slot.
        """
        slot = self.first(evictable, slot_class)
        if slot is not None:
            heapq.heappop(self._queues[slot_class])
            self._queued[slot] = 0
        return slot

    def is_next(self, slot: int, slot_class: int) -> bool:
        """Whether `take` would return `slot`, which has no record, if it were offered now. A record is a lower bound,
        so that False is no certainty."""
        queue = self._queues[slot_class]
        return not queue or (self._used[slot], slot) < queue[0]

    def first(self, evictable: Callable[[int], bool], slot_class: int = 0) -> int | None:
        """The slot that `take` would return."""
        queue, mark = self._queues[slot_class], slot_class + 1
        while queue:
            recorded, slot = queue[0]
            if self._queued[slot] != mark:
                heapq.heappop(queue)
            elif not evictable(slot):
                heapq.heappop(queue)
                self._queued[slot] = 0
            elif recorded < self._used[slot]:
                heapq.heapreplace(queue, (self._used[slot], slot))
            else:
                return slot
        return None

    def check(self) -> None:
        """Verify that no slot has two records, and none that is younger than the slot; raises PactViolation."""
        for slot_class, queue in enumerate(self._queues):
            slots = [slot for _, slot in queue if self._queued[slot] == slot_class + 1]
            twice = len(set(slots)) < len(slots) and len(self._queues) == 1
            if twice or self._queued.count(slot_class + 1) != len(set(slots)):
                raise PactViolation(f"the eviction queue and its marks disagree: {len(slots)} records")
            for recorded, slot in queue:
                if recorded > self._used[slot]:
                    raise PactViolation(f"slot {slot} is queued as younger than its last use")

    def used(self, slot: int) -> int:
        """When `slot` was last used, in uses since the start (an order, not a time)."""
        return self._used[slot]

    def queued(self, slot: int) -> bool:
        """Whether `slot` has a record in the queue."""
        return bool(self._queued[slot])

    def __len__(self) -> int:
        """Records in the longest queue, stale ones included; never more than the number of slots."""
        return max(map(len, self._queues))
