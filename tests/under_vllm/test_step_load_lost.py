"""P14: a copy that fails although a step relies on it costs requests their step, never the engine and never an answer.

vLLM has published the step's blocks, and the next step may be planned: all requests whose blocks were computed over
such a block begin again. The scheduler, both halves of the connector, the hook and the store are real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from steps_that_fail import SETTINGS, engine_over, play
from vllm.v1.core.sched.scheduler import Scheduler

from kvpact.config import load_config
from kvpact.errors import ConfigError
from kvpact.vllm.checks import require_no_restarts
from kvpact_testkit.vllm.model_groups import GEMMA
from kvpact_testkit.vllm.releases import RELEASES, fetch_release, installed_release, releases_folder
from vllm_played_engine import BLOCK, PlayedEngine, answer, flush, make_prompt, wait_before_loads

SCRIPT = str(Path(__file__).with_name("steps_that_fail.py"))
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
        if broken == "wait_for_loads" and not transfer.under_way:
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
    before = engine.computed_tokens
    engine.run()
    assert engine.computed_tokens - before == len(PROMPT) + len(OTHER) - STEM + 2 * 2
    assert engine.counts["used_tokens"] == engine.external_hits == 0
    assert finder.said == answer(PROMPT, 3)
    assert sharer.said == answer(OTHER, 3)
    assert finder.cached_tokens == 0
    assert sharer.cached_tokens == STEM, "the finder computed them"
    stranger = engine.generate(STRANGER, 1)
    assert stranger.cached_tokens == STEM
    engine.forget()
    again = engine.generate(OTHER, 1)
    assert again.said == answer(OTHER, 1)


@pytest.mark.parametrize("gone", [0, 1], ids=["finder", "sharer"])
def test_h28_what_a_request_left_behind_that_was_cancelled_meanwhile_is_not_found(
    start: Callable[..., PlayedEngine], filled: str, gone: int
) -> None:
    """What it computed over the lost blocks is in vLLM's prefix cache by then, and no table names it any more."""
    engine = start(filled, **STEP)
    break_next_load(engine, "scatter")
    requests = [engine.add(PROMPT), engine.add(OTHER)]
    engine.step(lambda: engine.cancel(requests[gone]))
    before = engine.computed_tokens
    engine.run()
    (stays,) = (one for one in requests if one is not requests[gone])
    prompt = stays.request.prompt_token_ids
    assert stays.said == answer(prompt, 3)
    assert stays.cached_tokens == len(prompt) + 2 - (engine.computed_tokens - before)
    for later in (PROMPT, OTHER):
        assert engine.generate(later, 1).said == answer(later, 1)


def test_h07_a_copy_that_hangs_writes_to_nobody_elses_blocks(start: Callable[..., PlayedEngine], filled: str) -> None:
    """The step waits for it until its deadline; until the copy ends its blocks and its slots are held."""
    engine = start(filled, load_deadline="200ms", **STEP)
    go_on = threading.Event()
    wait_before_loads(engine, go_on)
    finder = engine.add(PROMPT, 20)
    engine.step()
    assert finder.said == []
    held = engine.free_blocks_at_rest - engine.pool.get_num_free_blocks()
    assert held >= 6, "the copy may still write to them"
    for _ in range(25):
        engine.step()
    assert finder.said == answer(PROMPT, 20)
    assert engine.free_blocks_at_rest - engine.pool.get_num_free_blocks() >= 6
    go_on.set()
    engine.run()
    while engine.counts["leases_held"] or engine.free_blocks_at_rest != engine.pool.get_num_free_blocks():
        engine.step()


# Steps under way


@pytest.mark.parametrize("cancelled", ["", "finder", "sharer"])
@pytest.mark.parametrize("name", SETTINGS)
def test_requests_begin_again_whatever_steps_of_theirs_are_under_way(name: str, cancelled: str) -> None:
    require_right(play(name, cancelled=cancelled), cancelled)


@pytest.mark.parametrize(
    "release",
    [
        pytest.param(one, marks=pytest.mark.proof if one == "0.33.0" else pytest.mark.soak)
        for one in RELEASES
        if one != installed_release()
    ],
)
@pytest.mark.timeout(900)
def test_requests_begin_again_on_other_releases(release: str) -> None:
    path = [str(fetch_release(release)), *(entry for entry in sys.path if entry)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_LOGGING_LEVEL": "CRITICAL",
        "VLLM_CACHE_ROOT": str(releases_folder() / f"{release}-cache"),
    }
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for played in json.loads(done.stdout.splitlines()[-1]).values():
        require_right(played)


def require_right(played: dict[str, Any], cancelled: str = "") -> None:
    """Nobody got a wrong token or an error, only who shared the lost blocks began again, and nothing wrong is kept."""
    assert not played["wrong"]
    assert not played["published"]
    names = {"stranger", "finder", "sharer", "later"}
    assert played["ended"] == {**dict.fromkeys(names, "length"), **({cancelled: "abort"} if cancelled else {})}
    assert played["preempted"] == 0
    if not cancelled:
        assert played["cached"] == {"stranger": 0, "finder": 0, "sharer": STEM, "later": 9 * BLOCK}
    assert played["held"] == played["leases"] == 0


def test_with_the_policy_fail_the_requests_end_with_an_error_and_nobody_else() -> None:
    for name in ("one step at a time", "asynchronous"):
        played = play(name, failure_policy="fail")
        assert played["ended"] == {"finder": "error", "sharer": "error", "stranger": "length", "later": "length"}
        assert played["said"] == {"finder": [], "sharer": []}
        assert played["wrong"] == ["finder", "sharer"]
        assert not played["published"]
        assert played["held"] == played["leases"] == 0


# Several groups


@pytest.mark.parametrize("overlap", [False, True])
def test_an_adapter_exchanged_between_load_and_use_costs_its_requests_and_not_the_engine(
    tmp_path: Path, overlap: bool
) -> None:
    """vLLM's own scheduler takes no word of single blocks of several groups: it ends."""
    config = {"memory": "4MiB", "model_id": "testkit"}
    with engine_over(config, groups=GEMMA, overlap=overlap) as engine:
        prompt = stored = make_prompt(1, 6)
        engine.add("first", stored, max_tokens=2)
        assert engine.finish()
        assert engine.drain()
        assert engine.forget_computed()
        engine.add("stranger", make_prompt(2, 3), max_tokens=40)
        engine.add("loads", prompt, max_tokens=8)
        assert engine.run(lambda: engine.status("loads") == "RUNNING")
        tables = engine.scheduler.kv_cache_manager.get_block_ids("loads")
        for rank in engine.ranks:  # as the worker does where the stamp is another one by then
            rank.connector.cache_worker.jobs.report_invalid(block for table in tables for block in table if block)
        said = len(engine.observed.outputs["loads"])
        stranger, loads = (engine.scheduler.requests[one] for one in ("stranger", "loads"))
        engine.step(1 + overlap)
        assert len(engine.observed.outputs["loads"]) <= said + overlap
        assert engine.finish()
        assert engine.observed.outputs == {one: engine.expected(one) for one in ("first", "stranger", "loads")}
        assert (stranger.num_preemptions, loads.num_preemptions) == (0, 1)
        assert engine.drain()
        assert not engine.held_blocks
        assert not engine.wrong_published()


# What is refused


def test_matches_at_the_step_need_a_scheduler_that_begins_requests_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"add --scheduler-cls kvpact\.vllm\.scheduler\.pact_scheduler"):
        PlayedEngine(tmp_path, scheduler_class=Scheduler, **STEP)


def test_adapters_on_several_groups_need_it_too() -> None:
    several: Any = SimpleNamespace(several=True)
    with_adapters: Any = SimpleNamespace(lora_config=object())
    settings = load_config({}, {})
    with pytest.raises(ConfigError, match="LoRA with several KV cache groups needs a scheduler"):
        require_no_restarts(settings, with_adapters, several)
    require_no_restarts(settings, SimpleNamespace(lora_config=None), several)
