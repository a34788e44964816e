"""KV cache groups of every kind: outputs do not change, every kind is reused, and what is wrong in one is found."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
from kinds import CHUNK, FULL, STATE, WINDOW, random_groups
from workloads import Chance, assert_answers_as_without_a_cache, prompt

from kvpact.contract import ExternalCache
from kvpact.errors import ConfigError, PactViolation
from kvpact.ranges import BlockRange, RangeSet
from kvpact_testkit.engine import (
    ByteSegment,
    Engine,
    EngineConfig,
    EngineQuirks,
    JobBehavior,
    KVCacheGroup,
    OracleViolation,
    ReferenceCache,
    Request,
    SimulatedWorker,
    reference_engine,
)

PRESETS = {**EngineQuirks.presets(), "native-ahead": EngineQuirks(async_scheduling=True)}


def config_of(*groups: KVCacheGroup, num_blocks: int = 200, **settings: object) -> EngineConfig:
    rows = [group.block_size for group in groups if group.kind is FULL] or [group.block_size for group in groups]
    config = EngineConfig(num_blocks=num_blocks, block_size=min(rows), groups=groups, max_tokens_per_step=64)
    return replace(config, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", PRESETS)
def test_no_groups_of_any_kind_change_an_output(preset: str) -> None:
    """Half with a cache whose loads fail now and then; blocks and slots are scarce."""
    quirks = PRESETS[preset]
    for seed in range(6):
        groups = random_groups(seed, 16)
        tight = 1 + sum(-(-170 // group.block_size) for group in groups)
        config = config_of(*groups, num_blocks=tight, num_ranks=2, prefix_caching=seed % 3 > 0)
        if seed % 2:
            engine = Engine(config, quirks)
        else:
            chance = Chance(seed, 0.1, sync_may_fail=not quirks.trusts_sync_loads)
            engine = reference_engine(config, quirks, num_slots=60, asynchronous=seed % 4 == 0, conduct=chance)
        assert_answers_as_without_a_cache(engine, seed)
        engine.check_nothing_held()
        if engine.cache is not None:
            cast(ReferenceCache, engine.cache).check()


@pytest.mark.parametrize(
    ("groups", "reused"),
    [
        ([KVCacheGroup(STATE, 16)], 160 + 128),
        ([KVCacheGroup(WINDOW, 16, 20)], 160 + 144),
        ([KVCacheGroup(FULL, 16), KVCacheGroup(STATE, 32)], 160 + 128),
        ([KVCacheGroup(FULL, 16), KVCacheGroup(STATE, 8), KVCacheGroup(WINDOW, 16, 40)], 160 + 128),
        ([KVCacheGroup(FULL, 16), KVCacheGroup(CHUNK, 16, 64)], 160 + 144),
        ([KVCacheGroup(FULL, 16), KVCacheGroup(FULL, 16, drops_last=True)], 144 + 128),
        ([KVCacheGroup(FULL, 32), KVCacheGroup(WINDOW, 16, 20), KVCacheGroup(CHUNK, 8, 24), KVCacheGroup(STATE, 64)],
         128 + 128),
    ],
)  # fmt: skip
@pytest.mark.parametrize("preset", ["native", "vllm-0.32"])
def test_every_kind_is_stored_and_served(groups: list[KVCacheGroup], reused: int, preset: str) -> None:
    """Of a prompt of 170 tokens, for the whole of it and for 150 tokens of it. States are kept where steps end."""
    for cache, caching in ((True, False), (False, True)):
        config = config_of(*groups, num_ranks=2, prefix_caching=caching)
        quirks = PRESETS[preset]
        engine = reference_engine(config, quirks) if cache else Engine(config, quirks)
        engine.run([Request("first", prompt(170), 8)])
        engine.run([Request("longer", [*prompt(170), 1], 8)])
        engine.run([Request("other", [*prompt(150), *prompt(40, 3)], 8)])
        assert engine.counts.external_hits + engine.counts.local_hits == reused
        engine.check_nothing_held()


def test_a_state_is_kept_at_the_boundaries_where_steps_end_and_nowhere_else() -> None:
    engine = Engine(config_of(KVCacheGroup(FULL, 16), KVCacheGroup(STATE, 16), max_tokens_per_step=50))
    request = engine.add_request(Request("r", prompt(100), 30))
    for step, there in enumerate([[2], [2, 5], [5, 6], [5, 6]]):
        engine.step()
        full, states = engine.context.get_block_ids("r")
        assert [place for place, block in enumerate(states) if block] == there, step
        assert all(full)
    assert request.num_computed_tokens == 101
    while request.num_computed_tokens < 114:
        engine.step()
    engine.check()
    assert len(engine.scheduler.kv.pool.published[1]) == 3, "at 48, 96 and 112 tokens"


def test_a_state_of_another_boundary_is_found_in_the_step_that_reads_it() -> None:
    engine = Engine(config_of(KVCacheGroup(FULL, 16), KVCacheGroup(STATE, 16), max_tokens_per_step=32))
    request = engine.add_request(Request("victim", prompt(100), 8))
    engine.step()
    (state,) = (block for block in request.block_ids[1] if block)
    words = engine.runner.layout.span(1, state)
    earlier = engine.runner.truth_of(request)[15] + engine.runner.masks[1, 0]
    engine.runner.memory[0, words] = earlier
    with pytest.raises(OracleViolation, match=r"reads token 31 .*\(group 1, .* finds token 15 of request victim"):
        engine.step()


def test_a_draft_models_last_block_is_right_for_one_next_token_only() -> None:
    engine = Engine(config_of(KVCacheGroup(FULL, 16), KVCacheGroup(FULL, 16, drops_last=True)))
    engine.run([Request("first", [*prompt(32), 1], 1)])
    second = engine.add_request(Request("second", [*prompt(32), 2], 4))
    engine.step()
    assert engine.counts.local_hits == 16, "the first one's second block depends on another next token"
    stale = engine.runner.memory[0, engine.runner.layout.span(1, second.block_ids[1][1])]
    stale[-1] -= 1  # as the first one's next token would have it
    with pytest.raises(OracleViolation, match="reads token 31"):
        engine.step()


def test_a_failed_load_of_several_kinds_keeps_the_local_hit_and_computes_the_rest() -> None:
    groups = KVCacheGroup(FULL, 16), KVCacheGroup(WINDOW, 16, 20), KVCacheGroup(STATE, 16)
    conduct = [JobBehavior()]
    engine = reference_engine(config_of(*groups), conduct=lambda rank, job: conduct[0])
    engine.run([Request("first", prompt(100), 2)])
    pool = engine.scheduler.kv.pool
    for published in pool.published:  # the engine itself keeps the first 64 tokens
        for block in [b for b in published.values() if engine.scheduler.kv.publishers[b][1] > 3]:
            pool.unpublish(block)
    conduct[0] = JobBehavior(failed_blocks=RangeSet.of(BlockRange(5, 1)))
    request = engine.add_request(Request("again", prompt(100), 2))
    engine.run()
    assert (engine.counts.local_hits, engine.counts.external_hits, engine.counts.failed_loads) == (64, 0, 1)
    assert request.output_token_ids == engine.finished["first"].output_token_ids
    engine.check_nothing_held()


def test_a_cache_that_knows_one_group_serves_none_of_another_kind() -> None:
    class Simple(ReferenceCache):
        @property
        def supports_kv_cache_groups(self) -> bool:
            return False

    cache: ExternalCache = Simple(16, 8)
    worker = SimulatedWorker(0, ByteSegment(8, 128).slot_view)
    with pytest.raises(ConfigError, match="one KV cache group, of full attention"):
        Engine(config_of(KVCacheGroup(WINDOW, 16, 20)), cache=cache, workers=[worker])


def test_a_match_that_ends_between_states_breaks_the_contract() -> None:
    class Shortened(ReferenceCache):
        def _find(self, keys: list[bytes], computed: int, most: int) -> int:
            return super()._find(keys, computed, most) and 40

    config = config_of(KVCacheGroup(STATE, 16), prefix_caching=False)
    engine = reference_engine(config)
    engine.cache.__class__ = Shortened
    engine.run([Request("first", prompt(100), 2)])
    with pytest.raises(PactViolation, match="P6"):
        engine.run([Request("again", prompt(100), 2)])
