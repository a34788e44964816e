"""Retention: chains that are evicted after all others for a time, and never locked.

Owns which rows are retained, by which chains, and until when. Knows no keys and no clock; the policy spares these rows,
and ends the oldest retention where it has nothing else to evict.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvpact.errors import PactViolation
from kvpact.index.key_table import FEW, zeros
from kvpact.index.links import Links, selection

EXPIRED_PER_CALL: Final = 256
"""Most retentions that one call ends because their time has passed: less than a millisecond. Later calls end others."""


class Retention:
    """Retained chains of an index, each by its last row; a row is retained while any chain through it is."""

    __slots__ = ("_ends", "_links", "_times", "counts", "counts_each", "rows")

    def __init__(self, links: Links) -> None:
        self._links = links
        self._ends: dict[int, float] = {}
        """The last row of each retained chain, the oldest first, and the time at which its retention ends."""
        self._times: list[tuple[float, int]] = []
        """Heap of those times, with some that are out of date."""
        self.counts_each, self.counts = zeros(links.root + 1, "i4")
        """Per row 1 if a chain ends there, and 1 for each retained row after it. For reading only."""
        self.counts[links.root] = 1
        self.rows = 0
        """Retained rows. For reading only."""

    def retain(self, row: int, until: float) -> None:
        """Retain the chain up to `row`; the newest one. What is retained longer already stays so."""
        before = self._ends.pop(row, None)
        if before is None:
            self._hold(row)
        until = until if before is None else max(until, before)
        self._ends[row] = until
        heapq.heappush(self._times, (until, row))
        if len(self._times) > 2 * len(self._ends) + FEW:
            self._times = [(time, end) for end, time in self._ends.items()]
            heapq.heapify(self._times)

    def end_oldest(self) -> int | None:
        """End the oldest retention; returns the last row of its chain, None if there is none."""
        row = next(iter(self._ends), None)
        if row is not None:
            self.end(row)
        return row

    def end_expired(self, now: float) -> list[int]:
        """End retentions whose time has passed, `EXPIRED_PER_CALL` at most; returns the last row of each chain."""
        ended: list[int] = []
        times = self._times
        while times and times[0][0] <= now and len(ended) < EXPIRED_PER_CALL:
            until, row = heapq.heappop(times)
            if self._ends.get(row) == until:
                self.end(row)
                ended.append(row)
        return ended

    def leave(self, rows: Sequence[int]) -> None:
        """End the retentions of chains that end in these rows, which leave the index; they are linked still."""
        for at in np.flatnonzero(self.counts_each[selection(rows)]).tolist():
            row = rows[at]
            if row in self._ends:
                self.end(row)

    def _hold(self, row: int) -> None:
        """Count a chain through `row`. Retained rows are closed under prefixes: of a run only the end can be new."""
        counts = self.counts
        links = self._links
        while not counts[row]:
            first = links.start[row]
            if row - first >= FEW:
                first = row + 1 - (row + 1 - first - int(np.count_nonzero(self.counts_each[first : row + 1])))
            else:
                first = row
            self.counts_each[first : row + 1] = 1
            self.rows += row + 1 - first
            row = links.parent[first]
        counts[row] += 1

    def end(self, row: int) -> None:
        """End the retention of the chain that ends in `row`."""
        del self._ends[row]
        counts = self.counts
        links = self._links
        while counts[row] == 1:
            first = links.start[row]
            if row - first >= FEW:
                others = np.flatnonzero(self.counts_each[first : row + 1] != 1)
                first += int(others[-1]) + 1 if len(others) else 0
            else:
                first = row
            self.counts_each[first : row + 1] = 0
            self.rows -= row + 1 - first
            row = links.parent[first]
        counts[row] -= 1

    def check(self) -> None:
        """Verify counts and rows. Raises PactViolation."""
        expected = [0] * len(self.counts)
        expected[self._links.root] = 1
        for end in self._ends:
            row = end
            while not expected[row]:
                expected[row] = 1
                row = self._links.parent[row]
            expected[row] += 1
        if self.counts_each.tolist() != expected:
            raise PactViolation("rows are counted as retained, or not, against the retained chains")
        if self.rows != sum(map(bool, expected)) - 1 or not {*self._ends.items()} <= {(b, a) for a, b in self._times}:
            raise PactViolation(f"{self.rows} rows count as retained, and others are")
