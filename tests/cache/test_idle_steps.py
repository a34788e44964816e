"""An idle engine is kept stepping while something ends now and then, and not for ever."""

from __future__ import annotations

import pytest

from kvpact.cache.idle_steps import AGAIN_SECONDS, LONGEST_STEP_SECONDS, PAUSE_SECONDS, VAIN_SECONDS, IdleSteps
from kvpact_testkit.engine import StepClock
from scenes import Scene, SceneRequest, tokens


def steps_until_it_ends(idle: IdleSteps, clock: StepClock, under_way: int, step_seconds: float) -> int:
    for number in range(10_000):
        if not idle.wait_for(under_way):
            return number
        clock.now += step_seconds
    raise AssertionError("the engine steps for ever")


@pytest.mark.parametrize("step_seconds", [0.001, 0.01])
def test_p11_what_never_ends_is_waited_for_five_seconds(step_seconds: float) -> None:
    clock = StepClock()
    idle = IdleSteps(clock)
    steps = steps_until_it_ends(idle, clock, 3, step_seconds)
    assert steps * step_seconds == pytest.approx(VAIN_SECONDS, abs=2 * step_seconds)
    assert not idle.wait_for(3)
    clock.now += 3600.0
    steps = steps_until_it_ends(idle, clock, 3, step_seconds)
    assert steps * step_seconds == pytest.approx(AGAIN_SECONDS, abs=2 * step_seconds), "later it is tried once more"


@pytest.mark.parametrize("pause_seconds", [0.05, 0.9 * PAUSE_SECONDS])
def test_p11_who_asks_again_and_again_for_what_a_copy_holds_gets_it_when_the_copy_has_ended(
    pause_seconds: float,
) -> None:
    """A reset of the prefix cache is refused until no block is held; the engine steps only if it is kept stepping."""
    clock = StepClock()
    idle = IdleSteps(clock)
    steps_until_it_ends(idle, clock, 3, 0.01)
    until = clock.now + PAUSE_SECONDS + pause_seconds
    while not idle.wait_for(3):
        clock.now += pause_seconds
        assert clock.now <= until, "the engine never hears of the copies"
    steps = steps_until_it_ends(idle, clock, 3, 0.01)
    assert steps * 0.01 == pytest.approx(AGAIN_SECONDS, abs=0.05)


def test_p11_as_many_copies_as_before_are_not_the_same_ones() -> None:
    clock = StepClock()
    idle = IdleSteps(clock)
    for begun in range(1, 200):  # each request ends with one copy under way, and the next one begins another
        assert idle.wait_for(1, begun)
        clock.now += 0.05


def test_what_ends_one_after_another_is_waited_for_to_the_last() -> None:
    clock = StepClock()
    idle = IdleSteps(clock)
    for under_way in range(20, 0, -1):
        for _ in range(30):
            assert idle.wait_for(under_way)
            clock.now += LONGEST_STEP_SECONDS
    assert not idle.wait_for(0)


@pytest.mark.parametrize("step_seconds", [LONGEST_STEP_SECONDS, 0.9 * PAUSE_SECONDS, PAUSE_SECONDS, 3600.0])
def test_a_process_that_is_stopped_again_and_again_has_not_waited_in_vain(step_seconds: float) -> None:
    """However long it stood still between two steps, it gets as many steps as a slow one to hear of what ended."""
    clock = StepClock()
    idle = IdleSteps(clock)
    for _ in range(round(VAIN_SECONDS / LONGEST_STEP_SECONDS)):
        assert idle.wait_for(1)
        clock.now += step_seconds


@pytest.mark.parametrize("job", ["a save", "a load"])
def test_h13_h27_a_hook_that_always_fails_costs_no_core_for_ever_and_no_block(job: str) -> None:
    """Reports that never come are waited for five seconds; what is copied stays held, whoever stops waiting."""
    scene = Scene(slots=4, sync_load_budget=0, load_deadline="3600s", plan_lifetime="1s")
    first, request = SceneRequest("a", tokens(16)), SceneRequest("b", tokens(17))
    work = scene.step_computing(first, 16)
    blocks = set(work.saves[0].block_ids)
    if job == "a load":
        scene.report(work)
        match = scene.prepare(request)
        scene.cache.commit_external_match(request, match, 16, scene.allocate(request))
        work, blocks = scene.cache.end_step(), set()
    for name in ("a", "b"):
        scene.cache.request_finished(name)
    steps = 0
    while scene.cache.has_pending_work:  # the hook that would bring the report fails in each of these steps
        scene.cache.end_step()
        scene.now += 0.01
        steps += 1
        assert steps < 1000, "the engine steps for ever"
    assert steps == pytest.approx(VAIN_SECONDS / 0.01, abs=2)
    for other in range(3):  # others come and go meanwhile: none gets the slots or blocks of the copy
        scene.run_cold(SceneRequest(f"other {other}", tokens(16, seed=other + 1)))
        assert set(scene.blocks.held) == blocks
        assert scene.prepare(SceneRequest(f"probe {other}", tokens(17, seed=other + 1))).num_tokens == 0
    scene.report(work)
    assert not scene.blocks.held
    assert not scene.cache.has_pending_work
    if job == "a load":
        assert scene.holds_content(request, range(4))
