"""The order in which an index evicts: least recently used first.

Owns the recency of every slot and the queue of candidates. Does not decide whether a slot may be evicted (the index
passes a condition), and knows no keys and no chains.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpact.errors import PactViolation
from kvpact.index.key_table import RowArray, zeros

NEVER: Final = 1 << 63
"""After every tick."""

_SPAN_SHIFT: Final = 10
"""Ticks of one span, as a power of 2: when a span's turn comes its records are sorted, at most a tenth of a
millisecond of work."""


class _Queue:
    """Records of one class by tick: a heap of those whose turn it is, and the others in spans of ticks, unsorted.

    A record of a span is a slot's number and no object: 4 bytes, also in a queue of millions, and nothing for the
    collection of garbage to walk over.
    """

    __slots__ = ("due", "due_until", "later", "records", "spans")

    def __init__(self) -> None:
        self.due: list[tuple[int, int]] = []
        """A heap of (tick, slot) up to the span `due_until`."""
        self.due_until = -1
        self.later: dict[int, array[int]] = {}
        """Span -> slots, as they were offered."""
        self.spans: list[int] = []
        """A heap of the keys of `later`."""
        self.records = 0

    def add(self, tick: int, slot: int) -> None:
        self.records += 1
        span = tick >> _SPAN_SHIFT
        if span <= self.due_until:
            heapq.heappush(self.due, (tick, slot))
        elif (slots := self.later.get(span)) is not None:
            slots.append(slot)
        else:
            self.later[span] = array("i", (slot,))
            heapq.heappush(self.spans, span)

    def fill(self, ticks: RowArray, slots: RowArray) -> None:
        """Add records, in the order of their ticks, to an empty queue."""
        spans = ticks >> _SPAN_SHIFT
        firsts = np.append(0, np.flatnonzero(spans[1:] != spans[:-1]) + 1).tolist()
        for first, end in zip(firsts, [*firsts[1:], len(slots)], strict=True) if len(slots) else ():
            self.later[int(spans[first])] = array("i", slots[first:end].astype(np.int32).tobytes())
        self.spans, self.records = list(self.later), len(slots)

    def pop(self) -> None:
        """Remove the first one of those that are due."""
        heapq.heappop(self.due)
        self.records -= 1

    def next_span(self) -> Sequence[int]:
        """The slots of the next span, which is due from now on."""
        self.due_until = heapq.heappop(self.spans)
        slots = self.later.pop(self.due_until)
        self.records -= len(slots)
        return slots

    def bound(self) -> tuple[int, int]:
        """No record is before this (tick, slot)."""
        if self.due:
            return self.due[0]
        return (self.spans[0] << _SPAN_SHIFT, -1) if self.spans else (NEVER, -1)

    def slots(self) -> Iterator[int]:
        yield from (slot for _, slot in self.due)
        for slots in self.later.values():
            yield from slots


class LeastRecentlyUsed:
    """Recency of `num_slots` slots and, for each of several classes, a queue of those that were once evictable.

    A queue keeps at most one record for a slot, however often the slot is used, filled and emptied, so its memory is
    bounded by `num_slots` (H51); a slot that changes its class may leave one behind. A record may be out of date: uses
    only ever make a slot younger, so a record is a lower bound, corrected when it comes up.
    """

    __slots__ = ("_queued", "_queues", "tick", "used", "used_each")

    def __init__(self, num_slots: int, classes: int = 1) -> None:
        self.tick = 0
        """Uses since the start. For reading only."""
        self.used_each, self.used = zeros(num_slots, "i8")
        """Per slot when it was last used, in uses since the start (an order, not a time). For reading only."""
        self._queues = [_Queue() for _ in range(classes)]
        self._queued = bytearray(num_slots)
        """Per slot the class in whose queue its record counts, plus 1; 0 without one."""

    def touch(self, slot: int) -> None:
        """Make `slot` the most recently used."""
        self.tick += 1
        self.used[slot] = self.tick

    def touch_each(self, slots: slice | Sequence[int] | RowArray) -> None:
        """Make each of `slots` the most recently used, one after the other, a slot named twice by its last place."""
        count = slots.stop - slots.start if isinstance(slots, slice) else len(slots)
        if count:
            self.used_each[slots] = np.arange(self.tick + 1, self.tick + 1 + count)
            self.tick += count

    def inherit(self, parent: int, used: int) -> None:
        """Count the last use of a child as one of `parent` too; called when the child is removed, so that a touch costs
        O(1)."""
        if used > self.used[parent]:
            self.used[parent] = used

    def offer(self, slot: int, slot_class: int = 0) -> None:
        """`slot` became evictable. O(log n); nothing happens if it is queued already."""
        if self._queued[slot] != slot_class + 1:
            self._queued[slot] = slot_class + 1
            self._queues[slot_class].add(self.used[slot], slot)

    def begin_restore(self) -> None:
        """From now on each use is after every number that is stored as the time of a last use."""
        self.tick = int(np.float64(np.inf).view(np.int64))

    def see_stored(self, slots: RowArray, times: NDArray[np.float64]) -> None:
        """Note when the blocks in these slots were last used, as any numbers that grow with time."""
        self.used_each[slots] = (np.fmax(times, 0.0) + 0.0).view(np.int64)  # their order is the numbers'

    def stored(self, slot: int) -> float:
        """The number that `see_stored` was given."""
        return float(self.used_each[slot : slot + 1].view(np.float64)[0])

    def restore(self, slots: RowArray, leaves: RowArray) -> None:
        """Start with `slots`, used one after the other, of which the `leaves`, in the same order, are evictable."""
        self.used_each[slots] = np.arange(1, len(slots) + 1)
        self.tick = len(slots)
        marks = np.frombuffer(self._queued, np.uint8)
        marks[:] = 0
        marks[leaves] = 1
        self._queues = [_Queue() for _ in self._queues]
        self._queues[0].fill(self.used_each[leaves], leaves)

    def take(self, evictable: Callable[[int], bool], slot_class: int = 0) -> int | None:
        """Remove and return the least recently used slot of a class for which `evictable` holds; None if none is
        queued.

        Amortised O(log n): a stale record is dropped once for each time that it was queued, and corrected at most once
        between two uses of its slot.
        """
        slot = self.first(evictable, slot_class)
        if slot is not None:
            self._queues[slot_class].pop()
            self._queued[slot] = 0
        return slot

    def bound(self, slot_class: int) -> tuple[int, int]:
        """`take` would return a slot, which has no record, if it were offered now and (its last use, its number) is
        less than this; it may return it otherwise, too."""
        return self._queues[slot_class].bound()

    def first(self, evictable: Callable[[int], bool], slot_class: int = 0) -> int | None:
        """The slot that `take` would return."""
        queue, mark, used = self._queues[slot_class], slot_class + 1, self.used
        due = queue.due
        while due or queue.spans:
            if not due:
                for slot in queue.next_span():
                    if self._queued[slot] == mark:
                        queue.add(used[slot], slot)
                continue
            recorded, slot = due[0]
            if self._queued[slot] != mark:
                queue.pop()
            elif not evictable(slot):
                queue.pop()
                self._queued[slot] = 0
            elif recorded < used[slot]:
                queue.pop()
                queue.add(used[slot], slot)
            else:
                return slot
        return None

    def check(self) -> None:
        """Verify that no slot has two records, and none that is younger than the slot; raises PactViolation."""
        for slot_class, queue in enumerate(self._queues):
            slots = [slot for slot in queue.slots() if self._queued[slot] == slot_class + 1]
            twice = len(set(slots)) < len(slots) and len(self._queues) == 1
            if twice or self._queued.count(slot_class + 1) != len(set(slots)):
                raise PactViolation(f"the eviction queue and its marks disagree: {len(slots)} records")
            if queue.records != len(list(queue.slots())) or queue.later.keys() != set(queue.spans):
                raise PactViolation(f"the eviction queue counts {queue.records} records and has others")
            recorded = [
                *queue.due,
                *((span << _SPAN_SHIFT, slot) for span in queue.later for slot in queue.later[span]),
            ]
            for tick, slot in recorded:
                if tick > self.used[slot]:
                    raise PactViolation(f"slot {slot} is queued as younger than its last use")
            if min(queue.later, default=queue.due_until + 1) <= queue.due_until:
                raise PactViolation("a span of the eviction queue is due and not sorted")

    def queued(self, slot: int) -> bool:
        """Whether `slot` has a record in the queue."""
        return bool(self._queued[slot])

    def __len__(self) -> int:
        """Records in the longest queue, stale ones included; never more than the number of slots."""
        return max(queue.records for queue in self._queues)
