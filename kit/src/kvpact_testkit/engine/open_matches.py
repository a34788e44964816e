"""The cache's answers that are neither committed nor ended, and what the engine says to the cache of each.

Owns the rule of the exits: each is said in the step in which it happens, with its reason. Decides nobody's admission.
"""

from __future__ import annotations

from collections.abc import Container

from kvpact.contract import ExternalCache, ExternalKVMatch, ExternalMatchExit
from kvpact.errors import PactViolation
from kvpact_testkit.engine.counts import EngineCounts
from kvpact_testkit.engine.kv_cache import KVCacheManager
from kvpact_testkit.engine.request import Request


class OpenMatches:
    """The open answers of one cache, by request. If it `is_silent`, nothing is said, as by stock engines."""

    def __init__(
        self, cache: ExternalCache | None, counts: EngineCounts, kv: KVCacheManager, *, is_silent: bool
    ) -> None:
        self.cache = cache
        self._kv = kv
        self._counts = counts
        self._is_silent = is_silent
        self._open: dict[str, ExternalKVMatch | None] = {}
        """Request id -> the match, or None after "ask again later"."""
        self._heard_of: set[str] = set()
        """Requests of which the cache was asked or told in the running step."""

    def prepare(self, request: Request, num_computed_tokens: int) -> ExternalKVMatch | None:
        """Ask the cache, if there is one; its answer is open unless it promises nothing. Raises PactViolation (P6)."""
        if self.cache is None:
            return ExternalKVMatch(0)
        name, counts = request.request_id, self._counts
        counts.probes += 1
        match = self.cache.prepare_external_match(request, num_computed_tokens)
        self._heard_of.add(name)
        if match is not None and match.num_tokens <= 0:
            self._open.pop(name, None)
            self._require_usable(request, num_computed_tokens, match.num_tokens)
            return match
        self._open[name] = match
        counts.pending_probes += match is None
        counts.positive_probes += match is not None
        counts.promised += match.num_tokens if match is not None else 0
        if match is not None:
            self._require_usable(request, num_computed_tokens, match.num_tokens)
        return match

    def _require_usable(self, request: Request, local: int, promised: int) -> None:
        room = len(request.token_ids) - 1 - local
        whole = self._kv.reads_all or (local + promised) % self._kv.group_set.alignment == 0
        if not 0 <= promised <= room or (promised and not whole):
            raise PactViolation(
                f"P6: request {request.request_id} of {len(request.token_ids)} tokens, {local} of them computed, "
                f"was promised {promised} more; at most {room} leave one to compute"
            )

    def committed(self, request: Request) -> None:
        """The cache was asked to load the request's match: nothing more is said of it."""
        self._open.pop(request.request_id, None)

    def postpone(self, request: Request, reason: ExternalMatchExit) -> None:
        """The request does not get its match in this step, and may come back for it."""
        self._postpone(request.request_id, reason)

    def _postpone(self, request_id: str, reason: ExternalMatchExit) -> None:
        if self.cache is not None and request_id in self._open and not self._is_silent:
            self._heard_of.add(request_id)
            self.cache.postpone_external_match(request_id, reason)
            self._counts.postponed[reason] += 1

    def drop(self, request: Request, reason: ExternalMatchExit) -> None:
        """Nobody will come back for the request's match."""
        self._drop(request.request_id, reason)

    def drop_all(self, reason: ExternalMatchExit) -> None:
        """Nobody will come back for any match."""
        for request_id in [*self._open]:
            self._drop(request_id, reason)

    def _drop(self, request_id: str, reason: ExternalMatchExit) -> None:
        if self.cache is not None and request_id in self._open:
            match = self._open.pop(request_id)
            if not self._is_silent:
                self.cache.abort_external_match(request_id, match, reason)
                self._counts.aborts[reason] += 1

    def end_step(self, reason: ExternalMatchExit, committed_late: Container[str]) -> None:
        """The scheduler has walked its queue: all open matches of which nothing was said are postponed for `reason`.

        Not those of `committed_late`, which are committed when the step's results come.
        """
        for request_id in [*self._open]:
            if request_id not in self._heard_of and request_id not in committed_late:
                self._postpone(request_id, reason)
        self._heard_of.clear()
