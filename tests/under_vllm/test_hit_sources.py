"""vLLM's statistics say where the tokens of a hit were found: in memory, on a disk, or elsewhere; from vLLM 0.32 on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from vllm.v1.core.sched.scheduler import Scheduler

from kvpact.vllm.compat import objects
from kvpact.vllm.hit_accounting import HitCredit
from kvpact.vllm.scheduler import KvpactScheduler
from vllm_played_engine import BLOCK, PlayedEngine, make_prompt

BLOCKS = 6
PROMPT = make_prompt(7, BLOCKS, 5)
SHORT = PROMPT[: 2 * BLOCK + 1]
"""Its first two blocks, and a token to compute."""
ALL = BLOCKS * BLOCK


@pytest.fixture(params=[Scheduler, KvpactScheduler])
def start_again(
    start: Callable[..., PlayedEngine], request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[..., PlayedEngine]:
    """Starts an engine after another one has stored `PROMPT` in a tier."""

    def start_again(scheme: str, **settings: Any) -> PlayedEngine:
        (tmp_path / "tier").mkdir()
        named = {"scheduler_class": request.param, **settings}
        first = start(tier := f"{scheme}://{tmp_path}/tier?capacity=64MiB", **named)
        first.generate(PROMPT)
        first.run()
        first.close()
        return start(tier, **named)

    return start_again


@pytest.mark.parametrize("budget", ["1GiB", 0], ids=["sync", "async"])
@pytest.mark.parametrize("scheme", ["disk", "dir"])
def test_a_hit_is_counted_where_it_was_found(
    start_again: Callable[..., PlayedEngine], scheme: str, budget: object
) -> None:
    engine = start_again(scheme, sync_load_budget=budget, recompute_if_faster=False)
    engine.generate(SHORT)
    assert engine.external_sources == {"disk": 2 * BLOCK}
    engine.forget()
    engine.generate(PROMPT)
    assert engine.external_sources == {"host": 2 * BLOCK, "disk": ALL}, "what was read before is in memory"
    engine.forget()
    engine.generate(PROMPT)
    assert engine.external_sources == {"host": 2 * BLOCK + ALL, "disk": ALL}
    assert engine.external_hits == engine.external_hits_by_source == 2 * BLOCK + 2 * ALL


def admitted(*found: tuple[str, int], preemptions: int = 0) -> HitCredit:
    """A load of 100 tokens, found there."""
    credit = HitCredit()
    stats = SimpleNamespace(num_cached_tokens=100, num_external_cached_tokens=100, num_computed_tokens=0)
    request = SimpleNamespace(request_id="r", prefill_stats=stats, num_preemptions=preemptions)
    credit.admit(request, 100, synchronous=True, found=found)
    return credit


def test_what_is_not_known_is_unspecified() -> None:
    assert admitted(("host", 30), ("disk", 40)).places("r", 100) == {"host": 30, "disk": 40, "external_unspecified": 30}
    assert admitted(("host", 30), ("disk", 90)).places("r", 50) == {"host": 30, "disk": 20}
    assert admitted().places("another", 50) == {"external_unspecified": 50}


def test_tokens_that_failed_to_load_leave_their_place_again() -> None:
    credit = admitted(("host", 30), ("disk", 70))
    assert credit.corrections() == (-100, 0, {"host": -30, "disk": -70})
    credit.load_failed("r", 40)
    credit.step_reported("r")
    assert credit.corrections() == (40, 0, {"host": 30, "disk": 10})
    assert credit.corrections() == (0, 0, {})


def test_hits_after_a_preemption_have_no_place_as_in_vllm() -> None:
    credit = admitted(("host", 100), preemptions=1)
    credit.step_reported("r")
    assert credit.corrections() == (0, 0, {})


def test_a_release_without_sources_is_told_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.metrics.cache_hit_source", None)
    monkeypatch.setattr(objects, "hit_sources", objects.hit_sources.__wrapped__)
    assert objects.by_source({"host": 3}) == {}
    counted = SimpleNamespace(hits=3)
    objects.correct_hit_sources(counted, {"host": 3})
    assert vars(counted) == {"hits": 3}
