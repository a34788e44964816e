"""vLLM's live requests, as the cache sees them.

Owns the map from request ids to `VllmRequest`.
"""

from __future__ import annotations

from collections.abc import KeysView, ValuesView
from typing import Any

from kvpact.vllm.request_identity import RequestIdentities, VllmRequest


class EngineRequests:
    """The requests of one engine, from their first hook until their end."""

    def __init__(self, identities: RequestIdentities) -> None:
        self._identities = identities
        self._views: dict[str, VllmRequest] = {}

    @property
    def ids(self) -> KeysView[str]:
        """The ids of all requests."""
        return self._views.keys()

    @property
    def views(self) -> ValuesView[VllmRequest]:
        """All requests."""
        return self._views.values()

    def get(self, request_id: str) -> VllmRequest | None:
        """The request of this id; None for one that no hook has named, or that has ended."""
        return self._views.get(request_id)

    def view(self, request: Any) -> VllmRequest:
        """The view of vLLM's request; a new one for another request of the same id."""
        view = self._views.get(request.request_id)
        if view is None or view.request is not request:
            self.end(request.request_id)
            view = self._views[request.request_id] = VllmRequest(request, self._identities)
        return view

    def end(self, request_id: str) -> VllmRequest | None:
        """Forget the request, and cancel digests that only it needs; returns its view, None if it is not there."""
        view = self._views.pop(request_id, None)
        if view is not None:
            view.release()
        return view
