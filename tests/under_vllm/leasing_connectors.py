"""Connectors that lease the blocks of a match, one for each form of the pact; what they hear is recorded.

Their blocks, loads and saves are those of `SimpleConnector`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from sys import intern
from typing import Any, ClassVar

from kvpact.contract import ExternalKVMatch, ExternalMatchExit
from kvpact_testkit.vllm.adapters import ConnectorAdapter
from kvpact_testkit.vllm.simple_connector import SimpleConnector


class Leasing(SimpleConnector):
    """A lookup leases its match, once; whoever ends the match releases it. By itself nobody does."""

    heard: ClassVar[list[tuple[str, str, int | str]]] = []
    """(call, request, number of tokens or reason), of all these connectors since `begin`."""
    accepts: ClassVar[Callable[[str, int], int] | None] = None
    """(request, tokens of a commit) -> how many of them are accepted."""

    @classmethod
    def begin(cls, accepts: Callable[[str, int], int] | None = None) -> None:
        """Forget what was heard. Commits are accepted as `accepts` says, by default whole."""
        Leasing.heard.clear()
        Leasing.accepts = accepts

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.leases: dict[str, int] = {}
        """Request -> the blocks of its match."""

    def lease(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """The tokens of a match, whose blocks are leased from now on."""
        tokens, asynchronous = SimpleConnector.get_num_new_matched_tokens(self, request, num_computed_tokens)
        self.leases.pop(request.request_id, None)
        if tokens:
            self.leases[request.request_id] = tokens // self.block_size
            self.heard.append(("prepare", request.request_id, tokens))
        return tokens or 0, asynchronous

    def end_lease(self, call: str, request: Any, said: int | str) -> None:
        """The match is over."""
        self.heard.append((call, request.request_id, said))
        self.leases.pop(request.request_id, None)

    def load(self, request: Any, blocks: Any, num_tokens: int) -> None:
        """Load the first tokens of the match into these blocks."""
        if num_tokens:
            SimpleConnector.update_state_after_alloc(self, request, blocks, num_tokens)


class OfThePact(Leasing):
    """Speaks the pact."""

    def prepare_external_match(self, request: Any, num_computed_tokens: int) -> ExternalKVMatch | None:
        tokens, asynchronous = self.lease(request, num_computed_tokens)
        return ExternalKVMatch(tokens, asynchronous, request.request_id)

    def confirm_external_match(self, request: Any, match: ExternalKVMatch, num_tokens: int) -> int:
        self.heard.append(("confirm", request.request_id, num_tokens))
        return self._accepted(request, num_tokens)

    def commit_external_match(self, request: Any, match: ExternalKVMatch, num_tokens: int, blocks: Any) -> int:
        assert match.query_result == request.request_id
        accepted = self._accepted(request, num_tokens) if self.asynchronous else num_tokens
        self.end_lease("commit", request, accepted)
        self.load(request, blocks, accepted)
        return accepted

    def _accepted(self, request: Any, num_tokens: int) -> int:
        accepts = Leasing.accepts
        return num_tokens if accepts is None else accepts(request.request_id, num_tokens)

    def abort_external_match(self, request: Any, match: ExternalKVMatch, reason: ExternalMatchExit) -> None:
        assert match.query_result == request.request_id
        self.end_lease("abort", request, reason)

    def postpone_external_match(self, request: Any, match: ExternalKVMatch, reason: ExternalMatchExit) -> None:
        self.heard.append(("postpone", request.request_id, reason))


class OfTheTupleApi(Leasing):
    """Its leases end by a commit; under a scheduler without the pact those of other matches stay."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return self.lease(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.end_lease("commit", request, num_external_tokens)
            self.load(request, blocks, num_external_tokens)


class WithADocumentedContract(OfTheTupleApi):
    """A commit of no tokens ends a match."""

    releases_unused_matches = True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if not num_external_tokens and request.request_id in self.leases:
            self.end_lease("abort", request, "")


class WithAnAbort(OfTheTupleApi):
    """A hook ends a match."""

    def abort_external_match(self, request: Any, reason: str) -> None:
        self.end_lease("abort", request, reason)


class WithAQueryResult(Leasing):
    """The lookup's result comes back at the commit."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return *self.lease(request, num_computed_tokens), intern(f"result for {request.request_id}")

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int, query_result: object = None
    ) -> None:
        if query_result is not None:
            assert query_result == f"result for {request.request_id}"
            self.end_lease("commit" if num_external_tokens else "abort", request, num_external_tokens)
            self.load(request, blocks, num_external_tokens)


class LeasesOf(ConnectorAdapter):
    """What such a connector holds."""

    def held(self, connector: Any) -> Mapping[str, int]:
        return {"leases": sum(connector.leases.values())}
