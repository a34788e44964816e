"""Ranges against plain sets of integers."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpact.ranges import BlockRange, RangeSet, hull

ranges = st.builds(BlockRange, st.integers(0, 30), st.integers(0, 8))
lists_of_ranges = st.lists(ranges, max_size=6)
range_sets = st.builds(lambda items: RangeSet.of(*items), lists_of_ranges)


def blocks(ranges: RangeSet) -> set[int]:
    return set(ranges.blocks())


def require_canonical(ranges: RangeSet) -> None:
    assert all(item.count > 0 for item in ranges.ranges)
    assert all(left.end < right.start for left, right in zip(ranges.ranges, ranges.ranges[1:], strict=False))


@given(lists_of_ranges)
def test_a_range_set_holds_the_blocks_of_its_ranges(items: list[BlockRange]) -> None:
    ranges = RangeSet.of(*items)
    require_canonical(ranges)
    expected = {block for item in items for block in item}
    assert list(ranges.blocks()) == sorted(expected)
    assert len(ranges) == len(expected)
    assert [block for block in range(45) if block in ranges] == sorted(expected)


@given(range_sets, range_sets)
def test_set_operations_are_those_of_sets(left: RangeSet, right: RangeSet) -> None:
    for combined, expected in [
        (left.union(right), blocks(left) | blocks(right)),
        (left.intersection(right), blocks(left) & blocks(right)),
        (left.difference(right), blocks(left) - blocks(right)),
    ]:
        require_canonical(combined)
        assert blocks(combined) == expected


@given(range_sets, range_sets)
def test_equal_sets_of_blocks_are_equal_range_sets(left: RangeSet, right: RangeSet) -> None:
    assert (left == right) == (blocks(left) == blocks(right))
    assert left.difference(right).union(left.intersection(right)) == left


@given(range_sets, st.integers(0, 45))
def test_the_prefix_from_a_block_is_the_unbroken_run_there(ranges: RangeSet, start: int) -> None:
    run = 0
    while start + run in blocks(ranges):
        run += 1
    assert ranges.prefix_from(start) == run


@given(range_sets)
def test_the_hull_is_the_smallest_range_around_all(ranges: RangeSet) -> None:
    covering = ranges.hull()
    if not len(ranges):
        assert covering is None
        return
    assert covering is not None
    assert (covering.start, covering.end - 1) == (min(blocks(ranges)), max(blocks(ranges)))


@given(st.lists(range_sets, max_size=4))
def test_the_hull_over_ranks_covers_every_rank(ranks: list[RangeSet]) -> None:
    everything = set().union(*map(blocks, ranks))
    expected = set(range(min(everything), max(everything) + 1)) if everything else set()
    assert blocks(hull(ranks)) == expected


def test_h41_failed_ranges_of_two_ranks_combine_to_their_hull() -> None:
    failed = hull([RangeSet.of(BlockRange(10, 6)), RangeSet.of(BlockRange(4, 12))])
    assert failed == RangeSet.of(BlockRange(4, 12))


def test_h42_saves_with_a_gap_stay_two_ranges() -> None:
    first = RangeSet.of(BlockRange(0, 16), BlockRange(32, 32))
    assert first.intersection(RangeSet.span(0, 48)) == RangeSet.of(BlockRange(0, 16), BlockRange(32, 16))
    assert first.prefix_from(0) == 16


@given(st.integers(-5, 20), st.integers(-5, 20))
def test_a_span_holds_what_lies_between(start: int, end: int) -> None:
    if start < 0:
        with pytest.raises(ValueError, match="start >= 0"):
            RangeSet.span(start, end)
    else:
        assert blocks(RangeSet.span(start, end)) == set(range(start, end))


@pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, -1)])
def test_a_range_before_the_first_block_is_refused(start: int, count: int) -> None:
    with pytest.raises(ValueError, match="start >= 0 and count >= 0"):
        BlockRange(start, count)
