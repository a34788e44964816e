"""Copies ordered of the workers, from the order until every rank has reported.

Owns the jobs under way, what each rank has reported of them, when a rank is asked again, and the hold on the engine's
blocks that a load may still write to after the engine has gone on without it. The caller decides what a finished copy
means, and what a late one costs its request. No clock: times are arguments.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from sys import maxsize

from kvpact.cache.ledger import Ledger
from kvpact.cache.needs.owed import Computed, Owed
from kvpact.cache.needs.runs import Failure, Holder, Run
from kvpact.cache.plan import Plan
from kvpact.contract import (
    BlockHolder,
    JobOutcome,
    JobQuery,
    JobTally,
    LoadJob,
    SaveJob,
    StepLookup,
    StepWork,
    WorkerReport,
)
from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey, BlockKeys
from kvpact.identity.tags import Tag
from kvpact.index.block_index import Pin
from kvpact.ranges import NO_RANGES, BlockRange, RangeSet
from kvpact.tiers.log_once import LogOnce

logger = logging.getLogger(__name__)

STEPS_TO_HEAR = 2
"""Steps from giving a load up to settling it as late. A load that ended before the workers heard of it has been
reported by then, also if the engine schedules a step before it takes in the results of the last one."""

Slots = tuple[int, ...]


PlanLease = Pin | Holder
"""A pin in this engine's memory, or a lease on a run in another one's."""

PactPlan = Plan[PlanLease, Sequence[Run]]
"""A plan with the runs it loads, one or more a group: its leases keep the slots' content, even if entries are dropped.
"""

PactLedger = Ledger[PlanLease, Sequence[Run]]


@dataclass(slots=True)
class LoadPart:
    """A job of a load, with its blocks and its reports."""

    job: LoadJob
    run: Run
    tally: JobTally


@dataclass(slots=True)
class LoadState:
    """A committed match on its way into the engine's blocks, in one or more jobs."""

    plan: PactPlan
    parts: list[LoadPart]
    ask_at: float
    recalled: bool = False
    """True if the weights have changed since the order."""
    given_up: bool = False
    """True after its deadline: the workers let the engine continue without it."""
    settled_late: bool = False
    """True once the engine continues without it. Later reports of it concern the cache alone."""
    holder: BlockHolder | None = None
    """Context that holds its blocks; None if they are not held."""
    job: LoadJob = field(init=False)
    """The first job, by whose id the load is known."""
    job_ids: list[int] = field(init=False, default_factory=list)
    """The ids of all its jobs."""
    block_ids: list[int] = field(init=False, default_factory=list)
    """All of the engine's blocks that are written to."""

    def __post_init__(self) -> None:
        self.job = self.parts[0].job
        for part in self.parts:
            self.job_ids.append(part.job.job_id)
            self.block_ids += part.job.block_ids

    @property
    def is_complete(self) -> bool:
        """True once every rank has reported all jobs."""
        for part in self.parts:  # noqa: SIM110 - a generator costs two calls more
            if not part.tally.complete:
                return False
        return True

    def outcome(self) -> JobOutcome:
        """Blocks of the match that arrived, and those that failed: the hull of the failures of all ranks."""
        blocks = self.plan.committed_blocks
        failed = NO_RANGES
        for part in self.parts:
            lost = part.tally.loaded().failed
            if lost.ranges:
                failed = failed.union(part.run.lost(lost, blocks))
        done = RangeSet.of(blocks)
        return JobOutcome(done.difference(failed) if failed.ranges else done, failed)

    def failures(self) -> Iterator[tuple[Failure, Holder | None]]:
        """Consequences of the blocks that did not arrive, by job, and the engine in whose memory they were."""
        for part in self.parts:
            failure = part.run.failure(part.tally.loaded().failed, self.plan.committed_blocks)
            if failure is not None:
                yield failure, part.run.holder


@dataclass(slots=True)
class SaveState:
    """Computed blocks on their way into the arena. `pin` keeps the last of them, with what it needs.

    `trusted` becomes false if the weights change; the content of the chain's blocks from `garbage_from` on is unknown,
    and so are the blocks attached to them.
    """

    job: SaveJob
    owed: Owed
    """The blocks that there was room for, with their slots as the index numbers them."""
    pin: Pin
    tally: JobTally
    ordered_at: float
    ask_at: float
    trusted: bool = True
    garbage_from: int = maxsize
    holds: bool = True
    """True while the engine's blocks are held for it."""

    @property
    def run(self) -> Run:
        """The blocks that are saved."""
        return self.owed.run

    def good(self) -> list[bool]:
        """For each block, True if its content is valid under its key."""
        done = self.tally.saved().done if self.trusted else NO_RANGES
        return self.run.good(done, self.garbage_from)

    @property
    def parts(self) -> list[SaveState]:
        """Itself: a save has one job."""
        return [self]

    @property
    def is_complete(self) -> bool:
        """True once every rank has reported the job."""
        return self.tally.complete


@dataclass(slots=True)
class PutOffSave:
    """Computed blocks whose save a later step orders, so that no step orders too many; the engine's blocks are held.

    The content of the chain's blocks from `garbage_from` on is unknown; `trusted` is as of `SaveState`.
    """

    request_id: str
    names: BlockKeys
    tag: Tag
    pieces: deque[Computed]
    """In the order of the chain; each is held and saved by itself."""
    trusted: bool = True
    garbage_from: int = maxsize


@dataclass(slots=True)
class _Outbox:
    """Orders collected in this step, sent to the workers at its end."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    inquiries: list[JobQuery] = field(default_factory=list)
    recalls: list[int] = field(default_factory=list)
    overdue: list[int] = field(default_factory=list)

    def has(self, job: LoadJob | SaveJob) -> bool:
        """True if this step orders the job, so that the workers do not know it yet."""
        return any(job is ordered for ordered in (*self.loads, *self.saves))

    def take(self, lookups: tuple[StepLookup, ...] = (), limits: tuple[int, int] | None = None) -> StepWork:
        """All of it, with the lookups of its saves and the step's limits; the next step begins empty."""
        kinds = (self.loads, self.saves, self.inquiries, self.recalls, self.overdue)
        if limits is None and not any(kinds):
            return _NOTHING
        work = StepWork(
            tuple(self.loads),
            tuple(self.saves),
            tuple(self.inquiries),
            tuple(self.recalls),
            tuple(self.overdue),
            lookups=lookups,
            max_copies=limits[0] if limits is not None else None,
            max_load_bytes=limits[1] if limits is not None else None,
        )
        for kind in kinds:
            kind.clear()
        return work


_NOTHING = StepWork()


@dataclass(eq=False)
class TransferJobs:
    """All loads and saves under way on `ranks` ranks, and the saves that are still to be ordered.

    Ranks are asked about a job every `timeout` seconds, which leaves time to ask twice before a load's deadline.
    Without a scheduler context no load is given up (H07).
    """

    ranks: int
    timeout: float
    number: Callable[[int], int] | None = None
    """Returns the workers' number of a slot; None if it is the index's."""
    loads: dict[int, LoadState] = field(default_factory=dict, init=False)
    saves: dict[int, SaveState] = field(default_factory=dict, init=False)
    put_off: deque[PutOffSave] = field(default_factory=deque, init=False)
    """In the order in which they are to be ordered."""
    unnamed: dict[str, dict[int, PutOffSave]] = field(default_factory=dict, init=False)
    """Request -> by KV cache group a loose block of a row that has no key yet. None counts as under way: they end with
    their requests."""
    ordered: int = field(default=0, init=False)
    """Number of jobs so far; also the id of the last one."""
    _outbox: _Outbox = field(default_factory=_Outbox, init=False)
    _loads_by_job: dict[int, LoadState] = field(default_factory=dict, init=False)
    """Id of each job of a load -> the load."""
    _context: BlockHolder | None = field(default=None, init=False)
    given_up: dict[int, int] = field(default_factory=dict, init=False)
    """Id of each load that was given up -> the step in which it was; until no rank can write its blocks. While there is
    one, a rank may be stuck in a copy: a new order would wait for it."""
    _step: int = field(default=0, init=False)
    _told: LogOnce = field(default_factory=lambda: LogOnce(logger), init=False)

    def bind(self, context: BlockHolder) -> None:
        """Hold blocks through `context`."""
        self._context = context

    def order_load(self, plan: PactPlan, runs: Sequence[Run], now: float, *, synchronous: bool) -> LoadState:
        """With this step, copy blocks of a committed plan from their slots into the engine's.

        The step waits for a `synchronous` load, whose blocks are held from now on: the engine may schedule the next
        step, and reuse them, before it hears that the load failed. There is one run at least.
        """
        parts = []
        for run in runs:
            holder = run.holder
            slots = self._numbers(run.slots) if holder is None else tuple(run.slots)
            ids = tuple(run.block_ids)
            of = holder.number if holder is not None else 0
            job = LoadJob(self._next_id(), plan.request_id, run.start, slots, ids, synchronous, run.group, of)
            parts.append(LoadPart(job, run, JobTally(job.blocks, self.ranks)))
            self._outbox.loads.append(job)
        load = LoadState(plan, parts, now + self.timeout)
        self.loads[load.job.job_id] = load
        self._loads_by_job.update(dict.fromkeys(load.job_ids, load))
        if synchronous:
            self._hold(load)
        return load

    def _hold(self, load: LoadState) -> None:
        if self._context is not None and load.holder is None:
            self._context.touch(load.block_ids)
            load.holder = self._context

    def order_save(self, owed: Owed, pin: Pin, now: float) -> SaveState:
        """After this step, copy the engine's blocks of a run into its slots; `pin` keeps the last of them."""
        run = owed.run
        slots = self._numbers(run.slots)
        ids = tuple(run.block_ids)
        job = SaveJob(self._next_id(), owed.request_id, run.start, slots, ids, run.group)
        tally = JobTally(BlockRange(run.start, len(slots)), self.ranks)
        save = SaveState(job, owed, pin, tally, now, now + self.timeout)
        self.saves[job.job_id] = save
        self._outbox.saves.append(job)
        return save

    def _numbers(self, slots: Sequence[int]) -> Slots:
        """Slots as workers know them."""
        return tuple(slots if self.number is None else map(self.number, slots))

    def _next_id(self) -> int:
        self.ordered += 1
        return self.ordered

    def save_ordered_now(self, request_id: str) -> SaveState | None:
        """The save of a request's chain that the running step orders, if any."""
        saves = [self.saves[job.job_id] for job in self._outbox.saves if job.request_id == request_id]
        return next((save for save in saves if save.run.is_linked), None)

    def end_step(
        self, now: float, lookups: tuple[StepLookup, ...] = (), limits: tuple[int, int] | None = None
    ) -> StepWork:
        """Orders of this step for the workers, with queries about copies that have not ended for `timeout` seconds.

        Loads whose deadline has passed are given up. `limits` are most copies, and most bytes of loads, of `StepWork`.
        """
        self._step += 1
        self._give_up(now)
        tasks: list[LoadState | SaveState] = [*self.loads.values(), *self.saves.values()]
        for task in tasks:
            if now < task.ask_at:
                continue
            task.ask_at = now + self.timeout  # a report may be lost, or its worker slow: ask, and do no more
            if not self._outbox.has(task.job):  # a worker calls an unknown job failed, and would copy it later
                self._outbox.inquiries += [JobQuery(part.job.job_id, part.job.blocks) for part in task.parts]
                if isinstance(task, LoadState) and task.given_up:
                    self._outbox.overdue += task.job_ids  # a worker may not have heard it
        return self._outbox.take(lookups, limits)

    def _give_up(self, now: float) -> None:
        """Hold the blocks of loads whose deadline has passed. This step tells the workers so, and each query again.

        A load is not given up in the step that orders it.
        """
        for load in self.loads.values() if self._context is not None else ():
            if now <= load.plan.deadline or load.given_up or self._outbox.has(load.job):
                continue
            load.given_up = True
            self._outbox.overdue += load.job_ids
            self._hold(load)
            self.given_up[load.job.job_id] = self._step
            text = (
                "kvpact: the load of %d blocks for request %s is late; they are computed instead (others are counted)"
            )
            self._told.log("late", logging.WARNING, text, len(load.block_ids), load.job.request_id)

    def give_up(self, now: float) -> list[LoadState]:
        """Give up overdue loads; returns those that the engine continues without from now on, each once."""
        self._give_up(now)
        if not self.given_up:
            return []
        late = [self.loads[job_id] for job_id, step in self.given_up.items() if self._step - step >= STEPS_TO_HEAR]
        late = [load for load in late if not load.settled_late]
        for load in late:
            load.settled_late = True
        return late

    def abandon_step(self) -> WorkerReport:
        """The running step's orders never reach the workers: returns a report that all ranks failed them."""
        return self._outbox.take().failed(self.ranks)

    def apply_report(self, report: WorkerReport) -> tuple[list[LoadState], list[SaveState]]:
        """Count a report; return the loads and the saves that every rank has now reported, oldest first.

        Each stays under way until its caller settles it and calls `end`. Outcomes of unknown jobs (reported twice) are
        ignored.
        """
        reported: dict[int, LoadState | SaveState] = {}
        for rank, jobs in report.ranks.items():
            for job_id, outcome in jobs.items():
                task = self._loads_by_job.get(job_id) or self.saves.get(job_id)
                if task is not None:
                    reported[task.job.job_id] = task
                    for part in task.parts:
                        if part.job.job_id == job_id:
                            part.tally.add(rank, outcome)
        loads = list[LoadState]()
        saves = list[SaveState]()
        for _, task in sorted(reported.items()):
            if not task.is_complete:
                continue
            if isinstance(task, LoadState):
                loads.append(task)
            else:
                saves.append(task)
        return loads, saves

    def end(self, task: LoadState | SaveState) -> None:
        """The job is settled: no rank can write to a load's blocks any more."""
        if isinstance(task, LoadState):
            del self.loads[task.job.job_id]
            self.given_up.pop(task.job.job_id, None)
            if task.holder is not None:
                task.holder.free_blocks(task.block_ids)
            for job_id in task.job_ids:
                del self._loads_by_job[job_id]
        else:
            del self.saves[task.job.job_id]

    def invalidate(self, request_id: str, key: BlockKey, block: int) -> None:
        """The content of a request's `block`, named `key`, is unknown: store nothing from it on."""
        waiting: list[tuple[SaveState | PutOffSave, str, Sequence[BlockKey]]] = [
            *((save, save.job.request_id, save.run.chain) for save in self.saves.values()),
            *((save, save.request_id, save.names.keys) for save in self.not_ordered()),
        ]
        for each, name, chain in waiting:
            if name == request_id or (block < len(chain) and chain[block] == key):
                each.garbage_from = min(each.garbage_from, block)

    def blocks_to_save(self) -> Iterator[tuple[str, int, Sequence[int]]]:
        """Request, row of its chain and the engine's blocks of all that is being saved, or to be saved, in parts."""
        for save in self.saves.values():
            for row, block_ids in save.run.places():
                yield save.job.request_id, row, block_ids
        for waiting in self.not_ordered():
            for piece in waiting.pieces:
                yield waiting.request_id, piece.start, piece.ids
                yield from ((waiting.request_id, piece.start, (each,)) for each in piece.loose_ids)

    def not_ordered(self) -> Iterator[PutOffSave]:
        """All saves that are still to be ordered."""
        yield from self.put_off
        for of_request in self.unnamed.values():
            yield from of_request.values()

    def cut_put_off(self, request_id: str, block: int) -> None:
        """Order no save of a request's blocks from `block` on, but those that are ordered already."""
        for waiting in self.not_ordered():
            if waiting.request_id == request_id:
                waiting.garbage_from = min(waiting.garbage_from, block)

    def recall(self) -> None:
        """The weights may have changed: do not store what is being saved, do not use what is being loaded.

        Synchronous loads belong to a step that the engine has begun, and to the weights of that step.
        """
        for save in self.saves.values():
            save.trusted = False
        for waiting in self.not_ordered():
            waiting.trusted = False
        for load in self.loads.values():
            if not load.recalled and not load.job.synchronous:
                self._outbox.recalls += load.job_ids
            load.recalled = True

    def check(self) -> None:
        """Verify the jobs under way; raises PactViolation."""
        tasks: list[tuple[int, LoadState | SaveState]] = [*self.loads.items(), *self.saves.items()]
        for job_id, task in tasks:
            if task.job.job_id != job_id or not 0 < job_id <= self.ordered or task.is_complete:
                raise PactViolation(f"job {job_id} is kept as under way and in disorder: {task}")
        if gone := self.given_up.keys() - self.loads.keys():
            raise PactViolation(f"blocks are held for loads that have ended: {sorted(gone)}")

    def __len__(self) -> int:
        return len(self.loads) + len(self.saves) + len(self.put_off)
