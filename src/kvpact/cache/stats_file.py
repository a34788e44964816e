"""The counts as a small JSON file, for a program beside the engine that has to know when the cache is at rest.

Written only if configured (`stats_file`), only while the engine is idle, as a whole, and by a thread of its own: the
scheduler's thread never waits for a file system.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, Full, Queue

import msgspec

from kvpact.own_files import replace_own
from kvpact.threads import start_background

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""Seconds that the last counts, and those before them, may take to be written."""


class StatsFile:
    """A JSON object of series name -> value, rewritten when a value has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
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
        while (snapshot := self._latest.get()) is not None:
            self._write(snapshot)

    def _write(self, snapshot: Mapping[str, float]) -> None:
        """Replace the file if any count but times has changed. An error is logged."""
        content = msgspec.json.encode({name: value for name, value in snapshot.items() if "seconds" not in name})
        if content == self._written:
            return
        self._written = content
        try:
            replace_own(self._path, msgspec.json.encode(snapshot))
        except OSError as error:
            logger.warning("kvpact: cannot write stats_file %s: %s", self._path, error)
