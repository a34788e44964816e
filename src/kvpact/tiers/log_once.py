"""Events of a tier, logged once for each kind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from traceback import format_exception
from typing import Final, TypeVar

from kvpact.errors import printable

MAX_KINDS: Final = 20
"""Most kinds of events that are logged; a damaged disk can produce many."""

Answer = TypeVar("Answer")


class LogOnce:
    """Logs the first event of each kind."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._kinds: set[str] = set()

    def log(self, kind: str, level: int, message: str, *arguments: object, error: Exception | None = None) -> None:
        """Log `message`, with the traceback of `error` if given; what others wrote into them reaches no terminal."""
        if kind not in self._kinds and len(self._kinds) < MAX_KINDS:
            self._kinds.add(kind)
            trace = "".join(format_exception(error)).splitlines() if error is not None else ()
            self._logger.log(level, "%s", "\n  ".join(map(printable, [message % arguments, *trace])))

    def contained(self, what: str, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Result of `call`, or `otherwise` if it raises; the first error of each kind is logged with its traceback."""
        try:
            return call()
        except Exception as error:
            self.log(what, logging.WARNING, "%s raised; further ones are not logged", what, error=error)
            return otherwise
