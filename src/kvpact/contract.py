"""The pact: promises of a scheduler and an external KV cache to each other.

Owns the types that cross the border and the two abstract classes an author implements: `ExternalCache` in the
scheduler's process, `ExternalCacheWorker` beside each rank's KV memory. Holds no behaviour beyond combining reports.

The life of a match (the table is in `ledger.py`): the scheduler *prepares* it (the answer stays loadable from then on),
then either *commits* it, for the number of tokens it finally chose, or *aborts* it. A committed match is settled by the
workers' reports: every committed token is named as loaded or as failed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from kvpact.errors import WeightsVersionRefused
from kvpact.identity.groups import GroupSet
from kvpact.identity.keys import BlockKey, RequestIdentity
from kvpact.ranges import NO_RANGES, BlockRange, RangeSet, hull


@dataclass(frozen=True, slots=True)
class ExternalKVMatch:
    """A run of tokens, following what the engine has computed, that the cache promises to supply.

    `num_tokens` is the promise; 0 means no match. With `load_kv_async` the engine must wait for the workers' report
    before it computes; otherwise the load happens inside the step that computes the request. In another step a cache
    may answer the other way for the same plan: the match committed counts. `query_result`, the plan, is opaque.
    """

    num_tokens: int
    load_kv_async: bool = False
    query_result: object = None


class ExternalMatchExit(StrEnum):
    """Why an engine did not take a match in a step; docs/internals/contract-on-vllm.md has what vLLM does at each exit.

    Those before `OTHER_CONNECTOR` postpone it: the request still waits, and may ask again.
    """

    NO_BLOCKS = "no_blocks"
    """Too few free KV blocks: for the step, above the watermark, for the whole prompt, or beside loads under way."""
    BUDGET = "budget"
    """The step has no tokens left for it, or not for the smallest piece that its layers allow."""
    THROTTLED = "throttled"
    """The engine starts no prompts in this step."""
    LORA_LIMIT = "lora_limit"
    """The engine has loaded as many adapters as it may."""
    MAX_RUNNING = "max_running"
    """The engine runs as many requests as it may."""
    ENCODER = "encoder"
    """Outputs of an encoder are missing, or have no room."""
    BLOCKED = "blocked"
    """The request waits for something else: its grammar, a load, the next part of its session."""
    PREEMPTION = "preemption"
    """A running request was preempted; the engine then starts no other in that step."""
    NOT_REACHED = "not_reached"
    """Another request came first, or the queue was not walked so far."""
    PAUSED = "paused"
    """The engine is paused."""
    OTHER_CONNECTOR_WAITS = "other_connector_waits"
    """Another connector asks the engine to come back later."""
    OTHER_CONNECTOR = "other_connector"
    """Another connector's match was taken."""
    DECLINED = "declined"
    """The engine took no token of it, by a rule of its own."""
    REFUSED = "refused"
    """The cache itself took its match back when asked to commit."""
    CANCELLED = "cancelled"
    """The request ended before it was admitted."""
    RESET = "reset"
    """The engine's prefix cache was reset."""
    SUPERSEDED = "superseded"
    """The next lookup answered with another match, or the engine asked anew."""
    WITHDRAWN = "withdrawn"
    """The next lookup found nothing."""
    NOT_RENEWED = "not_renewed"
    """The engine has not asked for it again in `POSTPONED_STEPS` steps."""

    @property
    def is_dropped(self) -> bool:
        """True if the engine will not come back for the match: its leases end in this step."""
        return self in DROPPED


DROPPED = frozenset([*ExternalMatchExit][[*ExternalMatchExit].index(ExternalMatchExit.OTHER_CONNECTOR) :])
"""Exits that end a match. After all others its plan is kept for a few steps, or until its slots are needed."""

POSTPONED_STEPS = 32
"""Steps after its last lookup in which a postponed match may be asked for again, unless its slots are needed before.

An engine asks again about requests behind a blocked head when others have ended. With 32 steps 9 % more blocks are read
from disk than with plans kept for ever, with 8 steps 36 % more, with 1 step 64 % (research/postponed_steps.py).
"""


class EngineRequest(Protocol):
    """View of an engine's request for a cache."""

    @property
    def request_id(self) -> str:
        """No other live request has it."""

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens known so far: prompt, then outputs. Only grows."""

    @property
    def identity(self) -> RequestIdentity | None:
        """Inputs besides tokens that determine the KV content; None if one is unknown: never stored, never served.

        The same object while nothing has changed; another one when the request has grown (media of later chunks).
        """

    @property
    def may_load(self) -> bool:
        """False if the request must compute its prompt itself (prompt log-probabilities, for one)."""


@dataclass(frozen=True, slots=True)
class KVCacheBlockView:
    """One block of the engine's pool. `block_hash` is opaque and names content and group; None if not published."""

    block_id: int
    ref_cnt: int
    is_null: bool
    block_hash: bytes | None
    group_id: int


class BlockHolder(Protocol):
    """The engine's block pool, as far as holding blocks under copy goes."""

    def get_block(self, block_id: int) -> KVCacheBlockView:
        """A view of the block as it is now. Raises PactViolation for a block id that the pool does not have."""

    def touch(self, block_ids: Sequence[int]) -> None:
        """Hold blocks: they are neither evicted nor reused until `free_blocks` was called as often."""

    def free_blocks(self, block_ids: Sequence[int], *, evict_first: bool = False) -> None:
        """Release blocks held by `touch`. Raises PactViolation for a block not touched through this context.

        Blocks that nothing holds any more are evicted last, as if they had just been used, or, with `evict_first`,
        before all others; of `block_ids` the first one first. (An engine may always evict unpublished blocks first.)
        """


@runtime_checkable
class SchedulerContext(BlockHolder, Protocol):
    """The scheduler's block pool and queues, as far as a connector may use them."""

    def iter_free_blocks(self, after_block: int | None = None) -> Iterator[KVCacheBlockView]:
        """The free queue in eviction order, from its head or after `after_block` (PactViolation if not in it)."""

    def get_block_ids(self, request_id: str) -> Sequence[Sequence[int]]:
        """The request's block ids, one sequence per KV cache group."""

    def waiting_requests(self) -> Sequence[str]:
        """Ids of requests not admitted yet, in the order in which the scheduler would take them."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Copy arena slots into engine blocks: `slots[i]` holds request block `start_block + i`, for `block_ids[i]`."""

    job_id: int
    request_id: str
    start_block: int
    slots: tuple[int, ...]
    block_ids: tuple[int, ...]
    synchronous: bool
    group_id: int = 0
    neighbour: int = 0  # number of the engine of this host in whose memory the slots are; 0: this one

    @property
    def blocks(self) -> BlockRange:
        """The job's blocks, in the request's numbering."""
        return BlockRange(self.start_block, len(self.slots))


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Copy the engine's blocks into arena slots, after the step's forward pass; numbered like a `LoadJob`.

    A save has a greater `job_id` than all that were ordered before it.
    """

    job_id: int
    request_id: str
    start_block: int
    slots: tuple[int, ...]
    block_ids: tuple[int, ...]
    group_id: int = 0

    @property
    def blocks(self) -> BlockRange:
        """The job's blocks, in the request's numbering."""
        return BlockRange(self.start_block, len(self.slots))


@dataclass(frozen=True, slots=True)
class JobQuery:
    """Asks about a job whose report is overdue: a worker repeats its outcome, or reports failure if it knows none."""

    job_id: int
    blocks: BlockRange


@dataclass(frozen=True, slots=True)
class StepLookup:
    """Lookup by the workers: `keys` of a request from its first block on, of which those from the save's start.

    `job_id` is the save's. What is found is loaded under the number `load_id(job_id)`. The engine has `computed_tokens`
    of the request; this step can skip at most the `max_tokens` tokens after them.
    """

    job_id: int
    request_id: str
    computed_tokens: int
    max_tokens: int
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class StoreRead:
    """Blocks that a rank read from a tier for a lookup, used or not; `tier` is the tier's position."""

    job_id: int
    tier: int
    blocks: BlockRange


def load_id(job_id: int) -> int:
    """The number of the load that fills the engine's blocks from the slots of a save; no order has this number."""
    return -job_id


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of the workers in one scheduler step. `extra` is for a cache's own workers, opaque to the engine."""

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    inquiries: tuple[JobQuery, ...] = ()
    recalls: tuple[int, ...] = ()
    """Loads under way that must not be used: a worker reports all of such a job's blocks as failed when it ends."""
    overdue: tuple[int, ...] = ()
    """Loads that did not end by their deadline. A worker lets the engine go on without those that have not ended by
    now; it reports all blocks of such a job as failed, and that only when it can no longer write to them."""
    extra: object = None
    lookups: tuple[StepLookup, ...] = ()
    """Lookups by the workers before they begin the step; each belongs to one of `saves` (`SupportsStepLookup`)."""
    max_copies: int | None = None
    """Most copies that a rank gives its device beside the loads that the step waits for; None: the rank's own limit."""
    max_load_bytes: int | None = None
    """Most bytes of asynchronous loads among these copies; None: no limit."""

    def failed(self, num_ranks: int) -> WorkerReport:
        """The report of ranks of which none carried out any load or save of this step."""
        jobs: tuple[LoadJob | SaveJob, ...] = (*self.loads, *self.saves)
        outcomes = {job.job_id: JobOutcome(failed=RangeSet.of(job.blocks)) for job in jobs}
        return WorkerReport(dict.fromkeys(range(num_ranks), outcomes))


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """One rank's report on a job so far: blocks copied and blocks that failed, in the request's numbering."""

    done: RangeSet = NO_RANGES
    failed: RangeSet = NO_RANGES

    def merge(self, later: JobOutcome) -> JobOutcome:
        """Both pieces together. A repeated piece changes nothing; a block that failed once stays failed."""
        failed = self.failed.union(later.failed)
        return JobOutcome(self.done.union(later.done).difference(failed), failed)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The workers' report after one step: rank -> job id -> outcome. Never absent, always true, even if empty."""

    ranks: Mapping[int, Mapping[int, JobOutcome]]
    reads: tuple[StoreRead, ...] = ()
    """Reads by the first rank for lookups; the other ranks have read the same."""

    def __bool__(self) -> bool:
        """True: an engine that skips falsy reports would take a silent rank for an agreeing one (H40)."""
        return True

    @property
    def says_something(self) -> bool:
        """True if any rank reports on a job, or on a read."""
        return bool(self.reads) or any(self.ranks.values())

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Both reports in one; commutative, and idempotent per rank and job: late and repeated pieces are harmless."""
        merged: dict[int, dict[int, JobOutcome]] = {rank: dict(jobs) for rank, jobs in self.ranks.items()}
        for rank, jobs in other.ranks.items():
            mine = merged.setdefault(rank, {})
            for job_id, outcome in jobs.items():
                mine[job_id] = mine[job_id].merge(outcome) if job_id in mine else outcome
        return WorkerReport(merged, tuple(dict.fromkeys(self.reads + other.reads)))


class JobTally:
    """One job's outcomes gathered over ranks until every rank has reported every block (P10)."""

    __slots__ = ("_blocks", "_outcomes", "_ranks")

    def __init__(self, blocks: BlockRange, ranks: int) -> None:
        self._blocks = RangeSet((blocks,)) if blocks.count else NO_RANGES
        self._ranks = ranks
        self._outcomes: dict[int, JobOutcome] = {}

    def add(self, rank: int, outcome: JobOutcome) -> None:
        """Take in one rank's piece, in any order, any number of times. Blocks outside the job are ignored."""
        if rank in self._outcomes or outcome.failed.ranges or outcome.done.ranges != self._blocks.ranges:
            piece = JobOutcome(self._blocks.intersection(outcome.done), self._blocks.intersection(outcome.failed))
            outcome = self._outcomes.get(rank, JobOutcome()).merge(piece)
        self._outcomes[rank] = outcome

    @property
    def complete(self) -> bool:
        """True once all ranks have reported all blocks; a rank that reports nothing keeps the job open."""
        reports = self._outcomes.values()
        whole = {it.done == self._blocks or len(it.done) + len(it.failed) == len(self._blocks) for it in reports}
        return len(reports) == self._ranks and False not in whole

    def loaded(self) -> JobOutcome:
        """For a load: the failed blocks are the hull over ranks, the others arrived."""
        failed = [outcome.failed for outcome in self._outcomes.values() if outcome.failed.ranges]
        lost = hull(failed) if failed else NO_RANGES
        return JobOutcome(self._blocks.difference(lost), lost)

    def saved(self) -> JobOutcome:
        """For a save: the blocks done are the intersection over ranks, the others failed."""
        done = self._blocks
        for outcome in self._outcomes.values():
            done = done.intersection(outcome.done)
        return JobOutcome(done, self._blocks.difference(done))


@dataclass(frozen=True, slots=True)
class LoadSettlement:
    """End of a committed match: every committed block is in one of the two sets, in the request's numbering.

    With `skipped_tokens` nothing was committed: workers found that many tokens when a step began (`StepLookup`), and
    the engine did not compute them.
    """

    request_id: str
    loaded: RangeSet
    failed: RangeSet
    asynchronous: bool
    late: bool = False
    """The deadline has passed and ranks may still write to the blocks, all of which count as failed. The cache holds
    them until no rank can; the request must be given other blocks."""
    skipped_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Engine of a cache for which kvpact supplies the workers and the slots: `"cache"` in the configuration.

    `block_size` is in tokens; one rank copies at most `slot_bytes` of one block; the cache gives its jobs slots below
    `num_slots`. `namespace` is a digest (32 bytes) of all that gives a block's bytes their meaning but the weights:
    enough for a cache that ends with the engine, as a reset announces other weights. `clock`: seconds, never goes back.
    """

    block_size: int
    num_slots: int
    num_ranks: int
    slot_bytes: int
    namespace: bytes
    clock: Callable[[], float]
    groups: GroupSet | None = None  # one of full attention


class ExternalCache(ABC):
    """The scheduler's side of a cache. No method may block on I/O; none is called from two threads at once.

    A first cache implements the seven members that stand first; all others have defaults.
    """

    @abstractmethod
    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        """Promise tokens that follow the engine's own `num_computed_tokens`; None means "ask again later".

        Asking again with the same arguments returns the same plan and acquires nothing (P3). The promise covers at most
        `len(request.token_ids) - 1 - num_computed_tokens` tokens (P6) and holds until commit or abort (P2).
        What failed to load for the request, whatever the reason, is not promised to it again, in any epoch (H09).
        """

    @abstractmethod
    def commit_external_match(
        self, request: EngineRequest, match: ExternalKVMatch, num_tokens: int, block_ids: Sequence[int]
    ) -> int:
        """The engine takes the first `num_tokens` of the match into `block_ids`; returns how many the cache accepts.

        0 tokens declines the match, which ends as an abort does. `block_ids` are all of the request's blocks, from its
        first on; with several KV cache groups those of the first, and `SchedulerContext.get_block_ids` has them all.
        Engines that cannot take a smaller answer get `num_tokens` back.
        """

    @abstractmethod
    def abort_external_match(self, request_id: str, match: ExternalKVMatch | None, reason: str) -> None:
        """The engine will not use the match (None: whatever plan the request has). Harmless if there is none.

        `reason`: an `ExternalMatchExit` that drops the match, or a word of the engine's own. The leases end at once.
        """

    @abstractmethod
    def note_computed(
        self, request: EngineRequest, num_computed_tokens: int, block_ids: Callable[[], Sequence[int]]
    ) -> None:
        """After this step the first `num_computed_tokens` tokens have valid KV in `block_ids()`: copy what is kept.

        An engine that learns a step's tokens late says it once more when the request ends, before `request_finished`.
        """

    @abstractmethod
    def end_step(self) -> StepWork:
        """The scheduler's step is over: what the workers must do with it. Called once per step, even if empty."""

    @abstractmethod
    def apply_report(self, report: WorkerReport) -> list[LoadSettlement]:
        """Take in the workers' report; returns the loads that it settled, and the tokens that lookups spared.

        A load is settled when no rank can still write its blocks, because the engine may then reuse them (H07). A load
        that has not ended by its deadline is settled as `late`, while the cache holds its blocks through the scheduler
        context (P11); without a context it is waited for.
        """

    @abstractmethod
    def request_finished(self, request_id: str) -> None:
        """The request ended or was cancelled: plans not yet committed end, transfers under way are waited for."""

    def note_running(
        self, request_ids: Sequence[str], computed: Sequence[int], step_tokens: Mapping[str, int]
    ) -> Sequence[str]:
        """Take note of requests of which the step changes nothing that is kept, such as decodes within a block.

        Call it before `note_computed`, of which the requests that it returns must still be told: by default all. The
        engine has `computed` tokens of each, and the step computes `step_tokens` more of it. Leave out requests whose
        identity may be another than it was at their last note, and those whose blocks hold something else.
        """
        return request_ids

    def postpone_external_match(self, request_id: str, reason: ExternalMatchExit) -> None:
        """The engine could not take the request's match in this step, for `reason`, and may prepare it again.

        Said before `end_step`, at least when the reason changes and when the engine stops preparing it. A cache keeps
        its promise for a few steps, or until somebody needs the room, and then ends the plan with the last reason.
        Harmless if there is no plan. Default: nothing, so that the plan's lifetime decides.
        """

    def on_new_request(self, request: EngineRequest) -> None:
        """The engine accepted a request; a cache may start looking for its prefix. Default: nothing."""

    def still_waits(self, request_id: str, num_computed_tokens: int) -> bool:
        """True if a prepare would again answer "ask again later", where a cache knows it cheaply. Default: no."""
        return False

    def may_wait(self, request_id: str) -> bool:
        """True if the cache itself has begun a deadline for the request that has not passed. Default: no."""
        return False

    @property
    def asks_shared(self) -> bool:
        """True if `prepare_external_match` asks stores that answer later, which takes time of the step.

        An engine may then leave some requests to a later step, and decline others for lack of time. Default: no.
        """
        return False

    def decline_external_match(self, request: EngineRequest, num_computed_tokens: int) -> None:
        """Instead of `prepare_external_match`, where the engine has no time for it. Default: its plan is aborted."""
        self.abort_external_match(request.request_id, None, "deadline")

    def put_off_external_match(self, request: EngineRequest) -> None:
        """The request was told "ask again later", maybe before a prepare: its deadline runs (P11). Default: none."""

    def abandon_step(self, num_ranks: int) -> None:
        """Drop the running step's orders: they never reach the workers, and must not be ordered with a later step.

        Default: the step is ended, and a report says that all of it failed on all ranks.
        """
        self.apply_report(self.end_step().failed(num_ranks))

    @property
    def has_overdue_loads(self) -> bool:
        """True if `apply_report` must be called although no rank reported anything. Default: after every step."""
        return True

    def bind_scheduler_context(self, context: BlockHolder) -> None:
        """The engine offers its block pool, or its whole `SchedulerContext`. Default: not used."""

    def reset(self) -> None:
        """The weights may have changed: a new epoch begins at once (P13). Default: nothing stored.

        Nothing that was stored before is served, and nothing that was computed before is stored. Never raises, asks no
        store, and deletes nothing that others may use.
        """

    def set_weights_version(self, version: str) -> None:
        """The weights that came with the last reset are called `version`: caches that get the same word share.

        Raises WeightsVersionRefused if no reset came since the last word, or if it is the word from before that reset.
        Default: refused.
        """
        raise WeightsVersionRefused(f"this cache knows no word for its weights; {version!r} changes nothing")

    def take_back_reset(self) -> bool:
        """The weights are those from before the last reset; whether what was stored then is served. Default: no."""
        return False

    def give_up_saves(self) -> None:
        """The engine needs all its blocks now: release those that saves hold. Default: none is held.

        Nothing of these saves is stored, as workers may copy blocks that have other content by then.
        """

    def distrust_blocks(self, block_ids: Collection[int], tables: Mapping[str, Sequence[int]]) -> None:
        """Trust these blocks of the engine no more: nothing of them, or computed after them, is stored (H48).

        `tables` has the blocks of each request that may have some of them. Whatever is already stored of these
        requests, from the first of these blocks on, is dropped. Default: a reset, which drops everything.
        """
        self.reset()

    def distrust_adapter(self, adapter: str) -> None:
        """Distrust blocks computed under `adapter`, as identities name it: they may belong to another adapter.

        Blocks not saved yet are not saved. Blocks reported as saved before are the adapter's. Default: a reset.
        """
        self.reset()

    @property
    def supports_kv_cache_groups(self) -> bool:
        """True if the cache stores and loads the blocks of every KV cache group, not only the first. Default: no."""
        return False

    @property
    def has_pending_work(self) -> bool:
        """True while the engine should keep stepping although no request is alive. Default: no."""
        return False

    def shutdown(self) -> None:
        """Flush and release everything, in bounded time."""


@runtime_checkable
class SupportsStepLookup(Protocol):
    """A cache whose workers can look for a match when the step begins, of which the scheduler knew nothing."""

    def look_up_at_step(self, request: EngineRequest, computed_tokens: int, max_tokens: int) -> None:
        """Have the workers look, when the running step begins, for what it computes and saves: `StepWork.lookups`.

        Call it after `note_computed`. The engine has `computed_tokens` of the request; at most the `max_tokens` tokens
        after them can be skipped.
        """


class ExternalCacheWorker(ABC):
    """One rank's side of a cache: it copies what it is told and reports what it did."""

    @abstractmethod
    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """The engine's KV memory: layer name -> tensor, in forward order."""

    def before_update_states(self, scheduler_output: object) -> Mapping[str, int]:
        """Called before the runner takes in the step: request id -> further tokens that this rank can supply.

        The engine applies the minimum over ranks (`apply_external_hits`). Default: none, and nothing changes.
        """
        return {}

    @abstractmethod
    def start_loads(self, work: StepWork) -> None:
        """Begin the step's loads."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when this layer of all synchronous loads has arrived."""

    @abstractmethod
    def start_saves(self, work: StepWork) -> None:
        """Begin the step's saves; the forward pass that wrote the blocks is over."""

    @abstractmethod
    def report(self) -> WorkerReport:
        """Report on the jobs since the last one; never None, never falsy."""

    def shutdown(self) -> None:
        """Stop all threads and release memory, in bounded time."""
