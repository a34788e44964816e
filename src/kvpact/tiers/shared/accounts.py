"""What went wrong in a shared store, and whether its last calls worked.

Owns the counts that the tier tells of. Decides nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from kvpact.errors import TierError
from kvpact.tiers.base import TierCounts
from kvpact.tiers.log_once import LastErrors
from kvpact.tiers.shared.store import StoreError


class Accounts:
    """Counts and last errors of one store. Thread-safe."""

    def __init__(self, logger: logging.Logger, whose: str) -> None:
        """`whose` is for messages: "redis tier at HOST"."""
        self.last_errors = LastErrors(logger, whose)
        self._lock = threading.Lock()
        self._counts = TierCounts()

    def counts(self) -> TierCounts:
        """What was counted so far."""
        with self._lock:
            return self._counts

    @contextmanager
    def noting(self, what: str, refused: str = "") -> Iterator[None]:
        """A context that notes the store's failure and ends with it, or with a TierError if the caller must know."""
        try:
            yield
        except StoreError as error:
            self.note_failed(what, error)
            if refused:
                raise TierError(f"cannot {refused}: {error}") from error

    def note_failed(self, what: str, error: StoreError) -> None:
        """A "read" or "write" has failed."""
        if what == "read":
            with self._lock:
                self._counts = replace(self._counts, failed_reads=self._counts.failed_reads + 1)
        self.last_errors.add(what, f"cannot {what}: {error}")

    def note_dropped(self, blocks: int) -> None:
        """Blocks could not be stored."""
        with self._lock:
            self._counts = replace(self._counts, dropped_writes=self._counts.dropped_writes + blocks)

    def note_damaged(self, reason: str, message: str) -> None:
        """A record is unusable; the first `message` for a `reason` is logged."""
        with self._lock:
            self._counts = replace(self._counts, damaged=self._counts.damaged + 1)
        self.last_errors.warn_once(f"damaged: {reason}", message)
