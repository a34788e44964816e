"""A circuit breaker: when to stop asking a store, and when to try it again.

Owns one state: closed (ask it), open (do not ask it), or trying (one operation is under way). Time is an argument;
never does I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import random
from typing import Final

FAILURES_IN_A_ROW: Final = 3
"""Failures that open it: one may be an accident, and each more costs a request its whole deadline."""

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 2.0
"""A store that works again is used within 1.5 times this, however long it failed."""

JITTER: Final = 0.5
"""A pause is longer by a random share of up to this, so that engines do not all return at once."""


def pauses() -> Iterator[float]:
    """Seconds to wait after each try of a store in a row that failed."""
    pause = FIRST_PAUSE_S
    while True:
        yield pause * (1 + JITTER * random())
        pause = min(LONGEST_PAUSE_S, 2 * pause)


class Breaker:
    """Guards one tier. Not thread-safe: it lives on the scheduler's thread."""

    def __init__(self) -> None:
        self._failures = 0
        self._pauses = pauses()
        self._retry_at: float | None = None
        self._trying = False

    @property
    def is_open(self) -> bool:
        """Whether the tier is not asked, except for one try at a time."""
        return self._retry_at is not None

    def allows(self, now: float) -> bool:
        """Whether the tier may be asked at `now`. While the breaker is open, True starts the one try."""
        if not self.is_ready(now):
            return False
        self._trying = self.is_open
        return True

    def is_ready(self, now: float) -> bool:
        """What `allows` would return at `now`, without starting a try."""
        return self._retry_at is None or (not self._trying and now >= self._retry_at)

    def not_tried(self) -> None:
        """The allowed operation was not made; another one may try."""
        self._trying = False

    def succeeded(self) -> None:
        """An operation succeeded."""
        if self._failures:
            self._failures, self._pauses = 0, pauses()
        self._retry_at = None
        self._trying = False

    def failed(self, now: float) -> bool:
        """An operation failed or timed out. Returns whether this opened the breaker."""
        self._failures += 1
        if self._retry_at is not None:
            if self._trying or now >= self._retry_at:
                self._wait(now)
            return False
        if self._failures < FAILURES_IN_A_ROW:
            return False
        self._wait(now)
        return True

    def _wait(self, now: float) -> None:
        self._trying = False
        self._retry_at = now + next(self._pauses)
