"""Needs of a request's matches: the longest that places have, what memory lacks of one, and its runs.

Applies `identity/groups.py` to the request's keys. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvpact.cache.needs.engine_groups import EngineGroups
from kvpact.cache.needs.runs import NAMES, Has, Run, either
from kvpact.identity.keys import BlockKey
from kvpact.ranges import BlockRange


class Missing(NamedTuple):
    """Blocks that a match up to row `end` needs and memory lacks: the rows from `first` on, and loose runs."""

    first: int
    end: int
    linked: Run
    loose: Sequence[Run] = ()

    @property
    def runs(self) -> Sequence[Run]:
        """All of it."""
        return (self.linked, *self.loose)

    def blocks_after(self, start: int) -> int:
        """The number of its blocks, where the engine has the rows before `start`."""
        return max(0, self.end - max(self.first, start)) + sum(map(len, self.loose))


@dataclass(eq=False, slots=True)
class Needs:
    """Needs of matches of a request with these `keys`, of which the engine has the rows before `start`.

    `known` has its loose blocks' keys by group and block, and gets those that are made.
    """

    of: EngineGroups
    keys: Sequence[BlockKey]
    start: int
    known: dict[tuple[int, int], BlockKey]
    in_a_row: int = 0
    """Rows that memory had at the last `available`, whether or not a match may use them."""
    lacks_state_at: int = 0
    """Rows of a longer match than the last `available` found, of which places have all rows and not the state at its
    end; 0 if there is none, or the model has no states."""
    owner: int = 0
    """Tenant to whom the blocks belong in memory; see `Run.owner`."""

    def _key(self, number: int, block: int) -> BlockKey | None:
        """The key of a loose block; None if the request has no key for its row."""
        key = self.known.get((number, block))
        if key is None:
            row = self.of.groups.row_of(number, block)
            if row >= len(self.keys):
                return None
            key = self.known[number, block] = self.of.groups.side_key(self.keys[row], number, block)
        return key

    def _after_start(self, number: int, blocks: BlockRange) -> BlockRange:
        groups = self.of.groups
        computed = self.start * groups.block_size // groups.groups[number].block_size
        start = min(max(blocks.start, computed), blocks.end)
        return BlockRange(start, blocks.end - start)

    def _loose(self, rows: int) -> Iterator[Run]:
        """Loose runs of a match of so many rows."""
        groups = self.of.groups
        for number in groups.sides:
            blocks = self._after_start(number, groups.groups[number].needed(rows * groups.block_size))
            keys = [key for block in blocks if (key := self._key(number, block)) is not None]
            if keys:
                below = [groups.row_of(number, block) for block in range(blocks.start, blocks.start + len(keys))]
                yield Run(number, blocks.start, keys, self.keys, below, self.of.class_of(number), is_linked=False)

    def linked(self, first: int, end: int) -> Run:
        """The rows [first, end) of the chain."""
        chain = self.of.groups.chain
        group = chain if chain is not None else NAMES
        rows = range(first, end)
        return Run(group, first, self.keys[first:end], self.keys, rows, self.of.chain_class, owner=self.owner)

    def runs(self, rows: int) -> list[Run]:
        """The runs of a match of so many rows, the linked one first."""
        found = self.linked(self.start, rows)
        return [found, *self._loose(rows)] if self.of.groups.sides else [found]

    def loose_keys(self, *ends: int) -> Sequence[BlockKey]:
        """The keys of the loose blocks that matches up to these rows need, each once."""
        return [*dict.fromkeys(key for rows in ends for run in self._loose(rows) for key in run.keys)]

    def longest(self, has: Has, rows: int | None = None) -> int:
        """Rows of the longest match of which a place `has` all, within the first `rows`, by default those that it has
        of the chain; 0 if it is not longer than what the engine has."""
        groups = self.of.groups
        if rows is None:
            rows = has.count(self.keys) if groups.chain is not None else len(self.keys)
        if not groups.sides:
            return rows
        most = rows

        def first_missing(number: int, blocks: BlockRange) -> int | None:
            if number == groups.chain:
                return most if blocks.end > most else None
            for block in self._after_start(number, blocks):
                key = self._key(number, block)
                if key is None or not has.each(key):
                    return block
            return None

        found = groups.longest_match(rows * groups.block_size, first_missing) // groups.block_size
        if groups.chain is None and not any(True for _ in self._loose(found)):
            return 0  # between two chunks nothing is needed: there is nothing to load, either
        return found if found > self.start else 0

    def available(self, memory: Has, tiers: Sequence[Has]) -> tuple[int, tuple[int, ...]]:
        """Rows of a match that memory has all of, and rows that each of `tiers` can supply of a longer one.

        Rows without bytes are available everywhere.
        """
        keys = self.keys
        groups = self.of.groups
        by_tier = tuple([tier.count(keys) for tier in tiers]) if tiers else ()
        held = self.in_a_row = memory.count(keys)
        if not groups.sides:
            return held, by_tier
        if groups.chain is None:
            held = self.in_a_row = len(keys)
            by_tier = tuple(len(keys) for _ in tiers)
        resident = self.longest(memory, held)
        reach = resident
        stored = max(held, *by_tier, 0)
        if tiers and stored > resident:
            reach = self.longest(either(memory, *tiers), stored)
        if groups.chain is not None and self.of.states:
            whole = stored - stored % self.of.match_rows
            self.lacks_state_at = whole if whole > max(reach, self.start) else 0
        if reach <= held:  # the tiers are needed for loose blocks alone
            return resident, tuple(reach for _ in by_tier)
        return resident, tuple(min(blocks, reach) for blocks in by_tier)

    def longest_with(self, places: Has) -> int:
        """Rows of the longest match that memory has together with other `places`; the state that no match had may be
        among them."""
        found = self.longest(places)
        if found >= self.lacks_state_at:
            self.lacks_state_at = 0
        return found

    def missing(self, end: int, memory: Has) -> Missing:
        """Blocks that memory lacks of a match up to row `end`; of the chain it has what `available` found."""
        first = min(self.in_a_row, end)
        loose = [run.unknown(0, memory.each) for run in self._loose(end)] if self.of.groups.sides else ()
        return Missing(first, end, self.linked(first, end), [run for run in loose if run.keys])

    def up_to(self, rows: int) -> Needs:
        """The needs of matches of at most so many rows, where longer ones have other loose blocks."""
        has_loose = bool(self.of.groups.sides)
        return Needs(self.of, self.keys[:rows], self.start, self.known, owner=self.owner) if has_loose else self

    def worth_asking(self, memory: Has, tiers: Callable[[bool], Sequence[Has]], rows: int) -> Sequence[BlockKey]:
        """Keys of loose blocks that neither memory nor a tier has for sure, and that make a match within `rows` longer
        if the tiers have all that they may have; none if no match is longer then.

        `tiers` gives the tiers' answers: with True, blocks of which they were not asked count as theirs.
        """
        if not self.of.groups.sides:
            return ()
        rows = len(self.keys) if self.of.groups.chain is None else rows
        sure, perhaps = (either(memory, *tiers(unknown)) for unknown in (False, True))
        longest = self.longest(perhaps, rows)
        if longest <= self.longest(sure, rows):
            return ()
        return [key for key in self.loose_keys(longest) if not sure.each(key)]
