"""Schedulers for `scheduler_cls`: `vllm:external_prefix_cache_hits` then counts only tokens that were not computed.

Owns nothing but that count: vLLM's scheduler adds to it when it admits a request, before it is known what arrives, and
offers connectors no way to correct it. Everything else works without these classes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kvpact.vllm.compat.objects import set_hit_sources


class _CountsWhatWasUsed:
    """Adds a connector's `take_hit_corrections() -> (tokens, tokens after a preemption)` to the statistics.

    A load's tokens are subtracted in the step that admits it and added again as they are used, so that no step's count
    is negative.
    """

    connector: Any

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's statistics of a step, corrected."""
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        take = getattr(self.connector, "take_hit_corrections", None)
        if take is not None and stats is not None and stats.connector_prefix_cache_stats is not None:
            counted = stats.connector_prefix_cache_stats
            hits, again = take()
            counted.hits += hits
            counted.preempted_hits += again
            set_hit_sources(counted, partial(self.connector.get_external_cache_hit_sources, None))
        return stats


class KvpactScheduler(_CountsWhatWasUsed, Scheduler):
    """For engines without asynchronous scheduling, as on CPUs."""


class KvpactAsyncScheduler(_CountsWhatWasUsed, AsyncScheduler):
    """For engines with asynchronous scheduling, which is vLLM's default on GPUs."""


__all__ = ["KvpactAsyncScheduler", "KvpactScheduler"]
