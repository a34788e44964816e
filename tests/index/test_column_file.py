"""An index whose columns lie in a memory file: nothing changes for its owner, also when the file is replaced."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path

import numpy as np

from kvpact.index.block_index import BlockIndex, SlotState
from kvpact.index.classed_slots import ClassedSlots
from kvpact.index.column_file import REFUSED, ColumnFile, Layout
from kvpact.index.slot_space import PlainSlots, SlotSpace

SOURCE = random.Random(54)


def chain(blocks: int) -> list[bytes]:
    return [SOURCE.randbytes(32) for _ in range(blocks)]


def save(index: BlockIndex, keys: list[bytes]) -> None:
    index.reservable(wanted=len(keys))
    reservation = index.reserve(keys, 0, len(keys))
    assert reservation is not None
    index.complete(reservation.slots)


def memory_files() -> int:
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("memfd:kvpact-index" in os.readlink(path) for path in links)


def made(space: SlotSpace, classes: int = 1) -> tuple[BlockIndex, ColumnFile]:
    columns = ColumnFile(space)
    return BlockIndex(space.num_rows, space=space, classes=classes, columns=columns), columns


def test_a_new_file_changes_nothing_for_the_owner_and_the_old_one_shows_no_block() -> None:
    index, old = made(PlainSlots(400))
    first = chain(300)
    save(index, first)
    find = index.held_prefix
    pin = index.pin(first[9])
    old_head = np.frombuffer(memoryview(old.keys.keys), np.uint64, offset=Layout.of(401, 0).head)
    old_states = old.state[0]
    assert (old_states == SlotState.HELD).sum() == 301  # with the root
    index.reset_columns()
    index.check()
    assert find(first) == 300
    assert index.slots_of(first) == [*range(300)]
    assert not old_states.any()
    assert old_head[REFUSED] == 1
    second = chain(390)
    save(index, second)
    assert (find(first), find(second)) == (10, 390)
    assert not old_states.any(), "what is saved later is in the new file alone"
    index.unpin(pin)
    index.check()


def test_classes_of_extents_are_in_the_file_whatever_moves() -> None:
    space = ClassedSlots([4, 2], 8)
    index, columns = made(space, 2)
    for turn in range(40):
        keys = chain(4)
        save(index, keys)
        index.reservable(keys[-1], 2, 1)
        sides = index.reserve_sides(chain(2), keys[-2:], 1)
        assert sides is not None
        index.complete(sides.slots)
        if turn % 8 == 7:
            index.reset_columns()
            columns = index.columns or columns
        assert [*columns.classes] == [space.class_of(4 * extent) for extent in range(8)]
    index.check()
    assert {0, 1} <= set(columns.classes)
    assert index.held_count > 8


def test_an_index_that_nobody_uses_leaves_no_descriptor() -> None:
    gc.collect()
    before = memory_files()
    index, _ = made(PlainSlots(4))
    save(index, chain(3))
    index.reset_columns()
    assert memory_files() > before
    del index, _
    gc.collect()
    assert memory_files() == before
