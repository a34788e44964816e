"""The copies that workers were told to make, from the order until every rank has reported.

Owns the jobs under way, what each rank has reported of them, and when a rank is asked again. The caller decides what a
finished copy means. No clock: times are arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from sys import maxsize

from kvpact.cache.ledger import Plan
from kvpact.contract import JobOutcome, JobQuery, JobTally, LoadJob, SaveJob, StepLookup, StepWork, WorkerReport
from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey, BlockKeys
from kvpact.identity.tags import Tag
from kvpact.index.block_index import Pin
from kvpact.ranges import BlockRange, RangeSet

Slots = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SideBlocks:
    """Blocks in a row of a side group, in the group's numbering, and where memory has them."""

    group: int
    start: int
    keys: tuple[BlockKey, ...]
    slots: Slots


@dataclass(frozen=True, slots=True)
class PlanSlots:
    """The slots of a plan's blocks: its pins keep their content, even if entries are dropped."""

    chain: Sequence[int] = ()
    sides: tuple[SideBlocks, ...] = ()
    """What the plan's last token needs of the side groups, and the engine has not computed."""

    @property
    def blocks(self) -> int:
        """All blocks that the plan loads."""
        return len(self.chain) + sum(len(run.slots) for run in self.sides)


PactPlan = Plan[Pin, PlanSlots]


@dataclass(slots=True)
class LoadState:
    """A committed match on its way into the engine's blocks: one job for the chain, and some for the side groups."""

    job: LoadJob
    """The chain's; where the chain has no bytes, the first one of the others."""
    plan: PactPlan
    keys: tuple[BlockKey, ...]
    tally: JobTally
    ask_at: float
    sides: dict[int, tuple[LoadJob, JobTally, tuple[BlockKey, ...]]] = field(default_factory=dict)
    """Job id -> a side group's job, its reports and the names of its blocks."""
    recalled: bool = False
    """Whether the weights have changed since the order."""
    given_up: bool = False
    """Whether its deadline has passed: the workers let the engine continue without it."""
    told: bool = False
    """Whether it was settled as late. Later reports of it concern the cache alone."""

    @property
    def jobs(self) -> list[LoadJob]:
        """All jobs of the load."""
        return [self.job, *(job for job, _, _ in self.sides.values() if job is not self.job)]

    @property
    def block_ids(self) -> list[int]:
        """All of the engine's blocks that are written to."""
        return [block_id for job in self.jobs for block_id in job.block_ids]

    @property
    def is_complete(self) -> bool:
        """Whether every rank has reported all jobs."""
        return self.tally.complete and all(tally.complete for _, tally, _ in self.sides.values())

    def outcome(self) -> JobOutcome:
        """Return the outcome of the chain's committed blocks: all have failed if one of a side group has."""
        blocks = RangeSet.of(self.plan.committed_blocks)
        if any(tally.loaded().failed.ranges for _, tally, _ in self.sides.values()):
            return JobOutcome(failed=blocks)
        return JobOutcome(done=blocks) if self.job.job_id in self.sides else self.tally.loaded()

    def chain_failed(self) -> int | None:
        """The first of the chain's blocks that did not arrive, if any."""
        failed = None if self.job.job_id in self.sides else self.tally.loaded().failed.hull()
        return failed.start if failed is not None else None

    def failed_sides(self) -> list[BlockKey]:
        """The names of the side groups' blocks that did not arrive."""
        return [
            key
            for job, tally, keys in self.sides.values()
            for block, key in zip(job.blocks, keys, strict=True)
            if block in tally.loaded().failed
        ]


@dataclass(slots=True)
class SaveState:
    """Computed blocks on their way into the arena. `pin` keeps their chain.

    `trusted` becomes false if the weights change; the content of the chain's blocks from `garbage_from` on is unknown.

    `leaving` are blocks saved because the engine is about to evict them: it evicts them first afterwards.
    """

    job: SaveJob
    slots: Slots | range
    """The job's slots, as they were reserved."""
    keys: Sequence[BlockKey]
    """The chain from its first block on; it may go on after the job's."""
    pin: Pin
    tally: JobTally
    ask_at: float
    leaving: frozenset[int] = frozenset()
    trusted: bool = True
    garbage_from: int = maxsize
    sides: tuple[BlockKey, ...] = ()
    """The names of the blocks that are saved, if they are a side group's. `keys` is the chain that they hang on."""
    side_rows: tuple[int, ...] = ()
    """Their rows of the chain."""

    @property
    def is_complete(self) -> bool:
        """Whether every rank has reported the job."""
        return self.tally.complete


@dataclass(slots=True)
class PutOffSave:
    """Computed blocks whose save a later step orders, so that no step orders too many; the engine's blocks are held.

    The content of the chain's blocks from `garbage_from` on is unknown; `trusted` is as of `SaveState`.
    """

    request_id: str
    names: BlockKeys
    token_ids: Sequence[int]
    """All of the request; `names` makes the keys of them."""
    tag: Tag
    """With which the blocks were computed."""
    start: int
    """The first block."""
    pieces: deque[tuple[int, ...]]
    """The engine's blocks from there on, in the parts that are held and saved together; the last block of each first.
    """
    trusted: bool = True
    garbage_from: int = maxsize


@dataclass(slots=True)
class _Outbox:
    """What the running step's end tells the workers."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    inquiries: list[JobQuery] = field(default_factory=list)
    recalls: list[int] = field(default_factory=list)
    overdue: list[int] = field(default_factory=list)

    def has(self, job: LoadJob | SaveJob) -> bool:
        """Whether this step orders the job, so that the workers do not know it yet."""
        return any(job is ordered for ordered in (*self.loads, *self.saves))

    def take(self, lookups: tuple[StepLookup, ...] = ()) -> StepWork:
        """All of it, with the lookups of its saves; the next step begins empty."""
        kinds = (self.loads, self.saves, self.inquiries, self.recalls, self.overdue)
        if not any(kinds):
            return _NOTHING
        work = StepWork(
            tuple(self.loads),
            tuple(self.saves),
            tuple(self.inquiries),
            tuple(self.recalls),
            tuple(self.overdue),
            lookups=lookups,
        )
        for kind in kinds:
            kind.clear()
        return work


_NOTHING = StepWork()


@dataclass(eq=False)
class TransferJobs:
    """All loads and saves under way on `ranks` ranks, and the saves that are still to be ordered.

    Ranks are asked about a job every `timeout` seconds, which leaves time to ask twice before a load's deadline.
    """

    ranks: int
    timeout: float
    number: Callable[[int], int] | None = None
    """Tells the number by which workers know a slot; None if it is the index's."""
    loads: dict[int, LoadState] = field(default_factory=dict, init=False)
    saves: dict[int, SaveState] = field(default_factory=dict, init=False)
    put_off: deque[PutOffSave] = field(default_factory=deque, init=False)
    """In the order in which they are to be ordered."""
    ordered: int = field(default=0, init=False)
    """Number of jobs so far; also the id of the last one."""
    _outbox: _Outbox = field(default_factory=_Outbox, init=False)
    _loads_of_sides: dict[int, LoadState] = field(default_factory=dict, init=False)
    """Job id of a side group's load -> the load that it is a part of."""

    def order_load(
        self, plan: PactPlan, blocks: BlockRange, keys: Sequence[BlockKey], block_ids: Sequence[int], now: float,
        *, synchronous: bool, sides: Sequence[tuple[SideBlocks, tuple[int, ...]]] = (), chain: int | None = 0,
    ) -> LoadState:  # fmt: skip
        """With this step, copy `blocks` of a committed plan from its slots into the engine's blocks.

        The step waits for a `synchronous` one. `sides` are the side groups' blocks, each with the engine's; `chain` is
        the number of the chain's group, None if the chain has no bytes.
        """
        name = plan.request_id
        jobs = {
            job.job_id: (job, JobTally(job.blocks, self.ranks), run.keys)
            for run, ids in sides
            for job in [LoadJob(self._next_id(), name, run.start, run.slots, ids, synchronous, run.group)]
        }
        if chain is not None:
            slots, ids = tuple(plan.slots.chain[: blocks.count]), tuple(block_ids[blocks.start : blocks.end])
            job = LoadJob(self._next_id(), name, blocks.start, slots, ids, synchronous, chain)
            tally = JobTally(blocks, self.ranks)
            self._outbox.loads.append(job)
        else:
            job, tally, _ = next(iter(jobs.values()))
        load = LoadState(job, plan, tuple(keys[: blocks.end]), tally, now + self.timeout, jobs)
        self.loads[job.job_id] = load
        self._loads_of_sides.update(dict.fromkeys(jobs, load))
        self._outbox.loads += [job for job, _, _ in jobs.values()]
        return load

    def order_save(
        self, request_id: str, start: int, slots: Slots | range, block_ids: tuple[int, ...],
        keys: Sequence[BlockKey], pin: Pin,
        now: float, leaving: frozenset[int] = frozenset(), group: int = 0,
    ) -> SaveState:  # fmt: skip
        """After this step, copy the engine's blocks from `start` on into `slots`; `pin` keeps the chain of `keys`."""
        job = SaveJob(self._next_id(), request_id, start, tuple(slots), block_ids, group)
        tally = JobTally(job.blocks, self.ranks)
        save = SaveState(job, slots, keys, pin, tally, now + self.timeout, leaving)
        self.saves[job.job_id] = save
        self._outbox.saves.append(job)
        return save

    def _next_id(self) -> int:
        self.ordered += 1
        return self.ordered

    def save_ordered_now(self, request_id: str) -> SaveState | None:
        """The save of a request's chain that the running step orders, if any."""
        saves = (job for job in self._outbox.saves if job.request_id == request_id)
        job = next((job for job in saves if not self.saves[job.job_id].sides), None)
        return self.saves[job.job_id] if job is not None else None

    def end_step(self, now: float, lookups: tuple[StepLookup, ...] = ()) -> StepWork:
        """What to tell the workers, with queries about copies that have not ended for `timeout` seconds."""
        tasks: list[LoadState | SaveState] = [*self.loads.values(), *self.saves.values()]
        for task in tasks:
            if now < task.ask_at:
                continue
            task.ask_at = now + self.timeout  # a report may be lost, or its worker slow: ask, and do no more
            if not self._outbox.has(task.job):  # a worker calls an unknown job failed, and would copy it later
                jobs = task.jobs if isinstance(task, LoadState) else [task.job]
                self._outbox.inquiries += [JobQuery(job.job_id, job.blocks) for job in jobs]
                if isinstance(task, LoadState) and task.given_up:
                    self._outbox.overdue += [job.job_id for job in jobs]  # a worker may not have heard it
        return self._named(self._outbox.take(lookups))

    def _named(self, work: StepWork) -> StepWork:
        """Return the step's work with the slots as workers know them."""
        if self.number is None:
            return work
        loads = tuple(replace(job, slots=tuple(map(self.number, job.slots))) for job in work.loads)
        return replace(
            work,
            loads=loads,
            saves=tuple(replace(job, slots=tuple(map(self.number, job.slots))) for job in work.saves),
        )

    def give_up(self, now: float) -> list[LoadState]:
        """Loads whose deadline has passed. This step tells the workers so, once, and again with each query.

        A load is not given up in the step that orders it.
        """
        overdue = [
            load
            for load in self.loads.values()
            if now > load.plan.deadline and not load.given_up and not self._outbox.has(load.job)
        ]
        for load in overdue:
            load.given_up = True
            self._outbox.overdue += [job.job_id for job in load.jobs]
        return overdue

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
                task = self.loads.get(job_id) or self.saves.get(job_id) or self._loads_of_sides.get(job_id)
                if task is not None:
                    side = task.sides.get(job_id) if isinstance(task, LoadState) else None
                    (side[1] if side is not None else task.tally).add(rank, outcome)
                    reported[task.job.job_id] = task
        ended = [reported[job_id] for job_id in sorted(reported) if reported[job_id].is_complete]
        loads = [task for task in ended if isinstance(task, LoadState)]
        return loads, [task for task in ended if isinstance(task, SaveState)]

    def end(self, task: LoadState | SaveState) -> None:
        """The job is settled."""
        if isinstance(task, LoadState):
            del self.loads[task.job.job_id]
            for job_id in task.sides:
                del self._loads_of_sides[job_id]
        else:
            del self.saves[task.job.job_id]

    def invalidate(self, request_id: str, key: BlockKey, block: int) -> None:
        """The content of a request's `block`, named `key`, is unknown: store nothing from it on."""
        for save in self.saves.values():
            if save.job.request_id == request_id or (block < len(save.keys) and save.keys[block] == key):
                save.garbage_from = min(save.garbage_from, block)
        for waiting in self.put_off:
            keys = waiting.names.keys
            if waiting.request_id == request_id or (block < len(keys) and keys[block] == key):
                waiting.garbage_from = min(waiting.garbage_from, block)

    def blocks_to_save(self) -> Iterator[tuple[str, int, Sequence[int]]]:
        """Request, first block and the engine's blocks of all that is being saved, or to be saved, in parts."""
        for save in self.saves.values():
            yield save.job.request_id, save.job.start_block, save.job.block_ids
        for waiting in self.put_off:
            start = waiting.start
            for piece in waiting.pieces:
                yield waiting.request_id, start, piece[::-1]
                start += len(piece)

    def cut_put_off(self, request_id: str, block: int) -> None:
        """Order no save of a request's blocks from `block` on, but those that are ordered already."""
        for waiting in self.put_off:
            if waiting.request_id == request_id:
                waiting.garbage_from = min(waiting.garbage_from, block)

    def recall(self) -> None:
        """The weights may have changed: do not store what is being saved, do not use what is being loaded.

        Synchronous loads belong to a step that the engine has begun, and to the weights of that step.
        """
        for save in self.saves.values():
            save.trusted = False
        for waiting in self.put_off:
            waiting.trusted = False
        for load in self.loads.values():
            if not load.recalled and not load.job.synchronous:
                self._outbox.recalls += [job.job_id for job in load.jobs]
            load.recalled = True

    def check(self) -> None:
        """Verify the jobs under way; raises PactViolation."""
        tasks: list[tuple[int, LoadState | SaveState]] = [*self.loads.items(), *self.saves.items()]
        for job_id, task in tasks:
            if task.job.job_id != job_id or not 0 < job_id <= self.ordered or task.is_complete:
                raise PactViolation(f"job {job_id} is kept as under way and in disorder: {task}")

    def __len__(self) -> int:
        return len(self.loads) + len(self.saves) + len(self.put_off)
