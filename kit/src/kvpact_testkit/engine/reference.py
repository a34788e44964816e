"""The smallest cache that keeps the contract: dictionaries over a fixed number of slots.

Owns the plans, slots and index of a `ReferenceCache`, which tests of the engine and of the test kit use. It has no tier
below memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import count

from kvpact.contract import (
    BlockHolder,
    EngineRequest,
    ExternalCache,
    ExternalKVMatch,
    ExternalMatchExit,
    JobQuery,
    JobTally,
    LoadJob,
    LoadSettlement,
    SaveJob,
    SchedulerContext,
    StepWork,
    WorkerReport,
)
from kvpact.errors import ConfigError, PactViolation
from kvpact.identity.epochs import Epochs
from kvpact.identity.groups import GroupKind, GroupSet, KVCacheGroup, LooseBlock, OffersStates
from kvpact.identity.keys import BlockKey, BlockKeys
from kvpact.ranges import RangeSet, num_blocks_for
from kvpact_testkit.engine.config import EngineConfig
from kvpact_testkit.engine.engine import Engine
from kvpact_testkit.engine.open_jobs import OpenJobs
from kvpact_testkit.engine.quirks import EngineQuirks
from kvpact_testkit.engine.reference_blocks import (
    Entry,
    EntryKey,
    FilledBlocks,
    ReferencePlan,
    StoredBlocks,
    runs,
)
from kvpact_testkit.engine.simulated_worker import ByteSegment, Job, JobBehavior, SimulatedWorker

PLAN_LIFETIME_STEPS = 4
"""A plan that is neither renewed nor committed for this many steps ends: engines may drop a match silently."""

INQUIRY_STEPS = 16
"""Number of steps between two queries to the ranks about jobs that are not settled."""

LOAD_STEPS = 200
"""Steps after which the engine continues without a load; its blocks are then held, as ranks may still write to them."""


class ReferenceCache(StoredBlocks, ExternalCache):
    """Blocks of all `groups` (by default one of full attention) in `num_slots` slots of `num_ranks` ranks.

    Matches and settlements are in rows of `block_size` tokens. `asynchronous` is true of all loads.
    """

    def __init__(
        self,
        block_size: int,
        num_slots: int,
        *,
        num_ranks: int = 1,
        groups: GroupSet | None = None,
        asynchronous: bool = True,
    ) -> None:
        super().__init__(groups or GroupSet((KVCacheGroup(GroupKind.FULL, block_size),)), block_size, num_slots)
        self.plans: dict[str, ReferencePlan] = {}
        self.loading: dict[str, ReferencePlan] = {}
        self.late: list[ReferencePlan] = []
        """Overdue loads that the engine no longer waits for."""
        self._num_ranks = num_ranks
        self._asynchronous = asynchronous
        self._keys: dict[str, BlockKeys] = {}
        self._failed_from: dict[str, int] = {}
        self._epochs = Epochs()
        self._filled = FilledBlocks(self._groups)
        self._loads: OpenJobs[LoadJob, ReferencePlan] = OpenJobs(num_ranks)
        self._saves: OpenJobs[SaveJob, list[tuple[EntryKey, Entry]]] = OpenJobs(num_ranks)
        self._job_ids, self._step = count(1), 0
        self._unnamed: dict[str, list[LooseBlock]] = {}
        """Held states that were offered before their last token had a name."""
        self._loads_to_do: list[LoadJob] = []
        self._saves_to_do: list[SaveJob] = []
        self._context: SchedulerContext | None = None
        self._offers: OffersStates | None = None

    @property
    def supports_kv_cache_groups(self) -> bool:
        """Always true."""
        return True

    def bind_scheduler_context(self, context: BlockHolder) -> None:
        """Blocks are held while they are copied out. Raises ConfigError for less than a `SchedulerContext`."""
        self._offers = context if isinstance(context, OffersStates) else None
        if not isinstance(context, SchedulerContext):
            raise ConfigError(f"a ReferenceCache needs a whole SchedulerContext, not {type(context).__name__}")
        self._context = context

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        """See `ExternalCache`."""
        request_id, start = request.request_id, num_computed_tokens // self._block_size
        keys = self._keys_of(request)[: self._failed_from.get(request_id)]
        self._filled.begin(request_id, num_computed_tokens)
        plan = self.plans.get(request_id)
        gone = plan is not None and any(self.entries.get(piece.name) is not piece.entry for piece in plan.pieces)
        if plan is not None and plan.postponed and gone:
            plan = None  # the promise may end, and what was dropped is not promised anew
        if plan is None or plan.start != start:
            self._release(request_id)
            most = min(len(request.token_ids) - 1, len(keys) * self._block_size)
            end = self._find(keys, num_computed_tokens, most)
            if end <= num_computed_tokens or not request.may_load or request_id in self.loading:
                return ExternalKVMatch(0)
            pieces = self._pieces(keys, num_computed_tokens, end)
            plan = ReferencePlan(start, end - start * self._block_size, self._step, pieces)
            self.plans[request_id] = plan
            for piece in pieces:
                piece.entry.holds += 1
        plan.seen, plan.postponed = self._step, False
        return ExternalKVMatch(plan.num_tokens, self._asynchronous, plan)

    def _keys_of(self, request: EngineRequest) -> list[BlockKey]:
        if request.identity is None:
            return []
        if request.request_id not in self._keys:
            self._keys[request.request_id] = BlockKeys(b"reference", self._block_size, request.identity)
        return self._keys[request.request_id].extend(request.token_ids)

    def commit_external_match(
        self, request: EngineRequest, match: ExternalKVMatch, num_tokens: int, block_ids: Sequence[int]
    ) -> int:
        """See `ExternalCache`."""
        plan = self.plans.get(request.request_id)
        if plan is None or plan is not match.query_result or self._context is None:
            return 0
        del self.plans[request.request_id]
        if num_tokens < plan.num_tokens and not self._reads_all:
            num_tokens = 0  # a shorter match needs other windows and states
        end = plan.start * self._block_size + num_tokens
        sizes = [group.block_size for group in self._groups.groups]
        self._drop([piece for piece in plan.pieces if not num_tokens or piece.block * sizes[piece.group] >= end])
        plan.pieces = [piece for piece in plan.pieces if num_tokens and piece.block * sizes[piece.group] < end]
        if not num_tokens:
            return 0
        plan.num_blocks, plan.seen = num_blocks_for(num_tokens, self._block_size), self._step
        self.loading[request.request_id] = plan
        tables = self._context.get_block_ids(request.request_id)
        self._note_filled(request.request_id, tables, end)
        for group, ids in enumerate(tables):
            slots = {piece.block: piece.entry.slot for piece in plan.pieces if piece.group == group}
            for first, last in runs([block for block in slots if not self._context.get_block(ids[block]).is_null]):
                where = tuple(slots[block] for block in range(first, last))
                place = (next(self._job_ids), request.request_id, first, where, tuple(ids[first:last]))
                job = LoadJob(*place, not match.load_kv_async, group)
                plan.jobs[job.job_id] = job
                self._loads.add(job, plan)
                self._loads_to_do.append(job)
        return num_tokens

    def abort_external_match(self, request_id: str, match: ExternalKVMatch | None, reason: str) -> None:
        """See `ExternalCache`."""
        self._release(request_id)

    def postpone_external_match(self, request_id: str, reason: ExternalMatchExit) -> None:
        """See `ExternalCache`: the promise holds for `PLAN_LIFETIME_STEPS`, or until a save has no slot."""
        if request_id in self.plans:
            self.plans[request_id].postponed = True

    def _take_slots(self, wanted: int, keep: set[EntryKey]) -> tuple[int, ...]:
        for request_id in [i for i, plan in self.plans.items() if plan.postponed and plan.seen < self._step]:
            if len(self.free_slots) + len(self._unheld(keep)) < wanted:
                self._release(request_id)
        return super()._take_slots(wanted, keep)

    def _release(self, request_id: str) -> None:
        plan = self.plans.pop(request_id, None)
        if plan is not None:
            self._drop(plan.pieces)

    def note_computed(
        self, request: EngineRequest, num_computed_tokens: int, block_ids: Callable[[], Sequence[int]]
    ) -> None:
        """See `ExternalCache`."""
        keys = self._keys_of(request)
        if self._context is None or not keys:
            return
        tables = self._context.get_block_ids(request.request_id)
        sound = self._note_filled(request.request_id, tables, num_computed_tokens)
        if request.request_id in self.loading:
            return
        filled = self._filled_blocks(request.request_id, tables, num_computed_tokens)
        names = [
            {block: name for block in blocks if (name := self._name(keys, i, block))} for i, blocks in enumerate(filled)
        ]
        sizes = [group.block_size for group in self._groups.groups]
        chain = [(-(block + 1) * sizes[i], name) for i, blocks in enumerate(names) for block, name in blocks.items()]
        for _, name in sorted(chain, key=lambda place: place[0]):
            if name in self.entries:
                self.entries.move_to_end(name)  # a chain's head is evicted after its tail, and not for its tail (H54)
        for group, ids in enumerate(filled):
            new = [
                i for i, name in names[group].items() if name not in self.entries and (i + 1) * sizes[group] <= sound
            ]
            wanted = [i for i in new if not self._context.get_block(ids[i]).is_null]
            for first, last in runs(wanted):
                slots = self._take_slots(last - first, {name for _, name in chain})
                taken = [ids[i] for i in range(first, first + len(slots))]
                job = SaveJob(next(self._job_ids), request.request_id, first, slots, tuple(taken), group)
                saved = [(names[group][i], Entry(slot, 1)) for i, slot in zip(job.blocks, slots, strict=True)]
                if saved:
                    self.entries.update(saved)
                    self._context.touch(taken)
                    self._saves.add(job, saved)
                    self._saves_to_do.append(job)
        self._hold_unnamed(request.request_id, filled, names)

    def _filled_blocks(self, request_id: str, tables: Sequence[Sequence[int]], computed: int) -> list[dict[int, int]]:
        """Return the sound blocks of each group: number -> the engine's. States are those that the engine
        offers, where it does, also in earlier steps before they had a name."""
        kinds = self._groups.groups
        offered = self._offers.offered_states(request_id) if self._offers is not None else None
        waiting = self._unnamed.get(request_id, ())
        found = []
        for number, (group, ids) in enumerate(zip(kinds, tables, strict=True)):
            if group.kind is GroupKind.STATE and offered is not None:
                found.append({block: state for each, block, state in (*waiting, *offered) if each == number})
            else:
                found.append({block: ids[block] for block in self._full(group, computed)})
        return found

    def _hold_unnamed(
        self, request_id: str, filled: Sequence[dict[int, int]], names: Sequence[Collection[int]]
    ) -> None:
        """Hold the offered states that have no name yet, because a token is not known, and no others."""
        if self._offers is None or self._context is None:
            return
        states = [number for number, group in enumerate(self._groups.groups) if group.kind is GroupKind.STATE]
        unnamed = [(i, block, state) for i in states for block, state in filled[i].items() if block not in names[i]]
        self._context.touch([state for _, _, state in unnamed])
        self._let_unnamed_go(request_id)
        if unnamed:
            self._unnamed[request_id] = unnamed

    def _let_unnamed_go(self, request_id: str) -> None:
        if unnamed := self._unnamed.pop(request_id, ()):
            assert self._context is not None
            self._context.free_blocks([state for _, _, state in unnamed])

    def _note_filled(self, request_id: str, tables: Sequence[Sequence[int]], computed: int) -> int:
        """Tokens of the request that are in blocks filled since the last reset: only these may be saved (H38)."""
        return self._filled.note(request_id, tables, computed)

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
            plan.outcomes.append((load.group_id, tally.loaded()))
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
        return LoadSettlement(request_id, RangeSet(), RangeSet.of(plan.blocks), self._asynchronous, late=True)

    def _let_go_of(self, plan: ReferencePlan) -> None:
        """Release the plan's slots and the engine's blocks: no rank uses them any more."""
        self._drop(plan.pieces)
        if self._context is not None:
            self._context.free_blocks(plan.held)

    def _settle(self, request_id: str, plan: ReferencePlan) -> LoadSettlement:
        del self.loading[request_id]
        everything = RangeSet.of(plan.blocks)
        failed = RangeSet.of(*(run for _, outcome in plan.outcomes for run in outcome.failed.ranges))
        if failed.ranges:
            sizes = [group.block_size for group in self._groups.groups]
            lost = min(run.start * sizes[group] for group, outcome in plan.outcomes for run in outcome.failed.ranges)
            for piece in plan.pieces:
                if (piece.block + 1) * sizes[piece.group] > lost:
                    self._forget(piece.name, piece.entry)
            if len(sizes) > 1 or not self._reads_all:
                failed = everything  # a part of the blocks of several groups is no match
            self._failed_from[request_id] = failed.ranges[0].start
        self._let_go_of(plan)
        return LoadSettlement(request_id, everything.difference(failed), failed, self._asynchronous)

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
        self._let_unnamed_go(request_id)
        self._keys.pop(request_id, None)
        self._failed_from.pop(request_id, None)
        self._filled.end(request_id)

    def reset(self) -> None:
        """See `ExternalCache`."""
        self._epochs.reset()
        self._filled.reset()
        for request_id in list(self._unnamed):
            self._let_unnamed_go(request_id)
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
        held = [piece.entry for plan in plans for piece in plan.pieces]
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
    size, ranks, groups = config.block_size, config.num_ranks, GroupSet(config.groups)
    cache = ReferenceCache(size, num_slots, num_ranks=ranks, groups=groups, asynchronous=asynchronous)
    segments = [ByteSegment(num_slots, config.num_layers * config.page_bytes) for _ in range(ranks)]
    workers = [SimulatedWorker(rank, segment.slot_view, conduct) for rank, segment in enumerate(segments)]
    return Engine(config, quirks, cache, workers)
