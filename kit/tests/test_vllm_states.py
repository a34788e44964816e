"""Models with states, with drafts, on vLLM's real schedulers: what vLLM offers, and what its own cache serves."""

import re
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact_testkit.results import Check, Verdict, as_text
from kvpact_testkit.vllm.driver import VllmDriver
from kvpact_testkit.vllm.oracle import OracleMemory
from kvpact_testkit.vllm.releases import RELEASES, installed_release, run_on_release
from kvpact_testkit.vllm.scenarios_states import (
    KEPT_STATES,
    LONG_WALKS,
    MODELS_WITH_DRAFTS,
    STATES_WITH_DRAFTS,
    WAYS,
)
from kvpact_testkit.vllm.state_layers import RunningState

QUIET = "quiet_connector:QuietConnector"
PACT = "kvpact.vllm:PactConnector"
OWN = {"memory": "4MiB", "model_id": "testkit"}
SMALL = {**OWN, "memory": "200KiB", "tiers": ["disk:///{folder}?capacity=1MiB"]}
REFERENCE = {**OWN, "memory": "256KiB", "cache": "kvpact_testkit.vllm.reference:make"}
NAMES = [scenario.name for scenario in STATES_WITH_DRAFTS]
WALKS = [name for name in NAMES if name.startswith("states")]
REAL = [scenario.name for scenario in MODELS_WITH_DRAFTS]
ONE = "states[mtp-3-one by one-runner 1]"
TURNS = ONE.replace("states", "turns")


def test_every_state_that_is_offered_or_read_is_right() -> None:
    """Where vLLM and the played worker are wrong by themselves, no connector can be judged.

    Every third walk: there is one with each kind and number of drafts, each order of steps and each runner.
    """
    report = VllmDriver(QUIET, timeout=60.0).run(WALKS[::3])
    assert {check.verdict for check in report.checks} == {Verdict.KEPT}, as_text(report)


@pytest.mark.parametrize(
    "release", [pytest.param(one, marks=pytest.mark.soak) for one in RELEASES if one != installed_release()]
)
@pytest.mark.timeout(900)
def test_every_state_is_right_on_other_releases(release: str) -> None:
    report = run_on_release(release, QUIET, {}, WALKS)
    assert {check.verdict for check in report.checks} == {Verdict.KEPT}, as_text(report)


def promises(check: Check) -> int:
    """How often the connector promised something in a walk."""
    found = re.search(r"(\d+) promises", check.note)
    assert found, check
    return int(found[1])


@pytest.mark.parametrize(
    "config",
    [pytest.param(OWN, marks=pytest.mark.proof), SMALL, REFERENCE],
    ids=["own", "small", "reference"],
)
def test_states_with_drafts_are_served(config: dict[str, Any]) -> None:
    report = VllmDriver(PACT, config, timeout=60.0).run(NAMES if config is OWN else NAMES[8::5])
    assert {check.verdict for check in report.checks} == {Verdict.KEPT}, as_text(report)
    assert sum(map(promises, report.checks)) > 0, as_text(report)


def test_turns_of_real_models_are_served() -> None:
    report = VllmDriver(PACT, {**OWN, "memory": "64MiB"}, timeout=60.0).run(REAL)
    assert {check.verdict for check in report.checks} == {Verdict.KEPT}, as_text(report)


@pytest.mark.parametrize(
    "release",
    [
        pytest.param(one, marks=pytest.mark.proof if one == list(RELEASES)[-1] else pytest.mark.soak)
        for one in RELEASES
        if one != installed_release()
    ],
)
@pytest.mark.timeout(900)
def test_states_with_drafts_are_served_on_other_releases(release: str) -> None:
    report = run_on_release(release, PACT, {**SMALL, "memory": "64MiB"}, [*NAMES, *REAL])
    assert {check.verdict for check in report.checks} == {Verdict.KEPT}, as_text(report)
    assert sum(map(promises, report.checks)) > 0, as_text(report)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.soak
def test_fifty_thousand_steps_of_states_with_drafts(release: str, way: str) -> None:
    names = [scenario.name for scenario in LONG_WALKS if way in scenario.name]
    halves = ((SMALL, names[::2]), (OWN, names[1::2]))
    reports = [run_on_release(release, PACT, config, half, seconds=7200.0) for config, half in halves]
    for report in reports:
        assert {check.verdict for check in report.checks} == {Verdict.KEPT}, as_text(report)
    notes = "; ".join(check.note for report in reports for check in report.checks)
    counted = {what: sum(map(int, re.findall(rf"(\d+) {what}", notes))) for what in ("steps", "states", "promises")}
    print(release, way, counted)
    assert counted["steps"] >= 50_000, counted
    assert min(counted.values()) > 0, counted


@pytest.mark.parametrize(
    "release", [pytest.param(one, marks=() if one == installed_release() else pytest.mark.soak) for one in RELEASES]
)
@pytest.mark.timeout(900)
def test_what_vllm_keeps_is_hit_and_nothing_else(release: str) -> None:
    report = run_on_release(release, PACT, OWN, [scenario.name for scenario in KEPT_STATES])
    assert {check.verdict for check in report.checks} == {Verdict.KEPT}, as_text(report)


# What the scenarios would miss if they could not fail


def test_a_scheduler_that_offers_one_boundary_too_many_is_seen() -> None:
    report = VllmDriver(QUIET, timeout=60.0, scheduler="broken_schedulers.OffersOneBoundaryOff").run([ONE])
    assert {found.broken for check in report.checks for found in check.violations} == {"P2"}, as_text(report)


def _skips_boundaries(self: RunningState, running: int, sampled: int, copy: Any) -> None:
    self.accepted = max(sampled, 1)


def _forgets_drafts(self: RunningState, computed: int, scheduled: int, copy: Any) -> None:
    self.accepted = 1
    moves(self, computed, scheduled, copy)


moves = RunningState.before


def _copies_no_window(self: OracleMemory, source: int, behind_it: int, target: int, *rest: Any) -> None:
    *_, layer = rest
    place = self._layers[layer].place
    place[target, rest[1] :] = place[behind_it, rest[1] :]


@pytest.mark.parametrize(
    "cache", ["names_the_next_boundary", "keeps_states_of_drafts", "joins_tails", "promises_a_state_alone"]
)
def test_a_cache_that_mistakes_one_state_for_another_is_seen(cache: str) -> None:
    report = VllmDriver(PACT, {**REFERENCE, "cache": f"broken_states:{cache}"}, timeout=60.0).run([ONE, TURNS])
    assert "P2" in {found.broken for check in report.checks for found in check.violations}, as_text(report)


def test_a_state_that_is_read_before_its_step_has_ended_is_seen() -> None:
    """What a step's end puts into a block is named at once only where names do not cover the next token."""
    report = VllmDriver("broken_states:SavesBeforeSampling", OWN, timeout=60.0).run(
        ["turns[ngram-3-one by one-runner 1]"]
    )
    assert "P2" in {found.broken for check in report.checks for found in check.violations}, as_text(report)


def test_a_worker_that_copies_no_block_for_a_hit_inside_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OracleMemory, "copy_block", lambda *blocks: None)
    report = VllmDriver(PACT, OWN, timeout=60.0).run(["partial tails"])
    assert "P2" in {found.broken for check in report.checks for found in check.violations}, as_text(report)


@pytest.mark.parametrize(
    ("owner", "method", "wrong"),
    [
        (RunningState, "after", _skips_boundaries),
        (RunningState, "before", _forgets_drafts),
        (OracleMemory, "copy_state", _copies_no_window),
    ],
    ids=["boundary", "drafts", "window"],
)
def test_a_worker_that_leaves_a_state_elsewhere_is_seen(
    owner: type, method: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, wrong)
    report = VllmDriver(QUIET, timeout=60.0).run([ONE])
    assert "P2" in {found.broken for check in report.checks for found in check.violations}, as_text(report)
