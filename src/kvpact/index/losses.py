"""How an index loses blocks: by eviction, by a drop with all after them, and for memory that changes its class.

Owns no state of its own: that of rows is in `table.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey
from kvpact.index.key_table import FEW
from kvpact.index.table import CANCELLED, DOOMED, FREE, HELD, NONE, RESERVED, SAVED, Rows

AHEAD_SHARE: Final = 64
"""A class keeps free at most one in so many of the slots that it could free."""

AHEAD_SLOTS: Final = 2048
"""Slots that a class keeps free at most."""

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

    def _make_room(self, slots: int, slot_class: int) -> int | None:
        """Evict until so many slots of a class are free; returns how many blocks went, None if that is not enough.

        If fewer are free now, they stay so, as far as they are kept: others are evicted for all that are wanted.
        """
        free, evictable = len(self.space.free[slot_class]), self._evictable[slot_class]
        if slots > free + evictable:
            return None
        evicted, self._lost = self._lost, 0
        if slots <= free:
            return evicted
        return evicted + self._evict(slot_class, min(slots + min(free, self._kept(slot_class)), free + evictable))

    def evict_ahead(self, most: int) -> int:
        """Evict before room is needed, at most `most` blocks of each class; returns how many blocks went.

        A class keeps `AHEAD_SLOTS` slots free, or one in `AHEAD_SHARE` of those that it could free, if that are fewer:
        so many hits it may cost, and a small place keeps none. Reservations find free slots then, and neighbours among
        them. Of slots that become free only when they are needed each reservation gets what the last ones of some chain
        had, in ever shorter runs; and each run costs something when it is entered, evicted and copied.
        """
        evicted = 0
        for slot_class, free in enumerate(self.space.free):
            kept = self._kept(slot_class)
            lacking = min(kept - len(free), most)
            if lacking >= max(1, min(kept // 2, most)):
                wanted = len(free) + lacking
                self.space.obtain(slot_class, lacking, self)
                evicted += self._evict(slot_class, min(wanted, len(free) + self._evictable[slot_class]))
        return evicted

    def _kept(self, slot_class: int) -> int:
        """Slots of a class that are kept free while nothing needs them."""
        kept = min((len(self.space.free[slot_class]) + self._evictable[slot_class]) // AHEAD_SHARE, AHEAD_SLOTS)
        return kept if kept >= FEW else 0

    def _evict(self, slot_class: int, wanted: int) -> int:
        """Free the least recently used leaves of a class that nothing holds, with their side rows, until `wanted` of
        its slots are free; returns how many blocks went. There must be enough of them.

        The keys of neighbours in the list of free slots are taken away together.
        """
        free, policy, known = self.space.free[slot_class], self._policy, len(self._keys)
        first = len(free)
        while len(free) < wanted:
            row = policy.take(self._evictable_leaf, slot_class)
            if row is None:
                raise PactViolation(
                    f"{self._evictable[slot_class]} blocks count as evictable, but none is queued for eviction"
                )
            if self._first_side[row] != NONE:
                self._keys.remove_each(free[first:])
                self._remove(row)
                first = len(free)
                continue
            top = self._evict_run(row, slot_class, wanted - len(free))
            parent = self._parent[top]
            while not (self._is_side[top] or self._holds[parent]) and self._first_child[parent] == NONE:
                # A chain goes from its end on, without a way through the queue for each block.
                is_next = (policy.used(parent), parent) < policy.bound(slot_class)
                if len(free) >= wanted or self._first_side[parent] != NONE or not is_next:
                    policy.offer(parent, slot_class)
                    break
                top = self._evict_run(parent, slot_class, wanted - len(free))
                parent = self._parent[top]
        self._keys.remove_each(free[first:])
        return known - len(self._keys)

    def _evict_run(self, row: int, slot_class: int, most: int) -> int:
        """Free `row`, a leaf that nothing holds, and of the run before it at most `most` rows that would be next.

        Their keys are still to be taken away. Returns the first of them.
        """
        top, last_use = row, self._policy.used(row)
        if row - self._start[row] >= FEW <= most - 1 and not self._is_side[row]:
            top, last_use = self._next_to_go(row, slot_class, most)
        if top < row:
            self._state_each[top : row + 1] = FREE
        else:
            self._state[row] = FREE
        self._policy.inherit(self._parent[top], last_use)
        self._cut(top)
        self._held -= row + 1 - top
        self._evictable[slot_class] -= row + 1 - top
        self.space.give_back_each(range(row, top - 1, -1))
        return top

    def _next_to_go(self, row: int, slot_class: int, most: int) -> tuple[int, int]:
        """The first of the rows in a run up to `row` that nothing holds, nothing else hangs on, and that are used less
        recently than all else that is queued; and when one of them was last used."""
        bound, last_use = self._policy.bound(slot_class)[0], self._policy.used(row)
        if last_use >= bound:
            return row, last_use
        above = slice(max(self._start[row], row - most + 1), row)
        used = self._policy.used_each[above]
        (stays,) = (self._parted(above) | (self._holds_each[above] != 0) | (used >= bound)).nonzero()
        top = int(stays[-1]) + 1 if len(stays) else 0
        return above.start + top, int(used[top:].max(initial=last_use))

    def _remove(self, top: int) -> list[tuple[BlockKey, int]]:
        """Drop `top` and all after it, children first."""
        order = self._subtree(top)
        self._unlink(top)
        order.reverse()
        at = np.array(order, np.int64)
        removed = list(zip(self._keys.keys(at), order, strict=True))
        self._keys.remove_each(at)
        for row in order:
            self._policy.inherit(self._parent[row], self._policy.used(row))
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
            if self._state[row] in (RESERVED, SAVED, HELD):
                self._lost += len(self._remove(row))
