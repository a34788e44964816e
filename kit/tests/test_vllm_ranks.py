"""Several ranks and stages of `PactConnector` on vLLM's real scheduler: what the ledger and the index say of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import torch

from kvpact.cache.cache import PactCache
from kvpact.contract import JobOutcome, WorkerReport
from kvpact.errors import ConfigError
from kvpact.vllm.messages import PactWorkerMetadata
from kvpact_testkit.vllm.adapters import PactAdapter
from kvpact_testkit.vllm.compat import EngineSettings
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, prompt
from rank_faults import RankFaultPlan, RankFaults

BLOCKS = 10
HANGS = 30.0
"""Seconds that a copy hangs at most."""
TOKENS = prompt(1, BLOCKS)
LAYOUTS = [pytest.param({"ranks": 2}, id="ranks"), pytest.param({"stages": 2, "layers": 3}, id="stages")]
SAME_KV = {"ranks": 2, "latent": True}
"""Both ranks hold the same keys and values, as with MLA: the first one stores them."""
WITH_SAME_KV = [*LAYOUTS, pytest.param(SAME_KV, id="same")]


@contextmanager
def engine_with(layout: dict[str, Any], **settings: object) -> Iterator[VllmEngine]:
    """An engine with kvpact on these ranks and stages, that loads asynchronously."""
    config = {"memory": "1MiB", "model_id": "testkit", "sync_load_budget": 0, **settings}
    transfer = {
        "kv_connector": "PactConnector",
        "kv_connector_module_path": "kvpact.vllm",
        "kv_connector_extra_config": config,
    }
    engine = VllmEngine(EngineSettings(**layout), transfer, lambda line: None)
    try:
        yield engine
    finally:
        engine.close()


def cache_of(engine: VllmEngine) -> PactCache:
    cache: PactCache = engine.connector.scheduler_side.cache
    return cache


def ask(engine: VllmEngine, name: str, tokens: list[int] = TOKENS) -> int:
    """Have a prompt answered, rightly, by what is outside of the engine; the tokens loaded for it."""
    assert engine.drain()
    assert engine.forget_computed()
    engine.add(name, tokens, max_tokens=4)
    assert engine.finish(name)
    assert engine.drain()
    assert engine.observed.outputs[name] == engine.expected(name)
    assert not engine.observed.wrong_slots
    assert not engine.wrong_published()
    cache_of(engine).check()
    return engine.observed.committed_tokens(name)


def assert_at_rest(engine: VllmEngine) -> None:
    assert engine.drain()
    assert not engine.held_blocks
    assert not any(PactAdapter().held(engine.connector).values())


def fail(engine: VllmEngine, worker: int, **blocks: list[int]) -> None:
    PactAdapter().fail_blocks(engine, worker, **{"loads": [], "saves": [], **blocks})


@pytest.mark.parametrize("layout", WITH_SAME_KV)
@pytest.mark.parametrize("delays", [[0, 0], [0, 4], [3, 0]], ids=str)
def test_h41_the_hull_of_what_ranks_failed_is_counted_and_gone_everywhere(
    layout: dict[str, Any], delays: list[int], tmp_path: Path
) -> None:
    with engine_with(layout, tiers=[f"disk://{tmp_path}?capacity=4MiB"]) as engine:
        assert ask(engine, "first") == 0
        fail(engine, 0, loads=[6], saves=[*range(BLOCKS)])
        fail(engine, 1, loads=[2, 3])
        engine.report_delay = delays
        assert ask(engine, "victim") == BLOCKS * BLOCK
        counts = cache_of(engine).observe()
        assert counts["failed_tokens"] == 5 * BLOCK, "the hull of blocks 2 to 3 and 6"
        assert counts["loaded_tokens"] == (BLOCKS - 5) * BLOCK
        assert counts["used_tokens"] == 2 * BLOCK
        (reported,) = [frozenset().union(*engine.observed.invalid_blocks)]
        assert len(reported) == 3, "the engine is told of the blocks that failed, and takes the first one as the end"
        assert counts['held_blocks{tier="memory"}'] == 2
        deadline = time.monotonic() + 10  # a thread of the tier deletes them there; they are not promised meanwhile
        while counts['held_blocks{tier="disk"}'] != 2:
            assert time.monotonic() < deadline, counts
            time.sleep(0.01)
            counts = cache_of(engine).observe()
        fail(engine, 0)
        fail(engine, 1)
        assert ask(engine, "again") == 2 * BLOCK
        assert ask(engine, "once more") == BLOCKS * BLOCK
        assert_at_rest(engine)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("delays", [[0, 0], [0, 4], [3, 0]], ids=str)
def test_h42_saves_with_gaps_count_up_to_the_first_gap_of_any_rank(layout: dict[str, Any], delays: list[int]) -> None:
    with engine_with(layout) as engine:
        fail(engine, 0, saves=[7])
        fail(engine, 1, saves=[4])
        engine.report_delay = delays
        assert ask(engine, "first") == 0
        fail(engine, 0)
        fail(engine, 1)
        assert ask(engine, "again") == 4 * BLOCK
        assert ask(engine, "once more") == BLOCKS * BLOCK
        assert_at_rest(engine)


@pytest.mark.parametrize("layout", WITH_SAME_KV)
def test_h40_every_rank_says_something_true_in_every_step(layout: dict[str, Any]) -> None:
    with engine_with(layout) as engine:
        said: list[list[Any]] = [[], []]

        def noted(worker: int, report: WorkerReport) -> WorkerReport:
            said[worker].append(report)
            return report

        for worker in (0, 1):
            tap(engine, worker, partial(noted, worker))
        ask(engine, "first")
        ask(engine, "again")
        assert len(said[0]) == len(said[1]) == engine.observed.steps
        assert all(report and set(report.ranks) == {worker} for worker in (0, 1) for report in said[worker])
        assert any(not jobs for report in said[0] for jobs in report.ranks.values()), (
            "also when there is nothing to say"
        )


@pytest.mark.parametrize("layout", WITH_SAME_KV)
@pytest.mark.parametrize("seed", range(4))
def test_h45_reports_come_late_in_pieces_twice_in_any_order_or_only_when_asked_for(
    layout: dict[str, Any], seed: int
) -> None:
    def delivered(faults: RankFaults, lost: Lost, report: WorkerReport) -> WorkerReport:
        return combined(faults.deliver([lost(report)]))

    with engine_with(layout, load_deadline="300ms") as engine:
        for worker in (0, 1):
            faults = RankFaults(RankFaultPlan(seed=10 * seed + worker, late=0.4, repeated=0.3, in_pieces=0.4))
            lost = Lost(every=3)
            tap(engine, worker, partial(delivered, faults, lost))
        for number in range(4):
            assert ask(engine, f"first{number}", prompt(number, BLOCKS)) == 0
        for number in range(4):
            assert ask(engine, f"again{number}", prompt(number, BLOCKS)) == BLOCKS * BLOCK
        counts = cache_of(engine).observe()
        assert counts["loaded_tokens"] == 4 * BLOCKS * BLOCK >= counts["used_tokens"]
        assert counts["saved_blocks"] == 4 * BLOCKS
        assert_at_rest(engine)


class Lost:
    """Loses what is first said of every third job; it is said again when the scheduler's half asks."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._lost: set[int] = set()

    def __call__(self, report: WorkerReport) -> WorkerReport:
        return WorkerReport({rank: self._without_lost(jobs) for rank, jobs in report.ranks.items()})

    def _without_lost(self, jobs: Mapping[int, JobOutcome]) -> dict[int, JobOutcome]:
        lost = {job for job in jobs if job % self._every == 0} - self._lost
        self._lost |= lost
        return {job: outcome for job, outcome in jobs.items() if job not in lost}


def combined(reports: list[WorkerReport]) -> WorkerReport:
    """All that a rank says in one step; what names it comes first."""
    first, *others = reports
    for report in others:
        first = first.aggregate(report)
    return first


def tap(engine: VllmEngine, worker: int, change: Callable[[WorkerReport], WorkerReport]) -> None:
    """Let `change` stand between a rank's report and the engine."""
    connector = engine.ranks[worker].connector
    build = connector.build_connector_worker_meta
    connector.build_connector_worker_meta = lambda: PactWorkerMetadata.of(change(build().message()))


@pytest.mark.parametrize("layout", WITH_SAME_KV)
def test_h43_no_rank_waits_for_another_one(layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing collective: every operation of `torch.distributed` raises, and the groups of ranks refuse theirs."""
    for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier"):
        monkeypatch.setattr(torch.distributed, name, refuse)
    with engine_with(layout) as engine:
        assert ask(engine, "first") == 0
        assert ask(engine, "again") == BLOCKS * BLOCK
        assert cache_of(engine).observe()["hook_errors"] == 0
        assert all(rank.connector.metrics.snapshot().get("hook_errors", 0) == 0 for rank in engine.ranks)


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("a collective operation in a step")


@pytest.mark.parametrize("layout", WITH_SAME_KV)
def test_h40_a_rank_that_does_not_say_where_its_memory_is_stops_the_start(layout: dict[str, Any]) -> None:
    with engine_with(layout) as engine:
        hello = engine.ranks[0].connector.get_handshake_metadata()
        with pytest.raises(ConfigError, match=r"the engine has 2 ranks; \[0\] have set up their memory"):
            engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): hello})


@pytest.mark.parametrize("delays", [[0, 0], [0, 4], [3, 0]], ids=str)
def test_p10_a_save_is_as_good_as_the_copy_of_the_rank_that_stores(delays: list[int]) -> None:
    """The other rank says at once that all is done: blocks that the first one could not write are not found."""
    with engine_with(SAME_KV) as engine:
        fail(engine, 0, saves=[7])
        fail(engine, 1, saves=[4])
        engine.report_delay = delays
        assert ask(engine, "first") == 0
        fail(engine, 0)
        assert ask(engine, "again") == 7 * BLOCK, "the other rank has copied nothing, and nothing of it can fail"
        assert ask(engine, "once more") == BLOCKS * BLOCK
        assert cache_of(engine).observe()["saved_blocks"] == BLOCKS
        assert_at_rest(engine)


@pytest.mark.parametrize("silent", [0, 1])
def test_p10_a_silent_rank_means_not_stored_and_not_loaded_whether_it_stores_or_not(silent: int) -> None:
    with engine_with(SAME_KV, load_deadline="300ms", plan_lifetime="300ms") as engine:
        engine.ranks[silent].mute = True
        engine.add("first", TOKENS, max_tokens=4)
        assert engine.finish("first")
        assert cache_of(engine).observe()["saved_blocks"] == 0
        engine.ranks[silent].mute = False
        assert ask(engine, "computed") == 0, "what the silent rank never heard of has failed"
        assert ask(engine, "again") == BLOCKS * BLOCK
        assert_at_rest(engine)


def test_ranks_with_the_same_keys_and_values_share_with_engines_of_any_number_of_ranks(tmp_path: Path) -> None:
    """MLA: a record has the bytes of one rank, whatever their number; one engine with four stores for all."""
    tiers = [f"dir://{tmp_path}?capacity=64MiB"]
    for ranks, hit in ((4, 0), (2, BLOCKS * BLOCK), (1, BLOCKS * BLOCK)):
        with engine_with({"ranks": ranks, "latent": True}, tiers=tiers) as engine:
            assert ask(engine, "asked") == hit, f"{ranks} ranks"
    with engine_with({"stages": 2, "latent": True}, tiers=tiers) as engine:
        assert ask(engine, "asked") == 0, "a stage has other layers"


def test_h23_engines_of_another_parallel_layout_share_nothing(tmp_path: Path) -> None:
    """A slot holds one rank's heads beside the next one's, and one stage's layers behind the other's."""
    tiers = [f"dir://{tmp_path}?capacity=64MiB"]
    layouts = [{"layers": 2}, {"layers": 2, "ranks": 2}, {"layers": 2, "stages": 2}]
    for layout in layouts:
        with engine_with(layout, tiers=tiers) as engine:
            assert ask(engine, "first") == 0, f"{layout} loads what another layout stored"
    for layout in layouts:
        with engine_with(layout, tiers=tiers) as engine:
            assert ask(engine, "again") == BLOCKS * BLOCK, f"{layout} does not find its own"


@pytest.mark.parametrize("layout", WITH_SAME_KV)
@pytest.mark.parametrize("delays", [[0, 0], [0, 4], [3, 0]], ids=str)
def test_h10_a_rank_whose_copy_hangs_holds_nobody_up(layout: dict[str, Any], delays: list[int]) -> None:
    """The other rank has loaded all; the request is computed, and both ranks' blocks come back when the copy ends."""
    with engine_with(layout, load_deadline="300ms") as engine:
        assert ask(engine, "first") == 0
        assert engine.forget_computed()
        go_on = threading.Event()
        copier: Any = engine.ranks[1].connector.cache_worker.transfers.engine.copier
        scatter = copier.scatter

        def hang(layer: int, plan: Any) -> None:
            go_on.wait(HANGS)
            scatter(layer, plan)

        copier.scatter = hang
        engine.report_delay = delays
        began = time.monotonic()
        engine.add("hangs", TOKENS, max_tokens=4)
        assert engine.finish("hangs")
        assert 0.3 < time.monotonic() - began < HANGS / 2
        assert engine.observed.outputs["hangs"] == engine.expected("hangs")
        assert engine.held_blocks == BLOCKS
        go_on.set()
        assert ask(engine, "afterwards") in (0, BLOCKS * BLOCK)
        assert ask(engine, "again") == BLOCKS * BLOCK
        assert cache_of(engine).observe()["overdue_loads"] == 1
        assert_at_rest(engine)
