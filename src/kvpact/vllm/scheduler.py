"""Schedulers that a user names in `scheduler_cls`: `vllm:external_prefix_cache_hits` then knows of hits at the step.

Owns nothing but that count: vLLM's scheduler adds it up when it schedules, where nobody knows yet, and offers
connectors no way to add to it. Everything else works without these classes. Floor 3.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class _CountsStepHits:
    """Adds what a connector's `take_step_hits() -> (tokens, tokens after a preemption)` tells to the statistics."""

    connector: Any

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's statistics of a step."""
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        take = getattr(self.connector, "take_step_hits", None)
        if take is not None and stats is not None and stats.connector_prefix_cache_stats is not None:
            hits, again = take()
            stats.connector_prefix_cache_stats.hits += hits
            stats.connector_prefix_cache_stats.preempted_hits += again
        return stats


class KvpactScheduler(_CountsStepHits, Scheduler):
    """For engines without asynchronous scheduling, as on CPUs."""


class KvpactAsyncScheduler(_CountsStepHits, AsyncScheduler):
    """For engines with asynchronous scheduling, which is vLLM's default on GPUs."""


__all__ = ["KvpactAsyncScheduler", "KvpactScheduler"]
