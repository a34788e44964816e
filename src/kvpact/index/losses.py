"""What an index loses when room is needed: by eviction, and for memory that changes its class.

Owns the number of blocks lost to such memory that nobody was told. What is lost is no longer found; how a row leaves
its chain is in `table.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvpact.errors import PactViolation
from kvpact.index.key_table import FEW
from kvpact.index.table import FREE, HELD, NONE, RESERVED, SAVED, Table

AHEAD_SHARE: Final = 64
"""A class keeps free at most one in so many of the slots that it could free."""

AHEAD_SLOTS: Final = 2048
"""Slots that a class keeps free at most."""

FAR: Final = 256
"""Blocks after which nobody looks further for the last use of a chain."""


class Losses:
    """Makes room in a table; the `Blocks` that its slot space asks about."""

    __slots__ = ("_lost", "_table")

    def __init__(self, table: Table) -> None:
        self._table = table
        self._lost = 0
        """Blocks that extents lost when they changed their class, until a reservation tells it."""

    def make_room(self, slots: int, slot_class: int) -> int | None:
        """Evict until so many slots of a class are free; returns how many blocks went, None if that is not enough.

        If fewer are free now, they stay so, as far as they are kept: others are evicted for all that are wanted.
        """
        free, evictable = len(self._table.space.free[slot_class]), self._table.evictable[slot_class]
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
        evicted, space = 0, self._table.space
        for slot_class, free in enumerate(space.free):
            kept = self._kept(slot_class)
            lacking = min(kept - len(free), most)
            if lacking >= max(1, min(kept // 2, most)):
                wanted = len(free) + lacking
                space.obtain(slot_class, lacking, self)
                evicted += self._evict(slot_class, min(wanted, len(free) + self._table.evictable[slot_class]))
        return evicted

    def _kept(self, slot_class: int) -> int:
        """Slots of a class that are kept free while nothing needs them."""
        free = self._table.space.free[slot_class]
        kept = min((len(free) + self._table.evictable[slot_class]) // AHEAD_SHARE, AHEAD_SLOTS)
        return kept if kept >= FEW else 0

    def _evict(self, slot_class: int, wanted: int) -> int:
        """Free the least recently used leaves of a class that nothing holds, with their side rows, until `wanted` of
        its slots are free; returns how many blocks went. There must be enough of them.

        The keys of neighbours in the list of free slots are taken away together.
        """
        table, free = self._table, self._table.space.free[slot_class]
        policy, keys, first_side = table.policy, table.keys, table.first_side
        known, first = len(keys), len(free)
        while len(free) < wanted:
            row = policy.take(table.evictable_leaf, slot_class)
            if row is None:
                evictable = table.evictable[slot_class]
                raise PactViolation(f"{evictable} blocks count as evictable, but none is queued for eviction")
            if first_side[row] != NONE:
                keys.remove_each(free[first:])
                table.remove(row)
                first = len(free)
                continue
            top = self._evict_run(row, slot_class, wanted - len(free))
            parent = table.parent[top]
            while not (table.is_side[top] or table.holds[parent]) and table.first_child[parent] == NONE:
                # A chain goes from its end on, without a way through the queue for each block.
                is_next = (policy.used[parent], parent) < policy.bound(slot_class)
                if len(free) >= wanted or first_side[parent] != NONE or not is_next:
                    policy.offer(parent, slot_class)
                    break
                top = self._evict_run(parent, slot_class, wanted - len(free))
                parent = table.parent[top]
        keys.remove_each(free[first:])
        return known - len(keys)

    def _evict_run(self, row: int, slot_class: int, most: int) -> int:
        """Free `row`, a leaf that nothing holds, and of the run before it at most `most` rows that would be next.

        Their keys are still to be taken away. Returns the first of them.
        """
        table = self._table
        top, last_use = row, table.policy.used[row]
        if row - table.start[row] >= FEW <= most - 1 and not table.is_side[row]:
            top, last_use = self._next_to_go(row, slot_class, most)
        table.policy.inherit(table.parent[top], last_use)
        table.free_end(top, row, slot_class)
        return top

    def _next_to_go(self, row: int, slot_class: int, most: int) -> tuple[int, int]:
        """The first of the rows in a run up to `row` that nothing holds, nothing else hangs on, and that are used less
        recently than all else that is queued; and when one of them was last used."""
        table, policy = self._table, self._table.policy
        bound, last_use = policy.bound(slot_class)[0], policy.used[row]
        if last_use >= bound:
            return row, last_use
        above = slice(max(table.start[row], row - most + 1), row)
        used = policy.used_each[above]
        (stays,) = (table.parted(above) | (table.holds_each[above] != 0) | (used >= bound)).nonzero()
        top = int(stays[-1]) + 1 if len(stays) else 0
        return above.start + top, int(used[top:].max(initial=last_use))

    # What a space asks when it moves memory from one class to another

    @property
    def now(self) -> int:
        """The tick of the last use of any block."""
        return self._table.policy.tick

    def oldest(self, slot_class: int) -> int | None:
        """The row of this class that would be evicted next; None if all are free, or needed."""
        return self._table.policy.first(self._table.evictable_leaf, slot_class)

    def is_needed(self, row: int) -> bool:
        """Whether the row cannot be freed now: a pin, a writer, or a block after it that has one, needs it."""
        state = self._table.state[row]
        return state != FREE and (state != HELD or self._table.holds[row] > 0)

    def last_use(self, row: int) -> int | None:
        """The tick of the last use of the row's block and those after it; 0 of a free row; None if it is needed.

        A chain counts as used now if it goes on for more than `FAR` blocks.
        """
        first_child, used = self._table.first_child, self._table.policy.used
        if self._table.state[row] == FREE:
            return 0
        if self.is_needed(row):
            return None
        use = used[row]
        for _ in range(FAR):
            row = first_child[row]
            if row == NONE:
                return use
            use = max(use, used[row])
        return self.now

    def drop_rows(self, rows: Sequence[int]) -> None:
        """Forget the blocks in these rows, and all after them."""
        for row in rows:
            if self._table.state[row] in (RESERVED, SAVED, HELD):
                self._lost += len(self._table.remove(row))
