"""An unchanged connector of the tuple API (vLLM's KVConnectorBase_V1) as a cache of the contract.

Owns the translation in both halves: lookups to matches, allocations to commits, "finished" sets to settled jobs. A
connector that speaks the pact in one of the forms of `kvpact.matches.forms` hears how each match ends. Of others an
open match is not looked up twice and a whole prompt is never promised; nothing can tell them that a match was dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any, Protocol

from kvpact.contract import (
    BlockHolder,
    EngineRequest,
    ExternalCache,
    ExternalCacheWorker,
    ExternalKVMatch,
    ExternalMatchExit,
    JobOutcome,
    JobTally,
    LoadJob,
    LoadSettlement,
    SaveJob,
    SchedulerContext,
    StepWork,
    WorkerReport,
)
from kvpact.errors import ConfigError, PactViolation
from kvpact.matches.forms import TupleForm, form_of
from kvpact.matches.tracker import MatchTracker
from kvpact.ranges import BlockRange, RangeSet, num_blocks_for
from kvpact_testkit.engine.open_jobs import OpenJobs

NO_MATCH = ExternalKVMatch(0)


class TupleConnectorScheduler(Protocol):
    """The part of the tuple API's scheduler half that is called here."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens the connector has beyond those computed, and whether it loads them asynchronously."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request was admitted, with `num_external_tokens` external tokens."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """What this step's workers must know."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request ended; True if its blocks must be kept until the workers report it as sent."""


class TupleConnectorWorker(Protocol):
    """The part of the tuple API's worker half that is called here."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The engine's KV memory."""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """The step begins."""

    def clear_connector_metadata(self) -> None:
        """The step has ended."""

    def start_load_kv(self, forward_context: Any) -> None:
        """Begin the step's loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when the layer's loads have arrived."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any) -> None:
        """Begin to save a layer."""

    def wait_for_save(self) -> None:
        """Return when the layers given to `save_kv_layer` may be overwritten."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks were sent, and received, since the last call."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose load failed since the last call."""


class V1ConnectorRequest:
    """A request with the attribute names that tuple connectors use."""

    def __init__(self, request: EngineRequest) -> None:
        self._request = request
        self.request_id = request.request_id
        self.prompt_token_ids = list(request.token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.num_computed_tokens = 0
        self.skip_reading_prefix_cache = not request.may_load
        self.kv_transfer_params: dict[str, Any] | None = None
        identity = request.identity
        self.cache_salt = identity.salt or None if identity else None
        adapter = identity.adapter if identity else ""
        self.lora_request = SimpleNamespace(lora_name=adapter, lora_path=adapter) if adapter else None
        self.mm_features: list[Any] = list(identity.media) if identity else []

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and outputs so far."""
        return list(self._request.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return len(self._request.token_ids)


class V1ConnectorBlocks:
    """A request's blocks with the method that tuple connectors use."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = tuple(list(ids) for ids in groups)

    def get_block_ids(self) -> tuple[list[int], ...]:
        """The block ids, one list per KV cache group."""
        return self._groups


class _SilentForm(TupleForm):
    """A connector that cannot be told how a match ends."""

    def must_end(self, match: ExternalKVMatch) -> bool:
        """Whether it is kept until then: an open match is looked up once."""
        return True

    def abort(self, request: Any, match: ExternalKVMatch, reason: ExternalMatchExit) -> None:
        """The tuple API has no call for it."""


@dataclass(slots=True)
class _Record:
    request: V1ConnectorRequest
    computed: int = 0
    """Tokens computed before the next step, as the connector knows."""
    known_blocks: int = 0
    answer: ExternalKVMatch = NO_MATCH
    """The last promise."""
    announced: bool = False
    """Whether the connector was told of the request's admission."""


@dataclass(slots=True)
class _Step:
    """What is collected in one step for `build_connector_meta`."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    new: list[SimpleNamespace] = field(default_factory=list)
    continued: list[tuple[str, int, list[int]]] = field(default_factory=list)
    scheduled: dict[str, int] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)


class V1ConnectorCache(ExternalCache):
    """The scheduler's half over `connector`; `block_size` in tokens, one KV cache group, `num_ranks` workers."""

    def __init__(self, connector: TupleConnectorScheduler, block_size: int, num_ranks: int = 1) -> None:
        self.connector = connector
        self._block_size = block_size
        self._context: SchedulerContext | None = None
        no_blocks = V1ConnectorBlocks(((),))
        self.matches = MatchTracker(form_of(connector, no_blocks) or _SilentForm(connector, no_blocks))
        self._records: dict[str, _Record] = {}
        self._loads: OpenJobs[LoadJob, tuple[int, int]] = OpenJobs(num_ranks)
        """With the first token and the number of tokens."""
        self._sends: OpenJobs[SaveJob, None] = OpenJobs(num_ranks)
        self._job_ids = count(1)
        self._step = _Step()

    def bind_scheduler_context(self, context: BlockHolder) -> None:
        """Blocks of ended requests are held while the connector sends them."""
        if not isinstance(context, SchedulerContext):
            raise ConfigError(f"a tuple connector needs a whole SchedulerContext, not {type(context).__name__}")
        self._context = context

    def _record(self, request: EngineRequest) -> _Record:
        if request.request_id not in self._records:
            self._records[request.request_id] = _Record(V1ConnectorRequest(request))
        return self._records[request.request_id]

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        """See `ExternalCache`."""
        if request.identity is None or not request.may_load:
            return NO_MATCH
        record = self._record(request)
        record.announced, record.known_blocks = False, 0
        record.computed = record.request.num_computed_tokens = num_computed_tokens
        tokens, asynchronous = self.matches.prepare(record.request, num_computed_tokens)
        if tokens is None:
            return None
        tokens = min(tokens, len(request.token_ids) - 1 - num_computed_tokens)
        if tokens <= 0:
            return NO_MATCH
        answer = ExternalKVMatch(tokens, asynchronous, self.matches.open[request.request_id])
        if record.answer != answer:
            record.answer = answer
        return record.answer

    def commit_external_match(
        self, request: EngineRequest, match: ExternalKVMatch, num_tokens: int, block_ids: Sequence[int]
    ) -> int:
        """See `ExternalCache`."""
        found = self.matches.open.get(request.request_id)
        if found is None or found is not match.query_result:
            raise PactViolation(f"request {request.request_id} commits a match that is not its open plan")
        (start, _), record = found.question, self._record(request)
        accepted = self._announce(record, num_tokens, block_ids)
        self.matches.shortfalls.clear()
        if accepted:
            first = start // self._block_size
            blocks = tuple(block_ids[first : num_blocks_for(start + accepted, self._block_size)])
            job = LoadJob(
                next(self._job_ids), request.request_id, first, (0,) * len(blocks), blocks, not match.load_kv_async
            )
            self._loads.add(job, (start, accepted))
            self._step.loads.append(job)
            record.computed = start + accepted
        return accepted

    def _announce(self, record: _Record, num_tokens: int, block_ids: Sequence[int]) -> int:
        record.announced = True
        return self.matches.commit(record.request, V1ConnectorBlocks((block_ids,)), num_tokens)

    def abort_external_match(self, request_id: str, match: ExternalKVMatch | None, reason: str) -> None:
        """See `ExternalCache`."""
        found = self.matches.open.get(request_id)
        if found is not None and (match is None or match.query_result is found):
            said = reason in [*ExternalMatchExit]
            self.matches.drop(request_id, ExternalMatchExit(reason) if said else ExternalMatchExit.DECLINED)

    def postpone_external_match(self, request_id: str, reason: ExternalMatchExit) -> None:
        """See `ExternalCache`."""
        if (found := self.matches.open.get(request_id)) is not None:
            found.exit = reason

    def reset(self) -> None:
        """See `ExternalCache`. The connector's own reset is not called: the engine's requests are asked for anew."""
        self.matches.drop_all(ExternalMatchExit.RESET)

    def shutdown(self) -> None:
        """See `ExternalCache`."""
        self.matches.drop_all(ExternalMatchExit.CANCELLED)

    def note_computed(
        self, request: EngineRequest, num_computed_tokens: int, block_ids: Callable[[], Sequence[int]]
    ) -> None:
        """See `ExternalCache`. The connector does not see a request of unknown identity, which it could not tell from
        others."""
        if request.identity is None:
            return
        record = self._record(request)
        if num_computed_tokens <= record.computed:  # computed again after a failed load
            record.computed = record.known_blocks = 0
        blocks = list(block_ids())
        if not record.announced:
            self._announce(record, 0, blocks)
        step, request_id = self._step, request.request_id
        step.scheduled[request_id] = num_computed_tokens - record.computed
        if record.known_blocks == 0:
            step.new.append(
                SimpleNamespace(
                    req_id=request_id,
                    prompt_token_ids=list(request.token_ids),
                    block_ids=(blocks,),
                    num_computed_tokens=record.computed,
                    mm_features=record.request.mm_features,
                    lora_request=record.request.lora_request,
                )
            )
        else:
            step.continued.append((request_id, record.computed, blocks[record.known_blocks :]))
        record.computed = record.request.num_computed_tokens = num_computed_tokens
        record.known_blocks = len(blocks)

    def end_step(self) -> StepWork:
        """See `ExternalCache`."""
        self.matches.end_step(lambda found, asked: ExternalMatchExit.NOT_REACHED)
        step, self._step = self._step, _Step()
        cached = SimpleNamespace(
            req_ids=[request_id for request_id, _, _ in step.continued],
            num_computed_tokens=[computed for _, computed, _ in step.continued],
            new_block_ids=[(blocks,) if blocks else None for _, _, blocks in step.continued],
            resumed_req_ids=set(),
            new_token_ids=[],
        )
        output = SimpleNamespace(
            scheduled_new_reqs=step.new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=step.scheduled,
            total_num_scheduled_tokens=sum(step.scheduled.values()),
            finished_req_ids=step.finished,
            preempted_req_ids=set(),
        )
        metadata = self.connector.build_connector_meta(output)
        return StepWork(tuple(step.loads), tuple(step.saves), extra=(metadata, frozenset(step.finished)))

    def apply_report(self, report: WorkerReport) -> list[LoadSettlement]:
        """See `ExternalCache`."""
        settled = [self._settle(*load) for load in self._loads.complete(report)]
        for job, _, _ in self._sends.complete(report):
            if self._context is not None:
                self._context.free_blocks(job.block_ids)
        return settled

    def _settle(self, job: LoadJob, tally: JobTally, span: tuple[int, int]) -> LoadSettlement:
        outcome, (start, num_tokens) = tally.loaded(), span
        record = self._records.get(job.request_id)
        if record is not None and (not job.synchronous or outcome.failed.ranges):
            arrived = outcome.done.prefix_from(job.start_block) * self._block_size
            record.computed, record.known_blocks = start + min(arrived, num_tokens), 0
            record.announced = job.synchronous
        return LoadSettlement(job.request_id, outcome.done, outcome.failed, not job.synchronous)

    def request_finished(self, request_id: str) -> None:
        """See `ExternalCache`. Blocks that the connector is sending are held until all ranks have reported."""
        self.matches.requests_finished([request_id])
        record = self._records.pop(request_id, None)
        if record is None or self._context is None:
            return
        blocks = tuple(self._context.get_block_ids(request_id)[0])
        self._step.finished.add(request_id)
        keep, _ = self.connector.request_finished(record.request, list(blocks))
        if keep and blocks:
            self._context.touch(blocks)
            job = SaveJob(next(self._job_ids), request_id, 0, (0,) * len(blocks), blocks)
            self._sends.add(job, None)
            self._step.saves.append(job)

    @property
    def has_pending_work(self) -> bool:
        """Whether the connector is receiving or sending."""
        return bool(self._loads.by_id or self._sends.by_id or self._step.saves)


class V1ConnectorWorker(ExternalCacheWorker):
    """One rank's half over `connector`."""

    def __init__(self, connector: TupleConnectorWorker, rank: int = 0) -> None:
        self.connector = connector
        self.rank = rank
        self._layers: dict[str, Any] = {}
        self._finished: set[str] = set()
        self._synchronous: list[LoadJob] = []
        self._receiving: dict[str, LoadJob] = {}
        self._sending: dict[str, SaveJob] = {}
        self._errors: set[int] = set()

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """See `ExternalCacheWorker`."""
        self._layers = dict(kv_caches)
        self.connector.register_kv_caches(self._layers)

    def start_loads(self, work: StepWork) -> None:
        """See `ExternalCacheWorker`."""
        match work.extra:
            case (metadata, frozenset() as finished):
                self._finished = set(finished)
                self.connector.bind_connector_metadata(metadata)
            case _:
                raise PactViolation(f"step work for a tuple connector carries its metadata, not {work.extra!r}")
        self._synchronous = [job for job in work.loads if job.synchronous]
        self._receiving.update((job.request_id, job) for job in work.loads if not job.synchronous)
        self.connector.start_load_kv(None)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See `ExternalCacheWorker`."""
        self.connector.wait_for_layer_load(layer_name)

    def start_saves(self, work: StepWork) -> None:
        """See `ExternalCacheWorker`."""
        self._sending.update((job.request_id, job) for job in work.saves)
        for name, layer in self._layers.items():
            self.connector.save_kv_layer(name, layer, None)
        self.connector.wait_for_save()

    def report(self) -> WorkerReport:
        """See `ExternalCacheWorker`."""
        sent, received = self.connector.get_finished(self._finished)
        self._errors |= self.connector.get_block_ids_with_load_errors()
        self.connector.clear_connector_metadata()
        loads = [*self._synchronous, *_take(self._receiving, received)]
        outcomes = {job.job_id: self._outcome(job) for job in loads}
        self._errors.difference_update(block for job in loads for block in job.block_ids)
        outcomes.update((job.job_id, JobOutcome(RangeSet.of(job.blocks))) for job in _take(self._sending, sent))
        self._synchronous = []
        return WorkerReport({self.rank: outcomes})

    def _outcome(self, job: LoadJob) -> JobOutcome:
        pairs = zip(job.blocks, job.block_ids, strict=True)
        failed = RangeSet.of(*(BlockRange(index, 1) for index, block in pairs if block in self._errors))
        return JobOutcome(RangeSet.of(job.blocks).difference(failed), failed)


def _take(jobs: dict[str, Any], request_ids: Iterable[str] | None) -> list[Any]:
    return [jobs.pop(request_id) for request_id in list(request_ids or ()) if request_id in jobs]
