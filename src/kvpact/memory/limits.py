"""Memory that this machine, or the cgroup of this process, can still give, and the part promised to other engines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvpact.errors import ConfigError
from kvpact.units import format_size

PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")

MANY_ENGINES = 64
"""Arenas that fit this many times are made without a look at those of other engines, which takes 20 ms."""


def available_memory_bytes() -> int:
    """Bytes that can be taken without swapping or being killed: of the machine or of the cgroup, the smaller."""
    return max(0, min([_of_machine("MemAvailable"), *(limit - taken for limit, taken in _cgroups())]))


def total_memory_bytes() -> int:
    """Bytes of the machine's memory, or the cgroup's limit, the smaller."""
    return min([_of_machine("MemTotal"), *(limit for limit, _ in _cgroups())])


def _of_machine(name: str) -> int:
    """Value of /proc/meminfo, in bytes."""
    lines = (PROC / "meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _cgroups() -> Iterator[tuple[int, int]]:
    """Limit and bytes taken of each memory cgroup of this process, version 2 or 1, up to the root."""
    try:
        memberships = (PROC / "self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if not controllers:
            root = CGROUPS
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = CGROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):  # inside a container the path may not exist here, the root does
            if directory.is_relative_to(root):
                with contextlib.suppress(OSError, ValueError):  # no limit ("max"), or no such file at this level
                    limit, used = (int((directory / name).read_text()) for name in names[:2])
                    yield limit, used - _cgroup_statistic(directory, names[2])


def _cgroup_statistic(directory: Path, name: str) -> int:
    """Value of memory.stat, in bytes; page cache that the kernel can drop counts as free."""
    for line in (directory / "memory.stat").read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def require_possible(num_bytes: int, engines: int = 1) -> None:
    """Raise ConfigError if the arenas of so many engines are larger than the machine's memory or the cgroup's limit.

    For the time before an engine reads its weights, as no waiting helps; `require_available` follows later.
    """
    total = total_memory_bytes()
    if num_bytes * engines > total:
        each = f" for each of {engines} engines" if engines > 1 else ""
        raise ConfigError(
            f"memory={format_size(num_bytes)}{each}: this machine or its container has {format_size(total)} in all; "
            f"set `memory` to leave room for the model, such as {format_size(total // engines // 2)}"
        )


def promised_elsewhere(memfd: str, own: os.stat_result, *, by_siblings: bool) -> tuple[int, int]:
    """Number of other memory files named `memfd` that processes here have open, and the bytes they may still take.

    Pages are taken at first use, so promised memory still counts as available. Files of other users, and of processes
    that this one cannot see, do not count; those of this process's parent and siblings only if `by_siblings`.
    """
    found: dict[tuple[int, int], int] = {}
    parent = _parent(PROC / "self")
    for process in PROC.iterdir():
        if process.name.isdecimal() and (by_siblings or parent not in (process.name, _parent(process))):
            for descriptor in _open_files(process):
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor).startswith(f"/memfd:{memfd} "):
                        status = descriptor.stat()
                        found[status.st_dev, status.st_ino] = max(0, status.st_size - 512 * status.st_blocks)
    found.pop((own.st_dev, own.st_ino), None)
    return len(found), sum(found.values())


def _open_files(process: Path) -> list[Path]:
    try:
        return list((process / "fd").iterdir())
    except OSError:  # another user's, or it has just ended
        return []


def _parent(process: Path) -> str:
    """Id of a process's parent; "" if it has ended."""
    try:
        return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
    except (OSError, IndexError):
        return ""


def require_available(memfd: str, descriptor: int, content: str, num_bytes: int, ranks_on_host: int) -> None:
    """Raise ConfigError if the machine cannot give so many arenas of this size beside the bytes promised to others.

    `content` describes the arena; arenas are memory files named `memfd`, this one is open as `descriptor`.
    """
    wanted = num_bytes * ranks_on_host
    available = available_memory_bytes()
    count = 0
    promised = 0
    if wanted * MANY_ENGINES > available:
        count, promised = promised_elsewhere(memfd, os.fstat(descriptor), by_siblings=ranks_on_host == 1)
    if wanted + promised > available:
        others = f", other engines here ({count} arenas) may take {format_size(promised)} more" if promised else ""
        raise ConfigError(
            f"memory: the arena wants {format_size(wanted)} ({ranks_on_host} x {content}){others}, this machine or its "
            f"container has {format_size(available)} available; set `memory` below "
            f"{'that, for each engine' if promised else 'that'}"
        )
