"""The blocks in this engine's own slab, found again after a restart.

Owns the reads and writes of its payloads, eviction, and the rule that no unverified block is served. Only this process
writes the slab, so lookups are answered from memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import count, takewhile
from operator import attrgetter
from typing import Final

import numpy as np

from kvpact.errors import TierError
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import Pin, SlotState
from kvpact.index.key_table import NONE, RowArray
from kvpact.tiers.accounts import Accounts
from kvpact.tiers.base import BlockBuffer, Entry, RecordHeader, payload_digest
from kvpact.tiers.disk.reading import Reading
from kvpact.tiers.disk.slab import Slab
from kvpact.tiers.disk.slab_content import SlabContent
from kvpact.tiers.disk.slab_directory import SlabDirectory
from kvpact.tiers.disk.slab_size import SlabSize
from kvpact.tiers.disk.superblock import refute_in
from kvpact.tiers.disk.two_threads import on_two_threads
from kvpact.tiers.record import bytes_of, groups_of, new_run

FIRST_READ_S: Final = 0.5
"""Most seconds that opening a slab reads its header table, some 700,000 blocks; the rest follows."""

FIRST_PIECES: Final = 16
"""Pieces of it, of 4,096 slots each, that it reads however long they take."""

_APART_S: Final = 1e-6
"""Seconds between the uses of two blocks of one call, as they are stored: a clock's time has steps of 0.24 us."""

_depth = attrgetter("depth")


class OwnSlab:
    """The methods have the meaning of those of `Tier`, for this slab alone; `slab` must be open meanwhile."""

    def __init__(self, slab: Slab, directory: SlabDirectory, accounts: Accounts) -> None:
        """Take over an open slab, which may grow to its claim, and read its header table. Raises OSError."""
        self.slab = slab
        self._directory = directory
        self._run = new_run()
        self._namespace = slab.superblock.namespace.digest
        self._accounts = accounts
        self.content = SlabContent(slab, max(1, slab.superblock.slots_in(directory.capacity_bytes)), accounts)
        self._lock = self.content.lock
        self._index = self.content.index
        late = time.monotonic() + FIRST_READ_S
        pieces = count()
        self.content.read_on(lambda: next(pieces) > FIRST_PIECES and time.monotonic() > late)
        self.size = SlabSize(self.content, directory)
        """Number of slots that it has, and may have."""

    # Reads

    def get(self, reading: Reading) -> None:
        """Read those of the missing blocks that the slab has, and verify them."""
        numbers = reading.missing()
        sizes = np.fromiter((bytes_of(reading.buffers[number]) for number in numbers), np.int64, len(numbers))
        with self._lock:
            slots = self._index.held_slots([reading.keys[number] for number in numbers])
            (fit,) = ((slots >= 0) & (self.content.lengths[slots] == sizes)).nonzero()
            numbers = [numbers[index] for index in fit.tolist()]
            slots = slots[fit]
            digests = self.content.digests[slots].tolist()
            keys = [reading.keys[number] for number in numbers]
            pins = self._use(keys, slots)
        at: list[int] = slots.tolist()
        try:
            for index, reason in reading.run(numbers, at, digests, self._read).items() if numbers else ():
                self._quarantine(keys[index], at[index], reason)
        finally:
            with self._lock:
                self._unpin(pins)

    def _use(self, keys: Sequence[BlockKey], slots: RowArray) -> list[Pin]:
        """Keep the blocks `keys` in `slots`, with all before them, and note that they are used; the lock is held.

        The last one counts as used first, so that a prompt's blocks go from its end on. It is kept first, too: then
        those before it, where it needs them, cost nothing.
        """
        ends = self._index.ends(slots).nonzero()[0][::-1].tolist()
        now = self.content.clock.now() / 1e9
        pins = self._index.pin_each([keys[index] for index in ends])
        for pin, index in zip(pins, ends, strict=True):
            self.content.used[pin.slot] = now - index * _APART_S
        return pins

    def _unpin(self, pins: Iterable[Pin]) -> None:
        """The lock is held."""
        for pin in pins:
            self._index.unpin(pin)

    def _read(self, slots: Sequence[int], buffers: Sequence[BlockBuffer]) -> list[bool]:
        """Read slots, as a `ReadSlots`: blocks that are kept stay where they are."""
        count = 0
        with self._accounts.contained("read", f"cannot read {self.slab.path}"):
            count = self.slab.read_payloads(slots, buffers)
            self._accounts.note_works("read")
        return [True] * count

    # Writes

    def put(self, entries: Sequence[Entry]) -> None:
        """Store the new ones of these blocks, as far as there is room. Nothing while its header table is read."""
        dropped = 0
        for _ in range(2):  # again where the file could not grow, since then others are evicted for these
            if self.content.reading:
                return
            self.size.fill_for(len(entries))
            with self._lock:
                blocks, slots = self._reserve(entries)
            backed = self.size.backed(slots)
            dropped = len(slots) - self._write(blocks, slots, backed)
            if backed == len(slots):
                break
        self._accounts.count(dropped_writes=dropped)

    def _reserve(self, entries: Sequence[Entry]) -> tuple[list[Entry], list[int]]:
        """The blocks that are new and have room, and their slots; the lock is held."""
        runs = self._new_runs(entries)
        blocks = list[Entry]()
        slots = list[int]()
        named = [*(run[0].parent for run in runs), *(entry.key for entry in entries)]
        pins = self._index.pin_each([key for key in reversed(named) if key in self._index])
        self._accounts.count(evicted=self._index.make_room(sum(map(len, runs))))
        for run in runs:
            some = run[: self._index.free_slots]
            blocks += some
            slots += self._slots_for(some) if some else ()
        self._unpin(pins)
        for entry in sorted((block for block in blocks if not block.parent), key=_depth, reverse=True):
            self._index.touch(entry.key)
        return blocks, slots

    def _new_runs(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        """The unknown blocks whose parents are here or come before them, in runs of which each needs the one before."""
        runs = list[list[Entry]]()
        coming = set[BlockKey]()
        known: list[int] = self._index.find_each([entry.key for entry in entries]).tolist()
        for entry, slot in zip(entries, known, strict=True):
            if slot != NONE:
                continue
            if runs and entry.parent == runs[-1][-1].key:
                runs[-1].append(entry)
            elif not entry.parent or entry.parent in coming or entry.parent in self._index:
                runs.append([entry])
            else:
                continue
            coming.add(entry.key)
        return runs

    def _slots_for(self, run: Sequence[Entry]) -> Sequence[int]:
        """Reserve free slots for blocks that follow one another."""
        before = [parent] if (parent := run[0].parent) else []
        keys = [*before, *(entry.key for entry in run)]
        reservation = self._index.reserve(keys, len(before), len(keys))
        assert reservation is not None
        return reservation.slots

    def _write(self, blocks: Sequence[Entry], slots: Sequence[int], backed: int) -> int:
        """Store blocks whose `slots` are reserved, of which the file has the first `backed`; returns how many it did.

        The slots of the others become free again, and blocks that waited for them go (H26).
        """
        stored = 0
        try:
            stored = self._store(blocks, slots[:backed])
        except OSError as error:
            self.content.note_write_failed(error)
        finally:
            if stored < len(slots):
                self.content.lose(lambda: self._index.abandon(slots[stored:]), slots[stored:])
        return stored

    def _store(self, blocks: Sequence[Entry], slots: Sequence[int]) -> int:
        """Write `blocks[i]` to `slots[i]` and index it; return the number of leading blocks written.

        Headers are written only before and after all payloads: a header's write waits for all writes under way.
        Raises OSError; then none is indexed.
        """
        if not slots:
            return 0
        buffers = [block.buffer for block in blocks]
        digests: dict[int, bytes] = {}

        def write(first: int, end: int) -> bool:
            try:
                self.slab.write_payloads(slots[first:end], buffers[first:end])
            except OSError as error:
                self.content.note_write_failed(error)
                return False
            digests.update((slots[index], payload_digest(buffers[index])) for index in range(first, end))
            return True

        self.content.clear_headers(slots)
        on_two_threads(write, groups_of(buffers[: len(slots)]))
        written = list(takewhile(digests.__contains__, slots))
        now = self.content.clock.now() / 1e9
        headers = {
            slot: self._header(block, slot, digests[slot], now) for slot, block in zip(written, blocks, strict=False)
        }
        with self.content.header_lock:
            with self._lock:  # a block that was deleted while it was written gets no header
                wanted = [slot for slot in written if self._index.state(slot) == SlotState.RESERVED]
            self.slab.write_headers(wanted, [headers[slot].encode() for slot in wanted])
            with self._lock:
                for slot in written:
                    self.content.note(slot, headers[slot])
                    self.content.used.pop(slot, None)
                self._index.complete(written)
        if len(written) == len(slots):
            self._accounts.note_works("write")
        return len(written)

    def _header(self, block: Entry, slot: int, digest: bytes, now: float) -> RecordHeader:
        """The header of a block that is used `now`. Without a parent the deeper one counts as used earlier."""
        return RecordHeader(
            self._namespace,
            block.key,
            block.parent,
            block.depth,
            bytes_of(block.buffer),
            digest,
            written=time.time(),
            used=now if block.parent else now - block.depth * _APART_S,
            slot=slot,
            epoch=block.epoch,
            run=self._run,
        )

    # Removal

    def delete(self, keys: Iterable[BlockKey]) -> int:
        """Drop these blocks and all after them; return how many were dropped. Raises TierError as `Tier.delete`."""
        dropped = self.content.delete(keys)
        self.content.require_no_stale_headers()
        return dropped

    def clear(self) -> None:
        """Drop every block. Raises TierError as `Tier.clear`."""
        self.content.lose(self._index.clear, range(self.slab.slots))  # headers of evicted blocks are still there
        self.content.require_no_stale_headers()

    def refute_run(self) -> None:
        """Mark this run invalid by a file, then drop it: after a kill the next opening drops the rest."""
        try:
            refute_in(self._directory.path, self._run, self._directory.access)
        except OSError as error:
            raise TierError(f"disk tier: cannot write in {self._directory.path}: {error.strerror}") from None
        self.delete([header.key for header in self.content.scan() if header.run == self._run])

    def _quarantine(self, key: BlockKey, slot: int, reason: str) -> None:
        """Drop a block that cannot be served and all blocks after it, in memory and on disk (H22)."""
        # It may have been dropped meanwhile, and stored again elsewhere.
        if self.content.lose(lambda: self._index.drop(key) if self._index.key_at(slot) == key else []):
            where = f"block {key.hex()[:16]} in {self.slab.path}"
            self._accounts.note_damaged(reason, f"{where} {reason}: dropped, recomputed")
