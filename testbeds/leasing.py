"""Six kinds of connectors that lease what a lookup finds, over any connector of the tuple API; leases are counted.

Each is a mixin before the class that looks up and loads: `SimpleConnector` under vLLM's schedulers (`leasing_on_vllm`),
`TupleScheduler` in the embedded engine. None of them cleans up by itself: what the engine does not end stays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvpact.contract import ExternalKVMatch

if TYPE_CHECKING:
    from tuple_connector import TupleScheduler as Connector
else:
    Connector = object


@dataclass(eq=False, slots=True)
class Lease:
    """What one lookup holds."""

    request_id: str
    question: tuple[int, int]


@dataclass
class Account:
    """The leases of one connector, and what was done to them."""

    open: dict[str, list[Lease]] = field(default_factory=dict)
    lookups: int = 0
    found: int = 0
    """The lookups that found something and took a lease."""
    commits: int = 0
    aborts: list[str] = field(default_factory=list)
    """The reasons that the connector was told, or "" where its form has none."""
    mistakes: list[str] = field(default_factory=list)
    """What the engine did to leases that were not open."""

    def take(self, request: Any, num_computed_tokens: int) -> Lease:
        lease = Lease(request.request_id, (num_computed_tokens, request.num_tokens))
        self.found += 1
        self.open.setdefault(lease.request_id, []).append(lease)
        return lease

    def end(self, what: str, request: Any, lease: Lease | None) -> None:
        """End this lease, or the request's last one."""
        held = self.open.get(request.request_id, [])
        if not held or lease not in (None, *held):
            self.mistakes.append(f"{what} of a lease of {request.request_id} that is not open")
            return
        held.remove(lease or held[-1])
        if not held:
            del self.open[request.request_id]

    @property
    def left(self) -> int:
        return sum(map(len, self.open.values()))

    @property
    def most(self) -> int:
        """The most that are open for one request."""
        return max(map(len, self.open.values()), default=0)


class Leasing(Connector):
    """Looks up, and leases what it finds."""

    @property
    def account(self) -> Account:
        found: Account = self.__dict__.setdefault("_account", Account())
        return found

    def find(self, request: Any, num_computed_tokens: int) -> tuple[int, bool, Lease | None]:
        tokens, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.account.lookups += 1
        return tokens or 0, asynchronous, self.account.take(request, num_computed_tokens) if tokens else None

    def load(self, request: Any, blocks: Any, num_tokens: int, lease: Lease | None) -> None:
        self.account.commits += 1
        self.account.end("commit", request, lease)
        super().update_state_after_alloc(request, blocks, num_tokens)

    def give_up(self, request: Any, lease: Lease | None, reason: str) -> None:
        self.account.aborts.append(str(reason))
        self.account.end("abort", request, lease)


class PlainTuples(Leasing):
    """A new lease in each lookup, ended by a commit alone: the tuple API as it is."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return self.find(request, num_computed_tokens)[:2]

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.load(request, blocks, num_external_tokens, None)
        else:
            super().update_state_after_alloc(request, blocks, 0)


class LeasesAnew(PlainTuples):
    """A new lease in each lookup, as the plan object of a match; where nobody asks for a plan, the tuple API."""

    def prepare_external_match(self, request: Any, num_computed_tokens: int) -> ExternalKVMatch:
        return ExternalKVMatch(*self.find(request, num_computed_tokens))

    def commit_external_match(self, request: Any, match: ExternalKVMatch, num_tokens: int, blocks: Any) -> int:
        assert isinstance(match.query_result, Lease)
        self.load(request, blocks, num_tokens, match.query_result)
        return num_tokens

    def abort_external_match(self, request: Any, match: ExternalKVMatch, reason: str) -> None:
        assert isinstance(match.query_result, Lease)
        self.give_up(request, match.query_result, reason)


class Memoises(LeasesAnew):
    """The same match for the same question, as the pact asks; another one for another question."""

    def prepare_external_match(self, request: Any, num_computed_tokens: int) -> ExternalKVMatch:
        known: dict[str, ExternalKVMatch] = self.__dict__.setdefault("_known", {})
        found = known.get(request.request_id)
        held = self.account.open.get(request.request_id, [])
        question = (num_computed_tokens, request.num_tokens)
        lease = found.query_result if found is not None else None
        if found is not None and isinstance(lease, Lease) and lease in held and lease.question == question:
            return found
        known[request.request_id] = super().prepare_external_match(request, num_computed_tokens)
        return known[request.request_id]


class HandsResultBack(Leasing):
    """A new lease in each lookup, as a third value that comes back with the commit, as in the first proposal."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return self.find(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int, query_result: Lease | None = None
    ) -> None:
        if num_external_tokens:
            self.load(request, blocks, num_external_tokens, query_result)
            return
        if query_result is not None:
            self.give_up(request, query_result, "")
        if blocks.get_block_ids()[0]:
            super().update_state_after_alloc(request, blocks, 0)


class ReturnsMatch(HandsResultBack):
    """The same, in the dataclass."""

    match_type: type[Any] = ExternalKVMatch

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return self.match_type(*self.find(request, num_computed_tokens))


class GetsMatchBack(ReturnsMatch):
    """The same, and the dataclass comes back in place of the number: without blocks if it is over."""

    def update_state_after_alloc(self, request: Any, blocks: Any, match: ExternalKVMatch | None) -> None:  # type: ignore[override]
        taken = match is not None and any(blocks.get_block_ids())
        lease = match.query_result if match is not None else None
        super().update_state_after_alloc(request, blocks, match.num_tokens if match and taken else 0, lease)  # type: ignore[arg-type]


class LeasesByRequest(PlainTuples):
    """The same, and an abort that names the request alone, as in the first proposal."""

    def abort_external_match(self, request: Any) -> None:
        self.give_up(request, None, "")


KINDS: dict[str, type[Leasing]] = {
    "new lease each time, plan object": LeasesAnew,
    "memoising, plan object": Memoises,
    "query result": HandsResultBack,
    "query result in the dataclass": ReturnsMatch,
    "abort by request": LeasesByRequest,
    "plain tuple": PlainTuples,
}
