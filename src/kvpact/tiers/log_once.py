"""What a tier fails at: logged once for each kind, and remembered until it is over."""

from __future__ import annotations

import logging
from typing import Final

from kvpact.tiers.base import TierHealth

MAX_KINDS: Final = 20
"""Kinds of events that are logged; a damaged disk can think of many."""


class LogOnce:
    """Logs the first event of each kind."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._kinds: set[str] = set()

    def log(self, kind: str, level: int, message: str, *arguments: object, error: Exception | None = None) -> None:
        """With `error`, its traceback too."""
        if kind not in self._kinds and len(self._kinds) < MAX_KINDS:
            self._kinds.add(kind)
            self._logger.log(level, message, *arguments, exc_info=error)


class LastErrors:
    """What a tier fails at now, by kind: "read", "write", or what leaves it well."""

    def __init__(self, logger: logging.Logger, who: str) -> None:
        """`who` begins each line: "disk tier"."""
        self._who = who
        self._warned = LogOnce(logger)
        self._errors: dict[str, str] = {}

    def warn_once(self, kind: str, message: str) -> None:
        """Something that is over at once."""
        self._warned.log(kind, logging.WARNING, "%s: %s", self._who, message)

    def add(self, kind: str, message: str) -> None:
        """Something fails, until `clear` says that it works again."""
        self._errors[kind] = message
        self.warn_once(kind, message)

    def clear(self, kind: str) -> None:
        """It works."""
        self._errors.pop(kind, None)

    def health(self) -> TierHealth:
        """See `Tier.health`."""
        errors = dict(self._errors)
        return TierHealth(not errors.keys() & {"read", "write"}, "; ".join(errors.values()), "read" not in errors)
