"""How an index loses blocks: by eviction, by a drop with all after them, and for memory that changes its class.

Owns no state of its own: that of rows is in `rows.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey
from kvpact.index.links import NONE, ROOT
from kvpact.index.rows import CANCELLED, DOOMED, FREE, HELD, RESERVED, SAVED, Rows

FAR: Final = 256
"""Blocks after which nobody looks further for the last use of a chain."""


class Losses(Rows):
    """Rows that can be lost. What is lost is no longer found; its row is free as soon as nothing needs it."""

    __slots__ = ()

    def _unlink(self, row: int) -> None:
        """Remove `row` from its parent's children."""
        parent = self._parent[row]
        if self._cut(row) and self._holds[parent] == 0:
            self._policy.offer(parent, self._chain_class)

    def _forget(self, row: int) -> tuple[BlockKey, int]:
        """Remove `row` from every lookup."""
        key = self._keys[row]
        del self._rows[key]
        self._keys[row] = ROOT
        self._policy.inherit(self._parent[row], row)
        return key, row

    def _make_room(self, slots: int, slot_class: int) -> tuple[tuple[BlockKey, int], ...] | None:
        """Evict until so many slots of a class are free; returns what was evicted, None if that is not enough."""
        free = self.space.free[slot_class]
        if slots > len(free) + self._evictable[slot_class]:
            return None
        evicted, self._lost = self._lost, []
        if len(free) < slots:
            evicted += self._evict(slot_class, slots)
        return tuple(evicted)

    def _evict(self, slot_class: int, wanted: int) -> list[tuple[BlockKey, int]]:
        """Free the least recently used leaves of a class that nothing holds, with their side rows, until `wanted` of
        its slots are free. There must be enough of them."""
        free, policy = self.space.free[slot_class], self._policy
        evicted: list[tuple[BlockKey, int]] = []
        while len(free) < wanted:
            row = policy.take(self._evictable_leaf, slot_class)
            if row is None:
                raise PactViolation(
                    f"{self._evictable[slot_class]} blocks count as evictable, but none is queued for eviction"
                )
            if self._first_side[row] != NONE:
                evicted += self._remove(row)
                continue
            self._evict_leaf(row, slot_class, evicted)
            parent = self._parent[row]
            while not (self._is_side[row] or self._holds[parent]) and self._first_child[parent] == NONE:
                # A chain goes from its end on, without a way through the queue for each block.
                if len(free) >= wanted or self._first_side[parent] != NONE or not policy.is_next(parent, slot_class):
                    policy.offer(parent, slot_class)
                    break
                row, parent = parent, self._parent[parent]
                self._evict_leaf(row, slot_class, evicted)
        return evicted

    def _evict_leaf(self, row: int, slot_class: int, evicted: list[tuple[BlockKey, int]]) -> None:
        """Free a row that nothing holds and nothing hangs on; its parent may be a leaf then."""
        key = self._keys[row]
        evicted.append((key, row))
        del self._rows[key]
        self._keys[row] = ROOT
        self._policy.inherit(self._parent[row], row)
        self._cut(row)
        self._held -= 1
        self._evictable[slot_class] -= 1
        self._state[row] = FREE
        self.space.give_back(row)

    def _remove(self, top: int) -> list[tuple[BlockKey, int]]:
        """Drop `top` and all after it, children first."""
        removed = []
        order = self._subtree(top)
        self._unlink(top)
        for row in reversed(order):
            removed.append(self._forget(row))
            self._first_child[row] = self._first_side[row] = NONE
            state = self._state[row]
            self._state[row] = DOOMED
            if state == RESERVED:
                self._state[row] = CANCELLED
            elif state == SAVED:
                self._release(row)
            else:
                self._held -= 1
                if self._holds[row] == 0:
                    self._evictable[self.space.class_of(row)] -= 1
                    self._set_free(row)
        return removed

    # What a space asks when it moves memory from one class to another

    @property
    def now(self) -> int:
        """The tick of the last use of any block."""
        return self._policy.tick

    def oldest(self, slot_class: int) -> int | None:
        """The row of this class that would be evicted next; None if all are free, or needed."""
        return self._policy.first(self._evictable_leaf, slot_class)

    def is_needed(self, row: int) -> bool:
        """Whether the row cannot be freed now: a pin, a writer, or a block after it that has one, needs it."""
        return self._state[row] != FREE and (self._state[row] != HELD or self._holds[row] > 0)

    def last_use(self, row: int) -> int | None:
        """The tick of the last use of the row's block and those after it; 0 of a free row; None if it is needed.

        A chain counts as used now if it goes on for more than `FAR` blocks.
        """
        if self._state[row] == FREE:
            return 0
        if self.is_needed(row):
            return None
        use = self._policy.used(row)
        for _ in range(FAR):
            row = self._first_child[row]
            if row == NONE:
                return use
            use = max(use, self._policy.used(row))
        return self.now

    def drop_rows(self, rows: Sequence[int]) -> None:
        """Forget the blocks in these rows, and all after them."""
        for row in rows:
            if self._keys[row] and row != self._root:
                self._lost += self._remove(row)
