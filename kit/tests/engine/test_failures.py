"""Loads that fail, wholly or in part, on some ranks or all, early or late: exact recomputation, nothing published
early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from workloads import outputs_of, prompt, waiting_for_load

from kvpact.contract import JobOutcome, LoadJob, LoadSettlement, WorkerReport
from kvpact.errors import PactViolation
from kvpact.ranges import BlockRange, RangeSet
from kvpact_testkit.engine import (
    ByteSegment,
    Engine,
    EngineConfig,
    EngineQuirks,
    GroupKind,
    JobBehavior,
    KVCacheGroup,
    OracleViolation,
    ReferenceCache,
    Request,
    RequestStatus,
    SimulatedWorker,
    reference_engine,
)
from kvpact_testkit.engine.simulated_worker import Job

CONFIG = EngineConfig(num_blocks=60, num_ranks=2, num_layers=2, prefix_caching=False)
PREFIX = prompt(96, 42)


def blocks(*numbers: int) -> RangeSet:
    return RangeSet.of(*(BlockRange(number, 1) for number in numbers))


def warm(outputs: int = 3, name: str = "warm", tail: int = 7) -> Request:
    """A request of 116 tokens, 96 of them (6 blocks) stored."""
    return Request(name, [*PREFIX, *prompt(20, tail)], outputs)


def right_output(outputs: int = 3) -> list[int]:
    engine = Engine()
    engine.run([warm(outputs)])
    return engine.finished["warm"].output_token_ids


def failing(conducts: dict[int, JobBehavior]) -> Callable[[int, Job], JobBehavior]:
    """How each rank carries out loads; saves are faithful."""

    def conduct(rank: int, job: Job) -> JobBehavior:
        return conducts.get(rank, JobBehavior()) if isinstance(job, LoadJob) else JobBehavior()

    return conduct


def engine_with(
    conducts: dict[int, JobBehavior],
    *,
    asynchronous: bool,
    quirks: EngineQuirks | None = None,
    config: EngineConfig = CONFIG,
    cache: ReferenceCache | None = None,
) -> Engine:
    if cache is None:
        engine = reference_engine(config, quirks, asynchronous=asynchronous, conduct=failing(conducts))
    else:
        segments = [ByteSegment(256, config.num_layers * config.page_bytes) for _ in range(config.num_ranks)]
        workers = [SimulatedWorker(rank, each.slot_view, failing(conducts)) for rank, each in enumerate(segments)]
        engine = Engine(config, quirks, cache, workers)
    engine.run([Request("cold", PREFIX, 1)])
    engine.scheduler.kv.pool.unpublish_all()
    engine.counts.computed = 0
    return engine


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("failed", "used"), [(blocks(0), 80), (blocks(2), 80), (blocks(5), 80), (blocks(1, 4), 32), (blocks(*range(6)), 0)]
)
def test_p9_exactly_the_failed_range_is_computed_again(failed: RangeSet, used: int, asynchronous: bool) -> None:
    engine = engine_with({1: JobBehavior(failed_blocks=failed)}, asynchronous=asynchronous)
    engine.run([warm()])
    assert engine.finished["warm"].output_token_ids == right_output()
    assert engine.counts.external_hits == engine.counts.loaded == used
    assert engine.counts.failed == 96 - used
    thrown_away = 0 if asynchronous else 20  # the step that carried the synchronous load
    assert engine.counts.computed == 96 - used + 20 + 2 + thrown_away
    engine.check_nothing_held()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("failed", [blocks(0), blocks(1, 4), blocks(2)])
def test_p9_holds_while_the_next_step_is_scheduled_ahead(failed: RangeSet, asynchronous: bool) -> None:
    """A hole is not skipped over before the step that computes it is done."""
    for budget in (10, 512):
        config = replace(CONFIG, max_tokens_per_step=budget, prefix_caching=True)
        quirks = EngineQuirks(async_scheduling=True)
        engine = engine_with(
            {0: JobBehavior(failed_blocks=failed)}, asynchronous=asynchronous, quirks=quirks, config=config
        )
        engine.add_request(warm(20))
        while engine.has_work:
            engine.step()
            engine.check()
        assert engine.finished["warm"].output_token_ids == right_output(20)
        assert engine.counts.external_hits == engine.counts.loaded
        engine.check_nothing_held()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_engine_that_truncates_computes_all_behind_the_failure(asynchronous: bool) -> None:
    quirks = EngineQuirks(truncates_at_failure=True)
    engine = engine_with({0: JobBehavior(failed_blocks=blocks(2))}, asynchronous=asynchronous, quirks=quirks)
    engine.run([warm()])
    assert engine.finished["warm"].output_token_ids == right_output()
    assert engine.counts.external_hits == 32


def test_h28_a_failed_load_leaves_nothing_in_the_prefix_cache() -> None:
    config = replace(CONFIG, prefix_caching=True)
    for asynchronous in (False, True):
        engine = engine_with({0: JobBehavior(failed_blocks=blocks(2))}, asynchronous=asynchronous, config=config)
        engine.add_request(warm())
        while not engine.counts.failed_loads:
            engine.step()
            engine.check()
        engine.cancel("warm")  # before it computes the failed range
        engine.run([warm(name="next", tail=8)])
        assert engine.counts.local_hits == 32
        engine.check_nothing_held()


def test_h28_stock_engines_poison_their_prefix_cache_and_the_oracle_sees_it() -> None:
    """A synchronous load fails, its request is cancelled before it recomputes: the next one hits what never came."""
    config = replace(CONFIG, prefix_caching=True)
    quirks = replace(EngineQuirks.vllm_0_32(), async_scheduling=False)
    engine = engine_with({0: JobBehavior(failed_blocks=blocks(2))}, asynchronous=False, quirks=quirks, config=config)
    engine.add_request(warm())
    while not engine.counts.failed_loads:
        engine.step()
    engine.cancel("warm")
    with pytest.raises(OracleViolation, match="P8: a published block is not valid"):
        engine.check()
    with pytest.raises(OracleViolation, match="request next reads token 40 in block"):
        engine.run([warm(name="next", tail=8)])


def test_h27_blocks_copied_out_slowly_must_be_held_and_the_oracle_sees_it_if_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Saves take 6 steps; the request ends meanwhile and others get its blocks."""
    slow = JobBehavior(copy_after_steps=6)
    for holds in (True, False):
        config = replace(CONFIG, num_blocks=10, num_ranks=1)
        engine = reference_engine(
            config, conduct=lambda _, job: JobBehavior() if isinstance(job, LoadJob) else slow, num_slots=400
        )
        if not holds:
            monkeypatch.setattr(engine.context, "touch", lambda block_ids: None)
            monkeypatch.setattr(engine.context, "free_blocks", lambda block_ids: None)
        engine.run([Request("first", PREFIX, 1), *(Request(f"o{i}", prompt(110, 60 + i), 2) for i in range(4))])
        if holds:
            engine.run([warm()])
            assert engine.finished["warm"].output_token_ids == right_output()
            engine.check_nothing_held()
        else:
            with pytest.raises(OracleViolation, match=r"finds token .* of request o"):
                engine.run([warm()])


def test_h29_tokens_in_flight_are_not_computed_and_not_published() -> None:
    config = replace(CONFIG, prefix_caching=True)
    engine = engine_with({1: JobBehavior(copy_after_steps=4)}, asynchronous=True, config=config)
    request = engine.add_request(warm())
    engine.step()
    for _ in range(3):
        assert waiting_for_load(engine) == [request]
        assert (request.num_computed_tokens, request.num_inflight_external_tokens) == (0, 96)
        assert not engine.scheduler.kv.pool.published[0]
        engine.step()
        engine.check()
    engine.step()
    assert (request.num_computed_tokens, request.num_inflight_external_tokens) == (96, 0)
    engine.check()
    engine.run()
    assert engine.finished["warm"].output_token_ids == right_output()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("cached", [1, 15, 17, 40, 95])
def test_h30_a_load_may_end_inside_a_block(cached: int, asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `cached` tokens are taken of the match; the rest of the last block is computed, over what the load left
    there."""
    engine = engine_with({}, asynchronous=asynchronous, config=replace(CONFIG, prefix_caching=True))
    cache = engine.cache
    assert cache is not None
    commit = cache.commit_external_match
    monkeypatch.setattr(
        cache, "commit_external_match", lambda request, match, n, ids: commit(request, match, min(n, cached), ids)
    )
    engine.add_request(warm())
    while engine.has_work:
        engine.step()
        engine.check()
    assert engine.counts.external_hits == cached
    assert engine.finished["warm"].output_token_ids == right_output()


def test_h30_the_end_of_a_partial_block_is_not_published_as_loaded() -> None:
    engine = engine_with({}, asynchronous=True, config=replace(CONFIG, prefix_caching=True))
    request = Request("r", PREFIX[:40], 1)
    engine.scheduler.add_request(request)
    assert engine.scheduler.kv.admit(request, engine.scheduler.kv.find_hit(request), 40, 0)
    engine.scheduler.kv.publish(request, 40)
    assert [engine.context.get_block(block).block_hash is not None for block in request.block_ids[0]] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_h40_a_rank_that_says_nothing_settles_nothing(asynchronous: bool) -> None:
    engine = engine_with({1: JobBehavior(times_reported=0)}, asynchronous=asynchronous)
    request = engine.add_request(warm())
    for _ in range(10):
        engine.step()
    assert request.status is RequestStatus.WAITING_FOR_LOAD
    assert request.num_computed_tokens == 0
    assert request.output_token_ids == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_h41_failed_ranges_combine_to_their_hull(asynchronous: bool) -> None:
    conducts = {0: JobBehavior(failed_blocks=blocks(1)), 1: JobBehavior(failed_blocks=blocks(4))}
    engine = engine_with(conducts, asynchronous=asynchronous)
    engine.run([warm()])
    assert engine.counts.failed == 4 * 16
    assert engine.counts.external_hits == 2 * 16
    assert engine.finished["warm"].output_token_ids == right_output()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_h45_ranks_may_report_in_different_steps_in_pieces_and_twice(asynchronous: bool) -> None:
    conducts = {
        0: JobBehavior(report_after_steps=5, times_reported=2),
        1: JobBehavior(copy_after_steps=2, block_by_block=True, times_reported=3, failed_blocks=blocks(3)),
    }
    engine = engine_with(conducts, asynchronous=asynchronous)
    engine.add_request(warm(20))
    while engine.has_work:
        engine.step()
        engine.check()
    assert engine.finished["warm"].output_token_ids == right_output(20)
    assert engine.counts.external_hits == 80
    engine.check_nothing_held()


def test_a_synchronous_load_without_report_is_waited_for_and_its_step_does_not_count() -> None:
    engine = engine_with({0: JobBehavior(report_after_steps=3)}, asynchronous=False)
    request = engine.add_request(warm())
    engine.step()
    assert request.status is RequestStatus.WAITING_FOR_LOAD
    assert (request.num_computed_tokens, request.num_inflight_external_tokens) == (0, 96)
    engine.run()
    assert engine.counts.external_hits == 96
    assert engine.finished["warm"].output_token_ids == right_output()


def test_a_worker_that_lies_is_found_at_the_first_read() -> None:
    for asynchronous in (False, True):
        engine = engine_with({1: JobBehavior(damaged_blocks=blocks(3))}, asynchronous=asynchronous)
        with pytest.raises(OracleViolation, match=r"request warm reads token 56 .*rank 1, layer 0\) and finds nothing"):
            engine.run([warm()])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_load_may_fail_the_request(asynchronous: bool) -> None:
    quirks = replace(EngineQuirks.vllm_0_32(), load_failure="fail", async_scheduling=False)
    config = replace(CONFIG, prefix_caching=True)
    engine = engine_with(
        {0: JobBehavior(failed_blocks=blocks(2))}, asynchronous=asynchronous, quirks=quirks, config=config
    )
    request = engine.add_request(warm())
    engine.run()
    assert request.status is RequestStatus.FAILED
    assert "warm" not in engine.finished
    engine.check_nothing_held()


@pytest.mark.parametrize("preset", EngineQuirks.presets())
def test_several_groups_fail_as_the_engine_can(preset: str) -> None:
    """A part of a load is no match: the windows at its end were not loaded. Stock engines lose local hits too."""
    quirks = EngineQuirks.presets()[preset]
    groups = (KVCacheGroup(GroupKind.FULL, 16), KVCacheGroup(GroupKind.WINDOW, 16, 40))
    config = replace(CONFIG, groups=groups, num_blocks=120)
    engine = engine_with({0: JobBehavior(failed_blocks=blocks(4))}, asynchronous=True, quirks=quirks, config=config)
    engine.run([warm()])
    assert engine.finished["warm"].output_token_ids == right_output()
    assert engine.counts.failed_loads == 1
    assert engine.counts.external_hits == 0
    engine.check_nothing_held()


def test_h09_a_load_that_always_fails_livelocks_a_stock_engine_unless_the_cache_remembers() -> None:
    quirks = EngineQuirks.vllm_0_32()
    for remembers in (True, False):
        cache = None if remembers else NeverRemembers()
        engine = engine_with({0: JobBehavior(failed_blocks=blocks(0))}, asynchronous=True, quirks=quirks, cache=cache)
        engine.add_request(warm())
        if remembers:
            engine.run()
            assert engine.counts.commits == 1
            assert outputs_of(engine)["warm"] == right_output()
        else:
            with pytest.raises(PactViolation, match="P11"):
                engine.run(max_steps=200)
            assert engine.counts.commits > 40
            assert engine.counts.computed == 0


class NeverRemembers(ReferenceCache):
    """Tells the engine that the first block of a load failed, and goes on as if all had arrived."""

    def __init__(self) -> None:
        super().__init__(CONFIG.block_size, 256, num_ranks=CONFIG.num_ranks)

    def apply_report(self, report: WorkerReport) -> list[LoadSettlement]:
        ranks = {
            rank: {job_id: JobOutcome(outcome.done.union(outcome.failed)) for job_id, outcome in outcomes.items()}
            for rank, outcomes in report.ranks.items()
        }
        return [
            replace(settled, loaded=settled.loaded.difference(blocks(0)), failed=blocks(0))
            for settled in super().apply_report(replace(report, ranks=ranks))
        ]


def test_h09_natively_even_a_forgetful_cache_cannot_livelock_a_request() -> None:
    engine = engine_with({0: JobBehavior(failed_blocks=blocks(0))}, asynchronous=True, cache=NeverRemembers())
    engine.run([warm()])
    assert engine.counts.commits == 1
    assert engine.finished["warm"].output_token_ids == right_output()


@pytest.mark.parametrize(
    "settlement",
    [
        LoadSettlement("warm", RangeSet.span(0, 5), RangeSet(), True),
        LoadSettlement("warm", RangeSet.span(0, 6), RangeSet.span(5, 6), True),
        LoadSettlement("warm", RangeSet.span(0, 7), RangeSet(), True),
    ],
)
def test_p7_a_settlement_must_name_every_committed_block_once(settlement: LoadSettlement) -> None:
    engine = engine_with({}, asynchronous=True)
    assert engine.cache is not None
    engine.add_request(warm())
    engine.cache.apply_report = lambda report: [settlement]  # type: ignore[method-assign]
    with pytest.raises(PactViolation, match="P7: request warm committed blocks 0 to 5"):
        engine.step()


def test_queued_requests_with_loaded_blocks_give_way_when_nothing_else_moves() -> None:
    """Three loads fill the pool, and no request has room for its own tokens: the last ones are given up."""
    config = replace(CONFIG, num_blocks=19, num_ranks=1)
    engine = engine_with({}, asynchronous=True, config=config)
    requests = [warm(30, f"r{i}", 7) for i in range(3)]
    engine.run(requests)
    assert {tuple(tokens) for name, tokens in outputs_of(engine).items() if name != "cold"} == {tuple(right_output(30))}
    engine.check_nothing_held()
