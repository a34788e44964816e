"""kvpact's own cache under the embedded engine, in every quirk mode."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pact import SLOT_BYTES, pact_engine
from workloads import Chance, assert_answers_as_without_a_cache

from kvpact.cache.cache import PactCache
from kvpact.contract import StepWork
from kvpact_testkit.engine import Engine, EngineConfig, EngineQuirks

PRESETS = {**EngineQuirks.presets(), "native-ahead": EngineQuirks(async_scheduling=True)}


def nothing_held(cache: PactCache) -> None:
    cache.check()
    assert cache.observe()["open_plans"] == 0
    assert cache.observe()["leases_held"] == 0
    assert not cache.has_pending_work


def waited_for(engine: Engine) -> list[int]:
    """The blocks of the loads that each step of the engine waits for, from now on."""
    cache, found = cast(PactCache, engine.cache), list[int]()
    end_step = cache.end_step

    def end() -> StepWork:
        work = end_step()
        found.append(sum(len(job.slots) for job in work.loads if job.synchronous))
        return work

    cache.end_step = end  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=15)
@given(
    seed=st.integers(0, 10_000),
    small=st.booleans(),
    budget=st.sampled_from((0, 4 * SLOT_BYTES, 4 * SLOT_BYTES, 1 << 30)),
    prefix_caching=st.booleans(),
    upheaval=st.booleans(),
    failures=st.sampled_from((0.0, 0.3)),
    losses=st.sampled_from((0.0, 0.1)),
)
def test_pact_cache_changes_no_output_and_holds_nothing(
    preset: str,
    seed: int,
    small: bool,
    budget: int,
    prefix_caching: bool,
    upheaval: bool,
    failures: float,
    losses: float,
) -> None:
    config = EngineConfig(
        num_blocks=14 if small else 60,
        num_ranks=1 + seed % 2,
        num_layers=1 + seed // 2 % 2,
        max_tokens_per_step=(48, 512)[seed % 2],
        prefix_caching=prefix_caching,
        policy=("fcfs", "priority")[seed % 2],
    )
    quirks = PRESETS[preset]
    chance = Chance(seed, failures, sync_may_fail=not quirks.trusts_sync_loads, losses=losses)
    engine = pact_engine(config, quirks, num_slots=40, conduct=chance, sync_load_budget=budget, load_deadline=0.3)
    steps = waited_for(engine)
    assert_answers_as_without_a_cache(engine, seed, upheaval=upheaval)
    engine.clock.now += 10.0  # what no engine told the cache runs out by itself
    engine.step()
    engine.step()
    engine.check_nothing_held()
    nothing_held(cast(PactCache, engine.cache))
    assert max(steps) * SLOT_BYTES <= budget
