"""A cache that never hits says why (H72): each cause, made on a real cache, is the one that a person is told."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from group_scenes import BLOCK, GroupScene, asked, full, states, window
from kvpact.cache.prepare import MAX_LOADS_WITHOUT_PROGRESS
from kvpact.config import KvpactConfig
from kvpact.contract import WorkerReport
from kvpact.metrics import METRICS, MISS_HINTS, MissReason, explain_misses, series
from kvpact.tiers.breaker import FAILURES_IN_A_ROW
from kvpact.tiers.shared.tier import SharedTier
from kvpact_testkit.faults import Fault, Faults, FaultyTier, Operation
from kvpact_testkit.tier.dictionary_store import DictionaryStore
from kvpact_testkit.tier.stepped_executor import SteppedExecutor
from scenes import NAMESPACE, PAGE, Scene, SceneBlocks, SceneRequest, failed, tokens

STORED, ASKED = SceneRequest("first", tokens(33)), SceneRequest("asked", tokens(33))


def shared_scene(faults: Faults | None = None, slots: int = 16, **settings: Any) -> Scene:
    """A cache above a store that works in steps, as `faults` let it, and has what another engine computed."""
    store = DictionaryStore(faults=Faults())
    other = Scene(tiers=[SteppedExecutor(SharedTier(store, NAMESPACE, PAGE), 1 << 30)])
    other.run_cold(STORED)
    advance(other)
    other.close()
    queue = SteppedExecutor(FaultyTier(SharedTier(store, NAMESPACE, PAGE), faults or Faults()), 1 << 30)
    return Scene(slots, tiers=[queue], **{"recompute_if_faster": False, **settings})


def advance(scene: Scene) -> None:
    """The stores do what they were asked to."""
    for queue in scene.queues:
        assert isinstance(queue, SteppedExecutor)
        queue.advance()


def ask(scene: Scene, request: SceneRequest = ASKED) -> Scene:
    """Ask until there is an answer, which is a miss; a tenth of a second a step. Returns the scene."""
    for _ in range(100):
        match = scene.cache.prepare_external_match(request, 0)
        if match is not None:
            assert match.num_tokens == 0
            return scene
        advance(scene)
        scene.cache.end_step()
        scene.now += 0.1
    raise AssertionError("there is no answer")


def never_seen() -> Scene:
    scene = Scene()
    return ask(scene)


def below_one_block() -> Scene:
    scene = Scene()
    return ask(scene, SceneRequest("short", tokens(3)))


def not_to_be_named() -> Scene:
    scene = Scene()
    return ask(scene, SceneRequest("unknown", tokens(33), None))


def not_to_load() -> Scene:
    scene = Scene()
    scene.run_cold(STORED)
    return ask(scene, SceneRequest("must compute", tokens(33), may_load=False))


def groups_that_are_not_shown() -> Scene:
    scene = GroupScene((full(), window(3)), (PAGE, PAGE))
    scene.cache.bind_scheduler_context(SceneBlocks())
    return ask(scene)


def after_half_a_block() -> Scene:
    """A state stands for 32 tokens; the engine has 16 of them."""
    scene = GroupScene((full(), states(2 * BLOCK)), (PAGE, PAGE))
    assert scene.prepare(asked("half", 8), BLOCK).num_tokens == 0
    return scene


def where_no_step_has_ended() -> Scene:
    """Another prompt that goes on after the second row has left a state behind its third one."""
    scene = GroupScene((full(), states()), (PAGE, PAGE))
    scene.run_cold(asked("longer", 3))
    return ask(scene, asked("shorter", 2))


def from_a_store_that_is_ill() -> Scene:
    faults = Faults()
    scene = shared_scene(faults)
    faults.arm(Operation.LOOKUP, Fault.ERROR, times=10)
    for number in range(FAILURES_IN_A_ROW):
        scene.cache.on_new_request(SceneRequest(f"before {number}", tokens(33, seed=number)))
        advance(scene)
        scene.cache.end_step()
    return ask(scene)


def from_a_store_that_breaks_its_word() -> Scene:
    faults = Faults()
    faults.arm(Operation.GET, Fault.ERROR, times=10)
    return ask(shared_scene(faults))


def failed_before() -> Scene:
    scene = Scene()
    scene.run_cold(STORED)
    match = scene.prepare(ASKED)
    scene.cache.commit_external_match(ASKED, match, 32, scene.allocate(ASKED))
    (job,) = scene.cache.end_step().loads
    scene.cache.apply_report(WorkerReport({0: {job.job_id: failed(job, first=0)}}))
    scene.run_cold(STORED)
    return ask(scene)


def no_free_slot() -> Scene:
    scene = shared_scene(slots=4)
    holder = SceneRequest("holder", tokens(17, seed=1))
    scene.run_cold(SceneRequest("held", tokens(17, seed=1)))
    assert scene.prepare(holder).num_tokens == 16
    return ask(scene)  # it waits until its deadline


def preempted_again_and_again() -> Scene:
    scene = Scene()
    scene.run_cold(STORED)
    for _ in range(MAX_LOADS_WITHOUT_PROGRESS):
        scene.load(ASKED, scene.prepare(ASKED))
    return ask(scene)


def slower_than_computing() -> Scene:
    scene = shared_scene(recompute_if_faster=True)
    (client,) = scene.cache.tiers.clients
    client.costs.latency.add(1e9, 1.0)  # quick to say what it has,
    client.costs.note_read(1, 100.0)  # slow to give it
    for step in range(3):
        fast = SceneRequest(f"fast-{step}", tokens(65, seed=9))
        scene.cache.note_computed(fast, 64, partial(scene.allocate, fast))
        scene.cache.end_step()
        scene.now += 0.001
    return ask(scene)


def asked_when_the_step_begins() -> Scene:
    scene = shared_scene(match_at="step")
    return ask(scene)


def too_late() -> Scene:
    scene = shared_scene(prepare_deadline="500ms")
    assert isinstance(scene.queues[0], SteppedExecutor)
    scene.queues[0].stalled_steps = 50
    return ask(scene)


def behind_a_copy_that_hangs() -> Scene:
    scene = Scene(load_deadline=1)
    scene.run_cold(STORED)
    hangs = SceneRequest("hangs", STORED.token_ids)
    match = scene.prepare(hangs)
    scene.cache.commit_external_match(hangs, match, match.num_tokens, scene.allocate(hangs))
    for _ in range(6):
        scene.cache.end_step()
        scene.cache.apply_report(WorkerReport({}))
        scene.now += 1.0
    return ask(scene)


CAUSES: dict[MissReason, Callable[[], Scene]] = {
    MissReason.NOT_STORED: never_seen,
    MissReason.TOO_SHORT: below_one_block,
    MissReason.UNKNOWN_IDENTITY: not_to_be_named,
    MissReason.DISABLED: groups_that_are_not_shown,
    MissReason.MUST_COMPUTE: not_to_load,
    MissReason.UNALIGNED: after_half_a_block,
    MissReason.TIER_DOWN: from_a_store_that_is_ill,
    MissReason.NOT_DELIVERED: from_a_store_that_breaks_its_word,
    MissReason.FAILED_BEFORE: failed_before,
    MissReason.NO_ROOM: no_free_slot,
    MissReason.CROWDED: preempted_again_and_again,
    MissReason.RECOMPUTE_FASTER: slower_than_computing,
    MissReason.ASKED_AT_STEP: asked_when_the_step_begins,
    MissReason.DEADLINE: too_late,
    MissReason.STATE_MISSING: where_no_step_has_ended,
    MissReason.OVERDUE: behind_a_copy_that_hangs,
}


@pytest.mark.parametrize("reason", MissReason)
def test_h72_each_cause_is_counted_as_itself_and_told(reason: MissReason) -> None:
    scene = CAUSES[reason]()
    shot = scene.cache.observe()
    counted = {other: shot[series("misses", other)] for other in MissReason}
    assert counted[reason] == 1
    assert counted[MissReason.NOT_STORED] == (reason is MissReason.NOT_STORED)
    line = explain_misses(shot)
    assert f"most misses (1 {reason}) because {MISS_HINTS[reason]}" in line
    advance(scene)


def test_h72_every_hint_is_its_own_and_names_what_there_is() -> None:
    assert len({*MISS_HINTS.values()}) == len(MISS_HINTS) == len(MissReason)
    there = {*KvpactConfig.model_fields, *(metric.name for metric in METRICS), "kvpact inspect"}
    for hint in MISS_HINTS.values():
        assert len(hint.split()) >= 6, hint
        named = re.findall(r"`([^`]+)`", hint) + re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", hint)
        assert {*named} <= there, hint


@pytest.mark.parametrize("hangs", [False, True])
def test_h10_while_a_copy_hangs_no_worker_is_told_to_look_in_a_store(hangs: bool) -> None:
    """What the prepare does not promise is not looked up when the step begins, either."""
    scene = shared_scene(match_at="step", load_deadline=1)
    mine = SceneRequest("mine", tokens(33, seed=1))
    scene.run_cold(mine)
    if hangs:
        behind = SceneRequest("hangs", mine.token_ids)
        match = scene.prepare(behind)
        scene.cache.commit_external_match(behind, match, match.num_tokens, scene.allocate(behind))
        scene.cache.end_step()
        scene.now += 2
        scene.cache.end_step()
    assert scene.prepare(ASKED).num_tokens == 0
    scene.cache.note_computed(ASKED, 32, partial(scene.allocate, ASKED))
    scene.cache.look_up_at_step(ASKED, 0, 32)
    assert bool(scene.cache.end_step().lookups) == (not hangs)
