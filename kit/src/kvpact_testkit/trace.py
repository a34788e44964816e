"""The steps of a check, one line each, which a broken check shows.

Owns the lines. Knows nothing of their subject.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

TRACE_LINES = 200
"""Steps that a trace keeps; a longer one is no longer readable."""


class Trace(deque[str]):
    """The last `limit` lines, by default all; any thread may add one."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(maxlen=limit)
        self._paused = False

    def note(self, line: str) -> None:
        """Add a line."""
        if not self._paused:
            self.append(line)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, no line is added: the calls there only observe."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
