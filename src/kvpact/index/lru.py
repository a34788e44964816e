"""Eviction policy: least recently used first.

Owns the recency of every row and the queue of candidates. Knows no keys and no chains.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from kvpact.errors import PactViolation
from kvpact.index.key_table import FEW, FloatArray, RowArray, zeros
from kvpact.index.policy import Rows
from kvpact.index.retention import Retention

NEVER: Final = 1 << 63
"""Tick after every other."""

_AFTER_STORED: Final = int(np.float64(np.inf).view(np.int64))
"""Tick after every time, which is kept as the bits of its number: those of two numbers that are not negative have
their order."""

_SPAN_SHIFT: Final = 10
"""Ticks of one span, as a power of 2: when a span's turn comes its records are sorted, at most a tenth of a
millisecond of work."""


class _Queue:
    """Records of one class by tick: a heap of those whose turn it is, and the others in spans of ticks, unsorted.

    A record of a span is a row's number and no object: 4 bytes, also in a queue of millions, and nothing for the
    collection of garbage to walk over.
    """

    __slots__ = ("due", "due_until", "later", "records", "spans")

    def __init__(self) -> None:
        self.due: list[tuple[int, int]] = []
        """Heap of (tick, row) up to the span `due_until`."""
        self.due_until = -1
        self.later: dict[int, array[int]] = {}
        """Span -> rows, as they were offered."""
        self.spans: list[int] = []
        """Heap of the keys of `later`."""
        self.records = 0

    def add(self, tick: int, row: int) -> None:
        self.records += 1
        span = tick >> _SPAN_SHIFT
        if span <= self.due_until:
            heapq.heappush(self.due, (tick, row))
        elif (rows := self.later.get(span)) is not None:
            rows.append(row)
        else:
            self.later[span] = array("i", (row,))
            heapq.heappush(self.spans, span)

    def fill(self, ticks: RowArray, rows: RowArray) -> None:
        """Add records, in the order of their ticks, to an empty queue."""
        spans = ticks >> _SPAN_SHIFT
        firsts = np.append(0, np.flatnonzero(spans[1:] != spans[:-1]) + 1).tolist()
        for first, end in zip(firsts, [*firsts[1:], len(rows)], strict=True) if len(rows) else ():
            self.later[int(spans[first])] = array("i", rows[first:end].astype(np.int32).tobytes())
        self.spans = list(self.later)
        self.records = len(rows)

    def pop(self) -> None:
        """Remove the first record of those that are due."""
        heapq.heappop(self.due)
        self.records -= 1

    def next_span(self) -> Sequence[int]:
        """Rows of the next span, which is due from now on."""
        self.due_until = heapq.heappop(self.spans)
        rows = self.later.pop(self.due_until)
        self.records -= len(rows)
        return rows

    def bound(self) -> int:
        """Tick that no record is before."""
        if self.due:
            return self.due[0][0]
        return self.spans[0] << _SPAN_SHIFT if self.spans else NEVER

    def rows(self) -> Iterator[int]:
        yield from (row for _, row in self.due)
        for rows in self.later.values():
            yield from rows


class LeastRecentlyUsed:
    """Recency of `num_rows` rows and, for each of several classes, a queue of those that were once evictable leaves.

    A queue keeps at most one record for a row, however often the row is used, filled and emptied, so its memory is
    bounded by `num_rows` (H51); a row that changes its class may leave one behind. A record may be out of date: uses
    only ever make a row younger, so a record is a lower bound, corrected when it comes up.
    """

    __slots__ = ("_is_outdated", "_outdated", "_queued", "_queues", "_retention", "_used", "_used_each", "now")

    def __init__(self, num_rows: int, classes: int) -> None:
        self.now = 0
        """Uses since the start. For reading only."""
        self._used_each, self._used = zeros(num_rows, "i8")
        """Per row the tick of its last use (an order, not a time), which a block leaves to the one before it; 0 of an
        outdated block."""
        self._queues = [_Queue() for _ in range(classes)]
        self._queued = bytearray(num_rows)
        """Per row the class in whose queue its record counts, plus 1; 0 without one."""
        self._outdated: list[list[int]] = [[] for _ in range(classes)]
        """Per class a heap of rows that were outdated leaves once; they go before all in the queue."""
        self._is_outdated = bytearray(num_rows)
        """Per row the class in whose heap it is, plus 1; 0 without one."""
        self._retention: Retention | None = None

    def spare(self, retention: Retention) -> None:
        """See `EvictionPolicy`: a retained leaf leaves its queue when its turn comes, until it is offered again."""
        self._retention = retention

    def inserted(self, rows: slice | RowArray, slot_class: int, depth: int, left: int) -> None:
        """See `EvictionPolicy`: the depth does not count."""
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        self._used_each[rows] = np.arange(self.now + 1, self.now + 1 + count)
        self.now += count
        if self._retention is not None:
            self._retention.inserted(rows)

    def attached(self, rows: slice | RowArray, slot_class: int, parents: Sequence[int]) -> None:
        """See `EvictionPolicy`: the rows that they are attached to learn of their uses when they are gone."""
        self.inserted(rows, slot_class, 0, 0)

    def used(self, rows: Sequence[int]) -> None:
        """See `EvictionPolicy`. O(1) for each row: blocks before it learn of its use when it is gone."""
        for row in rows:
            self.now += 1
            self._used[row] = self.now

    def outdated(self, rows: Sequence[int], parent: int) -> None:
        """See `EvictionPolicy`: their tick is 0 from now on."""
        self.gone(rows, parent)
        if isinstance(rows, range):
            self._used_each[rows.start : rows.stop] = 0
            return
        for row in rows:
            self._used[row] = 0

    def offered(self, row: int, slot_class: int) -> None:
        """See `EvictionPolicy`. O(log n); nothing happens if it is queued already."""
        mark = slot_class + 1
        if not self._used[row]:
            if self._is_outdated[row] != mark:
                self._is_outdated[row] = mark
                heapq.heappush(self._outdated[slot_class], row)
            if self._queued[row] != mark:
                self._queued[row] = 0  # by a class that the row has left
        elif self._queued[row] != mark:
            self._queued[row] = mark
            self._queues[slot_class].add(self._used[row], row)

    def next(self, rows: Rows, slot_class: int) -> int | None:
        """See `EvictionPolicy`.

        Amortised O(log n): a stale record is dropped once for each time that it was queued, and corrected at most once
        between two uses of its row.
        """
        mark = slot_class + 1
        used = self._used
        outdated = self._outdated[slot_class]
        while outdated:
            row = outdated[0]
            is_leaf = self._is_outdated[row] == mark and rows.evictable_leaf(row)
            if is_leaf and not used[row]:
                return row
            self._drop_outdated(slot_class)
            if is_leaf and not self._queued[row]:  # it was used
                self.offered(row, slot_class)
        queue = self._queues[slot_class]
        due = queue.due
        retention = self._retention
        while True:
            if not due and queue.spans:
                for row in queue.next_span():
                    if self._queued[row] == mark:
                        queue.add(used[row], row)
                continue
            if not due:
                return None
            recorded, row = due[0]
            if self._queued[row] != mark:
                queue.pop()
            elif not rows.evictable_leaf(row) or (retention is not None and retention.counts[row]):
                queue.pop()
                self._queued[row] = 0
            elif recorded < used[row]:
                queue.pop()
                queue.add(used[row], row)
            else:
                return row

    def _first_that_gives_way(self, retention: Retention, rows: Rows, slot_class: int) -> int | None:
        """End retentions of this class, the oldest first, until one of its leaves can go; None if none can."""
        leaf = None
        row = retention.end_oldest(slot_class)
        while leaf is None and row is not None:
            if rows.evictable_leaf(row):
                self.offered(row, slot_class)
            leaf = self.next(rows, slot_class)
            row = retention.end_oldest(slot_class) if leaf is None else None
        return leaf

    def take(self, rows: Rows, slot_class: int, most: int, before: int = NEVER) -> range | None:
        """See `EvictionPolicy`. A leaf goes with those before it that are used less recently than all other leaves, and
        than the tick `before`; without others the oldest retention ends."""
        leaf = self.next(rows, slot_class)
        if leaf is None and self._retention is not None:
            leaf = self._first_that_gives_way(self._retention, rows, slot_class)
        if leaf is None:
            return None
        if self._outdated[slot_class]:  # `next` leaves the leaf as the first
            self._drop_outdated(slot_class)
            bound = 1
        else:
            queue = self._queues[slot_class]
            queue.pop()
            self._queued[leaf] = 0
            bound = queue.bound()
            if before < bound:
                bound = before
        first = rows.evictable_from(leaf, most) if self._used[leaf] < bound else leaf
        if first < leaf:
            stays = self._used_each[first:leaf] >= bound
            if self._retention is not None:
                stays |= self._retention.counts_each[first:leaf] > 0
            (stay,) = stays.nonzero()
            first += int(stay[-1]) + 1 if len(stay) else 0
        return range(first, leaf + 1)

    def _drop_outdated(self, slot_class: int) -> None:
        """Forget the first outdated row of a class."""
        row = heapq.heappop(self._outdated[slot_class])
        if self._is_outdated[row] == slot_class + 1:
            self._is_outdated[row] = 0

    def gone(self, rows: Sequence[int], parent: int) -> None:
        """See `EvictionPolicy`. Their last use counts as one of `parent`, too."""
        if self._retention is not None and self._retention.rows:
            self._retention.leave(rows)
        last_use = self.last_use(rows)
        if last_use > self._used[parent]:
            self._used[parent] = last_use

    def last_use(self, rows: Sequence[int]) -> int:
        """Tick of the latest use among these rows."""
        if len(rows) == 1:
            return self._used[rows[0]]
        if isinstance(rows, range) and len(rows) >= FEW:
            return int(self._used_each[rows.start : rows.stop].max())
        return max(map(self._used.__getitem__, rows))

    def restored(self, rows: RowArray, times: FloatArray) -> None:
        """See `EvictionPolicy`. Stores the bits of the times, which sort like them."""
        self.now = max(self.now, _AFTER_STORED)
        self._used_each[rows] = (np.fmax(times, 0.0) + 0.0).view(np.int64)

    def ranked(self, rows: RowArray) -> RowArray:
        """Rows in the order of their times, by a stable sort."""
        rows = rows[::-1]
        return rows[np.argsort(self._used_each[rows], kind="stable")]

    def begin(self, rows: RowArray, leaves: RowArray) -> None:
        """See `EvictionPolicy`. All leaves stand in the queue of the first class."""
        self._used_each[rows] = np.arange(1, len(rows) + 1)
        self.now = len(rows)
        marks = np.frombuffer(self._queued, np.uint8)
        marks[:] = 0
        marks[leaves] = 1
        self._queues = [_Queue() for _ in self._queues]
        self._outdated = [[] for _ in self._queues]
        self._is_outdated = bytearray(len(self._queued))
        self._queues[0].fill(self._used_each[leaves], leaves)

    def check(self, leaves: Sequence[int]) -> None:
        """See `EvictionPolicy`. No row has two records, and none that is younger than the row."""
        if self._retention is not None:
            self._retention.check()
        for row in leaves:
            is_spared = self._retention is not None and self._retention.counts[row] > 0
            if not (self._queued[row] or self._is_outdated[row] or is_spared):
                raise PactViolation(f"row {row} could be evicted and is not queued")
        for slot_class, queue in enumerate(self._queues):
            rows = [row for row in queue.rows() if self._queued[row] == slot_class + 1]
            twice = len(set(rows)) < len(rows) and len(self._queues) == 1
            if twice or self._queued.count(slot_class + 1) != len(set(rows)):
                raise PactViolation(f"the eviction queue and its marks disagree: {len(rows)} records")
            if queue.records != len(list(queue.rows())) or queue.later.keys() != set(queue.spans):
                raise PactViolation(f"the eviction queue counts {queue.records} records and has others")
            if queue.records > len(self._queued):
                raise PactViolation(f"the eviction queue has outgrown the rows: {queue.records} records")
            recorded = [
                *queue.due,
                *((span << _SPAN_SHIFT, row) for span in queue.later for row in queue.later[span]),
            ]
            for tick, row in recorded:
                if tick > self._used[row] > 0:
                    raise PactViolation(f"row {row} is queued as younger than its last use")
            if min(queue.later, default=queue.due_until + 1) <= queue.due_until:
                raise PactViolation("a span of the eviction queue is due and not sorted")
