"""Room that is not a tier's own: a file system, a quota, a limit on the size of files with less than its capacity.

Owns which errors say so, what is said of it at the start, and which files were used least recently. Removes nothing.
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from kvpact.units import format_size

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors that say that nothing more fits: bytes, or files, of the file system or of a quota."""

SLACK_SHARE: Final = 16
"""Who evicts frees this part of the whole more than needed, so that not every write must evict."""

RETRY_S: Final = 10.0
"""Where room was looked for in vain, it is looked for again after this time."""


def warn_if_scarce(logger: logging.Logger, whose: str, path: Path, capacity_bytes: int, held: Iterable[int]) -> None:
    """Say if the file system of `path` has less room than a capacity, of which bytes `held` are filled already."""
    with suppress(OSError):
        found = os.statvfs(path)
        if (room := found.f_bavail * found.f_frsize + sum(held)) < capacity_bytes:
            logger.warning(
                "%s: a capacity of %s is more than the %s that %s has room for; when that is full, what was used least "
                "recently goes", whose, format_size(capacity_bytes), format_size(room), path,
            )  # fmt: skip


class UsedFile(NamedTuple):
    """A file in the order of eviction: the greatest goes first."""

    minus_used_ns: int
    inode: int
    nbytes: int
    path: str


def taken(status: os.stat_result) -> int:
    """Bytes that a file takes of its file system: what is reserved for it, or its length if that is more."""
    return max(status.st_size, 512 * status.st_blocks)


def oldest_files(
    entries: Iterable[tuple[os.DirEntry[str], bool]],
    before_ns: int,
    nbytes: int,
    used_ns: Callable[[os.stat_result], int],
) -> tuple[int, list[UsedFile]]:
    """Bytes that all files take; and those to evict first, at least `nbytes` of them if there are that many.

    Of each of `entries` it is said whether it may be evicted. What was used at `before_ns` or later may not.
    """
    used = held = 0
    heap: list[UsedFile] = []
    for entry, may_go in entries:
        with suppress(FileNotFoundError):
            status = entry.stat()
            size = taken(status)
            used += size
            if may_go and used_ns(status) < before_ns:
                heapq.heappush(heap, UsedFile(-used_ns(status), status.st_ino, size, entry.path))
                held += size
                while heap and held - heap[0].nbytes >= nbytes:
                    held -= heapq.heappop(heap).nbytes
    return used, sorted(heap, reverse=True)
