"""Loose blocks and payloads of several sizes in the slabs of a directory: this engine's own and those of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import HEADER_BYTES, RecordHeader, payload_digest
from kvpact.tiers.disk import tier as disk_tier
from kvpact.tiers.disk.inspection import scan_directory, verify_slab
from kvpact.tiers.disk.tier import DiskTier
from kvpact_testkit.sample_blocks import content, document, empty_buffers, filled_buffers
from slab_scenes import NAMESPACE, SLOT, Told, header_at, open_tier, overwrite, payload_at, slab_path, slot_of

CHAIN = document("chain", 5).keys
LOOSE = tuple(document(f"loose {number}", 1).keys[0] for number in range(6))


@pytest.fixture(autouse=True)
def no_looks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "start_background", lambda *_: None)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = open_tier(tmp_path)
    yield tier
    tier.check()
    tier.close()


def put(tier: DiskTier, keys: Sequence[BlockKey], nbytes: int = SLOT) -> list[bool]:
    return tier.put_each(keys, filled_buffers(keys, nbytes, 2))


def served(tier: DiskTier, keys: Sequence[BlockKey], nbytes: int = SLOT) -> list[bool]:
    """Which loose blocks are served; each is itself."""
    buffers = empty_buffers(len(keys), nbytes, 2)
    arrived = tier.get_each(keys, buffers)
    for there, key, buffer in zip(arrived, keys, buffers, strict=True):
        assert not there or b"".join(buffer) == content(key, nbytes)
    return arrived


def chain_served(tier: DiskTier, keys: Sequence[BlockKey] = CHAIN) -> int:
    buffers = empty_buffers(len(keys), SLOT)
    arrived = tier.get(keys, 0, buffers)
    assert [b"".join(buffer) for buffer in buffers[:arrived]] == [content(key, SLOT) for key in keys[:arrived]]
    return arrived


def test_neighbouring_slots_of_different_sizes_are_read_each_with_its_own(tier: DiskTier, tmp_path: Path) -> None:
    sizes = (SLOT, 4096, SLOT, 0, SLOT, 100)
    buffers = [filled_buffers([key], nbytes, 2)[0] for key, nbytes in zip(LOOSE, sizes, strict=True)]
    assert tier.put_each(LOOSE, buffers) == [True] * 6
    into = [empty_buffers(1, nbytes, 2)[0] for nbytes in sizes]
    assert tier.get_each(LOOSE, into) == [True] * 6
    for key, nbytes, buffer in zip(LOOSE, sizes, into, strict=True):
        assert b"".join(buffer) == content(key, nbytes)
    report = verify_slab(slab_path(tmp_path))
    assert (report.records, report.sound, report.orphans, report.damaged) == (6, 6, 0, [])
    (summary,) = scan_directory(tmp_path)
    assert summary.payload_bytes == sum(sizes)


def test_h22_damage_of_a_loose_block_costs_no_other_one(tier: DiskTier, tmp_path: Path) -> None:
    put(tier, LOOSE)
    path = slab_path(tmp_path)
    overwrite(path, payload_at(path, slot_of(tier, LOOSE[2])), b"?")
    told = Told()
    assert tier.get_each(LOOSE, empty_buffers(6, SLOT), told) == [True, True, False, True, True, True]
    assert set(told) == {2}, "those in a row from the first"
    assert tier.counts().damaged == 1
    assert tier.lookup_each(LOOSE) == [True, True, False, True, True, True]
    assert put(tier, LOOSE) == served(tier, LOOSE) == [True] * 6


def test_a_loose_read_that_is_wanted_no_more_ends_early(tier: DiskTier) -> None:
    put(tier, LOOSE)
    buffers = empty_buffers(6, SLOT)
    arrived = tier.get_each(LOOSE, buffers, lambda count: False)
    assert all(b"".join(buffers[number]) == content(LOOSE[number], SLOT) for number in range(6) if arrived[number])
    assert tier.lookup_each(LOOSE) == [True] * 6


def test_h54_loose_blocks_are_evicted_by_last_use_like_any_other(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, slots=6)
    put(tier, LOOSE[:3])
    assert tier.put(CHAIN, 0, filled_buffers(CHAIN[:3], SLOT)) == 3
    assert served(tier, LOOSE[:1]) == [True]
    assert put(tier, LOOSE[3:5]) == [True] * 2
    assert tier.lookup_each(LOOSE) == [True, False, False, True, True, False], "those that were used longest ago"
    assert tier.lookup(CHAIN) == 3
    assert tier.counts().evicted == 2
    many = [*LOOSE, *(document(f"more {number}", 1).keys[0] for number in range(4))]
    stored = put(tier, many)
    assert sum(stored) == sum(tier.lookup_each(many)) <= 6
    assert tier.capacity().blocks <= 6
    tier.close()


def plant(path: Path, slot: int, key: BlockKey, parent: BlockKey, depth: int) -> None:
    """Whoever may write to the file makes the record in a slot another block's."""
    whole = path.read_bytes()
    at = payload_at(path, slot)
    digest = payload_digest([memoryview(whole[at : at + SLOT])])
    header = RecordHeader(NAMESPACE.digest, key, parent, depth, SLOT, digest, 1.0, 1.0, slot)
    assert len(header.encode()) == HEADER_BYTES
    overwrite(path, header_at(slot), header.encode())


def test_h20_a_planted_loose_record_is_no_part_of_a_chain_and_a_chains_block_is_not_loose(tmp_path: Path) -> None:
    tier, path = open_tier(tmp_path), slab_path(tmp_path)
    tier.put(CHAIN, 0, filled_buffers(CHAIN[:2], SLOT))
    put(tier, LOOSE[:2])
    slots = [slot_of(tier, key) for key in LOOSE[:2]]
    tier.close()
    plant(path, slots[0], CHAIN[2], b"", 0)
    plant(path, slots[1], LOOSE[5], CHAIN[1], 2)
    again = open_tier(tmp_path)
    assert chain_served(again) == 2
    assert again.lookup(CHAIN) == 2, "it is dropped"
    assert again.counts().damaged == 1
    assert again.lookup_each(LOOSE[5:]) == served(again, LOOSE[5:]) == [False]
    assert again.put(CHAIN, 0, filled_buffers(CHAIN, SLOT)) == chain_served(again) == 5
    again.check()
    again.close()


def test_h20_what_is_planted_behind_nothing_neither_raises_nor_is_served(tmp_path: Path) -> None:
    tier, path = open_tier(tmp_path), slab_path(tmp_path)
    put(tier, LOOSE[:1])
    slot = slot_of(tier, LOOSE[0])
    tier.close()
    plant(path, slot, CHAIN[2], b"", 0)
    for length, is_read_first in ((3, True), (4, True), (5, True), (3, False), (4, False), (5, False)):
        again = open_tier(tmp_path)
        if is_read_first:
            assert chain_served(again, CHAIN[:length]) == 0
        again.put(CHAIN[:length], 0, filled_buffers(CHAIN[:length], SLOT))
        chain_served(again, CHAIN[:length])
        assert again.put(CHAIN, 0, filled_buffers(CHAIN[:length], SLOT)) == length
        assert chain_served(again, CHAIN[:length]) == length
        again.check()
        again.clear()
        put(again, LOOSE[:1])
        slot = slot_of(again, LOOSE[0])
        again.close()
        plant(path, slot, CHAIN[2], b"", 0)


def test_replicas_serve_each_others_loose_blocks_and_no_planted_ones(tmp_path: Path) -> None:
    first, second = open_tier(tmp_path), open_tier(tmp_path)
    first.tend()
    second.tend()
    put(first, LOOSE[1:4])
    put(second, LOOSE[4:5], 4096)
    put(second, LOOSE[5:])
    second.put(CHAIN, 0, filled_buffers(CHAIN[:2], SLOT))
    first.tend()
    second.tend()
    assert first.lookup_each(LOOSE) == second.lookup_each(LOOSE) == [False, True, True, True, True, True]
    for each in (first, second):
        assert served(each, LOOSE) == [False, True, True, True, False, True], "one has another size"
        assert served(each, LOOSE[4:5], 4096) == [True]
        assert each.counts().damaged == 0
    assert put(second, LOOSE[:4]) == [True] * 4
    assert {header.key for header in second.scan()} == {LOOSE[0], LOOSE[4], LOOSE[5], *CHAIN[:2]}, (
        "it is not stored twice"
    )
    plant(second.slab.path, slot_of(second, LOOSE[5]), CHAIN[2], b"", 0)
    plant(second.slab.path, slot_of(second, LOOSE[0]), LOOSE[5], CHAIN[1], 2)
    first.tend()
    assert chain_served(first) == 2
    assert served(first, LOOSE[5:]) == [False]
    assert first.counts().damaged == 2
    first.tend()
    assert first.lookup(CHAIN) == 2
    assert first.delete([LOOSE[1]]) == 1
    assert first.lookup_each(LOOSE[:3]) == [False, False, True]
    for each in (first, second):
        each.close()
