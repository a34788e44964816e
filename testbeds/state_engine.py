"""An engine of a model with states that serves conversations, without a model: vLLM's steps and offers in mode "align".

Two caches are asked before each prompt: kvpact's own `PactCache`, whose engine has nothing of its own, and `OwnCache`,
vLLM's prefix cache with memory for everything.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import cast

from hybrid_models import HybridModel, rounded
from inert_blocks import NULL, InertBlocks
from kvpact.cache.cache import PactCache
from kvpact.cache.memory import EngineKV
from kvpact.config import load_config
from kvpact.identity.groups import GroupKind, GroupSet
from kvpact.identity.keys import KEY_BYTES, Namespace
from kvpact.index.block_index import BlockIndex
from kvpact.index.classed_slots import ClassedSlots
from kvpact.index.slot_space import Blocks, SlotSpace
from kvpact.memory.arena import Arena
from kvpact.memory.extents import Extents, extents_for, slot_classes
from played_engine import Prompt, Slots, carried_out
from state_turns import Turn

STEP_TOKENS = 8192
"""vLLM's default of --max-num-batched-tokens on a server."""


def ends_of_steps(start: int, prompt: int, answer: int, unit: int, junction: int = 0) -> Iterator[int]:
    """Tokens computed after each step that leaves a state at a block's end, and after the last step of all.

    As vLLM 0.32 (`Scheduler._mamba_block_aligned_split`): chunks end at a block's end, the last one but one where the
    prompt has its last whole block, one where other prompts part (`junction`). An answer's steps are of one token, and
    its last token is never computed.
    """
    last = (prompt - 1) // unit * unit
    while start < prompt:
        end = min(prompt, start + STEP_TOKENS)
        if end < prompt:
            end -= end % unit
        start = min((stop for stop in (last, junction) if start < stop < end), default=end)
        yield start
    computed = prompt + answer - 1
    yield from range(start - start % unit + unit, computed, unit)
    if computed > start:
        yield computed


@dataclass
class OwnCache:
    """vLLM's prefix cache with memory for everything: blocks of attention, and states that some step has left."""

    unit: int
    keeps_all: bool = True
    """True with `--prefix-cache-retention-interval` at the unit; by default a prompt's last state alone is kept, and
    where prompts part."""
    blocks: set[int] = field(default_factory=set)
    states: set[int] = field(default_factory=set)
    junction: int = 0
    """Of the last prompt the tokens at which it parted from another one where there was no state; 0 if none."""

    def serve(self, turn: Turn, names: Sequence[int]) -> int:
        """The tokens that it has of a prompt, whose turn it then keeps."""
        most = (turn.prompt - 1) // self.unit
        shared = next((at for at in range(most) if names[at] not in self.blocks), most)
        hit = next((at for at in range(shared, 0, -1) if names[at - 1] in self.states), 0)
        self.junction = shared * self.unit if shared > hit else 0
        for end in ends_of_steps(hit * self.unit, turn.prompt, turn.answer, self.unit, self.junction):
            if end % self.unit == 0 and (self.keeps_all or end in (most * self.unit, self.junction)):
                self.states.add(names[end // self.unit - 1])
        self.blocks.update(names[: (turn.prompt + turn.answer - 1) // self.unit])
        return hit * self.unit


@dataclass
class DiskContent:
    """What a disk tier keeps that is written all blocks: its index, of slots of one size, without memory above it.

    `writes`: the states that are written of those that steps leave. "all"; "last": not those that a later one of the
    same request replaces; "default": those that vLLM offers by default.
    """

    model: HybridModel
    slots: int
    writes: str

    def __post_init__(self) -> None:
        self.index = BlockIndex(self.slots)
        self.unit = self.model.group_set.alignment
        kinds = [one.group.kind for one in self.model.groups]
        self.states = [at for at, kind in enumerate(kinds) if kind is GroupKind.STATE]

    def serve(self, turn: Turn, names: Sequence[int]) -> int:
        """The tokens that it has of a prompt, whose turn it then keeps."""
        unit = self.unit
        most = (turn.prompt - 1) // unit
        rows = [_digest(name) for name in names[: (turn.prompt + turn.answer - 1) // unit]]
        held = self.index.held_prefix(rows[:most])
        at_end = {at: [_digest(names[at - 1], group) for group in self.states] for at in range(1, len(names) + 1)}
        hit = next((at for at in range(held, 0, -1) if all(key in self.index for key in at_end[at])), 0)
        for key in [rows[hit - 1], *at_end[hit]] if hit else ():
            self.index.touch(key)
        junction = held * unit if held > hit else 0
        ends = [end for end in ends_of_steps(hit * unit, turn.prompt, turn.answer, unit, junction) if end % unit == 0]
        wanted = {most * unit, junction, *(ends[-1:] if self.writes == "last" else ())}
        for end in [end // unit for end in ends if self.writes == "all" or end in wanted]:
            for key in at_end[end]:
                self._put([*rows[:end], key])
        self._put(rows)
        return hit * unit

    def _put(self, keys: Sequence[bytes]) -> None:
        """Write what is lacking of a chain, if there is room."""
        known = self.index.known_prefix(keys)
        reservation = self.index.reserve(keys, known, len(keys)) if known < len(keys) else None
        if reservation is not None:
            self.index.complete(reservation.slots)


def _digest(name: int, group: int = -1) -> bytes:
    return sha256(b"%d %d" % (name, group)).digest()


class FixedShares:
    """`ClassedSlots` of which each class has so many extents and never gets another's."""

    def __init__(self, places: Sequence[int], extents: Sequence[int]) -> None:
        self._slots = ClassedSlots(places, sum(extents))
        self._extents = extents

    def __getattr__(self, name: str) -> object:
        return getattr(self._slots, name)

    def obtain(self, slot_class: int, lacking: int, blocks: Blocks) -> int:
        """See `SlotSpace`. Extents that nobody has, up to its own number."""
        slots = self._slots
        left = self._extents[slot_class] - len(slots.extents(slot_class))
        return slots.obtain(slot_class, min(lacking, left * slots.places[slot_class]), blocks) if left > 0 else 0


class ModelSlots(Slots):
    """The slots of one rank's memory for a model; `share`: percent of it for states, or None for kvpact's own rule."""

    def __init__(self, extents: Extents, chain_class: int, share: int | None) -> None:
        super().__init__(extents.places, extents.count)
        self.class_bytes = extents.class_bytes
        self._parts: list[int] | None = None
        if share is not None:
            others = [one for one in range(len(self.places)) if one != chain_class]
            for_states = max(len(others), round(extents.count * share / 100))
            self._parts = [0] * len(self.places)
            for place, one in enumerate(others):
                self._parts[one] = for_states * (place + 1) // len(others) - for_states * place // len(others)
            self._parts[chain_class] = extents.count - for_states

    def slot_space(self, rows_without_payload: int) -> SlotSpace:
        """See `Arena`."""
        if self._parts is None:
            return super().slot_space(rows_without_payload)
        return cast(SlotSpace, FixedShares(self.places, self._parts))


class StateEngine:
    """An engine whose own prefix cache is empty before each prompt, over a `PactCache` with so many bytes of memory."""

    def __init__(self, model: HybridModel, memory: int, share: int | None = None, keeps_all: bool = True) -> None:
        """`share`: see `ModelSlots`; `keeps_all`: see `OwnCache`."""
        groups = [replace(one.group, digest=bytes([at]) * KEY_BYTES) for at, one in enumerate(model.groups)]
        self.groups = GroupSet(tuple(groups))
        sizes = [rounded(one.payload_bytes) for one in model.groups]
        classes, class_bytes = slot_classes(sizes, ranks_differ=False)
        extents = extents_for(memory, class_bytes, 1, ranks_differ=False)
        assert self.groups.chain is not None
        slots = ModelSlots(extents, classes[self.groups.chain], share)
        self.cache = PactCache(
            load_config({"shutdown_timeout": "1s", "weights_version": "1"}, {}),
            EngineKV(Namespace({"played": model.name}).digest, self.groups, classes),
            arena=cast(Arena, slots),
            clock=time.monotonic,
        )
        self.unit = self.groups.alignment
        self.keeps_all = keeps_all
        self.states = [at for at, one in enumerate(groups) if one.kind is GroupKind.STATE]
        self._blocks = InertBlocks()
        self.cache.bind_scheduler_context(self._blocks)

    def serve(self, turn: Turn, junction: int = 0) -> int:
        """The tokens of the prompt that come from the cache; then computes the rest, and the answer."""
        tokens = array("I", turn.tokens(0, turn.prompt + turn.answer).astype("u4").tobytes())
        request = Prompt(f"{turn.number}", tokens[: turn.prompt])
        cache = self.cache
        match = None
        while match is None:
            match = cache.prepare_external_match(request, 0)
            if match is None:
                cache.apply_report(carried_out(cache.end_step()))
        hit = match.num_tokens
        junction = max(junction, cache.step_end(request.request_id))
        kept = ((turn.prompt - 1) // self.unit * self.unit, junction)
        if hit:
            tables = self._tables(hit, hit, is_offered=True)
            self._blocks.tables = {request.request_id: tables}
            assert cache.commit_external_match(request, match, hit, tables[0]) == hit
            cache.apply_report(carried_out(cache.end_step()))
        for end in ends_of_steps(hit, turn.prompt, turn.answer, self.unit, junction):
            if end > turn.prompt:
                request.token_ids = tokens[: end + 1]
            tables = self._tables(hit, end, is_offered=self.keeps_all or end in kept)
            self._blocks.tables = {request.request_id: tables}
            cache.note_computed(request, end, partial(tables.__getitem__, 0))
            cache.apply_report(carried_out(cache.end_step()))
        cache.request_finished(request.request_id)
        while cache.under_way["saves"]:
            cache.apply_report(carried_out(cache.end_step()))
        return hit

    def _tables(self, hit: int, end: int, *, is_offered: bool) -> list[list[int]]:
        """The tables of a step: all blocks of attention, and of states the one that was loaded or that it offers."""
        count = -(-end // self.unit)
        stride = 1 << 20
        tables = [[at * stride + block + 1 for block in range(count)] for at, _ in enumerate(self.groups.groups)]
        for at in self.states:
            offered = {end // self.unit - 1} if end % self.unit == 0 and is_offered else set[int]()
            tables[at] = [block if place in offered else NULL for place, block in enumerate(tables[at])]
        return tables


def bytes_needed(model: HybridModel, blocks: int, states: int) -> int:
    """Bytes of so many blocks of full attention, and so many states of all groups."""
    total = 0
    for one in model.groups:
        count = blocks if one.group.kind is GroupKind.FULL else states
        total += count * rounded(one.payload_bytes)
    return total
