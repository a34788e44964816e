"""Blocks that stand for themselves, and payloads of several sizes, in the slabs of a directory beside chains."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import Entry, RecordHeader, chained, payload_digest
from kvpact.tiers.disk import tier as disk_tier
from kvpact.tiers.disk.inspection import scan_directory, verify_slab
from kvpact.tiers.disk.tier import DiskTier
from slab_scenes import (
    NAMESPACE,
    SLOT,
    Told,
    bytes_of,
    chain,
    content,
    filled,
    header_at,
    memory,
    open_tier,
    overwrite,
    payload_at,
    served,
    served_each,
    slab_path,
    slot_of,
    store,
    stored_alone,
)

CHAIN = chain("chain", 5)
ALONE = chain("alone", 6)


@pytest.fixture(autouse=True)
def no_looks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "start_background", lambda *_: None)


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return open_tier(tmp_path)


def keys_in(tier: DiskTier) -> set[BlockKey]:
    return {header.key for header in tier.scan()}


def test_neighbouring_slots_of_different_sizes_are_read_each_with_its_own(tier: DiskTier, tmp_path: Path) -> None:
    sizes = (SLOT, 4096, SLOT, 0, SLOT, 128)
    buffers = [filled([key], nbytes)[0] for key, nbytes in zip(ALONE, sizes, strict=True)]
    assert tier.put([Entry(*each) for each in zip(ALONE, buffers, strict=True)]) == [True] * 6
    into = [memory(1, nbytes)[0] for nbytes in sizes]
    assert tier.get(ALONE, into) == [True] * 6
    for key, nbytes, buffer in zip(ALONE, sizes, into, strict=True):
        assert bytes_of(buffer) == content(key, nbytes)
    assert tier.get(ALONE, memory(6)) == [nbytes == SLOT for nbytes in sizes], "another size is a miss"
    report = verify_slab(slab_path(tmp_path))
    assert (report.records, report.sound, report.orphans, report.damaged) == (6, 6, 0, [])
    (summary,) = scan_directory(tmp_path)
    assert summary.payload_bytes == sum(sizes)


def test_chains_and_blocks_alone_are_stored_in_one_call_and_read_by_key(tier: DiskTier) -> None:
    buffers = filled([*CHAIN, *ALONE[:2]])
    entries = chained(CHAIN, buffers[:5])
    entries[3:3] = [Entry(ALONE[0], buffers[5], depth=7)]
    entries.append(Entry(ALONE[1], buffers[6], CHAIN[1], 2))
    assert tier.put(entries) == [True] * 7
    assert {header.key: (header.parent, header.depth) for header in tier.scan()} == {
        entry.key: (entry.parent, entry.depth) for entry in entries
    }
    holes = [b"?" * 32, CHAIN[4], ALONE[0], b"!" * 32, CHAIN[1], ALONE[1]]
    assert tier.lookup(holes) == served_each(tier, holes) == [False, True, True, False, True, True]
    assert tier.delete([CHAIN[1]]) == 5, "with all that need it"
    assert tier.lookup([*CHAIN, *ALONE[:2]]) == [True, False, False, False, False, True, False]


def test_h20_what_needs_a_block_that_is_not_there_is_not_stored(tier: DiskTier) -> None:
    store(tier, CHAIN[:2])
    stem, one, other = filled(CHAIN[3:4])[0], filled(ALONE[:1])[0], filled(ALONE[1:2])[0]
    wanted = [Entry(CHAIN[3], stem, CHAIN[2], 3), Entry(CHAIN[4], stem, CHAIN[3], 4)]
    assert tier.put([*wanted, Entry(ALONE[0], one), Entry(ALONE[1], other, CHAIN[1], 2)]) == [False, False, True, True]
    assert keys_in(tier) == {*CHAIN[:2], *ALONE[:2]}
    assert store(tier, CHAIN) == served(tier, CHAIN) == 5


def test_h22_damage_of_a_block_alone_costs_no_other_one(tier: DiskTier, tmp_path: Path) -> None:
    stored_alone(tier, ALONE)
    path = slab_path(tmp_path)
    for key in (ALONE[2], ALONE[4]):
        overwrite(path, payload_at(path, slot_of(tier, key)), b"?")
    told = Told()
    assert tier.get(ALONE, memory(6), told) == [True, True, False, True, False, True]
    assert set(told) == {2}, "those in a row from the first"
    assert tier.counts().damaged == 2
    assert tier.lookup(ALONE) == [True, True, False, True, False, True]
    assert stored_alone(tier, ALONE) == served_each(tier, ALONE) == [True] * 6


def test_h54_blocks_alone_are_evicted_by_last_use_like_any_other(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, slots=6)
    stored_alone(tier, ALONE[:3])
    assert store(tier, CHAIN[:3]) == 3
    assert served_each(tier, ALONE[:1]) == [True]
    assert stored_alone(tier, ALONE[3:5]) == [True] * 2
    assert tier.lookup(ALONE) == [True, False, False, True, True, False], "those that were used longest ago"
    assert tier.leading(CHAIN) == 3
    assert tier.counts().evicted == 2


@pytest.mark.parametrize("restarts", [False, True])
def test_h54_of_blocks_alone_that_come_together_the_deepest_go_first(tmp_path: Path, restarts: bool) -> None:
    tier = open_tier(tmp_path, slots=6)
    assert stored_alone(tier, ALONE) == [True] * 6
    for number in range(1, 5):
        if restarts:
            tier.check()
            tier.close()
            tier = open_tier(tmp_path, slots=6)
        time.sleep(0.001)
        stored_alone(tier, chain(f"new {number}", 1))
        assert tier.lookup(ALONE) == [True] * (6 - number) + [False] * number


@pytest.mark.parametrize("restarts", [False, True])
def test_h54_of_blocks_alone_that_are_read_together_the_last_go_first(tmp_path: Path, restarts: bool) -> None:
    tier = open_tier(tmp_path, slots=6)
    for key in reversed(ALONE):
        stored_alone(tier, [key])
    order = [*ALONE[3:], *ALONE[:3]]
    assert served_each(tier, order) == [True] * 6
    if restarts:
        tier.close()
        tier = open_tier(tmp_path, slots=6)
    assert store(tier, CHAIN[:2]) == 2
    assert tier.lookup(order) == [True] * 4 + [False] * 2


def test_h50_what_is_held_already_makes_no_room_for_the_rest_of_its_call(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, slots=6)
    stored_alone(tier, ALONE[2:])
    assert stored_alone(tier, [*chain("more", 4), *ALONE[2:]]) == [True, True, False, False, *[True] * 4]
    assert tier.counts().evicted == 0
    assert tier.put([*chained(CHAIN, filled(CHAIN)), *chained(ALONE, filled(ALONE))]) == [
        *(number in (0, 1, 7, 8, 9, 10) for number in range(11))
    ], "only what the call does not name goes, for the first of it"
    assert tier.counts().evicted == 2


def test_blocks_alone_of_one_call_lie_side_by_side(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, slots=12)
    for number in range(7):
        keys = chain(f"call {number}", 6)
        assert stored_alone(tier, keys) == [True] * 6
        slots = [slot_of(tier, key) for key in keys]
        assert slots == list(range(slots[0], slots[0] + 6))


def plant(path: Path, slot: int, key: BlockKey, parent: BlockKey, depth: int) -> None:
    """Whoever may write to the file puts a sound record of another block into a slot."""
    payload = content(key)
    header = RecordHeader(NAMESPACE.digest, key, parent, depth, SLOT, payload_digest([memoryview(payload)]), 1, 1, slot)
    overwrite(path, payload_at(path, slot), payload)
    overwrite(path, header_at(slot), header.encode())


def plant_anew(directory: Path, key: BlockKey, parent: BlockKey, depth: int, among: Sequence[BlockKey] = ()) -> None:
    """Leave a slab with the chain `among` and a planted record."""
    tier = open_tier(directory)
    tier.clear()
    store(tier, among)
    stored_alone(tier, ALONE[:1])
    slot = slot_of(tier, ALONE[0])
    tier.close()
    plant(slab_path(directory), slot, key, parent, depth)


@pytest.mark.parametrize("length", [3, 4, 5])
@pytest.mark.parametrize("is_read_first", [True, False])
def test_h20_a_record_at_another_place_of_its_chain_costs_nothing(
    tmp_path: Path, length: int, is_read_first: bool
) -> None:
    """Its key names its block, and what is before it, so it is good; whether its parents are there is another thing."""
    keys = CHAIN[:length]
    for parent, depth, among in ((b"", 0, ()), (b"", 2, CHAIN[:1]), (CHAIN[0], 1, CHAIN[:1]), (CHAIN[4], 5, ())):
        plant_anew(tmp_path, CHAIN[2], parent, depth, among)
        tier = open_tier(tmp_path)
        if is_read_first:
            assert served_each(tier, CHAIN) == tier.lookup(CHAIN)
        assert store(tier, keys) == length
        assert served(tier, keys) == length == tier.leading(keys)
        assert tier.counts().damaged == 0
        tier.check()
        tier.close()


def test_replicas_serve_each_others_blocks_alone(tmp_path: Path) -> None:
    first, second = open_tier(tmp_path), open_tier(tmp_path)
    first.tend()
    second.tend()
    stored_alone(first, ALONE[1:4])
    stored_alone(second, ALONE[4:5], 4096)
    stored_alone(second, ALONE[5:])
    store(second, CHAIN[:2])
    first.tend()
    second.tend()
    assert first.lookup(ALONE) == second.lookup(ALONE) == [False, True, True, True, True, True]
    for each in (first, second):
        assert served_each(each, ALONE) == [False, True, True, True, False, True], "one has another size"
        assert served_each(each, ALONE[4:5], 4096) == [True]
        assert each.counts().damaged == 0
    assert stored_alone(second, ALONE[:4]) == [True] * 4
    assert keys_in(second) == {ALONE[0], ALONE[4], ALONE[5], *CHAIN[:2]}, "it is not stored twice"
    buffers = filled(ALONE[1:3])
    assert second.put([Entry(ALONE[1], buffers[0]), Entry(ALONE[2], buffers[1], ALONE[1], 1)]) == [True] * 2
    assert keys_in(second) == {*ALONE[:3], *ALONE[4:], *CHAIN[:2]}, "but where another one needs it"
    assert first.delete([ALONE[1]]) == 1
    assert first.lookup(ALONE[:3]) == [False, False, True]
    for each in (first, second):
        each.check()
        each.close()


def test_h22_a_block_that_is_damaged_here_comes_from_another_engines_slab(tmp_path: Path) -> None:
    first, second = open_tier(tmp_path), open_tier(tmp_path)
    first.tend()
    second.tend()
    for each in (first, second):
        store(each, CHAIN)
    first.tend()
    path = first.slab.path
    overwrite(path, payload_at(path, slot_of(first, CHAIN[2])), b"?")
    assert served(first, CHAIN) == 5
    assert (first.counts().damaged, keys_in(first)) == (1, set(CHAIN[:2]))
    assert served(first, CHAIN) == 5 == first.leading(CHAIN)
    for each in (first, second):
        each.close()
