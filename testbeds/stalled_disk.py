"""A disk that answers no more: for the processes that it is told of, and for as long as it is told.

The kernel holds back their reads and writes (cgroup v1, `blkio`: a byte a second); others go on. What is in the page
cache is answered as ever, so drop it before. Needs root.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/blkio")
LIMITS = ("blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device")


def can_stall() -> bool:
    """Whether this machine has what it takes."""
    return os.access(GROUPS / LIMITS[0], os.W_OK)


LEAVING_SECONDS = 30.0


@contextmanager
def stalled_disk(place: Path, processes: Iterable[int]) -> Iterator[None]:
    """Meanwhile the disk of `place` answers nothing that these processes ask of it. They must not fork meanwhile."""
    device, group = place.stat().st_dev, GROUPS / f"kvpact-{os.getpid()}"
    name = f"{os.major(device)}:{os.minor(device)}"
    group.mkdir()
    try:
        for limit in LIMITS:
            (group / limit).write_text(f"{name} 1")
        for process in processes:
            _move(process, group)
        yield
    finally:
        for limit in LIMITS:
            (group / limit).write_text(f"{name} 0")
        _remove(group)


def _remove(group: Path) -> None:
    """A process that was killed in the middle of a read leaves when that is over."""
    until = time.monotonic() + LEAVING_SECONDS
    while group.exists():
        for left in (group / "cgroup.procs").read_text().split():
            _move(int(left), GROUPS)
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def _move(process: int, group: Path) -> None:
    with suppress(ProcessLookupError):
        (group / "cgroup.procs").write_text(str(process))
