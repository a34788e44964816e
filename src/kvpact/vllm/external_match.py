"""How a vLLM connector takes part in the pact: prepare, commit, abort, in vLLM's own objects.

Owns the form that `kvpact.vllm.scheduler` speaks, and adapters for three smaller ones in which such a lifecycle was
first proposed for vLLM. Knows no scheduler; a connector needs nothing of kvpact's to have one of these forms:

- `prepare_external_match`, `commit_external_match` and `abort_external_match`: `SupportsExternalMatch`.
- The opaque query result: `get_num_new_matched_tokens` returns it as a third value, and
  `update_state_after_alloc(request, blocks, num_external_tokens, query_result)` gets it back.
- The tuple API and `abort_external_match(request, reason)`, which is called for a match that will not be taken.
- The tuple API with a documented contract, `releases_unused_matches = True`: such a match ends by
  `update_state_after_alloc(request, blocks, 0)` without blocks.

A connector without any of these sees nothing new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from kvpact.contract import ExternalKVMatch, ExternalMatchExit


@runtime_checkable
class SupportsExternalMatch(Protocol):
    """The scheduler's half of a connector that speaks the pact. `request` and `blocks` are vLLM's own objects."""

    def prepare_external_match(self, request: Any, num_computed_tokens: int) -> ExternalKVMatch | None:
        """Promise tokens that follow `num_computed_tokens`, in place of `get_num_new_matched_tokens`.

        None: ask again later. Asking again for the same is the same match and acquires nothing.
        """

    def commit_external_match(self, request: Any, match: ExternalKVMatch, num_tokens: int, blocks: Any) -> int:
        """The engine takes `num_tokens`, 1 or more, of the match into `blocks`; returns how many the cache accepts.

        Of an asynchronous load it may be fewer. A load that the step waits for is confirmed before, and must not.
        """

    def abort_external_match(self, request: Any, match: ExternalKVMatch, reason: ExternalMatchExit) -> None:
        """The engine will not take the match: release what it holds, now."""


@runtime_checkable
class PostponesExternalMatch(Protocol):
    """A connector that is told why its match was not taken yet."""

    def postpone_external_match(self, request: Any, match: ExternalKVMatch, reason: ExternalMatchExit) -> None:
        """The request still waits, for `reason`, and may be prepared again.

        Called in the first step in which that is so, and when the reason changes, or the engine stops asking for it.
        """


@runtime_checkable
class ConfirmsExternalMatch(Protocol):
    """A connector that may take back a part of a match for which the step would wait."""

    def confirm_external_match(self, request: Any, match: ExternalKVMatch, num_tokens: int) -> int:
        """Before blocks are allocated for `num_tokens` of the match: how many of them can still be loaded.

        If fewer, nothing is allocated in this step, the match is aborted, and the next one is taken up to that many.
        """


@dataclass(frozen=True, slots=True)
class TupleMatches:
    """The tuple API with a documented contract: a match that is not taken ends by a commit of no tokens."""

    ask: Callable[[Any, int], Any]
    """`get_num_new_matched_tokens`."""
    take: Callable[..., Any]
    """`update_state_after_alloc`."""
    no_blocks: object
    """vLLM's blocks of a request that has none."""

    def prepare_external_match(self, request: Any, num_computed_tokens: int) -> ExternalKVMatch | None:
        """See `SupportsExternalMatch`."""
        num_tokens, load_kv_async = self.ask(request, num_computed_tokens)
        return None if num_tokens is None else ExternalKVMatch(num_tokens, load_kv_async)

    def commit_external_match(self, request: Any, match: ExternalKVMatch, num_tokens: int, blocks: Any) -> int:
        """See `SupportsExternalMatch`."""
        self.take(request, blocks, num_tokens)
        return num_tokens

    def abort_external_match(self, request: Any, match: ExternalKVMatch, reason: ExternalMatchExit) -> None:
        """See `SupportsExternalMatch`."""
        self.take(request, self.no_blocks, 0)


@dataclass(frozen=True, slots=True)
class AbortableMatches(TupleMatches):
    """The tuple API, and a hook for the end of a match that is not taken."""

    abort: Callable[[Any, str], Any]

    def abort_external_match(self, request: Any, match: ExternalKVMatch, reason: ExternalMatchExit) -> None:
        """See `SupportsExternalMatch`."""
        self.abort(request, reason)


@dataclass(frozen=True, slots=True)
class QueryResultMatches(TupleMatches):
    """The opaque query result, handed from the lookup to the commit; without it the commit declines the match."""

    def prepare_external_match(self, request: Any, num_computed_tokens: int) -> ExternalKVMatch | None:
        """See `SupportsExternalMatch`."""
        num_tokens, load_kv_async, query_result = self.ask(request, num_computed_tokens)
        return None if num_tokens is None else ExternalKVMatch(num_tokens, load_kv_async, query_result)

    def commit_external_match(self, request: Any, match: ExternalKVMatch, num_tokens: int, blocks: Any) -> int:
        """See `SupportsExternalMatch`."""
        accepted = self.take(request, blocks, num_tokens, match.query_result)
        return num_tokens if accepted is None else int(accepted)

    def abort_external_match(self, request: Any, match: ExternalKVMatch, reason: ExternalMatchExit) -> None:
        """See `SupportsExternalMatch`."""
        self.take(request, self.no_blocks, 0, match.query_result)


__all__ = [
    "AbortableMatches",
    "ConfirmsExternalMatch",
    "PostponesExternalMatch",
    "QueryResultMatches",
    "SupportsExternalMatch",
    "TupleMatches",
]
