"""Matches that the engine has taken: committed now or late, until they are settled.

Owns the loads under way and the commits that wait for a step's results. Decides nobody's admission.
"""

from __future__ import annotations

from kvpact.contract import ExternalCache, ExternalKVMatch, ExternalMatchExit
from kvpact.errors import PactViolation
from kvpact_testkit.engine.admission import Load
from kvpact_testkit.engine.counts import EngineCounts
from kvpact_testkit.engine.open_matches import OpenMatches
from kvpact_testkit.engine.quirks import EngineQuirks
from kvpact_testkit.engine.request import Request


class Commits:
    """Commits matches of one cache. Unless the engine `shortens` matches, the cache loads all of one or nothing."""

    def __init__(
        self,
        cache: ExternalCache | None,
        quirks: EngineQuirks,
        counts: EngineCounts,
        matches: OpenMatches,
        *,
        shortens: bool,
    ) -> None:
        self.loads: dict[str, Load] = {}
        """Committed matches that are not settled yet, including those of ended requests."""
        self.late: list[tuple[ExternalKVMatch, Load]] = []
        """Asynchronous commits that are delayed until the step's results are applied."""
        self._cache = cache
        self._quirks = quirks
        self._counts = counts
        self._matches = matches
        self._shortens = shortens

    def commit(self, match: ExternalKVMatch, load: Load) -> int:
        """Commit the tokens of the load; returns the number of tokens that the cache will load."""
        request, external = load.request, load.num_tokens
        if self._cache is None or match.num_tokens == 0:
            return 0
        if external == 0 and not self._quirks.commits_zero:
            self._matches.drop(request, ExternalMatchExit.DECLINED)
            return 0
        if load.asynchronous and self._quirks.commits_async_late:
            self.late.append((match, load))
            self.loads[request.request_id] = load
            return external
        accepted = self._cache.commit_external_match(request, match, external, tuple(request.block_ids[0]))
        if self._quirks.ignores_commit_answer:
            accepted = external
        elif not 0 <= accepted <= external or (accepted not in (0, external) and not self._shortens):
            raise PactViolation(
                f"request {request.request_id}: {external} tokens were committed, the cache accepts {accepted}"
            )
        if not accepted and external:
            self._matches.drop(request, ExternalMatchExit.REFUSED)
        self._matches.committed(request)
        if accepted:
            load.num_tokens = accepted
            self.loads[request.request_id] = load
            self._counts.commits += 1
            self._counts.committed += accepted
        return accepted

    def commit_late(self) -> list[Request]:
        """Make the delayed commits; returns the requests whose loads have become void, of which nothing is loaded."""
        late, self.late = self.late, []
        refused = []
        for match, load in late:
            request = load.request
            if load.void or self._cache is None:
                del self.loads[request.request_id]
                refused.append(request)
                continue
            self._matches.committed(request)
            self._cache.commit_external_match(request, match, load.num_tokens, tuple(request.block_ids[0]))
            self._counts.commits += 1
            self._counts.committed += load.num_tokens
        return refused

    def void(self, request: Request) -> None:
        """The request no longer uses its load, if it has one."""
        load = self.loads.get(request.request_id)
        if load is not None:
            load.void = True
            if self._quirks.trusts_sync_loads and not load.asynchronous:
                del self.loads[request.request_id]
                request.note_hit(load.start, load.start + load.num_tokens)  # counts as computed, and was not

    def is_loading(self, request: Request) -> bool:
        """True while a preempted request waits for its load's settlement: a request has one plan at a time."""
        return request.request_id in self.loads and not self._quirks.trusts_sync_loads
