"""The time of a scheduler step: what it has cost so far, which requests it prepares, and what waits for a later one.

Owns the seconds of the running step and the turns of those that wait; knows no cache. Lives in the scheduler's process.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from time import monotonic, perf_counter
from typing import Protocol

STEP_BUDGET_SECONDS = 0.2e-3
"""What a scheduler step has cost by then, the next requests wait for the next one: a step gets 1 ms (P11), and what a
request costs at once is below a third of that, on a slow machine with cold caches."""


class Turn(Enum):
    """What becomes of a probe."""

    NOW = "now"
    LATER = "later"
    """The request is asked for again in the next step."""
    NEVER = "never"
    """Its deadline has passed, and this step has no time for it either: it is computed."""


class Waiter(Protocol):
    """A request as its probes find it."""

    was_answered: bool
    """Whether the last probe got an answer, and not "ask again later"."""
    turn_by: float | None
    """Until when its probes may be put off to a later step, once one was."""


class StepBudget:
    """What the running step may cost: once that is `limit` seconds, what can wait is left to the next step.

    Hooks say when they begin and what they cost. Without any, a budget with no limit is never exhausted.
    """

    def __init__(self, limit: float = STEP_BUDGET_SECONDS) -> None:
        self.limit = limit
        self._charged = 0.0
        """Seconds of the step's hooks that have ended."""
        self._hook_began = perf_counter()
        self._probes = 0
        """Probes of requests without an answer that this step has made."""
        self._put_off = 0
        self._owes_probe = False
        """Whether the last step put off probes and made none."""
        self._whose_turn = 0

    def begin_hook(self) -> float:
        """A hook is called; returns when, for `charge`."""
        self._hook_began = began = perf_counter()
        return began

    def charge(self, began: float) -> None:
        """The step has paid for a hook that was called at `began` and ends now."""
        self._charged += perf_counter() - began

    @property
    def spent(self) -> float:
        """What the step has cost, in seconds, the running hook included."""
        return self._charged + perf_counter() - self._hook_began

    @property
    def exhausted(self) -> bool:
        """Whether the step has cost enough, so that what can wait is left to the next one."""
        return self.spent > self.limit

    def turn_of(self, waiter: Waiter, timeout: float) -> Turn:
        """What becomes of the probe that the engine makes now: those of many requests are spread over steps.

        A step makes them while it is within its budget, and the first of every second step in any case, so that all get
        their turn. No request waits for it longer than `timeout` seconds: from then on twice the budget counts, and a
        request that finds that spent as well is not prepared.
        """
        if waiter.was_answered:
            return Turn.NOW
        spent = self.spent
        if spent > self.limit and (self._probes or not self._owes_probe):
            now = monotonic()
            waiter.turn_by = waiter.turn_by or now + timeout
            if now < waiter.turn_by:
                self._put_off += 1
                return Turn.LATER
            if spent > 2 * self.limit:
                return Turn.NEVER
        self._probes += 1
        return Turn.NOW

    def do_in_turn(self, *works: Callable[[], object]) -> None:
        """Do the one of `works` whose turn it is, however late the step is, and the others while it has time."""
        self._whose_turn = (self._whose_turn + 1) % len(works)
        for at, work in enumerate(works):
            if at == self._whose_turn or not self.exhausted:
                work()

    def end_step(self) -> float:
        """The scheduler's step is over; returns what it has cost, in seconds."""
        self._owes_probe = bool(self._put_off and not self._probes)
        self._probes = self._put_off = 0
        spent, self._charged = self._charged, 0.0
        return spent
