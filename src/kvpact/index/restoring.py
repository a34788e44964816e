"""How an index is filled from a table of what its place holds: piece by piece, and what is known so far can be served.

Owns the blocks of which it is not known yet whether their chains reach the root. Reads nothing itself.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpact.errors import PactViolation
from kvpact.index.key_table import NONE, Names, RowArray
from kvpact.index.losses import Losses
from kvpact.index.table import FREE, HELD

_UNKNOWN, _REACHED = -2, -1

_PART: Final = 1 << 16
"""Rows that are worked on at once where all rows are, so that what is computed of them stays small."""


class Restoring(Losses):
    """Rows that come from a table: `begin_restore`, `restore_some` for each piece, `settle_restore`, `end_restore`.

    Between the first call and the last one nothing may be reserved; what is held can be looked up, used, pinned and
    dropped. A block is held as soon as it and all blocks before it have been read; others are unknown.

    About 0.3 us a block, whatever the order of the table: parents are found by keys, and whether a chain reaches the
    root by doubling the steps along it. Blocks whose parents come later in the table are looked at again when the table
    has doubled, and at the end.
    """

    __slots__ = ("_rejected", "_settled_at", "_waiting")

    def _reset(self) -> None:
        super()._reset()
        self._waiting: list[tuple[RowArray, Names]] = []
        """(slots, keys of the blocks before them) of blocks that are not held."""
        self._rejected: list[RowArray] = []
        self._settled_at = 0
        """Blocks that were held or waited when those that wait were looked at last."""

    def begin_restore(self) -> None:
        """Begin to fill an empty index. Raises PactViolation if it is not empty."""
        if self.free_slots != self.usable_slots:
            raise PactViolation(f"only an empty index can be restored, not one with {len(self)} blocks")
        self._reset()
        self.space.restore({0: np.arange(self.usable_slots)})
        self._policy.begin_restore()

    def restore_some(self, slots: RowArray, keys: Names, parents: Names, last_used: NDArray[np.float64]) -> None:
        """Enter blocks of the table.

        `slots` are in ascending order, within the usable ones, and none was named before. `keys` and `parents` are of
        shape (blocks, 4), zeros for no parent. `last_used` is any number, not negative, that grows with time.
        """
        slots, keys, parents, last_used = self._without_doubles(slots, keys, parents, last_used)
        self._policy.used_each[slots] = (np.fmax(last_used, 0.0) + 0.0).view(np.int64)  # their order is the numbers'
        self._keys.add_hidden(keys, slots)
        known = self._held + sum(len(waiting) for waiting, _ in self._waiting) + len(slots)
        if known >= 2 * self._settled_at:
            self._settled_at = known
            self._settle([(slots, parents), *self._waiting])
        else:
            self._waiting = [*self._waiting, *self._reach(slots, parents)]

    def settle_restore(self) -> RowArray:
        """The table was read in full. Returns the slots of blocks that cannot be used.

        Those are blocks whose chains do not reach the root, and of two blocks with one key the less recently used one,
        or the one in the higher slot.
        """
        self._settle(self._waiting)
        lost = [slots for slots, _ in self._waiting]
        self._waiting = []
        for slots in lost:
            self._keys.show(slots)
            self._keys.remove_each(slots.tolist())
        rejected, self._rejected = [*self._rejected, *lost], []
        return np.concatenate(rejected) if rejected else np.zeros(0, np.int64)

    def order_of_use(self) -> RowArray:
        """The held rows in the order of their last use, for `end_restore`; joins runs, too.

        After `settle_restore`. The owner's lock is not needed: meanwhile blocks may be used, pinned and dropped. A use
        in that time may not count.
        """
        self._join_runs()
        rows = np.flatnonzero(self._state_each[: self.num_slots] == HELD)[::-1]
        return rows[np.argsort(self._policy.used_each[rows], kind="stable")]

    def end_restore(self, order: RowArray) -> None:
        """Hand out the free slots; `order` is what `order_of_use` has returned."""
        states = self._state_each
        rows = order[states[order] == HELD]
        self._policy.restore(rows, rows[self._first_child_each[rows] == NONE])
        self.space.restore({0: np.flatnonzero(states[: self.num_slots] != FREE)})

    # Blocks with one key

    def _without_doubles(
        self, slots: RowArray, keys: Names, parents: Names, last_used: NDArray[np.float64]
    ) -> tuple[RowArray, Names, Names, NDArray[np.float64]]:
        """What is left after of each two blocks with one key one was rejected. There are none in a sound table."""
        older = self._keys.find_either(keys)
        clash = np.flatnonzero(older >= 0).tolist()
        words = np.sort(keys[:, 0])
        if not clash and not (words[1:] == words[:-1]).any():
            return slots, keys, parents, last_used
        keep, best = np.ones(len(slots), np.bool_), dict[bytes, int]()
        times = np.fmax(last_used, 0.0)
        for index in range(len(slots)):
            other = best.setdefault(keys[index].tobytes(), index)
            if other != index:
                loser = other if times[index] > times[other] else index
                best[keys[index].tobytes()] = other + index - loser
                keep[loser] = False
        for index in clash:
            there = int(older[index])
            is_younger = float(times[index]) > float(self._policy.used_each[there : there + 1].view(np.float64)[0])
            if keep[index] and not (is_younger and self._give_up(there)):
                keep[index] = False
        self._rejected.append(slots[~keep])
        return slots[keep], keys[keep], parents[keep], last_used[keep]

    def _give_up(self, row: int) -> bool:
        """Reject a block for a younger one of its key; what came after it waits. False if it is in use."""
        if self._state[row] == HELD:
            if self._holds[row]:
                return False
            rows = np.array(self._subtree(row), np.int64)
            before = self._keys.names_at(self._parent_each[rows].astype(np.int64))
            self._cut(row)
            self._state_each[rows] = FREE
            self._held -= len(rows)
            self._evictable[self._chain_class] -= len(rows)
            self._keys.hide(rows)
            self._waiting = [*self._waiting, (rows[1:], before[1:])]
        else:
            self._waiting = [(some[some != row], names[some != row]) for some, names in self._waiting]
        one = np.array([row])
        self._keys.show(one)
        self._keys.remove_each([row])
        self._rejected.append(one)
        return True

    # Chains

    def _settle(self, blocks: list[tuple[RowArray, Names]]) -> None:
        """Look at all blocks that wait, together."""
        self._waiting = []
        if blocks:
            slots, parents = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
            order = np.argsort(slots)
            self._waiting = self._reach(slots[order], parents[order])

    def _reach(self, slots: RowArray, parents: Names) -> list[tuple[RowArray, Names]]:
        """Hold those of these blocks, in the order of their slots, whose chain reaches the root; return the others."""
        before = self._rows_before(slots, parents)
        place = np.searchsorted(slots, before)
        place[place == len(slots)] = 0
        jump = np.where((before >= 0) & (slots[place] == before), place, _UNKNOWN)
        jump[(before >= 0) & (self._state_each[before] == HELD)] = _REACHED
        for _ in range(len(slots).bit_length() + 1):
            going = np.flatnonzero(jump >= 0)
            if not len(going):
                break
            jump[going] = jump[jump[going]]  # twice as far with each turn
        whole = jump == _REACHED
        if whole.all():
            self._hold_chains(slots, before)
            return []
        self._hold_chains(slots[whole], before[whole])
        return [(slots[~whole], parents[~whole])]

    def _rows_before(self, slots: RowArray, parents: Names) -> RowArray:
        """The row of each parent, the root's for none; NONE if it is unknown. Most are the neighbour."""
        rows = slots - 1
        far = np.flatnonzero((~self._keys.names_at(rows) != parents).any(axis=1) | (rows < 0))
        rows[far] = self._keys.find_either(parents[far])
        rows[far[~parents[far].any(axis=1)]] = self._root
        return rows

    def _hold_chains(self, rows: RowArray, before: RowArray) -> None:
        """Enter blocks after those before them, which are held or among them."""
        if not len(rows):
            return
        self._keys.show(rows)
        self._state_each[rows] = HELD
        self._held += len(rows)
        self._evictable[self._chain_class] += len(rows)
        self._is_side_each[rows] = 0
        self._first_child_each[rows] = self._first_side_each[rows] = NONE
        self._start_each[rows] = rows
        self._parent_each[rows] = before
        order = np.argsort(before, kind="stable")
        rows, before = rows[order], before[order]
        follows = before[1:] == before[:-1]
        first, last = np.append(True, ~follows), np.append(~follows, True)
        after = np.append(rows[1:], NONE)
        after[last] = there = self._first_child_each[before[last]]
        self._next_each[rows] = after
        self._previous_each[there[there != NONE]] = rows[last][there != NONE]
        self._previous_each[rows] = np.where(first, NONE, np.append(NONE, rows[:-1]))
        self._first_child_each[before[first]] = rows[first]

    # The end

    def _join_runs(self) -> None:
        """Say of each row where its run starts."""
        for first in range(0, self.num_slots, _PART):
            end = min(first + _PART, self.num_slots)
            rows = np.arange(first, end)
            joined = (self._state_each[first:end] == HELD) & (self._parent_each[first:end] == rows - 1)
            if first == 0:
                joined[0] = False
            start = self._start[first - 1] if joined[0] else 0
            starts = np.maximum.accumulate(np.where(joined, start, rows))
            self._start_each[first:end] = starts
