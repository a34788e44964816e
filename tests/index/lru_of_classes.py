"""A cache with blocks of several classes, least recently used first, that has its rows from a slot space."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvpact.index.classed_slots import ClassedSlots

Key = tuple[int, int]
"""Class and name of a block."""


class CacheOfClasses:
    """Blocks without chains: each class evicts its own, and asks the space for memory."""

    def __init__(self, space: ClassedSlots, *, moves: bool = True) -> None:
        self.space, self.moves = space, moves
        self.now = 0
        self.rows: list[OrderedDict[Key, int]] = [OrderedDict() for _ in space.places]
        self.keys: dict[int, Key] = {}
        self.used: dict[int, int] = {}
        self.pinned: set[int] = set()
        self.hits = self.evicted = self.dropped = 0

    def oldest(self, slot_class: int) -> int | None:
        return next((row for row in self.rows[slot_class].values() if row not in self.pinned), None)

    def is_needed(self, row: int) -> bool:
        return row in self.pinned

    def last_use(self, row: int) -> int | None:
        return None if row in self.pinned else self.used.get(row, 0)

    def drop_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            if row in self.keys:
                self.forget(row)
                self.dropped += 1

    def forget(self, row: int) -> None:
        self.forget_key(row)
        self.space.give_back(row)

    def forget_key(self, row: int) -> None:
        """Forget the block in a row that somebody else will give back."""
        key = self.keys.pop(row)
        del self.rows[key[0]][key], self.used[row]

    def get(self, key: Key) -> bool:
        """Use a block, and store it if it is not there; returns whether it was."""
        self.now += 1
        slot_class = key[0]
        row = self.rows[slot_class].get(key)
        if row is not None:
            self.rows[slot_class].move_to_end(key)
            self.used[row] = self.now
            self.hits += 1
            return True
        if not self.space.free[slot_class] and self.moves:
            self.space.obtain(slot_class, 1, self)
        if not self.space.free[slot_class]:
            victim = self.oldest(slot_class)
            if victim is None:
                return False
            self.forget(victim)
            self.evicted += 1
        (row,) = self.space.take(1, slot_class)
        self.keys[row], self.used[row] = key, self.now
        self.rows[slot_class][key] = row
        return False
