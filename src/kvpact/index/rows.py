"""The rows of an index: one for each slot, linked to chains, and counted as long as anything needs them.

Owns the states of rows, their holds and their recency. Decides nothing: `block_index.py` says what is reserved,
pinned, evicted and dropped. Never touches the bytes in a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey
from kvpact.index.eviction import LeastRecentlyUsed
from kvpact.index.key_table import FEW, RowArray, zeros
from kvpact.index.links import NONE, Links, selection
from kvpact.index.slot_space import PlainSlots, SlotSpace


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
FREE, RESERVED, SAVED, HELD, CANCELLED, DOOMED = (int(state) for state in State)
_WITH_WRITER = {RESERVED, CANCELLED}


class Rows(Links):
    """What lies in which of `num_slots` slots, as chains.

    A row of every array describes the slot of that number; the row after the last one is the root, the parent of all
    first blocks. Arrays of numbers and not objects, because a collection of garbage must not walk a million entries in
    the middle of a scheduler's step.

    A row has two kinds of children: the next rows of chains, and the *side* rows, which hang on it and have none. What
    goes for a row goes for its side rows: they need it, and go with it.

    `holds` counts why a row must stay: its pins, its own writer (or its wait for its parent), and each child that must
    stay. A row without holds is evictable, with all rows after it.

    The rows of chains are of one class of `space`, those of side blocks of the same or others; each class is evicted
    for itself.
    """

    __slots__ = (
        "_chain_class",
        "_evictable",
        "_held",
        "_holds",
        "_holds_each",
        "_lost",
        "_pinned",
        "_pins",
        "_policy",
        "_state",
        "_state_each",
        "space",
    )

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
        super().__init__(self.space.num_rows)
        self._chain_class = chain_class
        self._evictable = [0] * classes
        self._reset()

    @property
    def usable_slots(self) -> int:
        """Slots, or extents of a space, below this are handed out."""
        return self.space.usable

    @property
    def free_slots(self) -> int:
        """Slots that are free without evicting a block."""
        return sum(map(len, self.space.free))

    @property
    def waiting_slots(self) -> int:
        """Slots of dropped blocks that a writer or a pin still needs; they become free when it ends. O(n)."""
        states = self._state[: self.usable_slots] if self._is_plain else self._state
        return states.count(CANCELLED) + states.count(DOOMED)

    @property
    def _is_plain(self) -> bool:
        """Whether every row is a slot, so that one that is withdrawn is nobody's."""
        return isinstance(self.space, PlainSlots) and len(self.space.free) == 1

    def _reset(self) -> None:
        rows = self.num_slots + 1
        self._clear_links()
        self._state = bytearray(rows)
        self._state_each = np.frombuffer(self._state, np.uint8)
        self._state[self._root] = HELD
        self._pins = zeros(rows, "i4")[1]
        self._holds_each, self._holds = zeros(rows, "i4")
        self._holds[self._root] = 1
        self._held = 0
        self._evictable = [0] * len(self._evictable)
        self._pinned = 0
        self._policy = LeastRecentlyUsed(rows, len(self._evictable))
        self._lost = 0
        """Blocks that extents lost when they changed their class, until a reservation tells it."""

    def _row(self, key: BlockKey) -> int:
        """The row of a known block; NONE if the key is unknown, or the root's."""
        return self._keys.find(key) if key else NONE

    def _hold(self, row: int) -> None:
        """Add a hold to `row`; its first one adds a hold to its parent. The root is always held, so the walk ends.

        What is held is closed under prefixes, so of a run only the end can be unheld.
        """
        holds, parent, start = self._holds, self._parent, self._start
        newly_held = 0
        if self._is_side[row] and not holds[row]:
            holds[row] = 1
            self._evictable[self.space.class_of(row)] -= 1
            row = parent[row]
        while not holds[row]:
            first = start[row]
            if row - first < FEW:
                holds[row] = 1
                newly_held += 1
                row = parent[row]
                continue
            unheld = row + 1 - first - int(np.count_nonzero(self._holds_each[first : row + 1]))
            self._holds_each[row + 1 - unheld : row + 1] = 1
            newly_held += unheld
            row = parent[row + 1 - unheld]
        holds[row] += 1
        if newly_held:
            self._evictable[self._chain_class] -= newly_held

    def _release(self, row: int) -> None:
        """Remove a hold. A row without holds becomes evictable, or free if its block was dropped."""
        holds, parent, state, first_child = self._holds, self._parent, self._state, self._first_child
        slot_class = self.space.class_of(row) if self._is_side[row] else self._chain_class
        evictable = 0
        while holds[row] == 1:
            top = self._held_by_next(row)
            if top < row:  # all of these but `row` have a child, and none is dropped
                self._holds_each[top : row + 1] = 0
                evictable += row + 1 - top
            else:
                holds[row] = 0
            if state[row] == DOOMED:
                self._set_free(row)
            else:
                evictable += top == row
                if first_child[row] == NONE:
                    self._policy.offer(row, slot_class)
            row = parent[top]
            if slot_class != self._chain_class:
                self._evictable[slot_class] += evictable
                slot_class, evictable = self._chain_class, 0
        holds[row] -= 1
        if evictable:
            self._evictable[slot_class] += evictable

    def _held_by_next(self, row: int) -> int:
        """The first of the rows in a run up to `row` that have one hold each and are not dropped; `row` if few."""
        first = self._start[row]
        if row - first < FEW:
            return row
        others = np.flatnonzero(self._holds_each[first : row + 1] != 1)
        if len(others):
            first += int(others[-1]) + 1
        return first if self._state.find(DOOMED, first, row + 1) < 0 else row

    def _reserve_sides(self, keys: Sequence[BlockKey], parents: Sequence[int], rows: Sequence[int]) -> None:
        """Enter side blocks, each on the row before it, into the unused `rows`, which have a writer now."""
        for key, parent, row in zip(keys, parents, rows, strict=True):
            self._link(key, parent, row, is_side=True)
            self._state[row] = RESERVED
            self._holds[row] = 1
            self._hold(parent)
        self._policy.touch_each(selection(rows))

    def _reserve_chain(self, keys: Sequence[BlockKey], parent: int, rows: Sequence[int], at: slice | RowArray) -> None:
        """Enter `keys`, one after the other, after `parent` into the unused `rows`, which have a writer now; `at`
        selects the rows."""
        self._link_chain(keys, parent, rows, at)
        self._state_each[at] = RESERVED
        self._holds_each[at] = 2  # of its writer, and of the row after it
        self._holds[rows[-1]] = 1
        self._policy.touch_each(at)
        self._hold(parent)

    def _set_free(self, row: int) -> None:
        self._state[row] = FREE
        self.space.give_back(row)

    def _evictable_leaf(self, row: int) -> bool:
        return self._holds[row] == 0 and self._state[row] == HELD and self._first_child[row] == NONE

    def _serve(self, row: int, became_held: list[BlockKey]) -> None:
        """The saved `row` has its whole chain: hold it, and the saved blocks that waited for it."""
        complete = [row]
        for parent in complete:
            self._state[parent] = HELD
            self._held += 1
            became_held.append(self._keys.key(parent))
            if self._holds[parent] > 1:
                self._holds[parent] -= 1
            else:
                self._release(parent)
            if self._is_side[parent]:
                continue
            for child in (self._first_child[parent], self._first_side[parent]):
                while child != NONE:
                    if self._state[child] == SAVED:
                        complete.append(child)
                    child = self._next[child]

    def _serve_chain(self, rows: Sequence[int], at: slice | RowArray, became_held: list[BlockKey]) -> bool:
        """Hold all `rows` but the last if they are reserved, one after the other, and nothing else hangs on them; and
        if the block before them is held. Returns whether that is so."""
        above, below = (
            (slice(at.start, at.stop - 1), slice(at.start + 1, at.stop)) if isinstance(at, slice) else (at[:-1], at[1:])
        )
        parents, alone = self._parent_each[below], self._next_each[below] & self._previous_each[below]
        if (
            self._state[self._parent[rows[0]]] != HELD
            or not (self._state_each[at] == RESERVED).all()
            or not (parents == (np.arange(at.start, at.stop - 1) if isinstance(at, slice) else above)).all()
            or not ((alone & self._first_side_each[above]) == NONE).all()
        ):
            return False
        self._state_each[above] = HELD
        self._holds_each[above] -= 1  # of the writer; the next row has one, too
        self._held += len(rows) - 1
        became_held += self._keys.keys(above)
        return True

    def _require_writers(self, slots: Sequence[int], at: slice | RowArray | None = None) -> None:
        """Raise PactViolation if a slot has no writer, or is named twice. `at` selects the slots, if given."""
        state = self._state
        if at is None:
            written = {*map(state.__getitem__, slots)} <= _WITH_WRITER
        else:
            states = self._state_each[at]
            written = bool(((states == RESERVED) | (states == CANCELLED)).all())
            if written and isinstance(at, slice):
                return
        if not written:
            slot = next(slot for slot in slots if state[slot] not in _WITH_WRITER)
            raise PactViolation(f"slot {slot} is {State(state[slot]).name}, not reserved: its writer ended already")
        if len(set(slots)) != len(slots):
            raise PactViolation(f"a slot is named twice in {list(slots)[:20]}; its writer ends once")

    # Checking

    def check(self) -> None:
        """Verify every invariant in O(n log n); raise PactViolation naming the first that does not hold."""

        def require(condition: bool, what: str) -> None:
            if not condition:
                raise PactViolation(f"the block index lost an invariant: {what}")

        state = [State(value) for value in self._state]
        known = {row for row in range(self.num_slots) if state[row] in (State.RESERVED, State.SAVED, State.HELD)}
        self.space.check()
        free = {row for rows in self.space.free for row in rows}
        if isinstance(self.space, PlainSlots):
            free.update(self.space.parked)
        plain = self._is_plain
        usable = set(range(self.usable_slots if plain else self.num_slots))
        dropped = {row for row in range(self.num_slots) if state[row] in (State.CANCELLED, State.DOOMED)}
        waiting = dropped & usable
        require(len(known) == len(self), "two keys share a slot")
        require(len(known) + len(free) + len(waiting) == len(known | free | waiting), "the slots do not add up")
        require(not plain or known | free | waiting == usable, "a slot is neither known, free nor waiting")
        require(all(state[row] == State.FREE for row in free), "a slot in the free list is in use")
        require(sorted(self._keys.lists()) == sorted(known), "not exactly the known blocks are in the table of keys")
        require(all(self._keys.find(self._keys.key(row)) == row for row in known), "keys and slots disagree")
        reached = self._subtree(self._root)
        require(len(set(reached)) == len(reached), "a block is reached twice")
        require(set(reached) - {self._root} == known, "the chains do not reach exactly the known blocks")
        holds = [pins + (state[row] in (RESERVED, SAVED, CANCELLED)) for row, pins in enumerate(self._pins)]
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
        for row in known | dropped:
            run = range(self._start[row] + 1, row + 1)
            require(all(self._parent[each] == each - 1 for each in run), f"the run of slot {row} starts later")
        for row in known:
            parent = self._parent[row]
            require(state[parent] in (State.RESERVED, State.SAVED, State.HELD), f"slot {row} has lost its parent")
            require((state[row] != State.HELD) or state[parent] == State.HELD, f"slot {row} is held without its parent")
            require((state[row] != State.SAVED) or state[parent] != State.HELD, f"slot {row} waits for a held parent")
            require(not self._is_side[parent], f"slot {row} hangs on slot {parent}, a side block")
            if self._evictable_leaf(row):
                require(self._policy.queued(row), f"slot {row} could be evicted and is not queued")
        require(all(holds[row] for row in dropped), "a dropped slot that nothing needs is not free")
        require(self._held == sum(state[row] == State.HELD for row in known), "the number of held blocks is wrong")
        for slot_class, evictable in enumerate(self._evictable):
            rows = [row for row in known if holds[row] == 0 and self.space.class_of(row) == slot_class]
            require(evictable == len(rows), f"the number of evictable blocks of class {slot_class} is wrong")
        require(len(self._policy) <= self.num_slots, "the eviction queue has outgrown the slots")
        self._policy.check()
