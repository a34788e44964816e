"""The table of an index: a row for each slot, linked to chains, and counted as long as anything needs it.

Owns keys, parents and children, the states of rows, their holds and their recency; others read its columns. Decides
nothing: `block_index.py` says what is reserved, pinned and dropped, `losses.py` what is evicted, `restoring.py` what
comes back from a table of stored blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey
from kvpact.index.eviction import LeastRecentlyUsed
from kvpact.index.key_table import FEW, KeyTable, Names, RowArray, zeros
from kvpact.index.key_table import NONE as NONE
from kvpact.index.slot_space import PlainSlots, SlotSpace

ROOT: Final[BlockKey] = b""
"""The parent of a chain's first block."""


class SlotState(IntEnum):
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
FREE, RESERVED, SAVED, HELD, CANCELLED, DOOMED = (int(state) for state in SlotState)
_WITH_WRITER = {RESERVED, CANCELLED}

_PART: Final = 1 << 16
"""Rows that are worked on at once where all rows are, so that what is computed of them stays small."""


def selection(rows: Sequence[int]) -> slice | RowArray:
    """Some rows, in this order, as an index of an array: neighbours as a slice, which costs least."""
    if isinstance(rows, range):
        return slice(rows.start, rows.stop)
    first, last = rows[0], rows[-1]
    if last - first == len(rows) - 1 and tuple(rows) == tuple(range(first, last + 1)):
        return slice(first, last + 1)
    return np.array(rows, np.int64)


class Table:
    """What lies in which row, as chains. The row after the last one is the root, the parent of all first blocks.

    Columns of numbers and not objects, because a collection of garbage must not walk a million entries in the middle of
    a scheduler's step. `next_each` is an array, `next` its memory, which is faster for single rows; so for all of them.

    A row has two kinds of children: the next rows of chains, and the *side* rows, which hang on it and have none. What
    goes for a row goes for its side rows: they need it, and go with it.

    Blocks that are stored together mostly get neighbouring rows. So each row says where its *run* starts: every row
    from there to it follows its neighbour, as long as any of them is in use. What goes for a chain goes for a few runs,
    each with one step over a part of an array.

    `holds` counts why a row must stay: its pins, its own writer (or its wait for its parent), and each child that must
    stay. A row without holds is evictable, with all rows after it.

    The rows of chains are of one class of `space`, those of side blocks of the same or others; each class is evicted
    for itself.
    """

    __slots__ = (
        "chain_class", "evictable", "first_child", "first_child_each", "first_side", "first_side_each", "held", "holds",
        "holds_each", "is_side", "is_side_each", "keys", "next", "next_each", "parent", "parent_each", "policy",
        "previous", "previous_each", "root", "space", "start", "start_each", "state", "state_each",
    )  # fmt: skip

    def __init__(self, space: SlotSpace, classes: int, chain_class: int) -> None:
        """Rows of so many classes, those of chains of `chain_class`."""
        self.space = space
        """Which rows are free."""
        self.chain_class = chain_class
        self.root = space.num_rows
        self.evictable = [0] * classes
        """Per class, blocks that nothing holds."""
        self.reset()

    def reset(self) -> None:
        """Forget all rows; the space is its owner's."""
        rows, classes = self.root + 1, len(self.evictable)
        self.keys = KeyTable(rows)
        self.is_side = bytearray(rows)
        self.is_side_each = np.frombuffer(self.is_side, np.uint8)
        self.parent_each, self.parent = zeros(rows, "i4")
        self.first_child_each, self.first_child = zeros(rows, "i4")
        self.first_side_each, self.first_side = zeros(rows, "i4")
        self.next_each, self.next = zeros(rows, "i4")
        self.previous_each, self.previous = zeros(rows, "i4")
        self.start_each, self.start = zeros(rows, "i4")
        self.start[self.root] = self.root
        for links in (self.parent, self.first_child, self.first_side, self.next, self.previous):
            links[self.root] = NONE
        self.state = bytearray(rows)
        self.state_each = np.frombuffer(self.state, np.uint8)
        self.state[self.root] = HELD
        self.holds_each, self.holds = zeros(rows, "i4")
        self.holds[self.root] = 1
        self.held = 0
        """Blocks in the state HELD."""
        self.evictable = [0] * classes
        self.policy = LeastRecentlyUsed(rows, classes)

    @property
    def is_plain(self) -> bool:
        """Whether every row is a slot, so that one that is withdrawn is nobody's."""
        return isinstance(self.space, PlainSlots) and len(self.space.free) == 1

    # Links

    def _link(self, key: BlockKey, parent: int, row: int, *, is_side: bool) -> None:
        """Enter `key` after `parent` into the unused `row`, without children."""
        self.keys.add(key, row)
        first = self.first_side if is_side else self.first_child
        self.is_side[row] = is_side
        self.parent[row] = parent
        self.start[row] = self.start[parent] if parent == row - 1 and not is_side else row
        self.first_child[row] = self.first_side[row] = self.previous[row] = NONE
        self.next[row] = following = first[parent]
        if following != NONE:
            self.previous[following] = row
        first[parent] = row

    def _link_chain(self, keys: Sequence[BlockKey], parent: int, rows: Sequence[int], at: slice | RowArray) -> None:
        """Enter `keys`, one after the other, after `parent` into the unused `rows`, which `at` selects."""
        if len(rows) < FEW:
            for key, row in zip(keys, rows, strict=True):
                self._link(key, parent, row, is_side=False)
                parent = row
            return
        self.keys.add_names(self.keys.names(keys), at)
        self.is_side_each[at] = 0
        for links in (self.first_side_each, self.previous_each, self.next_each):
            links[at] = NONE
        if isinstance(at, slice):
            self.parent_each[at] = np.arange(at.start - 1, at.stop - 1)
            self.first_child_each[at] = np.arange(at.start + 1, at.stop + 1)
            self.start_each[at] = at.start
        else:
            self.parent_each[at[1:]] = at[:-1]
            self.first_child_each[at[:-1]] = at[1:]
            self.start_each[at] = at[_starts(at[1:] == at[:-1] + 1)]
        if parent == rows[0] - 1:
            self.start_each[rows[0] : rows[0] + _neighbours(at)] = self.start[parent]
        first, last = rows[0], rows[-1]
        self.first_child[last] = NONE
        self.parent[first] = parent
        self.next[first] = following = self.first_child[parent]
        if following != NONE:
            self.previous[following] = first
        self.first_child[parent] = first

    def cut(self, row: int) -> bool:
        """Remove `row` from its parent's children; returns whether the parent's chain ends with the parent now."""
        parent, previous, following = self.parent[row], self.previous[row], self.next[row]
        if following != NONE:
            self.previous[following] = previous
        if previous != NONE:
            self.next[previous] = following
        elif self.is_side[row]:
            self.first_side[parent] = following
        else:
            self.first_child[parent] = following
            return following == NONE
        return False

    def subtree(self, top: int) -> list[int]:
        """`top` and all rows after it, parents before children, side rows too."""
        order = [top]
        for row in order:
            for child in (self.first_child[row], self.first_side[row]):
                while child != NONE:
                    order.append(child)
                    child = self.next[child]
        return order

    def parted(self, rows: slice) -> NDArray[np.bool_]:
        """Which of these rows of one run have side rows, or another child than the neighbour that follows them."""
        below = slice(rows.start + 1, rows.stop + 1)
        parted: NDArray[np.bool_] = (
            self.first_side_each[rows] & self.next_each[below] & self.previous_each[below]
        ) != NONE
        return parted

    # States and holds

    def hold(self, row: int) -> None:
        """Add a hold to `row`; its first one adds a hold to its parent. The root is always held, so the walk ends.

        What is held is closed under prefixes, so of a run only the end can be unheld.
        """
        holds, parent, start = self.holds, self.parent, self.start
        newly_held = 0
        if self.is_side[row] and not holds[row]:
            holds[row] = 1
            self.evictable[self.space.class_of(row)] -= 1
            row = parent[row]
        while not holds[row]:
            first = start[row]
            if row - first < FEW:
                holds[row] = 1
                newly_held += 1
                row = parent[row]
                continue
            unheld = row + 1 - first - int(np.count_nonzero(self.holds_each[first : row + 1]))
            self.holds_each[row + 1 - unheld : row + 1] = 1
            newly_held += unheld
            row = parent[row + 1 - unheld]
        holds[row] += 1
        if newly_held:
            self.evictable[self.chain_class] -= newly_held

    def release(self, row: int) -> None:
        """Remove a hold. A row without holds becomes evictable, or free if its block was dropped."""
        holds, parent, state, first_child = self.holds, self.parent, self.state, self.first_child
        slot_class = self.space.class_of(row) if self.is_side[row] else self.chain_class
        evictable = 0
        while holds[row] == 1:
            top = self._held_by_next(row)
            if top < row:  # all of these but `row` have a child, and none is dropped
                self.holds_each[top : row + 1] = 0
                evictable += row + 1 - top
            else:
                holds[row] = 0
            if state[row] == DOOMED:
                self._set_free(row)
            else:
                evictable += top == row
                if first_child[row] == NONE:
                    self.policy.offer(row, slot_class)
            row = parent[top]
            if slot_class != self.chain_class:
                self.evictable[slot_class] += evictable
                slot_class, evictable = self.chain_class, 0
        holds[row] -= 1
        if evictable:
            self.evictable[slot_class] += evictable

    def _held_by_next(self, row: int) -> int:
        """The first of the rows in a run up to `row` that have one hold each and are not dropped; `row` if few."""
        first = self.start[row]
        if row - first < FEW:
            return row
        others = np.flatnonzero(self.holds_each[first : row + 1] != 1)
        if len(others):
            first += int(others[-1]) + 1
        return first if self.state.find(DOOMED, first, row + 1) < 0 else row

    def reserve_sides(self, keys: Sequence[BlockKey], parents: Sequence[int], rows: Sequence[int]) -> None:
        """Enter side blocks, each on the row before it, into the unused `rows`, which have a writer now."""
        for key, parent, row in zip(keys, parents, rows, strict=True):
            self._link(key, parent, row, is_side=True)
            self.state[row] = RESERVED
            self.holds[row] = 1
            self.hold(parent)
        self.policy.touch_each(selection(rows))

    def reserve_chain(self, keys: Sequence[BlockKey], parent: int, rows: Sequence[int], at: slice | RowArray) -> None:
        """Enter `keys`, one after the other, after `parent` into the unused `rows`, which have a writer now; `at`
        selects the rows."""
        self._link_chain(keys, parent, rows, at)
        self.state_each[at] = RESERVED
        self.holds_each[at] = 2  # of its writer, and of the row after it
        self.holds[rows[-1]] = 1
        self.policy.touch_each(at)
        self.hold(parent)

    def _set_free(self, row: int) -> None:
        self.state[row] = FREE
        self.space.give_back(row)

    def evictable_leaf(self, row: int) -> bool:
        """Whether nothing holds the row's block, and none of a chain follows it."""
        return self.holds[row] == 0 and self.state[row] == HELD and self.first_child[row] == NONE

    def save(self, row: int, became_held: list[BlockKey]) -> None:
        """The row is filled: hold it as soon as its parent is held, and the saved blocks that waited for it."""
        self.state[row] = SAVED
        if self.state[self.parent[row]] != HELD:
            return
        complete = [row]
        for parent in complete:
            self.state[parent] = HELD
            self.held += 1
            became_held.append(self.keys.key(parent))
            if self.holds[parent] > 1:
                self.holds[parent] -= 1
            else:
                self.release(parent)
            if self.is_side[parent]:
                continue
            for child in (self.first_child[parent], self.first_side[parent]):
                while child != NONE:
                    if self.state[child] == SAVED:
                        complete.append(child)
                    child = self.next[child]

    def save_chain(self, rows: Sequence[int], at: slice | RowArray, became_held: list[BlockKey]) -> bool:
        """Hold all `rows` but the last if they are reserved, one after the other, and nothing else hangs on them; and
        if the block before them is held. Returns whether that is so."""
        above, below = (
            (slice(at.start, at.stop - 1), slice(at.start + 1, at.stop)) if isinstance(at, slice) else (at[:-1], at[1:])
        )
        parents, alone = self.parent_each[below], self.next_each[below] & self.previous_each[below]
        if (
            self.state[self.parent[rows[0]]] != HELD
            or not (self.state_each[at] == RESERVED).all()
            or not (parents == (np.arange(at.start, at.stop - 1) if isinstance(at, slice) else above)).all()
            or not ((alone & self.first_side_each[above]) == NONE).all()
        ):
            return False
        self.state_each[above] = HELD
        self.holds_each[above] -= 1  # of the writer; the next row has one, too
        self.held += len(rows) - 1
        became_held += self.keys.keys(above)
        return True

    def require_writers(self, slots: Sequence[int], at: slice | RowArray | None = None) -> None:
        """Raise PactViolation if a slot has no writer, or is named twice. `at` selects the slots, if given."""
        state = self.state
        if at is None:
            written = {*map(state.__getitem__, slots)} <= _WITH_WRITER
        else:
            states = self.state_each[at]
            written = bool(((states == RESERVED) | (states == CANCELLED)).all())
            if written and isinstance(at, slice):
                return
        if not written:
            slot = next(slot for slot in slots if state[slot] not in _WITH_WRITER)
            raise PactViolation(f"slot {slot} is {SlotState(state[slot]).name}, not reserved: its writer ended already")
        if len(set(slots)) != len(slots):
            raise PactViolation(f"a slot is named twice in {list(slots)[:20]}; its writer ends once")

    # Losses

    def remove(self, top: int) -> list[tuple[BlockKey, int]]:
        """Drop `top` and all after it, children first: their rows are free as soon as nothing needs them."""
        order, parent = self.subtree(top), self.parent[top]
        if self.cut(top) and self.holds[parent] == 0:
            self.policy.offer(parent, self.chain_class)
        order.reverse()
        at = np.array(order, np.int64)
        removed = list(zip(self.keys.keys(at), order, strict=True))
        self.keys.remove_each(at)
        for row in order:
            self.policy.inherit(self.parent[row], self.policy.used[row])
            self.first_child[row] = self.first_side[row] = NONE
            state = self.state[row]
            self.state[row] = DOOMED
            if state == RESERVED:
                self.state[row] = CANCELLED
            elif state == SAVED:
                self.release(row)
            else:
                self.held -= 1
                if self.holds[row] == 0:
                    self.evictable[self.space.class_of(row)] -= 1
                    self._set_free(row)
        return removed

    def doom(self, row: int) -> None:
        """The writer of a dropped block has ended; its row is free as soon as nothing else needs it."""
        self.state[row] = DOOMED
        self.release(row)

    def free_end(self, top: int, row: int, slot_class: int) -> None:
        """Free the end of a chain, from `top` to `row`, neighbours that nothing holds; their keys are still there."""
        if top < row:
            self.state_each[top : row + 1] = FREE
        else:
            self.state[row] = FREE
        self.cut(top)
        self.held -= row + 1 - top
        self.evictable[slot_class] -= row + 1 - top
        self.space.give_back_each(range(row, top - 1, -1))

    # Rows that come from a table of stored blocks: only chains, and nothing holds them

    def show(self, rows: RowArray, before: RowArray) -> None:
        """Hold the blocks of hidden keys after those before them, which are held or among them."""
        if not len(rows):
            return
        self.keys.show(rows)
        self._count_stored(rows, HELD, len(rows))
        self.is_side_each[rows] = 0
        self.first_child_each[rows] = self.first_side_each[rows] = NONE
        self.start_each[rows] = rows
        self.parent_each[rows] = before
        order = np.argsort(before, kind="stable")
        rows, before = rows[order], before[order]
        follows = before[1:] == before[:-1]
        first, last = np.append(True, ~follows), np.append(~follows, True)
        after = np.append(rows[1:], NONE)
        after[last] = there = self.first_child_each[before[last]]
        self.next_each[rows] = after
        self.previous_each[there[there != NONE]] = rows[last][there != NONE]
        self.previous_each[rows] = np.where(first, NONE, np.append(NONE, rows[:-1]))
        self.first_child_each[before[first]] = rows[first]

    def hide(self, top: int) -> tuple[RowArray, Names]:
        """Undo `show` for `top` and all after it: their rows, `top` first, and the keys of the blocks before them."""
        rows = np.array(self.subtree(top), np.int64)
        before = self.keys.names_at(self.parent_each[rows].astype(np.int64))
        self.cut(top)
        self._count_stored(rows, FREE, -len(rows))
        self.keys.hide(rows)
        return rows, before

    def _count_stored(self, rows: RowArray, state: int, held: int) -> None:
        self.state_each[rows] = state
        self.held += held
        self.evictable[self.chain_class] += held

    def join_runs(self) -> None:
        """Say of each row where its run starts."""
        for first in range(0, self.root, _PART):
            end = min(first + _PART, self.root)
            rows = np.arange(first, end)
            joined = (self.state_each[first:end] == HELD) & (self.parent_each[first:end] == rows - 1)
            if first == 0:
                joined[0] = False
            start = self.start[first - 1] if joined[0] else 0
            self.start_each[first:end] = np.maximum.accumulate(np.where(joined, start, rows))

    # Checking

    def check(self, pins: Sequence[int]) -> None:
        """Verify every invariant in O(n log n); `pins` are those on each row. Raises PactViolation."""

        def require(condition: bool, what: str) -> None:
            if not condition:
                raise PactViolation(f"the block index lost an invariant: {what}")

        rows, parent = np.arange(self.root), self.parent_each[: self.root]
        above, state = self.state_each[parent], self.state_each[: self.root]
        known, dropped = (state >= RESERVED) & (state <= HELD), state >= CANCELLED
        leads, waits = above == HELD, above >= CANCELLED
        self.space.check()
        free = np.zeros(self.root, bool)
        for some in (*self.space.free, self.space.parked if isinstance(self.space, PlainSlots) else ()):
            free[np.array(some, np.int64)] = True
        usable = rows < (self.space.usable if self.is_plain else self.root)
        accounted = known | free | dropped & usable
        require(bool((state <= DOOMED).all()), "a slot is in no state")
        require(int(known.sum()) == len(self.keys), "two keys share a slot")
        require(not (free & (known | dropped & usable)).any(), "the slots do not add up")
        require(not self.is_plain or bool((accounted == usable).all()), "a slot is neither known, free nor waiting")
        require(not (free & (state != FREE)).any(), "a slot in the free list is in use")
        numbers = rows[known]
        require(sorted(self.keys.lists()) == numbers.tolist(), "not exactly the known blocks are in the table of keys")
        found = self.keys.find_each(self.keys.names_at(numbers))
        require(bool((found == numbers).all()), "keys and slots disagree")
        reached = self.subtree(self.root)
        require(len(set(reached)) == len(reached), "a block is reached twice")
        require(sorted(reached) == [*numbers.tolist(), self.root], "the chains do not reach exactly the known blocks")
        holds = np.array(pins) + np.isin(self.state_each, (RESERVED, SAVED, CANCELLED))
        needed = {self.root}
        for holder in np.flatnonzero((known | dropped) & (holds[: self.root] > 0)).tolist():
            row = holder
            while row not in needed:
                needed.add(row)
                row = self.parent[row]
        np.add.at(holds, self.parent_each[[*needed - {self.root}]], 1)
        holds[self.root] += 1
        counted = np.append(known | free | dropped, True)
        for row in np.flatnonzero(counted & (self.holds_each != holds)).tolist():
            require(False, f"slot {row} counts {self.holds[row]} holds and has {holds[row]}")
        apart = np.append(np.cumsum(parent != rows - 1), 0)
        start = self.start_each[: self.root]

        def require_none(which: np.ndarray, what: str) -> None:
            for row in np.flatnonzero(which).tolist():
                require(False, what.format(row=row, parent=self.parent[row]))

        in_use = known | dropped
        require_none(in_use & ((start > rows) | (apart[start] != apart[rows])), "the run of slot {row} starts later")
        require_none(known & ((above < RESERVED) | waits), "slot {row} has lost its parent")
        require_none(known & (state == HELD) & ~leads, "slot {row} is held without its parent")
        require_none(known & (state == SAVED) & leads, "slot {row} waits for a held parent")
        require_none(known & (self.is_side_each[parent] != 0), "slot {row} hangs on slot {parent}, a side block")
        for row in rows[known & (holds[: self.root] == 0)].tolist():
            if self.evictable_leaf(row):
                require(self.policy.queued(row), f"slot {row} could be evicted and is not queued")
        require(bool(holds[: self.root][dropped].all()), "a dropped slot that nothing needs is not free")
        require(self.held == int((state == HELD).sum()), "the number of held blocks is wrong")
        unheld = [self.space.class_of(row) for row in rows[known & (holds[: self.root] == 0)].tolist()]
        for slot_class, evictable in enumerate(self.evictable):
            require(
                evictable == unheld.count(slot_class), f"the number of evictable blocks of class {slot_class} is wrong"
            )
        require(len(self.policy) <= self.root, "the eviction queue has outgrown the slots")
        self.policy.check()


def _starts(follows: np.ndarray) -> RowArray:
    """For rows of which all but the first are marked if they follow their neighbour: where each one's run starts."""
    starts: RowArray = np.maximum.accumulate(np.append(0, np.where(follows, 0, np.arange(1, len(follows) + 1))))
    return starts


def _neighbours(at: slice | RowArray) -> int:
    """How many of the rows, from the first on, are neighbours."""
    if isinstance(at, slice):
        return len(range(at.start, at.stop))
    breaks = np.flatnonzero(at[1:] != at[:-1] + 1)
    return int(breaks[0]) + 1 if len(breaks) else len(at)
