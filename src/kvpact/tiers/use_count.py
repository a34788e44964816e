"""Keeps something open while it is used.

Owns the count of uses under way and the moment at which the last one lets go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class UseCount:
    """Uses of something by several threads; once it is stopped and nobody uses it any more, `let_go` is called."""

    def __init__(self, let_go: Callable[[], object]) -> None:
        self._let_go = let_go
        self._lock = threading.Lock()
        self._count = 0
        self.stopped = False
        """Whether no further use begins."""

    @contextmanager
    def one(self) -> Iterator[bool]:
        """Whether it may be used until the end of this."""
        with self._lock:
            begun = not self.stopped
            self._count += begun
        try:
            yield begun
        finally:
            if begun:
                self._end()

    @contextmanager
    def the_last(self) -> Iterator[bool]:
        """No further use begins, but this one; False if it was stopped before. At its end the others are waited for."""
        with self._lock:
            first = not self.stopped
            self.stopped = True
            self._count += first
        try:
            yield first
        finally:
            if first:
                self._end()

    def _end(self) -> None:
        with self._lock:
            self._count -= 1
            last = self.stopped and self._count == 0
        if last:
            self._let_go()
