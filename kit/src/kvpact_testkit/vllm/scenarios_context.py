"""Scenarios about a connector's scheduler context: the checks of `context_checks.py` on vLLM itself."""

from __future__ import annotations

from collections.abc import Sequence

from kvpact.contract import SchedulerContext
from kvpact_testkit.context_checks import BLOCKS, CHECKS, ContextCheck
from kvpact_testkit.results import NotObservable
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import Harness
from kvpact_testkit.vllm.scenarios import Scenario, Scenarios

CONTEXTS = Scenarios()


class VllmStage:
    """vLLM's scheduler, as a `ContextStage`. Raises NotObservable if the connector shows no context."""

    def __init__(self, engine: VllmEngine) -> None:
        context = getattr(engine.connector, "scheduler_context", None)
        if not isinstance(context, SchedulerContext):
            raise NotObservable("the connector shows no SchedulerContext as `scheduler_context`")
        self.engine = engine
        self.context: SchedulerContext = context

    def add(self, name: str, tokens: Sequence[int], outputs: int = 8, priority: int = 0) -> None:
        """See `ContextStage`."""
        self.engine.add(name, tokens, max_tokens=outputs, priority=priority)

    def cancel(self, name: str) -> None:
        """See `ContextStage`."""
        self.engine.abort(name)

    def step(self, times: int = 1) -> None:
        """See `ContextStage`."""
        self.engine.step(times)

    def finish(self, name: str) -> None:
        """See `ContextStage`."""
        self.engine.finish(name)


def _scenario(name: str, check: ContextCheck) -> Scenario:
    def run(harness: Harness) -> None:
        transfer = harness.subject.transfer(harness.folder)
        transfer["kv_connector_extra_config"] = harness.subject.adapter.quiet(transfer["kv_connector_extra_config"])
        with harness.engine(transfer, num_blocks=BLOCKS, by_priority="priority" in name) as engine:
            check(VllmStage(engine))
            for request_id in engine.requests:
                if not engine.ended(request_id):
                    engine.abort(request_id)

    return Scenario(f"context_{name}", ("P1",), " ".join((check.__doc__ or "").split()), run)


CONTEXTS.extend(_scenario(name, check) for name, check in CHECKS.items())
