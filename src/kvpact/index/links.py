"""The links between the rows of an index: which block each has, and which it follows.

Owns keys, parents and children, and nothing of what becomes of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpact.identity.keys import BlockKey
from kvpact.index.key_table import FEW, KeyTable, RowArray, zeros
from kvpact.index.key_table import NONE as NONE

ROOT: Final[BlockKey] = b""
"""The parent of a chain's first block."""


def selection(rows: Sequence[int]) -> slice | RowArray:
    """Some rows, in this order, as an index of an array: neighbours as a slice, which costs least."""
    if isinstance(rows, range):
        return slice(rows.start, rows.stop)
    first, last = rows[0], rows[-1]
    if last - first == len(rows) - 1 and tuple(rows) == tuple(range(first, last + 1)):
        return slice(first, last + 1)
    return np.array(rows, np.int64)


class Links:
    """Rows as chains, by numbers. The row after the last one is the root, the parent of all first blocks.

    A row has two kinds of children: the next rows of chains, and the *side* rows, which hang on it and have none.

    Blocks that are stored together mostly get neighbouring rows. So each row says where its *run* starts: every row
    from there to it follows its neighbour, as long as any of them is in use. What goes for a chain goes for a few runs,
    each with one step over a part of an array. `_next_each` is an array, `_next` its memory, which is faster for single
    rows; so for all of them.
    """

    __slots__ = (
        "_first_child",
        "_first_child_each",
        "_first_side",
        "_first_side_each",
        "_is_side",
        "_is_side_each",
        "_keys",
        "_next",
        "_next_each",
        "_parent",
        "_parent_each",
        "_previous",
        "_previous_each",
        "_root",
        "_start",
        "_start_each",
        "num_slots",
    )  # fmt: skip

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._root = num_slots
        self._clear_links()

    def _clear_links(self) -> None:
        rows = self.num_slots + 1
        self._keys = KeyTable(rows)
        self._is_side = bytearray(rows)
        self._is_side_each = np.frombuffer(self._is_side, np.uint8)
        self._parent_each, self._parent = zeros(rows, "i4")
        self._first_child_each, self._first_child = zeros(rows, "i4")
        self._first_side_each, self._first_side = zeros(rows, "i4")
        self._next_each, self._next = zeros(rows, "i4")
        self._previous_each, self._previous = zeros(rows, "i4")
        self._start_each, self._start = zeros(rows, "i4")
        self._start[self._root] = self._root
        for links in (self._parent, self._first_child, self._first_side, self._next, self._previous):
            links[self._root] = NONE

    def __len__(self) -> int:
        """Blocks known by key: held, saved and reserved; not the dropped ones that still occupy a slot."""
        return len(self._keys)

    def _link(self, key: BlockKey, parent: int, row: int, *, is_side: bool) -> None:
        """Enter `key` after `parent` into the unused `row`, without children."""
        self._keys.add(key, row)
        first = self._first_side if is_side else self._first_child
        self._is_side[row] = is_side
        self._parent[row] = parent
        self._start[row] = self._start[parent] if parent == row - 1 and not is_side else row
        self._first_child[row] = self._first_side[row] = self._previous[row] = NONE
        self._next[row] = following = first[parent]
        if following != NONE:
            self._previous[following] = row
        first[parent] = row

    def _link_chain(self, keys: Sequence[BlockKey], parent: int, rows: Sequence[int], at: slice | RowArray) -> None:
        """Enter `keys`, one after the other, after `parent` into the unused `rows`, which `at` selects."""
        if len(rows) < FEW:
            for key, row in zip(keys, rows, strict=True):
                self._link(key, parent, row, is_side=False)
                parent = row
            return
        self._keys.add_names(self._keys.names(keys), at)
        self._is_side_each[at] = 0
        for links in (self._first_side_each, self._previous_each, self._next_each):
            links[at] = NONE
        if isinstance(at, slice):
            self._parent_each[at] = np.arange(at.start - 1, at.stop - 1)
            self._first_child_each[at] = np.arange(at.start + 1, at.stop + 1)
            self._start_each[at] = at.start
        else:
            self._parent_each[at[1:]] = at[:-1]
            self._first_child_each[at[:-1]] = at[1:]
            self._start_each[at] = at[_starts(at[1:] == at[:-1] + 1)]
        if parent == rows[0] - 1:
            self._start_each[rows[0] : rows[0] + _neighbours(at)] = self._start[parent]
        first, last = rows[0], rows[-1]
        self._first_child[last] = NONE
        self._parent[first] = parent
        self._next[first] = following = self._first_child[parent]
        if following != NONE:
            self._previous[following] = first
        self._first_child[parent] = first

    def _cut(self, row: int) -> bool:
        """Remove `row` from its parent's children; returns whether the parent's chain ends with the parent now."""
        parent, previous, following = self._parent[row], self._previous[row], self._next[row]
        if following != NONE:
            self._previous[following] = previous
        if previous != NONE:
            self._next[previous] = following
        elif self._is_side[row]:
            self._first_side[parent] = following
        else:
            self._first_child[parent] = following
            return following == NONE
        return False

    def _subtree(self, top: int) -> list[int]:
        """`top` and all rows after it, parents before children, side rows too."""
        order = [top]
        for row in order:
            for child in (self._first_child[row], self._first_side[row]):
                while child != NONE:
                    order.append(child)
                    child = self._next[child]
        return order

    def slots_to(self, row: int, count: int) -> Sequence[int]:
        """The slots of the last `count` blocks of the chain up to that in slot `row`, in order; it has so many.

        Neighbours are a range. A step for each run.
        """
        runs = []
        while count > 0:
            first = max(self._start[row], row - count + 1)
            runs.append(range(first, row + 1))
            count -= row + 1 - first
            row = self._parent[first]
        return runs[0] if len(runs) == 1 else [*chain.from_iterable(reversed(runs))]

    def _parted(self, rows: slice) -> NDArray[np.bool_]:
        """Which of these rows of one run have side rows, or another child than the neighbour that follows them."""
        below = slice(rows.start + 1, rows.stop + 1)
        parted: NDArray[np.bool_] = (
            self._first_side_each[rows] & self._next_each[below] & self._previous_each[below]
        ) != NONE
        return parted


def _starts(follows: np.ndarray) -> RowArray:
    """For rows of which all but the first are marked if they follow their neighbour: where each one's run starts."""
    starts: RowArray = np.maximum.accumulate(np.append(0, np.where(follows, 0, np.arange(1, len(follows) + 1))))
    return starts


def _neighbours(at: slice | RowArray) -> int:
    """How many of the rows, from the first on, are neighbours."""
    if isinstance(at, slice):
        return len(range(at.start, at.stop))
    breaks = np.flatnonzero(at[1:] != at[:-1] + 1)
    return int(breaks[0]) + 1 if len(breaks) else len(at)
