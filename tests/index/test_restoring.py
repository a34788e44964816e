"""An index filled from a table piece by piece, against the plain rule: sort, refuse doubles, walk from the root."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from stored_blocks import StoredBlock, restore

from kvpact.index.block_index import ROOT, BlockIndex
from kvpact.index.key_table import RowArray

SLOTS = 48


def key(name: int) -> bytes:
    """Named 0: the root. The keys of one residue have one hash."""
    return bytes([name % 3]) * 8 + name.to_bytes(16, "big") + b"z" * 8 if name else ROOT


def rule(table: list[StoredBlock]) -> tuple[dict[bytes, int], list[bytes]]:
    """Key -> slot of what can be used; and the keys in the order of their eviction."""
    chosen: dict[bytes, StoredBlock] = {}
    for block in sorted(table, key=lambda block: block.last_used, reverse=True):
        chosen.setdefault(block.key, block)
    children: dict[bytes, list[bytes]] = {}
    for block in chosen.values():
        children.setdefault(block.parent, []).append(block.key)
    reached = [ROOT]
    for parent in reached:
        reached += children.pop(parent, ())
    held = set(reached[1:])
    use = {name: [chosen[name].last_used, -chosen[name].slot] for name in held}
    order = list[bytes]()
    while held:
        parents = {chosen[name].parent for name in held}
        victim = min((name for name in held if name not in parents), key=use.__getitem__)
        held.remove(victim)
        order.append(victim)
        parent = chosen[victim].parent
        if parent:
            use[parent] = max(use[parent], use[victim])
    return {name: chosen[name].slot for name in reached[1:]}, order


def restored(table: list[StoredBlock], cuts: list[int]) -> tuple[BlockIndex, set[int]]:
    """An index from a table, in pieces that end at the slots `cuts`; and the slots that it has refused."""
    index = BlockIndex(SLOTS)
    return index, restore(index, table, cuts)


def eviction_order(index: BlockIndex) -> list[bytes]:
    order = list[bytes]()
    for _ in range(index.held_count):
        before = {index.key_at(slot) for slot in range(SLOTS)} - {None}
        new = [(b"new-%d" % block).ljust(32) for block in range(index.free_slots + 1)]
        reservation = index.reserve(new, 0, len(new))
        assert reservation is not None
        gone = [name for name in before if name is not None and name not in index]
        assert len(gone) == reservation.evicted
        order += gone
        index.abandon(reservation.slots)
    return order


blocks = st.builds(
    lambda name, parent, used: StoredBlock(key(name), key(parent), 0, float(used)),
    st.integers(1, 40),
    st.integers(0, 40),
    st.integers(0, 30),
)


@st.composite
def tables(draw: st.DrawFn) -> list[StoredBlock]:
    """Chains in any order of slots, and blocks that fit nowhere, have a key that is there already, or form a circle."""
    trees = [
        StoredBlock(key(name), key(draw(st.integers(max(0, name - 2), name - 1))), 0, float(draw(st.integers(0, 30))))
        for name in range(1, draw(st.integers(1, 36)))
    ]
    table = trees + draw(st.lists(blocks, max_size=12))
    slots = draw(st.permutations(range(SLOTS)))
    if draw(st.booleans()):
        slots = sorted(slots[: len(table)])
    return [replace(block, slot=slot) for block, slot in zip(table, slots, strict=False)]


@settings(max_examples=150, deadline=None)
@given(table=tables(), cuts=st.lists(st.integers(1, SLOTS - 1), max_size=5).map(sorted))
def test_h59_what_comes_back_is_what_the_plain_rule_says(table: list[StoredBlock], cuts: list[int]) -> None:
    table.sort(key=lambda block: block.slot)
    expected, order = rule(table)
    index, refused = restored(table, cuts)
    assert {name: index.slot(name) for name in expected} == expected
    assert len(index) == index.held_count == len(expected)
    assert refused == {block.slot for block in table} - set(expected.values())
    assert index.free_slots == SLOTS - len(expected)
    assert eviction_order(index) == order


@pytest.mark.parametrize("backwards", [False, True])
def test_a_chain_costs_few_steps_however_it_lies(backwards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one a block, and none again for each piece: a chain of 4,000 blocks in 8 pieces, in the worst order, too."""
    count, looked_at = 4000, list[int]()
    names = np.random.default_rng(1).integers(1, 1 << 63, (count, 4), np.uint64)
    parents = np.concatenate([np.zeros((1, 4), np.uint64), names[:-1]])
    if backwards:
        names, parents = names[::-1], parents[::-1]
    index = BlockIndex(count)
    search = np.searchsorted

    def counted(slots: RowArray, rows: RowArray) -> Any:
        looked_at.append(len(rows))
        return search(slots, rows)

    monkeypatch.setattr(np, "searchsorted", counted)
    restoring = index.begin_restore()
    for first in range(0, count, 500):
        part = slice(first, first + 500)
        restoring.add(np.arange(first, first + 500), names[part], parents[part], np.ones(500))
    assert len(restoring.settle()) == 0
    restoring.end(restoring.order_of_use())
    index.check()
    assert index.held_count == count
    assert len(looked_at) <= 9
    assert sum(looked_at) <= 4 * count
