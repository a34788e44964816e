"""The shortest tier that keeps every promise: blocks in a dictionary, in this process's memory.

Owns a reference to test other things against, a cache above a tier for one; `records` may outlive the tier like a store
does. Keeps no block for anybody's benefit, and does no I/O.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from kvpact.errors import TierError
from kvpact.identity.keys import BlockKey, Namespace
from kvpact.tiers.base import (
    HEADER_BYTES,
    ROOT,
    BlockBuffer,
    Entry,
    Progress,
    RecordHeader,
    Tier,
    TierCapacity,
    TierCounts,
    TierHealth,
    leading,
    payload_digest,
)
from kvpact_testkit.faults import Faults
from kvpact_testkit.sample_blocks import fill


@dataclass(frozen=True, slots=True)
class Record:
    """One stored block. A test may change `payload`, as a bad disk would."""

    header: RecordHeader
    payload: bytearray


Records: TypeAlias = dict[tuple[bytes, BlockKey], Record]
"""A store: (namespace, key) -> record, the least recently used first."""


class DictionaryTier(Tier):
    """See `Tier`. `faults` is told of each read and write of a block. O(blocks held) for each block stored."""

    name = "dictionary"
    exclusive = True

    def __init__(
        self,
        namespace: Namespace,
        slot_bytes: int,
        capacity_blocks: int,
        records: Records | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.records: Records = {} if records is None else records
        self.namespace = namespace.digest
        self.slot_bytes = slot_bytes
        self.capacity_blocks = capacity_blocks
        self.faults = faults or Faults()
        self._lock = threading.RLock()
        self._counts = TierCounts()
        self._trouble = ""
        self._closed = False

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._lock:
            return [not self._closed and (self.namespace, key) in self.records for key in keys]

    def leading(self, keys: Sequence[BlockKey]) -> int:
        return leading(self.lookup(keys))

    def put_start(self, keys: Sequence[BlockKey]) -> int:
        return self.leading(keys)

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None = None
    ) -> list[bool]:
        with self._lock:
            self._drop(key for key, held in zip(keys, self.lookup(keys), strict=True) if not held)
        arrived: list[bool] = []
        for key, buffer in zip(keys, buffers, strict=True):
            arrived.append(self._read(key, buffer))
            if on_progress is not None and not on_progress(leading(arrived)):
                break
        self._use(keys[: len(arrived)])
        return arrived + [False] * (len(keys) - len(arrived))

    def _read(self, key: BlockKey, buffer: BlockBuffer) -> bool:
        """Copy one block; whether it is sound. If not it is dropped."""
        if not self._met("read", self.faults.before_read, key):
            self._counts = replace(self._counts, failed_reads=self._counts.failed_reads + 1)
            return False
        with self._lock:
            record = None if self._closed else self.records.get((self.namespace, key))
        if record is None:
            return False
        size = sum(piece.nbytes for piece in buffer)
        if record.header.length != size:
            return False
        if len(record.payload) == size:
            fill(buffer, record.payload)
            if payload_digest(buffer) == record.header.digest:
                return True
        with self._lock:
            self._counts = replace(self._counts, damaged=self._counts.damaged + (self._drop([key]) > 0))
        return False

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        needed = {key for entry in entries for key in (entry.key, entry.parent)}
        for entry in entries:
            if not all(self.lookup([entry.key])):
                self._write(entry, needed)
        keys = [entry.key for entry in entries]
        self._use(keys)
        return self.lookup(keys)

    def _write(self, entry: Entry, needed: set[BlockKey]) -> None:
        """Store one block if its parent is held and there is room, or some can be made."""
        if self._lacks_parent(entry):
            return
        if not self._met("write", self.faults.before_write, entry.key):
            self._counts = replace(self._counts, dropped_writes=self._counts.dropped_writes + 1)
            return
        record = self.record_of(entry)
        with self._lock:
            full = len(self.records) >= self.capacity_blocks
            if not (self._closed or self._lacks_parent(entry) or (full and not self._evict(needed))):
                self.records[self.namespace, entry.key] = record

    def _lacks_parent(self, entry: Entry) -> bool:
        return entry.parent != ROOT and not all(self.lookup([entry.parent]))

    def record_of(self, entry: Entry) -> Record:
        """What is stored of a block."""
        payload, now = bytearray().join(entry.buffer), time.time()
        digest = payload_digest([memoryview(payload)])
        named = self.namespace, entry.key, entry.parent, entry.depth
        return Record(RecordHeader(*named, len(payload), digest, now, now, epoch=entry.epoch), payload)

    def _evict(self, needed: set[BlockKey]) -> bool:
        """Drop the least recently used block that no other one needs."""
        parents = {(record.header.namespace, record.header.parent) for record in self.records.values()}
        for name in self.records:
            if name not in parents and name[1] not in needed:
                del self.records[name]
                self._counts = replace(self._counts, evicted=self._counts.evicted + 1)
                return True
        return False

    def _use(self, keys: Sequence[BlockKey]) -> None:
        """These blocks were used now, the deepest first."""
        with self._lock:
            used = [self.records.pop((self.namespace, key), None) for key in keys]
            for record in sorted(filter(None, used), key=lambda record: -record.header.depth):
                self.records[self.namespace, record.header.key] = record

    def delete(self, keys: Iterable[BlockKey]) -> int:
        if self._closed:
            return 0
        self._require_store()
        return self._drop(keys)

    def _require_store(self) -> None:
        if not self._met("delete", self.faults.before_write, b""):
            raise TierError(self._trouble)

    def _met(self, verb: str, announce: Callable[[bytes], None], key: BlockKey) -> bool:
        """Announce a call of the store; whether it works."""
        self._trouble = ""
        try:
            announce(key)
        except OSError as error:
            self._trouble = f"cannot {verb}: {error.strerror}"
        return not self._trouble

    def _drop(self, keys: Iterable[BlockKey]) -> int:
        with self._lock:
            if self._closed:
                return 0
            before = len(self.records)
            doomed = set(keys)
            for key in doomed:
                self.records.pop((self.namespace, key), None)
            while doomed:
                behind = [name for name, record in self.records.items() if record.header.parent in doomed]
                doomed = {self.records.pop(name).header.key for name in behind if name[0] == self.namespace}
            return before - len(self.records)

    def clear(self) -> None:
        if not self._closed:
            self._require_store()
            with self._lock:
                for name in [name for name in self.records if name[0] == self.namespace]:
                    del self.records[name]

    def capacity(self) -> TierCapacity:
        block_bytes = self.slot_bytes + HEADER_BYTES
        with self._lock:
            blocks = sum(namespace == self.namespace for namespace, _ in self.records)
        return TierCapacity(blocks * block_bytes, self.capacity_blocks * block_bytes, blocks)

    def counts(self) -> TierCounts:
        return self._counts

    def scan(self) -> Iterator[RecordHeader]:
        with self._lock:
            headers = [] if self._closed else [record.header for record in self.records.values()]
        return (header for header in headers if header.namespace == self.namespace)

    def health(self) -> TierHealth:
        return TierHealth(not self._trouble, self._trouble)

    def close(self) -> None:
        with self._lock:
            self._closed = True
