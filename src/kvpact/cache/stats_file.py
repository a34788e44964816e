"""An engine's status as a JSON file, for engines that have ended and for programs that have no server to ask.

Written only if configured (`stats_file`), only while the engine is idle, as a whole, and by a thread of its own: the
scheduler's thread never waits for a file system. Engines of one configuration write a file each, numbered from 1 on
beside the first one, and claim it by the lock on a file beside it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import Empty, Full, Queue

import msgspec

from kvpact.cache.status import EngineStatus, status_document
from kvpact.errors import reason_of
from kvpact.own_files import PRIVATE, replace_own
from kvpact.threads import start_background
from kvpact.tiers.log_once import LogOnce

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""Seconds that the last status, and the one before it, may take to be written."""

TRIES = 50
"""Tries for a name, every `RETRY_SECONDS`: the threads of an engine that was just killed may keep its lock."""

RETRY_SECONDS = 0.04

MOST_ENGINES = 64
"""Names that are tried; where every lock is refused there would be no end."""


def numbered(path: Path, number: int) -> Path:
    """The file of the engine of this number: stats.json, stats-1.json, and so on."""
    return path.with_name(f"{path.stem}-{number}{path.suffix}") if number else path


def _lock_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


class StatsFile:
    """The document of `kvpact.cache.status.status_document` for one engine, rewritten when a count has changed."""

    def __init__(self, path: Path, number: int = 0) -> None:
        """`number` is this engine's among the replicas of its server, and so its file's if no other engine has that."""
        self._path = path
        self._number = number
        self._own: Path | None = None
        self._lock = -1
        self._told = LogOnce(logger)
        self._written = dict[str, float]()
        self._latest: Queue[EngineStatus | None] = Queue(1)
        self._thread: threading.Thread | None = None

    def offer(self, status: EngineStatus) -> None:
        """Let this status be written, unless a newer one comes first. Returns at once."""
        if self._thread is None:
            self._thread = start_background("kvpact-stats-file", self._run)
        with suppress(Empty):
            self._latest.get_nowait()
        self._latest.put_nowait(status)

    def close(self, status: EngineStatus) -> None:
        """Write the last status and end the thread."""
        self.offer(status)
        try:
            self._latest.put(None, timeout=CLOSE_SECONDS)
        except Full:  # a write is stuck: the thread cannot be ended
            return
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while (status := self._latest.get()) is not None:
                self._write(status)
        finally:
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    def _claim(self) -> Path:
        """The first file from this engine's number on that no living engine has; from now on it is this one's.

        Raises OSError.
        """
        for number in range(self._number, self._number + MOST_ENGINES):
            if self._take_lock(path := numbered(self._path, number)):
                if number:
                    logger.info("kvpact: this engine, one of several, writes its status to %s", path)
                return path
        raise BlockingIOError(f"{MOST_ENGINES} engines have a file of its name")

    def _take_lock(self, path: Path) -> bool:
        """Take the lock beside a file, which ends with the process; False if another engine keeps it."""
        with ExitStack() as refused:
            descriptor = PRIVATE.open(_lock_beside(path), os.O_RDWR)
            refused.callback(os.close, descriptor)
            wait = threading.Event().wait
            for _ in range(TRIES):
                with suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._lock = descriptor
                    refused.pop_all()
                    return True
                wait(RETRY_SECONDS)
        return False

    def _write(self, status: EngineStatus) -> None:
        """Replace the file if any count but times has changed. The first error of a kind is logged."""
        counts = {name: value for name, value in status.metrics.items() if "seconds" not in name}
        if counts == self._written:
            return
        self._written = counts
        try:
            self._own = self._own or self._claim()
            replace_own(self._own, msgspec.json.encode(status_document([status])))
        except Exception as error:  # the thread goes on: the next status may be written
            why = reason_of(error)
            self._told.log(why, logging.WARNING, "kvpact: cannot write stats_file %s: %s", self._path, why)
