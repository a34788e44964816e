"""Random but repeatable work for the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvpact.identity.keys import RequestIdentity
from kvpact.ranges import BlockRange, RangeSet
from kvpact_testkit.engine import Engine, EngineConfig, JobBehavior, Request, RequestStatus
from kvpact_testkit.engine.simulated_worker import Job

IDENTITIES = (RequestIdentity(), RequestIdentity(salt="tenant"), RequestIdentity(adapter="weights-1"), None)


def prompt(length: int, seed: int = 0) -> list[int]:
    """A prompt of its own."""
    random = Random(seed)
    return [random.randrange(30_000) for _ in range(length)]


def workload(seed: int, count: int = 12, *, steps: int = 40, plain: bool = False) -> list[Request]:
    """Requests that share prefixes, of all kinds, arriving over `steps` steps."""
    random = Random(seed)
    prefixes = [prompt(96, seed=100 + i) for i in range(2)]
    requests = []
    for number in range(count):
        tokens = random.choice(prefixes)[: random.randrange(1, 97)] + prompt(
            random.randrange(1, 40), seed * 1000 + number
        )
        requests.append(
            Request(
                f"r{number}",
                tokens,
                random.randrange(1, 30),
                priority=0 if plain else random.randrange(3),
                identity=IDENTITIES[0] if plain else random.choices(IDENTITIES, (6, 2, 2, 1))[0],
                arrival_step=random.randrange(steps),
                may_load=plain or random.random() > 0.1,
                ready_step=0 if plain or random.random() > 0.1 else random.randrange(steps),
            )
        )
    return requests


def outputs_of(engine: Engine) -> dict[str, list[int]]:
    """What the finished requests generated."""
    return {request_id: request.output_token_ids for request_id, request in engine.finished.items()}


@dataclass
class Chance:
    """Seeded misfortune for workers: slow, failing, repeated and piecemeal jobs. Synchronous loads do not fail if told
    so."""

    seed: int
    failures: float = 0.2
    sync_may_fail: bool = True
    losses: float = 0.0
    """How likely the report of a job is lost."""
    random: Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)

    def __call__(self, rank: int, job: Job) -> JobBehavior:
        random = self.random
        failed = RangeSet()
        if random.random() < self.failures and (self.sync_may_fail or not getattr(job, "synchronous", False)):
            first = random.randrange(job.blocks.start, job.blocks.end)
            failed = RangeSet.of(BlockRange(first, random.randrange(1, 1 + job.blocks.end - first)))
        return JobBehavior(
            copy_after_steps=random.choice((0, 0, 1, 4)),
            report_after_steps=random.choice((0, 0, 1, 3)),
            failed_blocks=failed,
            times_reported=0 if random.random() < self.losses else random.choice((1, 1, 2)),
            block_by_block=random.random() < 0.3,
        )


def run_with_upheaval(engine: Engine, requests: list[Request], seed: int, *, max_steps: int = 3000) -> set[str]:
    """Drive to the end, checking after each step, with cancellations and resets on the way; returns who was
    cancelled."""
    random = Random(seed)
    for request in requests:
        engine.add_request(request)
    cancelled: set[str] = set()
    for _ in range(max_steps):
        if not engine.has_work:
            return cancelled
        engine.step()
        engine.check()
        if random.random() < 0.05:
            victim = random.choice(requests).request_id
            if engine.cancel(victim):
                cancelled.add(victim)
        loading = any(load.asynchronous for load in engine.scheduler.loads.values())
        if random.random() < 0.02 and not (loading and engine.quirks.reset_refuses_loading):
            engine.reset()
    raise AssertionError(f"still busy after {max_steps} steps: {list(engine.scheduler.requests.values())}")


def plain_outputs(seed: int, **arguments: Any) -> dict[str, list[int]]:
    """What an engine without a cache, of one rank and one layer, answers to a workload."""
    engine = Engine(EngineConfig(num_blocks=400))
    engine.run(workload(seed, **arguments))
    return outputs_of(engine)


def assert_answers_as_without_a_cache(engine: Engine, seed: int, *, upheaval: bool = True, **arguments: Any) -> None:
    """Run a workload, in upheaval or not: nobody who stays gets another answer than from an engine without a cache."""
    requests, cancelled = workload(seed, **arguments), set[str]()
    if upheaval:
        cancelled = run_with_upheaval(engine, requests, seed)
    else:
        engine.run(requests)
    expected = plain_outputs(seed, **arguments)
    assert outputs_of(engine) == {name: tokens for name, tokens in expected.items() if name not in cancelled}


def waiting_for_load(engine: Engine) -> list[Request]:
    """Requests whose asynchronous load is under way."""
    return [r for r in engine.scheduler.requests.values() if r.status is RequestStatus.WAITING_FOR_LOAD]
