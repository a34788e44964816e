"""Slots of several sizes in one memory: its extents, the rows in them, and how memory moves between classes of slots.

Owns which class an extent belongs to and which rows are free, and the rule by which an extent changes its class as use
changes. Knows no keys and no bytes; the index decides what is evicted.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import inf
from typing import Final

from kvpact.errors import PactViolation
from kvpact.index.key_table import RowArray
from kvpact.index.slot_space import CLASS_SHIFT, EXTENT_SHIFT, Blocks, popped, require

MAX_PLACES: Final = 1 << EXTENT_SHIFT
MAX_EXTENTS: Final = 1 << CLASS_SHIFT - EXTENT_SHIFT

MIN_ROWS: Final = 2
"""Rows that each class has at least: one block being served and one being saved."""

MARGIN: Final = 1.15
"""Ratio of ages that moves an extent: of the giver's least recently used block to the taker's, both as after the move.
Its square is the change in the use of two classes that returns the extent. On a trace of conversations 1.25 hits less
where memory is short, and 1.1 moves up to four times as many extents and hits no more (research/hybrid_trace.py)."""

CANDIDATES: Final = 4
"""Extents that are looked at for a move, so that it costs the same however large the memory is."""

SAMPLES: Final = 4
"""Rows that are looked at in each of them."""

_NOBODY: Final = -1


class ClassedSlots:
    """Several classes of slots in one memory, which is cut into extents of equal size.

    An extent belongs to one class, or to none. Row `extent * stride + place` is a place of an extent, `stride` being
    the most places that a class has in one; what a row names does not change while it is in use. A class without
    payload takes no memory: its rows come after all others, as many as it was given.

    Extents that no class has go to whoever asks first, but for the `MIN_ROWS` of each other class. After that a class
    that lacks rows evicts its own blocks, and gets another's extent when both hold:

    - after the move the giver's least recently used block would still be `MARGIN` times as old as the taker's, if ages
      are as the memory they have. So an extent cannot return while the use of both classes is what it was;
    - the taker has lacked as many rows as an extent has for it, while that was so without a break. So whatever the use
      is, moves take no more extents than the takers' own lacks would have filled; and a class that alone is used from
      now on gets all but the minimum of the others after it has lacked about twice the rows of the whole memory.

    How an index uses it, where `c` is a block's class:

    - the free slots of a class are `free[c]`; `take` and `give_back` take the place of `pop` and `append`;
    - a reservation of n rows that finds fewer free ones calls `obtain(c, n - len(free[c]), blocks)` once, before it
      counts what it can evict of this class, and evicts what is still lacking. The chain that is extended is held
      meanwhile; what `Blocks.drop_rows` has removed was evicted by the reservation;
    - each class has an eviction queue, `Blocks.oldest(c)` is its next victim; a slot is ordered by its `number(row)`.
    """

    __slots__ = (
        "_class_of",
        "_draining",
        "_empty",
        "_extents",
        "_hands",
        "_lacked",
        "_num_extents",
        "_out",
        "_pseudo",
        "_spare",
        "extent_rows",
        "free",
        "is_plain",
        "moved",
        "num_rows",
        "places",
        "slot_rows",
        "usable",
    )

    def __init__(
        self, places: Sequence[int], num_extents: int, usable: int | None = None, rows_without_payload: int = 0
    ) -> None:
        """Divide `num_extents` extents. `places`: per class, its slots in an extent, 0 without payload; each class
        without payload has `rows_without_payload` rows.

        Only the first `usable` extents are handed out, until `use` says otherwise; None: all.
        """
        if not places or max(places) >= MAX_PLACES or min(places) < 0 or not 0 <= num_extents < MAX_EXTENTS:
            raise PactViolation(f"{num_extents} extents of {list(places)} places cannot be numbered")
        self.places = tuple(places)
        """Per class, slots in an extent."""
        self.moved = 0
        """Extents that one class has lost to another."""
        self.is_plain = False
        self._num_extents = num_extents
        self.usable = num_extents if usable is None else usable
        self.extent_rows = max(1, *places)
        self._pseudo = -(-rows_without_payload // self.extent_rows)
        """Extents that each class without payload has, beyond all others."""
        self.num_rows = (num_extents + self._pseudo * self.places.count(0)) * self.extent_rows
        self.slot_rows = num_extents * self.extent_rows
        self._class_of = memoryview(array("h", bytes(2 * (self.num_rows // self.extent_rows))))
        self._reset()

    def _reset(self) -> None:
        count = self.num_rows // self.extent_rows
        self.free: tuple[list[int], ...] = tuple([] for _ in self.places)
        self._class_of[:] = array("h", [_NOBODY]) * count
        self._out = array("i", bytes(4 * count))
        """Number of rows of each extent that were taken and not given back."""
        self._extents: tuple[list[int], ...] = tuple([] for _ in self.places)
        """Extents of each class, in the order in which it got them."""
        self._empty = [0 for _ in self.places]
        """Number of each class's extents without a row in use."""
        self._hands = [0 for _ in self.places]
        """Place in each class's extents from which the search for one to give goes on."""
        self._lacked = [0 for _ in self.places]
        """Rows that each class has lacked since it last got an extent, or had no right to one."""
        self._draining: set[int] = set()
        """Withdrawn extents with rows in use."""
        self._spare = list(reversed(range(self.usable)))
        extent = self._num_extents
        for slot_class, places in enumerate(self.places):
            if not places:
                for pseudo in range(extent, extent + self._pseudo):
                    self._assign(pseudo, slot_class)
                extent += self._pseudo

    # Rows

    def take(self, count: int, slot_class: int = 0) -> Sequence[int]:
        """See `SlotSpace`. The extent of each row counts as used."""
        rows = popped(self.free[slot_class], count)
        out = self._out
        for row in rows:
            extent = row // self.extent_rows
            self._empty[slot_class] -= not out[extent]
            out[extent] += 1
        return rows

    def give_back(self, row: int) -> None:
        """See `SlotSpace`. Raises PactViolation for a row of an extent that has none in use."""
        extent = row // self.extent_rows
        left = self._out[extent] - 1
        if left < 0:
            raise PactViolation(f"row {row} was given back already, or never taken")
        self._out[extent] = left
        slot_class = self._class_of[extent]
        if extent not in self._draining:
            self.free[slot_class].append(row)
            if not left:
                self._empty[slot_class] += 1
        elif not left:
            self._draining.remove(extent)
            self._class_of[extent] = _NOBODY
            if extent < self.usable:
                self._spare.insert(0, extent)

    def give_back_each(self, rows: range) -> None:
        """See `SlotSpace`. Each row may free its extent."""
        for row in rows:
            self.give_back(row)

    def class_of(self, row: int) -> int:
        """Class of the row's extent."""
        return self._class_of[row // self.extent_rows]

    def number(self, row: int) -> int:
        """See `SlotSpace`. Of a row without payload: -1."""
        extent, place = divmod(row, self.extent_rows)
        if extent >= self._num_extents:
            return -1
        return self._class_of[extent] << CLASS_SHIFT | extent << EXTENT_SHIFT | place

    def move_classes(self, memory: memoryview) -> None:
        """See `SlotSpace`. A class does not change by it."""
        memory[:] = self._class_of
        self._class_of = memory

    def extents(self, slot_class: int) -> Sequence[int]:
        """Extents of a class, in the order in which it got them."""
        return self._extents[slot_class] if self.places[slot_class] else ()

    # Extents

    def use(self, usable: int, in_use: Callable[[int], bool] = lambda _: False) -> None:
        """See `SlotSpace`. A withdrawn extent that is in use still is handed out when it is not."""
        new = range(self.usable, min(usable, self._num_extents))
        self._spare[:0] = [extent for extent in reversed(new) if extent not in self._draining]
        self.usable += len(new)

    def withdraw(self, usable: int) -> list[int]:
        """See `SlotSpace`. An extent with rows in use is withdrawn when the last of them is given back."""
        withdrawn = range(usable, self.usable)
        self.usable -= len(withdrawn)
        self._spare = [extent for extent in self._spare if extent < self.usable]
        rows: list[int] = []
        for extent in withdrawn:
            if self._class_of[extent] != _NOBODY and extent not in self._draining:
                rows += self._rows_of(extent)
                self._take_away(extent)
        return rows

    def obtain(self, slot_class: int, lacking: int, blocks: Blocks) -> int:
        """See `SlotSpace`. Spare extents first, then empty ones of other classes, then one by the rule above."""
        places = self.places[slot_class]
        got = 0
        if not places:
            return 0
        while got * places < lacking and (extent := self._unused_extent(slot_class)) is not None:
            self._assign(extent, slot_class)
            got += 1
        if got * places >= lacking:
            return got
        self._lacked[slot_class] += lacking - got * places
        while (giver := self._giver(slot_class, blocks)) is not None:
            if self._extents[slot_class] and self._lacked[slot_class] < places:
                return got
            if not self._move(giver, slot_class, blocks):
                return got
            self._lacked[slot_class] = max(0, self._lacked[slot_class] - places)
            got += 1
        self._lacked[slot_class] = 0
        return got

    def restore(self, used: Mapping[int, Sequence[int] | RowArray]) -> None:
        """See `SlotSpace`. Raises PactViolation for a row that its class cannot have."""
        self._reset()
        in_use = {int(row): slot_class for slot_class, rows in used.items() for row in rows}
        for row, slot_class in in_use.items():
            extent = row // self.extent_rows
            if extent in self._spare:
                self._spare.remove(extent)
                self._assign(extent, slot_class)
            if self._class_of[extent] != slot_class or row not in self._rows_of(extent):
                raise PactViolation(f"row {row} cannot be one of class {slot_class}")
            self._empty[slot_class] -= not self._out[extent]
            self._out[extent] += 1
        for free in self.free:
            free[:] = [row for row in free if row not in in_use]

    def _rows_of(self, extent: int) -> range:
        """Rows of an extent that a class has."""
        start = extent * self.extent_rows
        return range(start, start + (self.places[self._class_of[extent]] or self.extent_rows))

    def _assign(self, extent: int, slot_class: int) -> None:
        self._class_of[extent] = slot_class
        self._extents[slot_class].append(extent)
        self._empty[slot_class] += 1
        self.free[slot_class][:0] = reversed(self._rows_of(extent))

    def _take_away(self, extent: int) -> None:
        """Take an extent from its class: free rows at once, the others when they are given back."""
        slot_class = self._class_of[extent]
        rows = self._rows_of(extent)
        self._extents[slot_class].remove(extent)
        self.free[slot_class][:] = [row for row in self.free[slot_class] if row not in rows]
        if self._out[extent]:
            self._draining.add(extent)
        else:
            self._class_of[extent] = _NOBODY
            self._empty[slot_class] -= 1

    # The division among classes

    def _short_of_minimum(self, slot_class: int) -> int:
        """Extents that the class lacks for its `MIN_ROWS`; negative if it has more."""
        places = self.places[slot_class]
        return -(-MIN_ROWS // places) - len(self._extents[slot_class]) if places else 0

    def _unused_extent(self, taker: int) -> int | None:
        """Extent without rows in use that the class may have; it belongs to no class now. None if there is none."""
        others = [each for each in range(len(self.places)) if each != taker]
        owed = sum(max(0, self._short_of_minimum(each)) for each in others)
        if len(self._spare) > (owed if self._short_of_minimum(taker) <= 0 else 0):
            return self._spare.pop()
        for each in others:
            if self._empty[each] and self._short_of_minimum(each) < 0:
                extent = next(extent for extent in self._extents[each] if not self._out[extent])
                self._take_away(extent)
                self.moved += 1
                return extent
        return None

    def _giver(self, taker: int, blocks: Blocks) -> int | None:
        """Class that has to give an extent to `taker`, if any: the one with the oldest blocks."""
        wanted = MARGIN * self._age(taker, 1, blocks)
        ages = {
            each: self._age(each, -1, blocks)
            for each in range(len(self.places))
            if each != taker and self._short_of_minimum(each) < 0 and blocks.oldest(each) is not None
        }
        giver = max(ages, key=ages.__getitem__, default=None)
        return giver if giver is not None and ages[giver] >= wanted else None

    def _age(self, slot_class: int, more: int, blocks: Blocks) -> float:
        """Ticks since the last use of the block that the class evicts next, as with so many extents more; 0 if it has
        nothing to evict."""
        count = len(self._extents[slot_class])
        row = blocks.oldest(slot_class)
        if row is None or not count:
            return 0.0
        return (blocks.now - (blocks.last_use(row) or 0)) * (count + more) / count

    def _move(self, giver: int, taker: int, blocks: Blocks) -> bool:
        """Move the extent of `giver` whose blocks are the oldest; returns False if all candidates are needed."""
        for extent in self._candidates(giver, blocks):
            rows = self._rows_of(extent)
            if not any(map(blocks.is_needed, rows)):
                blocks.drop_rows(rows)
                if self._out[extent]:  # neighbours lease some of them
                    continue
                self._take_away(extent)
                self._assign(extent, taker)
                self.moved += 1
                return True
        return False

    def _candidates(self, giver: int, blocks: Blocks) -> list[int]:
        """Extents of a class to try, the ones with the oldest blocks first: the victim's and the next in turn."""
        extents = self._extents[giver]
        victim = blocks.oldest(giver)
        hand = self._hands[giver] = self._hands[giver] % len(extents)
        self._hands[giver] += CANDIDATES
        looked_at = dict.fromkeys([] if victim is None else [victim // self.extent_rows])
        looked_at.update(dict.fromkeys((extents[hand:] + extents[:hand])[:CANDIDATES]))
        ages = {extent: _mean_use(self._rows_of(extent), blocks) for extent in looked_at}
        return sorted((extent for extent, use in ages.items() if use < inf), key=ages.__getitem__)

    def check(self) -> None:
        """Verify that every extent has one owner, and that its free rows add up. Raises PactViolation."""
        owned = [*chain(*self._extents), *self._spare, *self._draining]
        require(len(set(owned)) == len(owned), "an extent belongs to two")
        reachable = {*range(self.usable), *range(self._num_extents, len(self._out)), *self._draining}
        require(set(owned) == reachable, "an extent is lost")
        for slot_class, extents in enumerate(self._extents):
            free = self.free[slot_class]
            require(len(set(free)) == len(free), f"a row of class {slot_class} is free twice")
            require(all(self._class_of[extent] == slot_class for extent in extents), "an extent has another class")
            rows = set().union(*map(self._rows_of, extents))
            require(rows.issuperset(free), f"class {slot_class} has a free row in an extent that is not its own")
            out = sum(self._out[extent] for extent in extents)
            require(len(rows) == len(free) + out, f"the rows of class {slot_class} do not add up")
            empty = sum(not self._out[extent] for extent in extents)
            require(empty == self._empty[slot_class], f"class {slot_class} counts its empty extents wrongly")
        require(all(self._out[extent] for extent in self._draining), "a withdrawn extent without rows in use is kept")
        require(not any(self._out[extent] for extent in self._spare), "a spare extent has rows in use")


def _mean_use(rows: range, blocks: Blocks) -> float:
    """Tick of the last use of their blocks, on average, by a sample; infinite if one is needed."""
    uses = [blocks.last_use(row) for row in rows[:: -(-len(rows) // SAMPLES)]]
    return sum(inf if use is None else use for use in uses) / len(uses)
