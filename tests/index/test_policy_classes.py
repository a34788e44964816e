"""The eviction policy over rows that change their class, against a model that searches all rows."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from kvpact.index.lru import LeastRecentlyUsed

ROWS = 6
CLASSES = 2


@dataclass
class Row:
    """A block; `tick` is that of its last use, 0 if it is outdated."""

    slot_class: int
    tick: int
    is_leaf: bool = False


class Held:
    """Rows with blocks, each alone."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}

    def evictable_leaf(self, row: int) -> bool:
        """See `Rows`."""
        return row in self.rows and self.rows[row].is_leaf

    def evictable_from(self, leaf: int, most: int) -> int:
        """See `Rows`."""
        return leaf

    def first(self, slot_class: int) -> int | None:
        """The row of a class that goes next."""
        leaves = [(one.tick, at) for at, one in self.rows.items() if one.is_leaf and one.slot_class == slot_class]
        return min(leaves)[1] if leaves else None


@pytest.mark.parametrize("seed", range(20))
def test_each_class_evicts_its_own_rows_the_outdated_ones_first(seed: int) -> None:
    chance = random.Random(seed)
    held = Held()
    policy = LeastRecentlyUsed(ROWS + 1, CLASSES)
    moved = outdated = 0
    before: dict[int, int] = {}
    for _ in range(2000):
        row = chance.randrange(ROWS)
        one = held.rows.get(row)
        what = chance.choice(["leaf", "inner", "use", "outdate", "go", "go", "take"])
        if what == "take":
            slot_class = chance.randrange(CLASSES)
            taken = policy.take(held, slot_class, 1)
            assert (taken[0] if taken is not None else None) == held.first(slot_class)
            row = taken[0] if taken is not None else ROWS
        elif one is None:
            one = held.rows[row] = Row(chance.randrange(CLASSES), policy.now + 1)
            policy.inserted(slice(row, row + 1), one.slot_class, 0, 0)
            moved += before.get(row, one.slot_class) != one.slot_class
        elif what == "leaf":
            one.is_leaf = True
            policy.offered(row, one.slot_class)
        elif what == "inner":
            one.is_leaf = False
        elif what == "use":
            policy.used((row,))
            one.tick = policy.now
        elif what == "outdate":
            policy.outdated((row,), ROWS)
            one.tick = 0
            outdated += 1
            if one.is_leaf:
                policy.offered(row, one.slot_class)
        if what in ("go", "take") and row in held.rows:
            policy.gone((row,), ROWS)
            before[row] = held.rows.pop(row).slot_class
        policy.check([at for at, each in held.rows.items() if each.is_leaf])
    assert moved > 50
    assert outdated > 50
