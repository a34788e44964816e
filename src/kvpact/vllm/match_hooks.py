"""A match's life as vLLM calls for it: the tuple API on vLLM's own schedulers, the pact under `kvpact.vllm.scheduler`.

Owns no state. Both forms go to the same methods of `SchedulerSide`; a request's matches are asked for in one of them.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvpact.contract import ExternalKVMatch, ExternalMatchExit
from kvpact.errors import ConfigError
from kvpact.vllm.compat.objects import by_source
from kvpact.vllm.guard import Guard, guarded

if TYPE_CHECKING:
    from kvpact.vllm.scheduler_side import SchedulerSide


class MatchHooks:
    """The hooks of the scheduler's half, between a request's arrival and the end of the step that admits it."""

    guard: Guard
    _scheduler: SchedulerSide | None

    @cached_property
    def scheduler_side(self) -> SchedulerSide:
        """The half in the scheduler's process. Raises ConfigError on a worker's half."""
        if self._scheduler is None:
            raise ConfigError("a scheduler's hook was called on the worker's half of the connector")
        return self._scheduler

    # The tuple API

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Prepare a match."""
        match = self.scheduler_side.prepare(request, num_computed_tokens)
        return (None, False) if match is None else (match.num_tokens, match.load_kv_async)

    @guarded(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Commit the match, for the number of tokens that the scheduler finally chose."""
        self.scheduler_side.commit(request, blocks, num_external_tokens)

    @guarded(dict)
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Where the tokens of a committed match were found: host memory, a disk, or elsewhere. Called from 0.32 on."""
        return by_source(self.scheduler_side.credit.places(request.request_id, num_external_tokens))

    # The pact: see `SupportsExternalMatch`

    def pact_scheduler_bound(self) -> None:
        """The engine's scheduler speaks the pact: `kvpact.vllm.scheduler` says so when it begins."""
        self.scheduler_side.speaks_the_pact = True

    @guarded(lambda: ExternalKVMatch(0))
    def prepare_external_match(self, request: Any, num_computed_tokens: int) -> ExternalKVMatch | None:
        """Prepare a match."""
        return self.scheduler_side.prepare(request, num_computed_tokens)

    def commit_external_match(self, request: Any, match: ExternalKVMatch, num_tokens: int, blocks: Any) -> int:
        """Commit the match. Of a load that its step waits for all tokens come, or are reported as not loaded."""
        if self.scheduler_side.may_refuse(request):
            return self._commit_or_refuse(request, blocks, num_tokens)
        MatchHooks.update_state_after_alloc(self, request, blocks, num_tokens)
        return num_tokens

    @guarded(lambda: 0)
    def _commit_or_refuse(self, request: Any, blocks: Any, num_tokens: int) -> int:
        return self.scheduler_side.commit_or_refuse(request, blocks, num_tokens)

    @guarded(lambda: None)
    def abort_external_match(self, request: Any, match: ExternalKVMatch, reason: ExternalMatchExit) -> None:
        """The engine will not take the match: its leases end now."""
        self.scheduler_side.abort(request.request_id, match, reason)

    @guarded(lambda: None)
    def postpone_external_match(self, request: Any, match: ExternalKVMatch, reason: ExternalMatchExit) -> None:
        """The engine could not take the match in this step, and may ask again."""
        self.scheduler_side.postpone(request.request_id, reason)
