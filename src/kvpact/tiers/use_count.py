"""Keeps a resource open while it is used.

Owns the count of uses under way and the moment at which the last one ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


class UseCount:
    """Uses of a resource by several threads; `let_go` is called after the stop, when the last use has ended."""

    def __init__(self, let_go: Callable[[], object]) -> None:
        self._let_go = let_go
        self._lock = threading.Lock()
        self._count = 0
        self.stopped = False
        """Whether no further use may begin."""

    def one(self) -> AbstractContextManager[bool]:
        """A use: gives whether the resource may be used within the context."""
        return self._use(last=False)

    def the_last(self) -> AbstractContextManager[bool]:
        """The last use that begins; gives False if there was one. `let_go` follows when all uses have ended."""
        return self._use(last=True)

    @contextmanager
    def _use(self, *, last: bool) -> Iterator[bool]:
        with self._lock:
            begun = not self.stopped
            self.stopped = self.stopped or last
            self._count += begun
        try:
            yield begun
        finally:
            with self._lock:
                self._count -= begun
                ended = begun and self.stopped and self._count == 0
            if ended:
                self._let_go()
