"""An embedded engine around a monitored cache: requests, steps, and the verification of every invariant after each.

Owns the script of the steps. Decides no check, and causes no faults except those of its ranks.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kvpact.contract import ExternalCacheWorker, ExternalKVMatch, LoadJob, WorkerReport
from kvpact.errors import PactViolation
from kvpact.ranges import RangeSet
from kvpact_testkit.cache.group_blocks import GroupBlocks, StoredBlock
from kvpact_testkit.cache.job_monitor import EverStored
from kvpact_testkit.cache.monitor import ContractMonitor
from kvpact_testkit.cache.subjects import CacheContext, CacheFactory, made_for
from kvpact_testkit.catalogue import TITLES
from kvpact_testkit.engine import (
    ByteSegment,
    Engine,
    EngineConfig,
    EngineQuirks,
    GroupSet,
    JobBehavior,
    KVCacheGroup,
    OracleViolation,
    Request,
    SimulatedWorker,
    StepClock,
)
from kvpact_testkit.engine.simulated_worker import Job
from kvpact_testkit.faults import Crash
from kvpact_testkit.results import Broken, NotObservable
from kvpact_testkit.trace import TRACE_LINES, Trace

NEVER = 1 << 40
"""A step that never comes: a request that is ready only then waits for `let_go`."""

PROBE_STEPS = 500
"""Steps in which a held request is probed at most."""

REST_STEPS = 4000
"""Steps within which an engine without requests must come to rest: 40 s of its clock."""


_SAID_ELSEWHERE = frozenset(["mode", "ranks", "block_size", "num_slots", "num_blocks", "groups", "quirks"])


@dataclass(frozen=True, slots=True)
class HarnessSettings:
    """Sizes in tokens, blocks and slots. `mode` names a preset of `EngineQuirks`; `quirks` overrides parts of it."""

    mode: str = "native"
    ranks: int = 2
    block_size: int = 4
    num_slots: int = 16
    num_blocks: int = 64
    max_tokens_per_step: int = 512
    max_running: int = 16
    prefix_caching: bool = True
    priority: bool = False
    draft_tokens: int = 0
    groups: tuple[KVCacheGroup, ...] = ()
    """By default one of full attention, of `block_size`; else a block of each is a multiple or a part of that."""
    write_queue_bytes: int = 1 << 30
    timeout: float = 60.0
    quirks: EngineQuirks | None = None

    def __str__(self) -> str:
        return (
            f"a {self.mode} engine of {self.ranks} ranks with {self.num_blocks - 1} blocks of {self.block_size} tokens "
            f"and a cache of {self.num_slots} slots{self._groups()}{self._limits()}{self._ways()}"
        )

    def _groups(self) -> str:
        """The KV cache groups, for the script."""
        said = [
            f"{group.kind} in blocks of {group.block_size}" + (f" over {group.span} tokens" if group.span else "")
            + (" that depend on the next token" if group.drops_last else "")
            for group in self.groups
        ]  # fmt: skip
        return f", with {len(said)} KV cache groups: {'; '.join(said)}" if said else ""

    def _limits(self) -> str:
        """What else is not as usual, for the script."""
        limits = [item for item in fields(self) if item.name not in _SAID_ELSEWHERE]
        return "".join(
            f", {item.name}={value}" for item in limits if (value := getattr(self, item.name)) != item.default
        )

    def _ways(self) -> str:
        """The engine's differences from its mode, for the script."""
        if self.quirks is None:
            return ""
        usual = EngineQuirks.presets()[self.mode]
        ways = [(item.name, getattr(self.quirks, item.name)) for item in fields(EngineQuirks)]
        return "".join(f", {name}={value}" for name, value in ways if value != getattr(usual, name))


class FaultyWorker(SimulatedWorker):
    """A simulated rank that can fall silent for some steps, or lose all its jobs."""

    def __init__(
        self, rank: int, slot_view: Callable[[int], memoryview], conduct: Callable[[int, Job], JobBehavior]
    ) -> None:
        super().__init__(rank, slot_view, conduct)
        self.silent_steps = 0
        self._kept_back = WorkerReport({})

    def report(self) -> WorkerReport:
        """See `ExternalCacheWorker`; a silent rank reports later."""
        self._kept_back = self._kept_back.aggregate(super().report())
        if self.silent_steps:
            self.silent_steps -= 1
            return WorkerReport({})
        report, self._kept_back = self._kept_back, WorkerReport({})
        return report

    def forget(self) -> None:
        """Drop uncopied jobs and unsent reports; a later query finds nothing."""
        self._tasks, self._reports, self._kept_back = [], [], WorkerReport({})
        self._said.clear()


@dataclass
class Others:
    """What the engines and caches of one play have in common, those that have ended among them."""

    stored: dict[StoredBlock, int] | None = None
    """The blocks of earlier caches of this place."""
    ever_stored: EverStored | None = None
    shared_directory: Path | None = None
    """Where shared files are; None: beside the cache's own."""
    clock: StepClock = field(default_factory=StepClock)


class EngineHarness:
    """One engine and one cache. `script` has the steps so far."""

    def __init__(
        self,
        factory: CacheFactory,
        directory: Path,
        settings: HarnessSettings,
        script: Trace | None = None,
        *,
        weights: int = 0,
        others: Others | None = None,
    ) -> None:
        """The engine starts from the files of `weights`, whichever weights replace them later.

        Its cache's own files are in `directory`.
        """
        others = others or Others()
        self.factory, self.directory, self.settings = factory, directory, settings
        self.script = Trace(TRACE_LINES) if script is None else script
        self.quirks = settings.quirks or EngineQuirks.presets()[settings.mode]
        self.clock = others.clock
        self.weights_of_files = weights
        self.conducts: dict[int, deque[JobBehavior]] = {rank: deque() for rank in range(settings.ranks)}
        """How each rank treats its next jobs; it treats the others faithfully."""
        self.load_conducts: dict[int, deque[JobBehavior]] = {rank: deque() for rank in range(settings.ranks)}
        """How each rank treats its next loads only."""
        self.conduct: Callable[[int, Job], JobBehavior] | None = None
        """How each rank treats every job, instead of the queues above."""
        config = EngineConfig(
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            groups=settings.groups,
            num_ranks=settings.ranks,
            max_model_len=(settings.num_blocks + 8) * settings.block_size,
            max_running=settings.max_running,
            max_tokens_per_step=settings.max_tokens_per_step,
            prefix_caching=settings.prefix_caching,
            policy="priority" if settings.priority else "fcfs",
            draft_tokens=settings.draft_tokens,
        )
        self.place = CacheContext(
            block_size=settings.block_size,
            num_slots=settings.num_slots,
            num_ranks=settings.ranks,
            groups=GroupSet(config.groups),
            slot_bytes=config.page_bytes,
            clock=self.clock,
            directory=directory,
            shared_directory=others.shared_directory or directory,
            weights=f"weights-{weights}",
            write_queue_bytes=settings.write_queue_bytes,
        )
        self.subject = made_for(factory, self.place)
        if not (config.keeps_everything or self.subject.cache.supports_kv_cache_groups):
            self.subject.close()
            raise NotObservable("the cache knows one KV cache group, of full attention (`supports_kv_cache_groups`)")
        self.monitor = ContractMonitor(
            cache=self.subject.cache,
            kinds=GroupBlocks(self.place.groups, settings.block_size),
            num_ranks=settings.ranks,
            clock=self.clock,
            timeout=settings.timeout,
            whole_answers=self.quirks.ignores_commit_answer,
            own_workers=bool(self.subject.workers),
            stored=others.stored or {},
            ever_stored={} if others.ever_stored is None else others.ever_stored,
            say=lambda words: self.script.note(f"    {words}"),
        )
        self.workers: list[FaultyWorker] = []
        if not self.subject.workers:
            views = self.subject.slot_views or [
                ByteSegment(settings.num_slots, self.place.slot_bytes).slot_view for _ in range(settings.ranks)
            ]
            self.workers = [FaultyWorker(rank, view, self.conduct_of) for rank, view in enumerate(views)]
        every_worker: Sequence[ExternalCacheWorker] = self.subject.workers or self.workers
        self.engine = Engine(config, self.quirks, self.monitor, every_worker, self.clock)
        self.engine.runner.weights = weights
        self._squeezed: list[int] = []
        self.say(str(settings))

    def say(self, words: str) -> None:
        """Add a line to the script."""
        self.script.note(words)

    def conduct_of(self, rank: int, job: Job) -> JobBehavior:
        """How a rank treats a job. A synchronous load of an engine that trusts those never fails."""
        loads = self.load_conducts[rank]
        queued = loads if loads and isinstance(job, LoadJob) else self.conducts[rank]
        conduct = queued.popleft() if queued else JobBehavior()
        if self.conduct is not None:
            conduct = self.conduct(rank, job)
        if isinstance(job, LoadJob) and job.synchronous and self.quirks.trusts_sync_loads:
            conduct = replace(conduct, failed_blocks=RangeSet())
        return conduct

    @contextmanager
    def judged(self, *names: str) -> Iterator[None]:
        """Within, turn a broken contract into `Broken`, by the ids in its message, else by `names`."""
        try:
            yield
        except (Broken, NotObservable, Crash):
            raise
        except Exception as error:
            found = [name for name in re.findall(r"\b[PH]\d+\b", str(error)) if name in TITLES]
            what = str(error) if isinstance(error, PactViolation) else f"{type(error).__name__}: {error}"
            default = () if isinstance(error, OracleViolation) else ("H13",)
            raise Broken(what, protects=found or names or default) from error

    # Requests

    def request(
        self,
        name: str,
        tokens: Sequence[int],
        outputs: int = 1,
        *,
        held: bool = False,
        ready_in: int = 0,
        encoder_ready_in: int = 0,
        **settings: Any,
    ) -> Request:
        """Add a request. With `held` the engine does not schedule it before `let_go`, so that a check can probe it.

        `settings` are further ones of `Request`; `ready_in` and `encoder_ready_in` are in steps.
        """
        added = Request(
            name,
            tokens,
            outputs,
            ready_step=NEVER if held else self.engine.scheduler.step + ready_in,
            encoder_ready_step=self.engine.scheduler.step + encoder_ready_in,
            **settings,
        )
        self.say(f"add request {name}: {len(tokens)} tokens, {outputs} to generate{', held back' if held else ''}")
        with self.judged():
            self.engine.add_request(added)
        return added

    def let_go(self, request: Request) -> None:
        """Let the engine schedule a held request."""
        self.say(f"let go of {request.request_id}")
        request.ready_step = 0

    def cancel(self, request_id: str) -> bool:
        """End a request in any state; False if it is not alive."""
        if request_id not in self.engine.scheduler.requests:
            return False
        self.say(f"cancel {request_id}")
        with self.judged():
            return self.engine.cancel(request_id)

    def probe(self, request: Request, computed: int = 0) -> ExternalKVMatch:
        """Probe a held request until the cache answers. Raises Broken if it does not in time."""
        return self.probe_all([request], computed)[0]

    def probe_all(self, requests: Sequence[Request], computed: int = 0) -> list[ExternalKVMatch]:
        """Probe all these held requests, as an engine does whose queue is blocked at its head.

        The answers are of one step, so all promises hold at once. Raises Broken if they do not arrive in time.
        """
        names = ", ".join(request.request_id for request in requests)
        self.say(f"ask for {names} behind {computed} tokens")
        for _ in range(PROBE_STEPS):
            with self.judged():
                matches = [self.monitor.prepare_external_match(request, computed) for request in requests]
            answers = [match for match in matches if match is not None]
            if len(answers) == len(requests):
                return answers
            self.step()
        raise Broken(f"{names}: told to ask again later, {PROBE_STEPS} times", protects=("P11", "H10"))

    def run(self, *requests: Request, steps: int = 2000) -> None:
        """Step until these requests have ended. Raises Broken (P11) if they do not."""
        self.say(f"run {', '.join(request.request_id for request in requests)} to the end")
        for _ in range(steps):
            if all(request.has_ended for request in requests):
                return
            self.step()
        left = [request for request in requests if not request.has_ended]
        raise Broken(f"after {steps} steps there are still alive: {left}", protects=("P11",))

    def serve(
        self, name: str, *prompts: Sequence[int], times: int = 1, apart: float = 0.0, **settings: Any
    ) -> list[Request]:
        """Run rounds of requests, `apart` seconds before each: every prompt is computed, and its blocks are stored.

        Each time the engine's own prefix cache is emptied. `settings` are those of `request`.
        """
        served: list[Request] = []
        for _ in range(times):
            if apart:
                self.pass_time(apart)
                self.step(2)
            for tokens in prompts:
                served.append(self.request(f"{name}-{len(served)}", tokens, **settings))
                self.run(served[-1])
                self.settle()
                self.forget_local()
        return served

    def use(self, request: Request, steps: int = 2000) -> int:
        """Let go of a held request and run it to its end; returns the tokens used from the external cache."""
        before = self.engine.counts.external_hits
        self.let_go(request)
        self.run(request, steps=steps)
        return self.engine.counts.external_hits - before

    def promised_tokens(self, name: str, tokens: Sequence[int], computed: int = 0) -> int:
        """The tokens that a request is promised after its `computed` ones; it is then cancelled."""
        promised = self.probe(self.request(name, tokens, held=True), computed).num_tokens
        self.cancel(name)
        return promised

    def forget_local(self) -> None:
        """Empty the engine's own prefix cache, if it has one; the external one keeps its blocks."""
        if self.settings.prefix_caching:
            self.say("the engine's own prefix cache is emptied")
            self.engine.scheduler.kv.pool.unpublish_all()

    def settle(self, steps: int = REST_STEPS) -> None:
        """Step until no copy and no write is under way. Raises Broken (P11) if that does not end."""
        for _ in range(steps):
            if not self.busy:
                return
            self.step()
        raise Broken(f"after {steps} steps the cache still wants the engine to step", protects=("P11",))

    @property
    def busy(self) -> bool:
        """Whether anything except held requests is alive or under way."""
        scheduler = self.engine.scheduler
        alive = any(request.ready_step < NEVER for request in scheduler.requests.values())
        writing = any(queue.under_way for queue in self.place.queues)
        return bool(alive or scheduler.loads or self.engine.has_executed or writing or self.monitor.has_pending_work)

    # Steps and trouble

    def step(self, times: int = 1) -> None:
        """Run engine steps, each followed by the verification of every invariant."""
        for _ in range(times):
            with self.judged():
                self.engine.step()
                for queue in self.place.queues:
                    queue.advance()
                self.engine.check()
                self.subject.check()

    def pass_time(self, seconds: float) -> None:
        """Advance the clock between two steps."""
        self.say(f"{seconds:g} s pass")
        self.clock.now += seconds

    def close(self) -> None:
        """Release everything, in whatever state it is."""
        for ending in (*(worker.shutdown for worker in self.engine.workers), self.monitor.shutdown, self.subject.close):
            with suppress(Exception):
                ending()


def prompt(blocks: int, *, seed: int = 0, tail: int = 1, block_size: int = 4) -> list[int]:
    """`blocks` whole blocks and `tail` further tokens; prompts of different seeds share no block."""
    return [(seed + 1) * 10_007 + position for position in range(blocks * block_size + tail)]
