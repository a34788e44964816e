"""Events of a tier, logged once for each kind."""

from __future__ import annotations

import logging
from typing import Final

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
