"""What one place (the arena, a slab) holds: block keys, their slots, the pins on them, and what is evicted next.

Owns the chains of blocks, closed under prefixes: a block is held only if every block before it is. Never touches the
bytes in a slot, a clock or a lock; its owner does I/O and serialises calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey
from kvpact.index.key_table import FEW, RowArray, zeros
from kvpact.index.losses import Losses
from kvpact.index.restoring import Restoring
from kvpact.index.slot_space import PlainSlots, SlotSpace
from kvpact.index.table import CANCELLED, DOOMED, FREE, HELD, NONE, RESERVED, SAVED, Table, selection
from kvpact.index.table import ROOT as ROOT
from kvpact.index.table import State as State


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots for a run of keys, in the keys' order, and how many blocks were evicted to make room.

    Many neighbours are a range. Every slot ends with `complete` or `abandon`, exactly once.
    """

    slots: tuple[int, ...] | range
    evicted: int = 0


@dataclass(eq=False, slots=True)
class Pin:
    """One reference to a block and the whole chain before it; released with `BlockIndex.unpin`, exactly once."""

    key: BlockKey
    slot: int
    active: bool = True


_KNOWN = (RESERVED, SAVED, HELD)


class BlockIndex:
    """Which block lies in which of `num_slots` slots, what may be served, and what is evicted when room is needed."""

    __slots__ = ("_losses", "_pinned", "_pins", "_table", "num_slots", "space")

    def __init__(
        self,
        num_slots: int,
        usable_slots: int | None = None,
        *,
        space: SlotSpace | None = None,
        classes: int = 1,
        chain_class: int = 0,
    ) -> None:
        """Only the first `usable_slots` slots are handed out, until `use_slots` says otherwise; None: all.

        With a `space` its rows are the slots, of so many classes, and the chains' are of `chain_class`.
        """
        if num_slots < 1:
            raise ValueError(f"an index needs at least 1 slot, not {num_slots}")
        self.space: SlotSpace = space or PlainSlots(num_slots, usable_slots)
        """Which slots are free."""
        self.num_slots = self.space.num_rows
        self._table = Table(self.space, classes, chain_class)
        self._losses = Losses(self._table)
        self._pins = zeros(self.num_slots + 1, "i4")[1]
        self._pinned = 0

    def check(self) -> None:
        """Verify every invariant in O(n log n); raise PactViolation naming the first that does not hold."""
        if min(self._pins) < 0 or sum(self._pins) != self._pinned:
            raise PactViolation("the block index lost an invariant: the number of pins is wrong")
        self._table.check(self._pins)

    # Lookups

    def held_prefix(self, keys: Sequence[BlockKey], end: int | None = None) -> int:
        """How many blocks from the start of the chain `keys[:end]` may be served. O(log n) probes (H55)."""
        end = len(keys) if end is None else end
        return self._prefix(keys, end, end - 1, (HELD,))

    def known_prefix(self, keys: Sequence[BlockKey], near: int = 0) -> int:
        """How many blocks from the start of the chain `keys` need not be saved: held, or on their way. O(log n).

        Fewest probes if the first unknown one is `near`.
        """
        return self._prefix(keys, len(keys), near, _KNOWN)

    def _prefix(self, keys: Sequence[BlockKey], end: int, at: int, states: tuple[int, ...]) -> int:
        """The number of blocks of `keys[:end]` from the first on that are in one of `states`; the first probe is `at`.

        By bisection, as a chain is known, and held, up to some block.
        """
        find, state, first = self._table.keys.find, self._table.state, 0
        while first < end:
            row = find(keys[at])
            if row != NONE and state[row] in states:
                first = at + 1
            else:
                end = at
            at = (first + end) // 2
        return first

    def is_held(self, key: BlockKey) -> bool:
        """Whether the block and every block before it are filled."""
        row = self._table.keys.find(key)
        return row != NONE and self._table.state[row] == HELD

    def __contains__(self, key: BlockKey) -> bool:
        return self._table.keys.find(key) != NONE

    def __len__(self) -> int:
        """Blocks known by key: held, saved and reserved; not the dropped ones that still occupy a slot."""
        return len(self._table.keys)

    def slot(self, key: BlockKey) -> int:
        """The slot of a known block. Raises PactViolation if the key is unknown."""
        row = self._table.keys.find(key)
        if row == NONE:
            raise PactViolation(f"block {key.hex()[:16]!r} is not in the index; ask known_prefix() or `in` first")
        return row

    def is_last(self, key: BlockKey) -> bool:
        """Whether no known block of its chain follows the known block `key`. Raises PactViolation if it is unknown."""
        return self._table.first_child[self.slot(key)] == NONE

    def slots_of(self, keys: Iterable[BlockKey]) -> list[int]:
        """The slots of known blocks, in order. Raises PactViolation if one is unknown."""
        wanted = keys if isinstance(keys, list | tuple) else list(keys)
        if len(wanted) < FEW:
            return [self.slot(key) for key in wanted]
        rows = self._table.keys.find_each(self._table.keys.names(wanted))
        if (rows < 0).any():
            self.slot(wanted[int(rows.argmin())])
        slots: list[int] = rows.tolist()
        return slots

    def slots_to(self, row: int, count: int) -> Sequence[int]:
        """The slots of the last `count` blocks of the chain up to that in slot `row`, in order; it has so many.

        Neighbours are a range. A step for each run.
        """
        table = self._table
        runs: list[range] = []
        while count > 0:
            first = max(table.start[row], row - count + 1)
            runs.append(range(first, row + 1))
            count -= row + 1 - first
            row = table.parent[first]
        return runs[0] if len(runs) == 1 else [row for run in reversed(runs) for row in run]

    def find_each(self, keys: Sequence[BlockKey]) -> RowArray:
        """The slot of each block, `NONE` where it is unknown."""
        if len(keys) < FEW:
            return np.array([*map(self._table.keys.find, keys)], np.int64)
        return self._table.keys.find_each(self._table.keys.names(keys))

    def held_slots(self, keys: Sequence[BlockKey]) -> RowArray:
        """The slot of each block that may be served, `NONE` for the others."""
        slots = self.find_each(keys)
        slots[self._table.state_each[slots] != HELD] = NONE
        return slots

    def ends(self, slots: RowArray) -> NDArray[np.bool_]:
        """Which of the known blocks in `slots` are not followed by the one that comes next there."""
        ends = np.ones(len(slots), np.bool_)
        ends[:-1] = self._table.parent_each[slots[1:]] != slots[:-1]
        return ends

    def chain(self, key: BlockKey) -> list[BlockKey]:
        """The known block `key` and all before it, the first one first; of `ROOT` none. O(n).

        Raises PactViolation if the key is unknown.
        """
        table = self._table
        keys: list[BlockKey] = []
        row = table.root if key == ROOT else self.slot(key)
        while row != table.root:
            keys.append(table.keys.key(row))
            row = table.parent[row]
        return keys[::-1]

    def key_at(self, slot: int) -> BlockKey | None:
        """The block that `slot` is known by; None if the slot is free or its block was dropped while in use."""
        return self._table.keys.key(slot) if self._is_known(slot) else None

    def _is_known(self, slot: int) -> bool:
        return self._table.state[slot] in (RESERVED, SAVED, HELD) and slot != self._table.root

    def is_side(self, slot: int) -> bool:
        """Whether the known block in `slot` is a side block: it hangs on a chain's block and has none after it."""
        return bool(self._table.is_side[slot])

    def state(self, slot: int) -> State:
        """The state of `slot`."""
        return State(self._table.state[slot])

    @property
    def held_count(self) -> int:
        """Blocks that may be served."""
        return self._table.held

    @property
    def pinned_count(self) -> int:
        """Pins not yet released; 0 when the place is not in use."""
        return self._pinned

    @property
    def usable_slots(self) -> int:
        """Slots, or extents of a space, below this are handed out."""
        return self.space.usable

    @property
    def free_slots(self) -> int:
        """Slots that are free without evicting a block."""
        return sum(map(len, self.space.free))

    @property
    def available_slots(self) -> int:
        """Slots that are free, or whose blocks nothing needs."""
        return self.free_slots + sum(self._table.evictable)

    @property
    def waiting_slots(self) -> int:
        """Slots of dropped blocks that a writer or a pin still needs; they become free when it ends. O(n)."""
        states = self._table.state[: self.usable_slots] if self._table.is_plain else self._table.state
        return states.count(CANCELLED) + states.count(DOOMED)

    # Filling

    def begin_restore(self) -> Restoring:
        """Begin to fill an empty index. Raises PactViolation if it is not empty."""
        if self.free_slots != self.usable_slots:
            raise PactViolation(f"only an empty index can be restored, not one with {len(self)} blocks")
        return Restoring(self._table)

    def use_slots(self, usable_slots: int) -> None:
        """Hand out the first `usable_slots` slots, never fewer than before; those that are new after all others."""
        self.space.use(usable_slots, lambda slot: self._table.state[slot] != FREE)

    def withdraw_slots(self, usable_slots: int) -> list[tuple[BlockKey, int]]:
        """Hand out only the first `usable_slots` slots; forget the blocks in the others, and all after them.

        Returns what `drop` returns. A withdrawn slot that a pin or a writer needs is not FREE until the last one ends.
        """
        withdrawn = self.space.withdraw(usable_slots)
        return [lost for slot in withdrawn if self._is_known(slot) for lost in self._table.remove(slot)]

    def reservable(self, parent: BlockKey = ROOT, wanted: int = 0, slot_class: int | None = None) -> int:
        """How many slots a reservation after `parent` would get now, exactly: the free and the evictable ones.

        Of the chains' class, or of another one. If more are `wanted` than are free, the space may give the class more
        memory. Raises PactViolation if `parent` is unknown.
        """
        table = self._table
        slot_class = table.chain_class if slot_class is None else slot_class
        row = table.root if parent == ROOT else self.slot(parent)
        table.hold(row)
        free = self.space.free[slot_class]
        if wanted > len(free):
            self.space.obtain(slot_class, wanted - len(free), self._losses)
        count = len(free) + table.evictable[slot_class]
        table.release(row)
        return count

    def make_room(self, slots: int) -> int:
        """Evict until so many slots of the chains' class are free, or nothing more can go; returns how many went.

        Blocks that are reserved one by one get neighbouring slots then.
        """
        chain_class = self._table.chain_class
        most = len(self.space.free[chain_class]) + self._table.evictable[chain_class]
        return self._losses.make_room(min(slots, most), chain_class) or 0

    def evict_ahead(self, most: int) -> int:
        """Evict before room is needed, at most `most` blocks of each class; returns how many blocks went.

        How many slots are kept free then, `Losses.evict_ahead` says.
        """
        return self._losses.evict_ahead(most)

    def reserve(self, keys: Sequence[BlockKey], start: int, end: int) -> Reservation | None:
        """Slots for `keys[start:end]` of the chain `keys`, all or none; None, and nothing changed, if there is no room.

        Room is made by evicting held blocks that nothing needs, least recently used first and a chain's tail before its
        head, never the chain that is being extended. Raises PactViolation if the first of the blocks is known already,
        or the one before it is not; those after an unknown one are unknown.
        """
        if not 0 <= start <= end <= len(keys):
            raise PactViolation(f"cannot reserve blocks [{start}, {end}) of a chain of {len(keys)}")
        wanted = keys[start:end]
        table = self._table
        if wanted and table.keys.find(wanted[0]) != NONE:
            known = self.known_prefix(keys)
            raise PactViolation(f"blocks [{start}, {end}) are not new; reserve from known_prefix() on, here {known}")
        parent = self.slot(keys[start - 1]) if start else table.root
        reservation = self._take_slots(len(wanted), table.chain_class, parent)
        if reservation is not None and (slots := reservation.slots):
            table.reserve_chain(wanted, parent, slots, selection(slots))
        return reservation

    def _take_slots(self, count: int, slot_class: int, needed: int) -> Reservation | None:
        """So many slots, all or none, of a class; nothing of the chain up to the row `needed` is evicted for them."""
        self._table.hold(needed)
        try:
            evicted = self._losses.make_room(count, slot_class)
        finally:
            self._table.release(needed)
        if evicted is None:
            return None
        slots = self.space.take(count, slot_class)
        return Reservation(slots if isinstance(slots, range) else tuple(slots), evicted)

    def reserve_sides(
        self, keys: Sequence[BlockKey], parents: Sequence[BlockKey], slot_class: int = 0
    ) -> Reservation | None:
        """Slots for side blocks: `keys[i]` hangs on the chain's block `parents[i]`. All or none, as with `reserve`.

        The `parents` are of one chain, the last of them after all others; nothing of that chain is evicted for them.
        Raises PactViolation if one of the keys is known already, or a parent is not, or is a side block itself.
        """
        if not keys:
            return Reservation(())
        rows = self.slots_of(parents)
        are_new = len(set(keys)) == len(keys) and (self.find_each(keys) == NONE).all()
        if not are_new or any(map(self._table.is_side.__getitem__, rows)):
            raise PactViolation("side blocks to reserve are not all new, or hang on other side blocks")
        reservation = self._take_slots(len(keys), slot_class, rows[-1])
        if reservation is not None:
            self._table.reserve_sides(keys, rows, reservation.slots)
        return reservation

    def complete(self, slots: Sequence[int]) -> list[BlockKey]:
        """The writers of reserved `slots` are done and the bytes are good; return the blocks that became held by it.

        Those may be fewer (a block before them is still being written, or they were dropped meanwhile) or more (saved
        blocks after them were waiting). Parents come before children. Raises PactViolation, and changes nothing, if a
        slot has no writer.
        """
        table = self._table
        became_held: list[BlockKey] = []
        at = selection(slots) if len(slots) >= FEW else None
        table.require_writers(slots, at)
        if at is not None and table.save_chain(slots, at, became_held):
            slots = slots[-1:]
        for slot in slots:
            if table.state[slot] == CANCELLED:
                table.doom(slot)
            else:
                table.save(slot, became_held)
        return became_held

    def abandon(self, slots: Sequence[int]) -> list[tuple[BlockKey, int]]:
        """The writers of reserved `slots` ended without good bytes: drop those blocks and all after them (H26).

        Returns what `drop` returns. Raises PactViolation, and changes nothing, if a slot has no writer.
        """
        table = self._table
        removed: list[tuple[BlockKey, int]] = []
        table.require_writers(slots)
        for slot in slots:
            if table.state[slot] == RESERVED:
                removed += table.remove(slot)
            table.doom(slot)
        return removed

    def end_writes(self, slots: Sequence[int], good: Sequence[bool]) -> list[BlockKey]:
        """`complete` the slots whose bytes are `good` and `abandon` the others; return the blocks that became held."""
        if all(good):
            return self.complete(slots)
        became_held = self.complete([*compress(slots, good)])
        self.abandon([slot for slot, is_good in zip(slots, good, strict=True) if not is_good])
        return became_held

    # Keeping

    def touch(self, key: BlockKey) -> None:
        """The chain up to `key` was used. O(1). Raises PactViolation if the key is unknown."""
        self._table.policy.touch(self.slot(key))

    def pin(self, key: BlockKey) -> Pin:
        """Keep the known block `key` and the whole chain before it, until `unpin`.

        While pinned, their slots are not given to other blocks, even if the blocks are dropped. One step for every
        block that nothing held before, so O(1) on a chain that is pinned already. Raises PactViolation if the key is
        unknown.
        """
        row = self.slot(key)
        self._pins[row] += 1
        self._pinned += 1
        self._table.hold(row)
        return Pin(key, row)

    def lease(self, key: BlockKey, count: int) -> tuple[Pin, Sequence[int]]:
        """What `pin` does, and `touch`, and `slots_to` for the last `count` blocks up to `key`."""
        pin = self.pin(key)
        self._table.policy.touch(pin.slot)
        return pin, self.slots_to(pin.slot, count)

    def pin_each(self, keys: Sequence[BlockKey]) -> list[Pin]:
        """What `pin` does, and `touch`, for each of `keys`."""
        rows = self.slots_of(keys)
        self._table.policy.touch_each(rows)
        self._pinned += len(rows)
        for row in rows:
            self._pins[row] += 1
            self._table.hold(row)
        return list(map(Pin, keys, rows))

    def unpin(self, pin: Pin) -> None:
        """Release a pin. Raises PactViolation the second time."""
        if not pin.active:
            raise PactViolation(f"the pin on block {pin.key.hex()[:16]!r} was given back already; a pin ends once")
        pin.active = False
        self._pins[pin.slot] -= 1
        self._pinned -= 1
        self._table.release(pin.slot)

    # Losing

    def drop(self, key: BlockKey) -> list[tuple[BlockKey, int]]:
        """Forget a block (damaged, deleted) and all after it at once; return the (key, slot) pairs, children first.

        Slots that a pin or a writer needs are not free yet; they become free when the last one ends. An unknown key
        removes nothing.
        """
        row = self._table.keys.find(key)
        return [] if row == NONE else self._table.remove(row)

    def clear(self) -> list[tuple[BlockKey, int]]:
        """Forget every block, as `drop` does for one chain."""
        table = self._table
        removed: list[tuple[BlockKey, int]] = []
        while (first := table.first_child[table.root]) != NONE:
            removed += table.remove(first)
        return removed
