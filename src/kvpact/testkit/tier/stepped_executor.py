"""A tier's queue without threads: reads and writes are done when a scene's step says so, so a run repeats exactly.

Owns the order of the work, how long it is put off, and the bound on bytes that wait. Judges nothing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvpact.errors import PactViolation
from kvpact.identity.epochs import FIRST_EPOCH, Epoch
from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import BlockBuffer, Tier
from kvpact.tiers.executor import (
    NOTHING_OVERDUE,
    ControlDone,
    Done,
    GetDone,
    LookupDone,
    OpId,
    Overdue,
    PutDone,
    TierExecutor,
    checked_answer,
)

logger = logging.getLogger(__name__)

_INSTANT = 1e-6
"""Seconds that an operation is said to have taken: it was asked of the tier, and took none of the scene's time."""


@dataclass(slots=True, eq=False)
class _Task:
    run: Callable[[], Done]
    given_up: Done
    since: float
    write_bytes: int = 0

    @property
    def op_id(self) -> OpId:
        return self.given_up.op_id


class SteppedExecutor(TierExecutor):
    """See `TierExecutor`. Nothing happens but in `advance`, and not even there while `stalled_steps` is above 0."""

    def __init__(self, tier: Tier, max_write_bytes: int, clock: Callable[[], float] = float) -> None:
        """`clock` gives the scene's seconds; without one, nothing takes too long."""
        self.tier = tier
        self.stalled_steps = 0
        """Calls of `advance` that do nothing: how slow the tier is from now on."""
        self.reads = 0
        """Reads submitted so far."""
        self._most = max_write_bytes
        self._clock = clock
        self._gets: deque[_Task] = deque()
        self._puts: deque[_Task] = deque()
        self._finished: deque[Done] = deque()
        self._write_bytes = 0

    def advance(self) -> None:
        """One step passes: do everything that waits, reads first."""
        if self.stalled_steps:
            self.stalled_steps -= 1
            return
        while self._gets:
            self._run(self._gets.popleft())
        while self._puts:
            self._run(self._puts.popleft())

    def _run(self, task: _Task) -> None:
        done = replace(task.given_up, ok=False, seconds=_INSTANT)
        try:
            done = task.run()
        except Exception as error:  # as in TierExecutor: a tier's defect costs this ticket and nothing else
            logger.debug("tier %s: %s", self.tier.name, error)
        finally:
            self._end(task, done)

    def _end(self, task: _Task, done: Done) -> None:
        self._write_bytes -= task.write_bytes
        self._finished.append(done)

    def _accept(self, tasks: deque[_Task], given_up: Done, run: Callable[[], Done], write_bytes: int = 0) -> None:
        if any(task.op_id == given_up.op_id for task in (*self._gets, *self._puts)):
            raise PactViolation(f"ticket {given_up.op_id!r} is under way already; a ticket names one read or write")
        self._write_bytes += write_bytes
        tasks.append(_Task(run, given_up, self._clock(), write_bytes))

    def submit_lookup(self, op_id: OpId, keys: Sequence[BlockKey]) -> None:
        """See `TierExecutor`."""

        def run() -> Done:
            held = checked_answer(self.tier.lookup(keys), len(keys))
            return LookupDone(op_id, held, self.tier.health().readable, _INSTANT)

        self._accept(self._gets, LookupDone(op_id, 0), run)

    def submit_get(self, op_id: OpId, keys: Sequence[BlockKey], start: int, buffers: Sequence[BlockBuffer]) -> None:
        """See `TierExecutor`."""
        self.reads += 1

        def run() -> Done:
            arrived = checked_answer(self.tier.get(keys, start, buffers, lambda arrived: True), len(buffers))
            return GetDone(op_id, arrived, self.tier.health().readable, _INSTANT)

        self._accept(self._gets, GetDone(op_id, 0), run)

    def submit_put(
        self,
        op_id: OpId,
        keys: Sequence[BlockKey],
        start: int,
        buffers: Sequence[BlockBuffer],
        nbytes: int,
        epoch: Epoch = FIRST_EPOCH,
    ) -> bool:
        """See `TierExecutor`."""
        if not self.has_room(nbytes):
            return False

        def run() -> Done:
            return PutDone(op_id, checked_answer(self.tier.put(keys, start, buffers, epoch), len(buffers)))

        self._accept(self._puts, PutDone(op_id, 0), run, nbytes)
        return True

    def submit_control(self, op_id: OpId, operation: Callable[[Tier], object]) -> None:
        """See `TierExecutor`."""

        def run() -> Done:
            operation(self.tier)
            return ControlDone(op_id, True, _INSTANT)

        self._accept(self._puts, ControlDone(op_id, False), run)

    def overdue(self, seconds: float) -> Overdue:
        """See `TierExecutor`: a tier is busy between two steps only while it is stalled, with all it was told."""
        if not self.stalled_steps:
            return NOTHING_OVERDUE
        before = self._clock() - seconds
        reads = tuple(task.op_id for task in self._gets if task.since < before)
        return Overdue(reads, writes=any(task.since < before for task in self._puts))

    def cancel_waiting_reads(self) -> None:
        """See `TierExecutor`; while the tier is stalled, it has begun with all of them."""

    def progress(self, op_id: OpId) -> int:
        """See `TierExecutor`: a read is done in one piece."""
        return 0

    def cancel(self, op_id: OpId) -> bool:
        """See `TierExecutor`."""
        for tasks in (self._gets, self._puts):
            for task in [task for task in tasks if task.op_id == op_id]:
                tasks.remove(task)
                self._end(task, task.given_up)
                return True
        return False

    @property
    def has_completions(self) -> bool:
        """See `TierExecutor`."""
        return bool(self._finished)

    def poll(self) -> Iterator[Done]:
        """See `TierExecutor`."""
        for _ in range(len(self._finished)):
            yield self._finished.popleft()

    @property
    def pending_write_bytes(self) -> int:
        """See `TierExecutor`."""
        return self._write_bytes

    def has_room(self, nbytes: int) -> bool:
        """See `TierExecutor`."""
        return self._write_bytes + nbytes <= self._most

    @property
    def under_way(self) -> int:
        """See `TierExecutor`."""
        return len(self._gets) + len(self._puts)

    def drop(self) -> None:
        """The process dies: nothing that waits is done any more."""
        self._give_up(self._gets)
        self._give_up(self._puts)

    def _give_up(self, tasks: deque[_Task]) -> None:
        while tasks:
            task = tasks.popleft()
            self._end(task, task.given_up)

    def close(self, timeout: float) -> bool:
        """See `TierExecutor`; a stalled tier is given up on at once."""
        self._give_up(self._gets)
        flushed = not self.stalled_steps
        if flushed:
            self.advance()
        self.drop()
        return flushed
