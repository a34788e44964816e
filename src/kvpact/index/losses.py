"""Losses of an index when room is needed: by eviction, and by memory that changes its class.

Owns the number of blocks lost to such memory that no reservation has reported yet. A lost block is no longer found;
`table.py` takes its row out of its chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvpact.errors import PactViolation
from kvpact.index.slot_space import kept_free
from kvpact.index.table import FREE, HELD, NONE, RESERVED, SAVED, Table

FAR: Final = 256
"""Most blocks that are looked at for the last use of a chain."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots for a run of keys, in the keys' order, and how many blocks were evicted to make room.

    Many neighbours are a range. Every slot ends with `complete` or `abandon`, exactly once.
    """

    slots: tuple[int, ...] | range
    evicted: int = 0


class Losses:
    """Maker of room in a table; answers its slot space about `Blocks`."""

    __slots__ = ("_lost", "_table")

    def __init__(self, table: Table) -> None:
        self._table = table
        self._lost = 0
        """Blocks that extents lost when they changed their class, until a reservation reports them."""

    def reservable(self, needed: int, wanted: int, slot_class: int) -> int:
        """Slots of a class that a reservation after, or attached to, the row `needed` would get now.

        If more are `wanted` than are free, the space may give the class more memory first.
        """
        table = self._table
        table.hold(needed)
        free = table.space.free[slot_class]
        if wanted > len(free):
            table.space.obtain(slot_class, wanted - len(free), self)
        count = len(free) + table.evictable[slot_class]
        table.release(needed)
        return count

    def take(self, count: int, slot_class: int, needed: int, owner: int) -> Reservation | None:
        """Take so many slots of a class, all or none; nothing of the chain up to the row `needed` is evicted.

        The blocks are the `owner`'s if no row is needed, or else of the owner of that row.
        """
        table = self._table
        if table.shares is not None:
            table.shares.expect(owner if needed == table.root else table.shares.owner_of[needed], count)
        is_free = count <= len(table.space.free[slot_class])
        if not is_free:
            table.hold(needed)
        try:
            evicted = self.make_room(count, slot_class)
        finally:
            if not is_free:
                table.release(needed)
        if evicted is None:
            if table.shares is not None:
                table.shares.expect(owner, 0)
            return None
        slots = table.space.take(count, slot_class)
        return Reservation(slots if isinstance(slots, range) else tuple(slots), evicted)

    def make_room(self, slots: int, slot_class: int) -> int | None:
        """Evict until so many slots of a class are free; returns how many blocks went, None if that is not enough.

        If fewer are free now, they stay so, as far as they are kept: others are evicted for all that are wanted.
        """
        free = len(self._table.space.free[slot_class])
        evictable = self._table.evictable[slot_class]
        if slots > free + evictable:
            return None
        evicted = self._lost
        self._lost = 0
        if slots <= free:
            return evicted
        evicted += self._evict(slot_class, min(slots + min(free, kept_free(free + evictable)), free + evictable))
        if slots > len(self._table.space.free[slot_class]):  # neighbours lease what was evicted
            self._lost = evicted
            return None
        return evicted

    def evict_ahead(self, most: int) -> int:
        """Evict before room is needed, at most `most` blocks of each class; returns how many blocks went.

        A class keeps `AHEAD_SLOTS` slots free, or one in `AHEAD_SHARE` of those that it could free, if that are fewer:
        so many hits it may cost, and a small place keeps none. Reservations find free slots then, and neighbours among
        them. Of slots that become free only when they are needed each reservation gets what the last ones of some chain
        had, in ever shorter runs; and each run costs something when it is entered, evicted and copied.
        """
        evicted = 0
        space = self._table.space
        for slot_class, free in enumerate(space.free):
            kept = kept_free(len(free) + self._table.evictable[slot_class])
            lacking = min(kept - len(free), most)
            if lacking >= max(1, min(kept // 2, most)):
                wanted = len(free) + lacking
                space.obtain(slot_class, lacking, self)
                evicted += self._evict(slot_class, min(wanted, len(free) + self._table.evictable[slot_class]))
        return evicted

    def _evict(self, slot_class: int, wanted: int) -> int:
        """Free leaves of a class that nothing holds, with their side rows, as the policy takes them, until `wanted` of
        its slots are free; returns how many blocks went. There must be enough of them, as far as neighbours
        lease none.

        The keys of neighbours in the list of free slots are taken away together.
        """
        table = self._table
        free = self._table.space.free[slot_class]
        keys = table.keys
        announced = table.announced
        known = len(table.keys)
        first = len(free)
        while len(free) < wanted:
            rows = table.policy.take(table, slot_class, wanted - len(free))
            if rows is None:
                evictable = table.evictable[slot_class]
                if not evictable:  # neighbours lease the others
                    break
                raise PactViolation(f"{evictable} blocks count as evictable, but the policy has none to evict")
            if table.links.first_side[rows[-1]] == NONE:
                table.free_end(rows, slot_class)
                continue
            if len(free) > first:
                if announced is not None:
                    announced.leave(free[first:])
                keys.remove_each(free[first:])
            table.remove(rows[0])
            first = len(free)
        if announced is not None:
            announced.leave(free[first:])
        keys.remove_each(free[first:])
        return known - len(keys)

    # What a space asks when it moves memory from one class to another

    @property
    def now(self) -> int:
        """Tick of the policy's clock."""
        return self._table.policy.now

    def oldest(self, slot_class: int) -> int | None:
        """See `Blocks`: the policy's next row."""
        return self._table.policy.next(self._table, slot_class)

    def is_needed(self, row: int) -> bool:
        """True if the block is being written, or held with a pin on it or after it."""
        state = self._table.state[row]
        return state != FREE and (state != HELD or self._table.holds[row] > 0)

    def last_use(self, row: int) -> int | None:
        """See `Blocks`.

        A chain counts as used now if it goes on for `FAR` blocks or more.
        """
        first_child = self._table.links.first_child
        if self._table.state[row] == FREE:
            return 0
        if self.is_needed(row):
            return None
        rows: list[int] = []
        while row != NONE:
            if len(rows) == FAR:
                return self.now
            rows.append(row)
            row = first_child[row]
        return self._table.policy.last_use(rows)

    def drop_rows(self, rows: Sequence[int]) -> None:
        """See `Blocks`. Counts the dropped blocks as lost."""
        for row in rows:
            if self._table.state[row] in (RESERVED, SAVED, HELD):
                self._lost += len(self._table.remove(row))
