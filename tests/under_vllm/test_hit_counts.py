"""What vLLM and kvpact count as hits is what was not computed, also after a load that failed (H75).

vLLM counts hits when it admits a request: kvpact mends the request's own count, and the hits of all where the user
names `kvpact.vllm.scheduler`. The scheduler and both halves of the connector are real, the model is played.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from vllm.v1.core.sched.scheduler import Scheduler

from kvpact.contract import JobOutcome, LoadJob
from kvpact.ranges import BlockRange, RangeSet
from kvpact.vllm.scheduler import KvpactScheduler
from vllm_played_engine import BLOCK, PlayedEngine, PlayedRequest, answer, make_prompt, wait_before_loads

BLOCKS = 6
TAIL = 5
"""Tokens behind the last whole block."""
PROMPTS = [make_prompt(seed, BLOCKS, TAIL) for seed in range(4)]
LOADS: dict[str, dict[str, Any]] = {"sync": {"sync_load_budget": "1GiB"}, "async": {"sync_load_budget": 0}}


@pytest.fixture(params=LOADS)
def start(start: Callable[..., PlayedEngine], request: pytest.FixtureRequest) -> Callable[..., PlayedEngine]:
    """Starts an engine that has stored all `PROMPTS` and holds nothing itself; nothing is counted yet."""

    def start_filled(**settings: Any) -> PlayedEngine:
        engine = start(**{"scheduler_class": KvpactScheduler, **LOADS[request.param], **settings})
        for prompt in PROMPTS:
            engine.generate(prompt)
        engine.forget()
        engine.computed_tokens = engine.external_queries = 0
        return engine

    return start_filled


def fail_loads(engine: PlayedEngine, fails: Callable[[LoadJob, int], bool]) -> None:
    """From now on these blocks of a request do not arrive; they are cleared instead."""
    jobs: Any = engine.worker.cache_worker.jobs
    end = jobs.end

    def end_badly(job_id: int, outcome: JobOutcome) -> None:
        job = jobs.open.get(job_id)
        if isinstance(job, LoadJob):
            failed = [block for block in job.blocks if fails(job, block)]
            for memory in engine.kv.values():
                memory[[job.block_ids[block - job.start_block] for block in failed]] = 0
            outcome = outcome.merge(JobOutcome(failed=RangeSet.of(*(BlockRange(block, 1) for block in failed))))
        end(job_id, outcome)

    jobs.end = end_badly


def ask(engine: PlayedEngine) -> PlayedRequest:
    played = engine.generate(PROMPTS[0])
    assert played.said == answer(PROMPTS[0], 3)
    return played


def loads_in_the_step(engine: PlayedEngine) -> bool:
    return bool(engine.config.kv_transfer_config.kv_connector_extra_config["sync_load_budget"])


def assert_counts_are_true(engine: PlayedEngine, *requests: PlayedRequest, local: int = 0, failed: int = 0) -> None:
    """What the requests were told, what vLLM counts in all and what kvpact counts is what was not computed.

    With `failed` synchronous loads so many times the tail of a prompt was computed from nothing.
    """
    # Of each answer the last token is never computed, the others are one by one.
    wanted = sum(len(played.request.prompt_token_ids) + len(played.said) - 1 for played in requests)
    skipped = wanted - engine.computed_tokens + (TAIL * failed if loads_in_the_step(engine) else 0)
    assert sum(played.cached_tokens for played in requests) == skipped
    counts = engine.counts
    assert counts["used_tokens"] == skipped - local
    assert counts["committed_tokens"] == counts["loaded_tokens"] + counts["failed_tokens"]
    assert engine.external_hits == engine.external_hits_by_source == skipped - local


@pytest.mark.parametrize("first_failed", [0, 2, 5, BLOCKS])
def test_h75_what_failed_to_load_is_no_hit(start: Callable[..., PlayedEngine], first_failed: int) -> None:
    engine = start()
    fail_loads(engine, lambda job, block: block >= first_failed)
    played = ask(engine)
    assert played.cached_tokens == first_failed * BLOCK
    assert_counts_are_true(engine, played, failed=first_failed < BLOCKS)


@pytest.mark.parametrize("first_failed", [2, 4])
def test_h75_what_the_engine_had_itself_stays_a_hit(start: Callable[..., PlayedEngine], first_failed: int) -> None:
    engine = start()
    head = engine.generate(PROMPTS[0][: 2 * BLOCK + 1])
    fail_loads(engine, lambda job, block: block >= first_failed)
    played = ask(engine)
    assert played.cached_tokens == first_failed * BLOCK
    assert_counts_are_true(engine, head, played, local=2 * BLOCK, failed=1)


def test_h75_on_stock_schedulers_the_request_is_told_right_and_the_counter_is_what_was_promised(
    start: Callable[..., PlayedEngine],
) -> None:
    """As docs/internals/contract-on-vllm.md says."""
    engine = start(scheduler_class=Scheduler)
    fail_loads(engine, lambda job, block: block >= 2)
    played = ask(engine)
    assert played.cached_tokens == engine.counts["used_tokens"] == 2 * BLOCK
    assert engine.external_hits == engine.external_hits_by_source == BLOCKS * BLOCK


def test_h75_a_request_is_told_once_what_it_was_computed_and_created(start: Callable[..., PlayedEngine]) -> None:
    engine = start()
    fail_loads(engine, lambda job, block: block >= 2)
    told: list[Any] = []
    update = engine.scheduler.update_from_output

    def watched(*args: Any) -> Any:
        outputs = update(*args)
        told.extend(one.prefill_stats for each in outputs.values() for one in each.outputs if one.prefill_stats)
        return outputs

    engine.scheduler.update_from_output = watched
    engine.generate(PROMPTS[0])
    (stats,) = told
    assert stats.num_cached_tokens == 2 * BLOCK
    # A request that begins again finds what did arrive in the engine's own cache.
    local = 2 * BLOCK if loads_in_the_step(engine) else 0
    assert stats.num_local_cached_tokens == local
    assert stats.num_external_cached_tokens == 2 * BLOCK - local
    assert stats.num_computed_tokens == stats.num_prompt_tokens - 2 * BLOCK
    assert stats.num_cache_creation_tokens == (BLOCKS - 2) * BLOCK


def test_h75_of_several_requests_each_is_told_its_own(start: Callable[..., PlayedEngine]) -> None:
    engine = start()
    failed_from = {f"request {len(PROMPTS) + number}": first for number, first in enumerate([0, 3, BLOCKS, 1])}
    fail_loads(engine, lambda job, block: block >= failed_from[job.request_id])
    requests = [engine.add(prompt) for prompt in PROMPTS]
    engine.run()
    assert [played.said for played in requests] == [answer(prompt, 3) for prompt in PROMPTS]
    assert [played.cached_tokens for played in requests] == [first * BLOCK for first in failed_from.values()]
    assert_counts_are_true(engine, *requests, failed=3)


def test_h75_what_a_cancelled_request_was_waiting_for_is_no_hit(start: Callable[..., PlayedEngine]) -> None:
    engine = start()
    go_on = threading.Event()
    if loads_in_the_step(engine):
        go_on.set()
    wait_before_loads(engine, go_on)
    victim = engine.add(PROMPTS[0])
    engine.step(lambda: engine.cancel(victim))
    go_on.set()
    engine.run()
    used = len(PROMPTS[0]) - engine.computed_tokens if loads_in_the_step(engine) else 0
    assert engine.external_hits == engine.counts["used_tokens"] == used


@pytest.mark.parametrize("broken", ["commit_external_match", "end_step"])
def test_h75_a_load_that_is_never_ordered_is_no_hit(
    start: Callable[..., PlayedEngine], broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    cache = engine.connector.scheduler_side.cache

    def fail(*_: Any) -> None:
        monkeypatch.undo()
        raise OSError("injected")

    monkeypatch.setattr(cache, broken, fail)
    played = ask(engine)
    assert played.cached_tokens == 0
    assert_counts_are_true(engine, played, failed=1)


def test_h75_h70_hits_are_what_was_not_computed_whatever_fails_and_whoever_leaves(
    start: Callable[..., PlayedEngine],
) -> None:
    """Requests share stems, are preempted and cancelled in an engine too small for them; loads fail now and then."""
    again = [_play(start, seed) for seed in range(4)]
    assert any(again), "the scenes are too easy: nobody has hits after a preemption"


def _play(start: Callable[..., PlayedEngine], seed: int) -> int:
    """One engine's; returns the hits of requests that had been preempted."""
    dice = random.Random(seed)
    engine = start(num_blocks=14, num_batched_tokens=96)
    fail_loads(engine, lambda job, block: hash((seed, job.job_id, block)) % 5 == 0)
    requests = []
    for number in range(16):
        prompt = [*dice.choice(PROMPTS)[: dice.randrange(1, BLOCKS + 1) * BLOCK], *make_prompt(100 + number, 1)]
        requests.append(engine.add(prompt, dice.randrange(1, 60)))
        for _ in range(dice.randrange(8)):
            leaves = dice.random() < 0.05
            engine.step(partial(engine.cancel, requests[-1]) if leaves else None)
    engine.run(30.0)
    for played in requests:
        assert played.said == answer(played.request.prompt_token_ids, len(played.said))
    counts = engine.counts
    assert counts["failed_tokens"] > 0
    assert counts["used_tokens"] + counts["used_again_tokens"] == engine.external_hits + engine.external_hits_again
    assert len(engine.connector.scheduler_side.credit) == 0
    return engine.external_hits_again
