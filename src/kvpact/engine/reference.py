"""The smallest cache that keeps the contract: dictionaries over a fixed number of slots.

Owns the plans, slots and index of a `ReferenceCache`, which tests of the engine and of the test kit use. It has no tier
below memory.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby

from kvpact.contract import (
    BlockHolder,
    EngineRequest,
    ExternalCache,
    ExternalKVMatch,
    JobOutcome,
    JobQuery,
    JobTally,
    LoadJob,
    LoadSettlement,
    SaveJob,
    SchedulerContext,
    StepWork,
    WorkerReport,
    num_blocks_for,
)
from kvpact.engine.config import EngineConfig
from kvpact.engine.engine import Engine
from kvpact.engine.open_jobs import OpenJobs
from kvpact.engine.quirks import EngineQuirks
from kvpact.engine.simulated_worker import ByteSegment, Job, JobBehavior, SimulatedWorker
from kvpact.errors import ConfigError, PactViolation
from kvpact.identity.epochs import Epochs
from kvpact.identity.keys import BlockKey, BlockKeys
from kvpact.ranges import RangeSet

PLAN_LIFETIME_STEPS = 4
"""A plan that is neither renewed nor committed for this many steps ends: engines may drop a match silently."""

INQUIRY_STEPS = 16
"""Number of steps between two queries to the ranks about jobs that are not settled."""

LOAD_STEPS = 200
"""Steps after which the engine continues without a load; its blocks are then held, as ranks may still write to them."""

EntryKey = tuple[BlockKey, int]


@dataclass(slots=True)
class Entry:
    """One block of one group: its slot, and the number of plans and saves that hold it. `stored` is set once all
    ranks have written it."""

    slot: int
    holds: int = 0
    stored: bool = False


@dataclass(slots=True)
class ReferencePlan:
    """A promise: `entries` per block and group, from block `start` on."""

    start: int
    seen: int
    entries: list[list[Entry]]
    keys: list[BlockKey]
    num_blocks: int = 0
    """Blocks committed; 0 while the plan is open."""
    jobs: dict[int, LoadJob] = field(default_factory=dict)
    """Those that are not complete yet."""
    outcomes: list[JobOutcome] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    """The engine's blocks, held because the load is overdue."""


class ReferenceCache(ExternalCache):
    """Blocks of `num_groups` groups in `num_slots` slots of `num_ranks` ranks. `asynchronous` is true of all loads."""

    def __init__(
        self, block_size: int, num_slots: int, *, num_ranks: int = 1, num_groups: int = 1, asynchronous: bool = True
    ) -> None:
        self.entries: OrderedDict[EntryKey, Entry] = OrderedDict()
        self._num_slots = num_slots
        self.free_slots = list(range(num_slots))
        self.plans: dict[str, ReferencePlan] = {}
        self.loading: dict[str, ReferencePlan] = {}
        self.late: list[ReferencePlan] = []
        """Overdue loads that the engine no longer waits for."""
        self._block_size, self._num_ranks, self._num_groups = block_size, num_ranks, num_groups
        self._asynchronous = asynchronous
        self._keys: dict[str, BlockKeys] = {}
        self._failed_from: dict[str, int] = {}
        self._epochs = Epochs()
        self._resets = 0
        self._written_after: dict[int, int] = {}
        """Engine block -> number of resets before it was last filled."""
        self._filled: dict[str, int] = {}
        """Request id -> number of its blocks that were filled, in part or whole, at the last check."""
        self._loads: OpenJobs[LoadJob, ReferencePlan] = OpenJobs(num_ranks)
        self._saves: OpenJobs[SaveJob, list[tuple[EntryKey, Entry]]] = OpenJobs(num_ranks)
        self._job_ids, self._step = count(1), 0
        self._loads_to_do: list[LoadJob] = []
        self._saves_to_do: list[SaveJob] = []
        self._context: SchedulerContext | None = None

    @property
    def supports_kv_cache_groups(self) -> bool:
        """Always true."""
        return True

    def bind_scheduler_context(self, context: BlockHolder) -> None:
        """Blocks are held while they are copied out. Raises ConfigError for less than a `SchedulerContext`."""
        if not isinstance(context, SchedulerContext):
            raise ConfigError(f"a ReferenceCache needs a whole SchedulerContext, not {type(context).__name__}")
        self._context = context

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        """See `ExternalCache`."""
        request_id, start = request.request_id, num_computed_tokens // self._block_size
        keys = self._keys_of(request)[: (len(request.token_ids) - 1) // self._block_size]
        keys = keys[: self._failed_from.get(request_id)]
        self._filled[request_id] = start
        plan = self.plans.get(request_id)
        if plan is None or plan.start != start:
            self._release(request_id)
            found = self._find(keys, start)
            if not found or not request.may_load or request_id in self.loading:
                return ExternalKVMatch(0)
            plan = self.plans[request_id] = ReferencePlan(start, self._step, found, keys)
            for entry in (entry for block in found for entry in block):
                entry.holds += 1
        plan.seen = self._step
        return ExternalKVMatch(len(plan.entries) * self._block_size, self._asynchronous, plan)

    def _keys_of(self, request: EngineRequest) -> list[BlockKey]:
        if request.identity is None:
            return []
        if request.request_id not in self._keys:
            self._keys[request.request_id] = BlockKeys(b"reference", self._block_size, request.identity)
        return self._keys[request.request_id].extend(request.token_ids)

    def _find(self, keys: list[BlockKey], start: int) -> list[list[Entry]]:
        found = []
        for key in keys[start:]:
            block = [self.entries.get((key, group)) for group in range(self._num_groups)]
            stored = [entry for entry in block if entry is not None and entry.stored]
            if len(stored) < self._num_groups:
                break
            found.append(stored)
        return found

    def commit_external_match(
        self, request: EngineRequest, match: ExternalKVMatch, num_tokens: int, block_ids: Sequence[int]
    ) -> int:
        """See `ExternalCache`."""
        plan = self.plans.get(request.request_id)
        if plan is None or plan is not match.query_result or self._context is None:
            return 0
        blocks = num_blocks_for(num_tokens, self._block_size)
        self._drop(plan.entries[blocks:])
        del plan.entries[blocks:]
        del self.plans[request.request_id]
        if not blocks:
            return 0
        plan.num_blocks, plan.seen = blocks, self._step
        self.loading[request.request_id] = plan
        end = plan.start + blocks
        tables = self._context.blocks_of(request.request_id)
        self._note_filled(request.request_id, tables, end * self._block_size)
        for group, ids in enumerate(tables):
            for first, last in _runs(i for i in range(plan.start, end) if not self._context.get_block(ids[i]).is_null):
                slots = tuple(plan.entries[i - plan.start][group].slot for i in range(first, last))
                where = (next(self._job_ids), request.request_id, first, slots, tuple(ids[first:last]))
                job = LoadJob(*where, not match.load_kv_async, group)
                plan.jobs[job.job_id] = job
                self._loads.add(job, plan)
                self._loads_to_do.append(job)
        return num_tokens

    def abort_external_match(self, request_id: str, match: ExternalKVMatch | None, reason: str) -> None:
        """See `ExternalCache`."""
        self._release(request_id)

    def _release(self, request_id: str) -> None:
        plan = self.plans.pop(request_id, None)
        if plan is not None:
            self._drop(plan.entries)

    def _drop(self, blocks: list[list[Entry]]) -> None:
        for entry in (entry for block in blocks for entry in block):
            self._let_go(entry)

    def _let_go(self, entry: Entry) -> None:
        entry.holds -= 1
        if not entry.holds and not entry.stored:
            self.free_slots.append(entry.slot)

    def note_computed(
        self, request: EngineRequest, num_computed_tokens: int, block_ids: Callable[[], Sequence[int]]
    ) -> None:
        """See `ExternalCache`."""
        keys = self._keys_of(request)
        full = min(num_computed_tokens, len(request.token_ids)) // self._block_size
        if self._context is None or not keys:
            return
        blocks = self._context.blocks_of(request.request_id)
        full = min(full, len(keys), self._note_filled(request.request_id, blocks, num_computed_tokens))
        if request.request_id in self.loading or not full:
            return
        chain = [(key, group) for key in reversed(keys[:full]) for group in range(self._num_groups)]
        for name in chain:
            if name in self.entries:
                self.entries.move_to_end(name)  # a chain's head is evicted after its tail, and not for its tail (H54)
        for group, ids in enumerate(blocks):
            new = (i for i in range(full) if (keys[i], group) not in self.entries)
            wanted = [i for i in new if not self._context.get_block(ids[i]).is_null]
            for first, last in _runs(wanted):
                slots = self._take_slots(last - first, set(chain))
                taken = ids[first : first + len(slots)]
                job = SaveJob(next(self._job_ids), request.request_id, first, slots, tuple(taken), group)
                saved = [((keys[i], group), Entry(slot, 1)) for i, slot in zip(job.blocks, slots, strict=True)]
                if saved:
                    self.entries.update(saved)
                    self._context.touch(taken)
                    self._saves.add(job, saved)
                    self._saves_to_do.append(job)

    def _note_filled(self, request_id: str, groups: Sequence[Sequence[int]], num_computed_tokens: int) -> int:
        """Length of the request's first run of blocks filled since the last reset: only these may be saved (H38)."""
        first = self._filled.get(request_id, 0)
        end = self._filled[request_id] = max(first, num_blocks_for(num_computed_tokens, self._block_size))
        for ids in groups:
            self._written_after.update(dict.fromkeys(ids[first:end], self._resets))
        stale = (
            next((i for i, block in enumerate(ids) if block and self._written_after.get(block) != self._resets), end)
            for ids in groups
        )
        return min(stale)

    def _take_slots(self, wanted: int, keep: set[EntryKey]) -> tuple[int, ...]:
        unheld = [key for key, entry in self.entries.items() if not entry.holds and key not in keep]
        missing = max(0, wanted - len(self.free_slots))
        self.free_slots.extend(self.entries.pop(key).slot for key in unheld[:missing])
        taken, self.free_slots = self.free_slots[:wanted], self.free_slots[wanted:]
        return tuple(taken)

    def end_step(self) -> StepWork:
        """See `ExternalCache`."""
        self._step += 1
        for request_id in [i for i, plan in self.plans.items() if self._step - plan.seen > PLAN_LIFETIME_STEPS]:
            self._release(request_id)
        work = StepWork(
            tuple(self._loads_to_do), tuple(self._saves_to_do), tuple(self._inquiries()), overdue=self._overdue()
        )
        self._loads_to_do, self._saves_to_do = [], []
        return work

    def _overdue(self) -> tuple[int, ...]:
        """Ids of loads that have become overdue; their blocks are held before the engine learns of it."""
        if self._context is None:
            return ()
        overdue = [plan for plan in self.loading.values() if self._step - plan.seen == LOAD_STEPS]
        for plan in overdue:
            plan.held = [block for job in plan.jobs.values() for block in job.block_ids]
            self._context.touch(plan.held)
        return tuple(job_id for plan in overdue for job_id in plan.jobs)

    def _inquiries(self) -> list[JobQuery]:
        """Queries about all jobs older than this step, every `INQUIRY_STEPS` steps: a report may have been lost."""
        if self._step % INQUIRY_STEPS:
            return []
        jobs: list[Job] = [job for plan in self.loading.values() for job in plan.jobs.values()]
        jobs += [job for job, _, _ in self._saves.by_id.values()]
        new = {job.job_id for job in self._loads_to_do} | {job.job_id for job in self._saves_to_do}
        return [JobQuery(job.job_id, job.blocks) for job in jobs if job.job_id not in new]

    def apply_report(self, report: WorkerReport) -> list[LoadSettlement]:
        """See `ExternalCache`."""
        for load, tally, plan in self._loads.complete(report):
            plan.outcomes.append(tally.loaded())
            plan.jobs.pop(load.job_id, None)
        for save, tally, saved in self._saves.complete(report):
            self._settle_save(save, tally, saved)
        settled = []
        for request_id, plan in list(self.loading.items()):
            if not plan.jobs:
                settled.append(self._settle(request_id, plan))
            elif plan.held:
                settled.append(self._go_on_without(request_id, plan))
        for plan in [plan for plan in self.late if not plan.jobs]:
            self.late.remove(plan)
            self._let_go_of(plan)
        return settled

    def _go_on_without(self, request_id: str, plan: ReferencePlan) -> LoadSettlement:
        """Settle an overdue load: its blocks stay stored, but are not promised to this request again."""
        self.late.append(self.loading.pop(request_id))
        self._failed_from[request_id] = plan.start
        blocks = RangeSet.span(plan.start, plan.start + plan.num_blocks)
        return LoadSettlement(request_id, RangeSet(), blocks, self._asynchronous, late=True)

    def _let_go_of(self, plan: ReferencePlan) -> None:
        """Release the plan's slots and the engine's blocks: no rank uses them any more."""
        self._drop(plan.entries)
        if self._context is not None:
            self._context.free_blocks(plan.held)

    def _settle(self, request_id: str, plan: ReferencePlan) -> LoadSettlement:
        del self.loading[request_id]
        failed = RangeSet.of(*(run for outcome in plan.outcomes for run in outcome.failed.ranges))
        everything = RangeSet.span(plan.start, plan.start + plan.num_blocks)
        if failed.ranges:
            self._failed_from[request_id] = failed.ranges[0].start
            for block in range(failed.ranges[0].start, plan.start + plan.num_blocks):
                for group, entry in enumerate(plan.entries[block - plan.start]):
                    self._forget((plan.keys[block], group), entry)
        self._let_go_of(plan)
        return LoadSettlement(request_id, everything.difference(failed), failed, self._asynchronous)

    def _forget(self, key: EntryKey, entry: Entry) -> None:
        if self.entries.get(key) is entry:
            del self.entries[key]
        entry.stored = False

    def _settle_save(self, job: SaveJob, tally: JobTally, saved: list[tuple[EntryKey, Entry]]) -> None:
        done = tally.saved().done
        for block, (key, entry) in zip(job.blocks, saved, strict=True):
            entry.stored = self.entries.get(key) is entry and block in done
            if not entry.stored:
                self._forget(key, entry)
            self._let_go(entry)
        if self._context is not None:
            self._context.free_blocks(job.block_ids)

    def request_finished(self, request_id: str) -> None:
        """See `ExternalCache`."""
        self._release(request_id)
        self._keys.pop(request_id, None)
        self._failed_from.pop(request_id, None)
        self._filled.pop(request_id, None)

    def reset(self) -> None:
        """See `ExternalCache`."""
        self._epochs.reset()
        self._resets += 1
        for request_id in list(self.plans):
            self._release(request_id)
        for key, entry in list(self.entries.items()):
            self._forget(key, entry)
            if not entry.holds:
                self.free_slots.append(entry.slot)

    @property
    def has_pending_work(self) -> bool:
        """While blocks are copied out."""
        return bool(self._saves.by_id or self.loading or self.late)

    def check(self) -> None:
        """Verify that each slot is free or one block's, and each hold a plan's or a save's; raises PactViolation."""
        plans = (*self.plans.values(), *self.loading.values(), *self.late)
        held = [entry for plan in plans for block in plan.entries for entry in block]
        held += [entry for _, _, saved in self._saves.by_id.values() for _, entry in saved]
        holds = Counter(map(id, held))
        known = {id(entry): entry for entry in (*self.entries.values(), *held)}
        if sorted([*self.free_slots, *(entry.slot for entry in known.values())]) != list(range(self._num_slots)):
            raise PactViolation(f"slots do not add up: {sorted(self.free_slots)} are free, {self.entries} are in use")
        if wrong := [entry for name, entry in known.items() if entry.holds != holds[name]]:
            raise PactViolation(f"blocks are not held by as many plans and saves as they count: {wrong}")

    def set_weights_version(self, version: str) -> None:
        """See `ExternalCache`; what was stored since the reset stays, as no store is shared."""
        self._epochs.name(version)


def _runs(blocks: Iterator[int] | list[int]) -> Iterator[tuple[int, int]]:
    """The runs of ascending numbers, half-open."""
    for _, run in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        yield numbers[0], numbers[-1] + 1


def reference_engine(
    config: EngineConfig | None = None,
    quirks: EngineQuirks | None = None,
    *,
    num_slots: int = 256,
    asynchronous: bool = True,
    conduct: Callable[[int, Job], JobBehavior] | None = None,
) -> Engine:
    """An engine with a `ReferenceCache` and one `SimulatedWorker` per rank."""
    config = config or EngineConfig()
    size, ranks, groups = config.block_size, config.num_ranks, len(config.groups)
    cache = ReferenceCache(size, num_slots, num_ranks=ranks, num_groups=groups, asynchronous=asynchronous)
    segments = [ByteSegment(num_slots, config.num_layers * config.page_bytes) for _ in range(ranks)]
    workers = [SimulatedWorker(rank, segment.slot_view, conduct) for rank, segment in enumerate(segments)]
    return Engine(config, quirks, cache, workers)
