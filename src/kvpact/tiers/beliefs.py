"""What is believed of a store for which it is not asked, and when that is put to the test.

Owns the pace: a belief is believed until a probe says otherwise, one operation of the tier's own thread for which no
request waits. Time is an argument; never does I/O.
"""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple

PROBE_SECONDS: Final = 10.0
"""Between two probes of one store, and none while no prompt comes."""

PROBE_BYTES: Final = 16 << 20
"""Bytes that a probe reads at most: as many as one read of a long prompt, so that it tells as much of the bandwidth."""


class Belief(NamedTuple):
    """Something for which a store is not asked."""

    since: float
    reason: str
    """What was seen."""


class Probes:
    """When one store may be probed."""

    def __init__(self) -> None:
        self._due_at = -inf

    def begins(self, now: float) -> bool:
        """Whether a probe begins at `now`; if so, the next one is due `PROBE_SECONDS` later."""
        if now < self._due_at:
            return False
        self._due_at = now + PROBE_SECONDS
        return True

    def told_nothing(self) -> None:
        """The last one asked nobody, so another one may."""
        self._due_at = -inf
