"""What was done, one line a step: what a check shows when it finds something broken.

Owns the lines. Knows nothing of what they are about.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import overload

TRACE_LINES = 200
"""Steps of a check that are kept; one that needs more is no longer readable."""


class Trace(Sequence[str]):
    """The last `limit` lines, by default all; any thread may add one."""

    def __init__(self, limit: int | None = None) -> None:
        self._lines: deque[str] = deque(maxlen=limit)
        self._paused = False

    def note(self, line: str) -> None:
        """Add a line."""
        if not self._paused:
            self._lines.append(line)

    def clear(self) -> None:
        """Begin anew."""
        self._lines.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, nothing is added: what is done there only looks."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return tuple(self._lines)[index]
