"""Ranges of a request's blocks, and sets of them.

Owns their algebra: unions, intersections, hulls. Never reads a block's content.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class BlockRange:
    """A run of engine blocks, indexing a request's blocks from 0. `count` may be 0."""

    start: int
    count: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.count < 0:
            raise ValueError(f"a block range needs start >= 0 and count >= 0, not ({self.start}, {self.count})")

    @property
    def end(self) -> int:
        """The block after the last one."""
        return self.start + self.count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True, slots=True)
class RangeSet:
    """A set of blocks as sorted, disjoint, non-adjacent, non-empty ranges. Build one with `of` or `union`."""

    ranges: tuple[BlockRange, ...] = ()

    @classmethod
    def of(cls, *ranges: BlockRange) -> RangeSet:
        """The blocks covered by any of `ranges`, which may overlap and be empty."""
        if len(ranges) == 1:
            return cls(ranges) if ranges[0].count else cls()
        merged: list[BlockRange] = []
        for item in sorted(item for item in ranges if item.count):
            if merged and item.start <= merged[-1].end:
                merged[-1] = BlockRange(merged[-1].start, max(merged[-1].end, item.end) - merged[-1].start)
            else:
                merged.append(item)
        return cls(tuple(merged))

    @classmethod
    def span(cls, start: int, end: int) -> RangeSet:
        """The blocks `start <= block < end`; empty if `end <= start`."""
        return cls.of(BlockRange(start, max(0, end - start)))

    def union(self, other: RangeSet) -> RangeSet:
        """Blocks in either set."""
        if not other.ranges:
            return self
        if not self.ranges:
            return other
        return RangeSet.of(*self.ranges, *other.ranges)

    def intersection(self, other: RangeSet) -> RangeSet:
        """Blocks in both sets; saves combine so over ranks (P10)."""
        if self.ranges == other.ranges:  # as nearly always: all ranks have copied the whole job
            return self
        return self.difference(self.difference(other))

    def difference(self, other: RangeSet) -> RangeSet:
        """Blocks in this set and not in `other`."""
        if not other.ranges or not self.ranges:
            return self
        if self.ranges == other.ranges:
            return NO_RANGES
        kept: list[BlockRange] = []
        for item in self.ranges:
            start = item.start
            for hole in other.ranges:
                if hole.end <= start or hole.start >= item.end:
                    continue
                if hole.start > start:
                    kept.append(BlockRange(start, hole.start - start))
                start = max(start, hole.end)
            if start < item.end:
                kept.append(BlockRange(start, item.end - start))
        return RangeSet(tuple(kept))

    def hull(self) -> BlockRange | None:
        """Smallest single range that covers the set, None if empty; failures combine so over ranks (P10)."""
        if not self.ranges:
            return None
        return BlockRange(self.ranges[0].start, self.ranges[-1].end - self.ranges[0].start)

    def prefix_from(self, start: int) -> int:
        """Number of consecutive blocks in the set from `start` on."""
        for item in self.ranges:
            if 0 <= start - item.start < item.count:
                return item.start + item.count - start
        return 0

    def blocks(self) -> Iterator[int]:
        """Every block, ascending."""
        for item in self.ranges:
            yield from item

    def __contains__(self, block: int) -> bool:
        return self.prefix_from(block) > 0

    def __len__(self) -> int:
        return sum([item.count for item in self.ranges])


NO_RANGES = RangeSet()


def hull(ranges: Iterable[RangeSet]) -> RangeSet:
    """Hull over several ranks' failed sets, as a set."""
    whole = RangeSet.of(*[item for ranges_of_rank in ranges for item in ranges_of_rank.ranges]).hull()
    return RangeSet.of(whole) if whole else NO_RANGES


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens; the last one may be partly filled."""
    return -(-num_tokens // block_size)
