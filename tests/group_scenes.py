"""A scene for tests of models with several KV cache groups: the test is the scheduler, every copy arrives.

Each group has blocks of its own size in tokens and bytes. Nothing is computed: what a slot holds is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from at_the_end import at_the_end
from inert_blocks import InertBlocks
from kvpact.cache.cache import PactCache
from kvpact.cache.memory import EngineKV
from kvpact.config import load_config
from kvpact.contract import JobOutcome, LoadJob, LoadSettlement, SaveJob, StepWork, WorkerReport
from kvpact.identity.groups import GroupKind, GroupSet, KVCacheGroup
from kvpact.memory.arena import Arena, ArenaSegment
from kvpact.memory.extents import extents_for, slot_classes
from kvpact.ranges import RangeSet
from kvpact.tiers.base import Tier
from kvpact.tiers.client import TierClient
from kvpact.tiers.executor import TierExecutor
from scenes import NAMESPACE, Scene, SceneRequest, tokens

BLOCK = 16
"""Tokens of a row in these scenes."""


def full(block: int = BLOCK) -> KVCacheGroup:
    """Layers of full attention."""
    return KVCacheGroup(GroupKind.FULL, block)


def window(blocks: int, block: int = BLOCK) -> KVCacheGroup:
    """Layers of which a match needs the last so many blocks."""
    return KVCacheGroup(GroupKind.WINDOW, block, (blocks - 1) * block + 2)


def states(block: int = BLOCK) -> KVCacheGroup:
    """Layers with one state, at the end of a match."""
    return KVCacheGroup(GroupKind.STATE, block)


def asked(name: str, rows: int, seed: int = 0) -> SceneRequest:
    """A request of which so many rows can be loaded."""
    return SceneRequest(name, tokens(rows * BLOCK + 1, seed))


class GroupPool(InertBlocks):
    """Blocks of which each request has as many as all its tokens need, in every group."""

    def __init__(self, groups: GroupSet) -> None:
        super().__init__()
        self._groups = groups
        self._ids = count(1)

    def allocate(self, request: SceneRequest) -> Sequence[Sequence[int]]:
        """The request's tables, by group."""
        sizes = [group.block_size for group in self._groups.groups]
        new = [[next(self._ids) for _ in range(-(-len(request.token_ids) // size))] for size in sizes]
        return self.tables.setdefault(request.request_id, new)


class GroupScene(Scene):
    """One cache of an engine whose groups' blocks have `sizes` bytes; time stands still unless a test moves it."""

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        sizes: Sequence[int],
        tiers: Sequence[Tier] = (),
        memory: int = 16 << 20,
        **settings: Any,
    ) -> None:
        named = [replace(one, digest=bytes([number + 1]) * 32) for number, one in enumerate(groups)]
        self.groups, self.now = GroupSet(tuple(named)), 0.0
        classes, class_bytes = slot_classes(sizes, ranks_differ=False)
        if len(class_bytes) > 1:
            segment = ArenaSegment.create_extents(extents_for(memory, class_bytes, 1, ranks_differ=False), 1)
        else:
            segment, classes = ArenaSegment.create(memory // class_bytes[0], class_bytes[0]), ()
        self.pool = GroupPool(self.groups)
        self.queues = [TierExecutor(tier, 2, 1 << 30) for tier in tiers]
        self.cache = PactCache(
            load_config(settings, {}),
            EngineKV(NAMESPACE.digest, self.groups, classes),
            arena=Arena([segment]),
            tiers=self.queues,
            clock=lambda: self.now,
        )
        self.cache.bind_scheduler_context(self.pool)
        self.is_open = True
        at_the_end(self.close)

    @property
    def clients(self) -> list[TierClient]:
        """The tiers, as the cache asks them."""
        return self.cache.tiers.clients

    def count(self, name: str) -> float:
        """A series of the cache's metrics."""
        return self.cache.observe()[name]

    def run_cold(self, request: SceneRequest) -> None:
        """Compute the whole request, save it, write it to the tiers."""
        self.finish(request)

    def finish(self, request: SceneRequest) -> None:
        """Compute what is left, its last token in a step of its own, as engines with states do; save it, end."""
        tables = self.pool.allocate(request)
        for computed in (len(request.token_ids) - 1, len(request.token_ids)):
            self.cache.note_computed(request, computed, lambda: tables[0])
            self.report(self.cache.end_step())
        self.cache.request_finished(request.request_id)
        self.settle_tiers()

    def serve(self, request: SceneRequest) -> int:
        """Load what is promised, compute the rest, end; returns the tokens promised."""
        match = self.prepare(request)
        tables = self.pool.allocate(request)
        if match.num_tokens:
            self.cache.commit_external_match(request, match, match.num_tokens, tables[0])
            self.report(self.cache.end_step())
        self.finish(request)
        return match.num_tokens

    def report(self, work: StepWork) -> list[LoadSettlement]:
        """Every block of every job is copied."""
        jobs: list[LoadJob | SaveJob] = [*work.loads, *work.saves]
        return self.cache.apply_report(
            WorkerReport({0: {job.job_id: JobOutcome(RangeSet.of(job.blocks)) for job in jobs}})
        )

    def computes(self, tokens_per_second: float) -> None:
        """The engine was seen to compute so fast."""
        fast = SceneRequest("seen", tokens(64 * BLOCK + 1, seed=99))
        self.pool.allocate(fast)
        self.cache.note_computed(fast, 64 * BLOCK, lambda: self.pool.tables["seen"][0])
        self.report(self.cache.end_step())
        self.now += 64 * BLOCK / tokens_per_second
        self.cache.end_step()
        self.cache.request_finished("seen")

    def reads(self, bytes_per_second: float) -> None:
        """Every tier was seen to deliver so fast, and to answer at once."""
        for client in self.clients:
            client.costs.latency.add(1e9, 1.0)
            client.costs.note_read(int(bytes_per_second), 1.0)
