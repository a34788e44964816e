"""Tells the cache what a step computes, and in which blocks.

Owns what is kept from it: requests over blocks that hold something else than they should.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

from kvpact.contract import ExternalCache
from kvpact.errors import PactViolation
from kvpact.vllm.context import VllmContext
from kvpact.vllm.loads import CommittedLoads
from kvpact.vllm.request_identity import VllmRequest


def note_computed(
    cache: ExternalCache,
    scheduler_output: Any,
    requests: Mapping[str, VllmRequest],
    loads: CommittedLoads,
    context: VllmContext | None,
) -> None:
    """Tell `cache` what the step computes, in the engine's last hook of the step.

    A request whose load failed, of which the engine has not heard yet, is left out. One of which the engine can hear
    nothing more goes on over blocks that are not its own: what it leaves in the engine's prefix cache is taken out.
    """
    computed = {}
    for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
        view = requests.get(request_id)
        if view is not None and not loads.is_distrusted(request_id):
            computed[request_id] = view.request.num_computed_tokens + num_tokens
        elif view is not None and loads.whole_requests and context is not None:
            context.evict_published(list(chain.from_iterable(context.get_block_ids(request_id))))
    with context.saving(scheduler_output, computed) if context is not None else nullcontext():
        for request_id, num_tokens in computed.items():
            cache.note_computed(requests[request_id], num_tokens, partial(_chain_of, context, request_id))


def _chain_of(context: VllmContext | None, request_id: str) -> Sequence[int]:
    return required(context).chain_of(request_id)


def required(context: VllmContext | None) -> VllmContext:
    """The context. Raises PactViolation if there is none yet."""
    if context is None:
        raise PactViolation("vLLM computes requests before it offered its block pool to the connector")
    return context


__all__ = ["note_computed", "required"]
