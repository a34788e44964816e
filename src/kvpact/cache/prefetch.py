"""Moves whole slots between the arena and the tiers below it: fetches ahead of a promise, writes behind a save.

Owns which slots are being filled from a tier and which are being written to one, the pins that keep them meanwhile, and
what is known of blocks in shared tiers. Decides nothing about requests; runs on the scheduler's thread and only hands
work to the tiers' own threads.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

from kvpact.identity.epochs import FIRST_EPOCH, Epoch
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import ROOT, BlockIndex, Pin
from kvpact.memory.arena import Arena
from kvpact.metrics import Metrics, TierName
from kvpact.tiers.client import Deleted, LentSlots, TierClient
from kvpact.tiers.executor import GetDone, LookupDone, OpId, PutDone, TierExecutor

logger = logging.getLogger(__name__)

FETCH_BYTES = 16 << 20
"""Bytes of one read request: small enough that a deadline finds part of the blocks there, large enough for the disk."""

WRITE_BYTES = 128 << 20
"""Bytes of one write request: each costs the scheduler's thread a wake-up, and nobody waits for its end."""

POLL_SECONDS = 0.2e-3
"""So much of a scheduler step may go into taking in what the tiers have finished; a step gets 1 ms in all (P11)."""

ASK_AGAIN_SECONDS = 60.0
"""What a shared tier was found to hold is believed for so long: others may evict, delete, or restart it (H46)."""

REFUTED_SECONDS = 5.0
"""A block that a tier said it holds and did not deliver is not read from it again for so long: others may have it."""

KNOWN_SHARE = 2
"""For each slot of the arena, so many blocks are remembered as stored in a shared tier, or as seen once: what is
written comes from the arena."""


@dataclass(frozen=True, slots=True)
class PrefetchOp:
    """Blocks on their way from a tier into reserved slots; `pin` keeps the chain before them."""

    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]
    pin: Pin


@dataclass(frozen=True, slots=True)
class WriteBackOp:
    """Blocks on their way to a tier; `pin` keeps them and the chain before them."""

    keys: tuple[BlockKey, ...]
    pin: Pin
    epoch: Epoch


@dataclass(eq=False, slots=True)
class TierLookup:
    """One request's question to the shared tiers: how many of `keys` each holds in a row."""

    keys: Sequence[BlockKey]
    waiting: dict[Source, OpId] = field(default_factory=dict)
    held: dict[Source, int] = field(default_factory=dict)

    @property
    def answered(self) -> bool:
        """Whether every tier that was asked has answered, or none was."""
        return not self.waiting


class LRUKeySet:
    """Block keys and when each was last added; forgets the oldest beyond `most`."""

    __slots__ = ("_keys", "_most")

    def __init__(self, most: int) -> None:
        self._keys: OrderedDict[BlockKey, float] = OrderedDict()  # a plain dict forgets its first in O(n)
        self._most = most

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._keys)

    def added_since(self, key: BlockKey, time: float) -> bool:
        """Whether `key` was added at `time` or later."""
        return self._keys.get(key, -inf) >= time

    def add(self, keys: Sequence[BlockKey], now: float = 0.0) -> None:
        """These are the newest now."""
        for key in keys:
            self._keys[key] = now
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """These are not known any more."""
        for key in keys:
            self._keys.pop(key, None)

    def discard_older(self, time: float) -> None:
        """What was added before `time` is not known any more; each call takes the oldest ones only."""
        while self._keys and next(iter(self._keys.values())) < time:
            self._keys.popitem(last=False)

    def first_of(self, keys: Sequence[BlockKey], end: int) -> int:
        """The position of the first of `keys[:end]` that is known, else `end`."""
        return next((at for at in range(end) if keys[at] in self._keys), end) if self._keys else end


@dataclass(eq=False, slots=True)
class Source:
    """A tier below the arena, with what is known of the blocks in it."""

    client: TierClient
    known: LRUKeySet
    """What a shared tier was found to hold, and when. It may have evicted it since: then the next look-up tells."""
    offered_again: LRUKeySet
    """Chains that it should have, and was offered once more; see `Staging.lacks`."""
    refuted: LRUKeySet
    """What it said it holds and did not deliver; see `REFUTED_SECONDS`."""
    unshareable: LRUKeySet
    """What was written to a shared tier under a drawn epoch, to be deleted when the engine ends."""
    writing: set[BlockKey] = field(default_factory=set)

    @property
    def name(self) -> TierName:
        """The tier's name in metrics."""
        return self.client.name

    @property
    def shared(self) -> bool:
        """Whether others write and evict there."""
        return self.client.shared

    def first_to_write(self, keys: Sequence[BlockKey], now: float) -> int:
        """The first block of `keys` that is neither held, as far as is known, nor being written."""
        start = 0 if self.shared else self.client.held(keys, now)
        while start < len(keys) and (keys[start] in self.writing or (self.shared and self.believes(keys[start], now))):
            start += 1
        return start

    def readable(self, keys: Sequence[BlockKey], inquest: TierLookup | None, now: float) -> int:
        """How many of `keys` in a row can be read from it; of a shared tier, if `inquest` has found that out."""
        if self.shared:
            held = inquest.held.get(self, 0) if inquest is not None else 0
            held = self.client.readable(keys, min(held, len(keys)), now)
        else:
            held = self.client.held(keys, now)
        self.refuted.discard_older(now - REFUTED_SECONDS)
        return self.refuted.first_of(keys, held)

    def believes(self, key: BlockKey, now: float) -> bool:
        """Whether a shared tier was found to hold this block not long ago."""
        return self.known.added_since(key, now - ASK_AGAIN_SECONDS)


class Staging:
    """The traffic between one arena and the tiers below it."""

    def __init__(
        self,
        index: BlockIndex,
        arena: Arena,
        queues: Sequence[TierExecutor],
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        timeout: float = 2.0,
        second_use: bool = False,
        share_drawn_epochs: bool = False,
    ) -> None:
        """A tier that takes longer than `timeout` seconds over one operation has failed it.

        With `share_drawn_epochs` shared tiers are written under epochs that no other engine can have, until `close`.
        With `second_use`, a block is written to the tiers when it is saved or loaded for the second time.
        """
        self._index = index
        self._arena = arena
        self._metrics = metrics
        self._clock = clock
        self._timeout = timeout
        self._lent = LentSlots(arena.num_slots)
        most = KNOWN_SHARE * arena.num_slots
        self._seen_once = LRUKeySet(most) if second_use else None
        self._share_drawn_epochs = share_drawn_epochs
        self._sources: list[Source] = []
        self._shared: list[Source] = []
        self.open(queues)
        self.news = 0
        """What the tiers have finished so far: while it stays, nothing is found or arrives."""
        self._polled = 0.0
        """Seconds of the running step that `poll` took."""
        self._tickets = count(1)
        self._lookups: dict[OpId, TierLookup] = {}
        self._fetches: dict[OpId, PrefetchOp] = {}
        self._filling: set[int] = set()
        self._writes: dict[OpId, WriteBackOp] = {}
        self._fetch_blocks = max(1, FETCH_BYTES // arena.slot_bytes)
        self._write_blocks = max(1, min(WRITE_BYTES // arena.slot_bytes, arena.num_slots // 2))

    def open(self, queues: Sequence[TierExecutor]) -> None:
        """These tiers, in the user's order, are below the arena from now on. Said once."""
        most = KNOWN_SHARE * self._arena.num_slots
        for queue in queues:
            client = TierClient(
                queue,
                self._lent,
                timeout=self._timeout,
                clock=self._clock,
                metrics=self._metrics,
                max_deleted_keys=2 * most,
            )
            known, offered_again, refuted, unshareable = (LRUKeySet(most) for _ in range(4))
            self._sources.append(Source(client, known, offered_again, refuted, unshareable))
        self._shared = [source for source in self._sources if source.shared]

    # Finding

    @property
    def has_others(self) -> bool:
        """Whether what one tier does not deliver may be in another one."""
        return len(self._sources) > 1

    @property
    def has_shared(self) -> bool:
        """Whether there are tiers that must be asked what they hold."""
        return bool(self._shared)

    def ask(self, keys: Sequence[BlockKey]) -> TierLookup:
        """Begin to find out what the shared tiers hold of `keys`.

        An ill tier is asked now and then, to see whether it is well; nobody waits for that beside one that is well.
        """
        inquest, now = TierLookup(keys), self._clock()
        tries: dict[Source, OpId] = {}
        for source in self._shared:
            op_id, is_try = next(self._tickets), source.client.is_open
            if source.client.submit_lookup(op_id, keys, now):
                self._lookups[op_id] = inquest
                (tries if is_try else inquest.waiting)[source] = op_id
            else:
                self._metrics.add("skipped_lookups", label=source.name)
        inquest.waiting = inquest.waiting or tries
        return inquest

    def give_up(self, inquest: TierLookup, *, late: bool) -> None:
        """Nobody waits for the answers that are missing; if they are `late`, it is the tiers' fault."""
        for source, op_id in inquest.waiting.items():
            source.client.give_up(op_id, late=late)
        inquest.waiting.clear()

    def find(self, keys: Sequence[BlockKey], inquest: TierLookup | None = None) -> int:
        """How many blocks of `keys` are held in a row by the tier that has most. Memory only; nothing is waited for."""
        now = self._clock()
        return max((source.readable(keys, inquest, now) for source in self._sources), default=0)

    def seconds_to_load(
        self, keys: Sequence[BlockKey], start: int, end: int, inquest: TierLookup | None
    ) -> float | None:
        """How long blocks [start, end) should take to arrive; None if that is not known."""
        seconds, now = 0.0, self._clock()
        for source in self._sources:
            blocks = max(0, min(end, source.readable(keys, inquest, now)) - start)
            if not blocks:
                continue
            needed = source.client.costs.seconds_for(blocks * self._arena.slot_bytes, now)
            if needed is None:
                return None
            seconds += needed
            start += blocks
        return seconds

    @property
    def lookup_seconds(self) -> float:
        """How long the quickest shared tier takes to say what it holds; 0 if that is not known."""
        return min((source.client.costs.lookup_seconds for source in self._shared), default=0.0)

    # Fetching

    def fetch(self, keys: Sequence[BlockKey], end: int, inquest: TierLookup | None = None) -> int:
        """Begin to bring `keys[:end]` into the arena; return up to which block they are there or on their way.

        Each block comes from the first tier in the user's order that holds it. Only what no other request is fetching
        is read: one read a block, however many wait for it. The answer is smaller than `end` if there is no room.
        """
        known = self._index.known_prefix(keys[:end])
        now = self._clock()
        while known < end:
            source, held = self._source_of(keys[:end], known, inquest, now)
            if source is None:
                break
            parent = keys[known - 1] if known else ROOT
            room = min(self._fetch_blocks, source.client.room, self._index.reservable(parent))
            stop = min(held, known + room)
            reservation = self._index.reserve(keys, known, stop) if stop > known else None
            if reservation is None:
                break
            self._metrics.add("evicted_blocks", len(reservation.evicted), TierName.MEMORY)
            op_id = next(self._tickets)
            views = [self._arena.slot_views(slot) for slot in reservation.slots]
            if not source.client.submit_get(op_id, keys[:stop], known, views, now):
                self._index.abandon(reservation.slots)
                break
            run = tuple(keys[known:stop])
            self._fetches[op_id] = PrefetchOp(run, reservation.slots, self._index.pin(run[-1]))
            self._filling.update(reservation.slots)
            known = stop
        return known

    def _source_of(
        self, keys: Sequence[BlockKey], block: int, inquest: TierLookup | None, now: float
    ) -> tuple[Source | None, int]:
        """The first tier that holds `block` of `keys` and all before it, and up to where it goes on."""
        for source in self._sources:
            if (held := source.readable(keys, inquest, now)) > block:
                return source, held
        return None, 0

    def is_arriving(self, key: BlockKey) -> bool:
        """Whether `key` is being read from a tier at this moment."""
        return key in self._index and self._index.slot(key) in self._filling

    # Writing

    def shares(self, epoch: Epoch) -> bool:
        """Whether shared tiers may hold blocks of this epoch: of a drawn one only if the user wants that."""
        return self._share_drawn_epochs or not epoch.is_drawn

    def lacks(self, keys: Sequence[BlockKey], epoch: Epoch) -> bool:
        """Whether a tier may have lost `keys`, which are held in the arena: then they should be offered to it again.

        Asked when the blocks are used; of a chain the answer is "yes" once in `ASK_AGAIN_SECONDS` at most.
        """
        now, last, found = self._clock(), keys[-1], False
        for source in self._shared if self.shares(epoch) else ():
            known = source.believes(last, now) or last in source.writing
            if not known and source.client.may_write:
                offered = source.offered_again.added_since(last, now - ASK_AGAIN_SECONDS)
                source.offered_again.add((last,), now)
                found |= not offered
        return found

    @property
    def has_room(self) -> bool:
        """Whether every tier would take a write of `WRITE_BYTES` now."""
        return all(source.client.executor.has_room(WRITE_BYTES) for source in self._sources)

    def write_behind(self, keys: Sequence[BlockKey], end: int, epoch: Epoch = FIRST_EPOCH) -> None:
        """Have every tier store what it lacks of `keys[:end]`, blocks of `epoch` that are all held in the arena.

        A write that finds its tier's queue full, or its tier ill, is dropped, with all that it held (H52).
        """
        keys = keys[:end]
        if self._seen_once is not None:
            admitted = next((at for at, key in enumerate(keys) if key not in self._seen_once), end)
            self._seen_once.add(keys)
            keys = keys[:admitted]
        now = self._clock()
        for source in self._sources:
            if source.shared and not self.shares(epoch):
                continue
            start = source.first_to_write(keys, now)
            if start < len(keys) and not source.client.may_write:
                self._metrics.add("dropped_writes", len(keys) - start, source.name)
                continue
            self._write(source, keys, start, epoch)

    def _write(self, source: Source, keys: Sequence[BlockKey], start: int, epoch: Epoch) -> None:
        while start < len(keys):
            stop = min(len(keys), start + self._write_blocks)
            run = tuple(keys[start:stop])
            op_id = next(self._tickets)
            self._writes[op_id] = WriteBackOp(run, self._index.pin(run[-1]), epoch)
            source.writing.update(run)
            buffers = [self._arena.slot_views(slot) for slot in self._index.slots_of(run)]
            nbytes = len(run) * self._arena.slot_bytes
            if not source.client.submit_put(op_id, keys[:stop], start, buffers, nbytes, epoch):
                self._end_write(op_id, source)
                self._metrics.add("dropped_writes", len(keys) - start, source.name)
                break
            start = stop

    # What became of it

    @property
    def has_news(self) -> bool:
        """Whether `poll` would take in anything now."""
        return self._polled < POLL_SECONDS and any(source.client.has_completions for source in self._sources)

    def poll(self) -> None:
        """Take in what the tiers' threads have finished since the last call, for `POLL_SECONDS` of a step at most."""
        if self._polled < POLL_SECONDS:
            self._take(POLL_SECONDS - self._polled)

    def end_step(self) -> None:
        """The scheduler's step is over: what it had no time for is taken in by the next one."""
        self._polled = 0.0

    def _take(self, seconds: float) -> None:
        began = now = self._clock()
        finished = [(source, source.client.poll()) for source in self._sources if source.client.has_completions]
        while finished and now - began < seconds:
            source, its = finished.pop(0)  # each in its turn, so that none waits for the others for ever
            if (done := next(its, None)) is not None:
                finished.append((source, its))
                self.news += 1
                self._end(done, source, now)
                now = self._clock()
        for source in self._sources:
            source.client.check(now)
        self._polled += now - began

    def _end(self, done: LookupDone | GetDone | PutDone | Deleted, source: Source, now: float) -> None:
        if isinstance(done, LookupDone):
            self._end_lookup(done, source, now)
        elif isinstance(done, GetDone):
            self._end_fetch(done, source, now)
        elif isinstance(done, Deleted):
            source.known.discard(done.keys)
        else:
            self._count_write(source, self._end_write(done.op_id, source), done)

    def _end_lookup(self, done: LookupDone, source: Source, now: float) -> None:
        inquest = self._lookups.pop(done.op_id)
        if done.ok and done.seconds:
            source.known.add(inquest.keys[: done.held], now)
            source.known.discard(inquest.keys[done.held :])
        if inquest.waiting.pop(source, None) is not None:
            inquest.held[source] = done.held

    def _end_fetch(self, done: GetDone, source: Source, now: float) -> None:
        fetch = self._fetches.pop(done.op_id)
        self._filling.difference_update(fetch.slots)
        self._index.complete(fetch.slots[: done.arrived])
        self._index.abandon(fetch.slots[done.arrived :])
        self._index.unpin(fetch.pin)
        source.known.discard(fetch.keys[done.arrived :])
        if done.seconds and self.has_others:
            source.refuted.add(fetch.keys[done.arrived : done.arrived + 1], now)
        nbytes = done.arrived * self._arena.slot_bytes
        self._metrics.add("read_blocks", done.arrived, source.name)
        self._metrics.add("read_bytes", nbytes, source.name)

    def _end_write(self, op_id: OpId, source: Source) -> WriteBackOp:
        write = self._writes.pop(op_id)
        source.writing.difference_update(write.keys)
        self._index.unpin(write.pin)
        return write

    def _count_write(self, source: Source, write: WriteBackOp, done: PutDone) -> None:
        if source.shared:
            source.known.add(write.keys[: done.stored], self._clock())
            source.known.discard(write.keys[done.stored :])
            if write.epoch.is_drawn:
                source.unshareable.add(write.keys[: done.stored])
        source.refuted.discard(write.keys[: done.stored])
        self._metrics.add("written_blocks", done.stored, source.name)
        self._metrics.add("written_bytes", done.stored * self._arena.slot_bytes, source.name)
        self._metrics.add("dropped_writes", len(write.keys) - done.stored, source.name)

    # Losing

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Have every tier drop these blocks and all that need them: a load of them failed. None is held from now on."""
        for source in self._sources:
            source.known.discard(keys)
            source.client.delete(keys)

    # What workers read by themselves

    @property
    def shared_tiers(self) -> list[int]:
        """The positions of the shared tiers among those that this was made with."""
        return [at for at, source in enumerate(self._sources) if source.shared]

    def readable_elsewhere(self, keys: Sequence[BlockKey]) -> int:
        """How many of `keys` in a row workers may read by themselves: a tier would still give what it is to forget."""
        now = self._clock()
        return min((source.client.readable(keys, len(keys), now) for source in self._shared), default=0)

    def note_read_elsewhere(self, tier: int, keys: Sequence[BlockKey]) -> None:
        """A worker has read blocks from the tier at this position: count them, and do not write them there again."""
        source = self._sources[tier]
        source.known.add(keys, self._clock())
        self._metrics.add("read_blocks", len(keys), source.name)
        self._metrics.add("read_bytes", len(keys) * self._arena.slot_bytes, source.name)

    # Telling

    @property
    def pending(self) -> int:
        """Look-ups, reads and writes that have not ended."""
        return len(self._lookups) + len(self._fetches) + len(self._writes)

    def observe(self) -> None:
        """Bring the tiers' gauges and totals up to date; tiers of one kind share their series."""
        for name in {source.name for source in self._sources}:
            sources = [source for source in self._sources if source.name == name]
            capacities = [source.client.capacity() for source in sources]
            counts = [source.client.counts() for source in sources]
            slots = sum(capacity.capacity_bytes for capacity in capacities) // self._arena.slot_bytes
            self._metrics.set("capacity_blocks", slots, name)
            self._metrics.set("held_blocks", sum(capacity.blocks for capacity in capacities), name)
            self._metrics.set("used_bytes", sum(capacity.used_bytes for capacity in capacities), name)
            self._metrics.set(
                "queued_write_bytes", sum(source.client.executor.pending_write_bytes for source in sources), name
            )
            self._metrics.set("open_breakers", sum(source.client.is_open for source in sources), name)
            self._metrics.set("lookup_seconds", max(source.client.costs.lookup_seconds for source in sources), name)
            self._metrics.set(
                "read_bytes_per_second", max(source.client.costs.bytes_per_second for source in sources), name
            )
            self._metrics.raise_to("damaged_records", sum(count.damaged for count in counts), name)
            self._metrics.raise_to("evicted_blocks", sum(count.evicted for count in counts), name)

    def close(self, timeout: float) -> bool:
        """Flush what is queued, at most `timeout` seconds over all tiers, and close them; whether all was flushed.

        What lies in shared tiers under drawn epochs is deleted: nobody can ask for it any more.
        """
        for source in self._shared:
            if keys := [*source.unshareable]:
                source.client.delete(keys)
        share = timeout / max(1, len(self._sources))
        flushed = [source.client.close(share) for source in self._sources]
        self._take(inf)
        for source in self._sources:
            if undeleted := source.client.undeleted:
                logger.warning("kvpact: %d blocks are still in the %s tier that it should drop", undeleted, source.name)
        return all(flushed)
