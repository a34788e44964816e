"""Digests computed on a background thread: submit now, read the answer later.

Owns one background thread and its queue of jobs. Does not know their content.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from kvpact.threads import start_background

logger = logging.getLogger(__name__)

MAX_JOBS = 1024
"""Most jobs that wait for one thread. Each keeps its input alive, so one more is refused."""

Answer = TypeVar("Answer")


class Pending(Generic[Answer]):
    """Answer from another thread. `value` is None until `is_done`, and stays None if there is no answer."""

    __slots__ = ("__weakref__", "_job", "is_done", "value")

    def __init__(self, job: Callable[[], Answer | None] | None = None) -> None:
        """`job` computes the answer; without one there is never an answer."""
        self._job = job
        self.value: Answer | None = None
        self.is_done = job is None

    def run(self) -> None:
        """Compute the answer, unless the job was cancelled. A job that raises has no answer."""
        job = self._job
        self._job = None
        try:
            if job is not None:
                self.value = job()
        finally:
            self.is_done = True

    def give_up(self) -> None:
        """Cancel the job and release its input, as the answer is not needed any more."""
        self._job = None


class DigestThread:
    """Thread, started with the first job, that runs jobs in order of submission."""

    def __init__(self, name: str) -> None:
        """`name` names the thread; see `start_background`."""
        self._name = name
        self._jobs: SimpleQueue[Pending[object] | None] = SimpleQueue()
        self._is_started = False
        self._failures: set[type[BaseException]] = set()

    def ask(self, job: Callable[[], Answer | None]) -> Pending[Answer]:
        """Run `job` in the background, at the cost of one append to a queue; refused with `MAX_JOBS` waiting jobs."""
        if self._jobs.qsize() >= MAX_JOBS:
            return Pending()
        pending = Pending(job)
        self._jobs.put(pending)  # type: ignore[arg-type]
        if not self._is_started:
            self._is_started = True
            start_background(self._name, self._run)
        return pending

    def close(self) -> None:
        """End the thread after the jobs that are waiting now. Jobs submitted later never run."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (pending := self._jobs.get()) is not None:
            try:
                pending.run()
            except Exception as error:
                if type(error) not in self._failures:
                    self._failures.add(type(error))
                    logger.warning("kvpact: a request is not cached: its inputs have no digest", exc_info=error)
            del pending  # so that its result is not kept until the next job comes
