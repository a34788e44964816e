"""Claims of an owner to its own rows: a row that a neighbour leases is not used again before the lease has ended.

Owns the rows that are in no table and wait for that. Asks the kernel when a row leaves the table, which is before
anybody fills it again: the row is not HELD by then, so a neighbour that locks it later finds that, and lets go.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from kvpact.index.row_locks import LockFile

MOST_CALLS: Final = 16
"""Calls of the kernel for one run of rows at most; what is not known to be free by then waits."""

RETRIED_RUNS: Final = 8
"""Runs of waiting rows that are asked for again at a time."""


class Claims:
    """Rows of one index that neighbours may lease, by `locks`."""

    __slots__ = ("_locks", "_waiting")

    def __init__(self, locks: LockFile) -> None:
        self._locks = locks
        self._waiting: deque[range] = deque()

    def granted(self, rows: range) -> list[range]:
        """Runs of `rows` that nobody leases; the other rows wait. None of them is HELD any more."""
        free: list[range] = []
        left = [rows]
        for _ in range(MOST_CALLS):
            if not left:
                break
            part = left.pop()
            leased = self._locks.leased(part)
            if leased is None:
                free.append(part)
                continue
            self._waiting.append(leased)
            left += [some for some in (range(part.start, leased.start), range(leased.stop, part.stop)) if some]
        self._waiting += left
        return free

    def retried(self) -> list[range]:
        """Waiting rows that nobody leases any more; of many, `RETRIED_RUNS` in turn are looked at."""
        return [
            free
            for rows in [self._waiting.popleft() for _ in range(min(RETRIED_RUNS, len(self._waiting)))]
            for free in self.granted(rows)
        ]

    def count_leased(self, rows: range) -> int:
        """Number of `rows` that neighbours lease, by a call for each end of a run; on any thread."""
        count = 0
        left = [rows]
        while left:
            part = left.pop()
            leased = self._locks.leased(part) if part else None
            if leased is not None:
                count += len(leased)
                left += [range(part.start, leased.start), range(leased.stop, part.stop)]
        return count

    @property
    def waiting(self) -> list[range]:
        """Rows that are in no table and not free, because neighbours lease them, or did when they were asked for."""
        return [*self._waiting]
