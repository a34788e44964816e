"""The blocks in this engine's own slab, found again after a restart.

Owns the slab's content: its index, eviction, its size within its limit, and the rule that no unverified block is
served. Only this process writes the slab, so lookups are answered from memory.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import Final

from kvpact.errors import TierError
from kvpact.identity.epochs import Epoch
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import ROOT, BlockIndex, State, StoredBlock
from kvpact.tiers.base import BlockBuffer, Progress, RecordError, RecordHeader, TierCounts, payload_digest
from kvpact.tiers.disk.slab import Slab, digest_table, occupied
from kvpact.tiers.disk.slab_directory import LOCK_TIMEOUT_S, NoRoomYet, SlabDirectory
from kvpact.tiers.disk.two_threads import groups_of, on_two_threads, read_verified
from kvpact.tiers.log_once import LastErrors

logger = logging.getLogger(__name__)

GROWTH_BYTES: Final = 64 << 20
"""The file grows by this much at a time, so that the file system keeps slots contiguous."""

GROWTH_RETRY_S: Final = 10.0
"""A full disk is asked again after this time; until then a write that needs more room is dropped."""

LIMIT_STEP: Final = 512
"""Slots that are given up or taken at once: a lookup waits for that, a few milliseconds."""

_PERSIST_S: Final = 1.0


class OwnSlab:
    """The methods have the meaning of those of `Tier`, for this slab alone; `slab` must be open meanwhile.

    Two locks: `_lock` guards the index and is never held during I/O, so `lookup` never waits for the disk.
    `_header_lock` is taken before it, and makes a change of the index and of the header table one step.
    """

    def __init__(self, slab: Slab, directory: SlabDirectory, last_errors: LastErrors) -> None:
        """Take over an open slab, which may grow to its claim, and read its header table. Raises OSError."""
        self.slab = slab
        self._directory = directory
        self._last_errors = last_errors
        most = max(1, slab.superblock.slots_in(directory.capacity_bytes))
        self._slot_bytes = slab.superblock.slot_bytes
        self._namespace = slab.superblock.namespace.digest
        self._lock, self._header_lock, self._growth_lock = threading.Lock(), threading.Lock(), threading.Lock()
        self._index = BlockIndex(most, slab.superblock.slots_in(slab.superblock.claim_bytes))
        self._digests = digest_table(most)
        self._used: dict[int, float] = {}
        self._counts = TierCounts()
        self._growth_failed_at = float("-inf")
        self._stale_headers: set[int] = set()
        """Slots of dropped blocks whose headers could not be cleared: after a restart those blocks would be back."""
        self._restore()

    # Lookups and reads

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Number of leading `keys` that the slab holds."""
        with self._lock:
            return self._index.held_prefix(keys)

    def get(
        self, keys: Sequence[BlockKey], start: int, buffers: Sequence[BlockBuffer], on_progress: Progress | None
    ) -> int:
        """Read and verify; return how many blocks arrived."""
        with self._lock:
            count = min(self._index.held_prefix(keys) - start, len(buffers))
            if count <= 0:
                return 0
            wanted = keys[start : start + count]
            pin = self._index.pin(wanted[-1])
            self._index.touch(wanted[-1])
            slots = self._index.slots_of(wanted)
            digests = self._digests[slots].tolist()
            self._used[slots[-1]] = time.time()
        try:
            arrived, reason = read_verified(self._read, slots, digests, buffers[:count], on_progress)
            if reason:
                self._quarantine(wanted[arrived], slots[arrived], reason)
            return arrived
        finally:
            with self._lock:
                self._index.unpin(pin)

    def _read(self, slots: Sequence[int], buffers: Sequence[BlockBuffer]) -> int:
        """Number of leading slots that were read."""
        try:
            count = self.slab.read_payloads(slots, buffers)
            self._last_errors.clear("read")
            return count
        except OSError as error:
            self._note_read_failed(error)
            return 0

    # Writes

    def put(self, keys: Sequence[BlockKey], start: int, buffers: Sequence[BlockBuffer], epoch: Epoch) -> None:
        """Store what is new of these blocks, if all before `start` are in this slab."""
        begin, slots = self._reserve(keys, start, start + len(buffers))
        stored = 0
        try:
            stored = self._store(keys, begin, slots[: self._backed(slots)], buffers[begin - start :], epoch)
        except OSError as error:
            self._note_write_failed(error)
        finally:
            if stored < len(slots):
                self._abandon(slots[stored:])

    def _reserve(self, keys: Sequence[BlockKey], start: int, end: int) -> tuple[int, tuple[int, ...]]:
        """(first block, slots) for those of blocks [start, end) that are new and have room."""
        with self._lock:
            begin = self._index.known_prefix(keys)
            if not start <= begin < end:
                return begin, ()
            end = min(end, begin + self._index.reservable(keys[begin - 1] if begin else ROOT))
            reservation = self._index.reserve(keys, begin, end)
            if reservation is None:
                return begin, ()
            self._counts = replace(self._counts, evicted=self._counts.evicted + len(reservation.evicted))
            return begin, reservation.slots

    def _store(
        self,
        keys: Sequence[BlockKey],
        begin: int,
        slots: Sequence[int],
        buffers: Sequence[BlockBuffer],
        epoch: Epoch,
    ) -> int:
        """Write block `begin + i` of `keys` to `slots[i]` and index it; return the number of leading blocks written.

        Headers are written only before and after all payloads: a header's write waits for all writes under way.
        Raises OSError; then none is indexed.
        """
        if not slots:
            return 0
        digests: dict[int, bytes] = {}

        def write(first: int, end: int) -> bool:
            try:
                self.slab.write_payloads(slots[first:end], buffers[first:end])
            except OSError as error:
                self._note_write_failed(error)
                return False
            digests.update((slots[index], payload_digest(buffers[index])) for index in range(first, end))
            return True

        with self._header_lock:
            self.slab.clear_headers(slots)
            self._stale_headers.difference_update(slots)
        on_two_threads(write, groups_of(len(slots), self._slot_bytes))
        written = list(takewhile(digests.__contains__, slots))
        now = time.time()
        headers = {}
        for block, slot in enumerate(written, begin):
            parent = keys[block - 1] if block else ROOT
            headers[slot] = RecordHeader(
                self._namespace, keys[block], parent, block, self._slot_bytes, digests[slot], now, now, slot, epoch
            ).encode()
        with self._header_lock:
            with self._lock:  # a block that was deleted while it was written gets no header
                wanted = [slot for slot in written if self._index.state(slot) == State.RESERVED]
            self.slab.write_headers(wanted, [headers[slot] for slot in wanted])
            with self._lock:
                for slot in written:
                    self._digests[slot] = digests[slot]
                    self._used.pop(slot, None)
                self._index.complete(written)
        if len(written) == len(slots):
            self._last_errors.clear("write")
        return len(written)

    def _abandon(self, slots: Sequence[int]) -> None:
        """Free slots whose blocks could not be stored, with all blocks that waited for them (H26)."""
        with self._header_lock:
            with self._lock:
                lost = self._index.abandon(slots)
                self._counts = replace(self._counts, dropped_writes=self._counts.dropped_writes + len(slots))
            self._forget_headers({*slots, *(slot for _, slot in lost)})

    def _backed(self, slots: Sequence[int]) -> int:
        """Number of leading `slots` that the file has room for, after growing it if needed and possible."""
        needed = max(slots, default=-1) + 1
        if needed > self.slab.slots:
            with self._growth_lock:
                if needed > self.slab.slots and time.monotonic() >= self._growth_failed_at + GROWTH_RETRY_S:
                    self._grow(needed)
        return next((index for index, slot in enumerate(slots) if slot >= self.slab.slots), len(slots))

    def _grow(self, needed: int) -> None:
        """Grow the file to `needed` slots and some more; on failure the next try waits `GROWTH_RETRY_S`.

        Without room in the directory the slots that the file does not have are given up, until `limit`: blocks are
        evicted for new ones.
        """
        generous = max(needed, min(self._index.usable_slots, self.slab.slots + GROWTH_BYTES // self._slot_bytes))
        try:
            self._directory.grow(self.slab, needed, generous, LOCK_TIMEOUT_S)
            self._last_errors.clear("room")
        except (OSError, TierError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            if isinstance(error, NoRoomYet):
                with self._header_lock:
                    with self._lock:
                        lost = self._index.withdraw_slots(self.slab.slots)
                    self._forget_headers({slot for _, slot in lost})
            else:
                self._growth_failed_at = time.monotonic()
            self._last_errors.add("room", f"cannot grow {self.slab.path}: {reason}; it serves what it has")

    @property
    def file_bytes(self) -> int:
        """The size of the file."""
        return self.slab.superblock.file_bytes(self.slab.slots)

    def limit(self, file_bytes: int) -> None:
        """Let the file have at most `file_bytes`; blocks that lie beyond are evicted.

        Slots that are being read or written are given back by a later call. Raises OSError.
        """
        slots = min(self.slab.superblock.slots_in(file_bytes), self._index.num_slots)
        with self._growth_lock:
            while slots != (usable := self._index.usable_slots):
                self._change_limit(
                    max(slots, usable - LIMIT_STEP) if slots < usable else min(slots, usable + LIMIT_STEP)
                )
            if slots < self.slab.slots and self._are_free(range(slots, self.slab.slots)):
                self.slab.shrink(slots)
            if self.slab.superblock.claim_bytes != (claim := self.slab.superblock.file_bytes(slots)):
                self.slab.claim(claim, os.getpid())

    def _change_limit(self, slots: int) -> None:
        with self._header_lock:
            with self._lock:
                evicted = self._index.withdraw_slots(slots) if slots < self._index.usable_slots else []
                self._index.use_slots(slots)
                self._counts = replace(self._counts, evicted=self._counts.evicted + len(evicted))
            self._forget_headers({slot for _, slot in evicted})

    def _are_free(self, slots: range) -> bool:
        """Whether withdrawn slots are not used any more; without the lock, because no new use begins."""
        return all(self._index.state(slot) == State.FREE for slot in slots)

    # Removal

    def delete(self, keys: Iterable[BlockKey]) -> int:
        """Drop these blocks and all after them; return how many were dropped. Raises TierError as `Tier.delete`."""
        dropped = sum([self._drop(key) for key in keys])
        self._require_no_stale_headers()
        return dropped

    def clear(self) -> None:
        """Drop every block. Raises TierError as `Tier.clear`."""
        with self._header_lock:
            with self._lock:
                self._index.clear()
            self._forget_headers(range(self.slab.slots))  # headers of evicted blocks are still there
        self._require_no_stale_headers()

    def _require_no_stale_headers(self) -> None:
        if self._stale_headers:
            raise TierError(f"disk tier: cannot clear {len(self._stale_headers)} headers in {self.slab.path}")

    def _drop(self, key: BlockKey) -> int:
        with self._header_lock:
            with self._lock:
                lost = self._index.drop(key)
            self._forget_headers({slot for _, slot in lost})
        return len(lost)

    def _quarantine(self, key: BlockKey, slot: int, reason: str) -> None:
        """Drop a block that cannot be served and all blocks after it, in memory and on disk (H22)."""
        with self._header_lock:
            with self._lock:  # it may have been dropped meanwhile, and stored again elsewhere
                lost = self._index.drop(key) if self._index.key_at(slot) == key else []
                self._counts = replace(self._counts, damaged=self._counts.damaged + bool(lost))
            self._forget_headers({slot for _, slot in lost})
        self._last_errors.warn_once(
            f"damaged: {reason}", f"block {key.hex()[:16]} in {self.slab.path} {reason}: dropped, recomputed"
        )

    def _forget_headers(self, slots: Iterable[int]) -> None:
        """Clear headers; the header lock is held. Those that fail are tried again with the next ones."""
        self._stale_headers.update(slots)
        try:
            self.slab.clear_headers(sorted(self._stale_headers))
            self._stale_headers.clear()
        except OSError as error:
            self._note_write_failed(error)

    # Counts

    @property
    def held_count(self) -> int:
        """Blocks that may be served."""
        with self._lock:
            return self._index.held_count

    def counts(self) -> TierCounts:
        """What went wrong or was evicted since the slab was opened."""
        with self._lock:
            return self._counts

    def scan(self) -> Iterator[RecordHeader]:
        """The header of every sound record, in no order."""
        table = bytearray()
        try:
            table = self.slab.read_table()
        except OSError as error:
            self._note_read_failed(error)
        for slot, raw in occupied(table):
            with suppress(RecordError):
                yield self._header_in(slot, raw)

    def check(self) -> None:
        """Verify the index's invariants, for tests. Raises PactViolation."""
        with self._lock:
            self._index.check()

    # Opening and closing

    def _restore(self) -> None:
        """Fill the index from the header table; payloads are not read (H59). Raises OSError."""
        blocks, unusable = list[StoredBlock](), list[int]()
        for slot, raw in occupied(self.slab.read_table()):
            try:
                header = self._header_in(slot, raw)
                if slot >= self.slab.slots:
                    raise RecordError("its payload is beyond the end of the file")
            except RecordError as error:
                unusable.append(slot)
                self._last_errors.warn_once(f"damaged: {error}", f"slot {slot} of {self.slab.path}: {error}; dropped")
                continue
            self._digests[slot] = header.digest
            blocks.append(StoredBlock(header.key, header.parent, slot, header.used))
        orphans = self._index.restore(blocks)
        self._counts = replace(self._counts, damaged=len(unusable))
        self._forget_headers({*unusable, *(block.slot for block in orphans)})
        logger.info(
            "disk tier: %s holds %d blocks (%d records unusable, %d without the block before them)",
            self.slab.path, self._index.held_count, len(unusable), len(orphans),
        )  # fmt: skip

    def persist_use(self) -> None:
        """Store when blocks were last used, newest first, for at most `_PERSIST_S`. A kill loses these times."""
        deadline = time.monotonic() + _PERSIST_S
        for slot, used in sorted(self._used.items(), key=lambda item: -item[1]):
            if time.monotonic() >= deadline:
                return
            with self._header_lock, suppress(RecordError, OSError):
                header = replace(self._header_in(slot, self.slab.read_header(slot)), used=used)
                self.slab.write_headers([slot], [header.encode()])

    def _header_in(self, slot: int, raw: bytes | memoryview) -> RecordHeader:
        return self.slab.superblock.header(slot, raw)

    def _note_read_failed(self, error: OSError) -> None:
        with self._lock:
            self._counts = replace(self._counts, failed_reads=self._counts.failed_reads + 1)
        self._last_errors.add("read", f"cannot read {self.slab.path}: {error.strerror}")

    def _note_write_failed(self, error: OSError) -> None:
        self._last_errors.add("write", f"cannot write {self.slab.path}: {error.strerror}; those blocks are not kept")
