"""The tier over any shared store: blocks as records that other engines read and write too.

Owns the checks before a block is served, and the consequences of a store's failure.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final

from kvpact.errors import TierError
from kvpact.identity.epochs import FIRST_EPOCH, Epoch
from kvpact.identity.keys import BlockKey, Namespace
from kvpact.tiers.base import (
    HEADER_BYTES,
    UNSEALED,
    BlockBuffer,
    Progress,
    RecordError,
    RecordHeader,
    RecordMac,
    Tier,
    TierCapacity,
    TierCounts,
    TierHealth,
)
from kvpact.tiers.log_once import LastErrors
from kvpact.tiers.record import require_sizes
from kvpact.tiers.shared.store import (
    NAMESPACE_RECORD,
    RecordPieces,
    RecordStore,
    StoreError,
    StoreUsage,
    group_name,
    headers_of,
    key_of,
    record_name,
)
from kvpact.tiers.use_count import UseCount

logger = logging.getLogger(__name__)

GROUP_BYTES: Final = 16 << 20
"""Payload of one call of a store: large enough for its batches, small enough to end early at a deadline."""

USAGE_SECONDS: Final = 30.0
"""Maximum age of the known usage while blocks are written."""


class SharedTier(Tier):
    """See `Tier`. Blocks in a `RecordStore`, verified one by one; every call may wait for the store.

    Other engines store, evict and delete here, so only the store knows what it holds: a hole is a miss, and `delete`
    drops only the named blocks; blocks after them cannot be reached until they are stored again.
    """

    exclusive = False

    def __init__(
        self, store: RecordStore, namespace: Namespace, slot_bytes: int, *, seal: RecordMac = UNSEALED
    ) -> None:
        """`slot_bytes` is a block's size over all ranks. Takes over `store`, which it closes."""
        self.name = store.kind
        self.store = store
        store.record_bytes = HEADER_BYTES + slot_bytes
        self._namespace = namespace
        self._digest = namespace.digest
        self._group = group_name(namespace, seal)
        self._slot_bytes = slot_bytes
        self._seal = seal
        self._lock = threading.Lock()
        self._counts = TierCounts()
        self._last_errors = LastErrors(logger, f"{self.name} tier at {store.place}")
        self._usage = StoreUsage()
        self._usage_at = float("-inf")
        self._described = False
        self._uses = UseCount(store.close)

    # Lookups and reads

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        with self._uses.one() as running:
            if not running or not keys:
                return 0
            return _unbroken(self._exists(self._names(keys)))

    def _exists(self, names: Sequence[str]) -> list[bool]:
        found = [False] * len(names)
        with self._noting("read"):
            found = self.store.exists(names)
            self._last_errors.clear("read")
        return found

    def get(
        self,
        keys: Sequence[BlockKey],
        start: int,
        buffers: Sequence[BlockBuffer],
        on_progress: Progress | None = None,
    ) -> int:
        require_sizes(buffers, self._slot_bytes, f"a block of {self.store.place}")
        wanted = keys[start : start + len(buffers)]
        arrived = 0
        with self._uses.one() as running, self._noting("read"):
            step = max(1, GROUP_BYTES // self._slot_bytes)
            if running and wanted:
                self.store.locate(self._names(keys[: start + len(wanted)]))
            while running and arrived < len(wanted):
                end = min(arrived + step, len(wanted))
                sound = self._read_group(wanted[arrived:end], buffers[arrived:end])
                arrived += sound
                more = on_progress is None or on_progress(arrived)
                if arrived < end or not more:
                    break
        return arrived

    def _read_group(self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer]) -> int:
        """Read and verify; returns the number of leading sound blocks."""
        names = self._names(keys)
        headers = [bytearray(HEADER_BYTES) for _ in keys]
        records = [[memoryview(header), *buffer] for header, buffer in zip(headers, buffers, strict=True)]
        found: Sequence[bool] = ()
        with self._noting("read"):
            found = self.store.read(names, records)
            self._last_errors.clear("read")
        for index, key in enumerate(keys[: len(found)]):
            if not found[index]:
                if self._cut_short(names[index]):
                    self._quarantine(key, names[index], "has another length than a block of this engine")
                return index
            if reason := self._wrong(key, headers[index], buffers[index]):
                if not self.store.tears_reads:
                    self._quarantine(key, names[index], reason)
                    return index
                if not self._is_sound_again(key, names[index], headers[index], buffers[index]):
                    return index
        return len(found)

    def _is_sound_again(self, key: BlockKey, name: str, header: bytearray, buffer: BlockBuffer) -> bool:
        """Read a damaged record again; returns whether it is sound now, because it was replaced during the first read.

        It is quarantined if it is still damaged; a sound record in its place must not be removed.
        """
        there = False
        with self._noting("read"):
            (there,) = self.store.read([name], [[memoryview(header), *buffer]])
        if there and (reason := self._wrong(key, header, buffer)):
            self._quarantine(key, name, reason)
            return False
        return there

    def _cut_short(self, name: str) -> bool:
        """Whether an unread record exists with another length, which every read refuses."""
        with suppress(StoreError):
            if self.store.heads([name]) == [None]:
                return False
            # Compare the length: another engine may have stored it in full after the read.
            return self.store.size(name) not in (None, HEADER_BYTES + self._slot_bytes)
        return False

    def _wrong(self, key: BlockKey, raw: bytearray, buffer: BlockBuffer) -> str:
        """Why a record must not be served; "" if it may."""
        try:
            header = self._header_in(bytes(raw))
        except RecordError as error:
            return str(error)
        if header.key != key:
            return f"misplaced: it is block {header.key.hex()[:16]}"
        if header.digest != self._seal.payload_digest(buffer):
            return "payload does not match its checksum"
        return ""

    def _quarantine(self, key: BlockKey, name: str, reason: str) -> None:
        """Remove a record that cannot be served, so that the next write replaces it (H22)."""
        with self._lock:
            self._counts = replace(self._counts, damaged=self._counts.damaged + 1)
        self._last_errors.warn_once(f"damaged: {reason}", f"block {key.hex()[:16]} {reason}: removed, recomputed")
        with self._noting("write"):
            self.store.remove([name])

    # Writes

    def put(
        self, keys: Sequence[BlockKey], start: int, buffers: Sequence[BlockBuffer], epoch: Epoch = FIRST_EPOCH
    ) -> int:
        require_sizes(buffers, self._slot_bytes, f"a block of {self.store.place}")
        end = start + len(buffers)
        names = self._names(keys[:end])
        with self._uses.one() as running:
            if not running or not buffers:
                return 0
            try:
                held = self.store.exists(names)
                if not all(held[:start]):
                    return 0
                self._describe()
                self._write_missing(keys, start, buffers, names, held, epoch)
                self._last_errors.clear("write")
                self._note_usage()
                return len(buffers)
            except StoreError as error:
                self._note_failed("write", error)
            stored = _unbroken(self._exists(names[start:]))
            with self._lock:
                dropped = len(buffers) - stored
                self._counts = replace(self._counts, dropped_writes=self._counts.dropped_writes + dropped)
            return stored

    def _write_missing(
        self,
        keys: Sequence[BlockKey],
        start: int,
        buffers: Sequence[BlockBuffer],
        names: Sequence[str],
        held: Sequence[bool],
        epoch: Epoch,
    ) -> None:
        missing = [block for block in range(start, len(names)) if not held[block]]
        step = max(1, GROUP_BYTES // self._slot_bytes)
        now = time.time()
        for first in range(0, len(missing), step):
            blocks = missing[first : first + step]
            records: list[RecordPieces] = []
            for block in blocks:
                buffer = buffers[block - start]
                parent = keys[block - 1] if block else b""
                digest = self._seal.payload_digest(buffer)
                header = RecordHeader(
                    self._digest, keys[block], parent, block, self._slot_bytes, digest, now, now, epoch=epoch
                )
                records.append([header.encode(self._seal), *buffer])
            self.store.write([names[block] for block in blocks], records)

    def _describe(self) -> None:
        """Store the namespace's fields beside the records, once."""
        if not self._described:
            self.store.write([f"{self._group}/{NAMESPACE_RECORD}"], [[self._namespace.describe().encode()]])
            self._described = True

    # Removal

    def delete(self, keys: Iterable[BlockKey]) -> int:
        names = self._names(list(keys))
        with self._uses.one() as running, self._noting("write", "delete"):
            return self.store.remove(names) if running and names else 0

    def clear(self) -> None:
        with self._uses.one() as running, self._noting("write", "clear"):
            if running:
                self.store.clear(self._group)
                self._described = False

    # Counts

    def capacity(self) -> TierCapacity:
        return TierCapacity(self._usage.used_bytes, self._usage.capacity_bytes, 0)

    def _note_usage(self) -> None:
        if (now := time.monotonic()) >= self._usage_at + USAGE_SECONDS:
            self._usage_at = now
            self._usage = self.store.usage()

    def counts(self) -> TierCounts:
        with self._lock:
            return replace(self._counts, evicted=self.store.evicted)

    def scan(self) -> Iterator[RecordHeader]:
        with self._uses.one() as running, self._noting("read"):
            names = [record.name for record in self.store.names(self._group) if key_of(record.name)] if running else []
            for name, raw in headers_of(self.store, names):
                with suppress(RecordError):
                    if (header := self._header_in(raw or b"")).key == key_of(name):
                        yield header

    def health(self) -> TierHealth:
        return self._last_errors.health()

    def close(self) -> None:
        with self._uses.the_last():
            pass

    # Within

    def _names(self, keys: Sequence[BlockKey]) -> list[str]:
        return [record_name(self._group, key) for key in keys]

    def _header_in(self, raw: bytes) -> RecordHeader:
        return RecordHeader.decode(raw, namespace=self._digest, length=self._slot_bytes, seal=self._seal)

    @contextmanager
    def _noting(self, what: str, refused: str = "") -> Iterator[None]:
        """A context that notes the store's failure and ends with it, or with a TierError if the caller must know."""
        try:
            yield
        except StoreError as error:
            self._note_failed(what, error)
            if refused:
                raise TierError(f"cannot {refused}: {error}") from error

    def _note_failed(self, what: str, error: StoreError) -> None:
        if what == "read":
            with self._lock:
                self._counts = replace(self._counts, failed_reads=self._counts.failed_reads + 1)
        self._last_errors.add(what, f"cannot {what}: {error}")


def _unbroken(found: Sequence[bool]) -> int:
    """Number of leading True values."""
    return next((index for index, there in enumerate(found) if not there), len(found))
