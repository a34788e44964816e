"""One tier as its users see it: the scheduler, and each worker that reads by itself.

Owns the tier's executor, its health, costs, timeouts, lent slots and pending deletions. Lives on its user's thread,
which never waits for the tier and never sees an exception that the tier raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol, TypeVar

from kvpact.identity.epochs import FIRST_EPOCH, Epoch
from kvpact.identity.keys import BlockKey
from kvpact.index.announced import Announcing, Subscriber
from kvpact.tiers.awaited import AwaitedTier
from kvpact.tiers.base import BlockBuffer, SupportsEvents, SupportsPrefix, Tier, TierCapacity, TierCounts, leading
from kvpact.tiers.costs import TierCosts
from kvpact.tiers.deletions import Deletions
from kvpact.tiers.executor import (
    ControlDone,
    GetDone,
    Job,
    LookupDone,
    OpId,
    PutDone,
    TierExecutor,
    checked_answers,
    checked_count,
)
from kvpact.tiers.health import ClientHealth, Counters
from kvpact.tiers.log_once import LogOnce
from kvpact.tiers.probes import PROBE_SECONDS, Probes
from kvpact.tiers.record import bytes_of

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class Gauges(Protocol):
    """Gauges and totals of a tier."""

    def set(self, name: str, value: float, label: str = "") -> None: ...
    def raise_to(self, name: str, total: int, label: str = "") -> None: ...


class LentSlots:
    """Slots out of `total` that are lent to each tier, and the number that each may still borrow."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._clients: list[TierClient] = []

    def join(self, client: TierClient) -> None:
        """Count the slots lent to `client` from now on."""
        self._clients.append(client)

    def room_for(self, client: TierClient) -> int:
        """Slots that a tier may still borrow: half of what the others leave. Below 0 if it has more than that.

        However many tiers do not answer and keep all the slots they may borrow, some slots stay free.
        """
        others = sum(other.lent for other in self._clients if other is not client)
        return (self._total - others + 1) // 2 - client.lent


@dataclass(frozen=True, slots=True)
class Deleted:
    """The blocks that the tier has dropped as asked; none if it refused."""

    keys: tuple[BlockKey, ...]


class TierClient:
    """One tier. `poll` reports each submitted operation once, under the caller's op id; see `TierExecutor`.

    A tier that fails, raises or does not answer costs its own hits: after several failures in a row it is paused, and
    while the engine computes sooner than it answers it is not asked. `probe` tests both. A slow write is no failure:
    nothing waits for it.
    """

    def __init__(
        self,
        executor: TierExecutor,
        lent: LentSlots,
        *,
        timeout: float,
        clock: Callable[[], float],
        metrics: Counters | None = None,
        max_deleted_keys: int = 0,
        reads_find_out: bool = False,
    ) -> None:
        """A look-up or read without progress for `timeout` seconds has failed.

        With `reads_find_out` blocks are read without a look-up before, so a read of which nothing arrives is a miss.
        Otherwise it is a failure, because the tier said that it holds the blocks.

        At most `max_deleted_keys` pending deletions are kept by key, or `deletions.MIN_DELETED_KEYS` if that is more.
        """
        self.executor = executor
        self.name = executor.label
        self.announcing: Announcing | None = None
        """Announcements of the tier's blocks; None: routers hear nothing of them."""
        self._subscriber: Subscriber | None = None
        self._opened = executor.tier
        """The tier, or who opens it: closed at the end."""
        self._capacity = TierCapacity(0, 0, 0)
        self._counts = TierCounts()
        self._counts_before = TierCounts()
        self._use(self._opened)
        self.use_what_is_there()
        self.costs = TierCosts()
        self._slots = lent
        self._timeout = timeout
        self._clock = clock
        self._metrics = metrics
        self._writes_stuck = False
        self._lent_reads: dict[OpId, int] = {}
        self._block_bytes: dict[OpId, float] = {}
        """Mean bytes of a block of each read."""
        self._lent_writes: dict[OpId, int] = {}
        self.deletions = Deletions(executor, self.name, clock, max_deleted_keys)
        """Blocks that the tier must still delete."""
        self.health = ClientHealth(executor, self.deletions, metrics, reads_find_out=reads_find_out)
        self.probes = Probes(self.health.lookups, self.health.reads, self.costs)
        self._warned = LogOnce(logger)
        lent.join(self)

    def _use(self, tier: Tier) -> None:
        self.tier = tier
        self.executor.use(tier)
        self.shared = not tier.exclusive
        """True if other engines write and evict there, so that only the tier itself knows what it holds."""
        self._leading = tier.leading if isinstance(tier, SupportsPrefix) else lambda keys: leading(tier.lookup(keys))
        self._put_start = tier.put_start if isinstance(tier, SupportsPrefix) else self._leading
        if self._subscriber is not None:
            self.announce_to(self._subscriber)

    def announce_to(self, subscriber: Subscriber) -> None:
        """Tell `subscriber` of the tier's blocks from now on, if the tier knows when it loses one."""
        self._subscriber = subscriber
        if self.announcing is not None:
            self.announcing.withdraw()  # of the tier that was there before
        self.announcing = self.tier.events if isinstance(self.tier, SupportsEvents) else None
        if self.announcing is not None:
            self.announcing.announce_to(subscriber)

    # Health

    def use_what_is_there(self) -> bool:
        """Use an awaited tier that is there from now on, and none that is lost; returns whether anything changed.

        Then nothing that was known of its content holds any more.
        """
        opened = self._opened
        if not isinstance(opened, AwaitedTier):
            return False
        tier = opened.there or opened
        if tier is self.tier:
            return False
        self._counts_before += self._counts
        self._counts = TierCounts()
        self._use(tier)
        return True

    @property
    def lent(self) -> int:
        """Slots that it may keep for long: those of reads and, while a write is overdue, those of writes."""
        return sum(self._lent_reads.values()) + (sum(self._lent_writes.values()) if self._writes_stuck else 0)

    @property
    def room(self) -> int:
        """Number of slots that it may still borrow."""
        return max(0, self._slots.room_for(self))

    def check(self, now: float) -> None:
        """Record timeouts, cancel operations that wait for overdue ones, repeat refused deletions: once a step."""
        overdue = self.executor.overdue(self._timeout)
        for op_id in overdue.reads:
            self._note_timeout(op_id, now)
        self._writes_stuck = overdue.writes
        self.health.note_stuck(overdue.everything)
        if self._writes_stuck:
            self._take_back_writes()
        self.deletions.repeat_if_due(now)

    def _take_back_writes(self) -> None:
        """Cancel the newest writes that have not begun until the tier has no more slots than it may borrow."""
        for op_id in reversed([*self._lent_writes]):
            if self._slots.room_for(self) >= 0:
                break
            if self.executor.cancel(op_id):
                del self._lent_writes[op_id]

    def _note_timeout(self, op_id: OpId, now: float) -> None:
        breaker = self.health.reads if op_id in self._lent_reads else self.health.lookups
        self.health.note_timeout(breaker, op_id, now)

    @property
    def complaint(self) -> str:
        """Troubles of a tier that is asked all the same: too slow, full, read-only; "" if it has none."""
        reason = "" if self.health.is_paused else self.health.reason
        count = len(self.deletions)
        undeleted = f"{count} blocks wait for their deletion and are not read" if count else ""
        return "; ".join(filter(None, (self.probes.slowness, reason, undeleted)))

    # Probing

    def note_too_slow(self, kind: type[LookupDone | GetDone], seconds: float, now: float) -> None:
        """Record that the engine computes a prompt's missing blocks, sooner than such an operation of `seconds`."""
        reason = self.probes.note_too_slow(kind, seconds, now)
        text = "kvpact: the %s tier is too slow for now: %s; tried again every %d s while prompts come"
        self._warned.log("slow", logging.INFO, text, self.name, reason, PROBE_SECONDS)

    def probe(self, keys: Sequence[BlockKey], now: float, *, before: Sequence[BlockKey] | None = None) -> None:
        """Try the tier again with a prompt's `keys`, for which it was not asked, if that is due. Nobody waits for it.

        It looks them up, and if reads are suspect reads those found into memory of its own.
        """
        job = None if self.health.cannot_be_tried else self.probes.begin(keys, now, before)
        if job is not None:
            self.executor.submit(job)

    def _probe_on(self, done: LookupDone | GetDone | PutDone) -> None:
        """End a probe's operation; after its look-up go on with a read, if reads are suspect."""
        job = self.probes.end(done, shared=self.shared)
        if job is not None:
            self._lent_reads[job.op_id] = 0
            self._block_bytes[job.op_id] = bytes_of(job.buffers[0])
            self.executor.submit(job)
            self.executor.flush()

    # Asking

    def held(self, keys: Sequence[BlockKey], now: float) -> int:
        """Number of a prompt's `keys`, from its first block on, that can be read from an exclusive tier."""
        return self.deletions.first_among(keys, self._ask(self._leading, checked_count, keys, 0, now))

    def put_start(self, keys: Sequence[BlockKey], now: float) -> int:
        """Index in a prompt's `keys` of the first block that an exclusive tier should be given."""
        return self.deletions.first_among(keys, self._ask(self._put_start, checked_count, keys, 0, now))

    def has(self, key: BlockKey, now: float) -> bool:
        """True if a block can be read from an exclusive tier."""
        return self.have((key,), now)[0]

    def have(self, keys: Sequence[BlockKey], now: float) -> Sequence[bool]:
        """True for each of these blocks that can be read from an exclusive tier."""
        nothing: Sequence[bool] = [False] * len(keys)
        held = self._ask(self.tier.lookup, checked_answers, keys, nothing, now)
        if not len(self.deletions):
            return held
        return [is_held and key not in self.deletions for key, is_held in zip(keys, held, strict=True)]

    def _ask(
        self,
        question: Callable[[Sequence[BlockKey]], Answer],
        checked: Callable[[Answer, int], Answer],
        keys: Sequence[BlockKey],
        otherwise: Answer,
        now: float,
    ) -> Answer:
        """The tier's answer about `keys`, given on this thread; `otherwise` if it may not be read, or fails."""
        if not self.health.may_read:
            return otherwise
        try:
            answer = checked(question(keys), len(keys))
        except Exception as error:
            text = "tier %s: lookup raised; further ones are not logged"
            self._warned.log("lookup", logging.WARNING, text, self.name, error=error)
            self.health.note_failed(self.health.reads, now, f"its look-up raised {type(error).__name__}")
            return otherwise
        self.health.note_answered()
        return answer

    def readable(self, keys: Sequence[BlockKey], held: int) -> int:
        """Number of leading `keys`, at most `held`, that may be read: none from a pending deletion on."""
        return self.deletions.first_among(keys, held) if self.health.may_read else 0

    def readable_elsewhere(self, keys: Sequence[BlockKey]) -> int:
        """Number of `keys` that may be read by who has opened the tier too, perhaps sooner than here."""
        return self.deletions.first_among(keys, len(keys) if self.health.is_awaited or self.health.may_read else 0)

    def submit_lookup(self, op_id: OpId, keys: Sequence[BlockKey], *, before: Sequence[BlockKey] | None = None) -> bool:
        """Submit a look-up to the executor. Returns False and does nothing if the tier is not asked now."""
        if self.health.lookups.is_open or not self.health.may_read:
            return False
        self.probes.note_asked(LookupDone)
        self.executor.submit(Job(op_id, keys, before=before, kind=LookupDone))
        return True

    def submit_get(
        self,
        op_id: OpId,
        keys: Sequence[BlockKey],
        buffers: Sequence[BlockBuffer],
        *,
        before: Sequence[BlockKey] | None = None,
    ) -> bool:
        """Submit a read of at most `room` blocks. Returns False and does nothing if the tier is not read now."""
        if not self.health.may_read:
            return False
        self.probes.note_asked(GetDone)
        self._lent_reads[op_id] = len(buffers)
        self.probes.note_read(bytes_of(buffers[0]), in_a_row=before is not None)
        self._block_bytes[op_id] = bytes_of(buffers[0]) if before is not None else fmean(map(bytes_of, buffers))
        self.executor.submit(Job(op_id, keys, buffers, before))
        return True

    def submit_put(
        self,
        op_id: OpId,
        keys: Sequence[BlockKey],
        buffers: Sequence[BlockBuffer],
        nbytes: int,
        epoch: Epoch = FIRST_EPOCH,
        *,
        before: Sequence[BlockKey] | None = None,
        depths: Sequence[int] = (),
    ) -> bool:
        """Submit a write. False if its queue is full, or a write is overdue and this one needs more than `room`."""
        if not self.health.may_write or (self._writes_stuck and len(buffers) > self.room):
            return False
        if not self.executor.submit(Job(op_id, keys, buffers, before, nbytes, PutDone, epoch=epoch, depths=depths)):
            return False
        self._lent_writes[op_id] = len(buffers)
        return True

    def give_up(self, op_id: OpId, *, late: bool) -> None:
        """Cancel a look-up or read whose result is no longer needed; if it is `late`, count a failure."""
        if late:
            self._note_timeout(op_id, self._clock())
        self.executor.cancel(op_id)

    def poll(self) -> Iterator[LookupDone | GetDone | PutDone | Deleted]:
        """Operations that have ended. Those that the caller does not consume stay for a later call. Never waits."""
        for done in self.executor.poll():
            if isinstance(done, ControlDone):
                keys = self.deletions.end(done)
                self.health.log_pause()
                yield Deleted(keys)
            elif done.op_id in self.probes:
                self._probe_on(done)
                self._note(done, self._clock())
            else:
                self._note(done, self._clock())
                yield done

    def _note(self, done: LookupDone | GetDone | PutDone, now: float) -> None:
        self.health.note_done(done, now)
        if isinstance(done, LookupDone):
            if done.ok and done.seconds:
                self.costs.note_lookup(done.seconds)
                if self._metrics is not None:
                    self._metrics.observe("lookup_seconds", done.seconds, self.name)
        elif isinstance(done, GetDone):
            nbytes = round(sum(done.each) * self._block_bytes.pop(done.op_id))
            if done.seconds and nbytes:
                self.costs.note_read(nbytes, done.seconds)
            self._lent_reads.pop(done.op_id)
        else:
            self._lent_writes.pop(done.op_id, None)

    # Deleting

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Order the tier to drop these blocks and all after them. None of them is read before it has.

        A deletion that the tier refuses, or that raises, is repeated.
        """
        if self.announcing is not None:
            self.announcing.withdraw(keys)
        self.deletions.add(keys)
        self.health.log_pause()

    # Counts and end

    def capacity(self) -> TierCapacity:
        """The tier's capacity; the last known one if it raises."""
        self._capacity = self._warned.contained(f"tier {self.name}: capacity", self.tier.capacity, self._capacity)
        return self._capacity

    def counts(self) -> TierCounts:
        """The tier's counts, with those before it was opened anew; the last known ones if it raises."""
        self._counts = self._warned.contained(f"tier {self.name}: counts", self.tier.counts, self._counts)
        return self._counts_before + self._counts

    def close(self, timeout: float) -> bool:
        """Flush the queue within `timeout` seconds and close the tier; returns whether every operation was done.

        `poll` still reports the submitted operations.
        """
        self.deletions.repeat()
        flushed = self.executor.close(timeout)
        self._warned.contained(f"tier {self.name}: close", self._opened.close, None)
        return flushed


def observe_tier(metrics: Gauges, client: TierClient, block_bytes: int) -> None:
    """Update a tier's gauges and totals."""
    name = client.name
    capacity = client.capacity()
    counts = client.counts()
    if client.health.is_known:
        metrics.set("tier_up", int(not client.health.is_paused), name)
    metrics.set("slow_tiers", int(bool(client.probes.slowness)), name)
    metrics.set("capacity_blocks", capacity.capacity_bytes // block_bytes, name)
    metrics.set("held_blocks", capacity.blocks, name)
    metrics.set("used_bytes", capacity.used_bytes, name)
    metrics.set("queued_write_bytes", client.executor.pending_write_bytes, name)
    metrics.set("read_bytes_per_second", client.costs.bytes_per_second, name)
    metrics.raise_to("damaged_records", counts.damaged, name)
    metrics.raise_to("evicted_blocks", counts.evicted, name)
