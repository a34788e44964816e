"""Tiers that each break one promise, in the way in which real ones were seen to. For the suite to find."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dictionary_tier import DictionaryTier, Record, Records
from kvpact.errors import TierError
from kvpact.identity.keys import BlockKey, Namespace
from kvpact.tiers.base import (
    BlockBuffer,
    Entry,
    Progress,
    RecordHeader,
    TierCapacity,
    TierCounts,
    TierHealth,
    chained,
    leading,
    payload_digest,
)
from kvpact_testkit.faults import Faults


class CountsHits(DictionaryTier):
    """H20: stores what it is given, and counts what it finds of a prompt's blocks, wherever the holes are."""

    exclusive = False

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        for entry in entries:
            store_unasked(self, entry)
        return self.lookup([entry.key for entry in entries])

    def leading(self, keys: Sequence[BlockKey]) -> int:
        return sum(self.lookup(keys))


class StopsAtTheHole(DictionaryTier):
    """T2, H20: `lookup` answers as if each block needed those that were named before it."""

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        row = leading(super().lookup(keys))
        return [index < row for index in range(len(keys))]


class StoresOrphans(DictionaryTier):
    """T12: stores blocks whose parent is missing."""

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        for entry in entries:
            if not all(self.lookup([entry.key])):
                store_unasked(self, entry)
        return self.lookup([entry.key for entry in entries])


class StoresOrphansUnseen(DictionaryTier):
    """T12: stores blocks whose parent is missing; they appear when it is there."""

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [held and self._is_reached(key) for key, held in zip(keys, super().lookup(keys), strict=True)]

    def _is_reached(self, key: BlockKey) -> bool:
        while (record := self.records.get((self.namespace, key))) is not None and record.header.parent:
            key = record.header.parent
        return record is not None

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        for entry in entries:
            if (self.namespace, entry.key) not in self.records:
                store_unasked(self, entry)
        return self.lookup([entry.key for entry in entries])


class ServesDamage(DictionaryTier):
    """H22: believes what the store says."""

    def _read(self, key: BlockKey, buffer: BlockBuffer) -> bool:
        with self._lock:
            record = self.records.get((self.namespace, key))
        if record is None:
            return False
        copy_out(record, buffer)
        return True


class ServesDamageOnce(DictionaryTier):
    """H22: finds damage and ends the read, but leaves the block in place, to be promised again."""

    def _read(self, key: BlockKey, buffer: BlockBuffer) -> bool:
        record = self.records.get((self.namespace, key))
        sound = super()._read(key, buffer)
        if not sound and record is not None:
            self.records[self.namespace, key] = record
        return sound


class ReadsLate(DictionaryTier):
    """H21: gives up a read after its deadline; the thread that reads does not know."""

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None = None
    ) -> list[bool]:
        arrived: list[list[bool]] = []
        reading = threading.Thread(target=lambda: arrived.append(super(ReadsLate, self).get(keys, buffers)))
        reading.start()
        reading.join(0.1)
        return arrived[0] if arrived else [False] * len(keys)


class ReadsAhead(DictionaryTier):
    """H21: a read that is ended early goes on behind its caller's back."""

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None = None
    ) -> list[bool]:
        arrived = super().get(keys, buffers, on_progress)
        if (row := leading(arrived)) < len(keys):
            threading.Timer(0.02, super().get, (keys[row:], buffers[row:])).start()
        return arrived


class VisibleTooSoon(DictionaryTier):
    """H26: enters a block first, and copies its bytes then."""

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        for entry in entries:
            if not all(self.lookup([entry.key])) and len(self.records) < self.capacity_blocks:
                store_unasked(self, replace(entry, buffer=[memoryview(bytes(self.slot_bytes))]))
                copy_in(self, entry.key, entry.buffer)
        return self.lookup([entry.key for entry in entries])


class KeepsFailedWrites(DictionaryTier):
    """H26: a write that fails leaves half a block, under a checksum of that half."""

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        stored = super().put(entries)
        if not all(stored) and not self.health().ok:
            store_unasked(self, replace(entries[leading(stored)], buffer=[memoryview(bytes(self.slot_bytes))]))
        return stored


class HasNoBound(DictionaryTier):
    """H50: takes its capacity for a wish."""

    def _evict(self, needed: set[BlockKey]) -> bool:
        return True


class IgnoresDepth(DictionaryTier):
    """T13: evicts the block that was stored first, however deep it is."""

    def _use(self, keys: Sequence[BlockKey]) -> None:
        pass


class EvictsHeads(IgnoresDepth):
    """H54: drops the block that was stored first, whatever needs it."""

    def _evict(self, needed: set[BlockKey]) -> bool:
        oldest = next((name for name in self.records if name[1] not in needed), None)
        if oldest is None:
            return False
        del self.records[oldest]
        self._counts = replace(self._counts, evicted=self._counts.evicted + 1)
        return True


class DropsWrites(DictionaryTier):
    """T1, H31: says that it stored what it threw away."""

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        super().put(entries[:4])
        return [True] * len(entries)


class MixesNamespaces(DictionaryTier):
    """H23: one model's blocks are another one's."""

    def __init__(self, namespace: Namespace, *others: Any, **named: Any) -> None:
        super().__init__(Namespace({}), *others, **named)


class ClearsTheNeighbours(DictionaryTier):
    """H23: clears every namespace of the store."""

    def clear(self) -> None:
        self.records.clear()


class WritesAgain(DictionaryTier):
    """T3: writes what it holds already."""

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        for entry, held in zip(entries, self.lookup([entry.key for entry in entries]), strict=True):
            if held:
                store_unasked(self, entry)
        return super().put(entries)


class DeletesOneBlock(DictionaryTier):
    """T4: leaves behind what needs the deleted block, to come back with it."""

    def delete(self, keys: Iterable[BlockKey]) -> int:
        return sum(self.records.pop((self.namespace, key), None) is not None for key in keys)


class ClearsForNow(DictionaryTier):
    """T4: what was cleared is back after a restart."""

    def clear(self) -> None:
        self.records = {}


class KeepsWhatIsWrong(DictionaryTier):
    """T11: what it was told is wrong is back after a restart."""

    def refute_run(self) -> None:
        self.records = {}


class ForgetsOnRestart(DictionaryTier):
    """H59: what is stored cannot be found again."""

    def __init__(
        self,
        namespace: Namespace,
        slot_bytes: int,
        capacity_blocks: int,
        records: Records | None = None,
        faults: Faults | None = None,
    ) -> None:
        super().__init__(namespace, slot_bytes, capacity_blocks, None, faults)


class RaisesErrors(DictionaryTier):
    """T5: lets the store's errors out."""

    def _read(self, key: BlockKey, buffer: BlockBuffer) -> bool:
        self.faults.before_read(key)
        return super()._read(key, buffer)


class AsksTheStore(DictionaryTier):
    """H58: a lookup asks the store, on the scheduler's thread."""

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        try:
            self.faults.before_read()
        except OSError:
            return [False] * len(keys)
        return super().lookup(keys)


class SaysNothing(DictionaryTier):
    """T6: counts nothing, knows of no record, and is always well."""

    def counts(self) -> TierCounts:
        return TierCounts()

    def scan(self) -> Iterator[RecordHeader]:
        return iter(())

    def capacity(self) -> TierCapacity:
        return TierCapacity(0, 0, 0)

    def health(self) -> TierHealth:
        return TierHealth(True)


class CallsRefusalsSuccess(DictionaryTier):
    """H36, H66: forgets what the store lets it, and says nothing if the store does not."""

    def delete(self, keys: Iterable[BlockKey]) -> int:
        try:
            return super().delete(keys)
        except TierError:
            return 0

    def clear(self) -> None:
        with suppress(TierError):
            super().clear()


class ServesOnWhenClosed(DictionaryTier):
    """T7: has no idea that it was closed."""

    def close(self) -> None:
        pass


class ClosesWhenAllIsDone(DictionaryTier):
    """H56: waits in `close` for a read that hangs."""

    def _read(self, key: BlockKey, buffer: BlockBuffer) -> bool:
        with self._lock:
            return super()._read(key, buffer)


class WaitsAtTheEnd(DictionaryTier):
    """H64: reads on threads that the interpreter waits for."""

    def _read(self, key: BlockKey, buffer: BlockBuffer) -> bool:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(super()._read, key, buffer).result()


class HalfAnswersThreads(DictionaryTier):
    """T8: all readers share one buffer."""

    shared = bytearray(1 << 20)

    def _read(self, key: BlockKey, buffer: BlockBuffer) -> bool:
        if not super()._read(key, buffer):
            return False
        size = sum(piece.nbytes for piece in buffer)
        self.shared[:size] = b"".join(buffer)
        threading.Event().wait(0.0005)  # others run here
        at = 0
        for piece in buffer:
            piece[:] = self.shared[at : at + piece.nbytes]
            at += piece.nbytes
        return True


class ServesANeighbour(DictionaryTier):
    """T2: reads the blocks that it finds one after another into the buffers, also where one is missing."""

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None = None
    ) -> list[bool]:
        found = [key for key in keys if all(self.lookup([key]))]
        arrived = super().get(found, buffers[: len(found)], on_progress)
        return arrived + [False] * (len(keys) - len(found))


class ServesHoles(DictionaryTier):
    """T2: takes a block for there if a later one is."""

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None = None
    ) -> list[bool]:
        arrived = super().get(keys, buffers, on_progress)
        return [any(arrived[index:]) for index in range(len(keys))]


class ChainsEverything(DictionaryTier):
    """T9: stores blocks without a parent as a chain, so that one takes along those that came with it."""

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        keys, buffers = [entry.key for entry in entries], [entry.buffer for entry in entries]
        alone = entries and not any(entry.parent for entry in entries)
        return super().put(chained(keys, buffers) if alone else entries)


class ServesAnySize(DictionaryTier):
    """T10: fills the buffer with as much of a record as fits."""

    def _read(self, key: BlockKey, buffer: BlockBuffer) -> bool:
        record = self.records.get((self.namespace, key))
        if record is not None and record.header.length > sum(piece.nbytes for piece in buffer):
            copy_out(record, buffer)
            return True
        return super()._read(key, buffer)


class StoresNoEmptyBlocks(DictionaryTier):
    """T10: takes a block of no bytes for none."""

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        super().put([entry for entry in entries if any(map(len, entry.buffer))])
        return self.lookup([entry.key for entry in entries])


def store_unasked(tier: DictionaryTier, entry: Entry) -> None:
    """Store one block, whether or not its parent is there and however full the tier is."""
    tier.records[tier.namespace, entry.key] = tier.record_of(entry)


def copy_in(tier: DictionaryTier, key: BlockKey, buffer: BlockBuffer) -> None:
    """Replace a stored block's bytes, piece by piece."""
    record = tier.records[tier.namespace, key]
    at = 0
    for piece in buffer:
        record.payload[at : at + piece.nbytes] = piece
        at += piece.nbytes
    header = replace(record.header, digest=payload_digest([memoryview(record.payload)]))
    tier.records[tier.namespace, key] = Record(header, record.payload)


def copy_out(record: Record, buffer: BlockBuffer) -> None:
    """Copy a stored block, as it is."""
    at = 0
    for piece in buffer:
        part = record.payload[at : at + piece.nbytes]
        piece[: len(part)] = part
        at += piece.nbytes
