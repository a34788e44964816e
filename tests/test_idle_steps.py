"""An idle engine is kept stepping while something ends now and then, and not for ever."""

from __future__ import annotations

import pytest

from kvpact.engine import StepClock
from kvpact.idle_steps import AGAIN_SECONDS, LONGEST_STEP_SECONDS, VAIN_SECONDS, IdleSteps


def steps_until_it_ends(idle: IdleSteps, clock: StepClock, under_way: int, step_seconds: float) -> int:
    for number in range(10_000):
        if not idle.wait_for(under_way):
            return number
        clock.now += step_seconds
    raise AssertionError("the engine steps for ever")


@pytest.mark.parametrize("step_seconds", [0.001, 0.01])
def test_h13_what_never_ends_is_waited_for_five_seconds(step_seconds: float) -> None:
    clock = StepClock()
    idle = IdleSteps(clock)
    steps = steps_until_it_ends(idle, clock, 3, step_seconds)
    assert steps * step_seconds == pytest.approx(VAIN_SECONDS, abs=2 * step_seconds)
    assert not idle.wait_for(3)
    clock.now += 3600.0
    steps = steps_until_it_ends(idle, clock, 3, step_seconds)
    assert steps * step_seconds == pytest.approx(AGAIN_SECONDS, abs=2 * step_seconds), "later it is tried once more"


def test_what_ends_one_after_another_is_waited_for_to_the_last() -> None:
    clock = StepClock()
    idle = IdleSteps(clock)
    for under_way in range(20, 0, -1):
        for _ in range(30):
            assert idle.wait_for(under_way)
            clock.now += LONGEST_STEP_SECONDS
    assert not idle.wait_for(0)


def test_h27_a_stopped_process_has_not_waited_in_vain() -> None:
    clock = StepClock()
    idle = IdleSteps(clock)
    assert idle.wait_for(1)
    clock.now += 3600.0
    assert idle.wait_for(1)
