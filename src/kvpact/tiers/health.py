"""Health of one tier as its user sees it: which operations it may be asked for, and why not.

Owns the breakers, the operations that timed out, and the state that was logged last. Lives on the thread of the tier's
user; never does I/O.
"""

from __future__ import annotations

import logging
from typing import Protocol

from kvpact.errors import printable
from kvpact.tiers.awaited import AwaitedTier
from kvpact.tiers.breaker import Breaker
from kvpact.tiers.deletions import Deletions
from kvpact.tiers.executor import GetDone, LookupDone, OpId, PutDone, TierExecutor
from kvpact.tiers.log_once import LogOnce

logger = logging.getLogger(__name__)


class Counters(Protocol):
    """Metrics of a tier's operations."""

    def add(self, name: str, amount: int = 1, label: str = "") -> None: ...
    def observe(self, name: str, seconds: float, label: str = "") -> None: ...


class ClientHealth:
    """Judges the results and timeouts of one tier's operations.

    Look-ups and reads have a breaker each, because a store may do one and fail the other.
    """

    def __init__(
        self, executor: TierExecutor, deletions: Deletions, metrics: Counters | None, *, reads_find_out: bool
    ) -> None:
        """With `reads_find_out` a read of which nothing arrives is a miss, and no failure."""
        self.lookups = Breaker()
        self.reads = Breaker()
        self._executor = executor
        self._deletions = deletions
        self._metrics = metrics
        self._reads_find_out = reads_find_out
        self._was_asked = False
        self._was_paused = False
        """State that was logged last."""
        self._is_stuck = False
        """Overdue operations occupy all threads, so that nothing else can begin."""
        self._timed_out: set[OpId] = set()
        """Operations that were counted as failures because they timed out."""
        self._warned = LogOnce(logger)

    @property
    def is_awaited(self) -> bool:
        """True until the tier has been opened, and after its place was lost."""
        return isinstance(self._executor.tier, AwaitedTier)

    @property
    def cannot_be_tried(self) -> bool:
        """True while the tier is asked nothing, not even by a probe."""
        return isinstance(self._executor.tier, AwaitedTier) or self._is_stuck or self._deletions.lost_count

    @property
    def is_paused(self) -> bool:
        """True while the tier is not asked, except by a probe now and then."""
        return self.lookups.is_open or self.reads.is_open or self.cannot_be_tried

    @property
    def is_known(self) -> bool:
        """True once the tier was asked, or cannot be: before that, `is_paused` says nothing of its health."""
        return self._was_asked or self.is_paused

    @property
    def may_read(self) -> bool:
        """True if the tier may be read for a request."""
        return not (self.cannot_be_tried or self.reads.is_open)

    @property
    def may_write(self) -> bool:
        """True if blocks may be written to the tier. Failed reads do not forbid it."""
        return not (self.cannot_be_tried or self.lookups.is_open)

    @property
    def has_overdue(self) -> bool:
        """True while an operation that timed out has not ended."""
        return bool(self._timed_out)

    @property
    def trouble(self) -> str:
        """Reason for the pause; "" if the tier is not paused."""
        if self.is_awaited:
            return self.reason or "it has not answered yet"
        if self._deletions.lost_count:
            return "it cannot delete blocks"
        if self._is_stuck:
            return "operations that do not end occupy all its threads"
        belief = self.lookups.belief or self.reads.belief
        return belief.reason if belief is not None else ""

    @property
    def reason(self) -> str:
        """The tier's own account of its troubles; "" if it has none, or raises."""
        return self._warned.contained(
            f"tier {self._executor.label}: health", lambda: self._executor.tier.health().reason, ""
        )

    def note_answered(self) -> None:
        """Record an answer that the tier gave on its user's thread."""
        self._was_asked = True

    def note_done(self, done: LookupDone | GetDone | PutDone, now: float) -> None:
        """Record a success or failure of a look-up or read; one that timed out is counted already."""
        self._was_asked |= done.seconds > 0
        timed_out = done.op_id in self._timed_out
        self._timed_out.discard(done.op_id)
        if isinstance(done, PutDone) or not done.seconds or timed_out:
            return
        breaker = self.lookups if isinstance(done, LookupDone) else self.reads
        if not done.ok:
            self.note_failed(breaker, now, self.reason or "its operations fail")
        elif self._broke_its_word(done):
            self.note_failed(breaker, now, "it delivers none of the blocks that it reports")
        else:
            breaker.succeeded()
            self.log_pause()

    def _broke_its_word(self, done: LookupDone | GetDone) -> bool:
        """True if the tier claimed the blocks of a read, and none of them arrived."""
        may_miss = self._reads_find_out or self._executor.tier.others_evict
        return isinstance(done, GetDone) and not any(done.each) and not may_miss

    def note_timeout(self, breaker: Breaker, op_id: OpId, now: float) -> None:
        """Count an overdue operation as one failure."""
        if op_id not in self._timed_out:
            self._timed_out.add(op_id)
            self.note_failed(breaker, now, "it does not answer in time")

    def note_failed(self, breaker: Breaker, now: float, reason: str) -> None:
        """Count a failure; once reads are paused, cancel those that have not begun."""
        self._was_asked = True
        if self._metrics is not None:
            self._metrics.add("tier_failures", label=self._executor.label)
        if breaker.failed(now, reason) and breaker is self.reads:
            self._executor.cancel_waiting_reads()
        self.log_pause()

    def note_stuck(self, is_stuck: bool) -> None:
        """Record that overdue operations occupy all threads, or no more; if so, cancel reads that have not begun."""
        if is_stuck != self._is_stuck:
            self._is_stuck = is_stuck
            self.log_pause()
        if is_stuck:
            self._executor.cancel_waiting_reads()

    def log_pause(self) -> None:
        """Log that the tier is paused, or no longer, if that has changed."""
        is_paused = self.is_paused
        if is_paused == self._was_paused:
            return
        self._was_paused = is_paused
        if is_paused:
            text = "kvpact: the %s tier failed and is paused: %.300s"
            logger.warning(text, self._executor.label, printable(self.trouble))
        else:
            logger.warning("kvpact: the %s tier works again", self._executor.label)
