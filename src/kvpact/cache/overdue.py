"""Loads that do not end by their deadline: their requests continue without them, and their blocks stay held.

Owns the hold on the engine's blocks that a load may still write to, and when the engine is told to continue. The caller
decides what that costs the request. No clock: times are arguments.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from kvpact.cache.jobs import LoadState, TransferJobs
from kvpact.contract import BlockHolder
from kvpact.errors import PactViolation
from kvpact.tiers.log_once import LogOnce

logger = logging.getLogger(__name__)

STEPS_TO_HEAR = 2
"""Steps after which a load that was given up is settled as late. A load that ended before the workers heard of it has
been reported by then, also if the engine schedules a step before it takes in the results of the last one."""


@dataclass(eq=False)
class OverdueLoads:
    """The loads of `jobs` whose deadline has passed. Without a scheduler context no load is given up (H07)."""

    jobs: TransferJobs
    _context: BlockHolder | None = field(default=None, init=False)
    _held: dict[int, BlockHolder] = field(default_factory=dict, init=False)
    """Job id -> the context through which its blocks are held."""
    _given_up: dict[int, tuple[LoadState, int]] = field(default_factory=dict, init=False)
    """Job id -> the load, and the step in which it was given up; until no rank can write its blocks."""
    _step: int = field(default=0, init=False)
    _told: LogOnce = field(default_factory=lambda: LogOnce(logger), init=False)

    def bind(self, context: BlockHolder) -> None:
        """Hold blocks through `context`."""
        self._context = context

    @property
    def is_stuck(self) -> bool:
        """Whether a rank may hang in a copy: a new order would wait for it."""
        return bool(self._given_up)

    def begin(self, load: LoadState) -> None:
        """A load is ordered. The blocks of a synchronous one are held from now on: the engine may schedule the next
        step, and reuse them, before it hears that the load failed."""
        if load.job.synchronous:
            self._hold(load)

    def end_step(self, now: float) -> None:
        """End the step's orders: give up what is overdue."""
        self._step += 1
        self._give_up(now)

    def _give_up(self, now: float) -> None:
        """Hold the blocks of loads whose deadline has passed, and tell the workers with this step."""
        if self._context is None or not self.jobs.loads:
            return
        for load in self.jobs.give_up(now):
            self._hold(load)
            self._given_up[load.job.job_id] = load, self._step
            text = (
                "kvpact: the load of %d blocks for request %s is late; they are computed instead (others are counted)"
            )
            self._told.log("late", logging.WARNING, text, len(load.block_ids), load.job.request_id)

    def give_up(self, now: float) -> list[LoadState]:
        """Give up what is overdue; returns the loads that the engine continues without from now on, each once."""
        self._give_up(now)
        late = [load for load, step in self._given_up.values() if not load.told and self._step - step >= STEPS_TO_HEAR]
        for load in late:
            load.told = True
        return late

    def end(self, load: LoadState) -> None:
        """No rank can write to the load's blocks any more: release them."""
        self._given_up.pop(load.job.job_id, None)
        context = self._held.pop(load.job.job_id, None)
        if context is not None:
            context.free_blocks(load.block_ids)

    def check(self) -> None:
        """Verify that blocks are held only for loads under way; raises PactViolation."""
        if gone := (self._held.keys() | self._given_up.keys()) - self.jobs.loads.keys():
            raise PactViolation(f"blocks are held for loads that have ended: {sorted(gone)}")

    def _hold(self, load: LoadState) -> None:
        if self._context is not None and load.job.job_id not in self._held:
            self._context.touch(load.block_ids)
            self._held[load.job.job_id] = self._context
