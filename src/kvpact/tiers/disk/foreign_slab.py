"""A slab that another engine writes, or that no engine uses now, as this engine reads it.

Owns what this engine knows of the slab's records, taken from its header table in the background. The writer may evict
or overwrite any of them at any time: a payload is verified, and if it is not the one that its header described, the
header says whether it was replaced meanwhile or is damaged. Never writes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np

from kvpact.errors import TierError
from kvpact.identity.keys import BlockKey
from kvpact.own_files import Access, open_own
from kvpact.tiers.base import HEADER_BYTES, BlockBuffer, Progress, RecordError, is_empty_header
from kvpact.tiers.disk.each_read import EachRead
from kvpact.tiers.disk.slab import SlabReader, Superblock
from kvpact.tiers.disk.slab_opening import require_ours
from kvpact.tiers.disk.two_threads import MISPLACED, read_verified
from kvpact.tiers.record import bytes_of, chained
from kvpact.tiers.use_count import UseCount

_CHUNK_SLOTS: Final = 4096
"""Headers that are read at once: 1 MiB."""

_DECODED_AT_ONCE: Final = 64
"""Headers that are decoded between two pauses, in 0.5 ms: the scheduler's thread needs the interpreter, too."""

_CHECKSUM_BYTES: Final = 8
"""The end of a header."""

_PAUSE_S: Final = 0.001

AT_REST_S: Final = 2.0
"""A file whose time of change is older than this has a new one after its next change."""


Report: TypeAlias = Callable[[Literal["damaged", "read"], str], object]
"""Called with the kind of a fault and one line for people: a record is damaged, or the file cannot be read."""


class ForeignRecord(NamedTuple):
    """One record, as its header describes it."""

    slot: int
    parent: BlockKey
    digest: bytes
    length: int
    written: float
    checksum: bytes
    """The header's own, which changes with the time of the block's last use, too."""

    def is_same_block(self, other: ForeignRecord | None) -> bool:
        """Whether both describe one write of one block."""
        return other is not None and self[:-1] == other[:-1]


class ForeignSlab:
    """Reads one slab. `run` never waits; the other methods are for the tier's own threads."""

    def __init__(self, reader: SlabReader, report: Report) -> None:
        """Take over an open slab. Nothing is known of its records until `scan`."""
        self.path = reader.path
        self._report = report
        self.inode = (reader.status().st_dev, reader.status().st_ino)
        self._reader = reader
        self._uses = UseCount(reader.close)
        self._changing = threading.Lock()
        self._records: dict[BlockKey, ForeignRecord] = {}
        """`run` reads it without `_changing`, which all changes hold: each is one operation of the interpreter."""
        self._key_at: dict[int, BlockKey] = {}
        self._seen = np.zeros(reader.superblock.table_slots, "<u8")
        """The checksum of each header when it was last decoded; 0 of an empty one."""
        self._refused: dict[int, ForeignRecord] = {}
        """Records that must not be served, by slot, until another one is there."""
        self._scanned_at = (-1, -1)
        """The file's time of change and size at the last scan, if no change can have been missed."""

    @classmethod
    def open(cls, path: Path, namespace: bytes, slot_bytes: int, access: Access, report: Report) -> ForeignSlab | None:
        """The slab at `path`; None if it cannot be read, is not ours, or is of another namespace or slot size."""
        try:
            descriptor = open_own(path, os.O_RDONLY)
        except OSError:
            return None
        try:
            require_ours(os.fstat(descriptor), path, access)
            superblock = Superblock.read(descriptor, path)
            if superblock.namespace.digest == namespace and superblock.slot_bytes == slot_bytes:
                slab = cls(SlabReader(path, descriptor, superblock), report)
                descriptor = -1
                return slab
            return None
        except (OSError, TierError):
            return None
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    # Knowing

    def __len__(self) -> int:
        """Records that may be served."""
        return len(self._records)

    def run(self, keys: Sequence[BlockKey], start: int) -> int:
        """Number of blocks in a row from `start` that the slab has. 25 ns for each."""
        return len(list(takewhile(self._records.__contains__, islice(keys, start, None))))

    def has(self, key: BlockKey) -> bool:
        """Whether the slab has the loose block `key`."""
        record = self._records.get(key)
        return record is not None and not record.parent

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
        with self._changing:
            for slot in [slot for slot in self._key_at if slot >= slots]:
                self._forget(slot)
                self._seen[slot] = 0
        for first in range(0, slots, _CHUNK_SLOTS):
            if stopped():
                return
            self._scan_chunk(first, min(_CHUNK_SLOTS, slots - first))
        at_rest = time.time() > status.st_mtime + AT_REST_S
        self._scanned_at = stamp if at_rest else (-1, -1)

    def _scan_chunk(self, first: int, count: int) -> None:
        table = memoryview(self._reader.read_headers(first, count))
        checksums = np.frombuffer(table, "<u8").reshape(count, -1)[:, -1]
        changed = np.flatnonzero(checksums != self._seen[first : first + count]).tolist()
        for number, index in enumerate(changed, 1):
            with self._changing:
                if self._learn(first + index, table[index * HEADER_BYTES : (index + 1) * HEADER_BYTES]):
                    self._seen[first + index] = checksums[index]
            if number % _DECODED_AT_ONCE == 0:
                time.sleep(_PAUSE_S)

    def _learn(self, slot: int, raw: bytes | memoryview) -> bool:
        """Note what the header of a slot says; False if it is being written at this moment, or damaged."""
        self._forget(slot)
        if is_empty_header(raw):
            self._refused.pop(slot, None)
            return True
        try:
            header = self._reader.superblock.header(slot, raw)
        except RecordError:
            return False
        record = ForeignRecord(
            slot, header.parent, header.digest, header.length, header.written, bytes(raw[-_CHECKSUM_BYTES:])
        )
        if record.is_same_block(self._refused.get(slot)):  # only the time of its last use has changed
            return True
        self._refused.pop(slot, None)
        self._key_at[slot] = header.key
        self._records[header.key] = record
        return True

    def _forget(self, slot: int) -> None:
        key = self._key_at.pop(slot, None)
        record = self._records.get(key) if key is not None else None
        if key is not None and record is not None and record.slot == slot:  # not written anew into another slot
            del self._records[key]

    # Reading

    def get(
        self, keys: Sequence[BlockKey], start: int, buffers: Sequence[BlockBuffer], on_progress: Progress | None
    ) -> int:
        """Read and verify; return how many blocks arrived."""
        known = map(self._records.get, islice(keys, start, start + len(buffers)))
        wanted = list[ForeignRecord]()
        for block, buffer, record in zip(chained(keys, start, start + len(buffers)), buffers, known, strict=False):
            if record is None or record.length != bytes_of(buffer):
                break
            if record.parent != block.parent:
                self._end_unusable(block.key, record, MISPLACED)
                break
            wanted.append(record)
        with self._uses.one() as running:
            if not running or not wanted:
                return 0
            slots, digests = [record.slot for record in wanted], [record.digest for record in wanted]
            in_slot = dict(zip(slots, zip(islice(keys, start, None), wanted, strict=False), strict=True))
            arrived, reason = read_verified(
                partial(self._read, in_slot), slots, digests, buffers[: len(wanted)], on_progress
            )
            if reason:
                self._end_unusable(keys[start + arrived], wanted[arrived], reason)
            return arrived

    def get_each(self, reading: EachRead) -> None:
        """Read what the slab has of a call's loose blocks, and verify it."""
        wanted: dict[int, tuple[BlockKey, ForeignRecord]] = {}
        for number in reading.missing():
            key = reading.keys[number]
            record = self._records.get(key)
            if record is not None and record.parent:
                self._end_unusable(key, record, MISPLACED)
            elif record is not None and record.length == bytes_of(reading.buffers[number]):
                wanted[number] = key, record
        records = list(wanted.values())

        def end_unusable(index: int, reason: str) -> bool:
            self._end_unusable(*records[index], reason)
            return True

        with self._uses.one() as running:
            if running:
                in_slot = {record.slot: (key, record) for key, record in records}
                digests = [record.digest for _, record in records]
                reading.run(list(wanted), list(in_slot), digests, partial(self._read, in_slot), end_unusable)

    def _read(
        self,
        in_slot: Mapping[int, tuple[BlockKey, ForeignRecord]],
        slots: Sequence[int],
        buffers: Sequence[BlockBuffer],
    ) -> int:
        """Number of leading slots that were read, and whose blocks were not evicted or deleted before that."""
        try:
            count = self._reader.read_payloads(slots, buffers)
            return len(list(takewhile(lambda slot: self._is_still_there(*in_slot[slot]), slots[:count])))
        except OSError as error:
            self._report("read", f"cannot read {self.path}: {error.strerror}")
            return 0

    def _end_unusable(self, key: BlockKey, record: ForeignRecord, reason: str) -> None:
        """A payload is not what its header says: it was replaced, which is a miss, or is damaged."""
        with suppress(OSError):
            if self._is_still_there(key, record):
                self._report("damaged", f"block {key.hex()[:16]} in {self.path} {reason}: not used, recomputed")
        self._refuse(key, record)

    def _is_still_there(self, key: BlockKey, record: ForeignRecord) -> bool:
        raw = self._reader.read_header(record.slot)
        if raw[-_CHECKSUM_BYTES:] == record.checksum:
            return True
        try:
            header = self._reader.superblock.header(record.slot, raw)
        except RecordError:
            return False
        return (header.key, header.written) == (key, record.written)

    # Refusing

    def refuse(self, keys: Iterable[BlockKey]) -> int:
        """Serve none of these blocks, and none after them, until others are in their slots; return their number."""
        records = dict(self._records)
        if not records:
            return 0
        children: dict[BlockKey, list[BlockKey]] = {}
        for key, record in records.items():
            children.setdefault(record.parent, []).append(key)
        doomed = list(keys)
        for key in doomed:
            doomed.extend(children.pop(key, ()))
        refused = records.keys() & set(doomed)
        for key in refused:
            self._refuse(key, records[key])
        return len(refused)

    def refuse_all(self) -> None:
        """Serve nothing that is there now."""
        self.refuse(list(self._records))

    def _refuse(self, key: BlockKey, record: ForeignRecord) -> None:
        """Not again until the slot's header says something else; a change of it since the last scan is seen later."""
        with self._changing:
            if self._records.get(key) == record:
                self._refused[record.slot] = record
                self._forget(record.slot)

    def close(self) -> None:
        """Close the file when no read uses it any more."""
        with self._uses.the_last():
            pass
