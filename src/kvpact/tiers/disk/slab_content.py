"""Content of this engine's own slab: the index in memory and the header table on disk, which change together.

Owns both, the times of last use and the counts. Never moves a payload.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvpact.errors import TierError
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import BlockIndex
from kvpact.index.slot_space import PlainSlots
from kvpact.tiers.accounts import Accounts
from kvpact.tiers.base import HEADER_BYTES, RecordError, RecordHeader
from kvpact.tiers.disk.header_table import judged, occupied, pieces_of
from kvpact.tiers.disk.slab import Slab, digest_table
from kvpact.tiers.use_clock import UseClock

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_PERSIST_S: Final = 1.0

_LATEST_USE: Final = 1e10
"""The year 2286; a header that says more was forged."""

_EXPLAINED: Final = 64
"""Unusable records of one piece of the table whose reasons are looked for."""


READER_WAIT_S: Final = 5e-3
"""Most seconds that a lookup waits for the reader of the header table. A piece of it takes 1 ms, the end of ten million
blocks 0.3 s: no scheduler waits so long (H58)."""


def _trim_heap() -> None:
    """Return freed memory that the C library keeps, up to 80 MB after a large table, to the system."""
    with suppress(OSError, AttributeError):  # another C library than GNU's
        ctypes.CDLL(None).malloc_trim(0)


class SlabContent:
    """The records of an open slab, which only this process writes.

    Two locks: `lock` guards the index and is never held during I/O, so a lookup never waits for the disk.
    `header_lock` is taken before it, and makes a change of the index and of the header table one step.
    """

    def __init__(self, slab: Slab, most_slots: int, accounts: Accounts) -> None:
        """Take over an open slab, which may grow to its claim. `read_on` reads its header table."""
        self.slab = slab
        self.accounts = accounts
        self.lock = threading.Lock()
        self.header_lock = threading.Lock()
        most_slots = max(most_slots, slab.slots)
        # Parked slots have no headers, and are holes of the file, or are to be.
        self.space = PlainSlots(most_slots, max(slab.slots, slab.superblock.slots_in(slab.superblock.claim_bytes)))
        self.index = BlockIndex(most_slots, space=self.space)
        self.digests = digest_table(most_slots)
        """The digest of each slot's payload."""
        self.lengths = np.zeros(most_slots, np.uint32 if slab.superblock.slot_bytes < 1 << 32 else np.uint64)
        """Bytes of each slot's payload."""
        self.clock = UseClock()
        """When blocks are used: after all that the header table says of earlier uses."""
        self.used: dict[int, float] = {}
        """Slot -> when it was read last, where the header on disk does not say so yet."""
        self._useless = 0
        """Records of the header table that could not be used."""
        self._stale_headers: set[int] = set()
        """Slots of dropped blocks whose headers could not be cleared: after a restart those blocks would be back."""
        self.reading = True
        """True while a part of the header table is still to be read. Nothing is written meanwhile."""
        self._pieces = pieces_of(slab)
        self._read_to = 0
        self._deleted: set[BlockKey] = set()
        """Blocks that were deleted before the table was read in full: they may be there still."""
        self.can_punch = False  # whether the file system makes holes in files
        with suppress(OSError):
            slab.punch(slab.slots, 1)  # beyond the end, where nothing is
            self.can_punch = True
        self._restoring = self.index.begin_restore()

    # Records

    def note(self, slot: int, header: RecordHeader) -> None:
        """Record the digest and length of a slot's payload, which a read needs; the lock is held."""
        self.digests[slot] = header.digest
        self.lengths[slot] = header.length

    def leading(self, keys: Sequence[BlockKey]) -> int:
        """Number of leading `keys` that are held; 0 while the table is read and its reader keeps the lock."""
        return self.look(lambda: self.index.held_prefix(keys), 0)

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """True for each of `keys` that is held; none while the table is read and its reader keeps the lock."""
        return self.look(lambda: (self.index.held_slots(keys) >= 0).tolist(), [False] * len(keys))

    def look(self, question: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Answer of the index, asked with its lock, or `otherwise` if the reader of the table keeps that too long."""
        if not self.lock.acquire(timeout=READER_WAIT_S if self.reading else -1):
            return otherwise
        try:
            return question()
        finally:
            self.lock.release()

    # Changes

    def lose(self, change: Callable[[], Sequence[tuple[BlockKey, int]]], more: Iterable[int] = ()) -> int:
        """Call `change` of the index, with both locks; clear the headers of the slots that it returns, and of `more`.

        Returns how many blocks `change` has lost.
        """
        with self.header_lock:
            with self.lock:
                lost = change()
            self._forget_headers({*more, *(slot for _, slot in lost)})
        return len(lost)

    def park(self, slots: int) -> None:
        """Evict until so many slots are free, if possible, and park these. Raises TierError if headers are left."""
        with self.header_lock:
            with self.lock:
                self.accounts.count(evicted=self.index.make_room(slots))
                parked = self.space.park(slots)
            self._forget_headers(parked)
        self.require_no_stale_headers()

    def _forget_headers(self, slots: Iterable[int]) -> None:
        """Clear headers; the header lock is held. Those that fail are tried again with the next ones."""
        self._stale_headers.update(slots)
        try:
            self.slab.clear_headers(sorted(self._stale_headers))
            self._stale_headers.clear()
        except OSError as error:
            self.note_write_failed(error)

    def clear_headers(self, slots: Sequence[int]) -> None:
        """Clear the headers of slots that are to be written. Raises OSError."""
        with self.header_lock:
            self.slab.clear_headers(slots)
            self._stale_headers.difference_update(slots)

    def require_no_stale_headers(self) -> None:
        """Raise TierError if a dropped block would be back after a restart."""
        if self._stale_headers:
            raise TierError(f"disk tier: cannot clear {len(self._stale_headers)} headers in {self.slab.path}")

    # Failures

    def note_read_failed(self, error: OSError) -> None:
        """Record a failed read of the file."""
        self.accounts.note_failed("read", f"cannot read {self.slab.path}: {error.strerror}")

    def note_write_failed(self, error: OSError) -> None:
        """Record a failed write to the file."""
        why = f"cannot write {self.slab.path}: {error.strerror}; those blocks are not kept"
        self.accounts.note_failed("write", why)

    # Opening and closing

    def read_on(self, stopped: Callable[[], bool]) -> None:
        """Read the header table on, piece by piece, until the end or `stopped`. One thread at a time. Raises OSError.

        Payloads are not read (H59). What has been read is served; what has not is unknown, and its slots are not free.
        After an error the next call goes on where this one was.
        """
        while self.reading and not stopped():
            with self.header_lock:  # what is cleared meanwhile must not come back
                try:
                    piece = next(self._pieces, None)
                except OSError:
                    self._pieces = pieces_of(self.slab, self._read_to)
                    raise
                if piece is not None:
                    self._read_piece(*piece)
                    self._read_to = piece[0] + len(piece[1]) // HEADER_BYTES
            if piece is None:
                self._end_reading()
            else:
                time.sleep(0)  # other threads need the interpreter, too

    def _read_piece(self, first: int, table: bytearray) -> None:
        """Enter neighbouring slots, and clear the headers of unusable ones; the header lock is held."""
        headers, valid = judged(self.slab.superblock, first, table)
        valid[max(0, self.slab.slots - first) :] = False
        end = max(first, min(first + len(headers), self.index.usable_slots, self.index.num_slots))
        (good,) = valid[: end - first].nonzero()
        fields = headers[: len(good)] if len(good) == end - first else headers[good]
        with self.lock:
            at = slice(first, end)  # nothing is asked of the other slots there
            self.digests[at] = headers["digest"][: end - first]
            self.lengths[at] = headers["length"][: end - first]
            self._restoring.add(good + first, fields["key"], fields["parent"], fields["used"])
            self.clock.see(int(1e9 * np.fmin(fields["used"], _LATEST_USE).max(initial=0.0)))
            deleted = [lost for key in self._deleted for lost in self.index.drop(key)]
        if deleted:
            self._forget_headers([slot for _, slot in deleted])
        if len(good) < len(headers):
            unusable = self._unusable(first, table, valid)
            self._useless += len(unusable)
            self.accounts.count(damaged=len(unusable))
            self._forget_headers(unusable)

    def _end_reading(self) -> None:
        with self.header_lock:
            with self.lock:
                unusable = self._restoring.settle().tolist()
                deleted = [slot for key in self._deleted for _, slot in self.index.drop(key)]
            self._forget_headers([*unusable, *deleted])
        order = self._restoring.order_of_use()
        with self.header_lock, self.lock:
            self._restoring.end(order)
            # Of a file with holes any free slot may be one.
            if self.can_punch and self.slab.superblock.claim_bytes < self.slab.superblock.file_bytes(self.slab.slots):
                self.space.park(self.index.free_slots)
            self._deleted.clear()
            self.reading = False
        del order
        _trim_heap()
        logger.info(
            "disk tier: %s holds %d blocks (%d records unusable, %d without the block before them)",
            self.slab.path, self.index.held_count, self._useless, len(unusable),
        )  # fmt: skip

    def delete(self, keys: Iterable[BlockKey]) -> int:
        """Drop blocks and all after them, those too that are still to be read; return how many were dropped."""
        doomed = list(keys)
        with self.header_lock:
            if self.reading:
                self._deleted.update(doomed)
        return sum(self.lose(partial(self.index.drop, key)) for key in doomed)

    def _unusable(self, first: int, table: bytearray, valid: NDArray[np.bool_]) -> list[int]:
        """Slots whose headers are neither empty nor valid; the reasons of the first ones are logged."""
        unusable = list[int]()
        for slot, raw in occupied(table, first):
            if valid[slot - first]:
                continue
            unusable.append(slot)
            if len(unusable) > _EXPLAINED:
                continue
            try:
                self.slab.superblock.header(slot, raw)
                raise RecordError("its payload is beyond the end of the file")
            except RecordError as error:
                self.accounts.warn_once(f"damaged: {error}", f"slot {slot} of {self.slab.path}: {error}; dropped")
        return unusable

    def persist_use(self) -> None:
        """Store when blocks were last used, newest first, for at most `_PERSIST_S`. A kill loses these times."""
        deadline = time.monotonic() + _PERSIST_S
        for slot, used in sorted(self.used.items(), key=lambda item: -item[1]):
            if time.monotonic() >= deadline:
                return
            with self.header_lock, suppress(RecordError, OSError):
                header = replace(self.slab.superblock.header(slot, self.slab.read_header(slot)), used=used)
                self.slab.write_headers([slot], [header.encode()])

    def scan(self) -> Iterator[RecordHeader]:
        """The header of every valid record, in no order."""
        try:
            for first, table in pieces_of(self.slab):
                for slot, raw in occupied(table, first):
                    with suppress(RecordError):
                        yield self.slab.superblock.header(slot, raw)
        except OSError as error:
            self.note_read_failed(error)
