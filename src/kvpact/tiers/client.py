"""A tier as those see it who use it: the scheduler, and each worker that reads by itself.

Owns the tier's executor, whether the tier is well, what it costs, how long it may take, how many slots it may have in
its hands, and what it is still to forget. Lives on its user's thread, which no tier holds up, and where nothing that a
tier raises arrives. Floor 1.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf
from typing import Final, TypeVar

from kvpact.blocks import BlockKey
from kvpact.costs import TierCosts, new_tier_costs
from kvpact.epochs import FIRST_EPOCH, Epoch
from kvpact.metrics import Metrics, TierName
from kvpact.tiers.base import BlockBuffer, Tier, TierCapacity, TierCounts
from kvpact.tiers.breaker import Breaker
from kvpact.tiers.queue import ControlDone, GetDone, LookupDone, PutDone, Ticket, TierQueue, checked_answer

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

REPEAT_SECONDS: Final = 2.0
"""What a tier refused to forget it is asked to forget again after this time."""

MAX_DELETIONS: Final = 64
"""Deletions that a tier is asked for at once; what comes on top of them is put together into one (P12)."""

MIN_DELETED_KEYS: Final = 1 << 16
"""As many blocks as the longest prompt has may be waiting to be deleted."""


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


@dataclass(frozen=True, slots=True)
class _Deletion:
    """Blocks that the tier is to forget; `everything` is all it has."""

    keys: tuple[BlockKey, ...]
    everything: bool = False


class TierClient:
    """One tier. What was submitted is reported by `poll`, once each, under the caller's ticket; see `TierQueue`.

    A tier that fails, raises or hangs costs its own hits: after some failures in a row it is left alone for a while,
    and then tried with one operation. Look-ups and reads are judged apart, because a store may do the one and not the
    other. How long a write takes says nothing: nobody waits for it.
    """

    def __init__(
        self,
        executor: TierQueue,
        lent: LentSlots,
        *,
        timeout: float,
        clock: Callable[[], float],
        metrics: Metrics | None = None,
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
        self.name = TierName.of(executor.tier.name)
        self.shared = not executor.tier.exclusive
        """Whether others write and evict there, so that only the tier itself can say what it holds."""
        self.costs: TierCosts = new_tier_costs()
        self._slots = lent
        self._timeout = timeout
        self._clock = clock
        self._metrics = metrics
        self._reads_find_out = reads_find_out
        self._lookups, self._reads = Breaker(), Breaker()
        self._stuck = False
        """Whether all threads are busy with operations that take too long: nothing else would begin."""
        self._writes_stuck = False
        self._timed_out: set[Ticket] = set()
        """Operations that were counted as failures because they took too long."""
        self._block_bytes = 0
        self._lent_reads: dict[Ticket, int] = {}
        self._lent_writes: dict[Ticket, int] = {}
        self._max_deleted_keys = max(max_deleted_keys, MIN_DELETED_KEYS)
        self._tickets = count(1)
        self._deletions: dict[Ticket, _Deletion] = {}
        self._deleting: Counter[BlockKey] = Counter()
        """Blocks that the tier may not have forgotten yet, and how many deletions each is named in."""
        self._refused: dict[BlockKey, None] = {}
        """Of them, those that it is to be asked to forget once more."""
        self._lost_count = False
        """Whether there were too many of them to remember: nothing that the tier holds is used then."""
        self._repeat_at = inf
        self._warned: set[str] = set()
        self._capacity, self._counts = TierCapacity(0, 0, 0), TierCounts()
        lent.join(self)

    # Health

    @property
    def is_open(self) -> bool:
        """Whether the tier is left alone, but for a try now and then."""
        return self._lookups.is_open or self._reads.is_open or self._stuck or self._lost_count

    def may_read(self, now: float) -> bool:
        """Whether what the tier holds can be used at `now`."""
        return not (self._stuck or self._lost_count) and self._reads.is_ready(now)

    @property
    def may_write(self) -> bool:
        """Whether the tier is offered blocks. Reads that fail are no reason against it."""
        return not (self._stuck or self._lost_count or self._lookups.is_open)

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
        for ticket in overdue.reads:
            self._record_timeout(ticket, now)
        self._writes_stuck = overdue.writes
        if overdue.everything != self._stuck:
            was_open, self._stuck = self.is_open, overdue.everything
            self._say_whether_open(was_open)
        if self._stuck:
            self.executor.cancel_waiting_reads()
        if self._writes_stuck:
            self._take_back_writes()
        if now >= self._repeat_at:
            self._repeat()

    def _take_back_writes(self) -> None:
        """The newest writes that have not begun are dropped, down to the slots that the tier may have."""
        for ticket in reversed([*self._lent_writes]):
            if self._slots.room_for(self) >= 0:
                break
            if self.executor.cancel(ticket):
                del self._lent_writes[ticket]

    def _record_timeout(self, ticket: Ticket, now: float) -> None:
        """An operation takes too long; it counts as a failure once."""
        if ticket not in self._timed_out:
            self._timed_out.add(ticket)
            self._fail(self._reads if ticket in self._lent_reads else self._lookups, now)

    def _record_result(self, breaker: Breaker, done: LookupDone | GetDone, now: float) -> None:
        """What an operation says of the tier's health; one that took too long has been judged already."""
        timed_out = done.ticket in self._timed_out
        self._timed_out.discard(done.ticket)
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
            logger.warning("kvpact: the %s tier is left alone for a while: %s", self.name, reason)

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
        return self._without_deleted(keys, held)

    def readable(self, keys: Sequence[BlockKey], held: int, now: float) -> int:
        """Up to where the first `held` of `keys` may be read: not from an ill tier, or one that is to forget them."""
        return self._without_deleted(keys, held) if self.may_read(now) else 0

    def _without_deleted(self, keys: Sequence[BlockKey], held: int) -> int:
        deleting = self._deleting
        return next((at for at in range(held) if keys[at] in deleting), held) if deleting else held

    def submit_lookup(self, ticket: Ticket, keys: Sequence[BlockKey], now: float) -> bool:
        """See `TierQueue`; False, and nothing happens, if the tier is not to be asked now."""
        if not self.may_read(now) or not self._lookups.allows(now):
            return False
        self.executor.submit_lookup(ticket, keys)
        return True

    def submit_get(
        self, ticket: Ticket, keys: Sequence[BlockKey], start: int, buffers: Sequence[BlockBuffer], now: float
    ) -> bool:
        """See `TierQueue`; False, and nothing happens, if the tier is not to be read now. `room` blocks at most."""
        if not self.may_read(now) or not self._reads.allows(now):
            return False
        self._lent_reads[ticket] = len(buffers)
        self._block_bytes = sum(piece.nbytes for piece in buffers[0])
        self.executor.submit_get(ticket, keys, start, buffers)
        return True

    def submit_put(
        self,
        ticket: Ticket,
        keys: Sequence[BlockKey],
        start: int,
        buffers: Sequence[BlockBuffer],
        nbytes: int,
        epoch: Epoch = FIRST_EPOCH,
    ) -> bool:
        """See `TierQueue`. False also if a write hangs and this one would take more slots than the tier may have."""
        if not self.may_write or (self._writes_stuck and len(buffers) > self.room):
            return False
        if not self.executor.submit_put(ticket, keys, start, buffers, nbytes, epoch):
            return False
        self._lent_writes[ticket] = len(buffers)
        return True

    def give_up(self, ticket: Ticket, *, late: bool) -> None:
        """Nobody waits for this look-up or read any more; if it is `late`, that is the tier's fault."""
        if late:
            self._record_timeout(ticket, self._clock())
        self.executor.cancel(ticket)

    @property
    def has_completions(self) -> bool:
        """Whether `poll` would tell anything."""
        return self.executor.has_news

    def poll(self) -> Iterator[LookupDone | GetDone | PutDone | Deleted]:
        """What has ended of what was submitted; what the caller does not take stays for a later call. Never waits."""
        for done in self.executor.poll():
            now = self._clock()
            if isinstance(done, ControlDone):
                yield Deleted(self._end_deletion(done))
                continue
            self._note(done, now)
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
            self._lent_reads.pop(done.ticket)
        else:
            self._lent_writes.pop(done.ticket, None)

    # Forgetting

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Have the tier drop these blocks and all that need them. None of them is read from it before it has done so.

        What it refuses, or raises at, is repeated.
        """
        self._deleting.update(keys)
        if len(self._deleting) > self._max_deleted_keys:
            self._lose_count()
        elif len(self._deletions) < MAX_DELETIONS:
            self._submit_deletion(_Deletion(tuple(keys)))
        else:
            self._refuse(keys)

    def _lose_count(self) -> None:
        """Too many blocks to be forgotten are still there: none is used until all are gone.

        An exclusive tier is emptied. What others own is not; a shared tier is not used any more.
        """
        was_open, had_lost_count = self.is_open, self._lost_count
        self._lost_count = True
        self._deleting.clear()
        self._refused.clear()
        self._deletions = dict.fromkeys(self._deletions, _Deletion(()))
        self._say_whether_open(was_open)
        if not had_lost_count and self.shared:
            logger.error("kvpact: the %s tier does not delete what it must; it is not used any more", self.name)
        elif not had_lost_count:
            self._submit_deletion(_Deletion((), everything=True))

    def _submit_deletion(self, deletion: _Deletion) -> None:
        ticket = ("delete", next(self._tickets))
        self._deletions[ticket] = deletion
        self.executor.submit_control(ticket, partial(_carry_out, deletion))

    def _refuse(self, keys: Sequence[BlockKey]) -> None:
        """The tier still has these blocks, for all that is known: it is to be asked again."""
        self._refused.update(dict.fromkeys(keys))
        self._repeat_at = min(self._repeat_at, self._clock() + REPEAT_SECONDS)

    def _repeat(self) -> None:
        """Ask once more for what was refused."""
        self._repeat_at = inf
        if self._lost_count and not self.shared and not any(one.everything for one in self._deletions.values()):
            self._submit_deletion(_Deletion((), everything=True))
        elif self._refused:
            keys, self._refused = tuple(self._refused), {}
            self._submit_deletion(_Deletion(keys))

    def _end_deletion(self, done: ControlDone) -> tuple[BlockKey, ...]:
        """Which blocks the tier does not have any more."""
        deletion = self._deletions.pop(done.ticket)
        if not done.ok:
            self._refuse(deletion.keys)
            return ()
        if deletion.everything:
            was_open, self._lost_count = self.is_open, False
            self._deleting.clear()
            self._say_whether_open(was_open)
        else:
            self._deleting.subtract(deletion.keys)
            for key in deletion.keys:
                if self._deleting[key] <= 0:
                    del self._deleting[key]
        return deletion.keys

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
        self._repeat()
        flushed = self.executor.close(timeout)
        self._contained("close", self.tier.close, None)
        return flushed

    @property
    def undeleted(self) -> int:
        """Blocks that the tier was to forget and, for all that is known, has not."""
        return len(self._deleting)

    def _contained(self, what: str, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        """What a call of the tier answers, or `otherwise` if it raises; the first time is logged."""
        try:
            return call()
        except Exception as error:
            self._warn_once(what, error)
            return otherwise

    def _warn_once(self, what: str, error: Exception) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("tier %s: %s raised; further ones are not logged", self.name, what, exc_info=error)


def _carry_out(deletion: _Deletion, tier: Tier) -> None:
    if deletion.everything:
        tier.clear()
    else:
        tier.delete(deletion.keys)
