"""The scheduler context's promises, on the embedded engine and on vLLM's real scheduler.

`test_vllm_releases.py` runs the same checks on the other releases.
"""

from __future__ import annotations

import importlib.util

import pytest

from kvpact.testkit.context_checks import CHECKS, EmbeddedStage
from kvpact.testkit.results import Verdict, as_text

ENGINES = ["embedded", "vllm"]


@pytest.mark.parametrize("engine", ENGINES)
class TestSchedulerContext:
    """One class for both: a connector may rely on the same rules wherever it runs."""

    @pytest.mark.parametrize("name", CHECKS)
    def test_context(self, name: str, engine: str) -> None:
        if engine == "embedded":
            CHECKS[name](EmbeddedStage(by_priority="priority" in name))
            return
        if importlib.util.find_spec("vllm") is None:
            pytest.skip("no engine is installed; `make setup` installs one")
        from kvpact.testkit.vllm.driver import VllmDriver

        report = VllmDriver("kvpact.vllm:PactConnector", {"memory": "1MiB", "model_id": "testkit"}).run(
            [f"context_{name}"]
        )
        assert [check.verdict for check in report.checks] == [Verdict.KEPT], as_text(report)
