"""Tokens that the engine's steps compute, reported to the cache with the blocks that they fill.

Owns the revision of the identities in the last step, and the candidates for tokens that
the workers supply.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, Final

from kvpact.contract import ExternalCache, SupportsStepLookup
from kvpact.errors import PactViolation
from kvpact.vllm.compat.configuration import runs_second_runner
from kvpact.vllm.context import VllmContext
from kvpact.vllm.loads import CommittedLoads
from kvpact.vllm.request_identity import RequestIdentities
from kvpact.vllm.requests import EngineRequests
from kvpact.vllm.step_hook import Candidates

CUT_SHORT: Final = ("FINISHED_ABORTED", "FINISHED_ERROR")
"""vLLM's states of a request that others end: it may be loading, or in no step."""


class ComputedTokens:
    """Reports one engine's steps to its cache. Requests over blocks that were not loaded are left out."""

    def __init__(
        self, vllm_config: Any, identities: RequestIdentities, requests: EngineRequests, loads: CommittedLoads
    ) -> None:
        self._identities = identities
        self._requests = requests
        self._loads = loads
        self._names_late = bool(vllm_config.scheduler_config.async_scheduling or vllm_config.speculative_config)
        """True if a step is planned before all tokens are known that it computes."""
        self._noted_revision = -1
        """`RequestIdentities.revision` in the last step."""
        self._candidates = Candidates(new_requests_only=runs_second_runner(vllm_config))

    def note_step(self, cache: ExternalCache, context: VllmContext | None, scheduler_output: Any) -> None:
        """Report the step's computed tokens to the cache, with their blocks.

        A request whose load failed is left out until the engine has received the report. One that can no longer be
        reported goes on over blocks with other content: its blocks are taken out of the engine's prefix cache. Raises
        PactViolation before vLLM has offered its block tables.
        """
        step_tokens = scheduler_output.num_scheduled_tokens
        names: Collection[str] = step_tokens
        before = self._noted_revision
        self._noted_revision = self._identities.revision
        if before == self._noted_revision and not self._loads.any_distrusted:
            running = scheduler_output.scheduled_cached_reqs
            others = cache.note_running(running.req_ids, running.num_computed_tokens, step_tokens)
            names = [*others, *[new.req_id for new in scheduler_output.scheduled_new_reqs]]
        whole = context if self._loads.whole_requests else None
        if not names and whole is None:
            return
        distrusted = list[str]()
        with whole.saving(scheduler_output) if whole is not None else nullcontext():
            if whole is not None and whole.requests_with_states:  # of quiet ones, too, and of some in no step
                names = dict.fromkeys([*names, *whole.requests_with_states])
            for request_id in names:
                view = self._requests.get(request_id)
                if view is None:
                    continue
                if self._loads.is_distrusted(request_id):
                    distrusted.append(request_id)
                elif context is None:
                    raise PactViolation("vLLM computes requests before it offered its block tables to the connector")
                else:
                    computed = view.request.num_computed_tokens + step_tokens.get(request_id, 0)
                    cache.note_computed(view, computed, partial(context.chain_of, view.request_id))
        if whole is not None:
            for request_id in distrusted:
                whole.evict_published(list(chain.from_iterable(whole.get_block_ids(request_id))))

    def look_up(self, lookup: SupportsStepLookup, scheduler_output: Any) -> None:
        """Have the workers look for what this step computes, where the request can still be given it then."""
        for request_id, max_tokens in self._candidates.of_step(scheduler_output).items():
            view = self._requests.get(request_id)
            if view is not None and not self._loads.is_distrusted(request_id):
                lookup.look_up_at_step(view, view.request.num_computed_tokens, max_tokens)

    def is_named_at_end(self, request: Any) -> bool:
        """True if the last whole block of a request that ends may have got its name only now.

        With asynchronous scheduling a step is planned before the tokens of the last one are known, and of drafts nobody
        knows which are kept.
        """
        return (
            self._names_late
            and request.status.name not in CUT_SHORT
            and self._requests.get(request.request_id) is not None
            and not self._loads.is_distrusted(request.request_id)
        )

    def note_end(self, cache: ExternalCache, context: VllmContext, request: Any) -> None:
        """Report all computed tokens of a request that ends, so that states which wait for their name get it. vLLM
        offers no others: one whose boundary lies in a request's last step is lost."""
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        with context.saving(None):
            cache.note_computed(self._requests.view(request), computed, partial(context.chain_of, request.request_id))
