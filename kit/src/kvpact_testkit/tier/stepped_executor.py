"""A tier's executor without threads: reads and writes run when a scene steps, so that a run repeats exactly.

Owns the time at which a job runs. Judges nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from kvpact.tiers.base import Tier
from kvpact.tiers.executor import NOTHING_OVERDUE, Done, GetDone, Job, Overdue, TierExecutor, run_job

INSTANT_S = 1e-6
"""Reported seconds of an operation: the tier was asked, and none of the scene's time passed."""


class SteppedExecutor(TierExecutor):
    """See `TierExecutor`. Jobs run in `advance` only, and not while `stalled_steps` is above 0."""

    def __init__(self, tier: Tier, max_write_bytes: int, clock: Callable[[], float] = float) -> None:
        """`clock` gives the scene's seconds; without one, no operation is overdue."""
        super().__init__(tier, 1, max_write_bytes)
        self.stalled_steps = 0
        """Calls of `advance` that will run no job: the tier is stalled."""
        self.seconds = INSTANT_S
        """Seconds of each operation from now on, as they are reported."""
        self.reads = 0
        """Reads submitted so far."""
        self._clock = clock

    def _start(self, threads: int) -> list[threading.Thread]:
        return []

    def submit(self, job: Job) -> bool:
        """See `TierExecutor`; the scene's clock counts."""
        accepted = super().submit(job)
        job.moved = self._clock()
        self.reads += job.kind is GetDone
        return accepted

    def advance(self) -> None:
        """One step passes: run every waiting job, reads first."""
        if self.stalled_steps:
            self.stalled_steps -= 1
            return
        for waiting in (self._shared.gets, self._shared.puts):
            while waiting:
                run_job(self.tier, self._shared, waiting.popleft())

    def overdue(self, seconds: float) -> Overdue:
        """See `TierExecutor`: between two steps only a stalled tier is busy, with all its jobs."""
        if not self.stalled_steps:
            return NOTHING_OVERDUE
        late = [job for job in self._shared.under_way.values() if job.moved < self._clock() - seconds]
        return Overdue(tuple(job.op_id for job in late if not job.changes), any(job.changes for job in late))

    def cancel_waiting_reads(self) -> None:
        """See `TierExecutor`; a stalled tier has begun all of them."""

    def poll(self) -> Iterator[Done]:
        """See `TierExecutor`; the real duration is replaced, because a run must repeat exactly."""
        for done in super().poll():
            yield replace(done, seconds=self.seconds) if done.seconds else done

    def drop(self) -> None:
        """The process dies: no waiting job runs any more."""
        super().close(0.0)

    def close(self, timeout: float) -> bool:
        """See `TierExecutor`; a stalled tier is given up at once."""
        super().cancel_waiting_reads()
        flushed = not self.stalled_steps
        if flushed:
            self.advance()
        self.drop()
        return flushed
