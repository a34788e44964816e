"""The blocks in this engine's own slab, found again after a restart.

Owns the reads and writes of its payloads, eviction, and the rule that no unverified block is served. Only this process
writes the slab, so lookups are answered from memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice, takewhile
from typing import Final

import numpy as np

from kvpact.errors import TierError
from kvpact.identity.epochs import Epoch
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import ROOT, Pin, State
from kvpact.tiers.base import BlockBuffer, Progress, RecordHeader, TierCounts, payload_digest
from kvpact.tiers.disk.each_read import EachRead
from kvpact.tiers.disk.slab import Slab, refute_in
from kvpact.tiers.disk.slab_content import SlabContent
from kvpact.tiers.disk.slab_directory import SlabDirectory
from kvpact.tiers.disk.slab_size import SlabSize
from kvpact.tiers.disk.two_threads import MISPLACED, UNREADABLE, groups_of, on_two_threads, read_verified
from kvpact.tiers.log_once import LastErrors
from kvpact.tiers.record import Block, bytes_of, chained, new_run

FIRST_READ_S: Final = 0.5
"""Seconds for which opening a slab reads its header table, some 700,000 blocks; the rest follows."""

FIRST_PIECES: Final = 16
"""Pieces of it, of 4,096 slots each, that it reads however long they take."""


class OwnSlab:
    """The methods have the meaning of those of `Tier`, for this slab alone; `slab` must be open meanwhile."""

    def __init__(self, slab: Slab, directory: SlabDirectory, last_errors: LastErrors) -> None:
        """Take over an open slab, which may grow to its claim, and read its header table. Raises OSError."""
        self.slab = slab
        self._directory = directory
        self._run = new_run()
        self._slot_bytes = slab.superblock.slot_bytes
        self._namespace = slab.superblock.namespace.digest
        self._last_errors = last_errors
        self._content = SlabContent(slab, max(1, slab.superblock.slots_in(directory.capacity_bytes)), last_errors)
        self._lock, self._index = self._content.lock, self._content.index
        late, pieces = time.monotonic() + FIRST_READ_S, count()
        self._content.read_on(lambda: next(pieces) > FIRST_PIECES and time.monotonic() > late)
        self.size = SlabSize(self._content, directory)
        """How many slots it has and may have."""

    @property
    def reading(self) -> bool:
        """Whether a part of the header table is still to be read: what is in it is not found, and nothing is stored."""
        return self._content.reading

    def read_on(self, stopped: Callable[[], bool]) -> None:
        """Read the header table on until the end or `stopped`. Raises OSError."""
        self._content.read_on(stopped)

    # Lookups and reads

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Number of leading `keys` that the slab holds; see `SlabContent.held_prefix`."""
        return self._content.held_prefix(keys)

    def lookup_each(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which of these loose blocks the slab holds."""
        with self._lock:
            return [self._is_loose(key) for key in keys]

    def _is_loose(self, key: BlockKey) -> bool:
        return self._index.is_held(key) and bool(self._content.rooted[self._index.slot(key)])

    def get(
        self, keys: Sequence[BlockKey], start: int, buffers: Sequence[BlockBuffer], on_progress: Progress | None
    ) -> int:
        """Read and verify; return how many blocks arrived."""
        sizes = np.fromiter(map(bytes_of, buffers), np.int64)
        with self._lock:
            end = min(self._index.held_prefix(keys), start + len(buffers))
            held = list(takewhile(self._index.is_held, islice(keys, start, end)))
            slots = self._readable(self._index.slots_of(held), start, sizes)
            misplaced = self._misplaced(keys, start + len(slots), end)
            digests = self._content.digests[slots].tolist()
            pins = self._use(held[len(slots) - 1 : len(slots)])
        try:
            self._quarantine_all(misplaced)
            if not slots:
                return 0
            arrived, reason = read_verified(self._read, slots, digests, buffers[: len(slots)], on_progress)
            if reason:
                self._quarantine(held[arrived], slots[arrived], reason)
            return arrived
        finally:
            self._end_use(pins)

    def _readable(self, slots: list[int], start: int, sizes: np.ndarray) -> list[int]:
        """Return the slots before the first whose record is not of its place in the chain, or of another size.

        The first of `slots` is of block `start`.
        """
        misplaced = self._content.rooted[slots]
        if start == 0:
            misplaced[:1] ^= True
        unfit = misplaced | (self._content.lengths[slots] != sizes[: len(slots)])
        return slots[: int(unfit.argmax())] if unfit.any() else slots

    def _misplaced(self, keys: Sequence[BlockKey], first: int, end: int) -> list[tuple[BlockKey, int]]:
        """(key, slot) of those of blocks [first, end) of a chain whose records are of another place; the lock is held.

        There are none unless somebody has changed the file.
        """
        known = [depth for depth in range(first, end) if keys[depth] in self._index]
        slots = [(depth, keys[depth], self._index.slot(keys[depth])) for depth in known]
        return [(key, slot) for depth, key, slot in slots if self._content.rooted[slot] != (depth == 0)]

    def _quarantine_all(self, misplaced: Iterable[tuple[BlockKey, int]]) -> None:
        for key, slot in misplaced:
            self._quarantine(key, slot, MISPLACED)

    def get_each(self, reading: EachRead) -> None:
        """Read what the slab has of a call's loose blocks, and verify it."""
        keys, buffers = reading.keys, reading.buffers
        with self._lock:
            numbers = [
                number
                for number in reading.missing()
                if self._is_loose(keys[number])
                and self._content.lengths[self._index.slot(keys[number])] == bytes_of(buffers[number])
            ]
            wanted = [keys[number] for number in numbers]
            slots = self._index.slots_of(wanted)
            digests = self._content.digests[slots].tolist()
            pins = self._use(wanted)

        def end_unusable(index: int, reason: str) -> bool:
            self._quarantine(wanted[index], slots[index], reason)
            return reason != UNREADABLE

        try:
            reading.run(numbers, slots, digests, self._read, end_unusable)
        finally:
            self._end_use(pins)

    def _use(self, keys: Iterable[BlockKey]) -> list[Pin]:
        """Keep blocks, with all before them, and note that they are used; the lock is held."""
        pins = [self._index.pin(key) for key in keys]
        for pin in pins:
            self._index.touch(pin.key)
            self._content.used[pin.slot] = time.time()
        return pins

    def _end_use(self, pins: Iterable[Pin]) -> None:
        with self._lock:
            for pin in pins:
                self._index.unpin(pin)

    def _read(self, slots: Sequence[int], buffers: Sequence[BlockBuffer]) -> int:
        """Number of leading slots that were read."""
        try:
            count = self.slab.read_payloads(slots, buffers)
            self._last_errors.clear("read")
            return count
        except OSError as error:
            self._content.note_read_failed(error)
            return 0

    # Writes

    def put(self, keys: Sequence[BlockKey], start: int, buffers: Sequence[BlockBuffer], epoch: Epoch) -> None:
        """Store what is new of these blocks, if all before `start` are in this slab. Nothing while it is `reading`."""
        if self.reading:
            return
        with self._lock:
            misplaced = self._misplaced(keys, self._index.known_prefix(keys), start + len(buffers))
        self._quarantine_all(misplaced)
        begin, slots = self._reserve(keys, start, start + len(buffers))
        self._write(chained(keys, begin, begin + len(slots)), slots, buffers[begin - start :], epoch)

    def _reserve(self, keys: Sequence[BlockKey], start: int, end: int) -> tuple[int, Sequence[int]]:
        """(first block, slots) for those of blocks [start, end) that are new and have room."""
        with self._lock:
            begin = self._index.known_prefix(keys)
            if not start <= begin < end:
                return begin, ()
            end = min(end, begin + self._index.reservable(keys[begin - 1] if begin else ROOT))
            reservation = self._index.reserve(keys, begin, end)
            if reservation is None:
                return begin, ()
            self._content.count(evicted=len(reservation.evicted))
            return begin, reservation.slots

    def put_each(self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], epoch: Epoch) -> None:
        """Store what is new of these loose blocks, as far as there is room. Nothing while the slab is `reading`."""
        if self.reading:
            return
        numbers, slots = list[int](), list[int]()
        with self._lock:
            for key in filter(self._index.__contains__, keys):
                self._index.touch(key)  # so that it does not make room for the others
            for number, key in enumerate(keys):
                if key not in self._index and (reservation := self._index.reserve([key], 0, 1)) is not None:
                    self._content.count(evicted=len(reservation.evicted))
                    numbers.append(number)
                    slots += reservation.slots
        self._write([Block(keys[number]) for number in numbers], slots, [buffers[number] for number in numbers], epoch)

    def _write(
        self, blocks: Sequence[Block], slots: Sequence[int], buffers: Sequence[BlockBuffer], epoch: Epoch
    ) -> None:
        """Store blocks whose `slots` are reserved; of those that cannot be stored the slots become free again."""
        stored = 0
        try:
            stored = self._store(blocks, slots[: self.size.backed(slots)], buffers, epoch)
        except OSError as error:
            self._content.note_write_failed(error)
        finally:
            if stored < len(slots):
                self._abandon(slots[stored:])

    def _store(
        self, blocks: Sequence[Block], slots: Sequence[int], buffers: Sequence[BlockBuffer], epoch: Epoch
    ) -> int:
        """Write `blocks[i]` to `slots[i]` and index it; return the number of leading blocks written.

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
                self._content.note_write_failed(error)
                return False
            digests.update((slots[index], payload_digest(buffers[index])) for index in range(first, end))
            return True

        self._content.clear_headers(slots)
        on_two_threads(write, groups_of(len(slots), self._slot_bytes))
        written = list(takewhile(digests.__contains__, slots))
        now = time.time()
        headers = {
            slot: RecordHeader(
                self._namespace,
                block.key,
                block.parent,
                block.depth,
                bytes_of(buffer),
                digests[slot],
                now,
                now,
                slot,
                epoch,
                self._run,
            )
            for slot, block, buffer in zip(written, blocks, buffers, strict=False)
        }
        with self._content.header_lock:
            with self._lock:  # a block that was deleted while it was written gets no header
                wanted = [slot for slot in written if self._index.state(slot) == State.RESERVED]
            self.slab.write_headers(wanted, [headers[slot].encode() for slot in wanted])
            with self._lock:
                for slot in written:
                    self._content.note(slot, headers[slot])
                    self._content.used.pop(slot, None)
                self._index.complete(written)
        if len(written) == len(slots):
            self._last_errors.clear("write")
        return len(written)

    def _abandon(self, slots: Sequence[int]) -> None:
        """Free slots whose blocks could not be stored, with all blocks that waited for them (H26)."""

        def change() -> list[tuple[BlockKey, int]]:
            self._content.count(dropped_writes=len(slots))
            return self._index.abandon(slots)

        self._content.lose(change, slots)

    # Removal

    def delete(self, keys: Iterable[BlockKey]) -> int:
        """Drop these blocks and all after them; return how many were dropped. Raises TierError as `Tier.delete`."""
        dropped = self._content.delete(keys)
        self._content.require_no_stale_headers()
        return dropped

    def clear(self) -> None:
        """Drop every block. Raises TierError as `Tier.clear`."""
        self._content.lose(self._index.clear, range(self.slab.slots))  # headers of evicted blocks are still there
        self._content.require_no_stale_headers()

    def refute_run(self) -> None:
        """See `Tier`. A file beside the slabs says it first: after a kill meanwhile the next opening drops the rest."""
        try:
            refute_in(self._directory.path, self._run, self._directory.access)
        except OSError as error:
            raise TierError(f"disk tier: cannot write in {self._directory.path}: {error.strerror}") from None
        self.delete([header.key for header in self.scan() if header.run == self._run])

    def _quarantine(self, key: BlockKey, slot: int, reason: str) -> None:
        """Drop a block that cannot be served and all blocks after it, in memory and on disk (H22)."""

        def change() -> list[tuple[BlockKey, int]]:
            # It may have been dropped meanwhile, and stored again elsewhere.
            lost = self._index.drop(key) if self._index.key_at(slot) == key else []
            self._content.count(damaged=bool(lost))
            return lost

        self._content.lose(change)
        self._last_errors.warn_once(
            f"damaged: {reason}", f"block {key.hex()[:16]} in {self.slab.path} {reason}: dropped, recomputed"
        )

    # Counts and end

    @property
    def held_count(self) -> int:
        """Blocks that may be served."""
        with self._lock:
            return self._index.held_count

    def counts(self) -> TierCounts:
        """What went wrong or was evicted since the slab was opened."""
        return self._content.counts()

    def scan(self) -> Iterator[RecordHeader]:
        """The header of every sound record, in no order."""
        return self._content.scan()

    def check(self) -> None:
        """Verify the index's invariants, for tests. Raises PactViolation."""
        with self._lock:
            self._index.check()

    def persist_use(self) -> None:
        """Store when blocks were last used. A kill loses these times."""
        self._content.persist_use()
