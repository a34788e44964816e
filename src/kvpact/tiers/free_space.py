"""Limits outside a tier: a file system, a quota or a limit on the size of files with less room than its capacity.

Owns the errors that mean "full", and the warning at the start. Each tier decides what it evicts then.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvpact.errors import printable
from kvpact.tiers.log_once import LogOnce
from kvpact.units import format_size

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors that say that nothing more fits: bytes, or files, of the file system or of a quota."""

SLACK_SHARE: Final = 16
"""Divisor of the capacity: an eviction frees this part more than needed, so that not every write must evict."""


_SAID: Final = set[tuple[Path, int]]()
"""Places and capacities for which this process has logged that they do not fit: a tier may be opened repeatedly."""


def warn_if_scarce(logger: logging.Logger, whose: str, path: Path, capacity_bytes: int, held: Iterable[int]) -> None:
    """Log a warning if the file system of `path` has less room than a capacity, of which bytes `held` are filled."""
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
        "when that is full, the least recently used blocks are evicted"
    )


class Unremovable:
    """Files that an eviction could not remove, and skips: they count as taken, and one is named in the log."""

    def __init__(self, logger: logging.Logger, whose: str) -> None:
        """`whose` begins each line: "disk tier"."""
        self._warned = LogOnce(logger)
        self._whose = whose
        self._found = dict[str, str]()
        """Name of each such file or object -> why."""

    def forget(self) -> None:
        """Forget them as an eviction begins: each is tried again."""
        self._found.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __len__(self) -> int:
        return len(self._found)

    def note(self, name: str, error: Exception) -> None:
        """Record a file that cannot be removed now."""
        self._found[name] = getattr(error, "strerror", None) or str(error)

    def log(self) -> str:
        """One line about them, logged once; "" if there are none."""
        if not self._found:
            return ""
        name, why = next(iter(self._found.items()))
        text = (
            f"{self._whose}: {len(self._found)} files in the way cannot be removed, such as {printable(name)}: {why}; "
            "others are evicted instead, and these count as taken: remove them, or give this user the right to"
        )
        self._warned.log("unremovable", logging.WARNING, "%s", text)
        return text


def taken(status: os.stat_result) -> int:
    """Bytes that a file takes of its file system: what is reserved for it, or its length if that is more."""
    return max(status.st_size, 512 * status.st_blocks)
