"""Table of another engine on this host, as its neighbours see it: read-only, and nothing in it is trusted.

Owns a neighbour's mapping of the owner's `ColumnFile`, and its leases. A look-up takes no lock and may find what is not
there any more; so a lease comes first, and then the look at what was leased. The owner asks for the leases on a row
once it is not HELD and before it is filled again: so a row that is HELD under a lease, with the right key, stays so.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Final

import numpy as np

from kvpact.errors import DataError
from kvpact.identity.keys import KEY_BYTES, BlockKey
from kvpact.index.column_file import (
    EXTENT_ROWS,
    EXTENTS,
    FACTOR,
    FORMAT,
    FORMAT_AT,
    REFUSED,
    ROWS,
    SEALS,
    SLOT_ROWS,
    Layout,
)
from kvpact.index.key_table import MAX_ROWS, Names, RowArray, hash_bits
from kvpact.index.row_locks import close_in_children, lease, release
from kvpact.index.slot_space import CLASS_SHIFT, EXTENT_SHIFT
from kvpact.index.table import HELD

MOST_LINKS: Final = 32
"""Links of a list that a look-up follows: a list that changes meanwhile may lead anywhere, also in a circle."""

SHARE: Final = 4
"""Part of an owner's rows, one in so many, that all its neighbours together may lease."""

_START: Final = attrgetter("start")

_WHOLE: Final = (1 << 64) - 1

MOST_RUNS: Final = 1024
"""Most runs of rows that all neighbours of an owner together may lease: each makes its calls slower."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Leased blocks in another engine's slots; to be given to `Neighbour.release` once."""

    runs: tuple[range, ...]
    """Their rows, in the order of the blocks."""
    slots: list[int]
    """Their slots by the owner's numbers, in that order."""


class Neighbour:
    """Another engine's table."""

    def __init__(self, columns: int, locks: int, neighbours: int = 1) -> None:
        """Map the file `columns`, and lease by `locks`, a read-only descriptor that nobody else has; both are closed by
        `close`. One of so many `neighbours` of that engine.

        Raises DataError if the file is not one of this release, or not sealed, OSError if it cannot be mapped.
        """
        self._locks = locks
        self._descriptor = columns
        size = os.fstat(columns).st_size
        head_at = size - mmap.PAGESIZE
        if head_at <= 0 or SEALS & ~fcntl.fcntl(columns, fcntl.F_GET_SEALS):
            raise DataError("this is no index of another engine: it is empty, or not sealed")
        self._mapping = mmap.mmap(columns, size, prot=mmap.PROT_READ)
        self._head = np.frombuffer(self._mapping, np.uint64, offset=head_at)
        rows, extents, self._extent_rows, self._slot_rows = (
            int(self._head[at]) for at in (ROWS, EXTENTS, EXTENT_ROWS, SLOT_ROWS)
        )
        layout = Layout.of(rows, extents) if 2 <= rows <= MAX_ROWS >= extents else None
        if layout is None or layout.size != size or int(self._head[FORMAT_AT]) != FORMAT:
            raise DataError("this is no index of another engine of this release: its head or size is another")
        self._factor = int(self._head[FACTOR])
        self._shift = 64 - hash_bits(rows)
        self._words: Names = np.frombuffer(self._mapping, np.uint64, rows * (KEY_BYTES // 8)).reshape(rows, -1)
        self._heads = np.frombuffer(self._mapping, np.int32, 1 << hash_bits(rows), layout.heads)
        self._next = np.frombuffer(self._mapping, np.int32, rows, layout.next)
        self._state = np.frombuffer(self._mapping, np.uint8, rows, layout.state)
        self._few = (memoryview(self._heads.data), memoryview(self._next.data), memoryview(self._state.data))
        self._classes = np.frombuffer(self._mapping, np.int16, extents, layout.classes)
        self._rows = rows - 1  # without the root
        self.share_among(neighbours)
        self._leases = np.zeros(rows, np.int32)  # of each row: one description holds them all, so one unlock ends them
        self._refused: list[range] = []
        """Rows whose locks the kernel did not end."""
        self.leased_rows = 0
        """Rows leased, as often as each is leased."""
        self.leased_runs = 0
        """Runs of rows leased."""
        close_in_children(self)

    def share_among(self, neighbours: int) -> None:
        """Lease as one of so many neighbours from now on; on any thread. What is leased above that stays so."""
        self._most_rows = self._rows // SHARE // neighbours
        self._most_runs = MOST_RUNS // neighbours

    @property
    def is_refused(self) -> bool:
        """True once its owner lets nobody use its blocks any more; to be read at the end of each load, too."""
        return bool(self._head[REFUSED])

    @property
    def descriptor(self) -> int:
        """Descriptor of the file; open until `close`."""
        return self._descriptor

    def find(self, key: BlockKey) -> int:
        """Row of a block that seems to be held, or -1; a microsecond, where `find_each` costs ten times as much."""
        heads, following, states = self._few
        ends = int.from_bytes(key[:8], "little") ^ int.from_bytes(key[-8:], "little")
        row = heads[(ends * self._factor & _WHOLE) >> self._shift] - 1
        for _ in range(MOST_LINKS):
            if not 0 <= row < self._rows:
                break
            if self._mapping[row * KEY_BYTES : (row + 1) * KEY_BYTES] == key:
                return row if states[row] == HELD else -1
            row = following[row] - 1
        return -1

    def has(self, key: BlockKey) -> bool:
        """True if it seems to hold a block: only a lease can tell."""
        return self.find(key) >= 0

    def count(self, keys: Sequence[BlockKey]) -> int:
        """Number of the first blocks of `keys` that it seems to hold, by bisection: a chain is held up to a block."""
        first = 0
        end = len(keys)
        while first < end:
            at = (first + end) // 2 if first else 0
            if self.find(keys[at]) >= 0:
                first = at + 1
            else:
                end = at
        return first

    def find_each(self, names: Names) -> RowArray:
        """Row of each key, by its first word, -1 for the unknown ones. Each may be another block's: only a lease can
        tell."""
        buckets = (names[:, 0] ^ names[:, -1]) * np.uint64(self._factor) >> np.uint64(self._shift)
        rows = self._heads[buckets.astype(np.int64)].astype(np.int64) - 1
        found = np.full(len(names), -1, np.int64)
        left = np.flatnonzero((rows >= 0) & (rows < self._rows))
        for _ in range(MOST_LINKS):
            if not len(left):
                break
            is_it = self._words[rows[left], 0] == names[left, 0]
            found[left[is_it]] = rows[left[is_it]]
            left = left[~is_it]
            rows[left] = self._next[rows[left]].astype(np.int64) - 1
            left = left[(rows[left] >= 0) & (rows[left] < self._rows)]
        found[self._state[found] != HELD] = -1
        return found

    def lease(self, keys: Sequence[BlockKey]) -> Lease | None:
        """Lease the first blocks of `keys`, as many as that engine has, without a wait; None if it has none.

        At most this neighbour's share of its rows and runs.
        """
        runs: list[range] = []
        count = self.count(keys[: max(0, self._most_rows - self.leased_rows)])
        if count:
            names = b"".join(keys[:count])
            first = self.find(keys[0])
            is_run = first >= 0 and self.find(keys[count - 1]) == first + count - 1  # mostly; else the lease finds out
            runs = self._lease_first(names, [range(first, first + count)] if is_run else self._runs_of(names))
        if self.is_refused:
            self._end(runs)
            runs = []
        if not runs:
            return None
        return Lease(tuple(runs), self._slots(runs))

    def _runs_of(self, names: bytes) -> list[range]:
        """Runs of the rows in which the first blocks of these keys seem to be, up to one that is nowhere."""
        rows = self.find_each(_words(names))
        (missing,) = (rows < 0).nonzero()
        rows = rows[: missing[0]] if len(missing) else rows
        if not len(rows):
            return []
        at = np.concatenate(([0], (np.diff(rows) != 1).nonzero()[0] + 1))
        firsts = rows[at].tolist()
        counts = np.diff(at, append=len(rows)).tolist()
        return [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]

    def _lease_first(self, names: bytes, found: Sequence[range]) -> list[range]:
        """Lease the first blocks of these keys, which seem to be in the rows `found`; returns the rows."""
        locked, rest = self._lock(found[: max(0, self._most_runs - self.leased_runs)])
        runs, others = _split(locked, self._num_held(names, _index_of(locked)) if locked else 0)
        self._count(runs, 1)
        self._unlock([*others, *rest])
        return runs

    def _lock(self, found: Sequence[range]) -> tuple[Sequence[range], list[range]]:
        """Lock these rows; returns the runs before the first that the kernel does not grant, and locked ones behind it.

        The highest rows come first: each call goes through the locks on rows below its own.
        """
        refused = {run for run in sorted(found, key=_START, reverse=True) if not lease(self._locks, run)}
        if not refused:
            return found, []
        count = next(at for at, run in enumerate(found) if run in refused)
        return found[:count], [run for run in found[count:] if run not in refused]

    def _num_held(self, names: bytes, rows: slice | RowArray) -> int:
        """Number of the first of these locked rows that are held, by the first of these keys."""
        held = self._state[rows] == HELD
        words = self._words[rows] if isinstance(rows, slice) else self._words.take(rows, 0)  # after the states
        expected = names[: words.nbytes]
        if held.all() and words.tobytes() == expected:
            return len(held)
        return int((held & (words == _words(expected)).all(axis=1)).argmin())

    def _count(self, runs: Sequence[range], more: int) -> None:
        """Count leases of rows: `more` for each, 1 or -1."""
        if runs:
            rows = _index_of(runs)
            self._leases[rows] += more
            self.leased_rows += more * sum(map(len, runs))
            self.leased_runs += more * len(runs)

    def _slots(self, runs: Sequence[range]) -> list[int]:
        """Numbers of the slots of leased rows, which keep them; -1 for a row without payload."""
        if not self._extent_rows and max(run.stop for run in runs) <= self._slot_rows:
            return list(chain.from_iterable(runs))
        rows = _rows_of(runs)
        numbers = rows
        if self._extent_rows:
            extents = rows // self._extent_rows
            numbers = self._classes[extents].astype(np.int64) << CLASS_SHIFT | extents << EXTENT_SHIFT
            numbers |= rows % self._extent_rows
        slots: list[int] = np.where(rows < self._slot_rows, numbers, -1).tolist()
        return slots

    def are_held(self, leased: Lease, keys: Sequence[BlockKey]) -> list[bool]:
        """True for each of these leased blocks that its row still holds, and of which its owner lets be used: to be
        asked after each copy, before the lease ends."""
        rows = _rows_of(leased.runs)
        held = self._state[rows] == HELD
        held &= (self._words[rows] == _words(b"".join(keys))).all(axis=1)
        return [False] * len(keys) if self.is_refused else held.tolist()

    def lease_again(self, leased: Lease, count: int) -> Lease:
        """Lease the first `count` blocks of a lease once more, for a lease of its own."""
        runs, _ = _split(leased.runs, count)
        self._count(runs, 1)
        return Lease(tuple(runs), leased.slots[:count])

    def release(self, leased: Lease) -> None:
        """End a lease, once every copy from its slots has ended. What the kernel refuses is tried at the next end."""
        left = self._refused
        self._refused = []
        self._end(leased.runs)
        for rows in left:
            self._unlock_but_leased(rows)

    def _end(self, runs: Sequence[range]) -> None:
        self._count(runs, -1)
        self._unlock(runs)

    def _unlock(self, runs: Sequence[range]) -> None:
        """Unlock those of these rows that no other lease of this neighbour needs."""
        if not runs:
            return
        if not self.leased_rows:  # by one call, also for the rows between them
            runs = [range(min(run.start for run in runs), max(run.stop for run in runs))]
        elif self._leases[_index_of(runs)].any():
            for run in runs:
                self._unlock_but_leased(run)
            return
        self._refused += [run for run in runs if not release(self._locks, run)]

    def _unlock_but_leased(self, rows: range) -> None:
        (others,) = self._leases[rows.start : rows.stop].nonzero()
        first = rows.start
        for end in [*(others + rows.start).tolist(), rows.stop]:
            if end > first and not release(self._locks, range(first, end)):
                self._refused.append(range(first, end))
            first = end + 1

    def close(self) -> None:
        """End all leases, and close the descriptors. The mapping ends with the last use of it."""
        descriptors = (self._locks, self._descriptor)
        self._locks = self._descriptor = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)


def _rows_of(runs: Sequence[range]) -> RowArray:
    counts = np.fromiter(map(len, runs), np.int64, len(runs))
    ends = counts.cumsum()
    firsts = np.fromiter(map(_START, runs), np.int64, len(runs))
    rows: RowArray = np.repeat(firsts - ends + counts, counts)
    rows += np.arange(len(rows))
    return rows


def _index_of(runs: Sequence[range]) -> slice | RowArray:
    """Index of these rows in a column; of one run a slice, which copies nothing."""
    return slice(runs[0].start, runs[0].stop) if len(runs) == 1 else _rows_of(runs)


def _split(runs: Sequence[range], count: int) -> tuple[list[range], list[range]]:
    """The first `count` rows of `runs`, and the others."""
    first: list[range] = []
    for at, run in enumerate(runs):
        if count < len(run):
            return [*first, *filter(None, [run[:count]])], [run[count:], *runs[at + 1 :]]
        first.append(run)
        count -= len(run)
    return first, []


def _words(names: bytes) -> Names:
    return np.frombuffer(names, np.uint64).reshape(-1, KEY_BYTES // 8)
