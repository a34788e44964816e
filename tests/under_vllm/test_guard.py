"""The guard around vLLM's hooks: no exception passes, and a scheduler step is charged with its own hooks only."""

from __future__ import annotations

import logging
import time

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.metrics import STEP_SECONDS, Metrics
from kvpact.vllm.guard import Guard, guarded

WORK_SECONDS = 2e-3


class Hooks:
    """Three hooks: of a step, of an idle engine, and one that fails."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.guard = Guard(self.metrics)

    @guarded(lambda: "otherwise")
    def in_step(self) -> str:
        time.sleep(WORK_SECONDS)
        return "done"

    @guarded(lambda: "otherwise", in_step=False)
    def idle(self) -> str:
        time.sleep(WORK_SECONDS)
        return "done"

    @guarded(lambda: "otherwise")
    def failing(self, error: Exception) -> str:
        raise error


def test_a_step_is_charged_with_its_own_hooks_and_not_with_an_idle_engines() -> None:
    hooks = Hooks()
    assert (hooks.in_step(), hooks.idle(), hooks.in_step()) == ("done",) * 3
    hooks.guard.end_step()
    spent = hooks.metrics.snapshot()[f"{STEP_SECONDS}_sum"]
    assert spent >= 2 * WORK_SECONDS
    hooks.idle()
    hooks.guard.end_step()
    counts = hooks.metrics.snapshot()
    assert counts[f"{STEP_SECONDS}_count"] == 2
    assert counts[f"{STEP_SECONDS}_sum"] == spent


def test_h13_a_hook_that_fails_answers_otherwise_and_is_logged_once_a_kind(caplog: pytest.LogCaptureFixture) -> None:
    hooks = Hooks()
    with caplog.at_level(logging.ERROR):
        answers = [hooks.failing(error) for error in (KeyError("a"), KeyError("b"), ValueError("c"))]
    assert answers == ["otherwise"] * 3
    assert hooks.metrics.snapshot()["hook_errors"] == 3
    assert [record.message for record in caplog.records] == [
        "kvpact: failing failed; the engine goes on without it (logged once)"
    ] * 2
