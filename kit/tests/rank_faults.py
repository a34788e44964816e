"""Faults of ranks: reports that come late, twice, in pieces, in another order or never, and blocks that fail.

Owns the decisions, by a seed, and the reports that are held back. Copies nothing: simulated ranks carry out a
`JobBehavior`, and for any other ranks `deliver` stands between their reports and the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from kvpact.contract import JobOutcome, WorkerReport
from kvpact.ranges import BlockRange, RangeSet
from kvpact_testkit.cache.operations import described
from kvpact_testkit.engine.simulated_worker import Job, JobBehavior
from kvpact_testkit.faults import HISTORY, choices


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFaultPlan:
    """The chance, 0 to 1, of each fault for one job on one rank."""

    seed: int = 0
    late: float = 0.0
    """The copy, or the report of it, comes up to `late_steps` later; so reports change their order."""
    late_steps: int = 4
    lost: float = 0.0
    """The report never comes."""
    repeated: float = 0.0
    """The report comes again in the next step."""
    in_pieces: float = 0.0
    """The report comes one block a step, the last block first."""
    failed: float = 0.0
    """Some of the job's blocks fail."""


@dataclass(frozen=True, slots=True)
class InjectedRankFault:
    """How one rank was made to treat one job, if not faithfully."""

    rank: int
    job_id: int
    conduct: JobBehavior

    def __str__(self) -> str:
        return f"rank {self.rank}, job {self.job_id}: {described(self.conduct)}"


class RankFaults:
    """Decides how each rank treats each job."""

    def __init__(self, plan: RankFaultPlan) -> None:
        self.plan = plan
        self.history: deque[InjectedRankFault] = deque(maxlen=HISTORY)
        """What was injected, oldest first."""
        self._held: list[tuple[int, WorkerReport]] = []
        self._step = 0

    def conduct(self, rank: int, job: Job) -> JobBehavior:
        """For `engine.ranks.SimulatedWorker`: how this rank treats this job."""
        return self._decide(rank, job.job_id, RangeSet.of(job.blocks))

    def deliver(self, reports: Iterable[WorkerReport]) -> list[WorkerReport]:
        """What the scheduler gets to see of one step's `reports`, in this order; the rest is held back or lost.

        Call it once a step, also without reports. A report of nothing passes as it is.
        """
        self._step += 1
        passed: list[WorkerReport] = []
        for report in reports:
            passed.append(WorkerReport({rank: {} for rank in report.ranks}))
            for rank, jobs in report.ranks.items():
                for job_id, outcome in jobs.items():
                    self._hold(rank, job_id, outcome)
        passed.extend(report for due, report in self._held if due <= self._step)
        self._held = [(due, report) for due, report in self._held if due > self._step]
        return passed

    def flush(self) -> list[WorkerReport]:
        """All that is held back, at once: the end of a run."""
        held, self._held = self._held, []
        return [report for _, report in held]

    def _hold(self, rank: int, job_id: int, outcome: JobOutcome) -> None:
        conduct = self._decide(rank, job_id, outcome.done)
        failed = outcome.failed.union(conduct.failed_blocks)
        done = outcome.done.difference(failed)
        pieces = [JobOutcome(done, failed)]
        if conduct.block_by_block:
            blocks = sorted({*done.blocks(), *failed.blocks()}, reverse=True)
            singles = [RangeSet.of(BlockRange(block, 1)) for block in blocks]
            pieces = [JobOutcome(done.intersection(one), failed.intersection(one)) for one in singles]
        due = self._step + conduct.copy_after_steps + conduct.report_after_steps
        for time in range(conduct.times_reported):
            self._held += [
                (due + time + wait, WorkerReport({rank: {job_id: piece}})) for wait, piece in enumerate(pieces)
            ]

    def _decide(self, rank: int, job_id: int, blocks: RangeSet) -> JobBehavior:
        plan = self.plan
        chance = choices(plan.seed, "rank", rank, job_id)
        conduct = JobBehavior(
            copy_after_steps=chance.randint(1, plan.late_steps) if chance.random() < plan.late else 0,
            report_after_steps=chance.randint(1, plan.late_steps) if chance.random() < plan.late else 0,
            times_reported=0 if chance.random() < plan.lost else 1 + (chance.random() < plan.repeated),
            block_by_block=chance.random() < plan.in_pieces,
            failed_blocks=_some(blocks, chance) if chance.random() < plan.failed else RangeSet(),
        )
        if conduct != JobBehavior():
            self.history.append(InjectedRankFault(rank, job_id, conduct))
        return conduct


def _some(blocks: RangeSet, chance: Random) -> RangeSet:
    """A run of `blocks`, of any length from one on."""
    every = list(blocks.blocks())
    if not every:
        return RangeSet()
    first = chance.randrange(len(every))
    return RangeSet.of(*(BlockRange(block, 1) for block in every[first : chance.randint(first, len(every) - 1) + 1]))
