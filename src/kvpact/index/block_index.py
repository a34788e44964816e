"""Index of one place (the arena, a slab): block keys, their slots, the pins on them, and eviction.

Owns the chains of blocks, closed under prefixes: a block is held only if every block before it is. Never touches the
bytes in a slot, a clock or a lock; its owner does I/O and serialises calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey
from kvpact.index.announced import Prompt, Subscriber
from kvpact.index.column_file import ColumnFile
from kvpact.index.key_table import FEW, RowArray, zeros
from kvpact.index.links import selection
from kvpact.index.losses import Losses
from kvpact.index.losses import Reservation as Reservation
from kvpact.index.pins import Pin as Pin
from kvpact.index.restoring import Restoring
from kvpact.index.retained_chains import RetainedChains
from kvpact.index.shares import OwnerShares
from kvpact.index.slot_space import PlainSlots, SlotSpace
from kvpact.index.table import CANCELLED, DOOMED, FREE, HELD, NONE, RESERVED, SAVED, Table
from kvpact.index.table import ROOT as ROOT
from kvpact.index.table import SlotState as SlotState
from kvpact.index.verification import verify

_KNOWN = (RESERVED, SAVED, HELD)


class BlockIndex:
    """Map of block keys to `num_slots` slots; says which blocks may be served and evicts when room is needed."""

    __slots__ = ("_losses", "_pinned", "_pins", "_table", "num_slots", "shares", "space")

    def __init__(
        self,
        num_slots: int,
        usable_slots: int | None = None,
        *,
        space: SlotSpace | None = None,
        classes: int = 1,
        chain_class: int = 0,
        bare_ends_first: bool = False,
        columns: ColumnFile | None = None,
    ) -> None:
        """Hand out only the first `usable_slots` slots, until `use_slots` says otherwise; None: all.

        With a `space` its rows are the slots, of so many classes, and the chains' are of `chain_class`.
        `bare_ends_first`: the end of a chain that has lost what was attached to it is evicted before all others.
        `columns`: a file of this space's size, in which other processes can look up blocks.
        """
        if num_slots < 1:
            raise ValueError(f"an index needs at least 1 slot, not {num_slots}")
        self.space: SlotSpace = space or PlainSlots(num_slots, usable_slots)
        """Free slots."""
        self.num_slots = self.space.num_rows
        self._table = Table(self.space, classes, chain_class, bare_ends_first, columns)
        self.shares: OwnerShares | None = None
        """Shares of the blocks' owners; None: the place is not divided. For reading only."""
        self._losses = Losses(self._table)
        self._pins = zeros(self.num_slots + 1, "i4")[1]
        self._pinned = 0

    @property
    def columns(self) -> ColumnFile | None:
        """File for look-ups by other processes."""
        return self._table.columns

    def reset_columns(self) -> None:
        """Let other processes find nothing in that file any more, and go on in a new one. Raises OSError as `Table`."""
        self._table.reset()

    def claim_again(self) -> None:
        """Free slots whose leases by neighbours have ended, of a few runs; for each step's end."""
        self._table.claim_again()

    def check(self) -> None:
        """Verify every invariant in O(n log n); raise PactViolation naming the first that does not hold."""
        if min(self._pins) < 0 or sum(self._pins) != self._pinned:
            raise PactViolation("the block index lost an invariant: the number of pins is wrong")
        verify(self._table, self._pins)

    # Lookups

    def held_prefix(self, keys: Sequence[BlockKey], end: int | None = None) -> int:
        """Number of blocks from the start of the chain `keys[:end]` may be served. O(log n) probes (H55)."""
        end = len(keys) if end is None else end
        return self._prefix(keys, end, end - 1, (HELD,))

    def known_prefix(self, keys: Sequence[BlockKey], near: int = 0) -> int:
        """Number of blocks from the start of the chain `keys` need not be saved: held, or on their way. O(log n).

        Fewest probes if the first unknown one is `near`.
        """
        return self._prefix(keys, len(keys), near, _KNOWN)

    def _prefix(self, keys: Sequence[BlockKey], end: int, at: int, states: tuple[int, ...]) -> int:
        """Number of blocks of `keys[:end]` from the first on that are in one of `states`; the first probe is `at`.

        By bisection, as a chain is known, and held, up to some block.
        """
        find = self._table.keys.find
        state = self._table.state
        first = 0
        while first < end:
            row = find(keys[at])
            if row != NONE and state[row] in states:
                first = at + 1
            else:
                end = at
            at = (first + end) // 2
        return first

    def is_held(self, key: BlockKey) -> bool:
        """True if the block and every block before it are filled."""
        row = self._table.keys.find(key)
        return row != NONE and self._table.state[row] == HELD

    def __contains__(self, key: BlockKey) -> bool:
        return self._table.keys.find(key) != NONE

    def __len__(self) -> int:
        """Blocks known by key: held, saved and reserved; not the dropped ones that still occupy a slot."""
        return len(self._table.keys)

    def slot(self, key: BlockKey) -> int:
        """Slot of a known block. Raises PactViolation if the key is unknown."""
        row = self._table.keys.find(key)
        if row == NONE:
            raise _unknown(key)
        return row

    def is_last(self, key: BlockKey) -> bool:
        """True if no known block of a chain follows the known block `key`. Raises PactViolation if it is unknown."""
        return self._table.links.first_child[self.slot(key)] == NONE

    def slots_of(self, keys: Iterable[BlockKey]) -> list[int]:
        """Slots of known blocks, in order. Raises PactViolation if one is unknown."""
        wanted = keys if isinstance(keys, list | tuple) else list(keys)
        if len(wanted) < FEW:
            return [self.slot(key) for key in wanted]
        rows = self._table.keys.find_each(self._table.keys.names(wanted))
        if (rows < 0).any():
            self.slot(wanted[int(rows.argmin())])
        slots: list[int] = rows.tolist()
        return slots

    def slots_to(self, row: int, count: int) -> Sequence[int]:
        """Slots of the last `count` blocks of the chain up to that in slot `row`, in order; it has so many.

        Neighbours are a range. A step for each run.
        """
        table = self._table
        runs: list[range] = []
        while count > 0:
            first = max(table.links.start[row], row - count + 1)
            runs.append(range(first, row + 1))
            count -= row + 1 - first
            row = table.links.parent[first]
        return runs[0] if len(runs) == 1 else [row for run in reversed(runs) for row in run]

    def find_each(self, keys: Sequence[BlockKey]) -> RowArray:
        """Slot of each block, `NONE` where it is unknown."""
        if len(keys) < FEW:
            return np.array([*map(self._table.keys.find, keys)], np.int64)
        return self._table.keys.find_each(self._table.keys.names(keys))

    def held_slots(self, keys: Sequence[BlockKey]) -> RowArray:
        """Slot of each block that may be served, `NONE` for the others."""
        slots = self.find_each(keys)
        slots[self._table.state_each[slots] != HELD] = NONE
        return slots

    def ends(self, slots: RowArray) -> NDArray[np.bool_]:
        """Mask of the known blocks in `slots` that are not parents of the next one there."""
        ends = np.ones(len(slots), np.bool_)
        ends[:-1] = self._table.links.parent_each[slots[1:]] != slots[:-1]
        return ends

    def chain(self, key: BlockKey) -> list[BlockKey]:
        """Keys of the known block `key` and all before it, the first one first; of `ROOT` none. O(n).

        Raises PactViolation if the key is unknown.
        """
        return [] if key == ROOT else [*map(self._table.keys.key, self._table.links.chain(self.slot(key)))]

    def key_at(self, slot: int) -> BlockKey | None:
        """Key of the block in `slot`; None if the slot is free or its block was dropped while in use."""
        return self._table.keys.key(slot) if self._is_known(slot) else None

    def _is_known(self, slot: int) -> bool:
        return self._table.state[slot] in (RESERVED, SAVED, HELD) and slot != self._table.root

    def is_side(self, slot: int) -> bool:
        """True if the known block in `slot` is a side block: attached to a chain's block, with none after it."""
        return bool(self._table.links.is_side[slot])

    def state(self, slot: int) -> SlotState:
        """State of `slot`."""
        return SlotState(self._table.state[slot])

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
        """Number of slots, or extents of a space, that are handed out: the first ones."""
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
        states = self._table.state_each[: self.usable_slots if self.space.is_plain else None].tobytes()
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
        """Number of slots that a reservation after `parent` would get now, exactly: the free and the evictable ones.

        Of the chains' class, or of another one; fewer if neighbours lease some. If more are `wanted` than are free, the
        space may give the class more memory. Raises PactViolation if `parent` is unknown.
        """
        table = self._table
        row = table.root if parent == ROOT else self.slot(parent)
        return self._losses.reservable(row, wanted, table.chain_class if slot_class is None else slot_class)

    def make_room(self, slots: int) -> int:
        """Evict until so many slots of the chains' class are free, or nothing more can go; returns how many went.

        Blocks that are reserved one by one get neighbouring slots then.
        """
        chain_class = self._table.chain_class
        most = len(self.space.free[chain_class]) + self._table.evictable[chain_class]
        return self._losses.make_room(min(slots, most), chain_class) or 0

    def evict_ahead(self, most: int) -> int:
        """Evict before room is needed, at most `most` blocks of each class; returns how many blocks went.

        `Losses.evict_ahead` says how many slots are kept free.
        """
        return self._losses.evict_ahead(most)

    def reserve(self, keys: Sequence[BlockKey], start: int, end: int, owner: int = 0) -> Reservation | None:
        """Reserve slots for `keys[start:end]` of the chain `keys`, all or none; without room None, and no change.

        Held blocks that nothing needs are evicted for it, in the order of the eviction policy and a chain's tail before
        its head, never the chain that is being extended. Raises PactViolation if the first of the blocks is known
        already, or the one before it is not; those after an unknown one are unknown. A new chain belongs to `owner`.
        """
        if not 0 <= start <= end <= len(keys):
            raise PactViolation(f"cannot reserve blocks [{start}, {end}) of a chain of {len(keys)}")
        wanted = keys[start:end]
        table = self._table
        if wanted and table.keys.find(wanted[0]) != NONE:
            known = self.known_prefix(keys)
            raise PactViolation(f"blocks [{start}, {end}) are not new; reserve from known_prefix() on, here {known}")
        parent = self.slot(keys[start - 1]) if start else table.root
        reservation = self._losses.take(len(wanted), table.chain_class, parent, owner)
        if reservation is not None and (slots := reservation.slots):
            table.reserve_chain(wanted, parent, slots, start, len(keys) - end)
        return reservation

    def reserve_sides(
        self, keys: Sequence[BlockKey], parents: Sequence[BlockKey], slot_class: int = 0
    ) -> Reservation | None:
        """Reserve slots for side blocks: `keys[i]` is attached to the chain's block `parents[i]`. All or none.

        The `parents` are of one chain, the last of them after all others; nothing of that chain is evicted for them.
        Raises PactViolation if one of the keys is known already, or a parent is not, or is a side block itself.
        """
        if not keys:
            return Reservation(())
        rows = self.slots_of(parents)
        are_new = len(set(keys)) == len(keys) and (self.find_each(keys) == NONE).all()
        if not are_new or any(map(self._table.links.is_side.__getitem__, rows)):
            raise PactViolation("side blocks to reserve are not all new, or are attached to other side blocks")
        reservation = self._losses.take(len(keys), slot_class, rows[-1], 0)
        if reservation is not None:
            self._table.reserve_sides(keys, rows, reservation.slots)
        return reservation

    def complete(self, slots: Sequence[int]) -> list[BlockKey]:
        """End the writers of reserved `slots` with good bytes; return the blocks that became held by it.

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
        """End the writers of reserved `slots` without good bytes: drop those blocks and all after them (H26).

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
        """Complete the slots whose bytes are `good` and abandon the others; return the blocks that became held."""
        if all(good):
            return self.complete(slots)
        became_held = self.complete([*compress(slots, good)])
        self.abandon([slot for slot, is_good in zip(slots, good, strict=True) if not is_good])
        return became_held

    # Keeping

    def touch(self, key: BlockKey) -> None:
        """Count a use of the chain up to `key`. O(1). Raises PactViolation if the key is unknown."""
        row = self._table.keys.find(key)
        if row == NONE:
            raise _unknown(key)
        self._table.policy.used((row,))

    def pin(self, key: BlockKey) -> Pin:
        """Keep the known block `key` and the whole chain before it, until `unpin`.

        While pinned, their slots are not given to other blocks, even if the blocks are dropped. One step for every
        block that nothing held before, so O(1) on a chain that is pinned already. Raises PactViolation if the key is
        unknown.
        """
        return self.pin_at(key, self.slot(key))

    def pin_at(self, key: BlockKey, slot: int) -> Pin:
        """Keep the block `key`, which is known to be in `slot`, as `pin` does."""
        self._pins[slot] += 1
        self._pinned += 1
        self._table.hold(slot)
        return Pin(key, slot)

    def lease(self, key: BlockKey, count: int) -> tuple[Pin, Sequence[int]]:
        """Pin `key`, count its use, and return the pin with the slots of the last `count` blocks up to it."""
        pin = self.pin(key)
        self._table.policy.used((pin.slot,))
        return pin, self.slots_to(pin.slot, count)

    def pin_each(self, keys: Sequence[BlockKey]) -> list[Pin]:
        """Pin and touch each of `keys`. Raises PactViolation if one is unknown."""
        rows = self.slots_of(keys)
        self._table.policy.used(rows)
        self._pinned += len(rows)
        for row in rows:
            self._pins[row] += 1
            self._table.hold(row)
        self._table.links.note_match(rows)
        return list(map(Pin, keys, rows))

    def unpin(self, pin: Pin) -> None:
        """Release a pin. Raises PactViolation the second time."""
        if not pin.active:
            raise PactViolation(f"the pin on block {pin.key.hex()[:16]!r} was given back already; a pin ends once")
        pin.active = False
        self._pins[pin.slot] -= 1
        self._pinned -= 1
        self._table.release(pin.slot)

    def retained_chains(self, parts: Sequence[int] = ()) -> RetainedChains:
        """Chains that are evicted after all others, none yet; an empty place is divided among owners with `parts`."""
        chains = RetainedChains(self._table, parts)
        self.shares = chains.shares
        return chains

    def outdate(self, key: BlockKey, count: int) -> None:
        """Evict before all others what is attached to the `count` blocks before `key` in its chain.

        A request that goes on after `key` needs it no longer. It stays as it is where chains part, or where a match has
        ended although the chain went on; and a use ends this. Nothing happens if the key is unknown.
        """
        row = self._table.keys.find(key)
        if row != NONE and count:
            self._table.outdate_sides(self.slots_to(self._table.links.parent[row], count))

    # Announcing

    def announce_to(self, subscriber: Subscriber) -> None:
        """See `Announcing`. Without a subscriber the other methods do nothing."""
        self._table.announce_to(subscriber)

    @property
    def announced_count(self) -> int:
        """Blocks that are announced."""
        return self._table.announced.count if self._table.announced is not None else 0

    def announce(self, keys: Sequence[BlockKey], end: int, prompt: Prompt) -> None:
        """See `Announcing`: blocks that are held. O(log n), and a step for each run that is announced."""
        table = self._table
        held = self.held_prefix(keys, end)
        if held and table.announced is not None:
            table.announced.announce(table.keys.find(keys[held - 1]), held - 1, prompt)

    def withdraw(self, keys: Sequence[BlockKey] | None = None) -> None:
        """See `Announcing`; unknown keys withdraw nothing."""
        table = self._table
        if table.announced is not None:
            rows = None if keys is None else [row for row in map(table.keys.find, keys) if row != NONE]
            table.announced.withdraw(rows)

    def forget_announced(self) -> None:
        """See `Announcing`: O(1)."""
        if self._table.announced is not None:
            self._table.announced.forget()

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
        return self._table.remove_all()


def _unknown(key: BlockKey) -> PactViolation:
    return PactViolation(f"block {key.hex()[:16]!r} is not in the index; ask known_prefix() or `in` first")
