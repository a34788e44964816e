"""Restore of an index from a table of stored blocks: piece by piece, and blocks read so far can be served.

Owns the blocks whose chains may still reach the root. Reads nothing itself.
"""

from __future__ import annotations

import numpy as np

from kvpact.index.key_table import NONE, FloatArray, Names, RowArray
from kvpact.index.table import FREE, HELD, Table

_UNKNOWN = -2
_REACHED = -1


class Restoring:
    """Restore of an empty table: `add` for each piece, `settle`, `order_of_use`, `end`.

    Until the end nothing may be reserved; what is held can be looked up, used, pinned and dropped. A block is held as
    soon as it and all blocks before it have been read; others are unknown.

    About 0.3 us a block, whatever the order of the table: parents are found by keys, and whether a chain reaches the
    root by doubling the steps along it. Blocks whose parents come later in the table are looked at again when the table
    has doubled, and at the end.
    """

    __slots__ = ("_rejected", "_settled_at", "_table", "_waiting")

    def __init__(self, table: Table) -> None:
        """Begin with no blocks in the table. `BlockIndex.begin_restore` makes it."""
        self._table = table
        self._waiting: list[tuple[RowArray, Names]] = []
        """Blocks that are not held: slots, and keys of the blocks before them."""
        self._rejected: list[RowArray] = []
        self._settled_at = 0
        """Number of blocks held or waiting when the waiting ones were last looked at."""
        table.space.restore({0: np.arange(table.space.usable)})

    def add(self, slots: RowArray, keys: Names, parents: Names, last_used: FloatArray) -> None:
        """Enter blocks of the table.

        `slots` are in ascending order, within the usable ones, and none was named before. `keys` and `parents` are of
        shape (blocks, 4), zeros for no parent. `last_used` is any number, not negative, that grows with time.
        """
        self._table.policy.restored(slots, last_used)
        slots, keys, parents = self._without_doubles(slots, keys, parents)
        self._table.keys.add_hidden(keys, slots)
        known = self._table.held + sum(len(waiting) for waiting, _ in self._waiting) + len(slots)
        if known >= 2 * self._settled_at:
            self._settled_at = known
            self._settle([(slots, parents), *self._waiting])
        else:
            self._waiting = [*self._waiting, *self._reach(slots, parents)]

    def settle(self) -> RowArray:
        """End the reading of the table; return the slots of blocks that cannot be used.

        Those are blocks whose chains do not reach the root, and of two blocks with one key the less recently used one,
        or the one in the higher slot.
        """
        self._settle(self._waiting)
        lost = [slots for slots, _ in self._waiting]
        self._waiting = []
        for slots in lost:
            self._table.keys.show(slots)
            self._table.keys.remove_each(slots.tolist())
        rejected = [*self._rejected, *lost]
        self._rejected = []
        return np.concatenate(rejected) if rejected else np.zeros(0, np.int64)

    def order_of_use(self) -> RowArray:
        """Rank the held rows by the policy, for `end`; join runs, too.

        After `settle`. The owner's lock is not needed: meanwhile blocks may be used, pinned and dropped. A use
        in that time may not count.
        """
        table = self._table
        table.links.join_runs(table.state_each == HELD)
        return table.policy.ranked(np.flatnonzero(table.state_each[: table.root] == HELD))

    def end(self, order: RowArray) -> None:
        """Hand out the free slots; `order` is what `order_of_use` has returned."""
        table = self._table
        states = self._table.state_each
        rows = order[states[order] == HELD]
        table.policy.begin(rows, rows[table.links.first_child_each[rows] == NONE])
        table.space.restore({0: np.flatnonzero(states[: table.root] != FREE)})

    # Blocks with one key

    def _without_doubles(self, slots: RowArray, keys: Names, parents: Names) -> tuple[RowArray, Names, Names]:
        """Reject one of each two blocks with one key; return the others. A valid table has none."""
        older = self._table.keys.find_either(keys)
        clash = np.flatnonzero(older >= 0).tolist()
        words = np.sort(keys[:, 0])
        if not clash and not (words[1:] == words[:-1]).any():
            return slots, keys, parents
        keep = np.ones(len(slots), np.bool_)
        best = dict[bytes, int]()
        use = [self._table.policy.last_use((row,)) for row in slots.tolist()]
        for index in range(len(slots)):
            other = best.setdefault(keys[index].tobytes(), index)
            if other != index:
                loser = other if use[index] > use[other] else index
                best[keys[index].tobytes()] = other + index - loser
                keep[loser] = False
        for index in clash:
            there = int(older[index])
            is_younger = use[index] > self._table.policy.last_use((there,))
            if keep[index] and not (is_younger and self._give_up(there)):
                keep[index] = False
        self._rejected.append(slots[~keep])
        return slots[keep], keys[keep], parents[keep]

    def _give_up(self, row: int) -> bool:
        """Reject a block for a younger one of its key; what came after it waits. False if it is in use."""
        table = self._table
        if table.state[row] == HELD:
            if table.holds[row]:
                return False
            rows, before = self._hide(row)
            self._waiting = [*self._waiting, (rows[1:], before[1:])]
        else:
            self._waiting = [(some[some != row], names[some != row]) for some, names in self._waiting]
        one = np.array([row])
        table.keys.show(one)
        table.keys.remove_each([row])
        self._rejected.append(one)
        return True

    # Chains

    def _settle(self, blocks: list[tuple[RowArray, Names]]) -> None:
        """Look at all waiting blocks together."""
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
        jump[(before >= 0) & (self._table.state_each[before] == HELD)] = _REACHED
        for _ in range(len(slots).bit_length() + 1):
            going = np.flatnonzero(jump >= 0)
            if not len(going):
                break
            jump[going] = jump[jump[going]]  # twice as far with each turn
        whole = jump == _REACHED
        if whole.all():
            self._show(slots, before)
            return []
        self._show(slots[whole], before[whole])
        return [(slots[~whole], parents[~whole])]

    def _show(self, rows: RowArray, before: RowArray) -> None:
        """Hold the blocks of hidden keys after those before them, which are held or among them; nothing holds them."""
        if not len(rows):
            return
        self._table.keys.show(rows)
        self._table.count_stored(rows, HELD, len(rows))
        self._table.links.add_stored(rows, before)

    def _hide(self, top: int) -> tuple[RowArray, Names]:
        """Undo `_show` for `top` and all after it: their rows, `top` first, and the keys of the blocks before them."""
        table = self._table
        rows = np.array(table.links.subtree(top), np.int64)
        before = table.keys.names_at(table.links.parent_each[rows].astype(np.int64))
        table.links.cut(top)
        table.count_stored(rows, FREE, -len(rows))
        if table.announced is not None:
            table.announced.leave(rows)
        table.keys.hide(rows)
        return rows, before

    def _rows_before(self, slots: RowArray, parents: Names) -> RowArray:
        """Row of each parent, the root's for none; NONE if it is unknown. Most are the neighbour."""
        rows = slots - 1
        far = np.flatnonzero((~self._table.keys.names_at(rows) != parents).any(axis=1) | (rows < 0))
        rows[far] = self._table.keys.find_either(parents[far])
        rows[far[~parents[far].any(axis=1)]] = self._table.root
        return rows
