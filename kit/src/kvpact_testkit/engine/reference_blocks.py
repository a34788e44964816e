"""Blocks of a `ReferenceCache`: what names one of any KV cache group, its slot, and a promise of several.

Owns the names. Each names all that a block depends on, and is known once the request has those tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, NamedTuple

from kvpact.contract import JobOutcome, LoadJob
from kvpact.identity.groups import GroupKind, GroupSet, KVCacheGroup
from kvpact.identity.keys import BlockKey
from kvpact.ranges import BlockRange, num_blocks_for


class EntryKey(NamedTuple):
    """The key of the row (a block of the request's chain of keys) with the last token that a block depends on, the
    block's group, and which of the row's blocks it is where those are smaller."""

    row: BlockKey
    group: int
    part: int = 0


def name_of(groups: GroupSet, row_size: int, rows: list[BlockKey], group: int, block: int) -> EntryKey | None:
    """The name of a group's block; None until all tokens of its row are known."""
    kind = groups.groups[group]
    last = (block + 1) * kind.block_size - 1 + kind.drops_last
    row = last // row_size
    part = last % row_size // kind.block_size if kind.block_size < row_size else 0
    return EntryKey(rows[row], group, part) if row < len(rows) else None


@dataclass(slots=True)
class Entry:
    """One block of one group: its slot, and the number of plans and saves that hold it. `stored` is set once all
    ranks have written it."""

    slot: int
    holds: int = 0
    stored: bool = False


@dataclass(slots=True)
class Piece:
    """A promised block: its group and its number there, and what the cache has of it."""

    group: int
    block: int
    name: EntryKey
    entry: Entry


@dataclass(slots=True)
class ReferencePlan:
    """A promise of `num_tokens` tokens from row `start` on; `pieces` in the order of groups and blocks."""

    start: int
    num_tokens: int
    seen: int
    pieces: list[Piece]
    num_blocks: int = 0
    """Rows committed; 0 while the plan is open."""
    postponed: bool = False
    """Whether the engine said after the last prepare that it did not take the match."""
    jobs: dict[int, LoadJob] = field(default_factory=dict)
    """Loads that are not complete yet."""
    outcomes: list[tuple[int, JobOutcome]] = field(default_factory=list)
    """Outcomes of the complete loads, with their group."""
    held: list[int] = field(default_factory=list)
    """The engine's blocks, held because the load is overdue."""

    @property
    def blocks(self) -> BlockRange:
        """The committed rows."""
        return BlockRange(self.start, self.num_blocks)


class StoredBlocks:
    """The blocks of all groups in `num_slots` slots, the least recently used first, and what a match needs of them.

    A row has `row_size` tokens.
    """

    def __init__(self, groups: GroupSet, row_size: int, num_slots: int) -> None:
        self.entries: OrderedDict[EntryKey, Entry] = OrderedDict()
        self.free_slots = list(range(num_slots))
        self._num_slots = num_slots
        self._groups, self._block_size = groups, row_size
        self._reads_all = all(group.kind is GroupKind.FULL for group in groups.groups)

    def _find(self, keys: list[BlockKey], computed: int, most: int) -> int:
        """The end of the longest match behind the engine's `computed` tokens, for which every group has its blocks."""

        def first_missing(group: int, blocks: BlockRange) -> int | None:
            own = computed // self._groups.groups[group].block_size
            return next((i for i in blocks if i >= own and self._stored(self._name(keys, group, i)) is None), None)

        return self._groups.longest_match(most, first_missing)

    def _name(self, keys: list[BlockKey], group: int, block: int) -> EntryKey | None:
        return name_of(self._groups, self._block_size, keys, group, block)

    def _stored(self, name: EntryKey | None) -> Entry | None:
        entry = None if name is None else self.entries.get(name)
        return entry if entry is not None and entry.stored else None

    def _pieces(self, keys: list[BlockKey], computed: int, end: int) -> list[Piece]:
        """What a load of the tokens from `computed` to `end` copies: all, the window, or the state there."""
        pieces = []
        for number, group in enumerate(self._groups.groups):
            for block in group.needed(end):
                name = self._name(keys, number, block)
                entry = self._stored(name)
                if block >= computed // group.block_size and name is not None and entry is not None:
                    pieces.append(Piece(number, block, name, entry))
        return pieces

    def _full(self, group: KVCacheGroup, computed: int) -> range:
        """The group's blocks that hold what they should once `computed` tokens are: of states only that just there."""
        end = computed // group.block_size
        if group.kind is GroupKind.STATE:
            return range(end - 1, end) if end and computed % group.block_size == 0 else range(0)
        return range(end)

    def _unheld(self, keep: set[EntryKey]) -> list[EntryKey]:
        return [key for key, entry in self.entries.items() if not entry.holds and key not in keep]

    def _take_slots(self, wanted: int, keep: set[EntryKey]) -> tuple[int, ...]:
        unheld = self._unheld(keep)
        missing = max(0, wanted - len(self.free_slots))
        self.free_slots.extend(self.entries.pop(key).slot for key in unheld[:missing])
        taken, self.free_slots = self.free_slots[:wanted], self.free_slots[wanted:]
        return tuple(taken)

    def _drop(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            self._let_go(piece.entry)

    def _let_go(self, entry: Entry) -> None:
        entry.holds -= 1
        if not entry.holds and not entry.stored:
            self.free_slots.append(entry.slot)

    def _forget(self, key: EntryKey, entry: Entry) -> None:
        if self.entries.get(key) is entry:
            del self.entries[key]
        entry.stored = False


NEVER: Final = -1
"""The reset after which a block was filled that stands on older ones: no reset."""


class FilledBlocks:
    """Which of the engine's blocks were filled since the last reset: only these may be saved (H38)."""

    def __init__(self, groups: GroupSet) -> None:
        self._sizes = [group.block_size for group in groups.groups]
        self._resets = 0
        self._written_after: dict[int, int] = {}
        """Engine block -> number of resets before it was last filled."""
        self._computed: dict[str, int] = {}
        """Request id -> its tokens computed at the last call."""
        self._sound: dict[str, int] = {}
        """Request id -> the token from which on it computed on top of older blocks."""

    def reset(self) -> None:
        """No block is new any more."""
        self._resets += 1

    def begin(self, request_id: str, computed: int) -> None:
        """The request gets its blocks, of which the first `computed` tokens are filled."""
        self._computed[request_id] = computed
        self._sound.pop(request_id, None)

    def end(self, request_id: str) -> None:
        """Forget a request; its blocks stay known."""
        self._computed.pop(request_id, None)
        self._sound.pop(request_id, None)

    def note(self, request_id: str, tables: Sequence[Sequence[int]], computed: int) -> int:
        """The request's blocks of each group are filled up to `computed` tokens; returns how many of these are all in
        blocks that were filled since the last reset."""
        first = self._computed.get(request_id, 0)
        end = self._computed[request_id] = max(first, computed)
        new = [
            range(num_blocks_for(first, size), min(num_blocks_for(end, size), len(ids)))
            for size, ids in zip(self._sizes, tables, strict=False)
        ]
        for blocks, size, ids in zip(new, self._sizes, tables, strict=False):
            for block, block_id in enumerate(ids[: blocks.start]):
                if block_id and self._written_after.get(block_id) != self._resets:
                    self._sound[request_id] = min(block * size, self._sound.get(request_id, end))
                    break
        filled_after = self._resets if self._sound.get(request_id, first) >= first else NEVER
        for blocks, ids in zip(new, tables, strict=False):
            self._written_after.update((ids[block], filled_after) for block in blocks)
        return min(end, self._sound.get(request_id, end))


def runs(blocks: Iterator[int] | list[int]) -> Iterator[tuple[int, int]]:
    """The runs of ascending numbers, half-open."""
    for _, run in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        yield numbers[0], numbers[-1] + 1
