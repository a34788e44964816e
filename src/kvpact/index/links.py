"""Links between the rows of an index: the chains, and the rows attached to them.

Owns parents, children and runs; others read its columns. Knows no keys and no states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpact.errors import PactViolation
from kvpact.index.key_table import FEW, NONE, RowArray, zeros

PARTS: Final = 2
"""In `is_side`: an attached row that a match has used although the chain goes on there."""

MOST_AFTER: Final = 256
"""Most rows after one that lost what was attached to it that are looked at."""

_PART: Final = 1 << 16
"""Number of rows in one pass over all rows, so that temporary arrays stay small."""


def selection(rows: Sequence[int]) -> slice | RowArray:
    """Index of an array for some rows, in this order: neighbours as a slice, which costs least."""
    if isinstance(rows, range):
        return slice(rows.start, rows.stop)
    first = rows[0]
    last = rows[-1]
    if last - first == len(rows) - 1 and tuple(rows) == tuple(range(first, last + 1)):
        return slice(first, last + 1)
    return np.array(rows, np.int64)


class Links:
    """Parents and children of rows. The row after the last one is the root, the parent of all first blocks.

    Columns of numbers and not objects, because a collection of garbage must not walk a million entries in the middle of
    a scheduler's step. `next_each` is an array, `next` its memory, which is faster for single rows; so for all of them.

    A row has two kinds of children: the next rows of chains, and *attached* rows, which have none.

    Blocks that are stored together mostly get neighbouring rows. So each row says where its *run* starts: every row
    from there to it follows its neighbour, as long as any of them is in use. Work on a chain is work on a few runs,
    each with one step over a part of an array.
    """

    __slots__ = (
        "first_child", "first_child_each", "first_side", "first_side_each", "is_side", "is_side_each", "next",
        "next_each", "parent", "parent_each", "previous", "previous_each", "root", "start", "start_each",
    )  # fmt: skip

    def __init__(self, num_rows: int) -> None:
        self.root = num_rows
        rows = num_rows + 1
        self.is_side = bytearray(rows)
        self.is_side_each = np.frombuffer(self.is_side, np.uint8)
        self.parent_each, self.parent = zeros(rows, "i4")
        self.first_child_each, self.first_child = zeros(rows, "i4")
        self.first_side_each, self.first_side = zeros(rows, "i4")
        self.next_each, self.next = zeros(rows, "i4")
        self.previous_each, self.previous = zeros(rows, "i4")
        self.start_each, self.start = zeros(rows, "i4")
        self.start[self.root] = self.root
        for links in (self.parent, self.first_child, self.first_side, self.next, self.previous):
            links[self.root] = NONE

    def add(self, row: int, parent: int, *, is_side: bool) -> None:
        """Link an unused `row`, without children, to `parent`: after it, or attached to it."""
        first = self.first_side if is_side else self.first_child
        self.is_side[row] = is_side
        self.parent[row] = parent
        self.start[row] = self.start[parent] if parent == row - 1 and not is_side else row
        self.first_child[row] = self.first_side[row] = self.previous[row] = NONE
        self.next[row] = following = first[parent]
        if following != NONE:
            self.previous[following] = row
        first[parent] = row

    def add_chain(self, rows: Sequence[int], parent: int) -> slice | RowArray:
        """Link unused `rows`, one after the other, the first one after `parent`; returns their `selection`."""
        at = selection(rows)
        if len(rows) < FEW:
            for row in rows:
                self.add(row, parent, is_side=False)
                parent = row
            return at
        self.is_side_each[at] = 0
        for links in (self.first_side_each, self.previous_each, self.next_each):
            links[at] = NONE
        if isinstance(at, slice):
            self.parent_each[at] = np.arange(at.start - 1, at.stop - 1)
            self.first_child_each[at] = np.arange(at.start + 1, at.stop + 1)
            self.start_each[at] = at.start
        else:
            self.parent_each[at[1:]] = at[:-1]
            self.first_child_each[at[:-1]] = at[1:]
            self.start_each[at] = at[_starts(at[1:] == at[:-1] + 1)]
        if parent == rows[0] - 1:
            self.start_each[rows[0] : rows[0] + _neighbours(at)] = self.start[parent]
        first = rows[0]
        last = rows[-1]
        self.first_child[last] = NONE
        self.parent[first] = parent
        self.next[first] = following = self.first_child[parent]
        if following != NONE:
            self.previous[following] = first
        self.first_child[parent] = first
        return at

    def cut(self, row: int) -> bool:
        """Remove `row` from its parent's children; returns whether the parent's chain ends with the parent now."""
        parent = self.parent[row]
        previous = self.previous[row]
        following = self.next[row]
        if following != NONE:
            self.previous[following] = previous
        if previous != NONE:
            self.next[previous] = following
        elif self.is_side[row]:
            self.first_side[parent] = following
        else:
            self.first_child[parent] = following
            return following == NONE
        return False

    def chain(self, row: int) -> list[int]:
        """Rows of the chain up to `row`, the first one first."""
        rows: list[int] = []
        while row != self.root:
            rows.append(row)
            row = self.parent[row]
        return rows[::-1]

    def subtree(self, top: int) -> list[int]:
        """Rows of the tree below `top`, with it: parents before children, attached rows too."""
        order = [top]
        for row in order:
            for child in (self.first_child[row], self.first_side[row]):
                while child != NONE:
                    order.append(child)
                    child = self.next[child]
        return order

    def note_match(self, rows: Sequence[int]) -> None:
        """Note that a match uses these rows: those attached where the chain goes on already part it there."""
        for row in rows:
            if self.is_side[row] and self.first_child[self.parent[row]] != NONE:
                self.is_side[row] = PARTS

    def passed(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Attached rows of some of these, each with its row, that a request which goes on after `rows` needs no more.

        Not where the chain parts, or where a match has parted from it. Each of `rows` has a row after it.
        """
        found = list[tuple[int, int]]()
        for at in np.flatnonzero(self.first_side_each[selection(rows)] != NONE).tolist() if rows else ():
            row = rows[at]
            side = self.first_side[row] if self.next[self.first_child[row]] == NONE else NONE
            while side != NONE:
                if self.is_side[side] != PARTS:
                    found.append((side, row))
                side = self.next[side]
        return found

    def bare_end(self, row: int) -> list[int]:
        """Rows of a chain's end, its last one first, to which nothing is attached, if `row` is one of them.

        They end where another chain parts. None if the chain goes on for `MOST_AFTER` rows.
        """
        end = row
        for _ in range(MOST_AFTER):
            if end == self.root or self.first_side[end] != NONE:
                return []
            child = self.first_child[end]
            if child == NONE:
                break
            if self.next[child] != NONE:
                return []
            end = child
        else:
            return []
        rows = [end]
        row = self.parent[end]
        while row != self.root and self.first_side[row] == NONE and self.next[self.first_child[row]] == NONE:
            rows.append(row)
            row = self.parent[row]
        return rows

    def parted(self, rows: slice) -> NDArray[np.bool_]:
        """Mask of the rows, of one run, with attached rows or another child than the neighbour that follows."""
        below = slice(rows.start + 1, rows.stop + 1)
        parted: NDArray[np.bool_] = (
            self.first_side_each[rows] & self.next_each[below] & self.previous_each[below]
        ) != NONE
        return parted

    def is_run(self, at: slice | RowArray) -> bool:
        """True if each of these rows is the only child of the one before it, and nothing is attached to that one."""
        rows = np.arange(at.start, at.stop) if isinstance(at, slice) else at
        below = slice(at.start + 1, at.stop) if isinstance(at, slice) else at[1:]
        above = slice(at.start, at.stop - 1) if isinstance(at, slice) else at[:-1]
        alone = self.next_each[below] & self.previous_each[below] & self.first_side_each[above]
        return bool((self.parent_each[below] == rows[:-1]).all() and (alone == NONE).all())

    # Rows of a table of stored blocks: only chains

    def add_stored(self, rows: RowArray, before: RowArray) -> None:
        """Link unused `rows`, each after the row `before` it, which is linked already or among them."""
        self.is_side_each[rows] = 0
        self.first_child_each[rows] = self.first_side_each[rows] = NONE
        self.start_each[rows] = rows
        self.parent_each[rows] = before
        order = np.argsort(before, kind="stable")
        rows = rows[order]
        before = before[order]
        follows = before[1:] == before[:-1]
        first = np.append(True, ~follows)
        last = np.append(~follows, True)
        after = np.append(rows[1:], NONE)
        after[last] = there = self.first_child_each[before[last]]
        self.next_each[rows] = after
        self.previous_each[there[there != NONE]] = rows[last][there != NONE]
        self.previous_each[rows] = np.where(first, NONE, np.append(NONE, rows[:-1]))
        self.first_child_each[before[first]] = rows[first]

    def join_runs(self, in_use: NDArray[np.bool_]) -> None:
        """Enter where each row's run starts, of the rows that are `in_use`."""
        for first in range(0, self.root, _PART):
            end = min(first + _PART, self.root)
            rows = np.arange(first, end)
            joined = in_use[first:end] & (self.parent_each[first:end] == rows - 1)
            if first == 0:
                joined[0] = False
            start = self.start[first - 1] if joined[0] else 0
            self.start_each[first:end] = np.maximum.accumulate(np.where(joined, start, rows))

    def check(self, known: NDArray[np.bool_], dropped: NDArray[np.bool_]) -> None:
        """Verify that chains reach exactly the `known` rows, in O(n log n). Raises PactViolation."""
        rows = np.arange(self.root)
        parent = self.parent_each[: self.root]
        reached = self.subtree(self.root)
        require(len(set(reached)) == len(reached), "a block is reached twice")
        everything = [*np.flatnonzero(known).tolist(), self.root]
        require(sorted(reached) == everything, "the chains do not reach exactly the known blocks")
        apart = np.append(np.cumsum(parent != rows - 1), 0)
        start = self.start_each[: self.root]
        later = (known | dropped) & ((start > rows) | (apart[start] != apart[rows]))
        require_none(later, "the run of slot {row} starts later")
        require_none(known & (self.is_side_each[parent] != 0), "slot {row} is attached to a side block")


def require(condition: bool, what: str) -> None:
    """Raise PactViolation unless the condition holds."""
    if not condition:
        raise PactViolation(f"the block index lost an invariant: {what}")


def require_none(rows: NDArray[np.bool_], what: str) -> None:
    """Raise PactViolation, with the number of the first of these rows, if there is one."""
    if rows.any():
        require(False, what.format(row=int(rows.argmax())))


def _starts(follows: np.ndarray) -> RowArray:
    """Start of each row's run, given for all rows but the first a mark of those that follow their neighbour."""
    starts: RowArray = np.maximum.accumulate(np.append(0, np.where(follows, 0, np.arange(1, len(follows) + 1))))
    return starts


def _neighbours(at: slice | RowArray) -> int:
    """Number of rows, from the first on, that are neighbours."""
    if isinstance(at, slice):
        return len(range(at.start, at.stop))
    breaks = np.flatnonzero(at[1:] != at[:-1] + 1)
    return int(breaks[0]) + 1 if len(breaks) else len(at)
