"""Clock for the order of stored blocks: it never goes back, and no two clocks of hosts are compared.

Owns the distance to the monotonic clock, and the file from which all hosts of a directory go on.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvpact.own_files import Access, closing

STEP_NS: Final = 1_000
"""Least difference in time of a record from its parent's: the finest step that all file systems with more than whole
seconds keep."""

ABANDONED_SECONDS: Final = 3600.0
"""A file that a writer has not changed for this long, by the clock of the file server, counts as left by a dead one."""

_LATEST_NS: Final = 1 << 62
"""The year 2116. A later time was damaged or planted: no file system keeps it."""

_NS_BYTES: Final = 8


class UseClock:
    """Nanoseconds since 1970 by this host's clock when it is made; from then on even, and not before any time seen."""

    def __init__(self) -> None:
        self._ahead_ns = time.time_ns() - time.monotonic_ns()

    def now(self) -> int:
        """Time after every one that it has given or seen, unless that was in the same nanosecond."""
        return time.monotonic_ns() + self._ahead_ns

    def see(self, used_ns: int) -> None:
        """Somebody has used something at this time, by a clock that may be another one."""
        if used_ns < _LATEST_NS:
            self._ahead_ns = max(self._ahead_ns, used_ns - time.monotonic_ns())


class SharedClock:
    """Clock for all hosts that use a directory: each goes on from the latest time that any of them was given."""

    def __init__(self, path: Path, access: Access) -> None:
        """The latest time stands in the file at `path`, whose own time of change is that of the file server."""
        self.path = path
        self.local = UseClock()
        """The time since `now` was asked last, without a look at the file."""
        self._access = access

    def is_abandoned(self, found: os.stat_result) -> bool:
        """True if a file of the directory had not changed for `ABANDONED_SECONDS` when anybody last asked `now`."""
        with suppress(OSError):
            return os.stat(self.path, follow_symlinks=False).st_ctime - found.st_ctime > ABANDONED_SECONDS
        return False

    def now(self) -> int:
        """Time of a use: after every one that any host was given. By the own clock alone if the file fails."""
        now = self.local.now()
        with suppress(OSError), closing(self._access.open(self.path, os.O_RDWR)) as descriptor:
            self.local.see(int.from_bytes(os.pread(descriptor, _NS_BYTES, 0), "little"))
            now = self.local.now()
            os.pwrite(descriptor, now.to_bytes(_NS_BYTES, "little"), 0)
        return now
