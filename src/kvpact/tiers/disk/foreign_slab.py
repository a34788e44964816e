"""A slab that another engine writes, or that no engine uses now, as this engine reads it.

Owns the reading of its header table in the background, and of its payloads. The writer may evict or overwrite any
record at any time: a payload is verified, and if it is not the one that its header described, the header says whether
it was replaced meanwhile or is damaged. Never writes; `foreign_records.py` keeps the snapshot of its records.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from kvpact.own_files import Access, closing, open_own
from kvpact.tiers.accounts import Accounts
from kvpact.tiers.base import HEADER_BYTES, BlockBuffer, RecordError
from kvpact.tiers.disk.foreign_records import ForeignRecord, ForeignRecords
from kvpact.tiers.disk.header_table import pieces_of
from kvpact.tiers.disk.reading import GONE, Reading
from kvpact.tiers.disk.slab import SlabReader
from kvpact.tiers.disk.slab_opening import require_ours
from kvpact.tiers.disk.superblock import Superblock
from kvpact.tiers.record import bytes_of
from kvpact.tiers.use_count import UseCount

_CHECKSUM_BYTES: Final = 8
"""The end of a header."""

AT_REST_S: Final = 2.0
"""A file whose time of change is older than this has a new one after its next change."""


class ForeignSlab:
    """Reads one slab, on the tier's own threads."""

    def __init__(self, reader: SlabReader, records: ForeignRecords, accounts: Accounts) -> None:
        """Take over an open slab. Its records are unknown until `scan`."""
        self.path = reader.path
        self._accounts = accounts
        self.inode = (reader.status().st_dev, reader.status().st_ino)
        self._reader = reader
        self._uses = UseCount(reader.close)
        self.records = records
        """Snapshot of the slab's records."""
        self._scanned_at = (-1, -1)
        """The file's time of change and size at the last scan, if no change can have been missed."""

    @classmethod
    def open(
        cls,
        path: Path,
        namespace: bytes,
        slot_bytes: int,
        access: Access,
        accounts: Accounts,
        refuted: frozenset[bytes] = frozenset(),
    ) -> ForeignSlab | None:
        """The slab at `path`, without records of `refuted` runs.

        None if it cannot be read, is not ours, or is of another namespace or slot size.
        """
        with suppress(Exception), closing(open_own(path, os.O_RDONLY)) as descriptor:  # it may hold anything
            require_ours(os.fstat(descriptor), path, access)
            superblock = Superblock.read(descriptor, path, refuted)
            if superblock.namespace.digest == namespace and superblock.slot_bytes == slot_bytes:
                records = ForeignRecords(superblock, superblock.slots_in(os.fstat(descriptor).st_size))
                return cls(SlabReader(path, os.dup(descriptor), superblock), records, accounts)
        return None

    # Knowing

    def scan(self, stopped: Callable[[], bool]) -> None:
        """Look for headers that have changed, until the end or `stopped`. Raises OSError.

        Costs one look at the file if nothing was written since the last scan, else the reading of the header table.
        """
        with self._uses.one() as running:
            if running:
                self._scan(stopped)

    def _scan(self, stopped: Callable[[], bool]) -> None:
        status = self._reader.status()
        stamp = (status.st_mtime_ns, status.st_size)
        if stamp == self._scanned_at:
            return
        slots = self._reader.superblock.slots_in(status.st_size)
        self.records.resize(slots)
        for first, headers in pieces_of(self._reader):
            if stopped():
                return
            self.records.learn(first, headers[: max(0, slots - first) * HEADER_BYTES])
            time.sleep(0)  # other threads need the interpreter, too
        at_rest = time.time() > status.st_mtime + AT_REST_S
        self._scanned_at = stamp if at_rest else (-1, -1)

    # Reading

    def get(self, reading: Reading) -> None:
        """Read those of the missing blocks that the slab has, and verify them."""
        missing = reading.missing()
        found = self.records.find([reading.keys[number] for number in missing])
        wanted = {
            number: record
            for number, record in zip(missing, found, strict=True)
            if record is not None and record.length == bytes_of(reading.buffers[number])
        }
        with self._uses.one() as running:
            if running and wanted:
                in_slot = {record.slot: record for record in wanted.values()}
                records = list(wanted.values())
                digests = [record.digest for record in wanted.values()]
                unusable = reading.run(list(wanted), list(in_slot), digests, partial(self._read, in_slot))
                for index, reason in unusable.items():
                    self._end_unusable(records[index], reason)

    def _read(
        self, in_slot: Mapping[int, ForeignRecord], slots: Sequence[int], buffers: Sequence[BlockBuffer]
    ) -> list[bool]:
        """Read slots, as a `ReadSlots`: a block that was evicted or deleted before the end of the read is not there."""
        there: list[bool] = []
        with self._accounts.contained("read", f"cannot read {self.path}"):
            count = self._reader.read_payloads(slots, buffers)
            there += [self._is_still_there(in_slot[slot]) for slot in slots[:count]]
        return there

    def _end_unusable(self, record: ForeignRecord, reason: str) -> None:
        """A payload is not what its header says: it was replaced, which is a miss, or is damaged."""
        with suppress(OSError):
            if reason != GONE and self._is_still_there(record):
                where = f"block {record.key.hex()[:16]} in {self.path}"
                self._accounts.note_damaged("foreign", f"{where} {reason}: not used, recomputed")
        self.records.refuse(record)

    def _is_still_there(self, record: ForeignRecord) -> bool:
        raw = self._reader.read_header(record.slot)
        if int.from_bytes(raw[-_CHECKSUM_BYTES:], "little") == record.checksum:
            return True
        try:
            header = self._reader.superblock.header(record.slot, raw)
        except RecordError:
            return False
        return (header.key, header.written) == (record.key, record.written)

    def close(self) -> None:
        """Close the file when no read uses it any more."""
        self._uses.stop()
