"""The counts as a small JSON file, for a program beside the engine that wants to know when the cache is at rest.

Written only when asked for (`stats_file`), only by an idle engine, replaced as a whole. Floor 3.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)


class StatsFile:
    """A JSON object of series name -> value, rewritten when it changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = b""

    def write(self, snapshot: Mapping[str, float]) -> None:
        """Replace the file if any count but the time spent changed. An error is logged and forgotten."""
        content = msgspec.json.encode({name: value for name, value in snapshot.items() if "seconds" not in name})
        if content == self._written:
            return
        self._written = content
        beside = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            beside.write_bytes(msgspec.json.encode(snapshot))
            beside.replace(self._path)
        except OSError as error:
            logger.warning("kvpact: cannot write stats_file %s: %s", self._path, error)
