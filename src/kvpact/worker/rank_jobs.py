"""One rank's jobs from order to report: each ends once, and what the engine must know of its blocks is said once.

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
"""Ended jobs whose outcome can be said again: far more than can end before a lost report is asked for."""


@dataclass(slots=True)
class EndedLoads:
    """What the engine must know of its loads, each said once."""

    arrived: set[str] = field(default_factory=set)
    """Requests whose asynchronous load ended, in whatever way."""
    lost: set[str] = field(default_factory=set)
    """Requests of `arrived` that are to compute everything, in other blocks."""
    invalid_blocks: set[int] = field(default_factory=set)
    """The engine's blocks that were to be loaded and were not."""


class RankJobs:
    """What was ordered of one rank, what became of it, and what the engine has not been told yet."""

    def __init__(self, *, stores: bool, whole_requests: bool) -> None:
        """`stores` is false of a rank that owes no copy of a save, because another one stores the same bytes.

        With `whole_requests` a request's asynchronous load is one job for each KV cache group, or more, and arrives or
        is lost as a whole: its blocks have no common numbering by which an engine could keep a part.
        """
        self._stores = stores
        self._whole_requests = whole_requests
        self._torn: set[str] = set()
        """Requests some of whose jobs have failed while others are still open."""
        self.open: dict[int, Job] = {}
        """What was ordered and has not ended."""
        self.left: set[int] = set()
        """Loads without which the engine goes on, though this rank may still write to their blocks."""
        self._filled: dict[int, RangeSet] = {}
        """Save job -> its blocks whose slots others fill: a tier has filled them, or another rank does."""
        self._recalled: set[int] = set()
        """Jobs under way whose blocks are of other weights than the engine's, or of a step that went wrong."""
        self._outcomes: dict[int, JobOutcome] = {}
        self._ended: dict[int, JobOutcome] = {}
        self._unreported = EndedLoads()

    def order(self, jobs: Iterable[Job]) -> None:
        """Take in jobs that begin."""
        for job in jobs:
            self.open[job.job_id] = job
            if isinstance(job, SaveJob) and not self._stores:
                self._filled[job.job_id] = RangeSet.of(job.blocks)

    def recall(self, job_ids: Iterable[int]) -> None:
        """Recall jobs: those that have not ended will have failed as a whole, whatever is copied."""
        self._recalled.update(job_id for job_id in job_ids if job_id in self.open)

    def note_filled(self, job_id: int, blocks: BlockRange) -> None:
        """The first `blocks` of a save that is still to be ordered are in their slots already."""
        self._filled[job_id] = RangeSet.of(blocks)

    def unfilled(self, job: SaveJob) -> SaveJob:
        """What of a save is to be copied; its last blocks, perhaps none."""
        filled = len(self._filled.get(job.job_id, ()))
        slots, block_ids = job.slots[filled:], job.block_ids[filled:]
        return replace(job, start_block=job.start_block + filled, slots=slots, block_ids=block_ids) if filled else job

    def end(self, job_id: int, outcome: JobOutcome) -> None:
        """The one end of a job (H08); nothing if it is not open."""
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
        if isinstance(job, LoadJob) and not left:  # else the engine has been told
            if self._whole_requests and not job.synchronous:
                self._end_part(job.request_id, failed=bool(outcome.failed.ranges))
                return
            self.report_invalid(job.block_ids[block - job.start_block] for block in outcome.failed.blocks())
            if not job.synchronous:
                self._unreported.arrived.add(job.request_id)

    def _end_part(self, request_id: str, *, failed: bool) -> None:
        """One of a request's asynchronous loads has ended; the last one ends all."""
        if failed:
            self._torn.add(request_id)
        if not self._parts_of(request_id):
            self._unreported.arrived.add(request_id)
            if request_id in self._torn:
                self._torn.remove(request_id)
                self._unreported.lost.add(request_id)

    def _parts_of(self, request_id: str) -> list[int]:
        """The request's asynchronous loads that have not ended and for which the engine still waits."""
        return [
            number
            for number, job in self.open.items()
            if isinstance(job, LoadJob)
            and job.request_id == request_id
            and not (job.synchronous or number in self.left)
        ]

    def fail(self, job: Job) -> None:
        """The job ends without a copy, even if it never began."""
        self.open[job.job_id] = job
        self.end(job.job_id, JobOutcome(failed=RangeSet.of(job.blocks)))

    def leave_synchronous(self, job: LoadJob) -> None:
        """The step does not wait for this load any longer."""
        if job.job_id in self.open and job.job_id not in self.left:
            self.left.add(job.job_id)
            self.report_invalid(job.block_ids)

    def leave_overdue(self, job_id: int) -> None:
        """The engine goes on without this asynchronous load, unless it has ended: the request's whole load is lost."""
        job = self.open.get(job_id)
        if isinstance(job, LoadJob) and job_id not in self.left and not job.synchronous:
            self.left.update(self._parts_of(job.request_id) if self._whole_requests else [job_id])
            self._torn.discard(job.request_id)
            self._unreported.arrived.add(job.request_id)
            self._unreported.lost.add(job.request_id)

    def answer(self, query: JobQuery) -> None:
        """Say again what became of a job; one that was never heard of has failed."""
        if query.job_id in self._ended:
            self._outcomes[query.job_id] = self._ended[query.job_id]
        elif query.job_id not in self.open:
            self._outcomes[query.job_id] = JobOutcome(failed=RangeSet.of(query.blocks))

    def outcome(self, job_id: int) -> JobOutcome | None:
        """What became of a job that ended of late."""
        return self._ended.get(job_id)

    def report_broken(self, broken: Iterable[UnorderedLoad]) -> None:
        """Report loads as failed that nobody will carry out, so that the engine recomputes them."""
        for load in broken:
            self.report_invalid(load.block_ids)
            if not load.synchronous:
                self._unreported.arrived.add(load.request_id)
                if self._whole_requests:
                    self._unreported.lost.add(load.request_id)

    def report_invalid(self, block_ids: Iterable[int]) -> None:
        """The engine must not use what these blocks hold."""
        self._unreported.invalid_blocks.update(block_ids)

    def ended_loads(self) -> EndedLoads:
        """What the engine has not been told of its loads (H08)."""
        ended, self._unreported = self._unreported, EndedLoads()
        return ended

    def report(self) -> dict[int, JobOutcome]:
        """Job id -> outcome, of what ended or was asked for since the last report."""
        outcomes, self._outcomes = self._outcomes, {}
        return outcomes
