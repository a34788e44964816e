"""Moves whole slots between the arena and the tiers below it: fetches ahead of a promise, writes behind a save.

Owns which slots are being filled from a tier and which are being written to one, and the pins that keep them meanwhile.
Decides nothing about requests; runs on the scheduler's thread and only hands work to the tiers' own threads. Floor 2.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from kvpact.arena import Arena
from kvpact.blocks import BlockKey
from kvpact.index import ROOT, BlockIndex, Pin
from kvpact.metrics import Metrics, TierName
from kvpact.tiers.base import Tier
from kvpact.tiers.queue import GetDone, PutDone, Ticket, TierQueue

logger = logging.getLogger(__name__)

FETCH_BYTES = 16 << 20
"""Bytes of one read request: small enough that a deadline finds part of the blocks there, large enough for the disk."""

WRITE_BYTES = 128 << 20
"""Bytes of one write request: each costs the scheduler's thread a wake-up, and nobody waits for its end."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Blocks on their way from a tier into reserved slots; `pin` keeps the chain before them."""

    slots: tuple[int, ...]
    pin: Pin


@dataclass(frozen=True, slots=True)
class Write:
    """Blocks on their way to a tier; `pin` keeps them and the chain before them."""

    keys: tuple[BlockKey, ...]
    pin: Pin


class Staging:
    """The traffic between one arena and the tiers below it."""

    def __init__(self, index: BlockIndex, arena: Arena, queues: Sequence[TierQueue], metrics: Metrics) -> None:
        self._index = index
        self._arena = arena
        self._queues = list(queues)
        self._metrics = metrics
        self._tickets = count(1)
        self._fetches: dict[Ticket, Fetch] = {}
        self._filling: set[int] = set()
        self._writes: dict[Ticket, Write] = {}
        self._writing: list[set[BlockKey]] = [set() for _ in queues]
        self._clearing: set[Tier] = set()
        self._deleting: dict[Tier, set[BlockKey]] = {queue.tier: set() for queue in queues}
        self._fetch_blocks = max(1, FETCH_BYTES // arena.slot_bytes)
        self._write_blocks = max(1, WRITE_BYTES // arena.slot_bytes)

    def find(self, keys: Sequence[BlockKey]) -> int:
        """How many blocks of `keys` the best tier holds in a row from the first. Memory only; nothing is waited for."""
        return max((self._held_by(queue, keys) for queue in self._queues if queue.tier.exclusive), default=0)

    def _held_by(self, queue: TierQueue, keys: Sequence[BlockKey]) -> int:
        """What is about to be deleted, or cleared, is not held any more, however long the tier takes to hear of it."""
        if queue.tier in self._clearing:
            return 0
        held = queue.tier.lookup(keys)
        deleting = self._deleting[queue.tier]
        return next((block for block in range(held) if keys[block] in deleting), held) if deleting else held

    def fetch(self, keys: Sequence[BlockKey], end: int) -> int:
        """Begin to bring `keys[:end]` into the arena; return up to which block they are there or on their way.

        Only what no other request is fetching is read: one read a block, however many wait for it. The answer is
        smaller than `end` if the arena has no room.
        """
        known = self._index.known_prefix(keys[:end])
        while known < end:
            parent = keys[known - 1] if known else ROOT
            stop = min(end, known + self._fetch_blocks, known + self._index.reservable(parent))
            reservation = self._index.reserve(keys, known, stop) if stop > known else None
            if reservation is None:
                break
            self._metrics.add("evicted_blocks", len(reservation.evicted), TierName.MEMORY)
            queue = max((q for q in self._queues if q.tier.exclusive), key=lambda q: self._held_by(q, keys[:stop]))
            ticket = next(self._tickets)
            self._fetches[ticket] = Fetch(reservation.slots, self._index.pin(keys[stop - 1]))
            self._filling.update(reservation.slots)
            queue.submit_get(ticket, keys[:stop], known, [self._arena.slot_views(slot) for slot in reservation.slots])
            known = stop
        return known

    def is_arriving(self, key: BlockKey) -> bool:
        """Whether `key` is being read from a tier at this moment."""
        return key in self._index and self._index.slot(key) in self._filling

    def write_behind(self, keys: Sequence[BlockKey], end: int) -> None:
        """Have every tier store what it lacks of `keys[:end]`, all of which are held in the arena.

        A write that finds its tier's queue full is dropped, with all that it held (H52).
        """
        for queue, writing in zip(self._queues, self._writing, strict=True):
            start = self._held_by(queue, keys[:end])
            while start < end and keys[start] in writing:
                start += 1
            while start < end:
                stop = min(end, start + self._write_blocks)
                run = tuple(keys[start:stop])
                ticket = next(self._tickets)
                self._writes[ticket] = Write(run, self._index.pin(run[-1]))
                writing.update(run)
                buffers = [self._arena.slot_views(slot) for slot in self._index.slots_of(run)]
                if not queue.submit_put(ticket, keys[:stop], start, buffers, len(run) * self._arena.slot_bytes):
                    self._end_write(ticket, writing)
                    self._metrics.add("dropped_writes", end - start, TierName(queue.tier.name))
                    break
                start = stop

    def poll(self) -> None:
        """Take in what the tiers' threads have finished since the last call."""
        for queue, writing in zip(self._queues, self._writing, strict=True):
            for done in queue.poll():
                if isinstance(done, GetDone):
                    self._end_fetch(done, TierName(queue.tier.name))
                elif isinstance(done, PutDone):
                    blocks = len(self._writes[done.ticket].keys)
                    self._end_write(done.ticket, writing)
                    self._metrics.add("written_blocks", done.stored, TierName(queue.tier.name))
                    self._metrics.add("written_bytes", done.stored * self._arena.slot_bytes, TierName(queue.tier.name))
                    self._metrics.add("dropped_writes", blocks - done.stored, TierName(queue.tier.name))

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Have every tier drop these blocks and all that need them: a load of them failed. None is held from now on."""

        def delete(tier: Tier) -> None:
            tier.delete(keys)
            self._deleting[tier].difference_update(keys)

        for queue in self._queues:
            self._deleting[queue.tier].update(keys)
            queue.submit_errand(delete)

    def clear(self) -> None:
        """Have every tier drop all it holds, what is being written included; it counts as empty from now on."""
        for queue in self._queues:
            self._clearing.add(queue.tier)
            queue.submit_errand(self._clear)

    def _clear(self, tier: Tier) -> None:
        tier.clear()
        self._clearing.discard(tier)

    @property
    def pending(self) -> int:
        """Reads and writes that have not ended."""
        return len(self._fetches) + len(self._writes)

    def observe(self) -> None:
        """Bring the tiers' gauges and totals up to date; tiers of one kind share their series."""
        for name in {TierName(queue.tier.name) for queue in self._queues}:
            queues = [queue for queue in self._queues if queue.tier.name == name]
            capacities = [queue.tier.capacity() for queue in queues]
            counts = [queue.tier.counts() for queue in queues]
            slots = sum(capacity.capacity_bytes for capacity in capacities) // self._arena.slot_bytes
            self._metrics.set("capacity_blocks", slots, name)
            self._metrics.set("held_blocks", sum(capacity.blocks for capacity in capacities), name)
            self._metrics.set("queued_write_bytes", sum(queue.pending_write_bytes for queue in queues), name)
            self._metrics.raise_to("damaged_records", sum(count.damaged for count in counts), name)
            self._metrics.raise_to("evicted_blocks", sum(count.evicted for count in counts), name)

    def close(self, timeout: float) -> bool:
        """Flush what is queued, at most `timeout` seconds over all tiers, and close them; whether all was flushed."""
        share = timeout / max(1, len(self._queues))
        flushed = [queue.close(share) for queue in self._queues]
        self.poll()
        for queue in self._queues:
            queue.tier.close()
        return all(flushed)

    def _end_fetch(self, done: GetDone, tier: TierName) -> None:
        fetch = self._fetches.pop(done.ticket)
        self._filling.difference_update(fetch.slots)
        self._index.complete(fetch.slots[: done.arrived])
        self._index.abandon(fetch.slots[done.arrived :])
        self._index.unpin(fetch.pin)
        self._metrics.add("read_blocks", done.arrived, tier)
        self._metrics.add("read_bytes", done.arrived * self._arena.slot_bytes, tier)

    def _end_write(self, ticket: Ticket, writing: set[BlockKey]) -> None:
        write = self._writes.pop(ticket)
        writing.difference_update(write.keys)
        self._index.unpin(write.pin)
