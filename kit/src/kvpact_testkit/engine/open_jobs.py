"""The jobs that a small cache's workers were given, until every rank has reported on all of their blocks."""

from __future__ import annotations

from typing import Generic, TypeVar

from kvpact.contract import JobTally, LoadJob, SaveJob, WorkerReport

AnyJob = TypeVar("AnyJob", LoadJob, SaveJob)
Subject = TypeVar("Subject")
"""What the cache wants back with a job that is complete."""


class OpenJobs(Generic[AnyJob, Subject]):
    """Jobs for `num_ranks` ranks, each with a subject of the cache's choice."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.by_id: dict[int, tuple[AnyJob, JobTally, Subject]] = {}

    def add(self, job: AnyJob, subject: Subject) -> None:
        """The workers are given `job`."""
        self.by_id[job.job_id] = job, JobTally(job.blocks, self._num_ranks), subject

    def complete(self, report: WorkerReport) -> list[tuple[AnyJob, JobTally, Subject]]:
        """Count a report; removes and returns the jobs that all ranks have reported in full."""
        for rank, jobs in report.ranks.items():
            for job_id in jobs.keys() & self.by_id.keys():
                self.by_id[job_id][1].add(rank, jobs[job_id])
        complete = [job_id for job_id, (_, tally, _) in self.by_id.items() if tally.complete]
        return [self.by_id.pop(job_id) for job_id in complete]
