"""Errors of a tier: logged once for each kind, and kept until the operation works again."""

from __future__ import annotations

import logging
from typing import Final

from kvpact.tiers.base import TierHealth

MAX_KINDS: Final = 20
"""At most this many kinds of events are logged; a damaged disk can produce many."""


class LogOnce:
    """Logs the first event of each kind."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._kinds: set[str] = set()

    def log(self, kind: str, level: int, message: str, *arguments: object, error: Exception | None = None) -> None:
        """Log `message`, with the traceback of `error` if given."""
        if kind not in self._kinds and len(self._kinds) < MAX_KINDS:
            self._kinds.add(kind)
            self._logger.log(level, message, *arguments, exc_info=error)


class LastErrors:
    """The current errors of a tier by kind: "read", "write", or a kind that does not make it unhealthy."""

    def __init__(self, logger: logging.Logger, who: str) -> None:
        """`who` begins each line: "disk tier"."""
        self._who = who
        self._warned = LogOnce(logger)
        self._errors: dict[str, str] = {}

    def warn_once(self, kind: str, message: str) -> None:
        """Log an event that leaves the tier healthy."""
        self._warned.log(kind, logging.WARNING, "%s: %s", self._who, message)

    def add(self, kind: str, message: str) -> None:
        """Note that an operation fails, until `clear`."""
        self._errors[kind] = message
        self.warn_once(kind, message)

    def clear(self, kind: str) -> None:
        """Note that the operation works again."""
        self._errors.pop(kind, None)

    def health(self) -> TierHealth:
        """See `Tier.health`."""
        errors = dict(self._errors)
        return TierHealth(not errors.keys() & {"read", "write"}, "; ".join(errors.values()), "read" not in errors)
