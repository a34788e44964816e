"""Keeps something open while it is used.

Owns the count of uses under way and the moment at which the last one lets go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


class UseCount:
    """Uses of something by several threads; once it is stopped and nobody uses it any more, `let_go` is called."""

    def __init__(self, let_go: Callable[[], object]) -> None:
        self._let_go = let_go
        self._lock = threading.Lock()
        self._count = 0
        self.stopped = False
        """Whether no further use begins."""

    def one(self) -> AbstractContextManager[bool]:
        """Whether it may be used until the end of this."""
        return self._use(last=False)

    def the_last(self) -> AbstractContextManager[bool]:
        """No further use begins, but this one; False if it was stopped before. At its end the others are waited for."""
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
