"""The blocks of side groups that a request's match needs: their names, and where memory has them.

Owns no state: a request's names are in its `RequestState`, the blocks in the index. `groups.py` has the rules, this
module applies them to a request's chain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from kvpact.cache.jobs import SideBlocks
from kvpact.cache.prefetch import Side
from kvpact.cache.request import RequestState
from kvpact.contract import BlockHolder, SchedulerContext
from kvpact.identity.groups import GroupKind, GroupSet
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import BlockIndex, Pin
from kvpact.index.slot_space import PlainSlots
from kvpact.memory.arena import Arena
from kvpact.ranges import BlockRange

logger = logging.getLogger(__name__)

NAMES_PER_SLOT, MAX_NAMES = 64, 1 << 20
"""Rows of a chain without bytes: for each slot of the side groups' blocks, and at most."""

Runs = list[tuple[SideBlocks, tuple[int, ...]]]
"""Blocks in a row of a side group, each run with the engine's blocks."""


@dataclass(eq=False)
class Sides:
    """The side groups of one engine's requests. Without a whole scheduler context nothing is promised or saved."""

    groups: GroupSet
    index: BlockIndex
    classes: Sequence[int] = ()
    """Per group the class of its slots; by default all are of one."""
    context: SchedulerContext | None = field(default=None, init=False)
    smallest_block: int = field(init=False)
    """Tokens of the smallest block of any group."""
    _is_null: dict[int, bool] = field(default_factory=dict, init=False)
    """The engine's block -> whether it is a null block, which it stays. A pool bounds how many there are."""

    def __post_init__(self) -> None:
        self.smallest_block = min(group.block_size for group in self.groups.groups)

    def bind(self, context: BlockHolder) -> None:
        """The engine offers its block tables."""
        self.context = context if isinstance(context, SchedulerContext) else None
        self._is_null.clear()
        if self.context is None:
            logger.warning(
                "kvpact: the model has %d KV cache groups, and this engine does not show the blocks of each: nothing "
                "is stored or served",
                len(self.groups.groups),
            )

    def is_null(self, block_id: int) -> bool:
        """Whether the engine's table has no block there."""
        null = self._is_null.get(block_id)
        if null is None:
            assert self.context is not None
            null = self._is_null[block_id] = self.context.get_block(block_id).is_null
        return null

    def not_null(self, block_ids: Sequence[int]) -> list[int]:
        """Return the blocks in a piece of the engine's table that are there, without null blocks."""
        for block_id in set(block_ids).difference(self._is_null):
            self.is_null(block_id)
        is_null = self._is_null
        return [block_id for block_id in block_ids if not is_null[block_id]]

    # Names

    def key(self, state: RequestState, number: int, block: int) -> BlockKey | None:
        """The name of a side group's block; None if the request has no key for its row."""
        name = state.side_keys.get((number, block))
        if name is None:
            row, rows = self.groups.row_of(number, block), state.keys.keys if state.keys is not None else []
            if row >= len(rows):
                return None
            name = state.side_keys[number, block] = self.groups.side_key(rows[row], number, block)
        return name

    def parent(self, state: RequestState, number: int, block: int) -> BlockKey:
        """The key of the row on which a block hangs."""
        assert state.keys is not None
        return state.keys.keys[self.groups.row_of(number, block)]

    def needed(self, number: int, rows: int, computed_rows: int = 0) -> BlockRange:
        """What a match of so many rows needs of a group, and an engine that has the first rows has not."""
        return self._after(number, self.groups.groups[number].needed(rows * self.groups.block_size), computed_rows)

    def _after(self, number: int, blocks: BlockRange, computed_rows: int) -> BlockRange:
        computed = computed_rows * self.groups.block_size // self.groups.groups[number].block_size
        start = min(max(blocks.start, computed), blocks.end)
        return BlockRange(start, blocks.end - start)

    def keep_names(self, keys: Sequence[BlockKey]) -> bool:
        """Where the chain has no bytes: know these rows, so that blocks can hang on them; whether there is room."""
        known, index = self.index.known_prefix(keys), self.index
        if known == len(keys):
            return True
        reservation = index.reserve(keys, known, len(keys))
        if reservation is None:
            return False
        index.complete(reservation.slots)
        return True

    # Matches

    def longest(self, state: RequestState, rows: int, computed_rows: int, has: Callable[[BlockKey], bool]) -> int:
        """The rows of the longest match within the first `rows`, which the chain has, so that `has` all names that it
        needs of the side groups; 0 if it is not longer than what the engine has computed."""
        groups = self.groups

        def first_missing(number: int, blocks: BlockRange) -> int | None:
            if number == groups.chain:
                return rows if blocks.end > rows else None
            for block in self._after(number, blocks, computed_rows):
                name = self.key(state, number, block)
                if name is None or not has(name):
                    return block
            return None

        found = groups.longest_match(rows * groups.block_size, first_missing) // groups.block_size
        if groups.chain is None and not any(self.needed(number, found, computed_rows).count for number in groups.sides):
            return 0  # between two chunks nothing is needed: there is nothing to load, either
        return found if found > computed_rows else 0

    def class_of(self, number: int) -> int:
        """The class of a group's slots."""
        return self.classes[number] if self.classes else 0

    def named(self, state: RequestState, rows: int, computed_rows: int) -> list[Side]:
        """What a match of so many rows needs of the side groups, in the order of the chain."""
        found = []
        for number in self.groups.sides:
            for block in self.needed(number, rows, computed_rows):
                name = self.key(state, number, block)
                if name is not None:
                    side = Side(name, self.parent(state, number, block), self.class_of(number))
                    found.append((self.groups.row_of(number, block), side))
        return [side for _, side in sorted(found, key=itemgetter(0))]

    def lease(self, state: RequestState, rows: int, computed_rows: int) -> tuple[tuple[SideBlocks, ...], list[Pin]]:
        """Where memory has what a match needs, and pins that keep it; all of it is held."""
        runs, pins = [], []
        for number in self.groups.sides:
            blocks = self.needed(number, rows, computed_rows)
            names = [name for block in blocks if (name := self.key(state, number, block)) is not None]
            if names:
                held = self.index.pin_each(names)
                runs.append(SideBlocks(number, blocks.start, tuple(names), tuple(pin.slot for pin in held)))
                pins += held
        return tuple(runs), pins

    @property
    def reads_all(self) -> bool:
        """Whether any part of a match is one, because each group keeps all blocks of it."""
        return all(group.kind is GroupKind.FULL for group in self.groups.groups)

    def first_of(self, runs: Sequence[SideBlocks], num_tokens: int) -> tuple[SideBlocks, ...]:
        """What a match of so many tokens needs of the runs of a longer one, where each group keeps all blocks."""
        ends = [self.groups.groups[run.group].needed(num_tokens).end - run.start for run in runs]
        return tuple(
            SideBlocks(run.group, run.start, run.keys[:end], run.slots[:end])
            for run, end in zip(runs, ends, strict=True)
            if end > 0
        )

    def may_end_at(self, num_tokens: int) -> bool:
        """Whether a match may be cut to end there: a state is of use at the end of its block alone."""
        return not any(num_tokens % group.block_size for group in self.groups.groups if group.kind is GroupKind.STATE)

    def placed(self, request_id: str, runs: Sequence[SideBlocks]) -> Runs:
        """Pair blocks in slots with the engine's blocks; what the engine has no block for is left out."""
        assert self.context is not None
        tables, placed = self.context.get_block_ids(request_id), []
        for run in runs:
            table = tables[run.group]
            there = [at for at, _ in enumerate(run.slots) if self._is_there(table, run.start + at)]
            for first, last in runs_of(there):
                part = SideBlocks(run.group, run.start + first, run.keys[first:last], run.slots[first:last])
                placed.append((part, tuple(table[part.start : part.start + last - first])))
        return placed

    def filled(self, request_id: str, rows: BlockRange) -> list[int]:
        """The engine's blocks that a load of these rows has for side groups; it fills those that the match needs."""
        assert self.context is not None
        tables, size = self.context.get_block_ids(request_id), self.groups.block_size
        filled: list[int] = []
        for number in self.groups.sides:
            per_block = self.groups.groups[number].block_size
            filled += self.not_null(tables[number][rows.start * size // per_block : -(-rows.end * size // per_block)])
        return filled

    def _is_there(self, table: Sequence[int], block: int) -> bool:
        return block < len(table) and not self.is_null(table[block])


def runs_of(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The runs of ascending numbers, half-open."""
    runs = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        ascending = [number for _, number in run]
        runs.append((ascending[0], ascending[-1] + 1))
    return runs


def index_of(arena: Arena, groups: GroupSet | None, classes: Sequence[int]) -> BlockIndex:
    """An index over the slots of an arena. A chain without bytes has rows of its own, which take no slots."""
    if groups is None or groups.chain is not None:
        space = arena.slot_space(0)
        chain = classes[groups.chain] if groups is not None and groups.chain is not None and classes else 0
    else:
        space = arena.slot_space(min(MAX_NAMES, NAMES_PER_SLOT * arena.num_slots * max(1, *arena.places)))
        chain = len(arena.places)
    return BlockIndex(space.num_rows, space=space, classes=len(space.free), chain_class=chain)


def number_of(index: BlockIndex) -> Callable[[int], int] | None:
    """Tells the number by which workers know a slot of the index; None if it is the same."""
    return None if isinstance(index.space, PlainSlots) else index.space.number
