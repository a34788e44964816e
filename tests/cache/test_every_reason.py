"""Every reason and every counter that the documents promise is produced by something that happens to a cache (H74)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_misses import CAUSES

from kvpact.config import load_config
from kvpact.contract import POSTPONED_STEPS, ExternalMatchExit, WorkerReport
from kvpact.metrics import METRICS, EndReason, MissReason, series, tiers_in
from kvpact_testkit.faults import Fault, Faults, FaultyTier, Operation
from kvpact_testkit.tier.stepped_executor import SteppedExecutor
from scenes import BLOCK_SIZE, Scene, SceneRequest, failed, open_disk, tokens

BLOCKS = 4


def request(name: str, blocks: int = BLOCKS, seed: int = 0) -> SceneRequest:
    return SceneRequest(name, tokens(blocks * BLOCK_SIZE + 1, seed))


class Situation(Scene):
    """A cache in which one prompt is stored, above a disk tier that works and fails when told to."""

    def __init__(self, place: Path, slots: int = 16, **settings: Any) -> None:
        self.faults = Faults()
        self.queue = SteppedExecutor(FaultyTier(open_disk(place, 64), self.faults), 1 << 30)
        super().__init__(slots, tiers=[self.queue], **{"recompute_if_faster": False, **settings})
        self.run_cold(request("first"))
        self.queue.advance()
        self.cache.end_step()

    def commit(self, name: str = "again", seed: int = 0) -> SceneRequest:
        asking = request(name, seed=seed)
        match = self.prepare(asking)
        self.cache.commit_external_match(asking, match, match.num_tokens, self.allocate(asking))
        return asking


def loaded(place: Path) -> Scene:
    scene = Situation(place)
    again = request("again")
    scene.load(again, scene.prepare(again))
    return scene


def short(place: Path) -> Scene:
    scene = Situation(place)
    scene.commit()
    (job,) = scene.cache.end_step().loads
    scene.cache.apply_report(WorkerReport({0: {job.job_id: failed(job, 1)}}))
    return scene


def declined(place: Path) -> Scene:
    scene = Situation(place)
    again = request("again")
    scene.load(again, scene.prepare(again), 0)
    return scene


def superseded(place: Path) -> Scene:
    scene = Situation(place)
    again = request("again")
    scene.prepare(again)
    scene.prepare(again, BLOCK_SIZE)
    return scene


def not_renewed(place: Path) -> Scene:
    scene = Situation(place, plan_lifetime=1)
    scene.prepare(request("again"))
    scene.now += 2
    for _ in range(4):
        scene.cache.end_step()
    return scene


def request_finished(place: Path) -> Scene:
    scene = Situation(place)
    scene.prepare(request("again"))
    scene.cache.request_finished("again")
    return scene


def tier_too_late(place: Path) -> Scene:
    scene = Situation(place, prepare_deadline=1)
    scene.forget_memory()
    again = request("again")
    assert scene.cache.prepare_external_match(again, 0) is None
    scene.now += 2
    scene.cache.prepare_external_match(again, 0)
    return scene


def never_asked(place: Path) -> Scene:
    scene = Situation(place)
    scene.cache.decline_external_match(request("again"), 0)
    return scene


def tier_failed(place: Path) -> Scene:
    scene = Situation(place)
    scene.forget_memory()
    scene.faults.arm(Operation.GET, Fault.ERROR, times=10)
    again = request("again")
    assert scene.cache.prepare_external_match(again, 0) is None
    scene.queue.advance()
    scene.cache.prepare_external_match(again, 0)
    return scene


def reset(place: Path) -> Scene:
    scene = Situation(place)
    scene.prepare(request("again"))
    scene.cache.reset()
    return scene


def shut_down(place: Path) -> Scene:
    scene = Situation(place)
    scene.prepare(request("again"))
    scene.cache.shutdown()
    return scene


def engine_error(place: Path) -> Scene:
    scene = Situation(place)
    scene.cache.abort_external_match("again", scene.prepare(request("again")), "a reason of the engine's own")
    return scene


def dropped(reason: ExternalMatchExit) -> Callable[[Path], Scene]:
    def scene_of(place: Path) -> Scene:
        scene = Situation(place)
        scene.cache.abort_external_match("again", scene.prepare(request("again")), reason)
        return scene

    return scene_of


def postponed(reason: ExternalMatchExit) -> Callable[[Path], Scene]:
    def scene_of(place: Path) -> Scene:
        scene = Situation(place)
        scene.prepare(request("again"))
        for _ in range(POSTPONED_STEPS + 1):
            scene.cache.postpone_external_match("again", reason)
            scene.cache.end_step()
        return scene

    return scene_of


def yielded(place: Path) -> Scene:
    """What was read for a request of the queue's end is in the way of its head."""
    scene = Situation(place, slots=BLOCKS)
    scene.run_cold(request("second", seed=1))
    scene.queue.advance()
    scene.cache.end_step()
    assert scene.cache.prepare_external_match(request("behind"), 0) is None
    scene.queue.advance()
    scene.cache.end_step()
    assert scene.cache.prepare_external_match(request("head", seed=1), 0) is None
    return scene


def larger_than_memory(place: Path) -> Scene:
    scene = Situation(place, slots=BLOCKS)
    scene.run_cold(request("larger", blocks=2 * BLOCKS, seed=9))
    return scene


def spared(place: Path) -> Scene:
    scene = Situation(place)
    scene.prepare(request("again"), BLOCKS * BLOCK_SIZE)
    return scene


def read_from_disk(place: Path) -> Scene:
    scene = Situation(place)
    scene.forget_memory()
    again = request("again")
    assert scene.cache.prepare_external_match(again, 0) is None
    scene.queue.advance()
    scene.prepare(again)
    return scene


def evicted(place: Path) -> Scene:
    scene = Situation(place, slots=BLOCKS)
    scene.run_cold(request("other", seed=9))
    return scene


def used_again(place: Path) -> Scene:
    scene = Situation(place, sync_load_budget=0)
    again = request("again")
    for _ in range(2):
        scene.load(again, scene.prepare(again))
        scene.cache.note_computed(again, BLOCKS * BLOCK_SIZE + 1, lambda: scene.tables["again"])
        scene.report(scene.cache.end_step())
    return scene


ENDS: dict[EndReason, Callable[[Path], Scene]] = {
    EndReason.LOADED: loaded,
    EndReason.SHORT: short,
    EndReason.SUPERSEDED: superseded,
    EndReason.NOT_RENEWED: not_renewed,
    EndReason.REQUEST_FINISHED: request_finished,
    EndReason.DEADLINE: tier_too_late,
    EndReason.TIER_FAILED: tier_failed,
    EndReason.CACHE_RESET: reset,
    EndReason.SHUTDOWN: shut_down,
    EndReason.ERROR: engine_error,
    **{EndReason(reason): (dropped if reason.is_dropped else postponed)(reason) for reason in ExternalMatchExit},
    EndReason.DECLINED: declined,
    EndReason.YIELDED: yielded,
}
OTHERS = (never_asked, larger_than_memory, spared, used_again, read_from_disk, evicted)

ELSEWHERE = {
    "step_lookups": "tests/under_vllm/test_step_match.py",
    "step_hits": "tests/under_vllm/test_step_match.py",
    "lost_answer_tokens": "tests/under_vllm/test_offers_of_states.py",
    "events_sent": "tests/under_vllm/test_kv_events.py",
    "events_late": "tests/test_event_queue.py",
    "brought_blocks": "tests/cache/test_expect_hints.py",
    "hints": "tests/under_vllm/test_client_hints.py",
    "hook_errors": "tests/under_vllm/test_guard.py",
    "refuted_copies": "kit/tests/test_vllm_devices.py",
    "refused_counts": "tests/test_metrics.py",
    "damaged_records": "tests/cache/test_shared_cache.py",
    "dropped_writes": "tests/cache/test_shared_cache.py",
    "spared_prefill_seconds": "tests/cache/test_tokens_by_tier.py",
}
"""Counters that take more than a cache and obedient workers, and where they are seen to rise."""


@pytest.mark.parametrize("reason", EndReason)
def test_h74_each_reason_for_a_plans_end_is_produced(reason: EndReason, tmp_path: Path) -> None:
    assert ENDS[reason](tmp_path).cache.observe()[series("plans_ended", reason)] >= 1


@pytest.mark.parametrize("reason", MissReason)
def test_h74_each_reason_for_a_miss_is_produced(reason: MissReason) -> None:
    assert CAUSES[reason]().cache.observe()[series("misses", reason)] >= 1


def test_h74_each_counter_rises_somewhere(tmp_path: Path) -> None:
    risen: set[str] = set()
    scenes = [cause() for cause in CAUSES.values()]
    for number, situation in enumerate([*ENDS.values(), *OTHERS]):
        place = tmp_path / str(number)
        place.mkdir()
        scenes.append(situation(place))
    for scene in scenes:
        shot = scene.cache.observe()
        for metric in METRICS:
            labels = () if metric.label == "reason" else metric.label_values(tiers_in(shot))
            if metric.kind == "counter" and any(shot[series(metric.name, label)] for label in labels):
                risen.add(metric.name)
    counters = {metric.name for metric in METRICS if metric.kind == "counter" and metric.label != "reason"}
    assert counters - risen == set(ELSEWHERE)
    for name, path in ELSEWHERE.items():
        assert name in (Path(__file__).parents[2] / path).read_text(), f"{path} does not speak of {name}"


def test_h74_the_key_of_the_deadline_is_read_by_the_cache() -> None:
    """`load_deadline` bounds a load; see tests/cache/test_overdue.py for all that follows from it."""
    scene = Scene(load_deadline=7)
    scene.run_cold(request("first"))
    asking = request("again")
    match = scene.prepare(asking)
    scene.cache.commit_external_match(asking, match, match.num_tokens, scene.allocate(asking))
    (plan,) = scene.cache.ledger.open_plans()
    assert plan.deadline == load_config({"load_deadline": 7}, {}).load_deadline
