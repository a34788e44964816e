"""The links between the rows of an index: which block each has, and which it follows.

Owns keys, parents and children, and nothing of what becomes of a block.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from kvpact.identity.keys import BlockKey

ROOT: Final[BlockKey] = b""
"""The parent of a chain's first block."""

NONE: Final = -1


class Links:
    """Rows as chains, by numbers. The row after the last one is the root, the parent of all first blocks.

    A row has two kinds of children: the next rows of chains, and the *side* rows, which hang on it and have none.
    """

    __slots__ = (
        "_first_child",
        "_first_side",
        "_is_side",
        "_keys",
        "_next",
        "_parent",
        "_previous",
        "_root",
        "_rows",
        "num_slots",
    )

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._root = num_slots
        self._clear_links()

    def _clear_links(self) -> None:
        rows = self.num_slots + 1
        self._keys: list[BlockKey] = [ROOT] * rows
        self._rows: dict[BlockKey, int] = {ROOT: self._root}
        self._is_side = bytearray(rows)
        links = (array("i", [NONE]) * rows for _ in range(5))
        self._parent, self._first_child, self._first_side, self._next, self._previous = links

    def __len__(self) -> int:
        """Blocks known by key: held, saved and reserved; not the dropped ones that still occupy a slot."""
        return len(self._rows) - 1

    def _link(self, key: BlockKey, parent: int, row: int, *, is_side: bool) -> None:
        """Enter `key` after `parent` into the unused `row`."""
        first = self._first_side if is_side else self._first_child
        self._is_side[row] = is_side
        self._rows[key] = row
        self._keys[row] = key
        self._parent[row] = parent
        self._previous[row] = NONE
        self._next[row] = following = first[parent]
        if following != NONE:
            self._previous[following] = row
        first[parent] = row

    def _link_chain(self, keys: Sequence[BlockKey], parent: int, rows: Sequence[int]) -> None:
        """Enter `keys`, one after the other, after `parent` into the unused `rows`."""
        if not rows:
            return
        self._link(keys[0], parent, rows[0], is_side=False)
        for before, row, key in zip(rows, rows[1:], keys[1:], strict=False):
            self._is_side[row] = False
            self._rows[key] = row
            self._keys[row] = key
            self._parent[row] = before
            self._previous[row] = self._next[row] = NONE
            self._first_child[before] = row

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
