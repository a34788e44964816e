"""P14: a copy that fails although a step relies on it costs requests their step, never the engine and never an answer.

vLLM has published the step's blocks, and the next step may be planned: all requests whose blocks were computed over
such a block begin again. The scheduler, both halves of the connector, the hook and the store are real.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from vllm.v1.core.sched.scheduler import Scheduler

from kvpact.errors import ConfigError
from kvpact.testkit.vllm.played_engine import BLOCK, PlayedEngine, answer, flush, make_prompt

STEP: dict[str, Any] = {"match_at": "step", "step_deadline": "8s"}
STEM = 6 * BLOCK
PROMPT = make_prompt(1, 6)
OTHER = make_prompt(2, 8, stem=PROMPT[:STEM])
"""Shares the stem with `PROMPT`."""
STRANGER = make_prompt(3, 6)


@pytest.fixture
def filled(start: Callable[..., PlayedEngine], tmp_path: Path) -> str:
    """The URL of a store that holds `PROMPT` and `STRANGER`, written by another engine."""
    (tmp_path / "shared").mkdir()
    url = f"dir://{tmp_path}/shared?capacity=1GiB"
    engine = start(url)
    for prompt in (PROMPT, STRANGER):
        engine.generate(prompt)
    flush(engine)
    return url


def break_next_load(engine: PlayedEngine, broken: str) -> None:
    """The next copy into the engine's blocks fails, in one of the ways in which it can."""
    transfer: Any = engine.worker.cache_worker.transfers
    owner = transfer.engine.copier if broken == "scatter" else transfer
    whole = getattr(owner, broken)

    def fail(*arguments: Any) -> Any:
        if broken == "wait_for_loads" and not transfer._synchronous:
            return whole(*arguments)
        setattr(owner, broken, whole)
        raise RuntimeError("injected")

    setattr(owner, broken, fail)


@pytest.mark.parametrize("broken", ["scatter", "start_loads", "wait_for_loads"])
def test_a_copy_that_fails_costs_the_requests_of_the_step_and_nobody_else(
    start: Callable[..., PlayedEngine], filled: str, broken: str
) -> None:
    engine = start(filled, **STEP)
    break_next_load(engine, broken)
    finder, sharer = engine.add(PROMPT), engine.add(OTHER)
    engine.step()
    assert finder.said == sharer.said == []
    engine.run()
    assert finder.said == answer(PROMPT, 3)
    assert sharer.said == answer(OTHER, 3)
    assert finder.cached_tokens == 0
    assert sharer.cached_tokens == STEM, "the finder computed them"
    stranger = engine.generate(STRANGER, 1)
    assert stranger.cached_tokens == STEM
    engine.forget()
    again = engine.generate(OTHER, 1)
    assert again.said == answer(OTHER, 1)
    engine.assert_at_rest()
