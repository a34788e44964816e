"""The embedded engine over real tiers: PactCache, threads and clocks as they are, and the oracle in the model's place.

One engine of one rank; its weights are a number, its files another. Time is the machine's, and what a test adds to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random

from kvpact.cache.cache import PactCache
from kvpact.cache.memory import EngineKV
from kvpact.config import load_config
from kvpact.identity.groups import one_group
from kvpact.identity.keys import Namespace
from kvpact.memory.arena import Arena, ArenaSegment
from kvpact.tiers.base import Tier
from kvpact.tiers.disk.tier import DiskTier
from kvpact.tiers.executor import TierExecutor
from kvpact.tiers.registry import TierContext, open_tier
from kvpact_testkit.engine import Engine, EngineConfig, EngineQuirks, JobBehavior, Request, SimulatedWorker
from kvpact_testkit.engine.simulated_worker import Job

BLOCK_SIZE = 16
SLOT_BYTES = 4096
NAMESPACE = Namespace({"files": "weights 0"})
SETTLE_SECONDS = 20.0
DISK_BYTES = 4 << 20


def disk(directory: object) -> Tier:
    """A disk tier with room for some hundred blocks."""
    return DiskTier.open(directory, NAMESPACE, SLOT_BYTES, DISK_BYTES)  # type: ignore[arg-type]


def store(url: str) -> Tier:
    """The shared tier that `url` names."""
    (tier_url,) = load_config({"tiers": [url]}, {}).tiers
    return open_tier(tier_url, TierContext(NAMESPACE, SLOT_BYTES))


def prompt(blocks: int, seed: int = 0) -> list[int]:
    """Whole blocks and one token more; prompts of different seeds share none."""
    return [seed * 100_003 + at for at in range(blocks * BLOCK_SIZE + 1)]


class EpochEngine:
    """An engine that was started from the files of weights 0."""

    def __init__(
        self,
        *tiers: Tier,
        preset: str = "vllm-0.32",
        num_slots: int = 64,
        conduct: Callable[[int, Job], JobBehavior] | None = None,
        **settings: object,
    ) -> None:
        self.skew = 0.0
        """Seconds that have passed besides those that really have."""
        segment = ArenaSegment.create(num_slots, SLOT_BYTES)
        defaults = {"recompute_if_faster": False, "sync_load_budget": 0, "prepare_deadline": 0.5}
        self.queues = [TierExecutor(tier, 2, 1 << 30) for tier in tiers]
        self.cache = PactCache(
            load_config({**defaults, **settings}, {}),
            EngineKV(NAMESPACE.digest, one_group(BLOCK_SIZE)),
            arena=Arena([segment]),
            tiers=self.queues,
            clock=lambda: time.monotonic() + self.skew,
        )
        config = EngineConfig(num_blocks=256, block_size=BLOCK_SIZE, max_tokens_per_step=128, on_violation="record")
        workers = [SimulatedWorker(0, segment.slot_view, conduct)]
        self.engine = Engine(config, EngineQuirks.presets()[preset], self.cache, workers)
        self.names = 0

    def add(self, tokens: Sequence[int], outputs: int = 2) -> Request:
        """A request that waits to be run."""
        self.names += 1
        return self.engine.add_request(Request(f"r{self.names}", tokens, outputs))

    def step(self, times: int = 1) -> None:
        """Steps as an idle engine makes them: about one a millisecond."""
        for _ in range(times):
            self.engine.step()
            time.sleep(0.0005)

    def run(self, *requests: Request, seconds: float = SETTLE_SECONDS) -> None:
        """Until these have ended."""
        until = time.monotonic() + seconds
        while not all(request.has_ended for request in requests):
            assert time.monotonic() < until, f"still running after {seconds:g} s: {requests}"
            self.step()

    def serve(self, tokens: Sequence[int], outputs: int = 2) -> int:
        """One request from its beginning to its end; the tokens of it that came from the external cache."""
        before = self.engine.counts.external_hits
        self.forget_local()
        self.run(self.add(tokens, outputs))
        return self.engine.counts.external_hits - before

    def store(self, *prompts: Sequence[int]) -> None:
        """Have prompts computed and stored, in the tiers as well."""
        for tokens in prompts:
            self.serve(tokens)
        self.settle()

    def settle(self) -> None:
        """Until nothing is under way."""
        until = time.monotonic() + SETTLE_SECONDS
        while self.cache.has_pending_work or self.cache.tiers.pending or self.engine.has_work:
            assert time.monotonic() < until, "something is still under way"
            self.step()

    def forget_local(self) -> None:
        """The engine's own prefix cache is emptied; nobody is told."""
        self.engine.scheduler.kv.pool.unpublish_all()

    def forget_memory(self, seed: int) -> None:
        """Other prompts take all slots of the arena, so that what was stored before is in the tiers alone."""
        for number in range(4):
            self.serve(prompt(20, 1000 + 10 * seed + number))
        self.settle()

    @property
    def wrong(self) -> list[str]:
        """What was read that other weights had computed, in words."""
        return self.engine.recorded

    def close(self) -> None:
        """As an engine that is shut down."""
        self.engine.shutdown()


class Traffic:
    """Prompts as a fleet of assistants sees them: some documents, each with questions of its own."""

    def __init__(self, seed: int, documents: int = 6, blocks: int = 8) -> None:
        self._random = Random(seed)
        self._documents = [prompt(blocks, 50 + document)[:-1] for document in range(documents)]
        self._asked = 0

    def prompt(self) -> list[int]:
        """A document, and a question that nobody asked before."""
        self._asked += 1
        question = [10**9 + self._random.randrange(10**6) for _ in range(self._random.randint(1, 20))]
        return [*self._random.choice(self._documents), *question]
