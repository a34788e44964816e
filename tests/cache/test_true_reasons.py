"""The reason that people are told is what was decided, not the default of the last branch (H126)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from test_misses import ASKED, STORED, advance, ask, shared_scene

from group_scenes import GroupScene, asked, full, states
from kvpact.metrics import EndReason, MissReason, series
from kvpact.tiers.breaker import FAILURES_IN_A_ROW
from kvpact.tiers.probes import PROBE_SECONDS
from kvpact_testkit.faults import Fault, Faults, FaultyTier, Operation
from kvpact_testkit.tier.stepped_executor import SteppedExecutor
from scenes import BLOCK_SIZE, PAGE, Scene, SceneRequest, open_disk, tokens


def reasons(scene: Scene) -> list[MissReason]:
    """Why lookups have missed so far."""
    shot = scene.cache.observe()
    return [reason for reason in MissReason for _ in range(int(shot[series("misses", reason)]))]


def compute_fast(scene: Scene) -> None:
    """The engine is seen to compute 64,000 tokens a second."""
    for step in range(3):
        fast = SceneRequest(f"fast-{step}", tokens(65, seed=9))
        scene.cache.note_computed(fast, 64, partial(scene.allocate, fast))
        scene.cache.end_step()
        scene.now += 0.001


def test_h126_a_store_that_is_not_asked_because_computing_is_sooner_is_no_empty_store() -> None:
    scene = shared_scene(recompute_if_faster=True)
    (client,) = scene.cache.tiers.clients
    client.costs.note_lookup(1.5)
    compute_fast(scene)
    ask(scene)
    assert scene.cache.observe()["lookup_seconds_count" + '{tier="dictionary"}'] == 0, "it was not asked"
    assert reasons(scene) == [MissReason.RECOMPUTE_FASTER]


def test_h126_what_may_not_be_waited_for_is_not_missing(tmp_path: Path) -> None:
    """With `prepare_deadline` 0 a disk has it and nothing is read, and a store is never asked."""
    scene = Scene(tiers=[open_disk(tmp_path)], prepare_deadline=0)
    scene.run_cold(STORED)
    scene.settle_tiers()
    scene.forget_memory()
    assert scene.prepare(ASKED).num_tokens == 0
    assert reasons(scene) == [MissReason.DEADLINE]
    assert reasons(ask(shared_scene(prepare_deadline=0))) == [MissReason.DEADLINE]


def test_h126_a_few_blocks_that_are_held_are_too_few_and_not_none() -> None:
    scene = Scene(min_match_blocks=4)
    scene.run_cold(SceneRequest("shorter", STORED.token_ids[: 3 * BLOCK_SIZE]))
    ask(scene)
    assert reasons(scene) == [MissReason.TOO_SHORT]


def test_h126_a_long_prompt_that_nobody_holds_is_not_stored_and_not_too_short() -> None:
    """Its keys are made no further than somebody may hold them: 2,048 of the 3,000 that a match needs here."""
    scene = Scene(min_match_blocks=3000)
    ask(scene, SceneRequest("long", tokens(4000 * BLOCK_SIZE)))
    assert reasons(scene) == [MissReason.NOT_STORED]


def test_h126_a_disk_that_is_tried_with_one_read_is_down_for_the_others(tmp_path: Path) -> None:
    faults = Faults()
    queue = SteppedExecutor(FaultyTier(open_disk(tmp_path), faults), 1 << 30)
    scene = Scene(tiers=[queue], recompute_if_faster=False, prepare_deadline=1)
    scene.run_cold(STORED)
    advance(scene)
    scene.cache.end_step()
    scene.forget_memory()
    faults.arm(Operation.GET, Fault.ERROR, times=FAILURES_IN_A_ROW)
    for number in range(FAILURES_IN_A_ROW):
        ask(scene, SceneRequest(f"before {number}", STORED.token_ids))
    ask(scene)
    assert reasons(scene) == [MissReason.TIER_DOWN] + [MissReason.NOT_DELIVERED] * FAILURES_IN_A_ROW
    scene.now += PROBE_SECONDS
    ask(scene, SceneRequest("probes", STORED.token_ids))
    assert reasons(scene).count(MissReason.TIER_DOWN) == 2, "nobody waits for the probe"
    for _ in range(3):
        advance(scene)
        scene.cache.end_step()
    assert scene.cache.prepare_external_match(SceneRequest("reads", STORED.token_ids), 0) is None


def test_h126_what_a_store_did_not_answer_in_time_stays_unanswered() -> None:
    """A blocked request is asked about again and again: its record says what was decided, each time."""
    scene = shared_scene(prepare_deadline="500ms")
    (queue,) = scene.queues
    assert isinstance(queue, SteppedExecutor)
    queue.stalled_steps = 50
    ask(scene)
    ask(scene)
    (record,) = scene.cache.requests.records.all()
    assert (record.miss, reasons(scene)) == (MissReason.DEADLINE, [MissReason.DEADLINE])
    advance(scene)


def test_h126_a_request_that_is_declined_for_lack_of_time_is_told_what_else_it_lacks() -> None:
    scene = Scene()
    scene.run_cold(STORED)
    for request in (ASKED, SceneRequest("short", tokens(3)), SceneRequest("unknown", tokens(33), None)):
        scene.cache.decline_external_match(request, 0)
    assert reasons(scene) == [MissReason.TOO_SHORT, MissReason.UNKNOWN_IDENTITY, MissReason.DEADLINE]


def test_h126_the_plan_of_a_declined_request_ends_by_its_deadline() -> None:
    scene = Scene()
    scene.run_cold(STORED)
    assert scene.prepare(ASKED).num_tokens
    scene.cache.decline_external_match(ASKED, 0)
    assert scene.cache.observe()[series("plans_ended", EndReason.DEADLINE)] == 1


@pytest.mark.parametrize(("rows", "computed"), [(3, 0), (7, 4)])
def test_h126_what_no_state_stands_for_is_not_looked_up(rows: int, computed: int) -> None:
    """A state stands for 4 rows: a prompt of 3 is too short, and of 7 the engine has all that it could load."""
    scene = GroupScene((full(), states(64)), (PAGE, PAGE))
    assert scene.prepare(asked("short", rows), computed * 16).num_tokens == 0
    assert reasons(scene) == ([] if computed else [MissReason.TOO_SHORT])
    assert scene.count("spared_lookups") == bool(computed)
