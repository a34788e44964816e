"""Errors and evictions of one tier, and the outcome of its last operations.

Owns the counts and errors that the tier reports, and logs the first of each kind. Decides nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvpact.errors import reason_of
from kvpact.tiers.base import TierCounts, TierHealth
from kvpact.tiers.log_once import LogOnce


class Accounts:
    """Counts and current errors. An error's kind is "read", "write", or one that does not make the tier unhealthy.

    Thread-safe.
    """

    def __init__(self, logger: logging.Logger, whose: str) -> None:
        """`whose` begins each line: "redis tier at HOST"."""
        self._whose = whose
        self._warned = LogOnce(logger)
        self._errors: dict[str, str] = {}
        self._lock = threading.Lock()
        self.counts = TierCounts()
        """Counts so far; replaced as a whole."""

    def count(self, *, damaged: int = 0, dropped_writes: int = 0, evicted: int = 0, failed_reads: int = 0) -> None:
        """Add to the counts."""
        with self._lock:
            self.counts += TierCounts(damaged, dropped_writes, evicted, failed_reads)

    def warn_once(self, kind: str, message: str) -> None:
        """Log an event that leaves the tier healthy, the first of its kind."""
        self._warned.log(kind, logging.WARNING, "%s: %s", self._whose, message)

    def note_failed(self, kind: str, message: str) -> None:
        """Record a failure that lasts until `note_works`; a "read" is counted."""
        self.count(failed_reads=kind == "read")
        self._errors[kind] = message
        self.warn_once(kind, message)

    @contextmanager
    def contained(self, kind: str, what: str) -> Iterator[None]:
        """Context that contains every exception raised in it, and records it as `what` ("cannot be done")."""
        try:
            yield
        except Exception as error:
            self.note_failed(kind, f"{what}: {reason_of(error)}")

    def note_works(self, kind: str) -> None:
        """Record a success: the operation works again."""
        self._errors.pop(kind, None)

    def note_damaged(self, kind: str, message: str) -> None:
        """Count an unusable record; the first `message` of a kind is logged."""
        self.count(damaged=1)
        self.warn_once(f"damaged: {kind}", message)

    def health(self) -> TierHealth:
        """Health as `Tier.health` has it: only a failing "read" or "write" makes the tier unhealthy."""
        errors = dict(self._errors)
        return TierHealth(not errors.keys() & {"read", "write"}, "; ".join(errors.values()), "read" not in errors)
