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

from kvpact.errors import printable
from kvpact.identity.epochs import FIRST_EPOCH, Epoch
from kvpact.identity.keys import BlockKey
from kvpact.tiers.awaited import AwaitedTier
from kvpact.tiers.base import BlockBuffer, SupportsPrefix, Tier, TierCapacity, TierCounts, leading
from kvpact.tiers.breaker import Breaker
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
from kvpact.tiers.log_once import LogOnce
from kvpact.tiers.probes import PROBE_SECONDS, Probes
from kvpact.tiers.record import bytes_of

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class Counters(Protocol):
    """What a client needs of the metrics."""

    def add(self, name: str, amount: int = 1, label: str = "") -> None: ...
    def observe(self, name: str, seconds: float, label: str = "") -> None: ...


class Gauges(Protocol):
    """What `observe_tier` needs of the metrics."""

    def set(self, name: str, value: float, label: str = "") -> None: ...
    def raise_to(self, name: str, total: int, label: str = "") -> None: ...


class LentSlots:
    """How many of `total` slots are lent to each tier, and how many more each may borrow."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._clients: list[TierClient] = []

    def join(self, client: TierClient) -> None:
        """Count the slots lent to `client` from now on."""
        self._clients.append(client)

    def room_for(self, client: TierClient) -> int:
        """How many more slots a tier may borrow: half of what the others leave. Below 0 if it has more than that.

        However many tiers hang with all the slots they may borrow, some slots stay free.
        """
        others = sum(other.lent for other in self._clients if other is not client)
        return (self._total - others + 1) // 2 - client.lent


@dataclass(frozen=True, slots=True)
class Deleted:
    """The blocks that the tier has dropped as asked; none if it refused."""

    keys: tuple[BlockKey, ...]


class TierClient:
    """One tier. `poll` reports each submitted operation once, under the caller's op id; see `TierExecutor`.

    A tier that fails, raises or hangs costs its own hits: after several failures in a row it is not asked, nor while
    the engine computes sooner than it answers. Look-ups and reads have a breaker each, because a store may do one and
    fail the other. A slow write is no failure: nothing waits for it. What keeps it from being asked is put to the test
    by `probe`.
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
        self.executor, self.name = executor, executor.label
        self._opened = executor.tier
        """What is closed at the end: the tier, or who opens it."""
        self._capacity, self._counts, self._counts_before = TierCapacity(0, 0, 0), TierCounts(), TierCounts()
        self._use(self._opened)
        self.use_what_is_there()
        self.costs = TierCosts()
        self._slots = lent
        self._timeout = timeout
        self._clock = clock
        self._metrics = metrics
        self._reads_find_out = reads_find_out
        self._lookups, self._reads = Breaker(), Breaker()
        self._was_asked = False
        self._probes = Probes(self._lookups, self._reads, self.costs)
        self._was_open = False
        """Whether people were told last that it is left alone."""
        self._stuck = False
        """Whether overdue operations occupy all threads, so that nothing else can begin."""
        self._writes_stuck = False
        self._timed_out: set[OpId] = set()
        """Operations that were counted as failures because they timed out."""
        self._lent_reads: dict[OpId, int] = {}
        self._block_bytes: dict[OpId, float] = {}
        """Mean bytes of a block of each read."""
        self._lent_writes: dict[OpId, int] = {}
        self.deletions = Deletions(executor, self.name, clock, max_deleted_keys)
        """What the tier must still delete."""
        self._warned = LogOnce(logger)
        lent.join(self)

    def _use(self, tier: Tier) -> None:
        self.tier, self.is_awaited = tier, isinstance(tier, AwaitedTier)
        self.executor.use(tier)
        self.shared = not tier.exclusive
        """Whether other engines write and evict there, so that only the tier itself knows what it holds."""
        self._leading = tier.leading if isinstance(tier, SupportsPrefix) else lambda keys: leading(tier.lookup(keys))
        self._put_start = tier.put_start if isinstance(tier, SupportsPrefix) else self._leading

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
    def is_open(self) -> bool:
        """Whether the tier is not asked, except by a probe now and then."""
        return self._lookups.is_open or self._reads.is_open or self._is_out

    @property
    def is_known(self) -> bool:
        """Whether it was asked, or cannot be: before that, `is_open` says nothing of its health."""
        return self._was_asked or self.is_open

    @property
    def trouble(self) -> str:
        """Why it is left alone; "" if it is not."""
        if self.is_awaited:
            return self._health_reason or "it has not answered yet"
        if self.deletions.lost_count:
            return "it does not delete what it must"
        if self._stuck:
            return "operations that do not end occupy all its threads"
        belief = self._lookups.belief or self._reads.belief
        return belief.reason if belief is not None else ""

    @property
    def slowness(self) -> str:
        """Why prompts were computed for which it could be asked; "" if none was since it was asked last."""
        return self._probes.slowness

    @property
    def complaint(self) -> str:
        """Troubles of a tier that is asked all the same: too slow, full, read-only; "" if nothing."""
        undeleted = f"it has not deleted {self.undeleted} blocks that it must, which are not read"
        said = (self.slowness, "" if self.is_open else self._health_reason, undeleted if self.undeleted else "")
        return "; ".join(filter(None, said))

    def doubted_for(self, now: float) -> float:
        """Seconds for which it has been left alone, or too slow; 0 if it is neither."""
        return self._probes.doubted_for(now)

    @property
    def may_read(self) -> bool:
        """Whether the tier may be read for a request."""
        return not (self._is_out or self._reads.is_open)

    @property
    def may_write(self) -> bool:
        """Whether blocks may be written to the tier. Failed reads do not forbid it."""
        return not (self._is_out or self._lookups.is_open)

    @property
    def _is_out(self) -> bool:
        """Whether nothing can be asked of it, a try neither."""
        return self.is_awaited or self._stuck or self.deletions.lost_count

    @property
    def probing(self) -> int:
        """Number of its own probes under way."""
        return len(self._probes)

    @property
    def hangs(self) -> bool:
        """Whether an operation is overdue and has not ended."""
        return bool(self._timed_out)

    @property
    def lent(self) -> int:
        """Slots that it may keep for long: those of reads and, while a write hangs, those of writes."""
        return sum(self._lent_reads.values()) + (sum(self._lent_writes.values()) if self._writes_stuck else 0)

    @property
    def room(self) -> int:
        """How many more slots it may borrow."""
        return max(0, self._slots.room_for(self))

    def check(self, now: float) -> None:
        """Called once a step: record timeouts, cancel what waits for overdue operations, repeat refused deletions."""
        overdue = self.executor.overdue(self._timeout)
        for op_id in overdue.reads:
            self._record_timeout(op_id, now)
        self._writes_stuck = overdue.writes
        if overdue.everything != self._stuck:
            self._stuck = overdue.everything
            self._say_whether_open()
        if self._stuck:
            self.executor.cancel_waiting_reads()
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

    def _record_timeout(self, op_id: OpId, now: float) -> None:
        """Count an overdue operation as one failure."""
        if op_id not in self._timed_out:
            self._timed_out.add(op_id)
            breaker = self._reads if op_id in self._lent_reads else self._lookups
            self._fail(breaker, now, "it does not answer in time")

    def _record_result(self, breaker: Breaker, done: LookupDone | GetDone, now: float) -> None:
        """Record a success or failure; an operation that timed out is counted already."""
        timed_out = done.op_id in self._timed_out
        self._timed_out.discard(done.op_id)
        if not done.seconds or timed_out:
            return
        if not done.ok:
            self._fail(breaker, now, self._health_reason or "its operations fail")
        elif self._broke_its_word(done):
            self._fail(breaker, now, "it delivers nothing of what it says that it holds")
        else:
            breaker.succeeded()
            self._say_whether_open()

    def _broke_its_word(self, done: LookupDone | GetDone) -> bool:
        """Whether the tier said that it holds the blocks of a read, and none of them arrived."""
        may_miss = self._reads_find_out or self.tier.others_evict
        return isinstance(done, GetDone) and not any(done.each) and not may_miss

    @property
    def _health_reason(self) -> str:
        return self._contained("health", lambda: self.tier.health().reason, "")

    def _fail(self, breaker: Breaker, now: float, reason: str) -> None:
        self._was_asked = True
        if self._metrics is not None:
            self._metrics.add("tier_failures", label=self.name)
        if breaker.failed(now, reason) and breaker is self._reads:
            self.executor.cancel_waiting_reads()
        self._say_whether_open()

    def _say_whether_open(self) -> None:
        was_open, self._was_open = self._was_open, self.is_open
        if was_open and not self._was_open:
            logger.warning("kvpact: the %s tier works again", self.name)
        elif self._was_open and not was_open:
            logger.warning("kvpact: the %s tier is left alone for a while: %.300s", self.name, printable(self.trouble))

    # What keeps it from being asked

    def note_too_slow(self, kind: type[LookupDone | GetDone], seconds: float, now: float) -> None:
        """The engine computes what a prompt lacks, because that is sooner than such an operation, of `seconds`."""
        reason = self._probes.note_too_slow(kind, seconds, now)
        text = "kvpact: the %s tier is too slow for now: %s; tried again every %d s while prompts come"
        self._warned.log("slow", logging.INFO, text, self.name, reason, PROBE_SECONDS)

    def probe(self, keys: Sequence[BlockKey], now: float, *, before: Sequence[BlockKey] | None = None) -> None:
        """Try the tier again with a prompt's `keys`, for which it was not asked, if that is due. Nobody waits for it.

        It looks them up, and if reads are in doubt reads what it finds into memory of its own.
        """
        job = None if self._is_out else self._probes.begin(keys, now, before)
        if job is not None:
            self.executor.submit(job)

    def _probe_on(self, done: LookupDone | GetDone | PutDone) -> None:
        """A probe's look-up has ended: go on with a read where that is in doubt; or its read has."""
        job = self._probes.end(done, shared=self.shared)
        if job is not None:
            self._lent_reads[job.op_id] = 0
            self._block_bytes[job.op_id] = bytes_of(job.buffers[0])
            self.executor.submit(job)
            self.executor.flush()

    # Asking

    def held(self, keys: Sequence[BlockKey], now: float) -> int:
        """How many of a prompt's `keys`, from its first block on, can be read from an exclusive tier."""
        return self.deletions.first_among(keys, self._count(self._leading, keys, now))

    def put_start(self, keys: Sequence[BlockKey], now: float) -> int:
        """The block of a prompt's `keys` from which on an exclusive tier should be given them."""
        return self.deletions.first_among(keys, self._count(self._put_start, keys, now))

    def has(self, key: BlockKey, now: float) -> bool:
        """Whether a block can be read from an exclusive tier."""
        return self.have((key,), now)[0]

    def have(self, keys: Sequence[BlockKey], now: float) -> Sequence[bool]:
        """Which of these blocks can be read from an exclusive tier."""
        nothing = [False] * len(keys)
        if not self.may_read:
            return nothing
        try:
            held = checked_answers(self.tier.lookup(keys), len(keys))
            self._was_asked = True
        except Exception as error:
            self._warn_once("lookup", error)
            self._fail(self._reads, now, f"its look-up raised {type(error).__name__}")
            return nothing
        if not len(self.deletions):
            return held
        return [is_held and key not in self.deletions for key, is_held in zip(keys, held, strict=True)]

    def _count(self, question: Callable[[Sequence[BlockKey]], int], keys: Sequence[BlockKey], now: float) -> int:
        if not self.may_read:
            return 0
        try:
            count = checked_count(question(keys), len(keys))
            self._was_asked = True
            return count
        except Exception as error:
            self._warn_once("lookup", error)
            self._fail(self._reads, now, f"its look-up raised {type(error).__name__}")
            return 0

    def readable(self, keys: Sequence[BlockKey], held: int) -> int:
        """How many of the first `held` keys may be read: 0 if the tier fails, and none from a pending deletion on."""
        return self.deletions.first_among(keys, held) if self.may_read else 0

    def readable_elsewhere(self, keys: Sequence[BlockKey]) -> int:
        """How many `keys` may be read by who has opened the tier too, perhaps sooner than here."""
        return self.deletions.first_among(keys, len(keys) if self.is_awaited or self.may_read else 0)

    def submit_lookup(self, op_id: OpId, keys: Sequence[BlockKey], *, before: Sequence[BlockKey] | None = None) -> bool:
        """See `TierExecutor`. Returns False and does nothing if the tier is not asked now."""
        if self._lookups.is_open or not self.may_read:
            return False
        self._probes.note_asked(LookupDone)
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
        """See `TierExecutor`. Returns False and does nothing if the tier is not read now. At most `room` blocks."""
        if not self.may_read:
            return False
        self._probes.note_asked(GetDone)
        self._lent_reads[op_id] = len(buffers)
        self._probes.note_read(bytes_of(buffers[0]), in_a_row=before is not None)
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
        """See `TierExecutor`. Also False if a write hangs and this one needs more slots than the tier may borrow."""
        if not self.may_write or (self._writes_stuck and len(buffers) > self.room):
            return False
        if not self.executor.submit(Job(op_id, keys, buffers, before, nbytes, PutDone, epoch=epoch, depths=depths)):
            return False
        self._lent_writes[op_id] = len(buffers)
        return True

    def give_up(self, op_id: OpId, *, late: bool) -> None:
        """Cancel a look-up or read whose result is no longer needed; if it is `late`, count a failure."""
        if late:
            self._record_timeout(op_id, self._clock())
        self.executor.cancel(op_id)

    @property
    def has_completions(self) -> bool:
        """Whether `poll` would report anything."""
        return self.executor.has_completions

    def poll(self) -> Iterator[LookupDone | GetDone | PutDone | Deleted]:
        """Operations that have ended. Those that the caller does not consume stay for a later call. Never waits."""
        for done in self.executor.poll():
            if isinstance(done, ControlDone):
                keys = self.deletions.end(done)
                self._say_whether_open()
                yield Deleted(keys)
            elif done.op_id in self._probes:
                self._probe_on(done)
                self._note(done, self._clock())
            else:
                self._note(done, self._clock())
                yield done

    def _note(self, done: LookupDone | GetDone | PutDone, now: float) -> None:
        self._was_asked |= done.seconds > 0
        if isinstance(done, LookupDone):
            self._record_result(self._lookups, done, now)
            if done.ok and done.seconds:
                self.costs.note_lookup(done.seconds)
                if self._metrics is not None:
                    self._metrics.observe("lookup_seconds", done.seconds, self.name)
        elif isinstance(done, GetDone):
            self._record_result(self._reads, done, now)
            nbytes = round(sum(done.each) * self._block_bytes.pop(done.op_id))
            if done.seconds and nbytes:
                self.costs.note_read(nbytes, done.seconds)
            self._lent_reads.pop(done.op_id)
        else:
            self._lent_writes.pop(done.op_id, None)

    # Deleting

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Have the tier drop these blocks and all blocks after them. None of them is read before it has.

        A deletion that the tier refuses, or that raises, is repeated.
        """
        self.deletions.add(keys)
        self._say_whether_open()

    # Counts and end

    def capacity(self) -> TierCapacity:
        """The tier's capacity; the last known one if it raises."""
        self._capacity = self._contained("capacity", self.tier.capacity, self._capacity)
        return self._capacity

    def counts(self) -> TierCounts:
        """The tier's counts, with those before it was opened anew; the last known ones if it raises."""
        self._counts = self._contained("counts", self.tier.counts, self._counts)
        return self._counts_before + self._counts

    def close(self, timeout: float) -> bool:
        """Flush the queue within `timeout` seconds and close the tier; returns whether every operation was done.

        `poll` still reports the submitted operations.
        """
        self.deletions.repeat()
        flushed = self.executor.close(timeout)
        self._contained("close", self._opened.close, None)
        return flushed

    @property
    def undeleted(self) -> int:
        """Blocks that the tier has not been seen to delete."""
        return len(self.deletions)

    def _contained(self, what: str, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        """What `call` returns, or `otherwise` if it raises; the first error of a kind is logged."""
        try:
            return call()
        except Exception as error:
            self._warn_once(what, error)
            return otherwise

    def _warn_once(self, what: str, error: Exception) -> None:
        text = "tier %s: %s raised; further ones are not logged"
        self._warned.log(what, logging.WARNING, text, self.name, what, error=error)


def observe_tier(metrics: Gauges, client: TierClient, block_bytes: int) -> None:
    """Update a tier's gauges and totals."""
    name, capacity, counts, is_open = client.name, client.capacity(), client.counts(), int(client.is_open)
    if client.is_known:
        metrics.set("tier_up", 1 - is_open, name)
    metrics.set("open_breakers", is_open, name)
    metrics.set("slow_tiers", int(bool(client.slowness)), name)
    metrics.set("capacity_blocks", capacity.capacity_bytes // block_bytes, name)
    metrics.set("held_blocks", capacity.blocks, name)
    metrics.set("used_bytes", capacity.used_bytes, name)
    metrics.set("queued_write_bytes", client.executor.pending_write_bytes, name)
    metrics.set("read_bytes_per_second", client.costs.bytes_per_second, name)
    metrics.raise_to("damaged_records", counts.damaged, name)
    metrics.raise_to("evicted_blocks", counts.evicted, name)
