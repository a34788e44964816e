"""What workers had when a step began is counted for any connector, by `kvpact.vllm.scheduler`, where vLLM counts hits.

The connector counts nothing itself and is not kvpact's. vLLM's schedulers are real, the workers are played; real
engines do the same in test_engine_step_hook.py.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import step_connector
from hooked_engine import BLOCK, COMPANIES, STORED, HookedEngine, hooked_engine, prompt

import kvpact
from kvpact_testkit.vllm.releases import RELEASES, fetch_release, installed_release

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["one step at a time", "asynchronous scheduling"])


@pytest.fixture(autouse=True)
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """What the connectors have said so far."""
    monkeypatch.setattr(step_connector, "CONTROL", tmp_path)
    return (tmp_path / "said").read_text


@OVERLAP
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("budget", "parts"), [(2048, 1), (64, 3)])
def test_h70_what_the_step_skipped_is_told_and_counted(
    overlap: bool, ranks: int, budget: int, parts: int, said: Callable[[], str]
) -> None:
    with hooked_engine(overlap=overlap, ranks=ranks, token_budget=budget) as hooked:
        hooked.engine.add("again", [*STORED, 1, 2])
        assert hooked.engine.finish()
        stats = hooked.told["again"]
        assert stats.num_external_cached_tokens == stats.num_cached_tokens == len(STORED) - (parts - 1)
        assert stats.num_computed_tokens == 2 + (parts - 1), "of each part one token is computed"
        assert hooked.counted.hits == stats.num_cached_tokens
        assert hooked.counted.queries == len(STORED) + len(STORED) + 2
        hooked.assert_counts_are_true()
    assert said().count('"hits"') == parts, "the connector's own report reaches its other half as ever"


@OVERLAP
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("company", [company for company in COMPANIES if company != "alone"])
def test_h70_inside_multi_connector_what_the_step_skipped_is_told_and_counted_once(
    company: str, ranks: int, overlap: bool, said: Callable[[], str]
) -> None:
    with hooked_engine(company, overlap=overlap, ranks=ranks) as hooked:
        hooked.engine.add("again", [*STORED, 1, 2])
        assert hooked.engine.finish()
        assert hooked.told["again"].num_external_cached_tokens == hooked.counted.hits == len(STORED)
        hooked.assert_counts_are_true()
    assert said().count('"bound"') == ranks * (2 if company == "both of two" else 1)
    assert said().count('"hits"') == 1, "the connector that supplied them tells its other half"


@OVERLAP
def test_h70_a_request_that_leaves_while_its_step_computes_is_counted(overlap: bool) -> None:
    with hooked_engine(overlap=overlap) as hooked:
        hooked.engine.add("leaves", [*STORED, 1, 2])
        hooked.engine.abort("leaves", during_step=True)
        hooked.engine.step(2)
        assert "leaves" not in hooked.scheduler.requests
        assert hooked.counted.hits == len(STORED)
        hooked.assert_counts_are_true()


def preempt(hooked: HookedEngine) -> None:
    """Preempt all that runs, and forget what it computed: also where vLLM refuses that, as blocks are still in use."""
    hooked.engine.reset(running=True, connector=False)
    assert not hooked.scheduler.running
    hooked.engine.evict_computed()


@OVERLAP
def test_h70_hits_after_a_preemption_are_counted_apart(overlap: bool) -> None:
    with hooked_engine(overlap=overlap) as hooked:
        hooked.engine.add("again", [*STORED, 1, 2], max_tokens=20)
        hooked.engine.step(4)
        preempt(hooked)
        assert hooked.engine.finish()
        assert hooked.told["again"].num_cached_tokens == hooked.counted.hits == len(STORED)
        assert hooked.counted.preempted_hits >= len(STORED)
        hooked.assert_counts_are_true()


def test_h70_a_request_that_is_preempted_before_its_step_is_judged_is_counted_as_it_was() -> None:
    with hooked_engine(overlap=True) as hooked:
        hooked.engine.add("again", [*STORED, 1, 2])
        hooked.engine.step()
        assert "again" not in hooked.told, "the step is not judged"
        preempt(hooked)
        assert hooked.engine.finish()
        assert hooked.counted.hits == len(STORED)
        assert hooked.counted.preempted_hits == len(STORED)
        hooked.assert_counts_are_true()


def play(hooked: HookedEngine, seed: int) -> None:
    """Requests share stems, are preempted and leave in an engine that is too small for them."""
    dice = random.Random(seed)
    engine = hooked.engine
    for number in range(24):
        stem = dice.randrange(len(STORED) // BLOCK) * BLOCK
        engine.add(f"{number}", [*STORED[:stem], *prompt(100 + number, 2)], max_tokens=dice.randrange(1, 60))
        if dice.random() < 0.2:
            engine.abort(f"{number}", during_step=dice.random() < 0.5)
        engine.step(dice.randrange(6))
        if dice.random() < 0.1:
            preempt(hooked)
    assert engine.finish(seconds=60.0)


@OVERLAP
@pytest.mark.parametrize(("seed", "company"), [(0, "alone"), (1, "alone"), (2, "second of two"), (3, "both of two")])
def test_h70_hits_are_what_was_not_computed_whoever_is_preempted_and_whoever_leaves(
    overlap: bool, seed: int, company: str
) -> None:
    with hooked_engine(company, overlap=overlap, num_blocks=25, token_budget=96) as hooked:
        play(hooked, seed)
        assert hooked.engine.observed.preemptions > 0
        assert hooked.counted.hits > 0 < hooked.counted.preempted_hits, "the scene is too easy"
        hooked.assert_counts_are_true()


@OVERLAP
def test_statistics_that_are_off_cost_nothing(overlap: bool) -> None:
    with hooked_engine(overlap=overlap) as hooked:
        hooked.scheduler.connector_prefix_cache_stats = None
        hooked.engine.add("again", [*STORED, 1, 2])
        assert hooked.engine.finish()
        assert hooked.told["again"].num_cached_tokens == len(STORED)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("release", [release for release in RELEASES if release != installed_release()])
def test_each_release_counts_what_its_steps_skipped(release: str) -> None:
    """All of this module once more, in a process that imports that release."""
    folder = fetch_release(release)
    path = os.pathsep.join(
        [str(folder), str(Path(kvpact.__file__).parents[1]), *(entry for entry in sys.path if entry)]
    )
    caches = str(folder.with_name(f"{release}-cache"))
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_CACHE_ROOT": caches, "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "h70", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:]
