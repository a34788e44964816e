"""Hints that clients send with vLLM's requests: read at a request's arrival, answered at its end.

Owns nothing but the counts of outcomes; each request's hints are with its view.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from kvpact.hints.schema import KEY, SupportsHints, is_session_name, parse_hints
from kvpact.identity.tenants import Tenants
from kvpact.metrics import Metrics
from kvpact.vllm.compat.objects import hints_of, session_of
from kvpact.vllm.request_identity import VllmRequest


class HasHints(Protocol):
    """An engine's cache, as far as hints go."""

    hints: SupportsHints | None
    """None: it takes none."""


class ClientHints:
    """Hints of one engine's requests, where the configuration allows them."""

    def __init__(self, metrics: Metrics, clients: str | Sequence[str], tenants: Tenants | None) -> None:
        """Act on hints of all `clients`, or of those `tenants` that they name."""
        self._metrics = metrics
        self._tenants = tenants
        is_named = tenants is not None and not isinstance(clients, str)
        self._owners = tenants.owners_of(clients) if tenants is not None and is_named else None
        """Owners of blocks, as `Tenants` numbers them, whose hints count; None: all."""

    def on_new_request(self, view: VllmRequest, mounted: HasHints | None) -> None:
        """Read the hints of a request that arrives, and give them to the engine's cache, if there is one."""
        session = session_of(view.request)
        name = session if isinstance(session, str) and is_session_name(session) else ""
        view.hints = parse_hints(hints_of(view.request, KEY), name)
        if view.hints is not None and not self._is_allowed(view):
            view.hints.refuse_all("this engine acts on hints of some tenants alone")
        if view.hints is not None and mounted is not None:
            self.give_all((view,), mounted.hints)

    def _is_allowed(self, view: VllmRequest) -> bool:
        """True if the configuration allows hints to the tenant whose salt the request has."""
        if self._owners is None or self._tenants is None:
            return True
        return self._tenants.owner_of(view.request.cache_salt or "") in self._owners

    def give_all(self, views: Iterable[VllmRequest], cache: SupportsHints | None) -> None:
        """Give requests' hints to an engine's cache that is new to them; None: it takes none."""
        for view in views:
            if view.hints is not None and cache is not None:
                cache.note_hints(view, view.hints)
            elif view.hints is not None:
                view.hints.refuse_all("this engine's cache takes no hints")

    def answer(self, view: VllmRequest) -> dict[str, Any] | None:
        """Count the outcomes of a request that has ended; returns them for its answer, None if it brought no hints."""
        if view.hints is None or not view.hints.outcomes:
            return None
        for outcome in view.hints.outcomes.values():
            self._metrics.add("hints", 1, outcome.result)
        return view.hints.answer()
