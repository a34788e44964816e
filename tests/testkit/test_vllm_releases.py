"""`PactConnector` on the other releases: each from its wheel's Python files, in its own process."""

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.testkit.verdict import Verdict, as_text
from kvpact.testkit.vllm_driver import SCENARIOS
from kvpact.testkit.vllm_releases import RELEASES, installed_release, run_on_release

# Small matches are loaded inside the step, larger ones later, and most come from disk: every path of the connector.
CONFIG = {
    "memory": "160KiB",
    "model_id": "testkit",
    "sync_load_limit": "32KiB",
    "plan_lifetime": "20ms",
    "tiers": ["disk:///{folder}?capacity=1MiB"],
}


@pytest.mark.parametrize("release", [release for release in RELEASES if release != installed_release()])
@pytest.mark.timeout(900)
def test_every_scenario_is_kept(release: str) -> None:
    """The first run fetches the release, the first import compiles it; then it takes half a minute."""
    report = run_on_release(release, "kvpact.vllm:PactConnector", CONFIG)
    assert report.engine == f"vLLM {release}"
    assert len(report.checks) == len(SCENARIOS)
    assert all(check.verdict is Verdict.KEPT for check in report.checks), as_text(report)
