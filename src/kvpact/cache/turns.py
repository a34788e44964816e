"""Which of the requests that come at once are prepared in a scheduler step, and which have to wait for a later one.

Owns the step's budget and who waits for a turn; knows no cache. Lives in the scheduler's process only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
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


class Turns:
    """Spreads the first probes of many requests over steps. `spent` tells the seconds that the running step has cost.

    A step makes them while it is within its budget, and the first of every second step in any case, so that all get
    their turn. Nobody waits for it longer than `timeout` seconds: from then on twice the budget counts, and who finds
    that spent as well is not prepared.
    """

    def __init__(self, timeout: float, spent: Callable[[], float]) -> None:
        self._timeout = timeout
        self._spent = spent
        self._made = 0
        """Probes of requests without an answer that this step has made."""
        self._put_off = 0
        self._owes_one = False
        """Whether the last step put off probes and made none."""

    @property
    def is_late(self) -> bool:
        """Whether the running step has cost enough, so that what can wait is left to the next one."""
        return self._spent() > STEP_BUDGET_SECONDS

    def of(self, waiter: Waiter) -> Turn:
        """What becomes of the probe that the engine makes now."""
        if waiter.was_answered:
            return Turn.NOW
        spent = self._spent()
        if spent > STEP_BUDGET_SECONDS and (self._made or not self._owes_one):
            now = time.monotonic()
            waiter.turn_by = waiter.turn_by or now + self._timeout
            if now < waiter.turn_by:
                self._put_off += 1
                return Turn.LATER
            if spent > 2 * STEP_BUDGET_SECONDS:
                return Turn.NEVER
        self._made += 1
        return Turn.NOW

    def end_step(self) -> None:
        """The scheduler's step is over."""
        self._owes_one = bool(self._put_off and not self._made)
        self._made = self._put_off = 0
