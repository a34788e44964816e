"""What was done, one line a step: what a check shows when it finds something broken.

Owns the lines. Knows nothing of what they are about.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

TRACE_LINES = 200
"""Steps of a check that are kept; one that needs more is no longer readable."""


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
        """Within, nothing is added: what is done there only looks."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
