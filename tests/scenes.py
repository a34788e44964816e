"""A small scene for tests of the cache: one engine step at a time, one byte pattern a block, obedient workers.

The "engine" here has no scheduler of its own: the test is the scheduler. Every block's content is a digest of all
tokens up to its end, so a test that compares bytes finds any stale, foreign, torn or early block.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from at_the_end import at_the_end
from kvpact.cache.cache import PactCache
from kvpact.cache.memory import EngineKV, Reader
from kvpact.config import KvpactConfig, load_config
from kvpact.contract import (
    ExternalKVMatch,
    JobOutcome,
    KVCacheBlockView,
    LoadJob,
    LoadSettlement,
    SaveJob,
    StepWork,
    WorkerReport,
)
from kvpact.errors import PactViolation
from kvpact.identity.groups import one_group
from kvpact.identity.keys import Namespace, RequestIdentity
from kvpact.identity.tenants import load_tenants
from kvpact.memory.arena import Arena, ArenaSegment
from kvpact.pool.neighbours import Neighbours
from kvpact.ranges import RangeSet
from kvpact.tiers.base import Tier
from kvpact.tiers.executor import TierExecutor

BLOCK_SIZE = 4
"""Tokens a block in these scenes."""
PAGE = 4096
"""Bytes of one rank's part of a block."""
NAMESPACE = Namespace({"model": "scene", "block_size": str(BLOCK_SIZE)})


@dataclass
class SceneRequest:
    """A request as the cache sees it."""

    request_id: str
    token_ids: list[int]
    identity: RequestIdentity | None = field(default_factory=RequestIdentity)
    may_load: bool = True


class SceneBlocks:
    """The engine's block pool as a `BlockHolder`: counts what is held, so that a leak is seen."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.taken = Counter[tuple[int, ...]]()
        """Sequence of blocks -> number of times it was taken and not given back as such."""

    def get_block(self, block_id: int) -> KVCacheBlockView:
        """A view without a hash."""
        return KVCacheBlockView(block_id, self.held.get(block_id, 0), False, None, 0)

    def touch(self, block_ids: Sequence[int]) -> None:
        """Hold blocks."""
        self.taken[tuple(block_ids)] += 1
        for block_id in block_ids:
            self.held[block_id] = self.held.get(block_id, 0) + 1

    def free_blocks(self, block_ids: Sequence[int], *, evict_first: bool = False) -> None:
        """Give blocks back."""
        self.taken[tuple(block_ids)] -= 1
        for block_id in block_ids:
            if not self.held.get(block_id):
                raise PactViolation(f"block {block_id} was not touched")
            self.held[block_id] -= 1
            if not self.held[block_id]:
                del self.held[block_id]


def content(tokens: Sequence[int], block: int, rank: int = 0, salt: str = "") -> NDArray[np.uint8]:
    """The bytes that rank `rank` must find in block `block` of a request with these tokens."""
    text = f"{salt}|{rank}|{list(tokens[: (block + 1) * BLOCK_SIZE])}".encode()
    seed = hashlib.blake2b(text, digest_size=32).digest()
    return np.frombuffer(seed * (PAGE // 32), dtype=np.uint8)


class Scene:
    """One cache, its arena, its engine memory and its workers; time stands still unless a test moves it.

    It is closed with its test.
    """

    def __init__(
        self,
        slots: int = 16,
        *,
        ranks: int = 1,
        engine_blocks: int = 256,
        tiers: Sequence[Tier | TierExecutor] = (),
        write_queue: int = 1 << 30,
        namespace: Namespace = NAMESPACE,
        holds_blocks: bool = True,
        usable: int | None = None,
        copies_per_block: int = 0,
        neighbours: Neighbours | None = None,
        reader: Reader | None = None,
        **settings: object,
    ) -> None:
        self.now = 0.0
        self.config: KvpactConfig = load_config(settings, {})
        self.segments = [ArenaSegment.create(slots, PAGE) for _ in range(ranks)]
        if usable is not None:
            for segment in self.segments:
                segment.usable_slots = usable
        self.kv = [np.zeros((engine_blocks, PAGE), dtype=np.uint8) for _ in range(ranks)]
        self.blocks = SceneBlocks()
        self.queues = [t if isinstance(t, TierExecutor) else TierExecutor(t, 2, write_queue) for t in tiers]
        self.cache = PactCache(
            self.config,
            EngineKV(
                namespace.digest,
                one_group(BLOCK_SIZE),
                copies_per_block=copies_per_block,
                neighbours=neighbours,
                reader=reader,
                tenants=load_tenants(self.config.tenants),
            ),
            arena=Arena(self.segments),
            tiers=self.queues,
            clock=lambda: self.now,
        )
        if holds_blocks:
            self.cache.bind_scheduler_context(self.blocks)
        self._next_block = 1
        self.tables: dict[str, list[int]] = {}
        self.is_open = True
        """A test that breaks the cache on purpose says False, for it can be closed no more."""
        at_the_end(self.close)

    # What an engine does

    def allocate(self, request: SceneRequest) -> list[int]:
        """Fresh engine blocks for all tokens of the request, beyond those it has."""
        table = self.tables.setdefault(request.request_id, [])
        while len(table) * BLOCK_SIZE < len(request.token_ids):
            table.append(self._next_block % len(self.kv[0]))
            self._next_block += 1
        return table

    def compute(self, request: SceneRequest, start_block: int = 0) -> None:
        """The forward pass: write the content of every full block from `start_block` on."""
        table = self.allocate(request)
        salt = request.identity.salt if request.identity else ""
        for rank, memory in enumerate(self.kv):
            for block in range(start_block, len(request.token_ids) // BLOCK_SIZE):
                memory[table[block]] = content(request.token_ids, block, rank, salt)

    def run_cold(self, request: SceneRequest) -> None:
        """Compute the whole request without a load, save it, finish it."""
        self.report(self.step_computing(request))
        self.cache.request_finished(request.request_id)

    def step_computing(self, request: SceneRequest, computed: int | None = None) -> StepWork:
        """The step that computes the whole request, and says so, or that so many tokens are; nobody reports yet."""
        self.compute(request)
        tokens = len(request.token_ids) if computed is None else computed
        self.cache.note_computed(request, tokens, lambda: self.tables[request.request_id])
        return self.cache.end_step()

    def prepare(self, request: SceneRequest, computed: int = 0, seconds: float = 5.0) -> ExternalKVMatch:
        """Ask until there is an answer; real time passes for the tiers' threads, the scene's clock stands still."""
        deadline = time.monotonic() + seconds
        while (match := self.cache.prepare_external_match(request, computed)) is None:
            if time.monotonic() > deadline:
                raise AssertionError("prepare still says 'ask again later'")
            self.cache.end_step()
            time.sleep(0.002)
        return match

    def load(self, request: SceneRequest, match: ExternalKVMatch, tokens: int | None = None) -> list[LoadSettlement]:
        """Commit the match, carry out the step, report."""
        table = self.allocate(request)
        self.cache.commit_external_match(request, match, match.num_tokens if tokens is None else tokens, table)
        return self.report(self.cache.end_step())

    def assert_loads(self, request: SceneRequest, num_tokens: int) -> None:
        """The request is promised so many tokens, and their blocks hold what they must once they are loaded."""
        match = self.prepare(request)
        assert match.num_tokens == num_tokens
        self.load(request, match)
        assert self.holds_content(request, range(num_tokens // BLOCK_SIZE))

    def forget_memory(self) -> None:
        """All blocks go from memory; tiers keep theirs."""
        self.cache.index.clear()

    def room(self) -> int:
        """Slots that a new prompt would get now: all but those that a lease, a copy or a write still needs."""
        return self.cache.index.reservable()

    # What workers do

    def execute(self, work: StepWork, rank: int) -> dict[int, JobOutcome]:
        """Copy as told; every block of every job arrives."""
        outcomes: dict[int, JobOutcome] = {}
        jobs: list[LoadJob | SaveJob] = [*work.loads, *work.saves]
        for job in jobs:
            for slot, block_id in zip(job.slots, job.block_ids, strict=True):
                piece = np.frombuffer(self.segments[rank].slot_view(slot), dtype=np.uint8)
                if isinstance(job, LoadJob):
                    self.kv[rank][block_id] = piece
                else:
                    piece[:] = self.kv[rank][block_id]
            outcomes[job.job_id] = done(job)
        return outcomes

    def report(self, work: StepWork) -> list[LoadSettlement]:
        """Carry out the step on all ranks and report it."""
        return self.cache.apply_report(WorkerReport({rank: self.execute(work, rank) for rank in range(len(self.kv))}))

    # What a test asks

    def holds_content(self, request: SceneRequest, blocks: range) -> bool:
        """Whether the engine's memory holds exactly what these blocks of the request must be."""
        table = self.tables[request.request_id]
        salt = request.identity.salt if request.identity else ""
        return all(
            np.array_equal(memory[table[block]], content(request.token_ids, block, rank, salt))
            for rank, memory in enumerate(self.kv)
            for block in blocks
        )

    def settle_tiers(self, seconds: float = 5.0) -> None:
        """Wait until the tiers' threads have nothing left to do."""
        deadline = time.monotonic() + seconds
        while self.cache.tiers.pending and time.monotonic() < deadline:
            self.cache.end_step()
            time.sleep(0.002)
        assert not self.cache.tiers.pending

    def close(self) -> None:
        """End everything, once; the invariants hold to the last."""
        if self.is_open:
            self.is_open = False
            self.cache.check()
            self.cache.shutdown()


def done(job: LoadJob | SaveJob) -> JobOutcome:
    """Every block of the job copied."""
    return JobOutcome(done=RangeSet.of(job.blocks))


def failed(job: LoadJob | SaveJob, first: int) -> JobOutcome:
    """Blocks from `first` on (in the request's numbering) failed."""
    return JobOutcome(RangeSet.span(job.start_block, first), RangeSet.span(first, job.blocks.end))


def tokens(length: int, seed: int = 0) -> list[int]:
    """A prompt that shares no block with that of another seed."""
    return [seed * 100_003 + position for position in range(length)]


def open_disk(path: Path, slots: int = 64) -> Tier:
    """A disk tier with room for about `slots` blocks of one rank."""
    from kvpact.tiers.disk.tier import DiskTier

    return DiskTier.open(path, NAMESPACE, PAGE, 4096 * 4 + slots * (PAGE + 512))
