"""Models with states, with drafts, on vLLM's real schedulers: what vLLM offers, and what its own cache serves."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact_testkit.results import Verdict, as_text
from kvpact_testkit.vllm.driver import VllmDriver
from kvpact_testkit.vllm.oracle import OracleMemory
from kvpact_testkit.vllm.releases import RELEASES, installed_release, run_on_release
from kvpact_testkit.vllm.scenarios_states import STATES_WITH_DRAFTS
from kvpact_testkit.vllm.state_layers import RunningState

QUIET = "quiet_connector:QuietConnector"
NAMES = [scenario.name for scenario in STATES_WITH_DRAFTS]
ONE = "states[mtp-3-one by one-runner 1]"


def test_every_state_that_is_offered_or_read_is_right() -> None:
    """Where vLLM and the played worker are wrong by themselves, no connector can be judged."""
    report = VllmDriver(QUIET).run(NAMES)
    assert {check.verdict for check in report.checks} == {Verdict.KEPT}, as_text(report)


@pytest.mark.parametrize(
    "release", [pytest.param(one, marks=pytest.mark.soak) for one in RELEASES if one != installed_release()]
)
@pytest.mark.timeout(900)
def test_every_state_is_right_on_other_releases(release: str) -> None:
    report = run_on_release(release, QUIET, {}, NAMES)
    assert {check.verdict for check in report.checks} == {Verdict.KEPT}, as_text(report)


# What the scenarios would miss if they could not fail


def test_a_scheduler_that_offers_one_boundary_too_many_is_seen() -> None:
    report = VllmDriver(QUIET, scheduler="broken_schedulers.OffersOneBoundaryOff").run([ONE])
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
    report = VllmDriver(QUIET, timeout=5.0).run([ONE])
    assert "P2" in {found.broken for check in report.checks for found in check.violations}, as_text(report)
