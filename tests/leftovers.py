"""What a killed process may leave on a machine, looked for from outside: shared memory and locks.

Other engines may run, and be killed, on this machine meanwhile, and vLLM itself leaves the named segments of Python's
`multiprocessing` behind when it is killed. So those names are judged by who has them mapped, all others by their being
there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvpact.tiers.disk.slab_directory import look_at

SHARED_MEMORY = Path("/dev/shm")
_OTHERS = ("psm_", "sem.", "kvpact-play")
"""Python's own names, and the folders of the test kit's random plays, which may run beside this."""
_Inode = tuple[int, int]


def shared_memory() -> set[str]:
    """The names in /dev/shm that somebody could have left there."""
    return {name for name in os.listdir(SHARED_MEMORY) if not name.startswith(_OTHERS)}


def orphaned_shared_memory(before: set[str], seconds: float = 2.0) -> set[str]:
    """Names that are new since `before` and that no living process has mapped or open, once `seconds` have passed."""
    deadline = time.monotonic() + seconds
    while True:
        new = shared_memory() - before
        used = set(_named_files(os.listdir("/proc"))) if new else set()
        orphans = {name for name in new if _inode(SHARED_MEMORY / name) not in used}
        if not orphans or time.monotonic() >= deadline:
            return orphans
        time.sleep(0.1)


def named_shared_memory(pids: Iterable[int]) -> dict[Path, int]:
    """Files in /dev/shm that these processes have mapped or open, Python's included, with their sizes."""
    used = set(_named_files(map(str, pids)))
    return {path: path.stat().st_size for path in SHARED_MEMORY.iterdir() if _inode(path) in used}


def locked_slabs(directory: Path) -> list[Path]:
    """Slabs whose lock somebody holds."""
    found = [look_at(path) for path in directory.glob("kvpact/*.slab")]
    return [slab.path for slab in found if slab is not None and slab.in_use]


def slabs_still_locked(directory: Path, seconds: float = 5.0) -> list[Path]:
    """Slabs whose lock somebody still holds after `seconds`: a killed process lives on until its last write is done."""
    deadline = time.monotonic() + seconds
    while (locked := locked_slabs(directory)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return locked


def _inode(path: Path) -> _Inode | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _named_files(pids: Iterable[str]) -> Iterator[_Inode]:
    """Inodes in /dev/shm's file system that processes use; glibc maps a semaphore under another name than it has."""
    device = SHARED_MEMORY.stat().st_dev
    for process in (Path("/proc", pid) for pid in pids if pid.isdigit()):
        try:
            for line in (process / "maps").read_text().splitlines():
                _, _, _, its_device, inode, *_ = line.split(maxsplit=5)
                if its_device == f"{os.major(device):02x}:{os.minor(device):02x}" and inode != "0":
                    yield device, int(inode)
            for descriptor in (process / "fd").iterdir():
                found = descriptor.stat()
                yield found.st_dev, found.st_ino
        except OSError:  # it has just ended
            continue
