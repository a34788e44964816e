"""What becomes of a promise that the engine does not take: dropped, postponed, or given up because others need room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpact.contract import DROPPED, POSTPONED_STEPS, ExternalMatchExit
from kvpact.metrics import MEMORY, EndReason, MissReason, series
from kvpact_testkit.tier.stepped_executor import SteppedExecutor
from scenes import BLOCK_SIZE, Scene, SceneRequest, open_disk, tokens

POSTPONING = [reason for reason in ExternalMatchExit if not reason.is_dropped]


class DiskScene(Scene):
    """A cache above a disk that moves when told to; prompts of `seeds` are on the disk and nothing is in memory."""

    def __init__(self, place: Path, slots: int, *seeds: int, blocks: int = 4, **settings: Any) -> None:
        self.disk = SteppedExecutor(open_disk(place), 1 << 30)
        super().__init__(slots, tiers=[self.disk], **{"recompute_if_faster": False, **settings})
        for seed in seeds:
            self.run_cold(prompt(f"cold{seed}", seed, blocks))
            for _ in range(3):
                self.step()
        assert self.count("written_blocks", "disk") == len(seeds) * blocks
        self.forget_memory()

    def step(self) -> None:
        """The end of a step in which nothing is computed."""
        self.report(self.cache.end_step())
        self.disk.advance()
        self.cache.check()

    def promised(self, request: SceneRequest) -> int:
        """Ask in steps until the request is promised something; the last step is not over."""
        while (match := self.cache.prepare_external_match(request, 0)) is None:
            self.step()
        return match.num_tokens

    def count(self, name: str, label: str = "") -> float:
        return self.cache.observe()[series(name, label)]


def prompt(name: str, seed: int, blocks: int = 4) -> SceneRequest:
    return SceneRequest(name, tokens(blocks * BLOCK_SIZE + 1, seed))


@pytest.fixture
def scene() -> Scene:
    """Memory only, 16 slots; one prompt of 4 blocks is stored."""
    scene = Scene()
    scene.run_cold(prompt("cold", 0))
    return scene


@pytest.mark.parametrize("reason", sorted(DROPPED))
def test_h01_a_dropped_match_holds_nothing_from_that_very_call_on(scene: Scene, reason: ExternalMatchExit) -> None:
    match = scene.prepare(prompt("r", 0))
    assert scene.cache.observe()["leases_held"] == 1
    scene.cache.abort_external_match("r", match, reason)
    assert (scene.cache.observe()["leases_held"], scene.room()) == (0, 16)
    assert scene.cache.observe()[series("plans_ended", EndReason(reason))] == 1


@pytest.mark.parametrize("reason", POSTPONING)
def test_a_postponed_match_is_kept_for_some_steps_and_ends_with_its_reason(
    scene: Scene, reason: ExternalMatchExit
) -> None:
    request = prompt("r", 0)
    match = scene.prepare(request)
    for _ in range(POSTPONED_STEPS):
        scene.cache.postpone_external_match("r", reason)
        scene.cache.end_step()
    assert scene.prepare(request).query_result is match.query_result
    for _ in range(POSTPONED_STEPS + 1):
        assert scene.cache.observe()["leases_held"] == 1
        scene.cache.postpone_external_match("r", reason)
        scene.cache.end_step()
    assert scene.cache.observe()["leases_held"] == 0
    shot = scene.cache.observe()
    assert (shot[series("plans_ended", EndReason(reason))], shot[series("plans_opened")]) == (1, 1)


def test_h02_a_head_that_is_blocked_for_long_has_one_plan(scene: Scene) -> None:
    request = prompt("r", 0)
    for _ in range(5 * POSTPONED_STEPS):
        assert scene.prepare(request).num_tokens == 16
        scene.cache.postpone_external_match("r", ExternalMatchExit.NO_BLOCKS)
        scene.cache.end_step()
    assert (scene.cache.observe()["plans_opened"], scene.cache.ledger.totals.leases_taken) == (1, 1)


def test_a_postponement_without_a_plan_or_of_a_load_changes_nothing(scene: Scene) -> None:
    scene.cache.postpone_external_match("nobody", ExternalMatchExit.NO_BLOCKS)
    request = prompt("r", 0)
    match = scene.prepare(request)
    scene.cache.commit_external_match(request, match, match.num_tokens, scene.allocate(request))
    scene.cache.postpone_external_match("r", ExternalMatchExit.PREEMPTION)
    (settlement,) = scene.report(scene.cache.end_step())
    assert len(settlement.loaded) == 4


def test_a_postponed_match_leaves_its_bytes_of_the_step_to_others() -> None:
    scene = Scene(sync_load_budget=4 * 4096)
    scene.run_cold(prompt("cold", 0))
    first, second, third = (prompt(name, 0) for name in ("first", "second", "third"))
    assert not scene.prepare(first).load_kv_async
    assert scene.prepare(second).load_kv_async
    scene.cache.postpone_external_match("first", ExternalMatchExit.ENCODER)
    assert not scene.prepare(third).load_kv_async


# Room


def test_a_read_gets_the_slots_of_postponed_matches_and_only_as_many_as_it_needs(tmp_path: Path) -> None:
    scene = DiskScene(tmp_path, 12, 1, 2, 3, 4)
    for seed in (1, 2, 3):
        assert scene.promised(prompt(f"r{seed}", seed)) == 16
        scene.cache.postpone_external_match(f"r{seed}", ExternalMatchExit.NOT_REACHED)
        scene.step()
    assert scene.promised(prompt("head", 4)) == 16
    assert [plan.request_id for plan in scene.cache.ledger.open_plans()] == ["r2", "r3", "head"]
    (ended,) = scene.cache.ledger.explain("r1")
    assert ended.reason is EndReason.NOT_REACHED
    assert scene.count("misses", MissReason.NO_ROOM) == 0


def test_a_match_that_was_asked_for_in_this_step_keeps_its_slots(tmp_path: Path) -> None:
    scene = DiskScene(tmp_path, 4, 1, 2)
    assert scene.promised(prompt("head", 1)) == 16
    scene.cache.postpone_external_match("head", ExternalMatchExit.ENCODER)
    behind = prompt("behind", 2)
    assert scene.cache.prepare_external_match(behind, 0) is None
    scene.now += 60
    assert scene.promised(behind) == 0
    assert scene.count("misses", MissReason.NO_ROOM) == 1


def test_a_match_of_which_the_engine_says_nothing_keeps_its_slots(tmp_path: Path) -> None:
    scene = DiskScene(tmp_path, 4, 1, 2)
    assert scene.promised(prompt("silent", 1)) == 16
    scene.step()
    other = prompt("other", 2)
    for _ in range(2):
        assert scene.cache.prepare_external_match(other, 0) is None
        scene.step()
    assert scene.count("leases_held") == 1


def test_a_save_gets_the_slots_of_postponed_matches() -> None:
    scene = Scene(slots=8)
    scene.run_cold(prompt("cold", 0, 6))
    assert scene.prepare(prompt("r", 0, 6)).num_tokens == 24
    scene.cache.postpone_external_match("r", ExternalMatchExit.MAX_RUNNING)
    scene.report(scene.cache.end_step())
    scene.run_cold(prompt("other", 9, 8))
    assert scene.cache.observe()[series("held_blocks", MEMORY)] == 8
    shot = scene.cache.observe()
    assert (shot[series("plans_ended", EndReason.MAX_RUNNING)], shot[series("dropped_blocks")]) == (1, 0)


def test_two_requests_that_wait_do_not_take_each_others_slots_in_turn(tmp_path: Path) -> None:
    """Each needs all of memory; the engine asks for both in each step and takes neither. Only the first is read."""
    scene = DiskScene(tmp_path, 4, 1, 2)
    first, second = prompt("first", 1), prompt("second", 2)
    answers = set()
    for _ in range(3 * POSTPONED_STEPS):
        for request in (first, second):
            match = scene.cache.prepare_external_match(request, 0)
            answers.add((request.request_id, match.num_tokens if match is not None else None))
            if match is not None and match.num_tokens:
                scene.cache.postpone_external_match(request.request_id, ExternalMatchExit.ENCODER)
        scene.step()
    assert answers == {("first", None), ("first", 16), ("second", None)}
    assert scene.count("read_blocks", "disk") == 4
    assert scene.cache.observe()["plans_opened"] == 2  # read, and promised: the read ends in a plan of its own range


def test_a_match_given_up_for_others_is_read_again_when_its_turn_comes_although_it_waited_before(
    tmp_path: Path,
) -> None:
    scene = DiskScene(tmp_path, 4, 1, 2, prepare_deadline="1s")
    assert scene.promised(prompt("behind", 1)) == 16
    scene.cache.postpone_external_match("behind", ExternalMatchExit.NO_BLOCKS)
    scene.step()
    head = prompt("head", 2)
    assert scene.promised(head) == 16
    scene.now += 60
    match = scene.prepare(head)
    scene.load(head, match)
    scene.cache.request_finished("head")
    assert scene.promised(prompt("behind", 1)) == 16


def test_a_read_that_nobody_came_back_for_is_begun_again_when_its_turn_comes(tmp_path: Path) -> None:
    scene = DiskScene(tmp_path, 4, 1, prepare_deadline="1s")
    behind = prompt("behind", 1)
    assert scene.cache.prepare_external_match(behind, 0) is None
    for _ in range(POSTPONED_STEPS + 1):
        scene.cache.postpone_external_match("behind", ExternalMatchExit.NOT_REACHED)
        scene.step()
    assert scene.count("plans_ended", EndReason.NOT_REACHED) == 1
    scene.now += 60
    scene.forget_memory()
    assert scene.promised(behind) == 16


def test_plans_that_share_their_blocks_may_end_without_a_slot_being_free_and_nothing_breaks(tmp_path: Path) -> None:
    scene = DiskScene(tmp_path, 4, 1, 2)
    for name in ("one", "two", "three"):
        assert scene.promised(prompt(name, 1)) == 16
    scene.step()
    assert scene.promised(prompt("three", 1)) == 16
    for name in ("one", "two", "three"):
        scene.cache.postpone_external_match(name, ExternalMatchExit.NO_BLOCKS)
    assert scene.cache.prepare_external_match(prompt("other", 2), 0) is None  # three was asked for in this step
    assert scene.cache.ledger.find("three") is not None
