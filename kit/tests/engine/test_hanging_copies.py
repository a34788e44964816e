"""Copies that hang under the embedded engine: requests end, tokens are right, and nothing is held at rest."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pact import pact_engine
from workloads import Chance, assert_answers_as_without_a_cache

from kvpact.cache.cache import PactCache
from kvpact.contract import LoadJob
from kvpact.ranges import RangeSet
from kvpact_testkit.engine import Engine, EngineConfig, EngineQuirks, JobBehavior, Request, SimulatedWorker
from kvpact_testkit.engine.simulated_worker import NEVER, Job

PRESETS = {**EngineQuirks.presets(), "native-ahead": EngineQuirks(async_scheduling=True)}
DEADLINE = 0.3
PROMPT = list(range(100, 165))


def hang(rank: int, job: Job) -> JobBehavior:
    """Loads hang on the last rank of two."""
    return JobBehavior(copy_after_steps=NEVER if isinstance(job, LoadJob) and rank == 1 else 0)


def go_on(engine: Engine) -> None:
    """What hangs ends; then the engine comes to rest, and nothing is held."""
    for worker in engine.workers:
        cast(SimulatedWorker, worker).go_on()
    for _ in range(8):
        engine.step()
    engine.clock.now += 10.0
    for _ in range(3):
        engine.step()
    engine.check_nothing_held()
    cache = cast(PactCache, engine.cache)
    cache.check()
    assert cache.observe()["open_plans"] == 0
    assert cache.observe()["leases_held"] == 0


@pytest.mark.parametrize("preset", PRESETS)
def test_h10_a_request_whose_load_hangs_for_ever_is_answered_by_its_deadline(preset: str) -> None:
    plain = Engine(EngineConfig(num_blocks=400, num_ranks=2))
    plain.run([Request("again", PROMPT, 5)])
    engine = pact_engine(
        EngineConfig(num_blocks=60, num_ranks=2, prefix_caching=False),
        PRESETS[preset],
        conduct=hang,
        sync_load_budget=0,
        load_deadline=DEADLINE,
    )
    engine.run([Request("first", PROMPT, 1)])
    free = engine.scheduler.kv.pool.num_free
    began = engine.clock.now
    hangs = engine.add_request(Request("again", PROMPT, 5))
    while not hangs.has_ended:
        engine.step()
        engine.check()
        assert engine.clock.now - began < 2 * DEADLINE
        if not engine.scheduler.requests:
            break
    assert engine.finished["again"].output_token_ids == plain.finished["again"].output_token_ids
    assert engine.clock.now - began >= DEADLINE
    held = free - engine.scheduler.kv.pool.num_free
    assert held == len(PROMPT) // engine.config.block_size, "the copy may still write to these"
    other = engine.add_request(Request("other", PROMPT, 5))
    began = engine.clock.now
    while not other.has_ended:
        engine.step()
    assert engine.clock.now - began < DEADLINE / 2, "nobody waits behind the copy"
    assert other.output_token_ids == hangs.output_token_ids
    go_on(engine)
    assert engine.scheduler.kv.pool.num_free == free


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=15)
@given(
    seed=st.integers(0, 10_000),
    small=st.booleans(),
    prefix_caching=st.booleans(),
    upheaval=st.booleans(),
    hangs=st.sampled_from((0.1, 0.5)),
)
def test_h07_h10_copies_that_hang_change_no_output_and_hold_nothing_for_ever(
    preset: str, seed: int, small: bool, prefix_caching: bool, upheaval: bool, hangs: float
) -> None:
    """What hangs ends, torn or not, while its request and others run: none of them reads what it wrote."""
    config = EngineConfig(
        num_blocks=30 if small else 60, num_ranks=1 + seed % 2, prefix_caching=prefix_caching, max_tokens_per_step=48
    )
    chance = Chance(seed, 0.1, sync_may_fail=False, losses=0.05)

    def conduct(rank: int, job: Job) -> JobBehavior:
        if isinstance(job, LoadJob) and chance.random.random() < hangs:
            torn = RangeSet.of(job.blocks) if chance.random.random() < 0.5 else RangeSet()
            return JobBehavior(copy_after_steps=chance.random.choice((35, 60, 90)), failed_blocks=torn)
        return chance(rank, job)

    engine = pact_engine(
        config, PRESETS[preset], num_slots=40, conduct=conduct, sync_load_budget=0, load_deadline=DEADLINE
    )
    assert_answers_as_without_a_cache(engine, seed, upheaval=upheaval, steps=120)
    go_on(engine)
