"""A call under way on a thread of its own, which nobody has to wait for. Owns the thread and what the call came to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from kvpact.testkit.results import require

PATIENCE_S = 20.0
"""Real seconds after which a call is taken to hang; a busy machine needs a fraction of it."""

Result = TypeVar("Result")


class Background(Generic[Result]):
    """A call under way. Its thread is a daemon: a call that hangs is left behind."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self._future: Future[Result] = Future()
        threading.Thread(target=self._run, args=(call,), name="kvpact-background", daemon=True).start()

    def _run(self, call: Callable[[], Result]) -> None:
        try:
            self._future.set_result(call())
        except BaseException as error:
            self._future.set_exception(error)

    def ended(self, timeout: float = 0.0) -> bool:
        """Whether it ends within `timeout` seconds."""
        wait([self._future], timeout)
        return self._future.done()

    def result(self, timeout: float | None = None) -> Result:
        """What it returned or raised. Raises Broken unless it ends within `timeout` seconds, by default PATIENCE_S."""
        timeout = timeout or PATIENCE_S
        require(self.ended(timeout), f"an operation has not ended after {timeout:g} s")
        return self._future.result()

    def raised(self) -> BaseException | None:
        """What a call that has ended raised."""
        return self._future.exception()
