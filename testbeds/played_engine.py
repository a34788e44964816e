"""An engine's scheduler that computes one prompt after another, for one `PactCache`, without a model and without bytes.

Plays the block tables of every KV cache group as vLLM keeps them: what a window has left is given back before the next
step, a state is kept at the end of a step. Takes the CPU time of each call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar, cast

from inert_blocks import NULL, InertBlocks
from kvpact.cache.cache import PactCache
from kvpact.cache.memory import EngineKV
from kvpact.config import load_config
from kvpact.contract import JobOutcome, LoadJob, SaveJob, StepWork, WorkerReport
from kvpact.identity.groups import GroupKind, GroupSet, KVCacheGroup
from kvpact.identity.keys import KEY_BYTES, Namespace, RequestIdentity
from kvpact.index.classed_slots import ClassedSlots
from kvpact.index.slot_space import PlainSlots, SlotSpace
from kvpact.memory.arena import Arena, Standing
from kvpact.metrics import UnmadeCheck
from kvpact.ranges import RangeSet

T = TypeVar("T")


class Slots:
    """The slots of one rank's arena without their bytes: extents of several classes."""

    num_ranks = 1
    standing = Standing.PROVEN
    unmade_checks: Mapping[UnmadeCheck, int] = MappingProxyType({})

    def __init__(self, places: Sequence[int], num_slots: int) -> None:
        self.places, self.num_slots, self.usable_slots = tuple(places), num_slots, num_slots
        self.class_bytes = tuple(4096 for _ in places)
        self.slot_bytes = self.rank_slot_bytes = 4096
        self.least_slots = num_slots * min(places)

    def slot_space(self, rows_without_payload: int) -> SlotSpace:
        """See `Arena`."""
        if len(self.places) == 1 and not rows_without_payload:
            return PlainSlots(self.num_slots * self.places[0])
        names = (0,) if rows_without_payload else ()
        return ClassedSlots(self.places + names, self.num_slots, None, rows_without_payload)

    def close(self) -> None:
        """See `Arena`."""


@dataclass
class Prompt:
    """A request as the cache sees it."""

    request_id: str
    token_ids: Sequence[int]
    identity: RequestIdentity | None = field(default_factory=RequestIdentity)
    may_load: bool = True


@dataclass
class Call:
    """What one call of the cache took."""

    name: str
    seconds: float
    tokens: int
    """That the engine has of the request after the call."""
    blocks: int
    """That a report is about, of all groups."""


class PlayedEngine:
    """Serves prompts in steps of at most `step_tokens` tokens, of which all blocks of all groups fit into its pool."""

    def __init__(
        self, groups: Sequence[KVCacheGroup], slots: Slots, classes: Sequence[int], step_tokens: int = 8192
    ) -> None:
        named = [replace(group, digest=bytes([number]) * KEY_BYTES) for number, group in enumerate(groups)]
        self._groups = GroupSet(tuple(named))
        self.cache = PactCache(
            load_config({"shutdown_timeout": "1s"}, {}),
            EngineKV(Namespace({"played": "engine"}).digest, self._groups, classes),
            arena=cast(Arena, slots),
            clock=time.monotonic,
        )
        self.calls: list[Call] = []
        """Of the last prompt."""
        self._step_tokens = step_tokens
        self._has_states = any(group.kind is GroupKind.STATE for group in groups)
        self._tables: list[list[int]] = []
        self._blocks = InertBlocks()
        self.cache.bind_scheduler_context(self._blocks)

    def serve(self, prompt: Prompt) -> int:
        """Compute a prompt, from where the cache has it on; returns the tokens that it had."""
        cache, end = self.cache, len(prompt.token_ids)
        self.calls = []
        self._ids = iter(range(1, 1 << 40))
        self._tables = [[] for _ in self._groups.groups]
        self._blocks.tables = {prompt.request_id: self._tables}
        match = self._timed("prepare", 0, lambda: cache.prepare_external_match(prompt, 0))
        assert match is not None
        computed = match.num_tokens
        if computed:
            self._have(0, computed)
            first = self._tables[0]
            taken = self._timed("commit", computed, lambda: cache.commit_external_match(prompt, match, computed, first))
            assert taken == computed
            if match.load_kv_async:
                self._end_step(computed)
        while computed < end:
            before, computed = computed, self._end_of_step(computed, end)
            self._have(before, computed)
            note = partial(cache.note_computed, prompt, computed, lambda: self._tables[0])
            self._timed("note", computed, note)
            self._end_step(computed)
        cache.request_finished(prompt.request_id)
        return match.num_tokens

    def _end_of_step(self, computed: int, end: int) -> int:
        """With states a step ends with a whole block, so that its state can be kept, and the last one has the rest."""
        reached = min(end, computed + self._step_tokens)
        whole = reached - reached % self._groups.alignment
        return whole if self._has_states and whole > computed else reached

    def _end_step(self, computed: int) -> None:
        work = self._timed("end_step", computed, self.cache.end_step)
        report = carried_out(work)
        jobs: tuple[LoadJob | SaveJob, ...] = (*work.loads, *work.saves)
        blocks = sum(len(job.block_ids) for job in jobs)
        self._timed("report", computed, lambda: self.cache.apply_report(report), blocks)

    def _have(self, before: int, computed: int) -> None:
        """The tables of a step that computes the tokens [before, computed)."""
        for group, table in zip(self._groups.groups, self._tables, strict=True):
            needed, size = group.needed(before), group.block_size
            if group.kind is GroupKind.STATE:
                table[:] = [NULL] * (-(-computed // size))
                for block in {*needed, (computed - 1) // size}:
                    table[block] = next(self._ids)
                continue
            if group.kind is not GroupKind.FULL:
                gone = min(needed.start, len(table))
                table[:gone] = [NULL] * gone
                table.extend([NULL] * (needed.start - len(table)))
            table.extend(next(self._ids) for _ in range(-(-computed // size) - len(table)))

    def _timed(self, name: str, tokens: int, call: Callable[[], T], blocks: int = 0) -> T:
        began = time.thread_time()
        found = call()
        self.calls.append(Call(name, time.thread_time() - began, tokens, blocks))
        return found


def carried_out(work: StepWork) -> WorkerReport:
    """What a rank reports that has copied everything."""
    jobs: list[LoadJob | SaveJob] = [*work.loads, *work.saves]
    return WorkerReport({0: {job.job_id: JobOutcome(RangeSet.of(job.blocks)) for job in jobs}})
