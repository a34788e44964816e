"""Who is prepared in a step that has cost its time already: all get their turn, and no step does too much."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.cache import budget as budget_module
from kvpact.cache.budget import CROWD_BUDGETS, CROWD_SHARE, MAX_CROWD_BUDGETS, STEP_BUDGET_SECONDS, StepBudget
from kvpact.cache.waiting import Reply, WaitEvent, Waiting
from kvpact.contract import ExternalCache

PATIENCE = 0.5
ASKS_SHARED, ASKS_NOBODY = (cast("ExternalCache", SimpleNamespace(asks_shared=asks)) for asks in (True, False))
STEP_SECONDS = 0.01
"""Of the engine's own work, between two steps."""


def answered() -> Waiting:
    """A request that was answered before."""
    waiting = Waiting()
    waiting.note(WaitEvent.ANSWERED)
    return waiting


class Steps:
    """A scheduler's steps: time passes by what they cost, and each of them asks for all who wait, in order."""

    def __init__(self, patch: pytest.MonkeyPatch, timeout: float = PATIENCE) -> None:
        self.now, self.spent = 100.0, 0.0
        patch.setattr(budget_module, "monotonic", lambda: self.now)
        patch.setattr(budget_module, "perf_counter", lambda: self.spent)
        self.budget, self.timeout = StepBudget(), timeout

    def step(self, waiting: list[Waiting], base: float, cost: float) -> list[Reply | None]:
        """What each was told, None for a turn; a probe costs `cost` seconds, and the step `base` before the first."""
        self.spent = 0.0
        self.budget.hook_began = self.spent
        self.spent = base
        told = list[Reply | None]()
        for waiter in waiting:
            told.append(None if self.budget.grant_turn(waiter, self.timeout, ASKS_SHARED) else waiter.reply)
            self.spent += cost if told[-1] is None else 0.0
        self.budget.end_step()
        self.now += self.spent + STEP_SECONDS
        return told


@given(
    base=st.floats(0, 2 * STEP_BUDGET_SECONDS),
    cost=st.floats(1e-5, STEP_BUDGET_SECONDS),
    requests=st.integers(1, 40),
    timeout=st.sampled_from([0.0, 0.05, PATIENCE]),
)
def test_p11_all_get_a_turn_in_time_and_no_step_makes_more_probes_than_it_has_time_for(
    base: float, cost: float, requests: int, timeout: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        steps = Steps(patch, timeout)
        waiting, began, number = [Waiting() for _ in range(requests)], steps.now, 0
        while waiting:
            at = steps.now
            told = steps.step(waiting, base, cost)
            number += 1
            assert steps.spent <= max(2 * STEP_BUDGET_SECONDS, base) + cost
            if at < began + timeout:
                assert Reply.DECLINED not in told, "a request was given up before its deadline"
                assert steps.spent <= max(STEP_BUDGET_SECONDS, base) + cost
            elif Reply.PUT_OFF in told:
                deadline = waiting[-1].until
                assert deadline is not None
                assert at < deadline, "a request waits beyond its deadline"
            waiting = [waiter for waiter, turn in zip(waiting, told, strict=True) if turn is Reply.PUT_OFF]
            assert number <= 2 * requests, "two steps in a row made no probe"


def test_a_step_that_is_late_before_its_first_probe_makes_it_every_second_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, waiting = Steps(monkeypatch), [Waiting() for _ in range(5)]
    told = [Counter(steps.step(waiting, 1.5 * STEP_BUDGET_SECONDS, 1e-4)) for _ in range(6)]
    assert [of_step[None] for of_step in told] == [0, 1, 0, 1, 0, 1]


def test_who_was_answered_never_waits_for_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    assert steps.step([answered()] * 9, 1.0, 1e-4) == [None] * 9


def test_after_the_deadline_twice_the_budget_counts_and_then_there_is_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    waiting = [Waiting() for _ in range(6)]
    steps.step(waiting, 2 * STEP_BUDGET_SECONDS, 1e-4)
    steps.now += PATIENCE
    told = steps.step(waiting, 0.0, 1.01 * STEP_BUDGET_SECONDS)
    assert told == [None, None, Reply.DECLINED, Reply.DECLINED, Reply.DECLINED, Reply.DECLINED]


@given(costs=st.lists(st.floats(1e-5, 0.02), min_size=1, max_size=60), engine_seconds=st.floats(0, 1))
def test_p11_a_crowd_that_memory_answers_is_spread_over_steps_and_none_starves(
    costs: list[float], engine_seconds: float
) -> None:
    """However dear a probe is: each step answers the first that waits, and no other one after 5 ms, or after a tenth of
    the time that the last step took."""
    with pytest.MonkeyPatch.context() as patch:
        steps, waiting = Steps(patch), [(Waiting(), cost) for cost in costs]
        limit, number = CROWD_BUDGETS * STEP_BUDGET_SECONDS, 0
        while waiting:
            number += 1
            assert number <= len(costs)
            steps.spent = 0.0
            steps.budget.hook_began = steps.spent
            told = []
            for waiter, cost in waiting:
                before = steps.spent
                told.append(steps.budget.grant_turn(waiter, PATIENCE, ASKS_NOBODY))
                assert told[-1] == (before <= limit or len(told) == 1)
                steps.spent += cost if told[-1] else 0.0
            assert steps.budget.grant_turn(answered(), PATIENCE, ASKS_NOBODY), "an open promise is only repeated"
            lasted = engine_seconds + steps.spent
            steps.now += lasted
            steps.budget.end_step()
            longest = MAX_CROWD_BUDGETS * STEP_BUDGET_SECONDS
            limit = min(max(CROWD_BUDGETS * STEP_BUDGET_SECONDS, CROWD_SHARE * lasted), longest)
            waiting = [each for each, done in zip(waiting, told, strict=True) if not done]


def test_after_a_long_step_tiers_get_a_hundredth_of_its_time_and_after_a_short_one_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch)
    for seconds, time in ((0.01, STEP_BUDGET_SECONDS), (0.1, 0.001), (2.0, CROWD_BUDGETS * STEP_BUDGET_SECONDS)):
        steps.now += seconds
        steps.budget.end_step()
        for spent, is_late in ((0.9 * time, False), (1.1 * time, True)):
            steps.spent = steps.budget.hook_began + spent
            assert steps.budget.is_late is is_late
