"""The lock of a process on a file: on the slab that it writes, and on the directory while slabs come and go.

Owns no file. The kernel ends a lock when the last process that shares the open file ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os

from kvpact.errors import TierError


def lock_file(descriptor: int) -> bool:
    """Take the exclusive lock on an open file, without waiting; it ends with the process.

    Raises TierError where the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise TierError(
            f"disk tier: {os.readlink(f'/proc/self/fd/{descriptor}')} cannot be locked: {error.strerror}; give a "
            "directory on a local disk, or use dir:// there"
        ) from None
    return True


def unlock_file(descriptor: int) -> None:
    """Release the lock on an open file now, although a child that was forked meanwhile may have the file open, too."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_locked(descriptor: int) -> bool:
    """True if a process holds the exclusive lock on an open file, for tools.

    Takes a shared lock and releases it at once: a process that wants the exclusive one at that moment must try again.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    unlock_file(descriptor)
    return False
