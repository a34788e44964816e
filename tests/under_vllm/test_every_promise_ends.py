"""Under `kvpact.vllm.scheduler` every match of every connector that speaks the pact ends, and none twice.

vLLM's schedulers are real; the workers are played (docs/internals/vllm-driver.md). The connectors
are those of `leasing`.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from leasing_connectors import Leasing, OfThePact

from at_the_end import at_the_end
from kvpact.contract import ExternalMatchExit
from kvpact_testkit.vllm.compat import EngineSettings
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import named, under_multi_connector
from kvpact_testkit.vllm.simple_connector import SimpleConnector
from leasing import KINDS, Account, GetsMatchBack
from leasing_runs import BLOCK, SCHEDULER, Run, prompt_of, run_embedded, run_on_vllm

SPEAK_THE_PACT = [kind for kind in KINDS if kind != "plain tuple"]
WITHOUT_PLAN = "abort by request"


@pytest.mark.parametrize(
    "num_blocks", [20, pytest.param(40, marks=pytest.mark.proof), pytest.param(400, marks=pytest.mark.proof)]
)
@pytest.mark.parametrize("kind", SPEAK_THE_PACT)
@pytest.mark.parametrize("embedded", [False, True])
def test_h114_no_lease_is_left(kind: str, num_blocks: int, embedded: bool) -> None:
    """936 of 976 were, with connectors that lease anew in each lookup, also of those that name their plan."""
    run = run_embedded(kind, num_blocks) if embedded else run_on_vllm(kind, num_blocks, scheduler=SCHEDULER)
    _none_left(run)
    assert run.commits >= 40
    assert sum(run.aborts.values()) + run.commits == run.found
    if kind == WITHOUT_PLAN:
        assert run.found <= 1.1 * run.commits


@pytest.mark.parametrize("num_blocks", [20, 40])
def test_h114_a_match_that_comes_back_in_place_of_the_number_leaves_no_lease(
    num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "match", GetsMatchBack)
    run = run_on_vllm("match", num_blocks, scheduler=SCHEDULER)
    _none_left(run)
    assert (run.found, run.commits) == ((976, 40) if num_blocks == 20 else (178, 40))


def _none_left(run: Run) -> None:
    assert run.left == 0
    assert run.most <= 1
    assert not run.mistakes


def test_without_the_class_they_leak() -> None:
    """The tests above can fail."""
    run = run_on_vllm("memoising, plan object", 20)
    assert (run.found, run.commits, run.left) == (976, 40, 936)
    plain = run_on_vllm("plain tuple", 20, scheduler=SCHEDULER)
    assert (plain.lookups, plain.left) == (976, 936), "who has no word for an abort sees nothing new"


@pytest.mark.parametrize("settings", [{"overlap": True}, {"draft_tokens": 2}, {"stages": 2}, {"token_budget": 96}])
@pytest.mark.parametrize("kind", [SPEAK_THE_PACT[0], WITHOUT_PLAN])
def test_h114_also_with_drafts_asynchronous_scheduling_and_two_stages(kind: str, settings: dict[str, Any]) -> None:
    _none_left(run_on_vllm(kind, 30, scheduler=SCHEDULER, **settings))


def engine_with(transfer: dict[str, Any], tokens: list[int], **settings: Any) -> VllmEngine:
    """An engine whose connectors have stored the first ten blocks of these tokens, and that has forgotten them."""
    engine = VllmEngine(EngineSettings(num_blocks=21, scheduler=SCHEDULER, **settings), transfer, lambda line: None)
    at_the_end(engine.close)
    engine.add("stored", tokens[:161], max_tokens=1)
    engine.finish("stored")
    engine.drain()
    engine.forget_computed()
    return engine


def test_h114_another_request_computes_a_part_of_the_stem() -> None:
    """vLLM then asks behind it, and another match is committed; the first one never heard a word."""
    transfer = {"kv_connector": "Memoises", "kv_connector_module_path": "leasing_on_vllm"}
    stem = prompt_of(1)
    engine = engine_with(transfer, stem, by_priority=True)
    account = engine.connector.__dict__["_account"] = Account()
    engine.add("wall", prompt_of(2), max_tokens=2 * BLOCK)
    engine.step()
    engine.add("waits", stem, max_tokens=1, priority=5)
    engine.step()
    (first,) = account.open["waits"]
    engine.add("sibling", [*stem[:32], *prompt_of(3)[:8]], max_tokens=1, priority=0)
    engine.step(2)
    (second,) = account.open["waits"]
    assert (first.question[0], second.question[0]) == (0, 32)
    assert engine.finish("wall", "sibling", "waits")
    assert (account.left, account.aborts, account.mistakes) == (0, [ExternalMatchExit.SUPERSEDED], [])


@pytest.fixture
def open_match() -> VllmEngine:
    """An engine with a match open: the head of its queue is blocked."""
    Leasing.begin()
    engine = engine_with(named(OfThePact), prompt_of(1))
    engine.add("wall", prompt_of(2)[:160], max_tokens=100)
    engine.step()
    engine.add("blocked", prompt_of(1)[:170], max_tokens=1)
    engine.step()
    assert engine.connector.leases == {"blocked": 10}
    Leasing.heard.clear()
    return engine


def test_h114_the_end_of_the_engine_ends_every_match(open_match: VllmEngine) -> None:
    open_match.close()
    assert Leasing.heard == [("abort", "blocked", ExternalMatchExit.CANCELLED)]


def test_h114_connectors_inside_a_multi_connector_inside_another_are_told_too() -> None:
    transfer = under_multi_connector(named(SimpleConnector), under_multi_connector(named(OfThePact)))
    Leasing.begin()
    engine = engine_with(transfer, prompt_of(1))
    engine.add("loser", prompt_of(1)[:170], max_tokens=1)
    assert engine.finish("loser")
    assert ("abort", "loser", ExternalMatchExit.OTHER_CONNECTOR) in Leasing.heard
    engine.add("wall", prompt_of(2)[:160], max_tokens=100)
    engine.forget_computed()
    engine.step()
    engine.add("blocked", prompt_of(1)[:170], max_tokens=1)
    engine.step()
    engine.abort("blocked")
    assert Leasing.heard[-1] == ("abort", "blocked", ExternalMatchExit.CANCELLED)
