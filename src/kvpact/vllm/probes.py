"""Replies to the engine's probes: a request waits for its identity, for its turn in a step, and for tiers.

Owns the last reply to each request, and until when it may wait (P11).
"""

from __future__ import annotations

import time

from kvpact.cache.waiting import MIN_IDENTITY_SECONDS, Reply, WaitEvent, Waiting
from kvpact.contract import ExternalCache, ExternalKVMatch
from kvpact.vllm.guard import Guard
from kvpact.vllm.request_identity import VllmRequest


class Probes:
    """The probes of one engine's requests. A request waits `timeout` seconds at most."""

    def __init__(self, guard: Guard, timeout: float) -> None:
        self._budget = guard.budget
        self._timeout = timeout
        self._waiting: dict[str, tuple[VllmRequest, Waiting]] = {}

    def _waiting_of(self, view: VllmRequest) -> Waiting:
        known = self._waiting.get(view.request_id)
        if known is None or known[0] is not view:
            known = self._waiting[view.request_id] = (view, Waiting())
        return known[1]

    def answer(self, cache: ExternalCache, view: VllmRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        """The cache's match after `num_computed_tokens`; None: ask again later.

        If the cache raises, the request has no plan.
        """
        waiting = self._waiting_of(view)
        has_waited = waiting.until is not None
        if has_waited and cache.still_waits(view.request_id, num_computed_tokens):
            return None
        match = self._ask(cache, view, waiting, num_computed_tokens)
        if match is None and not has_waited:
            cache.put_off_external_match(view)
        return match

    def _ask(
        self, cache: ExternalCache, view: VllmRequest, waiting: Waiting, num_computed_tokens: int
    ) -> ExternalKVMatch | None:
        if view.awaits_identity and waiting.may_wait(now := time.monotonic()):
            waiting.note(WaitEvent.LATER, now + max(self._timeout, MIN_IDENTITY_SECONDS))
            return None
        if not self._budget.grant_turn(waiting, self._timeout, cache):
            if waiting.reply is not Reply.DECLINED or cache.may_wait(view.request_id):
                return None
            cache.decline_external_match(view, num_computed_tokens)
            return ExternalKVMatch(0)
        try:
            match = cache.prepare_external_match(view, num_computed_tokens)
        except Exception:
            cache.abort_external_match(view.request_id, None, "error")
            raise
        if match is None:
            waiting.note(WaitEvent.LATER, time.monotonic() + self._timeout)
        else:
            waiting.note(WaitEvent.ANSWERED)
        return match

    def on_taken(self, view: VllmRequest) -> None:
        """The engine takes tokens of the last match: the next probe begins a new wait."""
        self._waiting_of(view).note(WaitEvent.ANEW)

    def request_finished(self, request_id: str) -> None:
        """Forget the request."""
        self._waiting.pop(request_id, None)
