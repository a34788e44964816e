"""Models with several KV cache groups on vLLM's real schedulers: a connector's hooks, whatever kvpact's cache does."""

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.vllm.connector import PactConnector
from kvpact.worker.rank_jobs import RankJobs
from kvpact_testkit.results import Verdict, as_text
from kvpact_testkit.vllm.compat import EngineSettings
from kvpact_testkit.vllm.driver import VllmDriver
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, named
from kvpact_testkit.vllm.model_groups import STATES
from kvpact_testkit.vllm.releases import RELEASES, installed_release, run_on_release
from kvpact_testkit.vllm.scenarios_divergent import DIVERGENT
from kvpact_testkit.vllm.scenarios_groups import GROUPS

CONNECTOR = "kvpact.vllm:PactConnector"
CONFIG = {"memory": "4MiB", "model_id": "testkit", "cache": "kvpact_testkit.vllm.reference:make"}
NAMES = [scenario.name for scenario in (*GROUPS, *DIVERGENT)]
ENDS = [release for release in RELEASES if release != installed_release()][:: len(RELEASES) - 2]


def test_groups_are_served_on_the_installed_release() -> None:
    report = VllmDriver(CONNECTOR, CONFIG).run(NAMES)
    assert {check.verdict for check in report.checks} == {Verdict.KEPT}, as_text(report)


@pytest.mark.parametrize(
    "release",
    [
        pytest.param(one, marks=pytest.mark.proof if one in ENDS else pytest.mark.soak)
        for one in RELEASES
        if one != installed_release()
    ],
)
@pytest.mark.timeout(900)
def test_groups_are_served_on_other_releases(release: str) -> None:
    report = run_on_release(release, CONNECTOR, CONFIG, NAMES)
    assert {check.verdict for check in report.checks} == {Verdict.KEPT}, as_text(report)


def test_what_one_group_alone_has_must_not_count_as_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's offer of divergent hits would do: of a window, blocks are missing that nobody loads."""
    monkeypatch.setattr(PactConnector, "supports_divergent_local_hybrid_hits", True)
    report = VllmDriver(CONNECTOR, CONFIG).run(["one_group_alone_is_evicted"])
    assert report.broken, as_text(report)


def test_h132_no_local_prefix_is_joined_with_a_deeper_tail_and_no_tail_of_a_block_is_kept() -> None:
    """vLLM's scheduler asks a connector about both."""
    settings = EngineSettings(groups=STATES, block_size=BLOCK)
    transfer = {**named(PactConnector), "kv_connector_extra_config": {"memory": "4MiB", "model_id": "testkit"}}
    engine = VllmEngine(settings, transfer, lambda line: None)
    assert engine.connector.supports_divergent_local_hybrid_hits is False
    assert engine.connector.register_finished_partial_tail(None, ([1], [2]), [(1, 2, BLOCK // 2)]) is False
    engine.close()


def test_a_load_that_arrives_once_for_each_group_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the scenario would miss if it could not fail."""
    built = RankJobs.__init__
    monkeypatch.setattr(
        RankJobs, "__init__", lambda self, stores, whole_requests: built(self, stores=stores, whole_requests=False)
    )
    report = VllmDriver(CONNECTOR, CONFIG).run(["a_load_of_groups_fails"])
    assert report.broken, as_text(report)
