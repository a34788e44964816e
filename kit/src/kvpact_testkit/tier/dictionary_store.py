"""The shortest record store that keeps every promise: records in a dictionary, in this process's memory.

A reference for tests, of shared tiers for example; `records` may outlive the store as a server does. Has no bound, and
does no I/O.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from kvpact.tiers.base import HEADER_BYTES
from kvpact.tiers.shared.store import RecordBuffer, RecordPieces, RecordStore, StoredRecord, StoreError, StoreUsage
from kvpact_testkit.faults import Faults
from kvpact_testkit.sample_blocks import fill

StoredBytes: TypeAlias = dict[str, bytes]
"""A store: name -> record, its header first. A test may change it, as another program would."""


class DictionaryStore(RecordStore):
    """See `RecordStore`. Each read and write of a record is announced to `faults`."""

    kind = "dictionary"

    def __init__(self, records: StoredBytes | None = None, faults: Faults | None = None) -> None:
        self.records: StoredBytes = {} if records is None else records
        self.faults = faults or Faults()
        self._lock = threading.Lock()

    def exists(self, names: Sequence[str]) -> list[bool]:
        with self._call(self.faults.before_read):
            return [name in self.records for name in names]

    def read(self, names: Sequence[str], buffers: Sequence[RecordBuffer]) -> list[bool]:
        return [self._read(name, buffer) for name, buffer in zip(names, buffers, strict=True)]

    def _read(self, name: str, buffer: RecordBuffer) -> bool:
        with self._call(self.faults.before_read, name):
            record = self.records.get(name)
        if record is None or len(record) != sum(piece.nbytes for piece in buffer):
            return False
        fill(buffer, record)
        return True

    def write(self, names: Sequence[str], records: Sequence[RecordPieces]) -> None:
        for name, pieces in zip(names, records, strict=True):
            with self._call(self.faults.before_write, name):
                self.records[name] = b"".join(pieces)

    def remove(self, names: Sequence[str]) -> int:
        removed = 0
        for name in names:
            with self._call(self.faults.before_write, name):
                removed += self.records.pop(name, None) is not None
        return removed

    def heads(self, names: Sequence[str]) -> list[bytes | None]:
        with self._call(self.faults.before_read):
            records = [self.records.get(name) for name in names]
        return [record if record is None else record[:HEADER_BYTES] for record in records]

    def names(self, group: str = "") -> Iterator[StoredRecord]:
        with self._call(self.faults.before_read):
            sizes = {name: len(record) for name, record in self.records.items()}
        return (
            StoredRecord(name, size) for name, size in sizes.items() if not group or name.partition("/")[0] == group
        )

    def size(self, name: str) -> int | None:
        with self._call(self.faults.before_read):
            record = self.records.get(name)
        return record if record is None else len(record)

    def usage(self) -> StoreUsage:
        with self._lock:
            return StoreUsage(sum(map(len, self.records.values())))

    def close(self) -> None:
        pass

    @property
    def place(self) -> str:
        return "a dictionary"

    @contextmanager
    def _call(self, announce: Callable[[bytes], None], name: str = "") -> Iterator[None]:
        """A call of the store: a fault becomes the error of a real store's client; within, no other call runs."""
        try:
            announce(name.encode())
        except OSError as error:
            raise StoreError(f"{self.place}: {errno.errorcode.get(error.errno or 0, 'error')}") from error
        with self._lock:
            yield
