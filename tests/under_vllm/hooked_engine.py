"""The driver's engine, whose ranks ask `StepConnector` when a step begins, and what is told and counted of it.
 The scheduler is kvpact's class over vLLM's own, the combination of the ranks'
outputs is vLLM's; the workers are played.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from step_connector import Bystander, StepConnector
from vllm.v1.metrics.stats import PrefixCacheStats

from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import (
    BLOCK,
    ConnectorUnderTest,
    Harness,
    ScenarioOver,
    named,
    prompt,
    under_multi_connector,
)

SCHEDULER = "kvpact.vllm.scheduler.pact_scheduler"

STORED = prompt(1, 10)[: 10 * BLOCK]
"""A prompt of whole blocks that every rank holds."""


class OnPlayedRanks(StepConnector):
    """`StepConnector` where the forward pass does not say how many tokens it computes."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to say."""


COMPANIES = {
    "alone": None,
    "first of two": under_multi_connector(named(OnPlayedRanks), named(Bystander)),
    "second of two": under_multi_connector(named(Bystander), named(OnPlayedRanks)),
    "both of two": under_multi_connector(named(OnPlayedRanks), named(OnPlayedRanks)),
}
"""Where a connector with the hook can be: `KVTransferConfig`'s fields, None for the connector itself."""


class HookedEngine:
    """The engine, what its steps skipped, and what its scheduler told and counted of that."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.scheduler: Any = engine.scheduler
        self.skipped = {False: Counter[str](), True: Counter[str]()}
        """Whether the request was preempted when the step was scheduled -> request -> tokens."""
        self.told: dict[str, Any] = {}
        """Request -> the statistics that left with its first answer."""
        self.scheduler.connector_prefix_cache_stats = PrefixCacheStats()
        self._update = self.scheduler.update_from_output
        self.scheduler.update_from_output = self._update_and_listen
        self._watch(engine.ranks[0].step_hook)

    def _watch(self, hook: Any) -> None:
        apply = hook.apply

        def watched(output: Any) -> Any:
            left = apply(output)
            for name, count in output.num_scheduled_tokens.items():
                preempted = self.scheduler.requests[name].num_preemptions > 0
                self.skipped[preempted][name] += count - left.num_scheduled_tokens[name]
            return left

        hook.apply = watched

    def _update_and_listen(self, *arguments: Any) -> Any:
        results = self._update(*arguments)
        for one in (output for client in results.values() for output in client.outputs):
            if one.prefill_stats is not None:
                assert one.request_id not in self.told, "told twice"
                self.told[one.request_id] = one.prefill_stats
        return results

    @property
    def counted(self) -> Any:
        """vLLM's count of external hits, since the engine began."""
        return self.scheduler.connector_prefix_cache_stats

    def assert_counts_are_true(self) -> None:
        """Every request was told, and all are counted as, what its steps skipped: before and after preemptions."""
        for name, stats in self.told.items():
            assert stats.num_external_cached_tokens == self.skipped[False][name], name
            assert stats.num_cached_tokens == stats.num_local_cached_tokens + self.skipped[False][name], name
            assert stats.num_computed_tokens == stats.num_prompt_tokens - stats.num_cached_tokens, name
        assert self.counted.hits == sum(self.skipped[False].values()) <= self.counted.queries
        assert self.counted.preempted_hits == sum(self.skipped[True].values())
        if hasattr(self.counted, "hits_by_source"):  # from 0.32 on
            assert sum(self.counted.hits_by_source.values()) == self.counted.hits


@contextmanager
def hooked_engine(company: str = "alone", **settings: Any) -> Iterator[HookedEngine]:
    """An engine that has computed `STORED` and forgotten it; at its end all rules of the driver are judged."""
    harness = Harness(ConnectorUnderTest(__name__, OnPlayedRanks.__name__, {}, scheduler=SCHEDULER))
    try:
        with harness.engine(COMPANIES[company], **settings) as engine:
            hooked = HookedEngine(engine)
            harness.store(engine, STORED)
            assert not hooked.counted.hits, "nothing was held"
            yield hooked
    except ScenarioOver:
        pass  # the violations say why
    finally:
        harness.close()
    assert not harness.violations, harness.violations


__all__ = ["BLOCK", "STORED", "HookedEngine", "hooked_engine", "prompt"]
