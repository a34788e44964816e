"""How much memory this machine, or the cgroup of this process, can still give."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")


def available_memory_bytes() -> int:
    """What can still be taken without swapping or being killed: the machine's share or the cgroup's, the smaller."""
    available = next(
        int(line.split()[1]) * 1024
        for line in (PROC / "meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    return max(0, min([available, *_cgroup_room()]))


def _cgroup_room() -> Iterator[int]:
    """Bytes left in each memory cgroup that holds this process, version 2 or 1, up to the root."""
    try:
        memberships = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if not controllers:
            root, names = CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):  # inside a container the path may not exist here, the root does
            if directory.is_relative_to(root):
                with contextlib.suppress(OSError, ValueError):  # no limit ("max"), or no such file at this level
                    limit, used = (int((directory / name).read_text()) for name in names[:2])
                    yield limit - used + _cgroup_statistic(directory, names[2])


def _cgroup_statistic(directory: Path, name: str) -> int:
    """A value of memory.stat, in bytes; page cache that the kernel can drop counts as free."""
    for line in (directory / "memory.stat").read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
