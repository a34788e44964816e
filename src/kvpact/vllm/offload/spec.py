"""`PactTieringSpec`: vLLM's tiering spec, whose manager stores nothing of a request that lives over a reset.

Owns nothing else: managers, tiers, memory and copies are vLLM's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload.base import OffloadingManager, PrepareStoreOutput
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class PactTieringManager(TieringOffloadingManager):
    """vLLM's manager, with the requests that were there at a reset: part of their blocks is of other weights."""

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        self._outdated: set[str] = set()

    def reset_cache(self) -> None:
        """Reset; blocks of requests in flight are not stored any more, in host memory or below (H38)."""
        self._outdated.update(name for name, state in self._req_state.items() if not state.is_finished)
        super().reset_cache()

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> PrepareStoreOutput | None:
        """Store nothing of a request from before a reset."""
        return None if req_context.req_id in self._outdated else super().prepare_store(keys, req_context)

    def on_request_finished(self, req_context: Any, **named: Any) -> None:
        """Forget the request."""
        self._outdated.discard(req_context.req_id)
        super().on_request_finished(req_context, **named)


class PactTieringSpec(TieringOffloadingSpec):
    """vLLM's `TieringOffloadingSpec` with that manager."""

    _manager: OffloadingManager | None

    def get_manager(self) -> OffloadingManager:
        """The manager, made once."""
        if not isinstance(self._manager, PactTieringManager):
            plain = super().get_manager()
            self._manager = PactTieringManager(plain.primary_tier, plain.secondary_tiers)
        return self._manager
