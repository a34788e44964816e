"""One connector's matches between prepare and commit, under a scheduler that says why each was not taken.

Owns which matches are open, what became of each in the running step, and what the connector refused. Stands between
vLLM's scheduler and the connector: vLLM calls the tuple API, the connector hears the pact. Knows no scheduler.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvpact.contract import DROPPED, POSTPONED_STEPS, ExternalKVMatch, ExternalMatchExit
from kvpact.errors import PactViolation
from kvpact.vllm.external_match import (
    ConfirmsExternalMatch,
    PostponesExternalMatch,
    SupportsExternalMatch,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class OpenMatch:
    """A match that was promised and neither committed nor aborted."""

    request: Any
    match: ExternalKVMatch
    step: int
    """When the engine last asked for it."""
    exit: ExternalMatchExit | None = None
    """Why it was not taken in that step, where something said so."""
    told: tuple[ExternalMatchExit, bool] | None = None
    """What the connector knows: why it was not taken last, and whether the engine had asked for it in that step."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A commit of which the connector accepted fewer tokens."""

    request: Any
    missing: int
    accepted: int


class MatchTracker:
    """Takes the place of the connector's `get_num_new_matched_tokens` and `update_state_after_alloc`."""

    def __init__(
        self,
        connector: Any,
        form: SupportsExternalMatch,
        won_by: Callable[[str], Any],
        promised: Callable[[MatchTracker, OpenMatch], None],
    ) -> None:
        """`won_by(request id)`: the connector whose match the engine chose, if several could have it.

        `promised` is called with each match when the engine has asked for it.
        """
        self.open: dict[str, OpenMatch] = {}
        self.ends: Counter[ExternalMatchExit] = Counter()
        """Matches that were aborted, by reason."""
        self.postponed: Counter[ExternalMatchExit] = Counter()
        """Steps in which a match was not taken and its request still waits, by reason."""
        self.commits = 0
        self.shortfalls: list[Shortfall] = []
        """What the running step's commits fell short of."""
        self.connector, self._form, self._won_by, self._promised = connector, form, won_by, promised
        self._pass_on = connector.update_state_after_alloc
        self._confirm = form.confirm_external_match if isinstance(form, ConfirmsExternalMatch) else None
        self._postpone = form.postpone_external_match if isinstance(form, PostponesExternalMatch) else None
        self._limits: dict[str, int] = {}
        """Request id -> the tokens that the connector accepted when it refused some (each refusal makes it smaller)."""
        self._step = 0
        self._failed = False
        connector.get_num_new_matched_tokens = self.prepare
        connector.update_state_after_alloc = self.commit

    # vLLM's two calls

    def prepare(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """`get_num_new_matched_tokens`."""
        match = self._form.prepare_external_match(request, num_computed_tokens)
        request_id = request.request_id
        if match is None or match.num_tokens <= 0:
            self.open.pop(request_id, None)  # the connector has put another answer in its place
            return (None, False) if match is None else (0, False)
        found = self.open.get(request_id)
        if found is None:
            found = self.open[request_id] = OpenMatch(request, match, self._step)
        else:
            found.match, found.step, found.exit = match, self._step, None
        num_tokens = match.num_tokens
        if self._limits and (limit := self._limits.get(request_id)) is not None and limit < num_tokens:
            if limit == 0:
                self.drop(request_id, ExternalMatchExit.REFUSED)
                return 0, False
            num_tokens = limit
        self._promised(self, found)
        return num_tokens, match.load_kv_async

    def commit(self, request: Any, blocks: Any, num_tokens: int, *rest: Any) -> Any:
        """`update_state_after_alloc`."""
        found = self.open.get(request.request_id)
        if found is None:
            return self._pass_on(request, blocks, num_tokens, *rest)
        if num_tokens == 0:
            winner = self._won_by(request.request_id)
            lost = winner is not None and winner is not self.connector
            self.drop(request.request_id, ExternalMatchExit.OTHER_CONNECTOR if lost else ExternalMatchExit.DECLINED)
            return self._pass_on(request, blocks, 0, *rest)
        del self.open[request.request_id]
        self.commits += 1
        match = found.match
        accepted = self._form.commit_external_match(request, match, num_tokens, blocks)
        if accepted >= num_tokens:
            self._limits.pop(request.request_id, None)
            return None
        if not match.load_kv_async:
            raise PactViolation(
                f"request {request.request_id}: of {num_tokens} tokens that the step loads the connector accepts "
                f"{accepted}, now that vLLM has published their blocks; it must say so in confirm_external_match"
            )
        accepted = self._limits[request.request_id] = max(0, accepted)
        self.shortfalls.append(Shortfall(request, num_tokens - accepted, accepted))
        return None

    # What the scheduler says

    def confirm(self, found: OpenMatch, num_tokens: int) -> bool:
        """Before blocks are allocated for a load that the step waits for: whether all its tokens still come.

        True if the engine has chosen another connector's match.
        """
        if self._confirm is None or found.match.load_kv_async:
            return True
        request_id = found.request.request_id
        winner = self._won_by(request_id)
        if self._limits.get(request_id) == num_tokens or (winner is not None and winner is not self.connector):
            return True
        accepted = self._confirm(found.request, found.match, num_tokens)
        if accepted >= num_tokens:
            return True
        self._limits[request_id] = max(0, accepted)
        self.drop(request_id, ExternalMatchExit.REFUSED)
        return False

    def drop(self, request_id: str, reason: ExternalMatchExit) -> None:
        """Nobody will take the request's match, if it has one."""
        found = self.open.pop(request_id, None)
        if found is not None:
            self.ends[reason] += 1
            self._tell(self._form.abort_external_match, found, reason)

    def drop_all(self, reason: ExternalMatchExit) -> None:
        """Nobody will take any of the matches."""
        for request_id in [*self.open]:
            self.drop(request_id, reason)

    def requests_finished(self, request_ids: Iterable[str]) -> None:
        """These requests ended, in whatever state."""
        for request_id in request_ids:
            self.drop(request_id, ExternalMatchExit.CANCELLED)
            self._limits.pop(request_id, None)

    def postpone(self, found: OpenMatch, reason: ExternalMatchExit, *, asked: bool) -> None:
        """The match was not taken in this step, in which the engine asked for it or not; its request still waits.

        The connector is told what it does not know yet: a head that is blocked for long costs nothing more.
        """
        self.postponed[reason] += 1
        if self._postpone is not None and found.told != (reason, asked):
            found.told = reason, asked
            self._tell(self._postpone, found, reason)

    def end_step(self, why: Callable[[OpenMatch, bool], ExternalMatchExit | None]) -> None:
        """The step is decided. `why(match, whether the step asked for it)` says why it was not taken; None: it was."""
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
            else:
                self.postpone(found, reason, asked=asked)

    def _tell(
        self,
        hook: Callable[[Any, ExternalKVMatch, ExternalMatchExit], Any],
        found: OpenMatch,
        reason: ExternalMatchExit,
    ) -> None:
        """A connector's mistake in a call that vLLM does not make costs the engine nothing (H13)."""
        try:
            hook(found.request, found.match, reason)
        except Exception:
            if not self._failed:
                logger.exception("kvpact: %s failed for %s (logged once)", hook, reason)
            self._failed = True


__all__ = ["MatchTracker", "OpenMatch", "Shortfall"]
