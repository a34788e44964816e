"""Copies that hang, on vLLM's real scheduler: requests are answered by the deadline, right, in other blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from vllm_played_engine import BLOCK, PlayedEngine, answer, make_prompt

DEADLINE = 0.3
"""Seconds."""
SOON = 5.0
"""Seconds: long for an engine on a busy machine, short for a copy that hangs."""
BLOCKS = 6


class HangingCopies:
    """Loads hang in their second layer until they are let go; then they write all they were told, or garbage."""

    def __init__(self, engine: PlayedEngine) -> None:
        self.go_on = threading.Event()
        self.hung = threading.Event()
        self.garbage = False
        cache_worker: Any = engine.worker.cache_worker
        self._copier = cache_worker.transfers.engine.copier
        self._scatter = self._copier.scatter
        self._copier.scatter = self._slow_scatter

    def _slow_scatter(self, layer: int, plan: Any) -> None:
        if layer == 1:
            self.hung.set()
            self.go_on.wait(60.0)
        self._scatter(layer, plan)
        if layer == 1 and self.garbage:
            for pages in self._copier.pages:
                pages[plan.block_ids] = 7

    def restore(self) -> None:
        self._copier.scatter = self._scatter


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[PlayedEngine, HangingCopies]]]:
    engines: list[tuple[PlayedEngine, HangingCopies]] = []

    def start(**settings: Any) -> tuple[PlayedEngine, HangingCopies]:
        engine = PlayedEngine(tmp_path / str(len(engines)), load_deadline=f"{DEADLINE}s", **settings)
        engines.append((engine, HangingCopies(engine)))
        return engines[-1]

    yield start
    for engine, copies in engines:
        copies.go_on.set()
        engine.close()


def stored(
    start: Callable[..., tuple[PlayedEngine, HangingCopies]], **settings: Any
) -> tuple[PlayedEngine, HangingCopies, list[int]]:
    """An engine that has saved a prompt, and has nothing of it itself."""
    engine, copies = start(**{"sync_load_budget": 0, **settings})
    prompt = make_prompt(1, BLOCKS)
    engine.generate(prompt)
    engine.forget()
    return engine, copies, prompt


def step_until(engine: PlayedEngine, reached: Callable[[], Any], seconds: float = 10.0) -> float:
    """Step until something is so; how long it took."""
    began = time.monotonic()
    while not reached():
        assert time.monotonic() < began + seconds, f"still waiting: {engine.scheduler.requests}"
        engine.step()
        time.sleep(0.001)
    return time.monotonic() - began


def come_to_rest(engine: PlayedEngine, copies: HangingCopies) -> None:
    """The copies end; then nothing is held any more."""
    copies.go_on.set()
    transfer = engine.worker.cache_worker.transfers
    assert transfer is not None
    assert transfer.drain(10.0)
    for _ in range(3):
        engine.step()
    engine.run()
    engine.assert_at_rest()


@pytest.mark.parametrize("local", [0, 2], ids=["nothing local", "a local hit"])
@pytest.mark.parametrize("garbage", [False, True], ids=["written late", "garbage written late"])
def test_h07_h10_a_load_that_hangs_costs_its_request_the_deadline_and_no_other_anything(
    start: Callable[..., tuple[PlayedEngine, HangingCopies]], local: int, garbage: bool
) -> None:
    engine, copies, prompt = stored(start)
    if local:
        copies.restore()
        engine.generate(prompt[: local * BLOCK + 1])
        copies.__init__(engine)  # type: ignore[misc]
    copies.garbage = garbage
    free = engine.pool.get_num_free_blocks()
    hangs = engine.add(prompt)
    step_until(engine, copies.hung.is_set)
    other, other_prompt = engine.add(make_prompt(2, 3)), make_prompt(2, 3)
    step_until(engine, lambda: other.finish_reason)
    assert not engine.counts["overdue_loads"], "others are served meanwhile"
    assert step_until(engine, lambda: hangs.finish_reason) < SOON
    assert hangs.said == answer(prompt, 3)
    assert other.said == answer(other_prompt, 3)
    assert free - engine.pool.get_num_free_blocks() == BLOCKS - local, "what the copy may write is nobody's"
    behind = engine.add(prompt)
    step_until(engine, lambda: behind.finish_reason, SOON)
    assert behind.said == hangs.said
    come_to_rest(engine, copies)
    assert engine.counts["overdue_loads"] == 1
    assert engine.generate(prompt).said == hangs.said, "what was published is right"
    engine.forget()
    copies.restore()
    again = engine.generate(prompt)
    assert again.said == hangs.said
    assert again.cached_tokens == BLOCKS * BLOCK, "what is stored is not at fault"
    engine.assert_at_rest()


def test_h07_h10_two_loads_behind_one_copy_that_hangs(
    start: Callable[..., tuple[PlayedEngine, HangingCopies]],
) -> None:
    engine, copies = start(sync_load_budget=0)
    prompts = [make_prompt(seed, BLOCKS) for seed in range(3)]
    for prompt in prompts:
        engine.generate(prompt)
    engine.forget()
    played = [engine.add(prompt) for prompt in prompts]
    assert step_until(engine, lambda: all(one.finish_reason for one in played)) < SOON
    assert [one.said for one in played] == [answer(prompt, 3) for prompt in prompts]
    come_to_rest(engine, copies)
    assert engine.counts["overdue_loads"] == 3
    copies.restore()
    engine.forget()
    assert [engine.generate(prompt).cached_tokens for prompt in prompts] == [BLOCKS * BLOCK] * 3


def test_h07_h10_a_request_that_is_cancelled_while_its_load_hangs(
    start: Callable[..., tuple[PlayedEngine, HangingCopies]],
) -> None:
    engine, copies, prompt = stored(start, num_blocks=24)
    copies.garbage = True
    free = engine.pool.get_num_free_blocks()
    hangs = engine.add(prompt)
    step_until(engine, copies.hung.is_set)
    engine.cancel(hangs)
    step_until(engine, lambda: not engine.scheduler.requests)
    assert free - engine.pool.get_num_free_blocks() == BLOCKS
    others = [engine.add(make_prompt(seed, 8), max_tokens=30) for seed in range(2, 6)]
    step_until(engine, lambda: others[1].finish_reason)
    copies.go_on.set()
    step_until(engine, lambda: all(other.finish_reason for other in others))
    assert [other.said for other in others] == [answer(make_prompt(seed, 8), 30) for seed in range(2, 6)]
    come_to_rest(engine, copies)


@pytest.mark.parametrize("layerwise", [True, False])
def test_h07_h10_a_load_within_the_step_that_hangs_costs_the_step_its_deadline(
    start: Callable[..., tuple[PlayedEngine, HangingCopies]], layerwise: bool
) -> None:
    engine, copies, prompt = stored(start, sync_load_budget="1GiB", layerwise=layerwise)
    free = engine.pool.get_num_free_blocks()
    hangs = engine.add(prompt)
    assert step_until(engine, lambda: hangs.finish_reason) < SOON
    assert hangs.said == answer(prompt, 3)
    assert hangs.cached_tokens == 0
    assert free - engine.pool.get_num_free_blocks() == BLOCKS, "what the copy may write is nobody's"
    other = engine.add(make_prompt(2, 8), max_tokens=20)
    step_until(engine, lambda: other.said)
    copies.go_on.set()
    step_until(engine, lambda: other.finish_reason)
    assert other.said == answer(make_prompt(2, 8), 20)
    come_to_rest(engine, copies)
    assert engine.generate(prompt).said == hangs.said


def test_h10_an_idle_engine_gets_the_blocks_back_when_the_copy_ends(
    start: Callable[..., tuple[PlayedEngine, HangingCopies]],
) -> None:
    engine, copies, prompt = stored(start)
    hangs = engine.add(prompt)
    step_until(engine, lambda: hangs.finish_reason)
    copies.go_on.set()
    engine.run()
    engine.assert_at_rest()
