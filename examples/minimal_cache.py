"""A cache that keeps the pact and does no more: one KV cache group, in memory, a fixed number of slots."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import count, takewhile
from types import SimpleNamespace
from typing import Any

from kvpact import (
    BlockHolder,
    BlockKey,
    BlockKeys,
    ExternalCache,
    ExternalKVMatch,
    JobQuery,
    JobTally,
    LoadJob,
    LoadSettlement,
    RangeSet,
    SaveJob,
    StepWork,
    WorkerReport,
)
from kvpact.contract import EngineRequest as Request


class MinimalCache(ExternalCache):
    def __init__(self, place: Any) -> None:
        self.place, self.size = place, place.block_size
        self.stored = OrderedDict[BlockKey, int]()  # block key -> slot; the first one is evicted first
        self.holds = Counter[int]()  # slot -> promises and jobs that need it as it is
        self.plans, self.keys = dict[str, SimpleNamespace](), dict[str, BlockKeys]()  # by request
        self.failed_from, self.filled = dict[str, int](), dict[str, int]()  # the same
        self.resets, self.filled_after = 0, dict[int, int]()  # engine block -> how many resets came before its fill
        self.jobs = dict[int, tuple[LoadJob | SaveJob, JobTally, list[BlockKey], int]]()  # by id; in the end the step
        self.late = dict[int, bool]()  # loads that take too long: whether the engine knows
        self.new, self.job_ids, self.step = list[LoadJob | SaveJob](), count(1), 0

    def bind_scheduler_context(self, context: BlockHolder) -> None:
        self.context = context

    def prepare_external_match(self, request: Request, num_computed_tokens: int) -> ExternalKVMatch:
        name, start = request.request_id, num_computed_tokens // self.size
        self.filled[name] = start
        plan = self.plans.get(name)
        if plan is None or plan.start != start:
            self.abort_external_match(name, None, "superseded")
            last = (len(request.token_ids) - 1) // self.size
            keys = self.keys_of(request)[start : min(last, self.failed_from.get(name, last))]
            slots = [self.stored[key] for key in takewhile(self.stored.__contains__, keys)]
            loading = any(isinstance(job, LoadJob) and job.request_id == name for job, *_ in self.jobs.values())
            if not slots or loading or not request.may_load:
                return ExternalKVMatch(0)
            self.holds.update(slots)
            plan = self.plans[name] = SimpleNamespace(start=start, slots=slots)
        plan.seen = self.step
        return ExternalKVMatch(len(plan.slots) * self.size, load_kv_async=True, query_result=plan)

    def commit_external_match(self, request: Request, match: object, num_tokens: int, block_ids: Sequence[int]) -> int:
        plan, blocks = self.plans.pop(request.request_id), -(-num_tokens // self.size)
        self.holds.subtract(plan.slots[blocks:])
        if blocks:
            self.fill(request, plan.start + blocks, block_ids)
            slots, ids = tuple(plan.slots[:blocks]), tuple(block_ids[plan.start : plan.start + blocks])
            self.order(LoadJob(next(self.job_ids), request.request_id, plan.start, slots, ids, False), request)
        return num_tokens

    def abort_external_match(self, request_id: str, match: ExternalKVMatch | None, reason: str) -> None:
        if request_id in self.plans:
            self.holds.subtract(self.plans.pop(request_id).slots)

    def note_computed(self, request: Request, num_computed_tokens: int, block_ids: Callable[[], Sequence[int]]) -> None:
        self.fill(request, -(-num_computed_tokens // self.size), block_ids())
        sound = list(takewhile(lambda block: self.filled_after.get(block) == self.resets, block_ids()))
        keys = self.keys_of(request)[: min(num_computed_tokens // self.size, len(sound))]
        for key in (key for key in reversed(keys) if key in self.stored):
            self.stored.move_to_end(key)  # used last, evicted last; and a prompt's head after its tail
        known = {*self.stored, *(key for _, _, saving, _ in self.jobs.values() for key in saving)}
        start = next((block for block, key in enumerate(keys) if key not in known), len(keys))
        wanted = len(list(takewhile(lambda key: key not in known, keys[start:])))
        free = [*{*range(self.place.num_slots)}.difference(self.stored.values(), +self.holds)]
        evictable = [key for key, slot in self.stored.items() if not self.holds[slot] and key not in keys]
        free += [self.stored.pop(key) for key in evictable[: max(0, wanted - len(free))]]
        if slots := free[:wanted]:
            self.holds.update(slots)
            self.context.touch(ids := tuple(block_ids()[start : start + len(slots)]))
            self.order(SaveJob(next(self.job_ids), request.request_id, start, tuple(slots), ids), request)

    def end_step(self) -> StepWork:
        self.step += 1
        for name in [name for name, plan in self.plans.items() if self.step - plan.seen > 4]:
            self.abort_external_match(name, None, "not renewed")  # some engines drop a match without a word
        new, self.new = self.new, []
        loads = tuple(job for job in new if isinstance(job, LoadJob))
        saves = tuple(job for job in new if isinstance(job, SaveJob))
        open_jobs = [(job, ordered) for job, _, _, ordered in self.jobs.values() if job not in new]
        for job, ordered in open_jobs:
            if self.step - ordered > 200 and isinstance(job, LoadJob) and job.job_id not in self.late:
                self.context.touch(job.block_ids)  # a rank may write to them at any time
                self.late[job.job_id] = False
        asked = open_jobs if self.step % 16 == 0 else []  # a report may have been lost
        inquiries = tuple(JobQuery(job.job_id, job.blocks) for job, _ in asked)
        return StepWork(loads, saves, inquiries, overdue=tuple(self.late))

    def apply_report(self, report: WorkerReport) -> list[LoadSettlement]:
        for rank, outcomes in report.ranks.items():
            for job_id in outcomes.keys() & self.jobs.keys():
                self.jobs[job_id][1].add(rank, outcomes[job_id])
        ended = [job_id for job_id, (_, tally, *_) in self.jobs.items() if tally.complete]
        settled = [settled for job_id in ended if (settled := self.settle(*self.jobs.pop(job_id)[:3]))]
        for job in [self.jobs[job_id][0] for job_id, known in self.late.items() if not known]:
            self.late[job.job_id] = True  # the engine goes on without it, in other blocks
            self.failed_from[job.request_id] = job.start_block
            settled.append(LoadSettlement(job.request_id, RangeSet(), RangeSet.of(job.blocks), True, late=True))
        return settled

    def settle(self, job: LoadJob | SaveJob, tally: JobTally, keys: list[BlockKey]) -> LoadSettlement | None:
        self.holds.subtract(job.slots)
        if isinstance(job, SaveJob) or job.job_id in self.late:
            self.context.free_blocks(job.block_ids)
        if isinstance(job, SaveJob):
            saved = zip(job.blocks, keys, job.slots, strict=False)
            self.stored.update({key: slot for block, key, slot in saved if block in tally.saved().done})
        if isinstance(job, SaveJob) or self.late.pop(job.job_id, False):
            return None
        outcome = tally.loaded()
        if outcome.failed.ranges:
            first = outcome.failed.ranges[0].start
            for key in keys[first - job.start_block :]:
                self.stored.pop(key, None)
            if job.request_id in self.keys:
                self.failed_from[job.request_id] = first
        return LoadSettlement(job.request_id, outcome.done, outcome.failed, asynchronous=True)

    def request_finished(self, request_id: str) -> None:
        self.abort_external_match(request_id, None, "finished")
        self.keys.pop(request_id, None)
        self.failed_from.pop(request_id, None)
        self.filled.pop(request_id, None)

    def reset(self) -> None:
        for name in [*self.plans]:
            self.abort_external_match(name, None, "reset")
        self.resets += 1
        self.stored.clear()
        self.jobs = {job_id: (job, tally, [], ordered) for job_id, (job, tally, _, ordered) in self.jobs.items()}

    @property
    def has_pending_work(self) -> bool:
        return bool(self.jobs)

    def fill(self, request: Request, end: int, block_ids: Sequence[int]) -> None:
        first = self.filled.get(request.request_id, 0)  # what is filled before a reset is saved by nobody after it
        self.filled_after.update(dict.fromkeys(block_ids[first:end], self.resets))
        self.filled[request.request_id] = max(first, end)

    def order(self, job: LoadJob | SaveJob, request: Request) -> None:
        keys = self.keys_of(request)[job.start_block : job.blocks.end]
        self.jobs[job.job_id] = job, JobTally(job.blocks, self.place.num_ranks), keys, self.step
        self.new.append(job)

    def keys_of(self, request: Request) -> list[BlockKey]:
        if request.identity is None:  # it carries something unknown: nobody may share its blocks
            return []
        new = BlockKeys(b"my cache", self.size, request.identity)
        return self.keys.setdefault(request.request_id, new).extend(request.token_ids)
