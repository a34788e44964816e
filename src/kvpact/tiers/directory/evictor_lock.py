"""The lock of the writer that evicts in a shared directory, and the test whether a writer is dead.

Owns the lock's file and the names of writers. Never waits for another writer.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvpact.own_files import Access, closing
from kvpact.tiers.directory import files
from kvpact.tiers.free_space import FULL

LEASE_SECONDS: Final = 10.0
"""A writer that sees an evictor's lock unchanged for this long takes the evictor for dead."""

_WRITER: Final = re.compile(r"(?P<host>.+\+\d+)\+(?P<pid>\d+)\+[0-9a-f]{8}")
_LONGEST_NAME: Final = 4096
_RENEW_SECONDS: Final = 1.0


def host() -> str:
    """Name this host and, because containers may share its name, this namespace of process ids."""
    with suppress(OSError):
        return f"{os.uname().nodename}+{os.stat('/proc/self/ns/pid').st_ino}"
    return f"{os.uname().nodename}+0"


def new_writer() -> str:
    """A name that no other writer has."""
    return f"{host()}+{os.getpid()}+{os.urandom(4).hex()}"


def died_here(writer: str) -> bool:
    """True if a writer's process ran on this host and is dead."""
    match = _WRITER.match(writer)
    return match is not None and match["host"] == host() and not Path(f"/proc/{match['pid']}").exists()


class EvictorLock:
    """A file that one writer holds at a time. It is broken if its owner seems dead, so two may hold it and evict."""

    def __init__(self, path: Path, access: Access, writer: str) -> None:
        self._path = path
        self._access = access
        self._writer = writer
        self._watched: tuple[int, int] | None = None
        self._watched_since = 0.0
        self._renewed = 0.0

    def acquire(self) -> bool:
        """Try to take the lock; returns whether it is ours. Raises OSError."""
        for _ in range(2):
            try:
                descriptor = self._access.create(self._path)
            except FileExistsError:
                if not self._owner_is_dead():
                    return False
                self._path.unlink(missing_ok=True)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                return True  # there is no room for its file before something is evicted; two evictors do no harm
            else:
                with closing(descriptor), suppress(OSError):
                    os.write(descriptor, self._writer.encode())
                self._renewed = time.monotonic()
                return True
        return False

    def _owner_is_dead(self) -> bool:
        """True if it died on this host, or did not renew its lock for `LEASE_SECONDS` of this host's clock."""
        status = files.status(self._path)
        if status is None:
            return False
        if died_here((files.beginning(self._path, _LONGEST_NAME) or b"").decode(errors="replace")):
            return True
        seen = (status.st_ino, status.st_mtime_ns)
        if seen != self._watched:
            self._watched = seen
            self._watched_since = time.monotonic()
        return time.monotonic() - self._watched_since > LEASE_SECONDS

    def renew(self) -> None:
        """Show that the owner is alive; almost free if it did so a moment ago."""
        if time.monotonic() - self._renewed > _RENEW_SECONDS:
            self._renewed = time.monotonic()
            with suppress(FileNotFoundError):  # another writer took this one for dead; two evictors do no harm
                os.utime(self._path)

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
