"""Slots of several sizes in one memory: how it is cut, and that all processes agree on where a slot is."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from kvpact.errors import ConfigError, KvpactError, PactViolation
from kvpact.index.classed_slots import ClassedSlots
from kvpact.index.slot_space import CLASS_SHIFT, EXTENT_SHIFT, PlainSlots
from kvpact.memory import limits
from kvpact.memory.arena import Arena, ArenaSegment, SegmentAddress, SlotClass
from kvpact.memory.extents import MAX_LOSS, Extents, extents_for, slots_for
from kvpact.units import format_size

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE = 4 * KIB


def number(slot_class: int, extent: int, place: int) -> int:
    return slot_class << CLASS_SHIFT | extent << EXTENT_SHIFT | place


@contextmanager
def ranks_with(*classes: Sequence[int], extent_bytes: Sequence[int] = (), count: int = 3) -> Iterator[Arena]:
    """An arena as the scheduler's process has it, with these class bytes on each rank."""
    sizes = extent_bytes or [3 * max(one) for one in classes]
    made = [
        ArenaSegment.create_extents(Extents(count, size, tuple(one)), 1)
        for size, one in zip(sizes, classes, strict=True)
    ]
    sent = [msgspec.msgpack.encode(one.address()) for one in made]
    arena = Arena([ArenaSegment.attach(msgspec.msgpack.decode(one, type=SegmentAddress)) for one in sent])
    try:
        yield arena
    finally:
        arena.close()
        for one in made:
            one.close()


def test_one_class_has_the_numbers_and_the_order_that_it_always_had() -> None:
    segment = ArenaSegment.create(4, 2 * PAGE)
    assert segment.address().classes == segment.classes == segment.pieces == (SlotClass(range(4), 2 * PAGE),)
    assert segment.address().class_bytes == ()
    arena = Arena([segment])
    assert (arena.slots, arena.num_slots, arena.places, arena.class_bytes) == ((range(4),), 4, (1,), (2 * PAGE,))
    segment.usable_slots = 3
    space = Arena([segment]).slot_space(0)
    assert isinstance(space, PlainSlots)
    assert (space.num_rows, space.usable, [list(free) for free in space.free]) == (4, 3, [[2, 1, 0]])
    arena.close()


def test_a_slots_number_says_its_class_extent_and_place() -> None:
    with ranks_with((PAGE, 3 * PAGE, 0), extent_bytes=(7 * PAGE,)) as arena:
        (segment,) = arena.segments
        assert (arena.num_slots, arena.places, arena.slot_bytes) == (3, (7, 2, 0), 3 * PAGE)
        assert (segment.unit, segment.pieces) == ("extent", (SlotClass(range(3), 7 * PAGE),))
        small, large, none = segment.classes
        assert small.start_of(number(0, 2, 3)) == (2 * 7 + 3) * PAGE
        assert large.start_of(number(1, 2, 1)) == (2 * 7 + 3) * PAGE
        assert segment.class_of(number(1, 0, 0)) == large
        assert segment.slot_view(number(2, 1, 5)).nbytes == 0
        assert segment.class_of(number(2, 1, 5)) == none
        for wrong in (number(1, 0, 2), number(0, 3, 0), number(3, 0, 0), -1):
            with pytest.raises(PactViolation, match="outside the arena's 3 extents"):
                segment.slot_view(wrong)


def test_an_address_with_other_extents_is_not_this_arena() -> None:
    segment = ArenaSegment.create_extents(Extents(3, 4 * PAGE, (PAGE, 2 * PAGE)), 1)
    address = segment.address()
    for wrong in (dataclasses.replace(address, num_slots=4), dataclasses.replace(address, rank_slot_bytes=5 * PAGE)):
        with pytest.raises(KvpactError, match="is not behind"):
            ArenaSegment.attach(wrong)
    segment.close()


def test_stages_with_other_sizes_number_their_slots_alike() -> None:
    with ranks_with(
        (PAGE, 4 * PAGE), (2 * PAGE, 3 * PAGE), (0, PAGE), extent_bytes=(8 * PAGE, 9 * PAGE, PAGE * 4)
    ) as arena:
        assert arena.places == (4, 2)
        assert arena.class_bytes == (3 * PAGE, 8 * PAGE)
        assert arena.slot_bytes == 8 * PAGE
        assert [len(view) for view in arena.slot_views(number(0, 2, 3))] == [PAGE, 2 * PAGE, 0]
        assert [len(view) for view in arena.slot_views(number(1, 2, 1))] == [4 * PAGE, 3 * PAGE, PAGE]


def test_ranks_with_other_classes_are_no_arena() -> None:
    ranks = [
        ArenaSegment.create_extents(Extents(3, 4 * PAGE, sizes), 1) for sizes in ((PAGE, PAGE), (PAGE, PAGE, PAGE))
    ]
    ranks.append(ArenaSegment.create(3, PAGE))
    for other in ranks[1:]:
        with pytest.raises(PactViolation, match="number their slot classes differently"):
            Arena([ranks[0], other])
    for one in ranks:
        one.close()


def test_pinned_extents_are_handed_out_one_after_the_other() -> None:
    with ranks_with((PAGE, 2 * PAGE), (PAGE, 2 * PAGE)) as made:
        for segment, usable in zip(made.segments, (2, 1), strict=True):
            segment.usable_slots = usable
        arena = Arena(made.segments)
        assert arena.usable_slots == 1
        space = arena.slot_space(0)
        assert isinstance(space, ClassedSlots)
        made.segments[1].usable_slots = 3
        assert arena.usable_slots == 2
        space.use(arena.usable_slots)
        assert space.usable == 2
        space.check()


def test_pages_are_taken_ahead_of_the_highest_slot_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = ArenaSegment.create_extents(Extents(3, 4 * PAGE, (PAGE, 2 * PAGE)), 1)
    used: list[int] = []
    monkeypatch.setattr(segment.pages, "use", used.append)
    segment.use([number(0, 1, 2), number(0, 0, 3), number(1, 2, 0)])
    assert used == [7 * PAGE, 10 * PAGE]
    segment.close()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_slots_in_use_never_share_bytes_whoever_writes_them(pages: list[tuple[int, ...]], rng: random.Random) -> None:
    """The scheduler's process hands out rows, workers write by number, and each finds what it wrote."""
    with ranks_with(*([one * PAGE for one in rank] for rank in pages)) as arena:
        space = arena.slot_space(rows_without_payload=2)
        assert isinstance(space, ClassedSlots)
        written: dict[int, int] = {}
        for mark in range(1, 40):
            if written and rng.random() < 0.3:
                row = rng.choice(sorted(written))
                assert all(set(view) <= {written[row]} for view in arena.slot_views(space.number(row)))
                del written[row]
                space.give_back(row)
                continue
            slot_class = rng.randrange(3)
            space.obtain(slot_class, 1, Nothing())
            if space.free[slot_class]:
                (row,) = space.take(1, slot_class)
                if (slot := space.number(row)) >= 0:
                    assert slot in arena.slots[slot_class]
                    for segment in arena.segments:
                        view = segment.slot_view(slot)
                        view[:] = bytes([mark]) * view.nbytes
                    written[row] = mark
        for row, mark in written.items():
            for view in arena.slot_views(space.number(row)):
                assert bytes(view) == bytes([mark]) * view.nbytes, "another slot was written over this one"


class Nothing:
    """An index from which nothing can be taken away."""

    now = 0

    def oldest(self, slot_class: int) -> None:
        return None

    def is_needed(self, row: int) -> bool:
        return True

    def last_use(self, row: int) -> None:
        return None

    def drop_rows(self, rows: Sequence[int]) -> None:
        raise AssertionError


# Sizes


def test_memory_for_less_than_two_blocks_names_the_least_that_works() -> None:
    assert slots_for(64 * MIB, 4 * MIB, 2) == 8
    with pytest.raises(ConfigError, match=r"10MiB holds 1 blocks of 8MiB each .*2 ranks.* set at least 16MiB"):
        slots_for(10 * MIB, 4 * MIB, 2)


def test_memory_for_less_than_two_blocks_of_each_class_names_the_least_that_works() -> None:
    with pytest.raises(
        ConfigError, match=r"23MiB has no room for 2 blocks .* sizes 8MiB, 2MiB .*2 ranks.* set at least 24MiB"
    ):
        extents_for(23 * MIB, (4 * MIB, 0, MIB), 2, ranks_differ=False)


@pytest.mark.parametrize("largest", [16 * KIB, 200 * KIB, MIB + PAGE, 8 * MIB])
def test_less_than_two_percent_is_lost_at_the_end_of_an_extent(largest: int) -> None:
    rng = random.Random(largest)
    for _ in range(50):
        sizes = [largest, *(PAGE * rng.randint(4, max(4, largest // PAGE)) for _ in range(rng.randint(1, 3)))]
        found = extents_for(8 * GIB, sizes, 1, ranks_differ=False)
        assert all(found.num_bytes % one <= MAX_LOSS * found.num_bytes for one in sizes)
        assert found.num_bytes * found.count <= 8 * GIB < found.num_bytes * (found.count + 1)
        assert found.count >= 2 * len(sizes)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((736, 768, 800, 804, 924), id="DeepSeek V4"),
        pytest.param((1024, 1152, 1280), id="Gemma 3 27B"),
        pytest.param((128, 144, 160), id="Gemma 3 27B on 8 ranks"),
        pytest.param((12864, 13056), id="Qwen3-Next"),
        pytest.param((1608, 1728), id="Qwen3-Next on 8 ranks"),
        pytest.param((1216, 1280), id="Jamba"),
    ],
)
def test_memory_for_blocks_of_real_models_is_cut_with_little_loss_into_many_extents(sizes: tuple[int, ...]) -> None:
    for memory in (4 * GIB, 64 * GIB):
        found = extents_for(memory, [size * KIB for size in sizes], 1, ranks_differ=False)
        assert found.loss <= MAX_LOSS
        assert found.count >= 150
        assert max(found.places) <= 64, "a move would drop more blocks in a step than it has time for"


def test_extents_are_as_small_as_the_sizes_allow() -> None:
    assert extents_for(8 * GIB, (8 * MIB, MIB), 1, ranks_differ=False) == Extents(1024, 8 * MIB, (8 * MIB, MIB))
    assert extents_for(8 * GIB, (8 * MIB, 7 * MIB), 2, ranks_differ=False).num_bytes == 56 * MIB
    assert extents_for(MIB, (16 * KIB, 0, 4 * KIB), 1, ranks_differ=False) == Extents(
        64, 16 * KIB, (16 * KIB, 0, 4 * KIB)
    )


def test_stages_whose_sizes_differ_have_extents_with_as_many_of_their_largest_blocks() -> None:
    one, other = (extents_for(32 * GIB, sizes, 2, ranks_differ=True) for sizes in ((5 * MIB, MIB), (6 * MIB, MIB)))
    assert [each.places[0] for each in (one, other)] == [64, 64]
    assert one.places[1] <= other.places[1]


@pytest.mark.parametrize(("first", "second"), [(1, 1), (5, 3), (7, 2), (1, 30)])
def test_the_least_that_works_does_work(first: int, second: int) -> None:
    sizes = (first * PAGE, 0, second * PAGE)
    for memory in range(PAGE, 1000 * PAGE, PAGE):
        try:
            found = extents_for(memory, sizes, 1, ranks_differ=False)
        except ConfigError as error:
            said = str(error)
            continue
        assert f"set at least {format_size(memory)};" in said
        assert found.enough
        with ranks_with(sizes, extent_bytes=[found.num_bytes], count=found.count) as arena:
            space = arena.slot_space(0)
            for slot_class in (2, 0):
                assert space.obtain(slot_class, 2, Nothing()) >= 1
                assert len(space.take(2, slot_class)) == 2
        return


def test_extents_that_the_machine_does_not_have_are_refused_with_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_memory_bytes", lambda: 10 * MIB)
    monkeypatch.setattr(limits, "promised_elsewhere", lambda *_, **__: (0, 0))
    with pytest.raises(ConfigError, match=r"wants 12MiB \(1 x 3 extents of 4MiB\).*has 10MiB available"):
        ArenaSegment.create_extents(Extents(3, 4 * MIB, (2 * MIB, MIB)), 1)
