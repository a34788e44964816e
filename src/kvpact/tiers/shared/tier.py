"""The tier over any shared store: blocks as records that other engines read and write too.

Owns what is asked, read and written of the store at once, and the consequences of its failure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import Final

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
    leading,
)
from kvpact.tiers.record import Block, bytes_of, chained, require_at_most
from kvpact.tiers.shared.accounts import Accounts
from kvpact.tiers.shared.reader import RecordReader
from kvpact.tiers.shared.refuted import RefutedRuns
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
"""Payload of one call of a store: large enough for its batches, small enough to end early at a deadline. Headers do not
count, so that a read of as many bytes into the arena is one call."""

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
        """`slot_bytes` is the largest block's size over all ranks. Takes over `store`, which it closes."""
        self.name = store.kind
        self.store = store
        store.record_bytes = HEADER_BYTES + slot_bytes
        self._namespace = namespace
        self._digest = namespace.digest
        self._group = group_name(namespace, seal)
        self._slot_bytes = slot_bytes
        self._seal = seal
        self._accounts = Accounts(logger, f"{self.name} tier at {store.place}")
        self._refuted = RefutedRuns(store, self._group)
        self._reader = RecordReader(store, self._digest, self._group, seal, slot_bytes, self._accounts, self._refuted)
        self._usage = StoreUsage()
        self._usage_at = float("-inf")
        self._described = False
        self._uses = UseCount(store.close)

    # Lookups and reads

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        with self._uses.one() as running:
            return leading(self._exists(keys, self.store.exists)) if running else 0

    def lookup_each(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._uses.one() as running:
            return self._exists(keys, self.store.exists_each) if running else [False] * len(keys)

    def _exists(self, keys: Sequence[BlockKey], exists: Callable[[Sequence[str]], list[bool]]) -> list[bool]:
        found = [False] * len(keys)
        if keys:
            with self._accounts.noting("read"):
                found = exists(self._names(keys))
                self._accounts.last_errors.clear("read")
        return found

    def get(
        self,
        keys: Sequence[BlockKey],
        start: int,
        buffers: Sequence[BlockBuffer],
        on_progress: Progress | None = None,
    ) -> int:
        self._require_sizes(buffers)
        arrived = 0
        wanted = chained(keys, start, min(start + len(buffers), len(keys)))
        with self._uses.one() as running, self._accounts.noting("read"):
            if not running or not wanted:
                return 0
            self.store.locate(self._names(keys[: start + len(wanted)]))
            for first, end in _batches(buffers[: len(wanted)]):
                arrived += sum(takewhile(bool, self._reader.read(wanted[first:end], buffers[first:end])))
                more = on_progress is None or on_progress(arrived)
                if arrived < end or not more:
                    break
        return arrived

    def get_each(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None = None
    ) -> list[bool]:
        self._require_sizes(buffers)
        arrived = [False] * len(keys)
        with self._uses.one() as running, self._accounts.noting("read"):
            if not running or not keys:
                return arrived
            self.store.locate_each(self._names(keys))
            for first, end in _batches(buffers):
                sound = self._reader.read([Block(key) for key in keys[first:end]], buffers[first:end])
                for index, is_sound in enumerate(sound, first):
                    arrived[index] = is_sound
                if on_progress is not None and not on_progress(leading(arrived)):
                    break
        return arrived

    # Writes

    def put(
        self, keys: Sequence[BlockKey], start: int, buffers: Sequence[BlockBuffer], epoch: Epoch = FIRST_EPOCH
    ) -> int:
        wanted = chained(keys, start, start + len(buffers))
        return leading(self._put(keys[:start], wanted, buffers, epoch, self.store.exists, self.store.write))

    def put_each(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], epoch: Epoch = FIRST_EPOCH
    ) -> list[bool]:
        wanted = [Block(key) for key in keys]
        return self._put((), wanted, buffers, epoch, self.store.exists_each, self.store.write_each)

    def _put(
        self,
        before: Sequence[BlockKey],
        wanted: Sequence[Block],
        buffers: Sequence[BlockBuffer],
        epoch: Epoch,
        exists: Callable[[Sequence[str]], list[bool]],
        write: Callable[[Sequence[str], Sequence[RecordPieces]], None],
    ) -> list[bool]:
        """Store what is missing of the `wanted` blocks if all `before` are there; whether each is there then."""
        self._require_sizes(buffers)
        keys = [block.key for block in wanted]
        with self._uses.one() as running:
            if not running or not wanted:
                return [False] * len(wanted)
            try:
                held = exists(self._names([*before, *keys]))
                if not all(held[: len(before)]):
                    return [False] * len(wanted)
                self._describe()
                each = zip(held[len(before) :], wanted, buffers, strict=True)
                missing = [(block, buffer) for there, block, buffer in each if not there]
                self._write(missing, epoch, write)
                self._accounts.last_errors.clear("write")
                self._note_usage()
                return [True] * len(wanted)
            except StoreError as error:
                self._accounts.note_failed("write", error)
            stored = self._exists(keys, exists)
            self._accounts.note_dropped(stored.count(False))
            return stored

    def _write(
        self,
        missing: Sequence[tuple[Block, BlockBuffer]],
        epoch: Epoch,
        write: Callable[[Sequence[str], Sequence[RecordPieces]], None],
    ) -> None:
        now = time.time()
        for first, end in _batches([buffer for _, buffer in missing]):
            records: list[RecordPieces] = []
            for block, buffer in missing[first:end]:
                digest = self._seal.payload_digest(buffer)
                header = RecordHeader(
                    self._digest,
                    block.key,
                    block.parent,
                    block.depth,
                    bytes_of(buffer),
                    digest,
                    now,
                    now,
                    epoch=epoch,
                    run=self._refuted.own,
                )
                records.append([header.encode(self._seal), *buffer])
            write(self._names([block.key for block, _ in missing[first:end]]), records)

    def _describe(self) -> None:
        """Store the namespace's fields beside the records, once."""
        if not self._described:
            self.store.write([f"{self._group}/{NAMESPACE_RECORD}"], [[self._namespace.describe().encode()]])
            self._described = True

    # Removal

    def delete(self, keys: Iterable[BlockKey]) -> int:
        names = self._names(list(keys))
        with self._uses.one() as running, self._accounts.noting("write", "delete"):
            return self.store.remove(names) if running and names else 0

    def clear(self) -> None:
        with self._uses.one() as running, self._accounts.noting("write", "clear"):
            if running:
                self.store.clear(self._group)
                self._described = False

    def refute_run(self) -> None:
        with self._uses.one() as running, self._accounts.noting("write", "refute"):
            if running:
                self._refuted.refute()

    # Counts

    def capacity(self) -> TierCapacity:
        return TierCapacity(self._usage.used_bytes, self._usage.capacity_bytes, 0)

    def _note_usage(self) -> None:
        if (now := time.monotonic()) >= self._usage_at + USAGE_SECONDS:
            self._usage_at = now
            self._usage = self.store.usage()

    def counts(self) -> TierCounts:
        return replace(self._accounts.counts(), evicted=self.store.evicted)

    def scan(self) -> Iterator[RecordHeader]:
        with self._uses.one() as running, self._accounts.noting("read"):
            names = [record.name for record in self.store.names(self._group) if key_of(record.name)] if running else []
            for name, raw in headers_of(self.store, names):
                with suppress(RecordError):
                    if (header := self._reader.header_in(raw or b"")).key == key_of(name):
                        yield header

    def health(self) -> TierHealth:
        return self._accounts.last_errors.health()

    def close(self) -> None:
        with self._uses.the_last():
            pass

    # Within

    def _names(self, keys: Sequence[BlockKey]) -> list[str]:
        return [record_name(self._group, key) for key in keys]

    def _require_sizes(self, buffers: Sequence[BlockBuffer]) -> None:
        require_at_most(buffers, self._slot_bytes, f"the largest block of {self.store.place} has")


def _batches(buffers: Sequence[BlockBuffer]) -> Iterator[tuple[int, int]]:
    """`buffers` as ranges (first, end) for one call of a store each: at most `GROUP_BYTES`, or one block."""
    first = nbytes = 0
    for index, buffer in enumerate(buffers):
        size = max(HEADER_BYTES, bytes_of(buffer))
        if nbytes and nbytes + size > GROUP_BYTES:
            yield first, index
            first, nbytes = index, 0
        nbytes += size
    if nbytes:
        yield first, len(buffers)
