"""Table of an index: a row for each slot, with key, state and holds.

Owns keys, states, holds, links and the eviction policy; others read its columns. Decides nothing: `block_index.py`
says what is reserved, pinned and dropped, `losses.py` how many rows are evicted, `restoring.py` what comes back from a
table of stored blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import numpy as np

from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey
from kvpact.index.announced import Announced, Subscriber
from kvpact.index.claims import Claims
from kvpact.index.column_file import ColumnFile
from kvpact.index.key_table import FEW, KeyTable, RowArray, zeros
from kvpact.index.key_table import NONE as NONE
from kvpact.index.links import Links, selection
from kvpact.index.lru import LeastRecentlyUsed
from kvpact.index.policy import EvictionPolicy
from kvpact.index.shares import OwnerShares
from kvpact.index.slot_space import SlotSpace

ROOT: Final[BlockKey] = b""
"""Parent of a chain's first block."""


class SlotState(IntEnum):
    """State of a slot.

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


class Table:
    """Rows of an index, each with the block that lies in it. The root is always held.

    `holds` counts why a row must stay: its pins, its own writer (or its wait for its parent), and each child that must
    stay. A row without holds is evictable, with all rows after it. A row is dropped and evicted with the rows that are
    attached to it.

    The rows of chains are of one class of `space`, attached rows of the same or of others; each class is evicted for
    itself.
    """

    __slots__ = (
        "announced", "bare_ends_first", "chain_class", "columns", "evictable", "held", "holds", "holds_each",
        "keys", "links", "policy", "root", "shares", "space", "state", "state_each",
    )  # fmt: skip

    def __init__(
        self,
        space: SlotSpace,
        classes: int,
        chain_class: int,
        bare_ends_first: bool = False,
        columns: ColumnFile | None = None,
    ) -> None:
        """Make rows of so many classes, those of chains of `chain_class`.

        Keys, states and the classes of extents lie in `columns`, if given, where other processes can read them.
        """
        self.bare_ends_first = bare_ends_first
        """True if the end of a chain goes first once nothing is attached to it."""
        self.space = space
        """Free rows."""
        self.chain_class = chain_class
        self.root = space.num_rows
        self.evictable = [0] * classes
        """Per class, blocks that nothing holds."""
        rows = self.root + 1
        self.keys = KeyTable(rows, columns.keys if columns else None)
        self.links = Links(self.root)
        self.state_each, self.state = columns.state if columns else zeros(rows, "u1")
        self.state[self.root] = HELD
        self.holds_each, self.holds = zeros(rows, "i4")
        self.holds[self.root] = 1
        self.held = 0
        """Blocks in the state HELD."""
        self.policy: EvictionPolicy = LeastRecentlyUsed(rows, classes)
        self.shares: OwnerShares | None = None
        """The policy, if the place is divided among owners."""
        self.announced: Announced | None = None
        """The rows that others were told of; None: none ever is. Rows that lose their keys leave it."""
        self.columns = columns
        """File with the keys, states and classes; None: they lie in memory of this process."""
        if columns:
            space.move_classes(columns.classes)
            columns.publish(self.keys.factor)

    def divide(self, parts: Sequence[int]) -> OwnerShares:
        """Divide the place, still empty, among owners: owner 0 and one with each of these shares."""
        self.shares = OwnerShares(self.root + 1, self.space, parts)
        self.policy = self.shares
        return self.shares

    def announce_to(self, subscriber: Subscriber) -> None:
        """Tell `subscriber` of announced rows that lose their keys, from now on."""
        self.announced = Announced(self.links, subscriber)

    def reset(self) -> None:
        """Refuse the file to others, which find no block there any more, and go on in a new one; the old one is closed
        once nothing refers to it. Raises OSError, and changes nothing then."""
        old = self.columns
        if old is None:
            return
        self.columns = columns = ColumnFile(self.space, old.claims)
        old.refuse()
        states = self.state_each
        self.state_each, self.state = columns.state
        self.state_each[:] = states
        states[:] = FREE
        self.keys.move(columns.keys)
        self.space.move_classes(columns.classes)
        columns.publish(self.keys.factor)

    # States and holds

    def hold(self, row: int) -> None:
        """Add a hold to `row`; its first one adds a hold to its parent. The root is always held, so the walk ends.

        What is held is closed under prefixes, so of a run only the end can be unheld.
        """
        holds = self.holds
        parent = self.links.parent
        start = self.links.start
        newly_held = 0
        if self.links.is_side[row] and not holds[row]:
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
        links = self.links
        holds = self.holds
        state = self.state
        slot_class = self.space.class_of(row) if links.is_side[row] else self.chain_class
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
                if links.first_child[row] == NONE:
                    self.policy.offered(row, slot_class)
            row = links.parent[top]
            if slot_class != self.chain_class:
                self.evictable[slot_class] += evictable
                slot_class = self.chain_class
                evictable = 0
        holds[row] -= 1
        if evictable:
            self.evictable[slot_class] += evictable

    def _held_by_next(self, row: int) -> int:
        """First of the rows in a run up to `row` that have one hold each and are not dropped; `row` if few."""
        first = self.links.start[row]
        if row - first < FEW:
            return row
        others = np.flatnonzero(self.holds_each[first : row + 1] != 1)
        if len(others):
            first += int(others[-1]) + 1
        return row if DOOMED in self.state_each[first : row + 1].tobytes() else first

    def reserve_sides(self, keys: Sequence[BlockKey], parents: Sequence[int], rows: Sequence[int]) -> None:
        """Enter side blocks, each attached to one of `parents`, into the unused `rows`, which have a writer now."""
        for key, parent, row in zip(keys, parents, rows, strict=True):
            self.keys.add(key, row)
            self.links.add(row, parent, is_side=True)
            self.state[row] = RESERVED
            self.holds[row] = 1
            self.hold(parent)
        self.policy.attached(selection(rows), self.space.class_of(rows[0]), parents)

    def reserve_chain(self, keys: Sequence[BlockKey], parent: int, rows: Sequence[int], depth: int, left: int) -> None:
        """Enter `keys`, one after the other, after `parent` into the unused `rows`, which have a writer now.

        `depth` blocks of the chain come before them, and `left` after them.
        """
        at = self.links.add_chain(rows, parent)
        self.keys.add_each(keys, rows, at)
        self.state_each[at] = RESERVED
        self.holds_each[at] = 2  # of its writer, and of the row after it
        self.holds[rows[-1]] = 1
        self.policy.inserted(at, self.chain_class, depth, left)
        self.hold(parent)

    def _set_free(self, row: int) -> None:
        self.state[row] = FREE
        if self.columns is None or self.columns.claims is None:
            self.space.give_back(row)
        else:
            self._claim(self.columns.claims, range(row, row + 1))

    def _claim(self, claims: Claims, rows: range) -> None:
        """Free those of these rows that no neighbour leases; the others are DOOMED until then."""
        self.state_each[rows.start : rows.stop] = DOOMED
        self._free_each(claims.granted(rows))

    def _free_each(self, runs: Sequence[range]) -> None:
        for rows in runs:
            self.state_each[rows.start : rows.stop] = FREE
            self.space.give_back_each(rows[::-1])

    def claim_again(self) -> None:
        """Free rows whose leases have ended since they left the table: of `claims.RETRIED_RUNS` runs."""
        if self.columns is not None and self.columns.claims is not None:
            self._free_each(self.columns.claims.retried())

    def evictable_leaf(self, row: int) -> bool:
        """True for a held block without holds and without a next block."""
        return self.holds[row] == 0 and self.state[row] == HELD and self.links.first_child[row] == NONE

    def evictable_from(self, leaf: int, most: int) -> int:
        """See `Rows`. Of few neighbours the leaf alone."""
        start = self.links.start[leaf]
        if leaf - start < FEW or most <= FEW or self.links.first_side[leaf] != NONE:
            return leaf
        above = slice(max(start, leaf - most + 1), leaf)
        (stay,) = (self.links.parted(above) | (self.holds_each[above] != 0)).nonzero()
        return above.start + (int(stay[-1]) + 1 if len(stay) else 0)

    def save(self, row: int, became_held: list[BlockKey]) -> None:
        """Mark a row as filled: it is held as soon as its parent is, and the saved blocks that waited for it."""
        links = self.links
        state = self.state
        state[row] = SAVED
        if state[links.parent[row]] != HELD:
            return
        complete = [row]
        for parent in complete:
            state[parent] = HELD
            self.held += 1
            became_held.append(self.keys.key(parent))
            if self.holds[parent] > 1:
                self.holds[parent] -= 1
            else:
                self.release(parent)
            if links.is_side[parent]:
                continue
            for child in (links.first_child[parent], links.first_side[parent]):
                while child != NONE:
                    if state[child] == SAVED:
                        complete.append(child)
                    child = links.next[child]

    def save_chain(self, rows: Sequence[int], at: slice | RowArray, became_held: list[BlockKey]) -> bool:
        """Hold all `rows` but the last, if they are a reserved run and the block before it is held; return True if so.

        In a run each row is the only child of the one before it, and nothing is attached to that one.
        """
        after_held = self.state[self.links.parent[rows[0]]] == HELD
        if not (after_held and (self.state_each[at] == RESERVED).all() and self.links.is_run(at)):
            return False
        above = slice(at.start, at.stop - 1) if isinstance(at, slice) else at[:-1]
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
        order = self.links.subtree(top)
        self._leave(order)
        order.reverse()
        at = np.array(order, np.int64)
        lost_sides = bool(self.links.is_side_each[at].any())
        removed = list(zip(self.keys.keys(at), order, strict=True))
        if self.announced is not None:
            self.announced.leave(at)
        self.keys.remove_each(at)
        for row in order:
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
        if lost_sides:
            self._outdate_end(self.links.parent[top])
        return removed

    def remove_all(self) -> list[tuple[BlockKey, int]]:
        """Drop every block, as `remove` does for one chain."""
        removed: list[tuple[BlockKey, int]] = []
        while (first := self.links.first_child[self.root]) != NONE:
            removed += self.remove(first)
        return removed

    def doom(self, row: int) -> None:
        """End the writer of a dropped block; its row is free as soon as nothing else needs it."""
        self.state[row] = DOOMED
        self.release(row)

    def free_end(self, rows: range, slot_class: int) -> None:
        """Free the end of a chain, neighbours that nothing holds; the keys of those that become free are still there.

        Rows that a neighbour leases become free later.
        """
        if len(rows) > 1:
            self.state_each[rows.start : rows.stop] = FREE
        else:
            self.state[rows[0]] = FREE
        self._leave(rows)
        self.held -= len(rows)
        self.evictable[slot_class] -= len(rows)
        if self.columns is None or self.columns.claims is None:
            self.space.give_back_each(rows[::-1])
        else:
            self._claim(self.columns.claims, rows)
            waiting = np.flatnonzero(self.state_each[rows.start : rows.stop] == DOOMED) + rows.start
            if len(waiting):
                if self.announced is not None:
                    self.announced.leave(waiting)
                self.keys.remove_each(waiting)
        if self.links.is_side[rows[0]]:
            self._outdate_end(self.links.parent[rows[0]])

    def outdate_sides(self, rows: Sequence[int]) -> None:
        """Let the blocks attached to these rows go first that a request which goes on after them needs no more."""
        for side, row in self.links.passed(rows):
            self._outdate((side,), row)

    def _outdate(self, rows: Sequence[int], parent: int) -> None:
        """Let a side row, or the end of a chain, its last row first, go before all others."""
        self.policy.outdated(rows, parent)
        if self.evictable_leaf(rows[0]):
            self.policy.offered(rows[0], self.space.class_of(rows[0]))

    def _outdate_end(self, row: int) -> None:
        """Let the end of a chain go first, if nothing is attached to it any more: no match can end there."""
        rows = self.links.bare_end(row) if self.bare_ends_first else ()
        if rows:
            self._outdate(rows, self.links.parent[rows[-1]])

    def _leave(self, rows: Sequence[int]) -> None:
        """Cut the first of `rows`, with the others after it, from its parent, which may become evictable."""
        parent = self.links.parent[rows[0]]
        self.policy.gone(rows, parent)
        if self.links.cut(rows[0]) and not self.holds[parent]:
            self.policy.offered(parent, self.chain_class)

    # Rows that come from a table of stored blocks: only chains, and nothing holds them

    def count_stored(self, rows: RowArray, state: int, held: int) -> None:
        """Set the state of these rows, and count `held` more of them as held."""
        self.state_each[rows] = state
        self.held += held
        self.evictable[self.chain_class] += held
