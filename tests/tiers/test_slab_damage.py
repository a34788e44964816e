"""H22: whatever happens to a slab's bytes is a miss, counted and quarantined, and never served."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpact.errors import TierError
from kvpact.tiers.disk.inspection import verify_slab
from slab_scenes import (
    SLOT,
    chain,
    header_at,
    open_tier,
    overwrite,
    payload_at,
    served,
    slab_path,
    slot_of,
    store,
)

KEYS = chain("document", 8)
HIT = 3
"""The block that is damaged; the ones before it must still be served."""


def flip(path: Path, offset: int) -> None:
    with path.open("rb") as file:
        file.seek(offset)
        byte = file.read(1)[0]
    overwrite(path, offset, bytes([byte ^ 0x10]))


def flipped_first_byte(path: Path, slot: int, other: int) -> None:
    flip(path, payload_at(path, slot))


def flipped_last_byte(path: Path, slot: int, other: int) -> None:
    flip(path, payload_at(path, slot) + SLOT - 1)


def garbage_of_the_same_size(path: Path, slot: int, other: int) -> None:
    overwrite(path, payload_at(path, slot), os.urandom(SLOT))


def zeros(path: Path, slot: int, other: int) -> None:
    overwrite(path, payload_at(path, slot), bytes(SLOT))


def torn(path: Path, slot: int, other: int) -> None:
    overwrite(path, payload_at(path, slot) + SLOT // 2, os.urandom(SLOT // 2))


def swapped_payloads(path: Path, slot: int, other: int) -> None:
    whole = path.read_bytes()
    mine, its = payload_at(path, slot), payload_at(path, other)
    overwrite(path, mine, whole[its : its + SLOT])
    overwrite(path, its, whole[mine : mine + SLOT])


PAYLOAD_DAMAGE = [flipped_first_byte, flipped_last_byte, garbage_of_the_same_size, zeros, torn, swapped_payloads]


def flipped_header(path: Path, slot: int, other: int) -> None:
    flip(path, header_at(slot) + 60)


def garbage_header(path: Path, slot: int, other: int) -> None:
    overwrite(path, header_at(slot), os.urandom(256))


def half_a_header(path: Path, slot: int, other: int) -> None:
    overwrite(path, header_at(slot) + 128, bytes(128))


def swapped_slots(path: Path, slot: int, other: int) -> None:
    swapped_payloads(path, slot, other)
    whole = path.read_bytes()
    mine, its = header_at(slot), header_at(other)
    overwrite(path, mine, whole[its : its + 256])
    overwrite(path, its, whole[mine : mine + 256])


def header_of_another_slot(path: Path, slot: int, other: int) -> None:
    whole = path.read_bytes()
    overwrite(path, header_at(slot), whole[header_at(other) : header_at(other) + 256])


HEADER_DAMAGE = [flipped_header, garbage_header, half_a_header, swapped_slots, header_of_another_slot]


def damage_closed_slab(directory: Path, damage: Callable[[Path, int, int], None]) -> None:
    """A slab with the 8 blocks of KEYS, closed, then damaged at block HIT (and block 6, where there are two)."""
    tier = open_tier(directory)
    assert store(tier, KEYS) == 8
    slot, other = slot_of(tier, KEYS[HIT]), slot_of(tier, KEYS[6])
    tier.close()
    damage(slab_path(directory), slot, other)


@pytest.mark.parametrize("damage", PAYLOAD_DAMAGE)
def test_h22_damaged_payload_is_a_miss_counted_and_never_asked_again(
    tmp_path: Path, damage: Callable[[Path, int, int], None]
) -> None:
    damage_closed_slab(tmp_path, damage)
    torn_records = verify_slab(slab_path(tmp_path)).torn
    assert torn_records in (1, 2)
    tier = open_tier(tmp_path)
    assert tier.leading(KEYS) == 8, "payloads are not read on a restart"
    assert served(tier, KEYS) == HIT
    assert tier.counts().damaged == 1
    assert tier.leading(KEYS) == HIT == served(tier, KEYS), "what is damaged goes with all that needs it"
    assert {header.key for header in tier.scan()} == set(KEYS[:HIT]), "on disk as well"
    assert store(tier, KEYS) == 8 == served(tier, KEYS), "and can be stored anew"
    tier.check()
    tier.close()
    assert not verify_slab(slab_path(tmp_path)).damaged


@pytest.mark.parametrize("damage", HEADER_DAMAGE)
def test_h22_damaged_header_is_found_on_restart(tmp_path: Path, damage: Callable[[Path, int, int], None]) -> None:
    damage_closed_slab(tmp_path, damage)
    report = verify_slab(slab_path(tmp_path))
    assert len(report.damaged) in (1, 2)
    assert report.torn == 0
    assert all(record.key == "" and record.reason for record in report.damaged)
    tier = open_tier(tmp_path)
    assert tier.leading(KEYS) == HIT == served(tier, KEYS)
    assert tier.counts().damaged == len(report.damaged)
    assert store(tier, KEYS) == 8 == served(tier, KEYS)
    tier.close()
    assert not verify_slab(slab_path(tmp_path)).damaged


@pytest.mark.parametrize("damage", PAYLOAD_DAMAGE)
def test_h22_damage_under_an_open_slab_is_a_miss(tmp_path: Path, damage: Callable[[Path, int, int], None]) -> None:
    tier = open_tier(tmp_path)
    store(tier, KEYS)
    damage(slab_path(tmp_path), slot_of(tier, KEYS[HIT]), slot_of(tier, KEYS[6]))
    assert served(tier, KEYS) == HIT
    assert tier.counts().damaged == 1


@pytest.mark.parametrize("keep", [0, 1, 100, 4095, 4096, 5000])
def test_h22_a_file_cut_off_in_its_tables_starts_empty_or_short(tmp_path: Path, keep: int) -> None:
    damage_closed_slab(tmp_path, lambda path, slot, other: os.truncate(path, keep))
    tier = open_tier(tmp_path)
    assert tier.leading(KEYS) == 0
    assert store(tier, KEYS) == 8 == served(tier, KEYS)


def test_h22_a_file_cut_off_in_its_payloads_keeps_what_is_left(tmp_path: Path) -> None:
    damage_closed_slab(tmp_path, lambda path, slot, other: os.truncate(path, payload_at(path, slot) + 100))
    tier = open_tier(tmp_path)
    assert tier.leading(KEYS) == HIT == served(tier, KEYS)
    assert tier.counts().damaged == 8 - HIT
    assert store(tier, KEYS) == 8 == served(tier, KEYS)


def test_h22_a_file_cut_off_while_open_is_a_miss_and_no_crash(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, KEYS)
    os.truncate(slab_path(tmp_path), payload_at(slab_path(tmp_path), slot_of(tier, KEYS[HIT])) + 100)
    assert served(tier, KEYS) == HIT
    assert tier.counts().damaged == 1


def test_h22_a_damaged_superblock_costs_the_slab_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage_closed_slab(tmp_path, lambda path, slot, other: flip(path, 100))
    with pytest.raises(TierError, match="damaged superblock"):
        verify_slab(slab_path(tmp_path))
    tier = open_tier(tmp_path)
    assert "damaged superblock: its checksum does not match; starting an empty one" in caplog.text
    assert tier.leading(KEYS) == 0
    assert store(tier, KEYS) == 8 == served(tier, KEYS)


def test_h22_damage_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = open_tier(tmp_path)
    for name in "abc":
        keys = chain(name, 4)
        store(tier, keys)
        flipped_first_byte(slab_path(tmp_path), slot_of(tier, keys[1]), 0)
        assert served(tier, keys) == 1
    assert tier.counts().damaged == 3
    assert caplog.text.count("does not match its checksum") == 1


def test_h20_a_hole_ends_the_answer_and_late_hits_do_not_count(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    assert store(tier, KEYS, 2) == 0, "blocks 0 and 1 are not held, so nothing behind them is"
    store(tier, KEYS)
    flipped_first_byte(slab_path(tmp_path), slot_of(tier, KEYS[0]), 0)
    assert served(tier, KEYS) == 0, "seven sound blocks behind a damaged first one are no hit"
