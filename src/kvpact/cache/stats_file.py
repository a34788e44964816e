"""The counts as a small JSON file, for a program beside the engine that has to know when the cache is at rest.

Written only if configured (`stats_file`), only while the engine is idle, as a whole, and by a thread of its own: the
scheduler's thread never waits for a file system. Engines of one configuration write a file each, numbered from 1 on
beside the first one, and the lock on a file beside that says which engines live.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import Empty, Full, Queue

import msgspec

from kvpact.errors import reason_of
from kvpact.own_files import PRIVATE, closing, open_own, replace_own
from kvpact.threads import start_background
from kvpact.tiers.log_once import LogOnce

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""Seconds that the last counts, and those before them, may take to be written."""

TRIES = 50
"""How often a name is tried, every `RETRY_SECONDS`: the threads of an engine that was just killed may keep its lock."""

RETRY_SECONDS = 0.04

MOST_ENGINES = 64
"""Names that are tried; where every lock is refused there would be no end."""


def numbered(path: Path, number: int) -> Path:
    """The file of the engine of this number: stats.json, stats-1.json, and so on."""
    return path.with_name(f"{path.stem}-{number}{path.suffix}") if number else path


def stats_files(path: Path) -> list[Path]:
    """The files of all engines whose `stats_file` is `path`: of those that live, or of all if none does.

    `path` alone if there is none.
    """
    named = re.compile(rf"{re.escape(path.stem)}-([1-9][0-9]*){re.escape(path.suffix)}")
    others = (named.fullmatch(other.name) for other in path.parent.glob("*"))
    numbers = [0, *sorted(int(match[1]) for match in others if match is not None)]
    found = [file for number in numbers if (file := numbered(path, number)).exists()]
    return [file for file in found if _is_alive(file)] or found or [path]


def _lock_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _is_alive(path: Path) -> bool:
    """Whether the engine that wrote the file lives. It is given the lock a moment later if it wants it now."""
    try:
        with closing(open_own(_lock_beside(path), os.O_RDONLY)) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


class StatsFile:
    """A JSON object of series name -> value, rewritten when a value has changed."""

    def __init__(self, path: Path, number: int = 0) -> None:
        """`number` is this engine's among the replicas of its server, and so its file's if no other engine has that."""
        self._path, self._number = path, number
        self._own: Path | None = None
        self._lock = -1
        self._told = LogOnce(logger)
        self._written = b""
        self._latest: Queue[Mapping[str, float] | None] = Queue(1)
        self._thread: threading.Thread | None = None

    def offer(self, snapshot: Mapping[str, float]) -> None:
        """Let these counts be written, unless newer ones come first. Returns at once."""
        if self._thread is None:
            self._thread = start_background("kvpact-stats-file", self._run)
        with suppress(Empty):
            self._latest.get_nowait()
        self._latest.put_nowait(snapshot)

    def close(self, snapshot: Mapping[str, float]) -> None:
        """Write the last counts and end the thread."""
        self.offer(snapshot)
        try:
            self._latest.put(None, timeout=CLOSE_SECONDS)
        except Full:  # a write hangs: the thread cannot be ended
            return
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while (snapshot := self._latest.get()) is not None:
                self._write(snapshot)
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
                    logger.info("kvpact: the counts of this engine, one of several, are written to %s", path)
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

    def _write(self, snapshot: Mapping[str, float]) -> None:
        """Replace the file if any count but times has changed. The first error of a kind is logged."""
        content = msgspec.json.encode({name: value for name, value in snapshot.items() if "seconds" not in name})
        if content == self._written:
            return
        self._written = content
        try:
            self._own = self._own or self._claim()
            replace_own(self._own, msgspec.json.encode(snapshot))
        except Exception as error:  # the thread goes on: the next counts may be written
            why = reason_of(error)
            self._told.log(why, logging.WARNING, "kvpact: cannot write stats_file %s: %s", self._path, why)
