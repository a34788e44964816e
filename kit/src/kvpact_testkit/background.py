"""A call that runs on a thread of its own, so that no caller must wait for it. Owns the thread and the result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from kvpact_testkit.results import require

PATIENCE_S = 20.0
"""Real seconds after which a call is taken to hang; a busy machine needs a fraction of it."""

Result = TypeVar("Result")


class Background(Generic[Result]):
    """A running call. Its thread is a daemon, so a call that hangs does not keep the process from ending."""

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
        """The exception that an ended call raised, or None."""
        return self._future.exception()
