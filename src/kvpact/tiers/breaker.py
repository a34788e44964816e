"""A circuit breaker: when to stop asking a store, why, and when it may be tried again.

Owns one belief, that the store fails: since when, the failure seen, and the earliest time of a probe. The probe is
`TierClient.probe`. Time is an argument; never does I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import random
from typing import Final

from kvpact.tiers.beliefs import Belief

FAILURES_IN_A_ROW: Final = 3
"""Failures that open it: one may be an accident, and each more costs a request its whole deadline."""

FIRST_TRY_S: Final = 3.0
"""From the opening to the first try: a store that starts anew, or whose network was cut for a moment, is back by then.

The next try is as late as `PROBE_SECONDS` says.
"""

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 2.0

JITTER: Final = 0.5
"""A pause is longer by a random share of up to this, so that engines do not all return at once."""


def pauses() -> Iterator[float]:
    """Seconds to wait after each try in a row that failed, while nothing but a tier's opening depends on it."""
    pause = FIRST_PAUSE_S
    while True:
        yield pause * (1 + JITTER * random())
        pause = min(LONGEST_PAUSE_S, 2 * pause)


class Breaker:
    """Guards one tier. Not thread-safe: it lives on the scheduler's thread."""

    def __init__(self) -> None:
        self._failures = 0
        self.belief: Belief | None = None
        """Reason why the tier is not asked; None if it is."""
        self.try_at = 0.0
        """Time of the first try after it was opened."""

    @property
    def is_open(self) -> bool:
        """True while the tier is not asked, except by a probe."""
        return self.belief is not None

    def succeeded(self) -> None:
        """Close the breaker after a success."""
        self._failures = 0
        self.belief = None

    def failed(self, now: float, reason: str) -> bool:
        """Count an operation that failed or timed out. Returns whether this opened the breaker."""
        self._failures += 1
        if self.belief is not None:
            self.belief = self.belief._replace(reason=reason)
            return False
        if self._failures < FAILURES_IN_A_ROW:
            return False
        self.belief = Belief(now, reason)
        self.try_at = now + FIRST_TRY_S * (1 + JITTER * random())
        return True
