"""What one place (the arena, a slab) holds: block keys, their slots, the pins on them, and what is evicted next.

Owns the chains of blocks, closed under prefixes: a block is held only if every block before it is. Never touches the
bytes in a slot, a clock or a lock; its owner does I/O and serialises calls.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey
from kvpact.index.eviction import LeastRecentlyUsed

ROOT: Final[BlockKey] = b""
"""The parent of a chain's first block."""

_NONE: Final = -1


class State(IntEnum):
    """The state of a slot.

    Without failures a block goes FREE -reserve-> RESERVED -complete-> SAVED -parent held-> HELD -evict-> FREE. No
    lookup finds a dropped block any more; its slot stays CANCELLED until its writer has ended, and then DOOMED until
    the last pin on it or after it is released, because a copy may still use it (H21).
    """

    FREE = 0
    RESERVED = 1
    SAVED = 2
    HELD = 3
    CANCELLED = 4
    DOOMED = 5


# Plain numbers: reading a member of an enum costs 120 ns on Python 3.11, more than all else that a step does with it.
_FREE, _RESERVED, _SAVED, _HELD, _CANCELLED, _DOOMED = (int(state) for state in State)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots for a run of keys, in the keys' order, and the (key, slot) pairs that were evicted to make room.

    `slots` may include slots of `evicted`. Every slot ends with `complete` or `abandon`, exactly once.
    """

    slots: tuple[int, ...]
    evicted: tuple[tuple[BlockKey, int], ...] = ()


@dataclass(eq=False, slots=True)
class Pin:
    """One reference to a block and the whole chain before it; released with `BlockIndex.unpin`, exactly once."""

    key: BlockKey
    slot: int
    active: bool = True


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block as a table on disk describes it. `last_used` is any number that grows with time."""

    key: BlockKey
    parent: BlockKey
    slot: int
    last_used: float = 0


class BlockIndex:
    """Which block lies in which of `num_slots` slots, what may be served, and what is evicted when room is needed.

    A row of every array describes the slot of that number; the row after the last one is the root, the parent of all
    first blocks. Arrays of numbers and not objects, because a collection of garbage must not walk a million entries in
    the middle of a scheduler's step.

    `holds` counts why a row must stay: its pins, its own writer (or its wait for its parent), and each child that must
    stay. A row without holds is evictable, with all rows after it.
    """

    __slots__ = (
        "_evictable",
        "_first_child",
        "_free",
        "_held",
        "_holds",
        "_keys",
        "_next",
        "_parent",
        "_pinned",
        "_pins",
        "_policy",
        "_previous",
        "_root",
        "_rows",
        "_state",
        "num_slots",
        "usable_slots",
    )

    def __init__(self, num_slots: int, usable_slots: int | None = None) -> None:
        """Only the first `usable_slots` slots are handed out, until `use_slots` says otherwise; None: all."""
        if num_slots < 1:
            raise ValueError(f"an index needs at least 1 slot, not {num_slots}")
        self.num_slots = num_slots
        self.usable_slots = num_slots if usable_slots is None else usable_slots
        """Slots below this are handed out. For reading only."""
        self._root = num_slots
        self._reset()

    def _reset(self) -> None:
        rows = self.num_slots + 1
        self._keys: list[BlockKey] = [ROOT] * rows
        self._rows: dict[BlockKey, int] = {ROOT: self._root}
        self._free = list(reversed(range(self.usable_slots)))  # a stack; the first reservations get neighbouring slots
        self._state = bytearray(rows)
        self._state[self._root] = _HELD
        self._pins = array("i", bytes(4 * rows))
        self._holds = array("i", bytes(4 * rows))
        self._holds[self._root] = 1
        self._parent, self._first_child, self._next, self._previous = (array("i", [_NONE]) * rows for _ in range(4))
        self._held = 0
        self._evictable = 0
        self._pinned = 0
        self._policy = LeastRecentlyUsed(rows)

    # Lookups

    def held_prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many blocks from the start of the chain `keys` may be served. O(log n) probes (H55)."""
        return bisect_left(keys, True, key=lambda key: not self.is_held(key))

    def known_prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many blocks from the start of the chain `keys` need not be saved: held, or on their way. O(log n)."""
        return bisect_left(keys, True, key=lambda key: key not in self._rows)

    def is_held(self, key: BlockKey) -> bool:
        """Whether the block and every block before it are filled."""
        row = self._rows.get(key)
        return row is not None and self._state[row] == _HELD

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._rows and key != ROOT

    def __len__(self) -> int:
        """Blocks known by key: held, saved and reserved; not the dropped ones that still occupy a slot."""
        return len(self._rows) - 1

    def slot(self, key: BlockKey) -> int:
        """The slot of a known block. Raises PactViolation if the key is unknown."""
        row = self._rows.get(key, self._root)
        if row == self._root:
            raise PactViolation(f"block {key.hex()[:16]!r} is not in the index; ask known_prefix() or `in` first")
        return row

    def is_last(self, key: BlockKey) -> bool:
        """Whether no known block follows the known block `key`. Raises PactViolation if it is unknown."""
        return self._first_child[self.slot(key)] == _NONE

    def slots_of(self, keys: Iterable[BlockKey]) -> list[int]:
        """The slots of known blocks, in order. Raises PactViolation if one is unknown."""
        return [self.slot(key) for key in keys]

    def chain(self, key: BlockKey) -> list[BlockKey]:
        """The known block `key` and all before it, the first one first; of `ROOT` none. O(n).

        Raises PactViolation if the key is unknown.
        """
        keys, row = [], self._root if key == ROOT else self.slot(key)
        while row != self._root:
            keys.append(self._keys[row])
            row = self._parent[row]
        return keys[::-1]

    def key_at(self, slot: int) -> BlockKey | None:
        """The block that `slot` is known by; None if the slot is free or its block was dropped while in use."""
        return self._keys[slot] or None

    def state(self, slot: int) -> State:
        """The state of `slot`."""
        return State(self._state[slot])

    @property
    def held_count(self) -> int:
        """Blocks that may be served."""
        return self._held

    @property
    def pinned_count(self) -> int:
        """Pins not yet released; 0 when the place is not in use."""
        return self._pinned

    @property
    def free_slots(self) -> int:
        """Slots that are free without evicting a block."""
        return len(self._free)

    @property
    def waiting_slots(self) -> int:
        """Slots of dropped blocks that a writer or a pin still needs; they become free when it ends."""
        return self.usable_slots - len(self._free) - len(self)

    def entries(self) -> Iterator[StoredBlock]:
        """The held blocks in the order in which they would be evicted if nothing were pinned. O(n log n); for tools."""
        recency: dict[int, int] = {}
        tails_first = self._subtree(self._root)[:0:-1]
        for row in tails_first:
            recency[row] = max(recency.get(row, 0), self._policy.used(row))
            recency[self._parent[row]] = max(recency.get(self._parent[row], 0), recency[row])
        for row in sorted(tails_first, key=recency.__getitem__):
            if self._state[row] == _HELD:
                yield StoredBlock(self._keys[row], self._keys[self._parent[row]], row, recency[row])

    # Filling

    def use_slots(self, usable_slots: int) -> None:
        """Hand out the first `usable_slots` slots, never fewer than before; those that are new after all others."""
        new = range(self.usable_slots, min(usable_slots, self.num_slots))
        self._free[:0] = [slot for slot in reversed(new) if self._state[slot] == _FREE]
        self.usable_slots += len(new)

    def withdraw_slots(self, usable_slots: int) -> list[tuple[BlockKey, int]]:
        """Hand out only the first `usable_slots` slots; forget the blocks in the others, and all after them.

        Returns what `drop` returns. A withdrawn slot that a pin or a writer needs is not FREE until the last one ends.
        """
        withdrawn = range(usable_slots, self.usable_slots)
        self.usable_slots -= len(withdrawn)
        self._free = [slot for slot in self._free if slot < usable_slots]
        return [lost for slot in withdrawn if self._keys[slot] for lost in self._remove(slot)]

    def reservable(self, parent: BlockKey = ROOT) -> int:
        """How many slots a reservation after `parent` would get now, exactly: the free and the evictable ones.

        Raises PactViolation if `parent` is unknown.
        """
        if parent == ROOT:
            return len(self._free) + self._evictable
        row = self.slot(parent)
        self._hold(row)
        count = len(self._free) + self._evictable
        self._release(row)
        return count

    def reserve(self, keys: Sequence[BlockKey], start: int, end: int) -> Reservation | None:
        """Slots for `keys[start:end]` of the chain `keys`, all or none; None, and nothing changed, if there is no room.

        Room is made by evicting held blocks that nothing needs, least recently used first and a chain's tail before its
        head, never the chain that is being extended. Raises PactViolation if one of the blocks is known already, or the
        one before them is not.
        """
        if not 0 <= start <= end <= len(keys):
            raise PactViolation(f"cannot reserve blocks [{start}, {end}) of a chain of {len(keys)}")
        wanted = keys[start:end]
        if len(set(wanted)) < len(wanted) or not self._rows.keys().isdisjoint(wanted):
            known = self.known_prefix(keys)
            raise PactViolation(
                f"blocks [{start}, {end}) are not all new; reserve from known_prefix() on, here {known}"
            )
        parent = self.slot(keys[start - 1]) if start else self._root
        self._hold(parent)
        try:
            if len(wanted) > len(self._free) + self._evictable:
                return None
            evicted = tuple(self._evict() for _ in range(len(wanted) - len(self._free)))
        finally:
            self._release(parent)
        slots = []
        for key in wanted:
            parent = self._add(key, parent, self._free.pop(), _RESERVED)
            slots.append(parent)
        return Reservation(tuple(slots), evicted)

    def complete(self, slots: Sequence[int]) -> list[BlockKey]:
        """The writers of reserved `slots` are done and the bytes are good; return the blocks that became held by it.

        Those may be fewer (a block before them is still being written, or they were dropped meanwhile) or more (saved
        blocks after them were waiting). Parents come before children. Raises PactViolation, and changes nothing, if a
        slot has no writer.
        """
        self._require_writers(slots)
        became_held: list[BlockKey] = []
        for slot in slots:
            if self._state[slot] == _CANCELLED:
                self._state[slot] = _DOOMED
                self._release(slot)
                continue
            self._state[slot] = _SAVED
            if self._state[self._parent[slot]] == _HELD:
                self._serve(slot, became_held)
        return became_held

    def abandon(self, slots: Sequence[int]) -> list[tuple[BlockKey, int]]:
        """The writers of reserved `slots` ended without good bytes: drop those blocks and all after them (H26).

        Returns what `drop` returns. Raises PactViolation, and changes nothing, if a slot has no writer.
        """
        self._require_writers(slots)
        removed: list[tuple[BlockKey, int]] = []
        for slot in slots:
            if self._state[slot] == _RESERVED:
                removed += self._remove(slot)
            self._state[slot] = _DOOMED
            self._release(slot)
        return removed

    def restore(self, blocks: Iterable[StoredBlock]) -> list[StoredBlock]:
        """Fill an empty index from a stored table; return what could not be used, for the owner to clear.

        Not used: blocks whose chain does not reach the root, slots out of range, and of two blocks with one key or one
        slot the less recently used. Raises PactViolation if the index is not empty.
        """
        if len(self._free) != self.usable_slots:
            raise PactViolation(f"only an empty index can be restored, not one with {len(self)} blocks")
        self._reset()
        rejected: list[StoredBlock] = []
        by_slot: dict[int, StoredBlock] = {}
        seen = {ROOT}
        for block in sorted(blocks, key=lambda block: block.last_used, reverse=True):
            if block.key in seen or block.slot in by_slot or not 0 <= block.slot < self.usable_slots:
                rejected.append(block)
            else:
                by_slot[block.slot] = block
                seen.add(block.key)
        children: dict[BlockKey, list[int]] = {}
        for slot, block in by_slot.items():
            children.setdefault(block.parent, []).append(slot)
        reached = [self._root]
        for parent in reached:
            slots = children.pop(self._keys[parent], ())
            reached.extend(self._add(by_slot[slot].key, parent, slot, _HELD) for slot in slots)
        rejected += [by_slot[slot] for orphans in children.values() for slot in orphans]
        for slot in reversed(by_slot):
            self._policy.touch(slot)
        for slot in reached[1:]:
            if self._first_child[slot] == _NONE:
                self._policy.offer(slot)
        used = set(reached)
        self._free = [slot for slot in reversed(range(self.usable_slots)) if slot not in used]
        return rejected

    # Keeping

    def touch(self, key: BlockKey) -> None:
        """The chain up to `key` was used. O(1). Raises PactViolation if the key is unknown."""
        self._policy.touch(self.slot(key))

    def pin(self, key: BlockKey) -> Pin:
        """Keep the known block `key` and the whole chain before it, until `unpin`.

        While pinned, their slots are not given to other blocks, even if the blocks are dropped. One step for every
        block that nothing held before, so O(1) on a chain that is pinned already. Raises PactViolation if the key is
        unknown.
        """
        row = self.slot(key)
        self._pins[row] += 1
        self._pinned += 1
        self._hold(row)
        return Pin(key, row)

    def unpin(self, pin: Pin) -> None:
        """Release a pin. Raises PactViolation the second time."""
        if not pin.active:
            raise PactViolation(f"the pin on block {pin.key.hex()[:16]!r} was given back already; a pin ends once")
        pin.active = False
        self._pins[pin.slot] -= 1
        self._pinned -= 1
        self._release(pin.slot)

    # Losing

    def drop(self, key: BlockKey) -> list[tuple[BlockKey, int]]:
        """Forget a block (damaged, deleted) and all after it at once; return the (key, slot) pairs, children first.

        Slots that a pin or a writer needs are not free yet; they become free when the last one ends. An unknown key
        removes nothing.
        """
        row = self._rows.get(key, self._root)
        return [] if row == self._root else self._remove(row)

    def clear(self) -> list[tuple[BlockKey, int]]:
        """Forget every block, as `drop` does for one chain."""
        removed: list[tuple[BlockKey, int]] = []
        while self._first_child[self._root] != _NONE:
            removed += self._remove(self._first_child[self._root])
        return removed

    # Rows

    def _hold(self, row: int) -> None:
        """Add a hold to `row`; its first one adds a hold to its parent. The root is always held, so the walk ends."""
        holds, parent = self._holds, self._parent
        newly_held = 0
        while not holds[row]:
            holds[row] = 1
            newly_held += 1
            row = parent[row]
        holds[row] += 1
        self._evictable -= newly_held

    def _release(self, row: int) -> None:
        """Remove a hold. A row without holds becomes evictable, or free if its block was dropped."""
        holds, parent = self._holds, self._parent
        while holds[row] == 1:
            holds[row] = 0
            if self._state[row] == _DOOMED:
                self._set_free(row)
            else:
                self._evictable += 1
                if self._first_child[row] == _NONE:
                    self._policy.offer(row)
            row = parent[row]
        holds[row] -= 1

    def _add(self, key: BlockKey, parent: int, row: int, state: int) -> int:
        """Enter `key` after `parent` into the unused `row`; return the row."""
        self._rows[key] = row
        self._keys[row] = key
        self._state[row] = state
        self._parent[row] = parent
        self._previous[row] = _NONE
        self._next[row] = following = self._first_child[parent]
        if following != _NONE:
            self._previous[following] = row
        self._first_child[parent] = row
        if state == _HELD:
            self._held += 1
            self._evictable += 1
        else:
            self._policy.touch(row)
            self._evictable += 1  # for a moment: the hold takes it back
            self._hold(row)
        return row

    def _unlink(self, row: int) -> None:
        """Remove `row` from its parent's children."""
        parent, previous, following = self._parent[row], self._previous[row], self._next[row]
        if following != _NONE:
            self._previous[following] = previous
        if previous != _NONE:
            self._next[previous] = following
            return
        self._first_child[parent] = following
        if following == _NONE and self._holds[parent] == 0:
            self._policy.offer(parent)

    def _forget(self, row: int) -> tuple[BlockKey, int]:
        """Remove `row` from every lookup."""
        key = self._keys[row]
        del self._rows[key]
        self._keys[row] = ROOT
        self._policy.inherit(self._parent[row], row)
        return key, row

    def _set_free(self, row: int) -> None:
        self._state[row] = _FREE
        if row < self.usable_slots:
            self._free.append(row)

    def _evictable_leaf(self, row: int) -> bool:
        return self._holds[row] == 0 and self._state[row] == _HELD and self._first_child[row] == _NONE

    def _evict(self) -> tuple[BlockKey, int]:
        """Free the least recently used leaf that nothing holds. There must be one."""
        row = self._policy.take(self._evictable_leaf)
        if row is None:
            raise PactViolation(f"{self._evictable} blocks count as evictable, but none is queued for eviction")
        forgotten = self._forget(row)
        self._unlink(row)
        self._held -= 1
        self._evictable -= 1
        self._set_free(row)
        return forgotten

    def _remove(self, top: int) -> list[tuple[BlockKey, int]]:
        """Drop `top` and all after it, children first."""
        removed = []
        order = self._subtree(top)
        self._unlink(top)
        for row in reversed(order):
            removed.append(self._forget(row))
            self._first_child[row] = _NONE
            state = self._state[row]
            self._state[row] = _DOOMED
            if state == _RESERVED:
                self._state[row] = _CANCELLED
            elif state == _SAVED:
                self._release(row)
            else:
                self._held -= 1
                if self._holds[row] == 0:
                    self._evictable -= 1
                    self._set_free(row)
        return removed

    def _subtree(self, top: int) -> list[int]:
        """`top` and all rows after it, parents before children."""
        order = [top]
        for row in order:
            child = self._first_child[row]
            while child != _NONE:
                order.append(child)
                child = self._next[child]
        return order

    def _serve(self, row: int, became_held: list[BlockKey]) -> None:
        """The saved `row` has its whole chain: hold it, and the saved blocks that waited for it."""
        complete = [row]
        for parent in complete:
            self._state[parent] = _HELD
            self._held += 1
            became_held.append(self._keys[parent])
            self._release(parent)
            child = self._first_child[parent]
            while child != _NONE:
                if self._state[child] == _SAVED:
                    complete.append(child)
                child = self._next[child]

    def _require_writers(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if self._state[slot] not in (_RESERVED, _CANCELLED):
                raise PactViolation(f"slot {slot} is {self.state(slot).name}, not reserved: its writer ended already")
        if len(set(slots)) != len(slots):
            raise PactViolation(f"a slot is named twice in {list(slots)[:20]}; its writer ends once")

    # Checking

    def check(self) -> None:
        """Verify every invariant in O(n log n); raise PactViolation naming the first that does not hold."""

        def require(condition: bool, what: str) -> None:
            if not condition:
                raise PactViolation(f"the block index lost an invariant: {what}")

        state = [State(value) for value in self._state]
        known = {*self._rows.values()} - {self._root}
        free = set(self._free)
        usable = range(self.usable_slots)
        dropped = {row for row in range(self.num_slots) if state[row] in (State.CANCELLED, State.DOOMED)}
        waiting = dropped & set(usable)
        require(len(known) == len(self), "two keys share a slot")
        require(len(free) == len(self._free), "a slot is twice in the free list")
        require(len(known) + len(free) + len(waiting) == self.usable_slots, "the slots do not add up")
        require(known | free | waiting == set(usable), "a slot is neither known, free nor waiting")
        require(all(state[row] == State.FREE for row in free), "a slot in the free list is in use")
        require(all(self._keys[row] == ROOT for row in free | waiting), "a slot keeps the key of a block that is gone")
        require(all(self._keys[row] == key for key, row in self._rows.items()), "keys and slots disagree")
        reached = self._subtree(self._root)
        require(len(set(reached)) == len(reached), "a block is reached twice")
        require(set(reached) - {self._root} == known, "the chains do not reach exactly the known blocks")
        holds = [pins + (state[row] in (_RESERVED, _SAVED, _CANCELLED)) for row, pins in enumerate(self._pins)]
        needed = {self._root}
        for holder in [row for row in known | dropped if holds[row]]:
            row = holder
            while row not in needed:
                needed.add(row)
                row = self._parent[row]
        for row in needed - {self._root}:
            holds[self._parent[row]] += 1
        holds[self._root] += 1
        require(min(self._pins) >= 0 and sum(self._pins) == self._pinned, "the number of pins is wrong")
        for row in known | free | dropped | {self._root}:
            require(self._holds[row] == holds[row], f"slot {row} counts {self._holds[row]} holds and has {holds[row]}")
        for row in known:
            parent = self._parent[row]
            require(state[parent] in (State.RESERVED, State.SAVED, State.HELD), f"slot {row} has lost its parent")
            require((state[row] != State.HELD) or state[parent] == State.HELD, f"slot {row} is held without its parent")
            require((state[row] != State.SAVED) or state[parent] != State.HELD, f"slot {row} waits for a held parent")
            if self._evictable_leaf(row):
                require(self._policy.queued(row), f"slot {row} could be evicted and is not queued")
        require(all(holds[row] for row in dropped), "a dropped slot that nothing needs is not free")
        require(self._held == sum(state[row] == State.HELD for row in known), "the number of held blocks is wrong")
        require(self._evictable == sum(holds[row] == 0 for row in known), "the number of evictable blocks is wrong")
        require(len(self._policy) <= self.num_slots, "the eviction queue has outgrown the slots")
        self._policy.check()
