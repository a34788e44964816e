"""Keeps a resource open while it is used.

Owns the count of uses under way and the moment at which the last one ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class UseCount:
    """Uses of a resource by several threads; `let_go` is called after the stop, when the last use has ended."""

    def __init__(self, let_go: Callable[[], object]) -> None:
        self._let_go = let_go
        self._lock = threading.Lock()
        self._count = 0
        self.stopped = False
        """True once no further use may begin."""
        self.released = False
        """True once the resource was released: the stop came, and the last use has ended."""

    @contextmanager
    def one(self) -> Iterator[bool]:
        """Context of one use: yields whether the resource may be used."""
        with self._lock:
            begun = not self.stopped
            self._count += begun
        try:
            yield begun
        finally:
            with self._lock:
                self._count -= begun
                ended = begun and self.stopped and self._count == 0
            if ended:
                self._let_go()
                self.released = True

    def stop(self) -> None:
        """Stop further uses; `let_go` follows once, when all have ended."""
        with self.one():
            self.stopped = True
