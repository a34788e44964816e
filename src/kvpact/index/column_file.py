"""Memory file with the columns of an index that other processes on this host look up in.

Owns the file, its layout and its head; an index's owner alone writes to it. Keys come first,
because a mapping's bytes are read fastest from its start, and the head is the last page:

    keys | lists | links | states | class of each extent | head
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpact.identity.keys import KEY_BYTES
from kvpact.index.claims import Claims
from kvpact.index.key_table import KeyColumns, hash_bits
from kvpact.index.row_locks import LockFile
from kvpact.index.slot_space import SlotSpace

MEMFD: Final = "kvpact-index"
"""Name of the files in /proc."""

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | 0x10
"""Seals of a file that others map: its size stays, and (F_SEAL_FUTURE_WRITE) nobody who opens it from now on writes."""

FORMAT: Final = int.from_bytes(b"kvpact01", "little")
"""First word of the head."""

FORMAT_AT, ROWS, EXTENTS, EXTENT_ROWS, SLOT_ROWS, FACTOR, REFUSED = range(7)
"""Words of the head, 8 bytes each. The last is not 0 once nobody may use the file, or its owner's slots, any more."""

Column = tuple[NDArray[np.int_], memoryview]


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in the file, in bytes."""

    heads: int
    next: int
    state: int
    classes: int
    head: int
    size: int

    @classmethod
    def of(cls, rows: int, extents: int) -> Layout:
        """Layout for an index of so many rows, its root among them, and extents. Raises ValueError for too many."""
        sizes = (rows * KEY_BYTES, 4 << hash_bits(rows), 4 * rows, rows, 2 * extents, mmap.PAGESIZE)
        ends = []
        end = 0
        for size in sizes:
            end += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            ends.append(end)
        return cls(*ends)


class ColumnFile:
    """Columns of one index, zeros at first. The kernel gives their memory when they are first written."""

    def __init__(self, space: SlotSpace, claims: Claims | None = None) -> None:
        """Make the file for an index over `space`; `claims` if its rows are leased already. Raises OSError."""
        self.claims = claims
        """Claims to rows that leave the table, which outlive this file; None while nobody can lease any."""
        self._rows = space.num_rows + 1
        self._extents = -(-space.num_rows // space.extent_rows) if space.extent_rows else 0
        self._layout = Layout.of(self._rows, self._extents)
        self.descriptor = os.memfd_create(MEMFD, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """Descriptor of the file; open until `close`."""
        self._finalizer = weakref.finalize(self, os.close, self.descriptor)
        os.fchmod(self.descriptor, 0o600)  # a memfd is readable for all users at first, through /proc
        os.ftruncate(self.descriptor, self._layout.size)
        self._mapping = mmap.mmap(self.descriptor, self._layout.size)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        self._head = memoryview(self._mapping)[self._layout.head :].cast("Q")
        self._head[ROWS] = self._rows
        self._head[EXTENTS] = self._extents
        self._head[EXTENT_ROWS] = space.extent_rows
        self._head[SLOT_ROWS] = space.slot_rows

    @property
    def keys(self) -> KeyColumns:
        """Columns of the key table."""
        heads = self._column(self._layout.heads, 1 << hash_bits(self._rows), "i4")
        return KeyColumns(self._mapping, heads, self._column(self._layout.next, self._rows, "i4"))

    @property
    def state(self) -> Column:
        """State of each row."""
        return self._column(self._layout.state, self._rows, "u1")

    @property
    def classes(self) -> memoryview:
        """Slot class of each extent, as numbers of 2 bytes."""
        return self._column(self._layout.classes, self._extents, "i2")[1]

    def _column(self, offset: int, count: int, kind: str) -> Column:
        each = np.frombuffer(self._mapping, kind, count, offset)
        return each, memoryview(each.data)

    def publish(self, factor: int) -> None:
        """Complete the head with the secret of the key table's hash: from now on others can look up here."""
        self._head[FACTOR] = factor
        self._head[FORMAT_AT] = FORMAT

    def lend(self, locks: LockFile) -> None:
        """Let others lease rows by `locks` from now on, before any of them can; on any thread. Once for an arena."""
        self.claims = Claims(locks)

    def refuse(self) -> None:
        """Let no other process use what it finds here, or has found and not yet used, for good."""
        self._head[REFUSED] = 1

    def close(self) -> None:
        """Close the descriptor. The columns can be used as long as anything refers to them."""
        self._finalizer()
