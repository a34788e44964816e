"""When to leave a store alone, and when to try it again.

Owns one small state: closed (use it), open (do not), or trying (one look-up is finding out). Time comes in as an
argument; never does I/O.
"""

from __future__ import annotations

from random import Random
from typing import Final

FAILURES_IN_A_ROW: Final = 3
"""So many open it: one is an accident, and each more costs some request its whole deadline."""

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 2.0
"""A store that is back is used again within this time and a half, however long it was ill."""

JITTER: Final = 0.5
"""Pauses are longer by up to this share, by chance, so that engines do not all come back at once."""


class Breaker:
    """Guards one tier. Not thread-safe: it lives on the scheduler's thread."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = Random(seed)
        self._failures = 0
        self._pause = FIRST_PAUSE_S
        self._retry_at: float | None = None
        self._trying = False

    @property
    def is_open(self) -> bool:
        """Whether the tier is to be left alone, but for one try at a time."""
        return self._retry_at is not None

    def allows(self, now: float) -> bool:
        """Whether something may be asked of the tier at `now`; if it is open, a True is the one try."""
        if not self.is_ready(now):
            return False
        self._trying = self.is_open
        return True

    def is_ready(self, now: float) -> bool:
        """What `allows` would answer at `now`; asking this is no try."""
        return self._retry_at is None or (not self._trying and now >= self._retry_at)

    def not_tried(self) -> None:
        """What was allowed was not asked after all; somebody else may try."""
        self._trying = False

    def succeeded(self) -> None:
        """The tier did what it was asked."""
        self._failures = 0
        self._pause = FIRST_PAUSE_S
        self._retry_at = None
        self._trying = False

    def failed(self, now: float) -> bool:
        """The tier failed, or was too late; whether that has just opened the breaker."""
        self._failures += 1
        if self._retry_at is not None:
            if self._trying or now >= self._retry_at:
                self._pause = min(LONGEST_PAUSE_S, 2 * self._pause)
                self._wait(now)
            return False
        if self._failures < FAILURES_IN_A_ROW:
            return False
        self._wait(now)
        return True

    def _wait(self, now: float) -> None:
        self._trying = False
        self._retry_at = now + self._pause * (1 + JITTER * self._random.random())
