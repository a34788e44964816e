"""Matches of one connector between prepare and commit, under an engine that gives the reason why each was not taken.

Owns the open matches, their state in the running step, and the connector's refusals: at most one match is open for a
request, and each ends once, whatever the connector does. The engine calls the tuple API, the connector gets the pact's
calls in its own form. Knows no scheduler.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import index
from typing import Any

from kvpact.contract import DROPPED, POSTPONED_STEPS, ExternalKVMatch, ExternalMatchExit
from kvpact.matches.forms import NO_MATCH, MatchForm, plan_of

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class OpenMatch:
    """Match that was promised and neither committed nor aborted."""

    request: Any
    match: ExternalKVMatch
    plan: object
    """Record of the match by the connector; None if its abort names the request alone."""
    num_tokens: int
    """Tokens of the match that the engine may take."""
    question: tuple[int, int]
    """Numbers of the request's computed tokens, and of all its tokens, when the connector was asked."""
    asked: int
    """Last step that asked the connector."""
    step: int
    """Last step that got the match as an answer."""
    suspended: int = -1
    """Last step that the connector asked for time, instead of an answer."""
    exit: ExternalMatchExit | None = None
    """Reason why it was not taken in that step, if one is known."""
    reported: tuple[ExternalMatchExit, bool] | None = None
    """Last reason reported to the connector, and whether the engine had asked for the match in that step."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Commit whose tokens the connector accepted in part only."""

    request: Any
    missing: int
    accepted: int
    asynchronous: bool


class MatchTracker:
    """Calls of an engine about one connector's matches. No exception of the connector leaves it (H13)."""

    def __init__(
        self,
        form: MatchForm,
        lost_to_another: Callable[[str], bool] = lambda request_id: False,
        promised: Callable[[MatchTracker, OpenMatch], None] = lambda tracker, found: None,
    ) -> None:
        """`lost_to_another(request id)` is true if the engine chose another connector's match.

        `promised` gets each match when the engine has asked for it.
        """
        self.open: dict[str, OpenMatch] = {}
        self.ends: Counter[ExternalMatchExit] = Counter()
        """Matches that were aborted, by reason."""
        self.postponed: Counter[ExternalMatchExit] = Counter()
        """Steps that did not take a match whose request still waits, by reason."""
        self.lookups = self.commits = 0
        """Number of questions to the connector, and of matches taken."""
        self.shortfalls: list[Shortfall] = []
        """Shortfalls of the running step's commits."""
        self._form = form
        self._lost_to_another = lost_to_another
        self._promised = promised
        self._limits: dict[str, int] = {}
        """Request id -> tokens that the connector accepted when it refused some (each refusal makes it smaller)."""
        self.pausing = False
        """True while each question must be asked again later: a reset waits until no load is under way."""
        self._step = 0
        self._failed: set[str] = set()

    # The tuple API's two calls

    def prepare(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Answer `get_num_new_matched_tokens`: tokens, or None for "ask again later", and asynchronous or not."""
        if self.pausing:
            return None, False
        request_id = request.request_id
        num_tokens = request.num_tokens
        if self._limits and self._limits.get(request_id) == 0:
            return 0, False
        found = self.open.get(request_id)
        if found is not None and found.plan is None:
            if found.question != (num_computed_tokens, num_tokens) or self._step - found.asked >= POSTPONED_STEPS:
                self.drop(request_id, ExternalMatchExit.SUPERSEDED)  # afterwards it would release the new one
                found = None
            elif not self._form.asks_every_step:
                return self._offer(found)
        self.lookups += 1
        match = NO_MATCH
        plan = None
        try:
            answer = self._form.prepare(request, num_computed_tokens)
            if answer is None:
                if found is not None:
                    found.suspended = self._step
                return None, False
            match = answer
            plan = plan_of(match)
            promised = index(match.num_tokens)
            if promised < 0:
                raise ValueError(f"a match of {promised} tokens")
            offered = min(promised, num_tokens - num_computed_tokens - (not match.load_kv_async))  # P6
        except Exception as error:
            self._log(self._form.prepare, error)
            return self._withdraw(request, match, plan, (num_computed_tokens, num_tokens))
        if promised > 0 and not self._form.must_end(match):
            return promised, match.load_kv_async
        if found is not None and found.plan is plan and offered > 0:
            found.match = match
            found.num_tokens = offered
            found.asked = self._step
            found.question = num_computed_tokens, num_tokens
            return self._offer(found)
        if found is not None:
            self.drop(request_id, ExternalMatchExit.SUPERSEDED if offered > 0 else ExternalMatchExit.WITHDRAWN)
        if promised == 0:
            return 0, False
        question = num_computed_tokens, num_tokens
        found = self.open[request_id] = OpenMatch(request, match, plan, offered, question, self._step, self._step)
        return self._offer(found)

    def _withdraw(
        self, request: Any, match: ExternalKVMatch, plan: object, question: tuple[int, int]
    ) -> tuple[int, bool]:
        """Answer to the engine if the connector's cannot be read: no tokens. Aborts the open match, and the plan."""
        found = self.open.get(request.request_id)
        self.drop(request.request_id, ExternalMatchExit.WITHDRAWN)
        if plan is not None and (found is None or found.plan is not plan):
            self.open[request.request_id] = OpenMatch(request, match, plan, 0, question, self._step, self._step)
            self.drop(request.request_id, ExternalMatchExit.WITHDRAWN)
        return 0, False

    def _offer(self, found: OpenMatch) -> tuple[int, bool]:
        """Answer to the engine: the promise, limited to the tokens that the connector accepted of its last one."""
        num_tokens = found.num_tokens
        found.step = self._step
        found.exit = None
        if self._limits:
            num_tokens = min(num_tokens, self._limits.get(found.request.request_id, num_tokens))
        if num_tokens <= 0:
            self.drop(found.request.request_id, ExternalMatchExit.REFUSED)
            return 0, False
        self._promised(self, found)
        return num_tokens, found.match.load_kv_async

    def commit(self, request: Any, blocks: Any, num_tokens: int) -> int:
        """Answer `update_state_after_alloc`; returns the number of tokens that will be loaded."""
        request_id = request.request_id
        found = self.open.get(request_id)
        if found is None and num_tokens and self._form.must_end(NO_MATCH):  # it has ended since the engine asked
            return self._fall_short(request, num_tokens, 0, asynchronous=True)
        if found is None or num_tokens == 0:
            lost = found is not None and self._lost_to_another(request_id)
            self.drop(request_id, ExternalMatchExit.OTHER_CONNECTOR if lost else ExternalMatchExit.DECLINED)
            self._call(self._form.admit, request, blocks, num_tokens)
            return num_tokens
        if self._form.whole_only and num_tokens < found.match.num_tokens:
            self.drop(request_id, ExternalMatchExit.DECLINED)
            accepted = 0
        else:
            del self.open[request_id]
            self.commits += 1
            accepted = self._accepted(self._form.commit, num_tokens, request, found.match, num_tokens, blocks)
        if accepted < num_tokens:
            return self._fall_short(request, num_tokens, accepted, asynchronous=found.match.load_kv_async)
        self._limits.pop(request_id, None)
        return num_tokens

    def _fall_short(self, request: Any, num_tokens: int, accepted: int, *, asynchronous: bool) -> int:
        self._limits[request.request_id] = accepted
        self.shortfalls.append(Shortfall(request, num_tokens - accepted, accepted, asynchronous))
        return accepted

    # What the engine says

    def confirm(self, found: OpenMatch, num_tokens: int) -> bool:
        """True if all tokens of a synchronous load can still be loaded, before blocks are allocated for it.

        True, too, if the engine has chosen another connector's match; drops the match otherwise.
        """
        request_id = found.request.request_id
        match = found.match
        if match.load_kv_async or self._limits.get(request_id) == num_tokens or self._lost_to_another(request_id):
            return True
        accepted = self._accepted(self._form.confirm, num_tokens, found.request, match, num_tokens)
        if accepted == num_tokens:
            return True
        self._limits[request_id] = accepted
        self.drop(request_id, ExternalMatchExit.REFUSED)
        return False

    def drop(self, request_id: str, reason: ExternalMatchExit) -> None:
        """Abort the request's match, if it has one."""
        found = self.open.pop(request_id, None)
        if found is not None:
            self.ends[reason] += 1
            self._call(self._form.abort, found.request, found.match, reason)

    def drop_all(self, reason: ExternalMatchExit) -> None:
        """Abort all matches."""
        for request_id in [*self.open]:
            self.drop(request_id, reason)

    def requests_finished(self, request_ids: Iterable[str]) -> None:
        """Abort the matches of requests that ended, in whatever state."""
        for request_id in request_ids:
            self.drop(request_id, ExternalMatchExit.CANCELLED)
            self._limits.pop(request_id, None)

    def postpone(self, found: OpenMatch, reason: ExternalMatchExit, *, asked: bool) -> None:
        """Keep a match that was not taken in this step, in which the engine asked for it or not.

        The connector gets only new reasons: a request that is blocked for long costs no further calls.
        """
        self.postponed[reason] += 1
        if found.reported != (reason, asked):
            found.reported = reason, asked
            self._call(self._form.postpone, found.request, found.match, reason)

    def end_step(self, why: Callable[[OpenMatch, bool], ExternalMatchExit | None]) -> None:
        """End a step: `why(match, asked in this step)` returns the reason why a match was not taken, None if it was.

        A match that its connector has suspended by asking for time is not reported as postponed.
        """
        step = self._step
        self._step += 1
        if not self.open:
            return
        for request_id, found in [*self.open.items()]:
            asked = found.step == step
            reason = found.exit or why(found, asked)
            found.exit = None
            if reason is None:
                continue
            if reason in DROPPED:
                self.drop(request_id, reason)
            elif step - found.step >= POSTPONED_STEPS:
                self.drop(request_id, ExternalMatchExit.NOT_RENEWED)
            elif found.suspended != step:
                self.postpone(found, reason, asked=asked)

    def _accepted(self, hook: Callable[..., Any], most: int, *arguments: Any) -> int:
        """Number of `most` tokens that the connector accepts; none if it raises or answers no number."""
        try:
            answer = hook(*arguments)
            return most if answer is None else max(0, min(most, index(answer)))
        except Exception as error:
            self._log(hook, error)
            return 0

    def _call(self, hook: Callable[..., Any], *arguments: Any) -> None:
        """Call a hook without an answer; a connector's exception costs the engine nothing."""
        try:
            hook(*arguments)
        except Exception as error:
            self._log(hook, error)

    def _log(self, hook: Callable[..., Any], error: Exception) -> None:
        if hook.__name__ not in self._failed:
            self._failed.add(hook.__name__)
            logger.error("kvpact: %s of %s failed (logged once)", hook.__name__, self._form.name, exc_info=error)
