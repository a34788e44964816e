"""Unmodified tuple connectors under the contract, alone and beside a contract-native cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
from workloads import assert_answers_as_without_a_cache, outputs_of, plain_outputs, prompt, workload

from kvpact.errors import PactViolation
from kvpact_testkit.engine import (
    ByteSegment,
    Engine,
    EngineConfig,
    EngineQuirks,
    MultiCache,
    MultiWorker,
    ReferenceCache,
    Request,
    SimulatedWorker,
    V1ConnectorCache,
    V1ConnectorWorker,
)
from tuple_connector import Store, TupleScheduler, TupleWorker

NO_REUSE = EngineConfig(num_blocks=60, num_ranks=2, num_layers=2, prefix_caching=False)


def v1_connector_parts(
    config: EngineConfig, *, asynchronous: bool = False, keeps_blocks: bool = False
) -> tuple[TupleScheduler, V1ConnectorCache, list[V1ConnectorWorker]]:
    store = Store(num_planes=config.num_ranks * config.num_layers)
    scheduler = TupleScheduler(store, config.block_size, asynchronous=asynchronous, keeps_blocks=keeps_blocks)
    workers = []
    for rank in range(config.num_ranks):
        worker = TupleWorker(store, rank)
        worker.asynchronous = asynchronous
        workers.append(V1ConnectorWorker(worker, rank))
    return scheduler, V1ConnectorCache(scheduler, config.block_size, config.num_ranks), workers


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("keeps_blocks", [False, True])
@pytest.mark.parametrize("preset", EngineQuirks.presets())
def test_a_tuple_connector_serves_under_the_contract(preset: str, keeps_blocks: bool, asynchronous: bool) -> None:
    quirks = replace(EngineQuirks.presets()[preset], commits_async_late=False)
    hits = 0
    for seed in range(3):
        _, cache, workers = v1_connector_parts(NO_REUSE, asynchronous=asynchronous, keeps_blocks=keeps_blocks)
        engine = Engine(NO_REUSE, quirks, cache, workers)
        engine.run(workload(seed))
        assert outputs_of(engine) == plain_outputs(seed)
        engine.check_nothing_held()
        hits += engine.counts.external_hits
    assert hits > 300


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_tuple_connector_survives_cancellation_and_preemption(asynchronous: bool) -> None:
    config = replace(NO_REUSE, num_blocks=16)
    for seed in range(4):
        _, cache, workers = v1_connector_parts(config, asynchronous=asynchronous, keeps_blocks=True)
        engine = Engine(config, EngineQuirks.native(), cache, workers)
        assert_answers_as_without_a_cache(engine, seed)
        engine.check_nothing_held()


def test_a_failed_load_of_a_tuple_connector_is_computed_again() -> None:
    for asynchronous in (False, True):
        _, cache, workers = v1_connector_parts(NO_REUSE, asynchronous=asynchronous)
        engine = Engine(NO_REUSE, cache=cache, workers=workers)
        tokens = prompt(100)
        engine.run([Request("cold", tokens, 4)])
        warm = engine.add_request(Request("warm", tokens, 4))
        engine.scheduler.kv.pool.touch(5)  # so that the block ids are known
        free = [view.block_id for view in engine.context.iter_free_blocks()]
        workers[1].connector.broken_blocks = {free[2]}  # type: ignore[attr-defined]
        engine.run()
        engine.scheduler.kv.pool.free([5])
        assert engine.counts.failed_loads == 1
        assert engine.counts.loaded == engine.counts.committed - 16
        assert warm.output_token_ids == engine.finished["cold"].output_token_ids


def test_h02_a_blocked_request_is_looked_up_once_while_its_match_is_open() -> None:
    scheduler, cache, workers = v1_connector_parts(NO_REUSE)
    Engine(NO_REUSE, cache=cache, workers=workers).run([Request("cold", prompt(40))])
    scheduler.lookups = 0
    request = Request("r", prompt(40))
    first = cache.prepare_external_match(request, 0)
    assert cache.prepare_external_match(request, 0) is first
    assert scheduler.lookups == 1
    cache.abort_external_match("r", first, "declined")
    assert first is not None
    assert first.num_tokens == 32
    cache.prepare_external_match(request, 0)
    assert scheduler.lookups == 2


def test_h06_a_match_of_the_whole_prompt_is_cut_by_its_last_token() -> None:
    _, cache, workers = v1_connector_parts(NO_REUSE)
    engine = Engine(NO_REUSE, cache=cache, workers=workers)
    tokens = prompt(64)
    engine.run([Request("cold", tokens, 3)])
    engine.run([Request("warm", tokens, 3)])
    assert engine.counts.committed == 63
    assert engine.finished["warm"].output_token_ids == engine.finished["cold"].output_token_ids


def test_admission_without_a_match_is_told_as_an_allocation_of_zero() -> None:
    scheduler, cache, workers = v1_connector_parts(NO_REUSE)
    Engine(NO_REUSE, cache=cache, workers=workers).run([Request("a", prompt(40)), Request("b", prompt(40))])
    assert scheduler.allocations == [("a", 0), ("b", 0)]


def multi_engine(
    quirks: EngineQuirks, config: EngineConfig = NO_REUSE, *, asynchronous: bool = True
) -> tuple[Engine, ReferenceCache, TupleScheduler]:
    scheduler, legacy, v1_connector_workers = v1_connector_parts(config, asynchronous=not asynchronous)
    native = ReferenceCache(config.block_size, 40, num_ranks=config.num_ranks, asynchronous=asynchronous)
    workers = []
    for rank, v1_connector_worker in enumerate(v1_connector_workers):
        segment = ByteSegment(40, config.num_layers * config.page_bytes)
        workers.append(MultiWorker([SimulatedWorker(rank, segment.slot_view), v1_connector_worker]))
    return Engine(config, quirks, MultiCache([native, legacy]), workers), native, scheduler


@pytest.mark.parametrize("asynchronous", [False, True])
def test_both_kinds_of_cache_run_in_one_engine(asynchronous: bool) -> None:
    for seed in range(4):
        engine, native, _ = multi_engine(EngineQuirks.native(), asynchronous=asynchronous)
        assert_answers_as_without_a_cache(engine, seed)
        engine.check_nothing_held()
        assert not native.plans
        assert all(entry.holds == 0 for entry in native.entries.values())


def test_the_longest_match_wins_and_the_loser_is_aborted() -> None:
    engine, native, scheduler = multi_engine(EngineQuirks.vllm_0_32())
    tokens = prompt(120)
    engine.run([Request("cold", tokens, 1)])
    for key in [key for key, entry in native.entries.items() if entry.slot >= 2]:
        native.free_slots.append(native.entries.pop(key).slot)  # the native cache keeps two blocks
    engine.run([Request("long", tokens, 1)])
    assert scheduler.allocations[-1] == ("long", 112)
    assert not native.plans
    assert all(entry.holds == 0 for entry in native.entries.values())
    scheduler.store.blocks.clear()
    engine.run([Request("short", tokens, 1)])
    assert engine.counts.external_hits == 112 + 112  # the native cache had saved the rest again
    engine.check_nothing_held()


def test_a_match_that_is_not_the_open_plan_is_refused() -> None:
    _, cache, _ = v1_connector_parts(NO_REUSE)
    request = Request("r", prompt(40))
    match = cache.prepare_external_match(request, 0)
    assert match is not None
    with pytest.raises(PactViolation, match="not its open plan"):
        cache.commit_external_match(request, match, 16, [1, 2, 3])
