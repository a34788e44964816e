"""The scheduler context's promises, on the embedded engine and on vLLM's real scheduler.

`test_vllm_releases.py` runs the same checks on the other releases.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest

from kvpact.contract import SchedulerContext
from kvpact_testkit.context_checks import BLOCK, BLOCKS, CHECKS
from kvpact_testkit.engine import Engine, EngineConfig, Request
from kvpact_testkit.results import Verdict, as_text

ENGINES = ["embedded", "vllm"]


class EmbeddedStage:
    """The embedded engine."""

    def __init__(self, *, by_priority: bool = False) -> None:
        self.engine = Engine(
            EngineConfig(num_blocks=BLOCKS, block_size=BLOCK, policy="priority" if by_priority else "fcfs")
        )

    @property
    def context(self) -> SchedulerContext:
        """See `ContextStage`."""
        return self.engine.context

    def add(self, name: str, tokens: Sequence[int], outputs: int = 8, priority: int = 0) -> None:
        """See `ContextStage`."""
        self.engine.add_request(Request(name, tokens, outputs, priority=priority))

    def cancel(self, name: str) -> None:
        """See `ContextStage`."""
        self.engine.cancel(name)

    def step(self, times: int = 1) -> None:
        """See `ContextStage`; every invariant of the engine is verified."""
        for _ in range(times):
            self.engine.step()
            self.engine.check()

    def finish(self, name: str) -> None:
        """See `ContextStage`."""
        while name not in self.engine.finished:
            self.step()


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
        from kvpact_testkit.vllm.driver import VllmDriver

        report = VllmDriver("kvpact.vllm:PactConnector", {"memory": "1MiB", "model_id": "testkit"}).run(
            [f"context_{name}"]
        )
        assert [check.verdict for check in report.checks] == [Verdict.KEPT], as_text(report)
