"""Size of this engine's own slab: it grows when slots are needed, within its limit, and shrinks with that.

Owns the length of the file, its holes, and which slots may be used. Never reads or writes a record.

When the limit falls, the least recently used blocks are evicted, wherever they lie: their slots are parked, which means
that no block gets them, and become holes of the file. Only then the slab claims less of the directory's capacity, so
other engines never have room that is still taken. A kill in between costs nothing: after it all free slots of a slab
with holes are parked and punched again. A hole is filled before a block is written there, under the directory's lock,
as the file grows.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from kvpact.errors import TierError, reason_of
from kvpact.index.block_index import SlotState
from kvpact.tiers.disk.slab import runs
from kvpact.tiers.disk.slab_content import SlabContent
from kvpact.tiers.disk.slab_directory import LOCK_TIMEOUT_S, DirectoryBusy, SlabDirectory

GROWTH_BYTES: Final = 64 << 20
"""The file grows by this much at a time, so that the file system keeps slots contiguous."""

GROWTH_RETRY_S: Final = 10.0
"""A file that could not grow is tried again after this time; until then blocks are evicted for new ones."""

LIMIT_STEP: Final = 512
"""Slots that are given up or taken at once, and holes made in a turn: a lookup waits for that, a few milliseconds."""


class SlabSize:
    """The slots that the file has and those that it may have. Thread-safe."""

    def __init__(self, content: SlabContent, directory: SlabDirectory) -> None:
        self._content = content
        self._accounts = content.accounts
        self._slab = content.slab
        self._index = content.index
        self._directory = directory
        self._lock = threading.Lock()
        self._failed_at = float("-inf")
        self._limit = 0
        self._parked = content.space.parked
        self._holes = 0  # so many of the parked slots, the first ones, are holes

    def _kept(self) -> int:
        """Slots that the file has or may have: all but the parked ones."""
        return max(self._index.usable_slots, self._slab.slots) - len(self._parked)

    def fill_for(self, blocks: int) -> None:
        """Fill holes of the file if fewer slots are free than `blocks` need, as far as the limit allows."""
        if self._parked:
            with self._lock:
                lacking = min(blocks - self._index.free_slots, len(self._parked), self._limit - self._kept())
                if lacking > 0 and self._holes == len(self._parked):
                    self._grow(self._kept() + lacking, self._fill)

    def _fill(self, slots: int) -> None:
        """Grow the file to `slots` slots, by filling holes. Raises OSError; then they are to be punched again."""
        filled = slots - self._kept()
        self._slab.claim(max(self._slab.superblock.file_bytes(slots), self._slab.taken_bytes()), os.getpid())
        self._holes = min(self._holes, len(self._parked) - filled)
        self._slab.fill(self._parked[-filled:])
        with self._content.lock:
            self._content.space.unpark(filled)

    def backed(self, slots: Sequence[int]) -> int:
        """Number of leading `slots` that the file has room for, after growing it if needed and possible."""
        needed = max(slots, default=-1) + 1
        if needed > self._slab.slots:
            with self._lock:
                due = time.monotonic() >= self._failed_at + GROWTH_RETRY_S
                if needed > self._slab.slots and not self._parked and due:
                    self._grow(needed, self._slab.grow)
        return next((index for index, slot in enumerate(slots) if slot >= self._slab.slots), len(slots))

    def _grow(self, needed: int, grow: Callable[[int], None]) -> None:
        """Grow the file by `grow` to `needed` slots or some more; after a failure not for `GROWTH_RETRY_S`.

        Whatever is in the way, the directory's capacity or a limit of the file system, the slots that the file does not
        have are given up until then: blocks are evicted for new ones.
        """
        ahead = self._slab.slots - len(self._parked) + GROWTH_BYTES // self._slab.superblock.slot_bytes
        generous = max(needed, min(self._index.usable_slots, ahead))
        try:
            self._directory.grow(self._slab, needed, generous, LOCK_TIMEOUT_S, grow)
            self._accounts.note_works("room")
        except (OSError, TierError) as error:
            if not isinstance(error, DirectoryBusy):
                self._content.lose(lambda: self._index.withdraw_slots(self._slab.slots))
            if isinstance(error, OSError | DirectoryBusy):
                self._failed_at = time.monotonic()
                self._limit = 0
            kind = "room" if self._slab.slots else "write"
            self._accounts.note_failed(
                kind, f"cannot grow {self._slab.path}: {reason_of(error)}; it keeps its present size"
            )

    def limit(self, file_bytes: int) -> None:
        """Let the file take at most `file_bytes`. Blocks for which that is too little go, a part of them in each call.

        Slots that are being read or written are given back by a later call. Raises OSError, and TierError where headers
        cannot be cleared.
        """
        slots = min(self._slab.superblock.slots_in(file_bytes), self._index.num_slots)
        with self._lock:
            if time.monotonic() < self._failed_at + GROWTH_RETRY_S:
                slots = min(slots, self._kept())
            self._limit = slots
            by_use = self._content.can_punch and (self._parked or slots < self._slab.slots)
            wanted = self._slab.slots if by_use else slots
            while wanted != (usable := self._index.usable_slots):
                self._change_limit(min(max(wanted, usable - LIMIT_STEP), usable + LIMIT_STEP))
            if by_use:
                self._give_back(self._kept() - slots)
            elif slots < self._slab.slots and self._are_free(range(slots, self._slab.slots)):
                why = "its file system makes no holes in files, so the blocks at its end are evicted, used or not"
                self._accounts.warn_once("holes", f"{self._slab.path} shrinks: {why}")
                self._slab.shrink(slots)
            claim = self._slab.superblock.file_bytes(self._kept())
            if self._holes == len(self._parked) and claim != self._slab.superblock.claim_bytes:
                self._slab.claim(claim, os.getpid())

    def _give_back(self, slots: int) -> None:
        """Make holes of `slots` more slots, of the blocks that were used least recently; a part of it in each turn.

        Punches first what was parked before a failure, or before a restart.
        """
        self._content.park(max(0, min(slots, LIMIT_STEP)))
        for first, count in islice(runs(rows := self._parked[self._holes :]), LIMIT_STEP):
            self._slab.punch(rows[first], count)
            self._holes += count

    def _change_limit(self, slots: int) -> None:
        if slots < self._index.usable_slots:
            self._accounts.count(evicted=self._content.lose(lambda: self._index.withdraw_slots(slots)))
        else:
            with self._content.lock:
                self._index.use_slots(slots)

    def _are_free(self, slots: range) -> bool:
        """True once withdrawn slots are not used any more; without the lock, because no new use begins."""
        return all(self._index.state(slot) == SlotState.FREE for slot in slots)
