"""Tells vLLM of tokens that it scheduled and that were then supplied by the workers.

Owns the running requests' own statistics (`Request.prefill_stats`), which vLLM fills when it schedules and sends with
the first answer, after the workers' report: there is time to mend them. Floor 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class StepCredit:
    """What was found when steps began, credited to the requests' `num_cached_tokens`."""

    def __init__(self) -> None:
        self._watched: dict[str, tuple[Any, Any]] = {}
        self._gone: set[str] = set()
        self._hits = 0
        self._hits_again = 0

    def watch(self, request: Any) -> None:
        """Something is looked for: its statistics are remembered, because the answer may be told without them."""
        stats = request.prefill_stats
        known = self._watched.get(request.request_id)
        if known is None or known[0] is not request:
            self._watched[request.request_id] = (request, stats)

    def credit(self, hits: Mapping[str, int]) -> None:
        """The workers' report is in. As everywhere in vLLM, what a request gets after a preemption counts apart."""
        for request_id, tokens in hits.items():
            request, stats = self._watched.get(request_id, (None, None))
            if request is None:
                continue
            if request.num_preemptions > 0:
                self._hits_again += tokens
                continue
            self._hits += tokens
            if stats is not None:
                stats.num_cached_tokens += tokens
                stats.num_external_cached_tokens += tokens
                stats.num_computed_tokens -= tokens
                if request.prefill_stats is not stats:  # final: what was not computed was not created here either
                    stats.num_cache_creation_tokens = max(0, stats.num_cache_creation_tokens - tokens)
        for request_id in self._gone:
            self._watched.pop(request_id, None)
        self._gone.clear()

    def request_finished(self, request_id: str) -> None:
        """The request ended; the report of its last step comes after this."""
        if request_id in self._watched:
            self._gone.add(request_id)

    def take_hits(self) -> tuple[int, int]:
        """Tokens credited since the last call: of requests at their first go, and after a preemption."""
        hits, self._hits, again, self._hits_again = self._hits, 0, self._hits_again, 0
        return hits, again

    def __len__(self) -> int:
        return len(self._watched)
