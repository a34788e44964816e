"""One rank's jobs from order to report: each ends once, and each outcome is reported to the engine once.

Copies nothing and waits for nothing: `kvpact.worker.transfer` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from kvpact.contract import JobOutcome, JobQuery, LoadJob, SaveJob
from kvpact.ranges import BlockRange, RangeSet
from kvpact.wire import UnorderedLoad
from kvpact.worker.copy.base import Job

ENDED_JOBS: Final = 4096
"""Ended jobs whose outcome can be reported again: far more than end before the scheduler asks for a lost report."""


@dataclass(slots=True)
class EndedLoads:
    """Ended loads to report to the engine, each once."""

    arrived: set[str] = field(default_factory=set)
    """Requests whose asynchronous load ended, with or without success."""
    lost: set[str] = field(default_factory=set)
    """Requests of `arrived` that must compute all their tokens, in other blocks."""
    invalid_blocks: set[int] = field(default_factory=set)
    """Ids of the engine's blocks that were to be loaded and were not."""


class RankJobs:
    """Jobs ordered of one rank, their outcomes, and those not reported to the engine yet."""

    def __init__(self, *, stores: bool, whole_requests: bool) -> None:
        """`stores` is false for a rank that owes no copy of a save, because another one stores the same bytes.

        With `whole_requests` a request's asynchronous load is one job for each KV cache group, or more, and arrives or
        is lost as a whole: its blocks have no common numbering by which an engine could keep a part.
        """
        self._stores = stores
        self._whole_requests = whole_requests
        self._torn: set[str] = set()
        """Requests some of whose jobs have failed while others are still open."""
        self.open: dict[int, Job] = {}
        """Jobs ordered and not ended, by id."""
        self.left: set[int] = set()
        """Loads that the engine no longer waits for, although this rank may still write to their blocks."""
        self._filled: dict[int, RangeSet] = {}
        """Save job -> its blocks whose slots a tier has filled, or another rank fills."""
        self._recalled: set[int] = set()
        """Jobs under way whose blocks are of other weights than the engine's, or of a step that raised."""
        self._outcomes: dict[int, JobOutcome] = {}
        self._ended: dict[int, JobOutcome] = {}
        self._unreported = EndedLoads()

    def order(self, jobs: Iterable[Job]) -> None:
        """Register jobs that begin."""
        for job in jobs:
            self.open[job.job_id] = job
            if isinstance(job, SaveJob) and not self._stores:
                self._filled[job.job_id] = RangeSet.of(job.blocks)

    def recall(self, job_ids: Iterable[int]) -> None:
        """Recall jobs: those that have not ended will have failed as a whole, whatever is copied."""
        self._recalled.update(job_id for job_id in job_ids if job_id in self.open)

    def note_filled(self, job_id: int, blocks: BlockRange) -> None:
        """Note that the first `blocks` of a save, not ordered yet, are in their slots already."""
        self._filled[job_id] = RangeSet.of(blocks)

    def unfilled(self, job: SaveJob) -> SaveJob:
        """Part of a save that is to be copied: its last blocks, perhaps none."""
        filled = len(self._filled.get(job.job_id, ()))
        if not filled:
            return job
        start = job.start_block + filled
        return replace(job, start_block=start, slots=job.slots[filled:], block_ids=job.block_ids[filled:])

    def end(self, job_id: int, outcome: JobOutcome) -> None:
        """End a job with its outcome, once (H08); does nothing if it is not open."""
        job = self.open.pop(job_id, None)
        if job is None:
            return
        outcome = JobOutcome(done=self._filled.pop(job_id, RangeSet())).merge(outcome)
        left = job_id in self.left
        if left or job_id in self._recalled:
            self.left.discard(job_id)
            self._recalled.discard(job_id)
            outcome = JobOutcome(failed=RangeSet.of(job.blocks))
        self._outcomes[job_id] = self._ended[job_id] = outcome
        if len(self._ended) > ENDED_JOBS:
            del self._ended[next(iter(self._ended))]
        if isinstance(job, LoadJob) and not left:  # else it has been reported to the engine
            if self._whole_requests and not job.synchronous:
                self._end_part(job.request_id, failed=bool(outcome.failed.ranges))
                return
            self.report_invalid(job.block_ids[block - job.start_block] for block in outcome.failed.blocks())
            if not job.synchronous:
                self._unreported.arrived.add(job.request_id)

    def _end_part(self, request_id: str, *, failed: bool) -> None:
        """End one of a request's asynchronous loads; the last one reports the request."""
        if failed:
            self._torn.add(request_id)
        if not self._parts_of(request_id):
            self._unreported.arrived.add(request_id)
            if request_id in self._torn:
                self._torn.remove(request_id)
                self._unreported.lost.add(request_id)

    def _parts_of(self, request_id: str) -> list[int]:
        """Ids of the request's asynchronous loads that have not ended and for which the engine still waits."""
        return [
            number
            for number, job in self.open.items()
            if isinstance(job, LoadJob)
            and job.request_id == request_id
            and not (job.synchronous or number in self.left)
        ]

    def fail(self, job: Job) -> None:
        """End a job as failed, without a copy, even if it never began."""
        self.open[job.job_id] = job
        self.end(job.job_id, JobOutcome(failed=RangeSet.of(job.blocks)))

    def leave_synchronous(self, job: LoadJob) -> None:
        """Report a synchronous load's blocks as invalid, because the step no longer waits for it."""
        if job.job_id in self.open and job.job_id not in self.left:
            self.left.add(job.job_id)
            self.report_invalid(job.block_ids)

    def leave_overdue(self, job_id: int) -> None:
        """Have the engine go on without this asynchronous load, unless it has ended: the whole load is lost."""
        job = self.open.get(job_id)
        if isinstance(job, LoadJob) and job_id not in self.left and not job.synchronous:
            self.left.update(self._parts_of(job.request_id) if self._whole_requests else [job_id])
            self._torn.discard(job.request_id)
            self._unreported.arrived.add(job.request_id)
            self._unreported.lost.add(job.request_id)

    def answer(self, query: JobQuery) -> None:
        """Report the outcome of a job again; an unknown one has failed."""
        if query.job_id in self._ended:
            self._outcomes[query.job_id] = self._ended[query.job_id]
        elif query.job_id not in self.open:
            self._outcomes[query.job_id] = JobOutcome(failed=RangeSet.of(query.blocks))

    def outcome(self, job_id: int) -> JobOutcome | None:
        """Outcome of one of the last `ENDED_JOBS` jobs; None if it has not ended."""
        return self._ended.get(job_id)

    def report_broken(self, broken: Iterable[UnorderedLoad]) -> None:
        """Report loads as failed that could not be ordered, so that the engine recomputes them."""
        for load in broken:
            self.report_invalid(load.block_ids)
            if not load.synchronous:
                self._unreported.arrived.add(load.request_id)
                if self._whole_requests:
                    self._unreported.lost.add(load.request_id)

    def report_invalid(self, block_ids: Iterable[int]) -> None:
        """Report blocks whose content the engine must not use."""
        self._unreported.invalid_blocks.update(block_ids)

    def ended_loads(self) -> EndedLoads:
        """Ended loads since the last call, for the engine (H08)."""
        ended = self._unreported
        self._unreported = EndedLoads()
        return ended

    def report(self) -> dict[int, JobOutcome]:
        """Job id -> outcome, of jobs that ended or were asked for since the last report."""
        outcomes = self._outcomes
        self._outcomes = {}
        return outcomes
