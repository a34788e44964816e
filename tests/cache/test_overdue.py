"""Loads that hang: the request goes on by its deadline, in other blocks, and the copy's blocks come back at its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpact.cache.plan import PlanState
from kvpact.contract import JobOutcome, LoadJob, LoadSettlement, StepWork, WorkerReport
from kvpact.metrics import MissReason, series
from scenes import BLOCK_SIZE, Scene, SceneRequest, done, failed, tokens

DEADLINE = 3.0
BLOCKS = 6


def document(name: str, blocks: int = BLOCKS) -> SceneRequest:
    return SceneRequest(name, tokens(blocks * BLOCK_SIZE + 1))


class HangingScene(Scene):
    """A scene in which a rank carries out a load only when the test says so."""

    def __init__(self, *, ranks: int = 1, synchronous: bool = False, **settings: Any) -> None:
        limit = 1 << 30 if synchronous else 0
        super().__init__(ranks=ranks, load_deadline=DEADLINE, sync_load_budget=limit, **settings)
        self.run_cold(document("first"))

    def begin(self, request: SceneRequest) -> LoadJob:
        """Commit all that is promised; the ranks begin, and say nothing."""
        match = self.prepare(request)
        assert match.num_tokens == len(request.token_ids) - 1
        self.cache.commit_external_match(request, match, match.num_tokens, self.allocate(request))
        (job,) = self.cache.end_step().loads
        return job

    def steps(self, count: int) -> tuple[list[StepWork], list[LoadSettlement]]:
        """Steps in which nobody says anything."""
        works, settlements = [], []
        for _ in range(count):
            works.append(self.cache.end_step())
            settlements += self.cache.apply_report(WorkerReport({}))
        return works, settlements

    def say(self, job: LoadJob, outcome: JobOutcome, *, ranks: range | None = None) -> list[LoadSettlement]:
        every = range(len(self.kv)) if ranks is None else ranks
        return self.cache.apply_report(WorkerReport({rank: {job.job_id: outcome} for rank in every}))


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def scene(request: pytest.FixtureRequest) -> HangingScene:
    return HangingScene(ranks=request.param)


def test_h10_a_load_that_hangs_is_settled_as_late_at_its_deadline(scene: HangingScene) -> None:
    request = document("hangs")
    job = scene.begin(request)
    scene.now += DEADLINE
    assert scene.steps(4)[1] == []
    scene.now += 0.01
    works, settlements = scene.steps(4)
    assert job.job_id in works[0].overdue
    (settlement,) = settlements
    assert settlement.late
    assert not settlement.loaded.ranges
    assert set(settlement.failed.blocks()) == set(job.blocks)
    assert scene.cache.observe()["overdue_loads"] == 1


def test_h07_blocks_of_a_load_that_hangs_are_held_from_its_deadline_until_no_rank_can_write_them(
    scene: HangingScene,
) -> None:
    job = scene.begin(document("hangs"))
    assert not scene.blocks.held
    scene.now += DEADLINE + 1
    scene.steps(1)
    assert scene.blocks.held == dict.fromkeys(job.block_ids, 1), "before the engine is told"
    scene.steps(3)
    scene.cache.request_finished("hangs")
    scene.steps(3)
    assert set(scene.blocks.held) == set(job.block_ids)
    assert scene.cache.observe()["leases_held"] == 1, "the copy still reads its slots"
    scene.cache.check()
    every = range(len(scene.kv))
    for rank in every:
        assert scene.blocks.held
        assert scene.say(job, failed(job, job.start_block), ranks=every[rank : rank + 1]) == [], "it was told already"
    assert not scene.blocks.held
    assert scene.cache.observe()["leases_held"] == 0
    assert scene.cache.observe()["open_plans"] == 0


def test_h10_a_rank_that_never_answers_hangs_as_well() -> None:
    scene = HangingScene(ranks=2)
    job = scene.begin(document("hangs"))
    scene.now += DEADLINE + 1
    assert scene.say(job, done(job), ranks=range(1)) == []
    assert [settlement.late for settlement in scene.steps(4)[1]] == [True]
    assert set(scene.blocks.held) == set(job.block_ids)
    scene.say(job, failed(job, job.start_block), ranks=range(1, 2))
    assert not scene.blocks.held
    scene.cache.request_finished("hangs")


def test_a_load_that_ends_before_the_ranks_hear_of_its_deadline_is_loaded(scene: HangingScene) -> None:
    job = scene.begin(document("slow"))
    scene.now += DEADLINE + 1
    assert scene.steps(1)[1] == []
    (settlement,) = scene.say(job, done(job))
    assert not settlement.late
    assert set(settlement.loaded.blocks()) == set(job.blocks)
    assert scene.steps(4)[1] == []
    assert not scene.blocks.held
    assert scene.cache.observe()["overdue_loads"] == 0
    scene.cache.request_finished("slow")


def test_h09_what_hung_is_not_promised_again_to_its_request_and_stays_stored_for_others(scene: HangingScene) -> None:
    request = document("hangs")
    job = scene.begin(request)
    scene.now += DEADLINE + 1
    scene.steps(4)
    assert scene.prepare(request).num_tokens == 0
    scene.say(job, failed(job, job.start_block))
    assert scene.prepare(request).num_tokens == 0
    other = document("other")
    assert scene.prepare(other).num_tokens == BLOCKS * BLOCK_SIZE
    for name in ("hangs", "other"):
        scene.cache.request_finished(name)


def test_h10_while_a_copy_hangs_nothing_is_promised_that_would_wait_behind_it(scene: HangingScene) -> None:
    promised = document("promised before")
    assert scene.prepare(promised).num_tokens
    job = scene.begin(document("hangs"))
    scene.now += DEADLINE + 1
    scene.steps(1)
    assert scene.prepare(document("behind")).num_tokens == 0
    assert scene.prepare(promised).num_tokens == 0
    assert scene.cache.observe()[series("misses", MissReason.OVERDUE)] == 2
    scene.steps(3)
    scene.say(job, failed(job, job.start_block))
    assert scene.prepare(document("afterwards")).num_tokens == BLOCKS * BLOCK_SIZE
    for name in ("promised before", "behind", "hangs", "afterwards"):
        scene.cache.request_finished(name)


def test_h10_an_order_to_go_on_that_was_lost_is_given_again(scene: HangingScene) -> None:
    job = scene.begin(document("hangs"))
    scene.now += DEADLINE + 1
    scene.cache.end_step()  # which never reaches the ranks
    scene.cache.abandon_step(len(scene.kv))
    told = []
    for _ in range(4):
        scene.now += DEADLINE / 3
        told += [work for work in scene.steps(1)[0] if job.job_id in work.overdue]
    assert len(told) == 4
    scene.say(job, failed(job, job.start_block))
    scene.cache.request_finished("hangs")


def test_a_load_is_not_given_up_in_the_step_that_orders_it(scene: HangingScene) -> None:
    request = document("late order")
    match = scene.prepare(request)
    scene.cache.commit_external_match(request, match, match.num_tokens, scene.allocate(request))
    scene.now += DEADLINE + 1
    work = scene.cache.end_step()
    assert work.loads
    assert not work.overdue
    scene.report(work)
    scene.cache.request_finished("late order")


def test_h07_without_a_scheduler_context_a_load_is_waited_for() -> None:
    scene = HangingScene(holds_blocks=False)
    job = scene.begin(document("hangs"))
    scene.now += 10 * DEADLINE
    works, settlements = scene.steps(5)
    assert not any(work.overdue for work in works)
    assert not settlements
    assert [settlement.late for settlement in scene.say(job, done(job))] == [False]
    scene.cache.request_finished("hangs")


def test_h07_a_load_within_the_step_is_held_from_the_step_on_that_orders_it() -> None:
    scene = HangingScene(synchronous=True)
    job = scene.begin(document("hangs"))
    assert job.synchronous
    assert scene.blocks.held == dict.fromkeys(job.block_ids, 1)
    scene.now += DEADLINE + 1
    (settlement,) = scene.steps(4)[1]
    assert (settlement.late, settlement.asynchronous) == (True, False)
    assert scene.blocks.held == dict.fromkeys(job.block_ids, 1)
    scene.say(job, failed(job, job.start_block))
    assert not scene.blocks.held
    scene.cache.request_finished("hangs")


def test_a_reset_while_a_copy_hangs_ends_with_it(scene: HangingScene) -> None:
    job = scene.begin(document("hangs"))
    scene.now += DEADLINE + 1
    scene.steps(1)
    scene.cache.reset()
    (settlement,) = scene.steps(4)[1]
    assert settlement.late
    assert scene.say(job, failed(job, job.start_block)) == []
    assert not scene.blocks.held
    scene.cache.request_finished("hangs")


Move = Callable[[HangingScene, LoadJob, list[LoadSettlement]], None]


def _step(scene: HangingScene, job: LoadJob, settled: list[LoadSettlement]) -> None:
    settled += scene.steps(1)[1]


def _time(scene: HangingScene, job: LoadJob, settled: list[LoadSettlement]) -> None:
    scene.now += DEADLINE / 2


def _first_rank(scene: HangingScene, job: LoadJob, settled: list[LoadSettlement]) -> None:
    settled += scene.say(job, done(job), ranks=range(1))


def _second_rank(scene: HangingScene, job: LoadJob, settled: list[LoadSettlement]) -> None:
    settled += scene.say(job, failed(job, job.start_block + 2), ranks=range(1, 2))


def _finish(scene: HangingScene, job: LoadJob, settled: list[LoadSettlement]) -> None:
    scene.cache.request_finished("hangs")


def _ask(scene: HangingScene, job: LoadJob, settled: list[LoadSettlement]) -> None:
    scene.cache.prepare_external_match(document("other"), 0)


def _reset(scene: HangingScene, job: LoadJob, settled: list[LoadSettlement]) -> None:
    scene.cache.reset()


@settings(max_examples=150)
@given(
    moves=st.lists(st.sampled_from([_step, _step, _time, _time, _first_rank, _second_rank, _finish, _ask, _reset])),
    synchronous=st.booleans(),
)
def test_h07_h10_in_any_order_a_load_ends_once_and_its_blocks_are_held_while_it_may_be_written(
    moves: list[Move], synchronous: bool
) -> None:
    scene = HangingScene(ranks=2, synchronous=synchronous)
    job = scene.begin(document("hangs"))
    settled: list[LoadSettlement] = []
    spoken: set[Move] = set()
    for move in moves:
        move(scene, job, settled)
        spoken.add(move)
        over = {_first_rank, _second_rank} <= spoken
        late = any(settlement.late for settlement in settled)
        assert set(scene.blocks.held) >= (set(job.block_ids) if late and not over else set())
        assert not (over and scene.blocks.held)
        scene.cache.check()
    scene.now += DEADLINE + 1
    settled += scene.steps(4)[1]
    assert len(settled) == 1, "once, and by the deadline"
    _first_rank(scene, job, settled)
    _second_rank(scene, job, settled)
    settled += scene.steps(3)[1]
    assert len(settled) == 1
    for name in ("hangs", "other"):
        scene.cache.request_finished(name)
    assert not scene.blocks.held
    assert scene.cache.observe()["leases_held"] == 0
    assert all(plan.state is not PlanState.LOADING for plan in scene.cache.ledger.open_plans())
    cast(Scene, scene).close()
