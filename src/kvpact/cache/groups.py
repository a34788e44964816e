"""What a request's match needs of each KV cache group: the blocks' keys, and where memory and the engine have them.

Owns no state of requests: their keys are in their `RequestState`, the blocks in the index. `identity/groups.py` has the
rules, this module applies them to a request's chain.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from kvpact.cache.jobs import GroupBlocks, Placed
from kvpact.cache.prefetch import Lacking, Needed
from kvpact.cache.request import RequestState
from kvpact.cache.totals import Rows, Sources
from kvpact.contract import BlockHolder, SchedulerContext
from kvpact.identity.groups import GroupKind, GroupSet
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import BlockIndex, Pin
from kvpact.index.slot_space import PlainSlots
from kvpact.memory.arena import Arena
from kvpact.metrics import MEMORY
from kvpact.ranges import BlockRange

logger = logging.getLogger(__name__)

NAMES_PER_SLOT, MAX_NAMES = 64, 1 << 20
"""Rows of a chain without bytes: for each slot of the side groups' blocks, and at most."""

Tables = Sequence[Sequence[int]]
"""The engine's blocks of a request, by group."""


@dataclass(eq=False)
class RequestGroups:
    """The KV cache groups of one engine's requests.

    An engine that does not offer a whole scheduler context shows the blocks of one group alone: with side groups
    nothing is promised or saved then.
    """

    groups: GroupSet
    index: BlockIndex
    classes: Sequence[int] = ()
    """Per group the class of its slots; by default all are of one."""
    class_bytes: Sequence[int] = (1,)
    """Per class the bytes of a slot."""
    shows_all: bool = field(init=False)
    """Whether the engine shows the blocks of every group."""
    block_size: int = field(init=False)
    """Tokens of a row."""
    match_rows: int = field(init=False)
    """A match is a multiple of so many rows."""
    smallest_block: int = field(init=False)
    """Tokens of the smallest block of any group."""
    _context: SchedulerContext | None = field(default=None, init=False)
    _is_null: dict[int, bool] = field(default_factory=dict, init=False)
    """The engine's block -> whether it is a null block, which it stays. A pool bounds how many there are."""

    def __post_init__(self) -> None:
        self.block_size = self.groups.block_size
        self.match_rows = self.groups.alignment // self.groups.block_size
        self.smallest_block = min(group.block_size for group in self.groups.groups)
        self.shows_all = not self.groups.sides

    def bind(self, context: BlockHolder) -> None:
        """The engine offers its block tables."""
        self._context = context if isinstance(context, SchedulerContext) else None
        self._is_null.clear()
        self.shows_all = self._context is not None or not self.groups.sides
        if not self.shows_all:
            logger.warning(
                "kvpact: the model has %d KV cache groups, and this engine does not show the blocks of each: nothing "
                "is stored or served",
                len(self.groups.groups),
            )

    def tables(self, request_id: str, block_ids: Callable[[], Sequence[int]]) -> Tables:
        """The engine's blocks of a request; `block_ids` gives those of a model with one group."""
        if not self.groups.sides or self._context is None:
            return (block_ids(),)
        return self._context.get_block_ids(request_id)

    def is_null(self, block_id: int) -> bool:
        """Whether the engine's table has no block there."""
        null = self._is_null.get(block_id)
        if null is None:
            null = self._is_null[block_id] = self._context is not None and self._context.get_block(block_id).is_null
        return null

    def not_null(self, block_ids: Sequence[int]) -> list[int]:
        """Return the blocks in a piece of the engine's table that are there, without null blocks."""
        for block_id in set(block_ids).difference(self._is_null):
            self.is_null(block_id)
        is_null = self._is_null
        return [block_id for block_id in block_ids if not is_null[block_id]]

    def class_of(self, number: int) -> int:
        """The class of a group's slots."""
        return self.classes[number] if self.classes else 0

    def bytes_of(self, number: int | None) -> int:
        """Bytes of one block of a group; 0 of a chain that is no group."""
        return self.class_bytes[self.class_of(number)] if number is not None else 0

    # Keys

    def key(self, state: RequestState, number: int, block: int) -> BlockKey | None:
        """The key of a side group's block; None if the request has no key for its row."""
        key = state.side_keys.get((number, block))
        if key is None:
            row, rows = self.groups.row_of(number, block), state.keys.keys if state.keys is not None else []
            if row >= len(rows):
                return None
            key = state.keep_side_key(number, block, self.groups.side_key(rows[row], number, block))
        return key

    def needed(self, number: int, rows: int, computed_rows: int = 0) -> BlockRange:
        """What a match of so many rows needs of a group, and an engine that has the first rows has not."""
        return self._after(number, self.groups.groups[number].needed(rows * self.groups.block_size), computed_rows)

    def _after(self, number: int, blocks: BlockRange, computed_rows: int) -> BlockRange:
        computed = computed_rows * self.groups.block_size // self.groups.groups[number].block_size
        start = min(max(blocks.start, computed), blocks.end)
        return BlockRange(start, blocks.end - start)

    def know_rows(self, keys: Sequence[BlockKey]) -> int:
        """How many rows of a chain are known, so that blocks can hang on them.

        Where the chain has no bytes they become known now, as far as there is room for their keys.
        """
        known, index = self.index.known_prefix(keys), self.index
        if self.groups.chain is not None or known == len(keys):
            return known
        reservation = index.reserve(keys, known, len(keys))
        if reservation is None:
            return known
        index.complete(reservation.slots)
        return len(keys)

    # Matches

    def longest(self, state: RequestState, rows: int, computed_rows: int, has: Callable[[BlockKey], bool]) -> int:
        """The rows of the longest match within the first `rows`, which the chain has, so that `has` all keys that it
        needs of the side groups; 0 if it is not longer than what the engine has computed."""
        groups = self.groups
        if not groups.sides:
            return rows

        def first_missing(number: int, blocks: BlockRange) -> int | None:
            if number == groups.chain:
                return rows if blocks.end > rows else None
            for block in self._after(number, blocks, computed_rows):
                key = self.key(state, number, block)
                if key is None or not has(key):
                    return block
            return None

        found = groups.longest_match(rows * groups.block_size, first_missing) // groups.block_size
        if groups.chain is None and not any(self.needed(number, found, computed_rows).count for number in groups.sides):
            return 0  # between two chunks nothing is needed: there is nothing to load, either
        return found if found > computed_rows else 0

    def hanging(self, state: RequestState, rows: int, computed_rows: int) -> list[Needed]:
        """What a match of so many rows needs of the side groups, in the order of the chain."""
        found = []
        for number in self.groups.sides:
            for block in self.needed(number, rows, computed_rows):
                key = self.key(state, number, block)
                if key is not None and state.keys is not None:
                    row = self.groups.row_of(number, block)
                    found.append((row, Needed(key, state.keys.keys[row], self.class_of(number))))
        return [needed for _, needed in sorted(found, key=itemgetter(0))]

    def lacking(
        self, state: RequestState, keys: Sequence[BlockKey], end: int, resident: int, computed_rows: int
    ) -> Lacking:
        """What memory lacks of what a match up to row `end` of `keys` needs; it has all for one of `resident` rows."""
        if not self.groups.sides:
            return Lacking(resident, end, self.bytes_of(self.groups.chain))
        hanging = [each for each in self.hanging(state, end, computed_rows) if not self.index.is_held(each.key)]
        held = end if self.groups.chain is None else self.index.held_prefix(keys, end)
        return Lacking(held, end, self.bytes_of(self.groups.chain), hanging)

    def sources(
        self, rows: Rows, runs: Iterable[GroupBlocks], read_from: Mapping[BlockKey, str], num_rows: int
    ) -> Sources:
        """Where a match of so many rows has its blocks from; memory has what no tier was to be `read_from` for."""
        sides = Counter[str]()
        for run in runs:
            for key in run.keys if run.group != self.groups.chain else ():
                sides[read_from.get(key, MEMORY)] += self.bytes_of(run.group)
        return Sources(rows, self.bytes_of(self.groups.chain), tuple(sides.items()), num_rows)

    def worth_asking(
        self,
        state: RequestState,
        rows: int,
        computed_rows: int,
        has: Callable[[BlockKey], bool],
        may_have: Callable[[BlockKey], bool],
    ) -> list[BlockKey]:
        """Keys of side groups' blocks that neither memory nor a tier `has` for sure, and that make a match longer if
        the tiers have all that they `may_have`; none if no match is longer then."""
        held = self.index.is_held
        sure = self.longest(state, rows, computed_rows, lambda key: held(key) or has(key))
        perhaps = self.longest(state, rows, computed_rows, lambda key: held(key) or may_have(key))
        keys = [needed.key for needed in self.hanging(state, perhaps, computed_rows)] if perhaps > sure else []
        return [key for key in keys if not held(key) and not has(key)]

    def lease(
        self, state: RequestState, keys: Sequence[BlockKey], rows: BlockRange
    ) -> tuple[list[GroupBlocks], list[Pin]]:
        """Where memory has what a match of these rows of the chain `keys` needs, and pins that keep it; all is held."""
        last, groups = keys[rows.end - 1], self.groups
        pins, runs = [self.index.pin(last)], []
        if groups.chain is not None:
            slots = self.index.slots_to(pins[0].slot, rows.count)
            runs.append(GroupBlocks(groups.chain, rows.start, keys[rows.start : rows.end], slots))
        for number in groups.sides:
            blocks = self.needed(number, rows.end, rows.start)
            names = [key for block in blocks if (key := self.key(state, number, block)) is not None]
            if names:
                held = self.index.pin_each(names)
                runs.append(GroupBlocks(number, blocks.start, names, [pin.slot for pin in held]))
                pins += held
        return runs, pins

    def lost_any(self, runs: Iterable[GroupBlocks]) -> bool:
        """Whether blocks were dropped since they were leased. A chain loses its last block whenever it loses one."""
        slots = (slot for run in runs for slot in (run.slots[-1:] if run.group == self.groups.chain else run.slots))
        return any(self.index.key_at(slot) is None for slot in slots)

    @property
    def reads_all(self) -> bool:
        """Whether any part of a match is one, because each group keeps all blocks of it."""
        return all(group.kind is GroupKind.FULL for group in self.groups.groups)

    def first_of(self, runs: Sequence[GroupBlocks], num_tokens: int) -> list[GroupBlocks]:
        """What a match of so many tokens needs of the runs of a longer one, where each group keeps all blocks."""
        ends = [self.groups.groups[run.group].needed(num_tokens).end - run.start for run in runs]
        return [
            GroupBlocks(run.group, run.start, run.keys[:end], run.slots[:end])
            for run, end in zip(runs, ends, strict=True)
            if end > 0
        ]

    def whole(self, rows: int) -> int:
        """The most rows, at most so many, that whole blocks of every group make up."""
        return rows - rows % self.match_rows

    def may_end_at(self, num_tokens: int) -> bool:
        """Whether a match may be cut to end there: a state is of use at the end of its block alone."""
        return not any(num_tokens % group.block_size for group in self.groups.groups if group.kind is GroupKind.STATE)

    def placed(self, runs: Iterable[GroupBlocks], tables: Tables) -> list[Placed]:
        """Pair blocks in slots with the engine's blocks; what the engine has no block for is left out."""
        placed: list[Placed] = []
        for run in runs:
            ids = tables[run.group][run.start : run.start + len(run.slots)]
            if run.group == self.groups.chain:
                placed.append((run, tuple(ids)))
                continue
            there = [at for at, block_id in enumerate(ids) if not self.is_null(block_id)]
            for first, last in runs_of(there):
                part = GroupBlocks(run.group, run.start + first, run.keys[first:last], run.slots[first:last])
                placed.append((part, tuple(ids[first:last])))
        return placed

    def hanging_of(self, tables: Tables, rows: BlockRange) -> list[int]:
        """The engine's blocks that a load of these rows has for side groups; it fills those that the match needs."""
        size, found = self.groups.block_size, list[int]()
        for number in self.groups.sides:
            per_block = self.groups.groups[number].block_size
            found += self.not_null(tables[number][rows.start * size // per_block : -(-rows.end * size // per_block)])
        return found

    def filled(self, tables: Tables, before: int, computed: int) -> list[int]:
        """The engine's blocks of all groups that tokens [before, computed) fill, with the blocks they end in."""
        filled: list[int] = []
        for number, group in enumerate(self.groups.groups):
            blocks = tables[number][before // group.block_size : computed // group.block_size]
            filled += blocks if number == self.groups.chain else self.not_null(blocks)
        return filled


def runs_of(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The runs of ascending numbers, half-open."""
    runs = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        ascending = [number for _, number in run]
        runs.append((ascending[0], ascending[-1] + 1))
    return runs


def index_of(arena: Arena, groups: GroupSet, classes: Sequence[int]) -> BlockIndex:
    """An index over the slots of an arena. A chain without bytes has rows of its own, which take no slots."""
    if groups.chain is not None:
        space = arena.slot_space(0)
        chain = classes[groups.chain] if classes else 0
    else:
        space = arena.slot_space(min(MAX_NAMES, NAMES_PER_SLOT * arena.num_slots * max(1, *arena.places)))
        chain = len(arena.places)
    return BlockIndex(space.num_rows, space=space, classes=len(space.free), chain_class=chain)


def number_of(index: BlockIndex) -> Callable[[int], int] | None:
    """Tells the number by which workers know a slot of the index; None if it is the same."""
    return None if isinstance(index.space, PlainSlots) else index.space.number
