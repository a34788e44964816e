"""How large this engine's own slab is: it grows when slots are needed, within its limit, and shrinks with that.

Owns the length of the file and which slots may be used. Never reads or writes a record.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Final

from kvpact.errors import TierError, reason_of
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import State
from kvpact.tiers.disk.slab_content import SlabContent
from kvpact.tiers.disk.slab_directory import LOCK_TIMEOUT_S, DirectoryBusy, SlabDirectory

GROWTH_BYTES: Final = 64 << 20
"""The file grows by this much at a time, so that the file system keeps slots contiguous."""

GROWTH_RETRY_S: Final = 10.0
"""A file that could not grow is tried again after this time; until then blocks are evicted for new ones."""

LIMIT_STEP: Final = 512
"""Slots that are given up or taken at once: a lookup waits for that, a few milliseconds."""


class SlabSize:
    """The slots that the file has and those that it may have. Thread-safe."""

    def __init__(self, content: SlabContent, directory: SlabDirectory) -> None:
        self._content = content
        self._accounts = content.accounts
        self._slab = content.slab
        self._index = content.index
        self._directory = directory
        self._lock = threading.Lock()
        self._growth_failed_at = float("-inf")

    def backed(self, slots: Sequence[int]) -> int:
        """Number of leading `slots` that the file has room for, after growing it if needed and possible."""
        needed = max(slots, default=-1) + 1
        if needed > self._slab.slots:
            with self._lock:
                if needed > self._slab.slots and time.monotonic() >= self._growth_failed_at + GROWTH_RETRY_S:
                    self._grow(needed)
        return next((index for index, slot in enumerate(slots) if slot >= self._slab.slots), len(slots))

    def _grow(self, needed: int) -> None:
        """Grow the file to `needed` slots and some more; on failure the next try waits `GROWTH_RETRY_S`.

        Whatever is in the way, the directory's capacity or a limit of the file system, the slots that the file does not
        have are given up until then: blocks are evicted for new ones.
        """
        generous = max(
            needed, min(self._index.usable_slots, self._slab.slots + GROWTH_BYTES // self._slab.superblock.slot_bytes)
        )
        try:
            self._directory.grow(self._slab, needed, generous, LOCK_TIMEOUT_S)
            self._accounts.note_works("room")
        except (OSError, TierError) as error:
            if not isinstance(error, DirectoryBusy):
                self._content.lose(lambda: self._index.withdraw_slots(self._slab.slots))
            if isinstance(error, OSError | DirectoryBusy):
                self._growth_failed_at = time.monotonic()
            kind = "room" if self._slab.slots else "write"
            self._accounts.note_failed(
                kind, f"cannot grow {self._slab.path}: {reason_of(error)}; it serves what it has"
            )

    @property
    def file_bytes(self) -> int:
        """The size of the file."""
        return self._slab.superblock.file_bytes(self._slab.slots)

    def limit(self, file_bytes: int) -> None:
        """Let the file have at most `file_bytes`; blocks that lie beyond are evicted.

        Slots that are being read or written are given back by a later call. Raises OSError.
        """
        slots = min(self._slab.superblock.slots_in(file_bytes), self._index.num_slots)
        with self._lock:
            if time.monotonic() < self._growth_failed_at + GROWTH_RETRY_S:
                slots = min(slots, self._index.usable_slots)
            while slots != (usable := self._index.usable_slots):
                self._change_limit(
                    max(slots, usable - LIMIT_STEP) if slots < usable else min(slots, usable + LIMIT_STEP)
                )
            if slots < self._slab.slots and self._are_free(range(slots, self._slab.slots)):
                self._slab.shrink(slots)
            if self._slab.superblock.claim_bytes != (claim := self._slab.superblock.file_bytes(slots)):
                self._slab.claim(claim, os.getpid())

    def _change_limit(self, slots: int) -> None:
        def change() -> list[tuple[BlockKey, int]]:
            evicted = self._index.withdraw_slots(slots) if slots < self._index.usable_slots else []
            self._index.use_slots(slots)
            return evicted

        self._accounts.count(evicted=self._content.lose(change))

    def _are_free(self, slots: range) -> bool:
        """Whether withdrawn slots are not used any more; without the lock, because no new use begins."""
        return all(self._index.state(slot) == State.FREE for slot in slots)
