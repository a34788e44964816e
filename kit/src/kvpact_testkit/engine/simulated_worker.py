"""Simulated ranks: a worker that copies pages of KV memory to and from slots, with configured delays and faults.

Owns the copies and their reports. The caller supplies faults as a `JobBehavior` per rank and job; this module uses no
random numbers, and no clock but the engine's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpact.contract import ExternalCacheWorker, JobOutcome, LoadJob, SaveJob, StepWork, WorkerReport
from kvpact.ranges import RangeSet
from kvpact_testkit.engine.output import SchedulerOutput

Job: TypeAlias = LoadJob | SaveJob


@dataclass(frozen=True, slots=True)
class JobBehavior:
    """How one rank carries out one job. By default at once, completely, and reported once in the step that ordered it.

    Steps count from the one that ordered the job. A synchronous load is always copied in its step.
    """

    copy_after_steps: int = 0
    report_after_steps: int = 0
    """Steps between the copy and the report."""
    failed_blocks: RangeSet = field(default_factory=RangeSet)
    """Blocks, in the request's numbering, that are copied in part and reported as failed."""
    times_reported: int = 1
    """0: the report is lost; 2: it is repeated in the next step."""
    block_by_block: bool = False
    """Whether one block is reported per step, the last block first."""
    damaged_blocks: RangeSet = field(default_factory=RangeSet)
    """Blocks that are copied in part and reported as done, which a correct worker never does."""


FAITHFUL = JobBehavior()

NEVER = 1 << 40
"""A value of `copy_after_steps`: the copy hangs until `SimulatedWorker.go_on`."""

REMEMBERED_JOBS = 1024
"""Number of finished jobs whose outcome a worker remembers; more than any cache has open."""


class ByteSegment:
    """An arena segment in this process, without shared memory: `num_slots` pieces of `rank_slot_bytes` bytes."""

    def __init__(self, num_slots: int, rank_slot_bytes: int) -> None:
        self.num_slots = self.usable_slots = num_slots
        self.rank_slot_bytes = rank_slot_bytes
        self._memory = memoryview(bytearray(num_slots * rank_slot_bytes))

    def slot_view(self, slot: int) -> memoryview:
        """The piece of `slot`, writable."""
        return self._memory[slot * self.rank_slot_bytes : (slot + 1) * self.rank_slot_bytes]


@dataclass(slots=True)
class _Task:
    job: Job
    conduct: JobBehavior
    copy_at: int


class SimulatedWorker(ExternalCacheWorker):
    """One rank's worker. `slot_view` gives the rank's piece of an arena slot; `conduct` decides
    how it treats each job.

    `supply` answers `before_update_states`, and may write to `layers` itself: layer name -> `[num_blocks, page_bytes]`.
    """

    def __init__(
        self,
        rank: int,
        slot_view: Callable[[int], memoryview],
        conduct: Callable[[int, Job], JobBehavior] | None = None,
        supply: Callable[[SchedulerOutput], Mapping[str, int]] | None = None,
    ) -> None:
        self.rank = rank
        self.layers: dict[str, npt.NDArray[np.uint8]] = {}
        self._slot_view = slot_view
        self._conduct = conduct
        self._supply = supply
        self._step = 0
        self._synchronous: list[_Task] = []
        self._tasks: list[_Task] = []
        self._recalled: set[int] = set()
        self._said: dict[int, JobOutcome] = {}
        self._reports: list[tuple[int, int, JobOutcome]] = []

    @property
    def open_jobs(self) -> int:
        """Jobs not copied yet, and reports not sent yet."""
        return len(self._tasks) + len(self._reports)

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """See `ExternalCacheWorker`; the values are `[num_blocks, page_bytes]` arrays of bytes."""
        self.layers = dict(kv_caches)

    def before_update_states(self, scheduler_output: object) -> Mapping[str, int]:
        """See `ExternalCacheWorker`."""
        if self._supply is None or not isinstance(scheduler_output, SchedulerOutput):
            return {}
        return self._supply(scheduler_output)

    def start_loads(self, work: StepWork) -> None:
        """See `ExternalCacheWorker`."""
        self._step += 1
        self._synchronous = []
        waiting = {task.job.job_id for task in self._tasks}
        self._recalled.update(work.recalls, waiting.intersection(work.overdue))
        for query in work.inquiries:
            if query.job_id not in waiting:  # else it is reported after its copy
                unknown = JobOutcome(failed=RangeSet.of(query.blocks))
                self._reports.append((self._step, query.job_id, self._said.get(query.job_id, unknown)))
        for job in work.loads:
            (self._synchronous if job.synchronous else self._tasks).append(self._take(job))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See `ExternalCacheWorker`: the layer is copied here, so an engine that does not wait reads the old
        content."""
        layer = list(self.layers).index(layer_name)
        for task in self._synchronous:
            self._copy(task, layer)
            if layer == len(self.layers) - 1:
                self._done(task)

    def start_saves(self, work: StepWork) -> None:
        """See `ExternalCacheWorker`."""
        self._tasks.extend(self._take(job) for job in work.saves)

    def report(self) -> WorkerReport:
        """See `ExternalCacheWorker`; makes the copies that are due first."""
        due = [task for task in self._tasks if task.copy_at <= self._step]
        self._tasks = [task for task in self._tasks if task.copy_at > self._step]
        for task in due:
            for layer in range(len(self.layers)):
                self._copy(task, layer)
            self._done(task)
        outcomes: dict[int, JobOutcome] = {}
        for _, job_id, outcome in (report for report in self._reports if report[0] <= self._step):
            outcomes[job_id] = outcomes.get(job_id, JobOutcome()).merge(outcome)
        self._reports = [report for report in self._reports if report[0] > self._step]
        return WorkerReport({self.rank: outcomes})

    def go_on(self) -> None:
        """Make all hanging and delayed copies with the next report."""
        for task in self._tasks:
            task.copy_at = self._step

    def _take(self, job: Job) -> _Task:
        conduct = FAITHFUL if self._conduct is None else self._conduct(self.rank, job)
        return _Task(job, conduct, self._step + conduct.copy_after_steps)

    def slots_of(self, job: Job) -> Callable[[int], memoryview]:
        """The view of each slot that a job names; to be overridden where they may be in another engine's memory."""
        return self._slot_view

    def _copy(self, task: _Task, layer: int) -> None:
        job, pages = task.job, list(self.layers.values())[layer]
        slot_view = self.slots_of(job)
        size = pages.shape[1]
        for block, slot, block_id in zip(job.blocks, job.slots, job.block_ids, strict=True):
            piece = np.frombuffer(slot_view(slot), np.uint8)[layer * size : (layer + 1) * size]
            torn = block in task.conduct.failed_blocks or block in task.conduct.damaged_blocks
            length = size // 2 if torn else size
            if isinstance(job, LoadJob):
                pages[block_id, :length] = piece[:length]
                pages[block_id, length:] = 0
            else:
                piece[:length] = pages[block_id, :length]
                piece[length:] = 0

    def _done(self, task: _Task) -> None:
        job, conduct = task.job, task.conduct
        due = self._step + conduct.report_after_steps
        blocks = RangeSet.of(job.blocks)
        failed = blocks.intersection(conduct.failed_blocks)
        if job.job_id in self._recalled:
            self._recalled.discard(job.job_id)
            failed = blocks
        pieces = [blocks]
        if conduct.block_by_block:
            pieces = [RangeSet.span(block, block + 1) for block in reversed(list(job.blocks))]
        self._said[job.job_id] = JobOutcome(blocks.difference(failed), failed)
        if len(self._said) > REMEMBERED_JOBS:
            del self._said[next(iter(self._said))]
        for time in range(conduct.times_reported):
            for wait, piece in enumerate(pieces):
                outcome = JobOutcome(piece.difference(failed), piece.intersection(failed))
                self._reports.append((due + time + wait, job.job_id, outcome))
