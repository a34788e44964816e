"""The embedded engine says each exit in its step, with its own reason; and counts what was really not computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
from pact import pact_engine
from test_exits import NO_REUSE, PREFIX, SILENT, Diary, assert_ends_right, blocker, warm_engine, warm_request
from workloads import Chance, prompt, workload

from kvpact.cache.cache import PactCache
from kvpact.contract import ExternalKVMatch, ExternalMatchExit
from kvpact.errors import ConfigError
from kvpact.identity.keys import RequestIdentity
from kvpact.metrics import EndReason, series
from kvpact_testkit.engine import (
    ByteSegment,
    Engine,
    EngineConfig,
    EngineQuirks,
    MultiCache,
    MultiWorker,
    ReferenceCache,
    Request,
    SchedulerOutput,
    SimulatedWorker,
    reference_engine,
)
from kvpact_testkit.engine.output import ModelOutput

Scene = tuple[Engine, Diary]
ADAPTER = RequestIdentity(adapter="one")


def promised(quirks: EngineQuirks | None = None, **config: object) -> tuple[Engine, Diary, list[int]]:
    """An engine in which request r has a match and no blocks; those taken away."""
    engine, cache = warm_engine(quirks, replace(NO_REUSE, policy="priority", **config))  # type: ignore[arg-type]
    taken = blocker(engine, 57)
    engine.add_request(warm_request(priority=1))
    engine.step()
    cache.lines.clear()
    return engine, cache, taken


def urgent(engine: Engine, taken: list[int], tokens: int = 20, **settings: object) -> None:
    """A request that is admitted before r."""
    engine.scheduler.kv.pool.free(taken[:4])
    engine.add_request(Request("urgent", prompt(tokens, 5), 9, priority=0, **settings))  # type: ignore[arg-type]


def beside(happens: Callable[[Engine, list[int]], object], **config: object) -> Callable[[], Scene]:
    """What happens to an engine in which request r has a match and no blocks."""

    def scene() -> Scene:
        engine, cache, taken = promised(**config)  # type: ignore[arg-type]
        happens(engine, taken)
        return engine, cache

    return scene


def blocked(engine: Engine, taken: list[int]) -> None:
    engine.scheduler.requests["r"].ready_step = engine.scheduler.step + 9


def two_adapters(engine: Engine, taken: list[int]) -> None:
    engine.scheduler.requests["r"].identity = RequestIdentity(adapter="two")
    urgent(engine, taken, identity=ADAPTER)


def preemption() -> Scene:
    engine, cache, taken = promised()
    engine.scheduler.kv.pool.free(taken[:2])
    for name in ("growing", "preempted"):
        engine.add_request(Request(name, prompt(31, 5), 9, priority=0))
    while not engine.counts.preemptions:
        cache.lines.clear()
        engine.step()
    return engine, cache


def by_quirk(quirks: EngineQuirks) -> Callable[[], Scene]:
    def scene() -> Scene:
        engine, cache = warm_engine()
        engine.scheduler.quirks = quirks
        engine.add_request(warm_request(encoder_tokens=50))
        return engine, cache

    return scene


POSTPONED: dict[ExternalMatchExit, Callable[[], Scene]] = {
    ExternalMatchExit.NO_BLOCKS: beside(lambda engine, taken: None),
    ExternalMatchExit.BUDGET: beside(lambda engine, taken: urgent(engine, taken, 60), max_tokens_per_step=40),
    ExternalMatchExit.MAX_RUNNING: beside(urgent, max_running=1),
    ExternalMatchExit.NOT_REACHED: beside(lambda engine, taken: urgent(engine, taken, 200)),
    ExternalMatchExit.PAUSED: beside(lambda engine, taken: engine.pause()),
    ExternalMatchExit.BLOCKED: beside(blocked),
    ExternalMatchExit.LORA_LIMIT: beside(two_adapters, max_adapters=1),
    ExternalMatchExit.PREEMPTION: preemption,
    ExternalMatchExit.THROTTLED: by_quirk(EngineQuirks(throttles_prefill_every=1)),
    ExternalMatchExit.ENCODER: by_quirk(EngineQuirks(encoder_tokens_per_step=10)),
}


@pytest.mark.parametrize("reason", POSTPONED)
def test_a_postponed_match_is_said_once_in_its_step_with_its_reason_and_is_kept(reason: ExternalMatchExit) -> None:
    engine, cache = POSTPONED[reason]()
    if reason is not ExternalMatchExit.PREEMPTION:
        engine.step()
    said = [line for line in cache.lines if line[0] in ("postpone", "abort") and line[1] == "r"]
    assert said == [("postpone", "r", str(reason))]
    assert engine.counts.postponed[reason] >= 1
    assert cache.plans["r"].postponed


def test_all_exits_that_postpone_are_said_by_the_engine_or_by_several_caches() -> None:
    assert POSTPONED.keys() | {ExternalMatchExit.OTHER_CONNECTOR_WAITS} == {
        reason for reason in ExternalMatchExit if not reason.is_dropped
    }


def test_an_engine_that_says_nothing_counts_why_it_did_not_use_a_match() -> None:
    engine, cache = warm_engine(SILENT)
    blocker(engine, 57)
    engine.add_request(warm_request())
    engine.step()
    engine.cancel("r")
    assert cache.lines == [("prepare", "r", 0, 64), ("finished", "r")]
    assert (engine.counts.declined, engine.counts.postponed, engine.counts.aborts) == (
        {ExternalMatchExit.NO_BLOCKS: 1},
        {},
        {},
    )


@pytest.mark.parametrize("later", [False, True])
def test_a_request_cancelled_with_an_open_match_is_said_before_its_end(later: bool) -> None:
    engine, cache = warm_engine()
    cache.answers_later = later
    blocker(engine, 57)
    engine.add_request(warm_request())
    engine.step()
    engine.cancel("r")
    assert cache.lines[-2:] == [("abort", "r", "cancelled"), ("finished", "r")]
    assert (engine.counts.aborts, cache.held) == ({ExternalMatchExit.CANCELLED: 1}, 0)


def test_a_reset_drops_every_open_match() -> None:
    engine, cache, taken = promised()
    engine.reset()
    assert cache.lines == [("abort", "r", "reset")]
    engine.scheduler.kv.pool.free(taken)
    assert_ends_right(engine)


def test_a_match_that_the_engines_own_rule_cuts_to_nothing_is_declined() -> None:
    engine, cache = warm_engine(EngineQuirks(local_tail_tokens=64))
    engine.run([warm_request()])
    assert cache.lines == [("prepare", "r", 0, 64), ("abort", "r", "declined"), ("finished", "r")]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_match_that_the_cache_takes_back_is_refused(asynchronous: bool) -> None:
    engine, cache = warm_engine(asynchronous=asynchronous)
    cache.accepts_less = 0
    engine.run([warm_request()])
    assert cache.lines[1:3] == [("commit", "r", 0), ("abort", "r", "refused")]
    assert engine.finished["r"].num_cached_tokens == 0


@pytest.mark.parametrize("end", ["cancel", "reset"])
def test_a_match_that_is_to_be_committed_late_is_not_postponed_and_is_dropped_if_it_never_is(end: str) -> None:
    engine, cache = warm_engine(EngineQuirks(commits_async_late=True), asynchronous=True)
    engine.add_request(warm_request())
    engine.scheduler.schedule()
    assert cache.lines == [("prepare", "r", 0, 64)]
    if end == "cancel":
        engine.cancel("r")
        assert cache.lines[1:] == [("abort", "r", "cancelled"), ("finished", "r")]
    else:
        engine.scheduler.reset()
        assert cache.lines[1:] == [("abort", "r", "reset")]
    assert not engine.counts.postponed


class Slow(ReferenceCache):
    """Answers later in the first step."""

    later = True

    def prepare_external_match(self, request, num_computed_tokens):  # type: ignore[no-untyped-def]
        return None if self.later else super().prepare_external_match(request, num_computed_tokens)


def test_of_several_caches_those_that_are_ready_hear_that_one_waits_and_the_losers_that_another_won() -> None:
    told: list[tuple[str, str, str]] = []

    class Told(Diary):
        name = ""

        def postpone_external_match(self, request_id: str, reason: ExternalMatchExit) -> None:
            told.append((self.name, "postponed", reason))
            super().postpone_external_match(request_id, reason)

        def abort_external_match(self, request_id: str, match: ExternalKVMatch | None, reason: str) -> None:
            told.append((self.name, "dropped", reason))
            super().abort_external_match(request_id, match, reason)

    first, second, slow = Told(16, 64), Told(16, 64), Slow(16, 64)
    first.name, second.name = "first", "second"
    caches = [first, second, slow]
    workers = [SimulatedWorker(0, ByteSegment(64, 4096).slot_view) for _ in caches]
    engine = Engine(NO_REUSE, cache=MultiCache(caches), workers=[MultiWorker(workers)])
    slow.later = False
    engine.run([Request("cold", PREFIX, 1)])
    slow.later = True
    engine.add_request(warm_request())
    engine.step()
    waits = ExternalMatchExit.OTHER_CONNECTOR_WAITS
    assert told == [("first", "postponed", waits), ("second", "postponed", waits)]
    slow.later = False
    engine.run()
    assert told[2:] == [("second", "dropped", ExternalMatchExit.OTHER_CONNECTOR)]
    assert engine.finished["r"].num_cached_tokens == 64


def test_kvpacts_own_cache_ends_its_plans_with_the_exits_of_the_engine() -> None:
    config = EngineConfig(num_blocks=20, max_running=8, max_tokens_per_step=64, prefix_caching=False)
    engine = pact_engine(config)
    engine.run([Request(f"cold{seed}", prompt(60, seed), 1) for seed in range(6)])
    for seed in range(6):
        engine.add_request(Request(f"r{seed}", prompt(60, seed) + prompt(9, 50 + seed), 30))
    for _ in range(9):
        engine.step()
    engine.pause()
    engine.cancel("r5")
    engine.run(max_steps=1) if not engine.has_work else engine.step()
    engine.unpause()
    engine.run()
    assert cast(PactCache, engine.cache).observe()[series("plans_ended", EndReason.NOT_RENEWED)] == 0
    assert engine.counts.postponed[ExternalMatchExit.NO_BLOCKS] > 0
    engine.check_nothing_held()


# Counts of one request


def computed_of(engine: Engine) -> dict[str, set[int]]:
    """Filled while the engine runs: which token positions of each request the model computed."""
    computed: dict[str, set[int]] = {}
    execute = engine.runner.execute

    def watched(output: SchedulerOutput) -> ModelOutput:
        for request, start, count in zip(output.requests, output.starts, output.counts, strict=True):
            computed.setdefault(request.request_id, set()).update(range(start, start + count))
        return execute(output)

    engine.runner.execute = watched  # type: ignore[method-assign]
    return computed


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("blocks", [24, 200])
def test_cached_tokens_are_those_of_the_prompt_that_were_never_computed(
    blocks: int, asynchronous: bool, seed: int
) -> None:
    """Local hits, loads that fail in part, loads of nothing, preemptions and hits after them."""
    config = EngineConfig(num_blocks=blocks, max_tokens_per_step=64)
    engine = reference_engine(config, num_slots=40, asynchronous=asynchronous, conduct=Chance(seed, failures=0.5))
    computed = computed_of(engine)
    engine.run(workload(seed, 16))
    engine.scheduler.kv.pool.unpublish_all()
    engine.run([replaced(request) for request in workload(seed, 16)])
    for name, request in engine.finished.items():
        assert request.num_cached_tokens == len(set(range(request.num_prompt_tokens)) - computed[name]), name
    counts = engine.counts
    assert min(counts.external_hits, counts.local_hits, counts.failed_loads) > 0
    assert blocks > 100 or engine.counts.preemptions


def replaced(request: Request) -> Request:
    """The same prompt again, under another name."""
    return Request(
        f"{request.request_id}-again",
        request.prompt_token_ids,
        request.max_output_tokens,
        priority=request.priority,
        identity=request.identity,
        may_load=request.may_load,
    )


@pytest.mark.parametrize("preset", EngineQuirks.presets())
def test_without_failures_and_preemptions_requests_add_up_to_what_the_engine_counts(preset: str) -> None:
    engine = reference_engine(EngineConfig(num_blocks=300), EngineQuirks.presets()[preset])
    engine.run(workload(3, 16))
    engine.run([replaced(request) for request in workload(3, 16)])
    hits = engine.counts.local_hits + engine.counts.external_hits
    assert sum(request.num_cached_tokens for request in engine.finished.values()) == hits > 0
    assert not engine.counts.preemptions


# The budget of a step


def test_the_ranks_take_at_least_what_a_step_may_compute() -> None:
    with pytest.raises(ConfigError, match="max_tokens_of_ranks is 100; it must be at least max_tokens_per_step, 512"):
        EngineConfig(max_tokens_of_ranks=100)
