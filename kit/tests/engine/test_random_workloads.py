"""Whatever happens, the outputs are those of an engine without cache, and at the end nothing is held."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import Chance, assert_answers_as_without_a_cache

from kvpact_testkit.engine import (
    EngineConfig,
    EngineQuirks,
    GroupKind,
    KVCacheGroup,
    ReferenceCache,
    reference_engine,
)

PRESETS = {**EngineQuirks.presets(), "native-ahead": EngineQuirks(async_scheduling=True)}
FULL, WINDOW = KVCacheGroup(GroupKind.FULL, 16), KVCacheGroup(GroupKind.WINDOW, 16, 20)
GROUPS = ((FULL,), (FULL, WINDOW), (KVCacheGroup(GroupKind.WINDOW, 16, 40),))


def config_for(seed: int, *, prefix_caching: bool, groups: int, small: bool) -> EngineConfig:
    chosen = GROUPS[groups]
    return EngineConfig(
        num_blocks=(14 if small else 60) * len(chosen),
        groups=chosen,
        num_ranks=1 + seed % 2,
        num_layers=1 + seed % 2,
        max_tokens_per_step=(48, 512)[seed % 2],
        max_running=(4, 64)[seed % 2],
        prefix_caching=prefix_caching,
        policy=("fcfs", "priority")[seed % 2],
        max_adapters=1,
        zero_new_blocks=seed % 3 == 0,
    )


def nothing_held(cache: ReferenceCache, num_slots: int) -> None:
    assert not cache.plans
    assert not cache.loading
    assert all(entry.holds == 0 and entry.stored for entry in cache.entries.values())
    assert sorted([*cache.free_slots, *(entry.slot for entry in cache.entries.values())]) == list(range(num_slots))


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    groups=st.integers(0, 2),
    small=st.booleans(),
    asynchronous=st.booleans(),
    prefix_caching=st.booleans(),
    upheaval=st.booleans(),
    failures=st.sampled_from((0.0, 0.3)),
)
def test_a_cache_changes_no_output_and_holds_nothing(
    preset: str,
    seed: int,
    groups: int,
    small: bool,
    asynchronous: bool,
    prefix_caching: bool,
    upheaval: bool,
    failures: float,
) -> None:
    config = config_for(seed, prefix_caching=prefix_caching, groups=groups, small=small)
    # Stock engines compute wrong outputs when a synchronous load fails; that has tests of its own.
    stock = PRESETS[preset].trusts_sync_loads
    chance = Chance(seed, failures, sync_may_fail=not stock)
    engine = reference_engine(config, PRESETS[preset], num_slots=40, asynchronous=asynchronous, conduct=chance)
    assert_answers_as_without_a_cache(engine, seed, upheaval=upheaval)
    engine.check_nothing_held()
    nothing_held(cast(ReferenceCache, engine.cache), 40)
    counts = engine.counts
    assert counts.promised >= counts.committed >= counts.loaded
    assert counts.committed >= counts.external_hits
