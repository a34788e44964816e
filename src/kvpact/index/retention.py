"""Retention: chains that are evicted after all others for a time, and never locked.

Owns which rows are retained, by which chains, and until when; and the only user of each row's block. Knows no keys and
no clock; the policy spares retained rows, and ends the oldest retention where it has nothing else to evict.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvpact.errors import PactViolation
from kvpact.index.key_table import FEW, RowArray, zeros
from kvpact.index.links import Links, selection

EXPIRED_PER_CALL: Final = 256
"""Most retentions that one call ends because their time has passed: less than a millisecond. Later calls end others."""

NOBODY: Final = 0
"""Several users of a block, or an unknown one."""


class Retention:
    """Retained chains of an index, each by its last row; a row is retained while any chain through it is.

    Each owner's retentions are its own: they count apart, and the oldest one of an owner ends where that owner has
    nothing else to evict.
    """

    __slots__ = ("_ends", "_links", "_owner_of", "_times", "counts", "counts_each", "rows", "rows_of", "users")

    def __init__(self, links: Links, owner_of: Sequence[int] = (), owners: int = 1) -> None:
        """`owner_of` has the owner of each row's block, of so many; without it all are of owner 0."""
        self._links = links
        self._owner_of = owner_of
        self._ends: list[dict[int, float]] = [{} for _ in range(owners)]
        """Per owner the last row of each retained chain, the oldest first, and the time at which its retention ends."""
        self._times: list[tuple[float, int]] = []
        """Heap of those times, with some that are out of date."""
        self.counts_each, self.counts = zeros(links.root + 1, "i4")
        """Per row 1 if a chain ends there, and 1 for each retained row after it. For reading only."""
        self.counts[links.root] = 1
        self.users = np.zeros(links.root + 1, np.int64)
        """Per row the user that alone has used its block, as `SoleUsers` numbers them, or `NOBODY`."""
        self.rows = 0
        """Retained rows. For reading only."""
        self.rows_of = [0] * owners
        """Per owner its retained rows. For reading only."""

    def owner_of(self, row: int) -> int:
        """Owner of the row's block."""
        return self._owner_of[row] if self._owner_of else 0

    def inserted(self, rows: slice | RowArray) -> None:
        """Note new blocks in these rows, of unknown users."""
        self.users[rows] = NOBODY

    def retain(self, row: int, until: float) -> None:
        """Retain the chain up to `row`; the newest one. What is retained longer already stays so."""
        ends = self._ends[self.owner_of(row)]
        before = ends.pop(row, None)
        if before is None:
            self._hold(row)
        until = until if before is None else max(until, before)
        ends[row] = until
        heapq.heappush(self._times, (until, row))
        if len(self._times) > 2 * sum(map(len, self._ends)) + FEW:
            self._times = [(time, end) for of_owner in self._ends for end, time in of_owner.items()]
            heapq.heapify(self._times)

    def end_oldest(self, owner: int = 0) -> int | None:
        """End the oldest retention of an owner; returns the last row of its chain, None if there is none."""
        row = next(iter(self._ends[owner]), None)
        if row is not None:
            self.end(row)
        return row

    def end_expired(self, now: float) -> list[int]:
        """End retentions whose time has passed, `EXPIRED_PER_CALL` at most; returns the last row of each chain."""
        ended: list[int] = []
        times = self._times
        while times and times[0][0] <= now and len(ended) < EXPIRED_PER_CALL:
            until, row = heapq.heappop(times)
            if self._ends[self.owner_of(row)].get(row) == until:
                self.end(row)
                ended.append(row)
        return ended

    def leave(self, rows: Sequence[int]) -> None:
        """End the retentions of chains that end in these rows, which leave the index; they are linked still."""
        for at in np.flatnonzero(self.counts_each[selection(rows)]).tolist():
            row = rows[at]
            if row in self._ends[self.owner_of(row)]:
                self.end(row)

    def _hold(self, row: int) -> None:
        """Count a chain through `row`. Retained rows are closed under prefixes: of a run only the end can be new."""
        counts = self.counts
        links = self._links
        rows = self.rows_of
        owner = self.owner_of(row)
        while not counts[row]:
            first = links.start[row]
            if row - first >= FEW:
                first = row + 1 - (row + 1 - first - int(np.count_nonzero(self.counts_each[first : row + 1])))
            else:
                first = row
            self.counts_each[first : row + 1] = 1
            self.rows += row + 1 - first
            rows[owner] += row + 1 - first
            row = links.parent[first]
        counts[row] += 1

    def end(self, row: int) -> None:
        """End the retention of the chain that ends in `row`."""
        owner = self.owner_of(row)
        del self._ends[owner][row]
        counts = self.counts
        links = self._links
        rows = self.rows_of
        while counts[row] == 1:
            first = links.start[row]
            if row - first >= FEW:
                others = np.flatnonzero(self.counts_each[first : row + 1] != 1)
                first += int(others[-1]) + 1 if len(others) else 0
            else:
                first = row
            self.counts_each[first : row + 1] = 0
            self.rows -= row + 1 - first
            rows[owner] -= row + 1 - first
            row = links.parent[first]
        counts[row] -= 1

    def check(self) -> None:
        """Verify counts and rows. Raises PactViolation."""
        expected = [0] * len(self.counts)
        expected[self._links.root] = 1
        ends = {end: time for of_owner in self._ends for end, time in of_owner.items()}
        for end in ends:
            row = end
            while not expected[row]:
                expected[row] = 1
                row = self._links.parent[row]
            expected[row] += 1
        if self.counts_each.tolist() != expected:
            raise PactViolation("rows are counted as retained, or not, against the retained chains")
        if self.rows != sum(map(bool, expected)) - 1 or not {*ends.items()} <= {(b, a) for a, b in self._times}:
            raise PactViolation(f"{self.rows} rows count as retained, and others are")
        of_owners = [0] * len(self.rows_of)
        for row in np.flatnonzero(self.counts_each[:-1]).tolist():
            of_owners[self.owner_of(row)] += 1
        if of_owners != self.rows_of or any(self.owner_of(end) != at for at, of in enumerate(self._ends) for end in of):
            raise PactViolation(f"retained rows by owner: {self.rows_of}, not {of_owners}")
