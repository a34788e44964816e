"""What people are told of each request adds up to what the cache has counted, whatever happens."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pact import pact_engine
from workloads import Chance, assert_answers_as_without_a_cache

from kvpact.cache.cache import PactCache
from kvpact_testkit.engine import EngineConfig, EngineQuirks

SUMS = ("promised_tokens", "committed_tokens", "loaded_tokens", "used_tokens", "used_again_tokens")


@pytest.mark.parametrize("preset", ["native", "vllm-0.32"])
@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    small=st.booleans(),
    prefix_caching=st.booleans(),
    upheaval=st.booleans(),
    failures=st.sampled_from((0.0, 0.3)),
)
def test_the_records_add_up_to_what_the_ledger_counts(
    preset: str, seed: int, small: bool, prefix_caching: bool, upheaval: bool, failures: float
) -> None:
    quirks = EngineQuirks.presets()[preset]
    chance = Chance(seed, failures, sync_may_fail=not quirks.trusts_sync_loads)
    config = EngineConfig(num_blocks=14 if small else 60, max_tokens_per_step=48, prefix_caching=prefix_caching)
    engine = pact_engine(config, quirks, num_slots=40, conduct=chance)
    assert_answers_as_without_a_cache(engine, seed, upheaval=upheaval)
    cache = cast(PactCache, engine.cache)
    records, counted = cache.requests.records.all(), cache.observe()
    assert len(records) == 12
    assert {name: sum(getattr(one, name) for one in records) for name in SUMS} == {name: counted[name] for name in SUMS}
    assert sum(one.saved_blocks for one in records) == counted["saved_blocks"]
    assert sum(one.plans for one in records) == counted["plans_opened"]
    if not (upheaval or engine.counts.preemptions or engine.counts.failed_loads):  # else some hit more than once
        assert cache.requests.records.prompts.engine_tokens == engine.counts.local_hits
    for record in records:
        assert record.used_tokens <= record.loaded_tokens <= record.committed_tokens <= record.promised_tokens
        assert record.engine_tokens < record.prompt_tokens
        assert record.looked_up_from >= 0 or not record.plans
