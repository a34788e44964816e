"""A tier as those see it who use it: the scheduler, and each worker that reads by itself.

Owns the tier's executor, whether the tier is well, what it costs, how long it may take, how many slots it may have in
its hands, and what it is still to forget. Lives on its user's thread, which no tier holds up, and where nothing that a
tier raises arrives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvpact.identity.epochs import FIRST_EPOCH, Epoch
from kvpact.identity.keys import BlockKey
from kvpact.tiers.backends import label_of
from kvpact.tiers.base import BlockBuffer, TierCapacity, TierCounts
from kvpact.tiers.breaker import Breaker
from kvpact.tiers.costs import TierCosts
from kvpact.tiers.deletions import Deletions
from kvpact.tiers.executor import ControlDone, GetDone, LookupDone, OpId, PutDone, TierExecutor, checked_answer
from kvpact.tiers.log_once import LogOnce

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class Counters(Protocol):
    """What a client needs of the metrics."""

    def add(self, name: str, amount: int = 1, label: str = "") -> None: ...


class LentSlots:
    """Which tiers have how many of `total` slots in their hands, and how many more each may get."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._clients: list[TierClient] = []

    def join(self, client: TierClient) -> None:
        """Count what is lent to `client` from now on."""
        self._clients.append(client)

    def room_for(self, client: TierClient) -> int:
        """How many more a tier may get: half of what the other tiers leave. Below 0 if it has more than that already.

        However many tiers hang, each with all that it may have, some slots are left.
        """
        others = sum(other.lent for other in self._clients if other is not client)
        return (self._total - others + 1) // 2 - client.lent


@dataclass(frozen=True, slots=True)
class Deleted:
    """The tier has dropped these blocks, as it was told; none if it refused."""

    keys: tuple[BlockKey, ...]


class TierClient:
    """One tier. What was submitted is reported by `poll`, once each, under the caller's ticket; see `TierExecutor`.

    A tier that fails, raises or hangs costs its own hits: after some failures in a row it is left alone for a while,
    and then tried with one operation. Look-ups and reads are judged apart, because a store may do the one and not the
    other. How long a write takes says nothing: nobody waits for it.
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
        """A look-up or read of which nothing is seen for `timeout` seconds has failed.

        Where `reads_find_out`, nobody asks the tier whether it holds a block before it is read: that nothing arrives is
        a miss. Else it is a failure: the tier has said that it holds the block.

        At most `max_deleted_keys` blocks that the tier is still to forget are remembered one by one, or more than one
        request can have.
        """
        self.executor = executor
        self.tier = executor.tier
        self.name = label_of(executor.tier.name)
        self.shared = not executor.tier.exclusive
        """Whether others write and evict there, so that only the tier itself can say what it holds."""
        self.costs = TierCosts()
        self._slots = lent
        self._timeout = timeout
        self._clock = clock
        self._metrics = metrics
        self._reads_find_out = reads_find_out
        self._lookups, self._reads = Breaker(), Breaker()
        self._stuck = False
        """Whether all threads are busy with operations that take too long: nothing else would begin."""
        self._writes_stuck = False
        self._timed_out: set[OpId] = set()
        """Operations that were counted as failures because they took too long."""
        self._block_bytes = 0
        self._lent_reads: dict[OpId, int] = {}
        self._lent_writes: dict[OpId, int] = {}
        self.deletions = Deletions(executor, self.name, clock, max_deleted_keys)
        """What the tier is still to forget."""
        self._warned = LogOnce(logger)
        self._capacity, self._counts = TierCapacity(0, 0, 0), TierCounts()
        lent.join(self)

    # Health

    @property
    def is_open(self) -> bool:
        """Whether the tier is left alone, but for a try now and then."""
        return self._lookups.is_open or self._reads.is_open or self._stuck or self.deletions.lost_count

    def may_read(self, now: float) -> bool:
        """Whether what the tier holds can be used at `now`."""
        return not (self._stuck or self.deletions.lost_count) and self._reads.is_ready(now)

    @property
    def may_write(self) -> bool:
        """Whether the tier is offered blocks. Reads that fail are no reason against it."""
        return not (self._stuck or self.deletions.lost_count or self._lookups.is_open)

    @property
    def lent(self) -> int:
        """Slots that it may keep for long: those it reads into and, if it hangs in a write, those it is to write."""
        return sum(self._lent_reads.values()) + (sum(self._lent_writes.values()) if self._writes_stuck else 0)

    @property
    def room(self) -> int:
        """How many more slots it may have in its hands."""
        return max(0, self._slots.room_for(self))

    def check(self, now: float) -> None:
        """Once a step: see what takes too long, take back what waits behind it, repeat what was refused."""
        overdue = self.executor.overdue(self._timeout)
        for op_id in overdue.reads:
            self._record_timeout(op_id, now)
        self._writes_stuck = overdue.writes
        if overdue.everything != self._stuck:
            was_open, self._stuck = self.is_open, overdue.everything
            self._say_whether_open(was_open)
        if self._stuck:
            self.executor.cancel_waiting_reads()
        if self._writes_stuck:
            self._take_back_writes()
        self.deletions.repeat_if_due(now)

    def _take_back_writes(self) -> None:
        """The newest writes that have not begun are dropped, down to the slots that the tier may have."""
        for op_id in reversed([*self._lent_writes]):
            if self._slots.room_for(self) >= 0:
                break
            if self.executor.cancel(op_id):
                del self._lent_writes[op_id]

    def _record_timeout(self, op_id: OpId, now: float) -> None:
        """An operation takes too long; it counts as a failure once."""
        if op_id not in self._timed_out:
            self._timed_out.add(op_id)
            self._fail(self._reads if op_id in self._lent_reads else self._lookups, now)

    def _record_result(self, breaker: Breaker, done: LookupDone | GetDone, now: float) -> None:
        """What an operation says of the tier's health; one that took too long has been judged already."""
        timed_out = done.op_id in self._timed_out
        self._timed_out.discard(done.op_id)
        if not done.seconds:
            breaker.not_tried()
        elif not timed_out and (not done.ok or self._broke_its_word(done)):
            self._fail(breaker, now)
        elif not timed_out:
            was_open = self.is_open
            breaker.succeeded()
            self._say_whether_open(was_open)

    def _broke_its_word(self, done: LookupDone | GetDone) -> bool:
        """Whether the tier was read, because it said that it holds the blocks, and not one has arrived."""
        return isinstance(done, GetDone) and not done.arrived and not self._reads_find_out

    def _fail(self, breaker: Breaker, now: float) -> None:
        was_open = self.is_open
        if self._metrics is not None:
            self._metrics.add("tier_failures", label=self.name)
        if breaker.failed(now) and breaker is self._reads:
            self.executor.cancel_waiting_reads()
        self._say_whether_open(was_open)

    def _say_whether_open(self, was_open: bool) -> None:
        if was_open and not self.is_open:
            logger.warning("kvpact: the %s tier works again", self.name)
        elif self.is_open and not was_open:
            reason = self._contained("health", lambda: self.tier.health().reason, "") or "it does not answer in time"
            logger.warning("kvpact: the %s tier is left alone for a while: %.300s", self.name, reason)

    # Asking

    def held(self, keys: Sequence[BlockKey], now: float) -> int:
        """How many of `keys` in a row can be read from an exclusive tier."""
        if not self.may_read(now):
            return 0
        try:
            held = checked_answer(self.tier.lookup(keys), len(keys))
        except Exception as error:
            self._warn_once("lookup", error)
            self._fail(self._reads, now)
            return 0
        return self.deletions.first_among(keys, held)

    def readable(self, keys: Sequence[BlockKey], held: int, now: float) -> int:
        """Up to where the first `held` of `keys` may be read: not from an ill tier, or one that is to forget them."""
        return self.deletions.first_among(keys, held) if self.may_read(now) else 0

    def submit_lookup(self, op_id: OpId, keys: Sequence[BlockKey], now: float) -> bool:
        """See `TierExecutor`; False, and nothing happens, if the tier is not to be asked now."""
        if not self.may_read(now) or not self._lookups.allows(now):
            return False
        self.executor.submit_lookup(op_id, keys)
        return True

    def submit_get(
        self, op_id: OpId, keys: Sequence[BlockKey], start: int, buffers: Sequence[BlockBuffer], now: float
    ) -> bool:
        """See `TierExecutor`; False, and nothing happens, if the tier is not to be read now. `room` blocks at most."""
        if not self.may_read(now) or not self._reads.allows(now):
            return False
        self._lent_reads[op_id] = len(buffers)
        self._block_bytes = sum(piece.nbytes for piece in buffers[0])
        self.executor.submit_get(op_id, keys, start, buffers)
        return True

    def submit_put(
        self,
        op_id: OpId,
        keys: Sequence[BlockKey],
        start: int,
        buffers: Sequence[BlockBuffer],
        nbytes: int,
        epoch: Epoch = FIRST_EPOCH,
    ) -> bool:
        """See `TierExecutor`. False also if a write hangs and this one would take more slots than the tier may have."""
        if not self.may_write or (self._writes_stuck and len(buffers) > self.room):
            return False
        if not self.executor.submit_put(op_id, keys, start, buffers, nbytes, epoch):
            return False
        self._lent_writes[op_id] = len(buffers)
        return True

    def give_up(self, op_id: OpId, *, late: bool) -> None:
        """Nobody waits for this look-up or read any more; if it is `late`, that is the tier's fault."""
        if late:
            self._record_timeout(op_id, self._clock())
        self.executor.cancel(op_id)

    @property
    def has_completions(self) -> bool:
        """Whether `poll` would tell anything."""
        return self.executor.has_completions

    def poll(self) -> Iterator[LookupDone | GetDone | PutDone | Deleted]:
        """What has ended of what was submitted; what the caller does not take stays for a later call. Never waits."""
        for done in self.executor.poll():
            if isinstance(done, ControlDone):
                was_open = self.is_open
                keys = self.deletions.end(done)
                self._say_whether_open(was_open)
                yield Deleted(keys)
            else:
                self._note(done, self._clock())
                yield done

    def _note(self, done: LookupDone | GetDone | PutDone, now: float) -> None:
        if isinstance(done, LookupDone):
            self._record_result(self._lookups, done, now)
            if done.ok and done.seconds:
                self.costs.note_lookup(done.seconds)
        elif isinstance(done, GetDone):
            self._record_result(self._reads, done, now)
            nbytes = done.arrived * self._block_bytes
            if done.seconds and nbytes:
                self.costs.note_read(nbytes, done.seconds, now)
            self._lent_reads.pop(done.op_id)
        else:
            self._lent_writes.pop(done.op_id, None)

    # Forgetting

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Have the tier drop these blocks and all that need them. None of them is read from it before it has done so.

        What it refuses, or raises at, is repeated.
        """
        was_open = self.is_open
        self.deletions.add(keys)
        self._say_whether_open(was_open)

    # Telling

    def capacity(self) -> TierCapacity:
        """What the tier says of itself, or said last."""
        self._capacity = self._contained("capacity", self.tier.capacity, self._capacity)
        return self._capacity

    def counts(self) -> TierCounts:
        """What the tier has counted, or had when it last said so."""
        self._counts = self._contained("counts", self.tier.counts, self._counts)
        return self._counts

    def close(self, timeout: float) -> bool:
        """Flush what is queued within `timeout` seconds and let go of the tier; whether all that it was told is done.

        `poll` still tells what became of what was submitted.
        """
        self.deletions.repeat()
        flushed = self.executor.close(timeout)
        self._contained("close", self.tier.close, None)
        return flushed

    @property
    def undeleted(self) -> int:
        """Blocks that the tier was to forget and, for all that is known, has not."""
        return len(self.deletions)

    def _contained(self, what: str, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        """What a call of the tier answers, or `otherwise` if it raises; the first time is logged."""
        try:
            return call()
        except Exception as error:
            self._warn_once(what, error)
            return otherwise

    def _warn_once(self, what: str, error: Exception) -> None:
        text = "tier %s: %s raised; further ones are not logged"
        self._warned.log(what, logging.WARNING, text, self.name, what, error=error)
