"""A disk that is slow, or answers no more: for the processes that it is told of, and for as long as it is told.

The kernel holds back their reads, and their writes if asked to (control groups for disks); others go on. What is in the
page cache is answered as ever, so drop it before. Needs root.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SLICES = Path("/sys/fs/cgroup")
V1 = SLICES / "blkio"
LIMIT = "blkio.throttle.{}_bps_device"

LEAVING_SECONDS = 30.0


def can_stall() -> bool:
    """Whether this machine has what it takes."""
    return os.access(V1 / LIMIT.format("read"), os.W_OK)


@contextmanager
def disk_held_to(place: Path, bytes_per_second: int, *, writes: bool = False) -> Iterator[Path]:
    """A control group whose processes read the disk of `place` at most so fast; yields its list of processes.

    They stay in it when they fork. Raises OSError if the machine has no such groups, or does not let us.
    """
    parent = V1 if V1.exists() else SLICES
    group, device = parent / f"kvpact-{os.getpid()}", _disk(place)
    group.mkdir()
    try:
        _limit(group, device, bytes_per_second, writes=writes)
        yield group / "cgroup.procs"
    finally:
        with suppress(OSError):  # there is none if it could not be set
            _limit(group, device, None, writes=writes)
        _remove(group)


@contextmanager
def stalled_disk(place: Path, processes: Iterable[int]) -> Iterator[None]:
    """Meanwhile the disk of `place` answers nothing that these processes ask of it. They must not fork meanwhile."""
    with disk_held_to(place, 1, writes=True) as stalled:
        for process in processes:
            _move(process, stalled)
        yield


def _disk(place: Path) -> str:
    """The number of the whole disk: a partition has no limit of its own."""
    device = place.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    if Path(f"/sys/dev/block/{number}/partition").exists():
        return Path(f"/sys/dev/block/{number}/../dev").read_text().strip()
    return number


def _limit(group: Path, device: str, bytes_per_second: int | None, *, writes: bool) -> None:
    """Set the limits, or lift them."""
    kinds = ("read", "write") if writes else ("read",)
    if group.parent == V1:
        for kind in kinds:
            group.joinpath(LIMIT.format(kind)).write_text(f"{device} {bytes_per_second or 0}")
        return
    if bytes_per_second is not None:
        SLICES.joinpath("cgroup.subtree_control").write_text("+io")
    limits = " ".join(f"{kind[0]}bps={bytes_per_second or 'max'}" for kind in kinds)
    group.joinpath("io.max").write_text(f"{device} {limits}")


def _remove(group: Path) -> None:
    """A process that was killed in the middle of a read leaves when that is over."""
    until = time.monotonic() + LEAVING_SECONDS
    while group.exists():
        for left in (group / "cgroup.procs").read_text().split():
            _move(int(left), group.parent / "cgroup.procs")
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def _move(process: int, processes: Path) -> None:
    with suppress(ProcessLookupError):
        processes.write_text(str(process))
