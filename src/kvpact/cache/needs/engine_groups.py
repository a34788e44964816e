"""The KV cache groups of one engine's requests: the engine's block tables, and runs of what a step computed.

Applies `identity/groups.py`. Owns which of the engine's blocks are null blocks; changes nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvpact.cache.needs.owed import Computed
from kvpact.cache.needs.runs import NAMES, Run, runs_of
from kvpact.contract import BlockHolder, SchedulerContext
from kvpact.identity.groups import GroupKind, GroupSet, LooseBlock, OffersStates
from kvpact.identity.keys import BlockKey
from kvpact.identity.tags import BlockTags, Tag
from kvpact.ranges import BlockRange

Tables = Sequence[Sequence[int]]
"""The engine's blocks of a request, by group."""


class Placed(NamedTuple):
    """Runs of a match with the engine's blocks, without blocks for which the engine has none."""

    runs: Sequence[Run]
    blocks: int
    """The number of blocks that are copied."""
    beside: Sequence[int]
    """The engine's blocks that the load's rows have of loose groups: the load fills those that the match needs."""


@dataclass(eq=False)
class EngineGroups:
    """The KV cache groups of one engine's requests.

    An engine that does not offer a whole scheduler context shows the blocks of one group alone: with side groups
    nothing is promised or saved then.
    """

    groups: GroupSet
    classes: Sequence[int] = ()
    """Per group the class of its slots; by default all are of one."""
    class_bytes: Sequence[int] = (1,)
    """Per class the bytes of a slot."""
    shows_all: bool = field(init=False)
    """True if the engine shows the blocks of every group."""
    block_size: int = field(init=False)
    """Tokens of a row."""
    alignment: int = field(init=False)
    """A match is a multiple of so many tokens."""
    match_rows: int = field(init=False)
    """A match is a multiple of so many rows."""
    states: Sequence[int] = field(init=False)
    """Numbers of the groups of states, which an engine leaves at ends of steps alone."""
    smallest_block: int = field(init=False)
    """Tokens of the smallest block of any group."""
    chain_class: int = field(init=False)
    """The class of rows' slots."""
    row_bytes: int = field(init=False)
    """Bytes of a row; 0 if rows have no bytes."""
    names_first: bool = field(init=False)
    """True if the engine's first table is the chain's."""
    _context: SchedulerContext | None = field(default=None, init=False)
    _offers: OffersStates | None = field(default=None, init=False)
    _is_null: dict[int, bool] = field(default_factory=dict, init=False)
    """The engine's block -> whether it is a null block, which it stays. A pool bounds how many there are."""

    def __post_init__(self) -> None:
        groups = self.groups
        self.block_size = groups.block_size
        self.alignment = groups.alignment
        self.match_rows = groups.alignment // groups.block_size
        self.smallest_block = min(group.block_size for group in groups.groups)
        self.states = [number for number, group in enumerate(groups.groups) if group.kind is GroupKind.STATE]
        self.shows_all = not groups.sides
        self.names_first = groups.chain == 0
        self.chain_class = self.class_of(groups.chain) if groups.chain is not None else len(self.class_bytes)
        self.row_bytes = self.class_bytes[self.chain_class] if groups.chain is not None else 0

    def bind(self, context: BlockHolder) -> None:
        """The engine offers its block tables."""
        self._context = context if isinstance(context, SchedulerContext) else None
        self._offers = context if isinstance(context, OffersStates) else None
        self._is_null.clear()
        self.shows_all = self._context is not None or not self.groups.sides

    def class_of(self, number: int) -> int:
        """The class of a group's slots."""
        return self.classes[number] if self.classes else 0

    def bytes_of(self, number: int) -> int:
        """Bytes of one block of a group."""
        return self.class_bytes[self.class_of(number)]

    def blocks_of(self, num_tokens: int) -> int:
        """The engine's blocks of all groups that so many tokens take."""
        return sum([-(-num_tokens // group.block_size) for group in self.groups.groups])

    # The engine's tables

    def tables(self, request_id: str, block_ids: Callable[[], Sequence[int]]) -> Tables:
        """The engine's blocks of a request; `block_ids` gives those of a model with one group."""
        if not self.groups.sides or self._context is None:
            return (block_ids(),)
        return self._context.get_block_ids(request_id)

    def is_null(self, block_id: int) -> bool:
        """True if the engine's table has no block there."""
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

    def placed(self, runs: Iterable[Run], tables: Tables, rows: BlockRange) -> Placed:
        """A load of runs in slots, which are of these rows, into the engine's blocks."""
        found: list[Run] = []
        blocks = 0
        for run in runs:
            if run.group == NAMES:
                continue
            ids = run.block_ids = tables[run.group][run.start : run.start + len(run.slots)]
            if run.is_linked:
                found.append(run)
                blocks += len(ids)
            else:
                there = [at for at, block_id in enumerate(ids) if not self.is_null(block_id)]
                found += [run.part(first, last) for first, last in runs_of(there)]
                blocks += len(there)
        return Placed(found, blocks, self._beside(tables, rows) if self.groups.sides else ())

    def _beside(self, tables: Tables, rows: BlockRange) -> list[int]:
        size = self.groups.block_size
        found = list[int]()
        for number in self.groups.sides:
            per_block = self.groups.groups[number].block_size
            found += self.not_null(tables[number][rows.start * size // per_block : -(-rows.end * size // per_block)])
        return found

    def tables_of_step(
        self, request_id: str, block_ids: Callable[[], Sequence[int]], before: int, computed: int, known: int
    ) -> tuple[Tables | None, Sequence[int], Sequence[LooseBlock]]:
        """The engine's blocks of a request, those that tokens [before, computed) fill, as of `filled`, and loose blocks
        that the engine offers now; None and none where these tokens end no block of any group, and none is offered.

        So many of the request's tokens are `known`.
        """
        offered = self._offered(request_id, block_ids, min(computed, known)) if self.states else ()
        if before // self.smallest_block >= computed // self.smallest_block and not offered:
            return None, (), ()
        tables = self.tables(request_id, block_ids)
        return tables, self.filled(tables, before, computed), offered

    def filled(self, tables: Tables, before: int, computed: int) -> list[int]:
        """The engine's blocks of all groups that tokens [before, computed) fill, with the blocks they end in."""
        filled: list[int] = []
        for number, group in enumerate(self.groups.groups):
            blocks = tables[number][before // group.block_size : computed // group.block_size]
            filled += blocks if number == self.groups.chain else self.not_null(blocks)
        return filled

    # Steps

    def sound_rows(self, tables: Tables, rows: int, sound: int, loaded_rows: int, tags: BlockTags, tag: Tag) -> int:
        """The first `rows` of a request whose blocks in all groups have a tag, as far as it still has them.

        So many as `sound` are known to have it; before the windows at `loaded_rows` loose blocks hold nothing.
        """
        groups = self.groups.groups
        size = self.groups.block_size
        if self.groups.chain is not None:
            rows = tags.same_prefix(tables[self.groups.chain], min(sound, rows), tag, rows)
        for number in self.groups.sides:
            group = groups[number]
            table = tables[number]
            first = max(sound * size // group.block_size, group.needed(loaded_rows * size).start)
            for block in range(first, min(rows * size // group.block_size, len(table))):
                if not tags.has(table[block], tag) and not self.is_null(table[block]):
                    rows = min(rows, self.groups.row_of(number, block))
                    break
        return rows

    def worth_saving(
        self, tables: Tables, rows: range, computed: int, known: int, branches: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[LooseBlock]]:
        """The engine's blocks of the chain's rows, none if these have no bytes; and the loose blocks that later
        requests may need, of those attached to these `rows`: group, block, engine's block.

        Of the request's `known` tokens so many are `computed`; others may go on from it after `branches`.
        """
        groups = self.groups
        found = list[LooseBlock]()
        computed = min(computed, known)
        for number in groups.sides:
            size = groups.groups[number].block_size
            table = tables[number]
            new = range(rows.start * groups.block_size // size, min(computed // size, len(table)))
            found += [
                (number, block, table[block])
                for block in groups.worth_saving(number, new, known, branches)
                if groups.row_of(number, block) < rows.stop and not self.is_null(table[block])
            ]
        return tables[groups.chain] if groups.chain is not None else (), found

    def windows_at(self, states: Sequence[LooseBlock], tables: Tables) -> list[LooseBlock]:
        """The engine's blocks of windows that matches which end at these states need, as far as it has them."""
        groups = self.groups.groups
        offered = {(block + 1) * groups[number].block_size for number, block, _ in states}
        ends = [end for end in offered if end % self.alignment == 0]
        return [
            (number, block, tables[number][block])
            for number in self.groups.sides
            if groups[number].kind.has_span
            for block in sorted({block for end in ends for block in groups[number].needed(end)})
            if block < len(tables[number]) and not self.is_null(tables[number][block])
        ]

    def _offered(self, request_id: str, block_ids: Callable[[], Sequence[int]], computed: int) -> Sequence[LooseBlock]:
        if self._offers is not None:
            return self._offers.offered_states(request_id)
        sizes = {number: self.groups.groups[number].block_size for number in self.states}
        ends = {number: computed // size - 1 for number, size in sizes.items() if computed and not computed % size}
        tables = self.tables(request_id, block_ids) if self._context is not None and ends else ()
        found = [(number, block, tables[number][block : block + 1]) for number, block in ends.items() if tables]
        return [(number, block, each) for number, block, ids in found for each in ids if not self.is_null(each)]

    def waiting_requests(self) -> Collection[str]:
        """Requests that the engine has not admitted, or has preempted."""
        return self._context.waiting_requests() if self._context is not None else ()

    def rows_of(self, loose: Sequence[LooseBlock]) -> range:
        """The rows from the first to the last to which one of these loose blocks is attached; one at least."""
        rows = [self.groups.row_of(number, block) for number, block, _ in loose]
        return range(min(rows), max(rows) + 1)

    def attached_to(self, loose: Sequence[LooseBlock], start: int, end: int) -> list[LooseBlock]:
        """Return those of loose blocks that are attached to rows [start, end)."""
        return [each for each in loose if start <= self.groups.row_of(each[0], each[1]) < end]

    def linked_run(self, computed: Computed, keys: Sequence[BlockKey], start: int, end: int) -> Run | None:
        """Rows [start, end) of what was computed, named `keys`; None if there are none, or they have no bytes."""
        chain = self.groups.chain
        ids = computed.ids[start - computed.first : end - computed.first]
        if chain is None or start >= end:
            return None
        rows = range(start, end)
        return Run(
            chain,
            start,
            keys[start:end],
            keys,
            rows,
            self.chain_class,
            block_ids=tuple(ids),
            request_id=computed.request_id,
            owner=computed.owner,
        )

    def loose_runs(
        self,
        computed: Computed,
        keys: Sequence[BlockKey],
        rows: int,
        known: dict[tuple[int, int], BlockKey],
        tags: BlockTags,
    ) -> list[Run]:
        """Loose blocks attached to the first `rows` of what was computed, named, that have its tag. `known` has keys
        that were made before, and gets others."""
        named: dict[int, dict[int, tuple[BlockKey, int]]] = {}
        for number, block, block_id in computed.loose:
            row = self.groups.row_of(number, block)
            if row < rows and tags.has(block_id, computed.tag):
                key = known.get((number, block))
                if key is None:
                    key = known[number, block] = self.groups.side_key(keys[row], number, block)
                named.setdefault(number, {})[block] = key, block_id
        runs = [
            self.loose_run(number, {block: blocks[block] for block in range(start, end)}, keys)
            for number, blocks in named.items()
            for start, end in runs_of(sorted(blocks))
        ]
        if self.groups.ends_at_states:
            for run in runs:
                run.replaces = self._replaced_by(run.rows[-1], computed.prompt)
        return runs

    def _replaced_by(self, row: int, prompt: int) -> int:
        """Number of rows before `row` whose states one there replaces; see `Run.replaces`.

        The last state of the prompt is replaced by those of a later prompt only, which may lack the answer, or have
        another one: chat templates leave out what a model thought.
        """
        of_prompt = max(0, prompt - 1) // self.alignment * self.match_rows
        return row - of_prompt if row >= of_prompt else row

    def loose_run(self, number: int, blocks: Mapping[int, tuple[BlockKey, int]], chain: Sequence[BlockKey]) -> Run:
        """Blocks in a row of one group, each with its key and the engine's block."""
        keys, ids = zip(*blocks.values(), strict=True)
        rows = [self.groups.row_of(number, block) for block in blocks]
        start = min(blocks)
        of_class = self.class_of(number)
        return Run(number, start, keys, chain, rows, of_class, is_linked=False, block_ids=ids)

    # Matches

    def count(self, runs: Iterable[Run]) -> int:
        """Blocks of a match that are copied."""
        blocks = 0
        for run in runs:
            blocks += len(run.slots) if run.group != NAMES else 0
        return blocks

    def part_of_match(self, rows: int) -> int:
        """The most rows, at most so many, that are a match wherever a longer one is; 0 if none is for sure."""
        return rows - rows % self.match_rows if self.reads_all else 0

    @property
    def reads_all(self) -> bool:
        """True if any part of a match is one, because each group keeps all blocks of it."""
        return all(group.kind is GroupKind.FULL for group in self.groups.groups)

    def first_of(self, runs: Sequence[Run], num_tokens: int) -> list[Run]:
        """Return the part of a match's runs that one of so many tokens needs, where each group keeps all blocks."""
        ends = [self.groups.groups[run.group].needed(num_tokens).end - run.start for run in runs]
        return [run.part(0, end) for run, end in zip(runs, ends, strict=True) if end > 0]

    def may_end_at(self, num_tokens: int) -> bool:
        """True if a match may be cut to end there: between two rows, and a state is of use at its block's end alone."""
        sizes = [group.block_size for group in self.groups.groups if group.kind is GroupKind.STATE]
        return not any(num_tokens % size for size in (self.groups.block_size, *sizes))

    def bytes_by_tier(
        self, runs: Iterable[Run], read_from: Mapping[BlockKey, str], otherwise: str, elsewhere: str
    ) -> tuple[tuple[str, int], ...]:
        """Tiers, each with the bytes of loose blocks that it had; those of which `read_from` says nothing are of
        `otherwise`, and those in another engine's memory of `elsewhere`."""
        found = Counter[str]()
        for run in runs:
            for key in () if run.is_linked else run.keys:
                tier = read_from.get(key, otherwise) if run.holder is None else elsewhere
                found[tier] += self.bytes_of(run.group)
        return tuple(found.items())
