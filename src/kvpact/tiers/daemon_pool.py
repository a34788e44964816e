"""Threads for calls into native code that may never return.

Owns the threads and the queue of calls. The process's end does not wait for a call that hangs, as it would with the
standard library's executors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

from kvpact.threads import start_background

Result = TypeVar("Result")
_Jobs: TypeAlias = "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]"


class DaemonPool:
    """At most `most` daemon threads, each started when there is no idle one for a call. Thread-safe."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._jobs: _Jobs = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Run `call` on one of the threads. Raises RuntimeError after `close`."""
        future: Future[Result] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            self._jobs.put((future, call))
            if not self._idle.acquire(blocking=False) and (number := len(self._threads)) < self._most:
                work = partial(_work, self._jobs, self._idle)
                self._threads.append(start_background(f"{self._name}-{number}", work))
        return future

    def close(self) -> None:
        """Start no further call. Does not wait for running ones. Idempotent."""
        with self._lock:
            self._closed = True
            with suppress(Empty):
                while (job := self._jobs.get_nowait()) is not None:
                    job[0].cancel()
            for _ in self._threads:
                self._jobs.put(None)

    def wait_closed(self) -> None:
        """Wait until all calls that were running at `close` have ended."""
        for thread in self._threads:
            thread.join()


def _work(jobs: _Jobs, idle: threading.Semaphore) -> None:
    while (job := jobs.get()) is not None:
        future, call = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:  # a panic of Rust code is no Exception
                future.set_exception(error)
        del job, future, call
        idle.release()
