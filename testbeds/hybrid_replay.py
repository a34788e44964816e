"""What caches of a hybrid model's blocks hit on a trace of prompts, at equal memory: models of policies, not of code.

A prompt is a row of numbers, one for each `ROW_TOKENS` tokens; equal numbers stand for equal prefixes. The first of a
shape's groups is the chain: a row of it is good for every longer prompt. Of the others, the sides, a match needs what
`KVCacheGroup.needed` says. All memory is one budget in bytes, and what was used longest ago goes first, of one prompt
the end before the beginning. Prompts come one after another; answers are not in the trace.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from hybrid_models import CHUNK_TOKENS, HybridModel, rounded
from kvpact.identity.groups import GroupKind, GroupSet, KVCacheGroup
from kvpact.ranges import BlockRange

ROW_TOKENS = 512
"""Tokens that one number of the trace stands for."""
CHUNK_ROWS = CHUNK_TOKENS // ROW_TOKENS

Prompt = tuple[int, list[int]]
"""Tokens, and a number for each row; the last row may be partial."""
Entry = tuple[int, int]
"""Number of a group and of a row. Group -1: what the engine computed of a row's sides and no match at its end needs."""


class Save(Enum):
    """Which side blocks of the rows that a prompt computed are saved."""

    ALL = "all"
    """As the engine computed them, all alike."""
    COLD = "all, cold"
    """All; those that `TAILS` leaves out are the first to be evicted."""
    FREE = "all, cold if free"
    """The same, but those only into memory that is free."""
    ENDS = "ends"
    """What a match of the whole prompt needs."""
    TAILS = "tails"
    """The same, and what a match of the longest prefix needs whose chain is resident: the prompt branches off there."""


@dataclass(frozen=True)
class Shape:
    """A model on one rank, in rows: for each group what it needs, and bytes of a row's blocks."""

    groups: tuple[KVCacheGroup, ...]
    row_bytes: tuple[int, ...]
    """Of the blocks that a match at the row's end, or a later one, needs."""
    rest_bytes: int = 0
    """Of the sides' other blocks of a row."""


@dataclass
class Totals:
    """Sums over all prompts; `held` and `prompts` give the mean of the bytes held."""

    tokens: int = 0
    hit_tokens: int = 0
    saved: int = 0
    loaded: int = 0
    held: int = 0
    prompts: int = 0


class Cache(Protocol):
    """What a replay asks of a cache."""

    def serve(self, prompt: Prompt) -> tuple[int, int, int]:
        """Match the prompt, then save it: rows of the match, bytes loaded, bytes saved."""

    @property
    def held_bytes(self) -> int:
        """Bytes that blocks take now."""


def slot_shape(model: HybridModel, slot_bytes: Callable[[int], int]) -> Shape:
    """The model's rows if a block with so many bytes of payload takes `slot_bytes` of them.

    Groups whose blocks a match needs alike are one.
    """
    full = [one for one in model.groups if one.group.kind is GroupKind.FULL]
    chain = sum(ROW_TOKENS * slot_bytes(one.payload_bytes) // one.group.block_size for one in full)
    sides: dict[KVCacheGroup, int] = {}
    rest = 0
    for one in model.groups:
        if one in full:
            continue
        group, size = one.group, slot_bytes(one.payload_bytes)
        if group.kind is GroupKind.STATE:
            needed = computed = 1
        else:
            computed = ROW_TOKENS // group.block_size
            needed = min(computed, -(-(group.span - 1) // group.block_size))
        side = KVCacheGroup(group.kind, ROW_TOKENS, max(group.span, ROW_TOKENS) if group.span else 0)
        sides[side] = sides.get(side, 0) + needed * size
        rest += (computed - needed) * size
    return Shape((KVCacheGroup(GroupKind.FULL, ROW_TOKENS), *sides), (chain, *sides.values()), rest)


def payload_shape(model: HybridModel) -> Shape:
    """A class of slots for each distinct payload."""
    return slot_shape(model, rounded)


def physical_shape(model: HybridModel) -> Shape:
    """A physical block of the engine's pool for each block."""
    return slot_shape(model, lambda _: model.physical_bytes)


def full_shape(model: HybridModel) -> Shape | None:
    """Full attention in all layers; None: the engine does not start so."""
    off = model.without_hybrid_manager
    return off and Shape((KVCacheGroup(GroupKind.FULL, ROW_TOKENS),), (ROW_TOKENS * off[1] // off[0],))


class PolicyCache:
    """A cache of one shape that saves what `save` says and evicts the least recently used entries."""

    def __init__(self, shape: Shape, budget: int, save: Save) -> None:
        self.shape = shape
        self.held_bytes = 0
        self._budget = budget
        self._save = save
        self._groups = GroupSet(shape.groups)
        self._entries: OrderedDict[Entry, int] = OrderedDict()
        """Resident entries and their bytes, the least recently used first."""
        self._sides: dict[int, list[Entry]] = {}
        """For each resident row: the side entries that go with it."""

    def serve(self, prompt: Prompt) -> tuple[int, int, int]:
        """See `Cache`."""
        tokens, rows = prompt
        match, chain = self._match(rows, tokens - 1)
        whole = min(tokens // ROW_TOKENS, self._most_rows())
        needed = [(group, rows[row]) for group, row in self._needed(match)]
        loaded = match * self.shape.row_bytes[0] + sum(self._entries[entry] for entry in needed)
        return match, loaded, self._keep(rows[:whole], match, chain, needed)

    def check(self) -> None:
        """Raises AssertionError if the bytes are miscounted, above the budget, or a side has lost its row."""
        assert self.held_bytes == sum(self._entries.values()) <= self._budget
        assert all((0, row) in self._entries for _, row in self._entries)

    def _match(self, rows: list[int], max_tokens: int) -> tuple[int, int]:
        """Rows of the longest match, and of the longest one if only the chain counted."""

        def first_missing(group: int, blocks: BlockRange) -> int | None:
            return next((row for row in blocks if (group, rows[row]) not in self._entries), None)

        chain = first_missing(0, BlockRange(0, max_tokens // ROW_TOKENS))
        longest = max_tokens // ROW_TOKENS if chain is None else chain
        return self._groups.longest_match(longest * ROW_TOKENS, first_missing) // ROW_TOKENS, longest

    def _most_rows(self) -> int:
        """Of one prompt, so that what is saved of it and is not cold fits."""
        if self._save is Save.ALL:
            return self._budget // (sum(self.shape.row_bytes) + self.shape.rest_bytes)
        tail = sum(
            group.needed(1 << 30).count * self.shape.row_bytes[number] for number, group in self._numbered_sides()
        )
        return max(0, self._budget - 2 * tail) // self.shape.row_bytes[0]

    def _numbered_sides(self) -> Iterator[tuple[int, KVCacheGroup]]:
        return enumerate(self.shape.groups[1:], 1)

    def _needed(self, match: int) -> Iterator[Entry]:
        """Of each side: (group, index of the row) that a match of so many rows needs."""
        for number, group in self._numbered_sides():
            for row in group.needed(match * ROW_TOKENS):
                yield number, row

    def _computed(self, match: int, whole: int) -> Iterator[Entry]:
        """All side entries that the engine has had of the rows from `match` on, as (group, index of the row)."""
        for number, group in self._numbered_sides():
            is_state = group.kind is GroupKind.STATE
            for row in range(match, whole):
                if not is_state or row + 1 == whole or (row + 1 - match) % CHUNK_ROWS == 0:
                    yield number, row
        if self.shape.rest_bytes:
            yield from ((-1, row) for row in range(match, whole))

    def _keep(self, rows: list[int], match: int, chain: int, needed: list[Entry]) -> int:
        """Save what the policy keeps of the prompt, and touch what it used; returns the bytes saved."""
        computed = dict.fromkeys(self._computed(match, len(rows)))
        tails = dict.fromkeys(self._needed(len(rows)))
        if self._save is not Save.ENDS:
            tails |= dict.fromkeys(self._needed(min(chain, len(rows))))
        warm = computed if self._save is Save.ALL else {entry: None for entry in tails if entry in computed}
        used = [(group, rows[row]) for group, row in warm] + needed
        self._touch(rows, used)
        saved = self._put((0, row) for row in rows)
        saved += self._put((group, rows[row]) for group, row in warm)
        self._touch(rows, used)
        if self._save in (Save.COLD, Save.FREE):
            saved += self._put_cold((group, rows[row]) for group, row in computed if (group, row) not in warm)
        return saved

    def _touch(self, rows: list[int], used: list[Entry]) -> None:
        """Make these the last to be evicted: sides first, then rows, of which the first is the very last."""
        for entry in [*used, *((0, row) for row in reversed(rows))]:
            if entry in self._entries:
                self._entries.move_to_end(entry)

    def _put(self, entries: Iterable[Entry]) -> int:
        """Save those that are not resident; returns their bytes."""
        saved = 0
        for entry in entries:
            if entry not in self._entries:
                self._add(entry)
                saved += self._entries[entry]
        return saved

    def _put_cold(self, entries: Iterable[Entry]) -> int:
        """The same for entries that are the first to be evicted."""
        saved = 0
        for entry in entries:
            has_row = (0, entry[1]) in self._entries
            if entry in self._entries or not has_row or (self._save is Save.FREE and not self._fits(entry)):
                continue
            self._add(entry)
            self._entries.move_to_end(entry, last=False)
            saved += self._entries[entry]
        return saved

    def _bytes(self, entry: Entry) -> int:
        return self.shape.rest_bytes if entry[0] < 0 else self.shape.row_bytes[entry[0]]

    def _fits(self, entry: Entry) -> bool:
        return self.held_bytes + self._bytes(entry) <= self._budget

    def _add(self, entry: Entry) -> None:
        """Evict until the entry fits, and add it as the most recently used."""
        while not self._fits(entry):
            self._evict()
        self._entries[entry] = self._bytes(entry)
        self.held_bytes += self._entries[entry]
        if entry[0]:
            self._sides.setdefault(entry[1], []).append(entry)

    def _evict(self) -> None:
        """Remove the least recently used entry; a row takes its sides along."""
        entry, size = self._entries.popitem(last=False)
        self.held_bytes -= size
        if entry[0] == 0:
            for side in self._sides.pop(entry[1], ()):
                self.held_bytes -= self._entries.pop(side, 0)
        else:
            self._sides[entry[1]].remove(entry)


def replay(cache: Cache, prompts: Iterable[Prompt]) -> Totals:
    """Serve the prompts one after another."""
    totals = Totals()
    for prompt in prompts:
        match, loaded, saved = cache.serve(prompt)
        totals.tokens += prompt[0]
        totals.hit_tokens += match * ROW_TOKENS
        totals.loaded += loaded
        totals.saved += saved
        totals.held += cache.held_bytes
        totals.prompts += 1
    return totals


def read_trace(path: Path) -> list[Prompt]:
    """The prompts of a trace in the format of Mooncake's conversation trace: JSON objects, one a line."""
    lines = path.read_text().splitlines()
    return [(one["input_length"], one["hash_ids"]) for one in map(json.loads, lines)]
