"""What the adapter tells a request without asking the cache, or against what the budget of its step says.

The first is for vLLM before 0.31, whose queue stops for good without it: `kit/tests/test_vllm_releases.py` plays that
on those releases (`h01_lookups_that_are_not_committed`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.cache.budget import StepBudget
from kvpact.cache.waiting import WaitEvent, Waiting
from vllm_played_engine import PlayedEngine, answer, make_prompt

PROMPT = make_prompt(1, 4)


def test_who_is_asked_about_steps_aside_for_one_step_if_loads_have_ended_and_nothing_is_computed(
    tmp_path: Path,
) -> None:
    """A step that computes nothing although a load has ended is not to come: its request waits behind another."""
    engine = PlayedEngine(tmp_path)
    loads = engine.connector.scheduler_side.loads
    engine.generate(PROMPT)
    engine.forget()
    played = engine.add(make_prompt(2, 4))
    loads.ended.add("behind it")
    assert engine.step() > 0, "while something is computed the queue moves by itself"
    engine.run()
    assert engine.step() == 0
    waits = engine.add(PROMPT)
    assert engine.step() == 0
    assert engine.connector.scheduler_side.loads.ended == {"behind it"}
    assert not loads.must_step_aside, "the engine would never ask again, and nobody would be answered"
    engine.run()
    loads.ended.clear()
    assert (played.said, waits.said) == (answer(make_prompt(2, 4), 3), answer(PROMPT, 3))
    engine.close()


def test_nobody_steps_aside_for_long_where_the_cache_serves_no_more(tmp_path: Path) -> None:
    """After a reset that failed nothing is loaded, and steps end early."""
    engine = PlayedEngine(tmp_path)
    side = engine.connector.scheduler_side
    assert side.mounted is not None
    engine.generate(PROMPT)
    side.loads.ended.add("behind it")
    assert engine.step() == 0
    assert side.loads.must_step_aside
    side.mounted.weights.serves = False
    played = engine.add(PROMPT)
    engine.run()
    assert played.said == answer(PROMPT, 3)
    side.loads.ended.clear()
    engine.close()


def test_a_load_is_known_to_have_ended_until_its_request_is_computed_or_gone(tmp_path: Path) -> None:
    engine = PlayedEngine(tmp_path, sync_load_budget="0")
    loads = engine.connector.scheduler_side.loads
    engine.generate(PROMPT)
    engine.forget()
    for cancelled in (False, True):
        played = engine.add(PROMPT)
        while not loads.ended:
            assert engine.step() == 0
        assert loads.ended == {played.request.request_id}
        if cancelled:
            engine.cancel(played)
        else:
            assert engine.step() > 0
        assert not loads.ended
        engine.run()
        engine.forget()
    engine.assert_at_rest()
    engine.close()


def test_who_may_wait_for_room_is_not_declined_by_a_step_without_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deadline at the cache is later than the one that the budget knows."""

    def no_turn(budget: StepBudget, waiting: Waiting, timeout: float, cache: object) -> bool:
        waiting.note(WaitEvent.DECLINED)
        return False

    engine = PlayedEngine(tmp_path)
    cache = engine.connector.scheduler_side.cache
    assert cache is not None
    monkeypatch.setattr(StepBudget, "grant_turn", no_turn)
    monkeypatch.setattr(cache, "may_wait", lambda request_id: True)
    played = engine.add(PROMPT)
    assert [engine.step() for _ in range(3)] == [0, 0, 0]
    monkeypatch.setattr(cache, "may_wait", lambda request_id: False)
    assert engine.step() > 0
    engine.run()
    assert played.said == answer(PROMPT, 3)
    engine.close()
