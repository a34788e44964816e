"""The block index: what is visible when, what is evicted first, and what a failure may not break."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvpact.errors import PactViolation
from kvpact.index.block_index import ROOT, BlockIndex, Pin, Reservation, SlotState
from kvpact.index.lru import LeastRecentlyUsed
from kvpact.index.slot_space import PlainSlots
from kvpact.index.table import Table
from kvpact.index.verification import verify


def named(path: str) -> bytes:
    """The key of a block."""
    return path.encode().ljust(32, b".")


def chain(path: str) -> list[bytes]:
    """Keys of the blocks on `path`, one a character: `ab` is the block that follows `a`."""
    return [named(path[: length + 1]) for length in range(len(path))]


def reserved(index: BlockIndex, path: str) -> Reservation:
    keys = chain(path)
    reservation = index.reserve(keys, index.known_prefix(keys), len(keys))
    assert reservation is not None
    index.check()
    return reservation


def evicted_for(index: BlockIndex, path: str) -> set[bytes]:
    """Reserve slots for `path`; returns what was evicted for it."""
    before = {index.key_at(slot) for slot in range(index.num_slots)} - {None}
    count = reserved(index, path).evicted
    gone = {key for key in before if key is not None and key not in index}
    assert count == len(gone)
    return gone


def saved(index: BlockIndex, *paths: str) -> BlockIndex:
    for path in paths:
        index.complete(reserved(index, path).slots)
        index.check()
    return index


def test_a_saved_chain_is_found_up_to_where_it_ends() -> None:
    index = saved(BlockIndex(8), "abcd")
    assert index.held_prefix(chain("abcdef")) == 4
    assert index.held_prefix(chain("abxy")) == 2
    assert index.held_prefix(chain("xb")) == 0
    assert index.held_prefix([]) == 0
    assert index.slots_of(chain("abcd")) == [0, 1, 2, 3]
    assert named("ab") in index
    assert ROOT not in index


def test_a_block_is_held_only_when_every_block_before_it_is() -> None:
    index = BlockIndex(8)
    first, second, third = reserved(index, "abc").slots
    assert index.complete([third]) == []
    assert index.state(third) == SlotState.SAVED
    assert index.complete([first]) == [named("a")]
    assert index.held_prefix(chain("abc")) == 1
    assert index.complete([second]) == [named("ab"), named("abc")]
    assert index.held_prefix(chain("abc")) == 3


def test_what_another_request_is_saving_is_known_but_not_held() -> None:
    index = BlockIndex(8)
    first = reserved(index, "ab")
    second = reserved(index, "abcd")
    assert len(second.slots) == 2
    assert (index.known_prefix(chain("abcd")), index.held_prefix(chain("abcd"))) == (4, 0)
    assert index.complete(second.slots) == []
    assert index.complete(first.slots) == [named("a"), named("ab"), named("abc"), named("abcd")]


def test_a_chain_is_never_evicted_to_extend_itself() -> None:
    index = saved(BlockIndex(4), "abcd")
    assert index.reservable() == 4
    assert index.reservable(named("ab")) == 2
    assert index.reserve(chain("abxyz"), 2, 5) is None
    assert index.held_prefix(chain("abcd")) == 4
    assert evicted_for(index, "abxy") == {named("abcd"), named("abc")}


def test_one_pin_on_the_last_block_keeps_the_whole_chain() -> None:
    index = saved(BlockIndex(4), "abc", "x")
    pin = index.pin(named("abc"))
    assert index.reservable() == 1
    assert evicted_for(index, "y") == {named("x")}
    assert index.reserve(chain("z"), 0, 1) is None
    index.unpin(pin)
    assert evicted_for(index, "z") == {named("abc")}


def test_a_pin_ends_exactly_once() -> None:
    index = saved(BlockIndex(4), "a")
    pin = index.pin(named("a"))
    index.pin(named("a"))
    index.unpin(pin)
    with pytest.raises(PactViolation, match="given back already"):
        index.unpin(pin)
    assert index.pinned_count == 1
    index.check()


def test_the_use_of_a_chain_is_the_use_of_every_block_in_it() -> None:
    index = saved(BlockIndex(4), "ab", "xy")
    index.touch(named("ab"))
    index.drop(named("ab"))
    assert evicted_for(index, "123") == {named("xy"), named("x")}, "`a` was used after `x`"


def test_the_least_recently_used_chain_goes_first_and_a_head_after_what_follows_it() -> None:
    index = saved(BlockIndex(6), "abc", "abd", "x")
    index.touch(named("abc"))
    reserved(index, "1")
    for path, new in zip(("abd", "x", "abc", "ab", "a"), "23456", strict=True):
        assert evicted_for(index, new) == {named(path)}


def test_h21_the_slot_of_a_dropped_block_is_not_reused_while_a_transfer_may_touch_it() -> None:
    """A load reads the whole chain behind one pin; the block in its middle turns out damaged and is dropped."""
    index = saved(BlockIndex(4), "abcd")
    reader = index.pin(named("abc"))
    assert index.drop(named("ab")) == [(named("abcd"), 3), (named("abc"), 2), (named("ab"), 1)]
    assert index.known_prefix(chain("abcd")) == 1
    assert (index.free_slots, index.waiting_slots) == (1, 2)
    assert index.reserve(chain("abc"), 1, 3) is None, "slots 1 and 2 are still being read, and `a` with them"
    replacement = reserved(index, "ab")
    assert replacement.slots == (3,)
    index.unpin(reader)
    index.check()
    assert (index.free_slots, index.waiting_slots) == (2, 0)
    assert index.complete(replacement.slots) == [named("ab")]


def test_h21_the_slot_of_a_dropped_block_is_not_reused_while_its_writer_runs() -> None:
    index = BlockIndex(3)
    slots = reserved(index, "abc").slots
    index.complete(slots[:1])
    assert index.abandon(slots[1:2]) == [(named("abc"), 2), (named("ab"), 1)]
    assert index.free_slots == 0, "the writer of slot 2 has not ended"
    assert index.complete(slots[2:]) == [], "it ends well, but what it wrote is no longer wanted"
    index.check()
    assert (len(index), index.free_slots) == (1, 2)


def test_h26_a_failed_reservation_is_never_visible() -> None:
    index = BlockIndex(8)
    slots = reserved(index, "abcd").slots
    index.complete([*slots[:1], *slots[2:]])
    index.abandon(slots[1:2])
    index.check()
    assert index.held_prefix(chain("abcd")) == index.known_prefix(chain("abcd")) == 1
    assert index.free_slots == 7
    saved(index, "abcd")
    assert index.held_prefix(chain("abcd")) == 4


def test_h26_a_reservation_that_finds_no_room_leaves_no_trace() -> None:
    index = saved(BlockIndex(4), "abc")
    index.pin(named("a"))
    before = index.slots_of(chain("abc"))
    assert index.reserve(chain("vwxyz"), 0, 5) is None
    assert index.reserve(chain("wxyz"), 0, 4) is None
    index.check()
    assert index.slots_of(chain("abc")) == before
    assert index.held_prefix(chain("abc")) == 3
    assert evicted_for(index, "xyz") == {named("abc"), named("ab")}


def test_h50_the_index_never_hands_out_more_slots_than_it_was_given() -> None:
    index = BlockIndex(16)
    for number in range(500):
        keys = [named(f"{number}-{block}") for block in range(number % 16 + 1)]
        reservation = index.reserve(keys, 0, len(keys))
        assert reservation is not None
        assert all(0 <= slot < 16 for slot in reservation.slots)
        index.complete(reservation.slots)
        assert len(index) + index.free_slots == 16
    index.check()
    assert index.reserve([named(str(block)) for block in range(17)], 0, 17) is None


def test_h51_nothing_grows_with_churn() -> None:
    index = saved(BlockIndex(32), "abcdefgh")

    def churn(numbers: range) -> None:
        for number in numbers:
            saved_keys = [named(f"{number}-{block}") for block in range(3)]
            reservation = index.reserve(saved_keys, 0, 3)
            assert reservation is not None
            index.complete(reservation.slots)
            index.touch(named("abcdefgh"))
            index.unpin(index.pin(named("abcd")))
            if number % 3 == 0:
                index.drop(saved_keys[1])

    tracemalloc.start()
    try:
        churn(range(1000))
        before = tracemalloc.get_traced_memory()[0]
        churn(range(1000, 2000))
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 2000, "a byte for each round and its slots would be more"
    index.check()
    assert index.held_prefix(chain("abcdefgh")) == 8


def test_h52_an_abandoned_write_gives_its_slots_back() -> None:
    index = BlockIndex(8)
    for _ in range(100):
        index.abandon(reserved(index, "abcdefgh").slots)
    assert index.free_slots == 8


def test_h53_when_all_entries_are_pinned_an_allocation_gets_nothing_and_loses_nothing() -> None:
    index = saved(BlockIndex(6), "abc", "xyz")
    pins = [index.pin(named("abc")), index.pin(named("xyz"))]
    assert index.reservable() == 0
    assert index.reserve(chain("q"), 0, 1) is None
    assert (index.held_prefix(chain("abc")), index.held_prefix(chain("xyz"))) == (3, 3)
    index.check()
    for pin in pins:
        index.unpin(pin)
    assert index.reservable() == 6


def test_h53_blocks_in_flight_are_not_evicted() -> None:
    index = BlockIndex(3)
    slots = reserved(index, "abc").slots
    index.complete(slots[2:])
    assert index.reserve(chain("x"), 0, 1) is None
    assert index.reservable() == 0


def test_h54_a_full_cache_loses_tails_before_heads() -> None:
    index = saved(BlockIndex(30), *(name * 10 for name in "abc"))
    saved(index, "d" * 10)
    usable = {name: index.held_prefix(chain(name * 10)) for name in "abcd"}
    assert usable == {"a": 0, "b": 10, "c": 10, "d": 10}, "the least recently used chain goes as a whole"
    saved(index, "e" * 4)
    assert index.held_prefix(chain("b" * 10)) == 6, "and from its tail"
    assert index.held_count == 30
    assert index.held_count == sum(index.held_prefix(chain(name * 10)) for name in "bcde"), "every block is usable"


class CountedKeys(Sequence[bytes]):
    """A chain of keys that counts how many were looked at."""

    def __init__(self, keys: list[bytes]) -> None:
        self.keys = keys
        self.probes = 0

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, item: Any) -> Any:
        self.probes += 1
        return self.keys[item]


@pytest.mark.parametrize("held", [0, 1, 100, 4095, 4096])
def test_h55_a_lookup_of_64k_tokens_looks_at_few_of_its_blocks(held: int) -> None:
    keys = [named(str(block)) for block in range(65536 // 16)]
    index = BlockIndex(4096)
    reservation = index.reserve(keys, 0, held)
    assert reservation is not None
    index.complete(reservation.slots)
    counted = CountedKeys(keys)
    assert index.held_prefix(counted) == index.known_prefix(counted) == held
    assert counted.probes <= 2 * 13, "two binary searches in 4,096 blocks"


def test_h57_what_is_evicted_is_forgotten_and_what_is_held_is_known() -> None:
    """The index is the slots' own table: its bound is their number, and it cannot disagree with them."""
    index = saved(BlockIndex(4), "ab", "cd")
    assert evicted_for(index, "xy") == {named("a"), named("ab")}
    assert {index.key_at(slot) for slot in range(4)} == {named("c"), named("cd"), named("x"), named("xy")}


def test_a_cleared_index_is_empty_but_for_slots_in_use() -> None:
    index = saved(BlockIndex(8), "abc", "xy")
    pin = index.pin(named("xy"))
    writing = reserved(index, "abcd").slots
    assert len(index.clear()) == 6
    index.check()
    assert (len(index), index.held_count, index.free_slots) == (0, 0, 2)
    with pytest.raises(PactViolation, match="empty"):
        index.begin_restore()
    index.unpin(pin)
    index.complete(writing)
    index.check()
    assert index.free_slots == 8


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda index: index.reserve(chain("ab"), 0, 2), "known_prefix"),
        (lambda index: index.reserve(chain("abc"), 1, 3), "not new; .* here 2"),
        (lambda index: index.reserve_sides([named("q"), named("q")], chain("ab")), "not all new"),
        (lambda index: index.reserve(chain("xyz"), 2, 3), "not in the index"),
        (lambda index: index.reserve(chain("ab"), 1, 3), "chain of 2"),
        (lambda index: index.complete([0]), "HELD"),
        (lambda index: index.abandon([7]), "FREE"),
        (lambda index: index.pin(named("zz")), "not in the index"),
        (lambda index: index.touch(ROOT), "not in the index"),
        (lambda index: index.slots_of([named("a"), named("zz")]), "not in the index"),
    ],
)
def test_misuse_is_refused_and_changes_nothing(misuse: Callable[[BlockIndex], object], message: str) -> None:
    index = saved(BlockIndex(8), "ab")
    with pytest.raises(PactViolation, match=message):
        misuse(index)
    index.check()
    assert index.held_prefix(chain("ab")) == 2


def test_a_writer_ends_exactly_once() -> None:
    index = BlockIndex(8)
    slots = reserved(index, "ab").slots
    with pytest.raises(PactViolation, match="twice"):
        index.complete([slots[0], slots[0]])
    assert index.complete(slots) == [named("a"), named("ab")]
    with pytest.raises(PactViolation, match="its writer ended already"):
        index.abandon(slots)
    assert index.held_prefix(chain("ab")) == 2


def test_an_index_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 slot, not 0"):
        BlockIndex(0)


def test_check_notices_a_broken_invariant() -> None:
    for attribute, value in [("held", 3), ("evictable", [1])]:
        table = Table(PlainSlots(4), 1, 0)
        rows = table.space.take(2)
        table.reserve_chain(chain("ab"), table.root, rows, 0, 0)
        verify(table, [0] * 5)
        setattr(table, attribute, value)
        with pytest.raises(PactViolation, match="lost an invariant"):
            verify(table, [0] * 5)
    index = saved(BlockIndex(4), "ab")
    index.space.give_back(3)
    with pytest.raises(PactViolation, match="lost an invariant"):
        index.check()
    index = saved(BlockIndex(4), "ab")
    index.unpin(Pin(named("ab"), 1))
    with pytest.raises(PactViolation, match="lost an invariant: the number of pins"):
        index.check()


def test_the_policy_learns_how_deep_blocks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(LeastRecentlyUsed, "inserted", lambda _, *call: calls.append(call))
    monkeypatch.setattr(LeastRecentlyUsed, "attached", lambda _, *call: calls.append(call))
    index = BlockIndex(10, space=PlainSlots(8, names=2), classes=2, chain_class=1)
    assert index.reserve(chain("abcde"), 0, 0) == Reservation(())
    index.reserve(chain("abcd"), 0, 1)
    index.reserve(chain("abcd"), 1, 2)
    index.reserve_sides([named("S")], [named("ab")], 0)
    assert calls == [(slice(8, 9), 1, 0, 3), (slice(9, 10), 1, 1, 2), (slice(0, 1), 0, [9])]


def test_only_usable_slots_are_handed_out_and_new_ones_last() -> None:
    index = saved(BlockIndex(6, 2), "ab")
    assert index.reservable() == 2
    assert index.reserve(chain("xyz"), 0, 3) is None, "there is room for two"
    index.use_slots(4)
    index.use_slots(3)
    index.check()
    assert (index.usable_slots, index.free_slots, index.waiting_slots) == (4, 2, 0)
    assert reserved(index, "x").slots == (2,)
    index.use_slots(9)
    index.check()
    assert reserved(index, "uvwt").slots == (1, 3, 4, 5), "one block is evicted for the fourth"


def test_withdrawn_slots_are_free_when_their_last_user_has_ended() -> None:
    index = saved(BlockIndex(6), "abcdef")
    pin = index.pin(named("abcd"))
    assert sorted(slot for _, slot in index.withdraw_slots(3)) == [3, 4, 5]
    index.check()
    assert (index.usable_slots, len(index), index.free_slots) == (3, 3, 0)
    assert [index.state(slot) for slot in (3, 4, 5)] == [SlotState.DOOMED, SlotState.FREE, SlotState.FREE]
    index.use_slots(5)
    assert reserved(index, "x").slots == (4,), "slot 3 is still read"
    index.unpin(pin)
    index.check()
    assert reserved(index, "y").slots == (3,)
