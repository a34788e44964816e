"""Resets of vLLM's prefix cache while requests run, on vLLM's real scheduler under kvpact's class."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.vllm import resets
from kvpact.vllm.scheduler import KvpactScheduler
from vllm_played_engine import BLOCK, HeldCopies, PlayedEngine, answer, make_prompt

BLOCKS = 8


@pytest.fixture
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[PlayedEngine]:
    settings = getattr(request, "param", {})
    engine = PlayedEngine(tmp_path / "engine", scheduler_class=KvpactScheduler, **settings)
    yield engine
    engine.close()


def stored(engine: PlayedEngine) -> tuple[list[int], HeldCopies]:
    """A prompt that only kvpact has; its loads wait until they are let go."""
    prompt = make_prompt(1, BLOCKS)
    engine.generate(prompt)
    engine.forget()
    return prompt, HeldCopies(engine, "scatter")


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's engine steps in a process of its own, where a call may be answered later."""
    monkeypatch.setattr(resets, "parent_process", threading.main_thread)


@pytest.mark.parametrize("forget", [False, True])
def test_h106_saves_under_way_are_given_up_and_their_slots_stay_taken_until_the_copies_end(
    engine: PlayedEngine, forget: bool
) -> None:
    copies, prompt = HeldCopies(engine, "gather"), make_prompt(1, BLOCKS)
    played = engine.add(prompt, 12)
    for _ in range(3):
        engine.step()
    context, mounted = engine.connector.scheduler_context, engine.connector.scheduler_side.mounted
    assert context is not None
    assert mounted is not None
    cache = mounted.own
    assert cache is not None
    assert context.touched_blocks == BLOCKS
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=forget) is True
    assert context.touched_blocks == 0
    assert cache.under_way["saves"] == 1
    others = [engine.add(make_prompt(seed, BLOCKS), 12) for seed in range(2, 6)]
    for _ in range(3):
        engine.step()
    assert cache.under_way["saves"] > 1, "nobody else got the slots"
    copies.go_on.set()
    engine.run()
    engine.assert_at_rest()
    for each in (played, *others):
        assert each.said == answer(each.request.prompt_token_ids, 12)
    engine.forget()
    assert engine.generate(prompt).said == answer(prompt, 3)


@pytest.mark.parametrize("engine", [{"sync_load_budget": 0}], indirect=True)
def test_h106_a_reset_waits_for_loads_and_begins_none_meanwhile(engine: PlayedEngine, own_process: None) -> None:
    prompt, copies = stored(engine)
    played, running = engine.add(prompt, 12), engine.add(make_prompt(2, 3), 40)
    engine.step()
    later = engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert isinstance(later, Future)
    with pytest.raises(RuntimeError, match="nothing was preempted"):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    again = engine.add(prompt, 3)
    for _ in range(3):
        engine.step()
    assert not later.done()
    assert (running.request.status.name, again.request.status.name) == ("RUNNING", "WAITING")
    copies.go_on.set()
    engine.run()
    assert later.result(0) is True
    for each in (played, running, again):
        assert each.said == answer(each.request.prompt_token_ids, each.request.max_tokens)
    engine.assert_at_rest()


@pytest.mark.parametrize("engine", [{"sync_load_budget": 0, "load_deadline": "0.2s"}], indirect=True)
def test_h106_a_load_that_does_not_end_costs_the_reset_and_nothing_else(
    engine: PlayedEngine, own_process: None
) -> None:
    prompt, copies = stored(engine)
    played, running = engine.add(prompt, 4), engine.add(make_prompt(2, 3), 40)
    engine.step()
    later = engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    while not later.done():
        engine.step()
    with pytest.raises(RuntimeError, match=r"loads are under way.*nothing was preempted.*`load_deadline`"):
        later.result()
    assert running.request.num_preemptions == 0
    copies.go_on.set()
    engine.run()
    assert played.said == answer(prompt, 4)
    engine.assert_at_rest()


@pytest.mark.parametrize("engine", [{"sync_load_budget": 0}], indirect=True)
def test_h106_an_engine_that_cannot_wait_says_so_and_preempts_nothing(engine: PlayedEngine) -> None:
    prompt, copies = stored(engine)
    played = engine.add(prompt, 4)
    engine.step()
    with pytest.raises(RuntimeError, match="nothing was preempted"):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    copies.go_on.set()
    engine.run()
    assert (played.said, played.cached_tokens) == (answer(prompt, 4), BLOCKS * BLOCK)
    engine.assert_at_rest()
