"""The time of a scheduler step: what it has cost so far, which requests it prepares, and what waits for a later one.

Owns the seconds of the running step and the turns of what waits. Knows no cache but by the contract. Lives in the
scheduler's process.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, perf_counter

from kvpact.cache.waiting import Reply, WaitEvent, Waiting
from kvpact.contract import ExternalCache

STEP_BUDGET_SECONDS = 0.2e-3
"""Seconds of a scheduler step; work that can wait is then left to the next one. A step gets 1 ms (P11); one request
costs less than a third of that at once, on a slow machine with cold caches."""

CROWD_BUDGETS = 25
MAX_CROWD_BUDGETS = 100

CROWD_SHARE = 0.1
"""A step leaves further probes to the next one, even where memory alone answers them, after this share of the time that
the last step took: at least 25 budgets, which are 5 ms, and at most 100. A step that answered a thousand of them at
once would keep every decode waiting for 0.3 s. Less time would cost more than it spares: the engine asks each waiting
request again in each step, and an engine with long steps must find enough requests to fill one."""

TIER_SHARE = 0.01
"""A step works for the tiers for this share of the time that the last one took, if that is more than its budget: a long
step fills many blocks, which are to be written before others drive them out. At most `CROWD_BUDGETS`."""


class StepBudget:
    """The cost of the running step: after `limit` seconds, what can wait is left to the next step.

    Each hook writes `hook_began` and adds to `charged` by itself: a call would cost more than that. A budget with an
    infinite limit is never exhausted.
    """

    def __init__(self, limit: float = STEP_BUDGET_SECONDS) -> None:
        self.limit = limit
        self.charged = 0.0
        """Seconds of the step's hooks that have ended."""
        self.now = perf_counter
        """Clock of hooks, in seconds."""
        self.hook_began = perf_counter()
        """Begin of the running hook, by `now`."""
        self._probes = 0
        """Probes that this step answered, of requests whose last probe was not."""
        self._put_off = 0
        self._owes_probe = False
        """True after a step that put off probes and answered none."""
        self._whose_turn = 0
        self._ended_at = monotonic()
        self._for_tiers = 0.0
        """Seconds that a step works for the tiers, if that is more than `limit`."""
        self._crowd = CROWD_BUDGETS * limit
        """Seconds for probes of this step that memory alone answers."""

    @property
    def exhausted(self) -> bool:
        """True once the step has used its budget: work that can wait is left to the next step."""
        return self.charged + perf_counter() - self.hook_began > self.limit

    @property
    def is_late(self) -> bool:
        """True once the step leaves the tiers' results, and offers to them, to the next step."""
        return self.charged + perf_counter() - self.hook_began > max(self.limit, self._for_tiers)

    def grant_turn(self, waiting: Waiting, timeout: float, cache: ExternalCache) -> bool:
        """Grant the request that is probed now its turn at `cache`; returns False, with PUT_OFF or DECLINED noted, if
        the step has no time.

        The probes of many requests are spread over steps. A step answers probes while it is within its budget, and all
        of requests that were answered before. Of the others, those that ask no shared tiers have more time, and each
        step answers one in any case.

        Those that ask shared tiers: after a step that answered none, the first probe is answered in any case. A request
        is put off for at most `timeout` seconds from when it was first told to ask later; then twice the budget counts,
        and if that is spent too, the request is declined.
        """
        spent = self.charged + perf_counter() - self.hook_began
        was_answered = waiting.reply is Reply.ANSWERED
        if was_answered or spent > self.limit:
            if not cache.asks_shared:
                if not was_answered and self._probes and spent > self._crowd:
                    waiting.note(WaitEvent.PUT_OFF, monotonic() + timeout)
                    return False
            elif was_answered:
                return True
            elif self._probes or not self._owes_probe:
                now = monotonic()
                if now < (waiting.until or now + timeout):
                    self._put_off += 1
                    waiting.note(WaitEvent.PUT_OFF, now + timeout)
                    return False
                if spent > 2 * self.limit:
                    waiting.note(WaitEvent.DECLINED)
                    return False
        self._probes += 1
        return True

    def do_in_turn(self, *works: Callable[[], object]) -> None:
        """Do the one of `works` whose turn it is, even if the step is late, and the others while it has time."""
        self._whose_turn = (self._whose_turn + 1) % len(works)
        for at, work in enumerate(works):
            if at == self._whose_turn or not self.is_late:
                work()

    def end_step(self) -> float:
        """End the scheduler's step; returns its cost in seconds."""
        self._owes_probe = bool(self._put_off and not self._probes)
        self._probes = self._put_off = 0
        spent = self.charged
        self.charged = 0.0
        now = monotonic()
        lasted = now - self._ended_at
        self._ended_at = now
        self._for_tiers = min(TIER_SHARE * lasted, CROWD_BUDGETS * self.limit)
        self._crowd = min(max(CROWD_BUDGETS * self.limit, CROWD_SHARE * lasted), MAX_CROWD_BUDGETS * self.limit)
        return spent
