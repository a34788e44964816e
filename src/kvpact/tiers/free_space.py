"""Room that is not a tier's own: a file system, a quota, a limit on the size of files with less than its capacity.

Owns which errors say so, and what is said of it at the start. What is evicted then, each tier decides.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvpact.units import format_size

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors that say that nothing more fits: bytes, or files, of the file system or of a quota."""

SLACK_SHARE: Final = 16
"""Who evicts frees this part of the whole more than needed, so that not every write must evict."""


_SAID: Final = set[tuple[Path, int]]()
"""Places and capacities of which this process has said that they do not fit: a tier may be opened again and again."""


def warn_if_scarce(logger: logging.Logger, whose: str, path: Path, capacity_bytes: int, held: Iterable[int]) -> None:
    """Say if the file system of `path` has less room than a capacity, of which bytes `held` are filled already."""
    with suppress(OSError):
        said = scarcity(path, capacity_bytes, sum(held))
        if said and (path, capacity_bytes) not in _SAID:
            _SAID.add((path, capacity_bytes))
            logger.warning("%s: %s", whose, said)


def scarcity(path: Path, capacity_bytes: int, held_bytes: int) -> str:
    """The sentence for a capacity of which `held_bytes` are filled, if it is more than the file system of `path` has
    room for; else "". Raises OSError."""
    found = os.statvfs(path)
    room = found.f_bavail * found.f_frsize + held_bytes
    if room >= capacity_bytes:
        return ""
    return (
        f"a capacity of {format_size(capacity_bytes)} is more than the {format_size(room)} that {path} has room for; "
        "when that is full, what was used least recently goes"
    )


def taken(status: os.stat_result) -> int:
    """Bytes that a file takes of its file system: what is reserved for it, or its length if that is more."""
    return max(status.st_size, 512 * status.st_blocks)
