"""Room that is made before anybody needs it: what goes, how much at most, and what it is good for."""

from __future__ import annotations

import random
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvpact.index.block_index import BlockIndex
from kvpact.index.classed_slots import ClassedSlots
from kvpact.index.slot_space import AHEAD_SHARE, AHEAD_SLOTS

BLOCKS = 16
"""Blocks of a chain."""
CHAINS = 64
KEPT = CHAINS * BLOCKS // AHEAD_SHARE


def chain(number: int, blocks: int = BLOCKS) -> list[bytes]:
    """The keys of a chain."""
    return [b"%d-%d" % (number, block) + bytes(32 - len(b"%d-%d" % (number, block))) for block in range(blocks)]


def save(index: BlockIndex, number: int, blocks: int = BLOCKS) -> int:
    """Reserve and complete a chain; returns how many blocks were evicted for it."""
    index.reservable(wanted=blocks)
    reservation = index.reserve(chain(number, blocks), 0, blocks)
    assert reservation is not None
    index.complete(reservation.slots)
    return reservation.evicted


def full(slots: int, blocks: int = BLOCKS) -> BlockIndex:
    """An index without a free slot."""
    index = BlockIndex(slots)
    for number in range(slots // blocks):
        save(index, number, blocks)
    return index


def held(index: BlockIndex, number: int) -> int:
    return index.held_prefix(chain(number))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_goes_ahead_is_the_least_recently_used_that_nothing_needs_and_bounded(data: st.DataObject) -> None:
    index = full(CHAINS * BLOCKS)
    order = data.draw(st.permutations(range(CHAINS)))
    for number in order:
        index.touch(chain(number)[-1])
    pinned = set(data.draw(st.lists(st.sampled_from(order[:8]), max_size=6)))
    pins = [index.pin(chain(number)[-1]) for number in pinned]
    most = data.draw(st.integers(1, 2 * KEPT))
    expected = [number for number in order if number not in pinned]
    evicted = index.evict_ahead(most)
    index.check()
    kept = (CHAINS - len(pinned)) * BLOCKS // AHEAD_SHARE
    assert evicted == index.free_slots == min(most, kept) <= KEPT
    gone = {number: BLOCKS - held(index, number) for number in range(CHAINS)}
    assert gone[expected[0]] == evicted
    assert sum(gone.values()) == evicted, "one chain's end"
    for pin in pins:
        index.unpin(pin)
    index.check()


@pytest.mark.parametrize("slots", [4, 20, 8 * AHEAD_SHARE - 1])
def test_a_small_place_keeps_no_slots_free(slots: int) -> None:
    index = full(slots, 1)
    assert (index.evict_ahead(512), index.held_count) == (0, slots)
    assert save(index, slots, 1) == 1, "no more than it takes"


def test_a_large_place_keeps_a_bounded_number_of_slots_free_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpact.index.slot_space.AHEAD_SLOTS", 64)
    index = full(2 * AHEAD_SHARE * 64, 256)
    assert [index.evict_ahead(16) for _ in range(6)] == [16, 16, 16, 16, 0, 0]
    assert save(index, 1000, 8) == 0, "a reservation finds free slots"
    assert index.evict_ahead(16) == 0, "too few are missing"
    assert (save(index, 1001, 8), index.evict_ahead(16)) == (0, 16)
    assert AHEAD_SLOTS <= 4096, "some megabytes of blocks, however large the memory is"


def test_a_reservation_that_finds_too_few_free_slots_leaves_those_that_are_kept() -> None:
    index = full(CHAINS * BLOCKS)
    index.evict_ahead(512)
    assert save(index, 1000, 2 * KEPT) == 2 * KEPT
    assert index.free_slots == KEPT
    assert index.reservable() == index.num_slots
    assert save(index, 1001, index.num_slots) == index.num_slots - KEPT, "all of them, if all are wanted"
    index.check()


def test_each_class_of_slots_makes_room_for_itself() -> None:
    index = BlockIndex(2048, space=ClassedSlots([16, 16], 128), classes=2)
    for number in range(CHAINS):
        save(index, number)
        names = chain(number)
        assert index.reservable(names[-1], BLOCKS, 1) >= BLOCKS
        reservation = index.reserve_sides([name[::-1] for name in names], names, 1)
        assert reservation is not None
        index.complete(reservation.slots)
    assert index.free_slots == 0
    assert index.evict_ahead(512) == 2 * KEPT, "the end of the first chain, and what hangs on it"
    index.check()
    assert [len(free) for free in index.space.free] == [KEPT, KEPT]


def test_chains_keep_to_neighbouring_slots_however_often_the_memory_was_filled() -> None:
    """Each run of neighbours costs something when it is reserved, evicted and copied."""
    index, chance, live = BlockIndex(2048), random.Random(1), list[bytes]()
    parts = blocks = 0
    for number in range(700):
        keys = chain(number, chance.randint(16, 200))
        reservation = index.reserve(keys, 0, len(keys))
        assert reservation is not None
        index.complete(reservation.slots)
        used = chance.choice([*live[-10:], keys[-1]])
        if used in index:
            index.touch(used)
        live.append(keys[-1])
        index.evict_ahead(512)
        slots = [*reservation.slots]
        if number >= 500:
            parts += 1 + sum(after != slot + 1 for slot, after in pairwise(slots))
            blocks += len(slots)
    index.check()
    assert blocks / parts > 8, "4, and ever fewer, if each takes exactly the slots that the last chain's end leaves"
