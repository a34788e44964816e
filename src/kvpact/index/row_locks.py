"""Leases on rows among processes: locks of the kernel on bytes of a lock file, one byte a row.

Owns the calls, and the file of one arena. The locks are of open file descriptions, so each descriptor that was opened
for itself holds its own, and the kernel releases them when the last copy of it is closed, however its process ended. A
description that was sent or forked is shared with its sender: whoever leases gets one that was opened for it alone.
"""

from __future__ import annotations

import ctypes
import os
import struct
import weakref
from fcntl import F_RDLCK, F_UNLCK, F_WRLCK
from typing import Final, Protocol

MEMFD: Final = "kvpact-leases"
"""Name of the files in /proc."""

_F_OFD_GETLK: Final = 36
_F_OFD_SETLK: Final = 37
_FLOCK: Final = struct.Struct("hhqqi4x")
"""Kind, whence, first byte, count, process (0): `struct flock` where offsets have 64 bits."""

# PyDLL: the call does not wait, and giving up the interpreter's lock for it costs up to 14 ms beside other threads.
_fcntl = ctypes.PyDLL(None).fcntl


def _lock_of(kind: int, rows: range) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, rows.start, len(rows), 0)


def _is_set(descriptor: int, kind: int, rows: range) -> bool:
    """Lock rows, or unlock them, without a wait; returns whether the kernel did."""
    return not _fcntl(descriptor, _F_OFD_SETLK, _lock_of(kind, rows))


def lease(descriptor: int, rows: range) -> bool:
    """Lease rows, without a wait; returns whether the kernel granted it: not without memory for a lock, either."""
    return _is_set(descriptor, F_RDLCK, rows)


def release(descriptor: int, rows: range) -> bool:
    """End the lease of rows; returns False if the kernel has no memory for what is left of it, and it holds."""
    return _is_set(descriptor, F_UNLCK, rows)


class LockFile:
    """File with a byte for each row of one arena; it lives as long as the arena, and no other takes its place."""

    def __init__(self) -> None:
        """Make the file. Raises OSError."""
        self.descriptor = os.memfd_create(MEMFD, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """The owner's descriptor, without locks; open until `close`."""
        os.fchmod(self.descriptor, 0o600)  # a memfd is readable for all users at first, through /proc
        self._finalizer = weakref.finalize(self, os.close, self.descriptor)

    def opened(self) -> int:
        """Descriptor to send to one neighbour: it can lease, and not lock others out. Raises OSError."""
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def leased(self, rows: range) -> range | None:
        """Some of `rows` that somebody leases, neighbours, or all if the kernel does not say; None if all are free."""
        lock = ctypes.create_string_buffer(_lock_of(F_WRLCK, rows), _FLOCK.size)
        if _fcntl(self.descriptor, _F_OFD_GETLK, lock):
            return rows
        kind, _, first, count, _ = _FLOCK.unpack(lock)
        if kind == F_UNLCK:
            return None
        return range(max(rows.start, first), min(rows.stop, first + count if count else rows.stop))

    def close(self) -> None:
        """Close the owner's descriptor."""
        self._finalizer()


class Closable(Protocol):
    """Protocol: closeable."""

    def close(self) -> None: ...


_left_to_parent: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_in_children(held: Closable) -> None:
    """Close `held` in every forked child, which would keep its lock after the parent was killed. `close` idempotent."""
    _left_to_parent.add(held)


def _let_go_in_child() -> None:
    for held in list(_left_to_parent):
        held.close()


os.register_at_fork(after_in_child=_let_go_in_child)
