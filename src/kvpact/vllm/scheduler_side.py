"""The scheduler's half of the connector: vLLM's hooks, told to the cache in the order in which they come.

Owns the map from vLLM's requests to the cache's, and what must be said to the workers this step. Lives in the
scheduler's process only; never blocks on I/O.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvpact.cache.budget import Turn
from kvpact.cache.open import OpenCache, check_cache, open_cache
from kvpact.cache.stats_file import StatsFile
from kvpact.cache.weights_watch import BLIND, WeightsWatch
from kvpact.config import KvpactConfig
from kvpact.contract import ExternalCache, ExternalKVMatch, LoadJob, LoadSettlement, SupportsStepLookup, WorkerReport
from kvpact.errors import ConfigError, KvpactError, PactViolation
from kvpact.identity.loaded_adapters import LoadedAdapters
from kvpact.memory.arena import Arena, ArenaSegment, SegmentAddress
from kvpact.metrics import Metrics, explain_misses
from kvpact.tiers.executor import TierExecutor
from kvpact.tiers.registry import load_seal
from kvpact.vllm.base_weights import base_weights
from kvpact.vllm.compat.configuration import runs_second_runner
from kvpact.vllm.compat.late_loads import LateLoads
from kvpact.vllm.context import VllmContext, scheduler_context
from kvpact.vllm.guard import Guard
from kvpact.vllm.hit_accounting import HitCredit
from kvpact.vllm.identity import engine_namespace
from kvpact.vllm.late_tiers import LateTiers, OpenTiers
from kvpact.vllm.messages import PactMetadata
from kvpact.vllm.request_identity import RequestIdentities, VllmRequest
from kvpact.vllm.stats import PactStats, StatsCollector
from kvpact.vllm.step_hook import Candidates
from kvpact.vllm.worker_identity import facts_of_ranks
from kvpact.wire import AdapterUsed, SharedTierConfig, StepMessage, UnorderedLoad, WorkerHandshake

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CommittedLoad:
    """A committed match until its settlement."""

    block_ids: tuple[int, ...]
    """The request's blocks, from the first on that is to be filled."""
    epochs: int
    """As `WeightsWatch.epochs` counts, when it was committed."""
    job: LoadJob | None = None
    """The order, once it was given; None for a synchronous load."""

    def is_stale(self, settlement: LoadSettlement, epochs: int) -> bool:
        """Whether it brought what was computed by other weights than those of now."""
        return settlement.asynchronous and bool(settlement.loaded.ranges) and self.epochs != epochs


@dataclass(frozen=True, slots=True)
class OfferedMatch:
    """What the last probe of a request was told, and where the match began, in blocks."""

    match: ExternalKVMatch
    start_block: int


class SchedulerSide:
    """The scheduler's half. Until the workers have said hello it has no cache and answers no hit."""

    def __init__(self, config: KvpactConfig, vllm_config: Any, metrics: Metrics, guard: Guard) -> None:
        if config.save == "lazy" and not vllm_config.cache_config.enable_prefix_caching:
            raise ConfigError(
                'save="lazy" follows the engine\'s own prefix cache, which is off: add --enable-prefix-caching, or set '
                '"save": "eager"'
            )
        if config.save == "lazy" and config.match_at == "step":
            raise ConfigError(
                'save="lazy" and match_at="step" exclude each other: what a step looks up is what it would save; set '
                '"save": "eager" or "match_at": "schedule"'
            )
        check_cache(config)
        self.cache: ExternalCache | None = None
        self.opened: OpenCache | None = None
        self._config = config
        self._seal = load_seal(config.record_key_file)
        self._vllm_config = vllm_config
        self._metrics = metrics
        self._budget = guard.budget
        self._block_size = int(vllm_config.cache_config.block_size)
        self._identities = RequestIdentities(vllm_config)
        self.context: VllmContext | None = None
        self._requests: dict[str, VllmRequest] = {}
        self._answers: dict[str, OfferedMatch] = {}
        self._ordered: list[UnorderedLoad] = []
        """The step's committed loads, as they are to be reported should the step's orders never reach the workers."""
        self._broken: list[UnorderedLoad] = []
        self._distrusted: set[str] = set()
        """Requests with a broken load of which the engine has not heard yet: what they compute is worthless."""
        self._loading: dict[str, CommittedLoad] = {}
        """Request id -> its load."""
        self._late = LateLoads()
        self._loaded_for: dict[str, AdapterUsed] = {}
        """Request id -> what its blocks were loaded for, until a step has run with them."""
        self._unsettled = WorkerReport({})
        self._candidates = Candidates(new_requests_only=runs_second_runner(vllm_config))
        self._credit = HitCredit()
        self._weights: WeightsWatch | None = None
        self._ordered_at: tuple[int, ...] = ()
        """What the ranks had said of their weights when the first of `_ordered` was committed."""
        self._attached: list[SegmentAddress] = []
        self._late_tiers: LateTiers | None = None
        self._queues: tuple[TierExecutor, ...] = ()
        self._rank_slot_bytes: tuple[int, ...] = ()
        self._ranks = 0
        self._step_lookup: SupportsStepLookup | None = None
        self._store: SharedTierConfig | None = None
        """Where the workers look when a step begins; None if they do not."""
        self._stats: StatsCollector | None = None
        self._stats_file = StatsFile(config.stats_file) if config.stats_file else None
        self._stepped = True
        """Whether anything may have been counted since `stats_file` was last offered the counts."""

    # Start

    def attach(self, hellos: Sequence[WorkerHandshake]) -> None:
        """The workers are up: map their memory, open the tiers, begin to serve.

        A tier that cannot be opened is left out with one message; the engine serves on without it. vLLM may say it
        again whenever it wakes: the same memory is attached once, and for other memory a new cache begins.
        Raises ConfigError if a rank is missing: what the others saved would count as saved by all (H40).
        """
        hellos = sorted(hellos, key=lambda hello: hello.rank)
        parallel = self._vllm_config.parallel_config
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        present = [hello.rank for hello in hellos]
        if present != list(range(ranks)):
            raise ConfigError(
                f"the engine has {ranks} ranks; {present} have set up their memory for kvpact, see the others' log"
            )
        self._ranks = ranks
        segments = [hello.segment for hello in hellos]
        if segments == self._attached:
            return
        self._end_cache()
        arena = Arena([ArenaSegment.attach(segment) for segment in segments])
        known = engine_namespace(self._vllm_config, facts_of_ranks([hello.facts for hello in hellos]))
        opened: OpenTiers | None = None
        if self._config.tiers:
            weights = base_weights(self._vllm_config, self._config.model_id)
            self._late_tiers = LateTiers(self._config, self._seal, known, arena.slot_bytes, weights)
            opened = self._late_tiers.open()
        self.opened = open_cache(
            self._config,
            namespace=known.digest,
            block_size=self._block_size,
            arena=arena,
            tiers=opened.queues if opened is not None else (),
            clock=time.monotonic,
            metrics=self._metrics,
            budget=self._budget,
        )
        self.cache = self.opened.cache
        if self._config.match_at == "step":
            if not all(hello.step_hook for hello in hellos):
                raise ConfigError(
                    'match_at="step" needs a worker that asks when a step begins: add '
                    "--worker-cls kvpact.vllm.worker.KvpactWorker (MultiConnector does not pass the question on)"
                )
            self._rank_slot_bytes = tuple(segment.rank_slot_bytes for segment in arena.segments)
        if opened is not None:
            self._use(opened)
        self._weights = WeightsWatch([segment.notice for segment in arena.segments], self.cache)
        self._identities.adapters.bind(LoadedAdapters([segment.notice for segment in arena.segments]))
        self._attached = segments
        if not all(hello.watches_weights for hello in hellos):
            logger.warning(BLIND)
        self._stats = StatsCollector(self.opened.observe)
        if self.context is not None:
            self.cache.bind_scheduler_context(self.context)
        logger.info(
            "kvpact: %d slots of %d bytes in memory, %d tier(s) below, namespace %s",
            arena.num_slots,
            arena.slot_bytes,
            len(self._queues),
            opened.namespace.name if opened is not None else known.name,
        )

    def _use(self, opened: OpenTiers) -> None:
        """From now on there are tiers."""
        assert self.opened is not None
        self._queues = opened.queues
        cache: object = self.opened.cache
        if self._config.match_at == "step" and isinstance(cache, SupportsStepLookup):
            self._step_lookup = cache
            shared = tuple((at, opened.numbers[at]) for at in self.opened.shared_tiers)
            self._store = SharedTierConfig(opened.namespace.describe(), self._block_size, self._rank_slot_bytes, shared)

    def _use_late_tiers(self) -> None:
        """Use the tiers that were opened meanwhile, if there are any; waits for nothing."""
        if self.opened is None or self._late_tiers is None or not self._late_tiers.is_ready:
            return
        opened = self._late_tiers.take()
        if opened is not None:
            self.opened.open_tiers(opened.queues)
            self._use(opened)
            logger.info("kvpact: from now on %d tier(s), namespace %s", len(opened.queues), opened.namespace.name)

    def bind_scheduler_context(self, offered: Any) -> None:
        """vLLM offers its KV cache manager, or, before 0.30, its block pool alone."""
        self.context = scheduler_context(offered, str(self._vllm_config.scheduler_config.policy))
        if self.cache is not None:
            self.cache.bind_scheduler_context(self.context)

    # Requests

    def on_new_request(self, request: Any) -> None:
        """vLLM accepted a request."""
        view = self._view(request)
        if self.context is not None:
            self.context.on_new_request(request)
        if self.cache is not None and self._may_use_cache():
            self.cache.on_new_request(view)

    def _may_use_cache(self) -> bool:
        """The first question of every hook: what the ranks say of their weights comes before what is stored."""
        if self.cache is not None:
            for adapter in self._identities.adapters.look():
                self.cache.distrust_adapter(adapter)
        return self._weights is not None and self._weights.look()

    def _view(self, request: Any) -> VllmRequest:
        view = self._requests.get(request.request_id)
        if view is None or view.request is not request:
            if view is not None:
                view.release()
            view = self._requests[request.request_id] = VllmRequest(request, self._identities)
        return view

    def probe(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """`get_num_new_matched_tokens`: the tokens that can be loaded behind `num_computed_tokens`, and whether later.

        Whatever goes wrong, the request has no plan afterwards that the engine does not know of.
        """
        self._answers.pop(request.request_id, None)
        if self.cache is None or not self._may_use_cache():
            return 0, False
        view = self._view(request)
        if self.cache.still_waits(view.request_id, num_computed_tokens):
            return None, False
        if view.waits_for_identity(self._config.prepare_deadline, time.monotonic()):
            view.was_answered = False
            return None, False
        deadline = self._config.prepare_deadline
        turn = self._budget.turn_of(view, deadline) if self.cache.asks_shared else Turn.NOW
        if turn is Turn.LATER:
            return None, False
        if turn is Turn.NEVER:
            self.cache.decline_external_match(view, num_computed_tokens)
            return 0, False
        try:
            match = self.cache.prepare_external_match(view, num_computed_tokens)
        except Exception:
            self.cache.abort_external_match(request.request_id, None, "error")
            raise
        view.was_answered = match is not None
        if match is None:
            return None, False
        if match.num_tokens:
            self._answers[request.request_id] = OfferedMatch(match, num_computed_tokens // self._block_size)
        return match.num_tokens, match.load_kv_async

    def note_allocated(self, request: Any, blocks: Any) -> None:
        """`update_state_after_alloc`, in any case."""
        if self.context is not None:
            self.context.update_state_after_alloc(request, blocks)

    def commit(self, request: Any, block_ids: Sequence[int], num_tokens: int) -> None:
        """`update_state_after_alloc`: the engine takes `num_tokens` of what the last probe was told, perhaps 0.

        The engine cannot be told "no" here, so if the commit goes wrong the workers report those blocks as not loaded.
        """
        answer = self._answers.pop(request.request_id, None)
        if answer is None or self.cache is None:
            return
        end = answer.start_block - (-num_tokens // self._block_size)
        order = UnorderedLoad(
            request.request_id, tuple(block_ids[answer.start_block : end]), not answer.match.load_kv_async
        )
        if num_tokens:
            self._loading[request.request_id] = CommittedLoad(tuple(block_ids[answer.start_block :]), self._epochs)
            self._credit.admit(request, num_tokens, synchronous=order.synchronous)
        try:
            if not self._may_use_cache():
                raise KvpactError("the last reset of the cache failed; nothing is loaded")
            self.cache.commit_external_match(self._view(request), answer.match, num_tokens, block_ids)
        except Exception:
            if num_tokens:
                self._break(order)
            raise
        if num_tokens and (used := self._view(request).adapter_in_use) is not None:
            self._loaded_for[request.request_id] = AdapterUsed(*used, order.block_ids)
        if num_tokens:
            self._ordered_at = self._ordered_at or self._weights_said()
            self._ordered.append(order)

    @property
    def _epochs(self) -> int:
        return self._weights.epochs if self._weights is not None else 0

    def _weights_said(self) -> tuple[int, ...]:
        """How often each rank's weights have changed, as far as the last look tells."""
        return self._weights.changes if self._weights is not None else ()

    def _break(self, order: UnorderedLoad) -> None:
        """The workers will report this load as failed; nothing that its request computes until then is stored."""
        self._broken.append(order)
        self._distrusted.add(order.request_id)
        if (view := self._requests.get(order.request_id)) is not None:
            view.load_broken = True

    def end_step(self, scheduler_output: Any) -> PactMetadata:
        """`build_connector_meta`: what the workers must do with this step."""
        self._stepped = True
        if self.context is not None:
            self.context.build_connector_meta(scheduler_output)
        self._credit.scheduled(scheduler_output.num_scheduled_tokens)
        if self.cache is None:
            return PactMetadata.of(StepMessage())
        if not self._may_use_cache():
            self.abandon_step()
            return self.end_broken_step()
        if scheduler_output.num_scheduled_tokens and self._weights is not None:
            self._weights.engine_computes()
        self._use_late_tiers()
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            view = self._requests.get(request_id)
            if view is not None and request_id not in self._distrusted:
                computed = view.request.num_computed_tokens + num_tokens
                self.cache.note_computed(view, computed, partial(self._block_ids, request_id))
        if self._step_lookup is not None:
            self._look_up(scheduler_output, self._step_lookup)
        work = self.cache.end_step()
        for job in work.loads:
            if not job.synchronous and (load := self._loading.get(job.request_id)) is not None:
                load.job = job
        changes = (self._ordered_at or self._weights_said()) if work.loads or work.saves else ()
        store = self._store if work.lookups else None
        run = self._loaded_for.keys() & scheduler_output.num_scheduled_tokens.keys()
        adapters = tuple(self._loaded_for.pop(request_id) for request_id in run)
        spoilt = {}
        if work.overdue and self.context is not None:
            jobs = [load.job for load in self._loading.values() if load.job and load.job.job_id in work.overdue]
            spoilt = self._late.name(jobs, self.context, self._block_ids_or_none)
        metadata = PactMetadata.of(StepMessage(work, tuple(self._broken), store, adapters, changes, spoilt))
        self._broken.clear()
        self._ordered.clear()
        self._ordered_at = ()
        return metadata

    def wake_tiers(self) -> None:
        """The step is over: the tiers' threads begin what it handed them. In its middle they would have its core."""
        for queue in self._queues:
            queue.flush()

    def _look_up(self, scheduler_output: Any, cache: SupportsStepLookup) -> None:
        """Have the workers look for what this step computes, where a request may be given it then."""
        for request_id, max_tokens in self._candidates.of_step(scheduler_output).items():
            view = self._requests.get(request_id)
            if view is not None and request_id not in self._distrusted:
                cache.look_up_at_step(view, view.request.num_computed_tokens, max_tokens)
                self._credit.watch(view.request)

    def end_broken_step(self) -> PactMetadata:
        """What to tell the workers when `end_step` raised: none of the step's loads will happen."""
        for order in self._ordered:
            self._break(order)
        metadata = PactMetadata.of(StepMessage(broken=tuple(self._broken)))
        self._broken.clear()
        self._ordered.clear()
        self._ordered_at = ()
        return metadata

    def abandon_step(self) -> None:
        """Take back what the cache was about to order when `end_step` raised: sent later, it would hit other blocks."""
        if self.cache is not None:
            self.cache.abandon_step(self._ranks)

    def _block_ids(self, request_id: str) -> Sequence[int]:
        if self.context is None:
            raise PactViolation("vLLM computes requests before it offered its block pool to the connector")
        (block_ids,) = self.context.blocks_of(request_id)
        return block_ids

    def _block_ids_or_none(self, request_id: str) -> Sequence[int]:
        """A request's blocks; none if it has none, or has ended."""
        try:
            return self._block_ids(request_id)
        except (PactViolation, KeyError, ValueError):
            return ()

    def take_report(
        self, report: WorkerReport, invalid_block_ids: set[int], failed_requests: Collection[str] = ()
    ) -> None:
        """`update_connector_output`: settle what the workers say is done.

        Blocks that a synchronous load left invalid are in the engine's prefix cache already, and what was computed from
        them is as well. All are taken out: the request that would recompute them may be gone before it does (H28).
        Of `failed_requests` nothing was loaded.
        """
        self._stepped = True
        says_something = report.says_something or self._unsettled.says_something
        overdue = self.cache is not None and self.cache.has_overdue_loads
        if not (says_something or invalid_block_ids or failed_requests or overdue):
            return
        for request_id in failed_requests:
            self._credit.load_failed(request_id, 0)
        self._unsettled = self._unsettled.aggregate(report)  # with what an exception left over the last time
        if invalid_block_ids:
            spoilt = self._spoilt_by(invalid_block_ids)
            if self.context is not None:
                self.context.evict_published(sorted(spoilt))
        if self.cache is None:
            return
        self._may_use_cache()  # what is reported as saved may be of weights that are gone
        doubtful = self._late.take_out(invalid_block_ids, overdue=overdue)
        if doubtful and self.context is not None:
            tables = {name: self._block_ids_or_none(name) for name in self._requests}
            self.cache.distrust_blocks(doubtful, tables)
        settlements = self.cache.apply_report(self._unsettled)
        self._unsettled = WorkerReport({})
        hits = Counter[str]()
        for settlement in settlements:
            if settlement.skipped_tokens:
                hits[settlement.request_id] += settlement.skipped_tokens
            else:
                self._end_load(settlement)
        self._credit.credit(hits)

    def _end_load(self, settlement: LoadSettlement) -> None:
        """A load is settled; if it came too late for its weights, the engine is told so with the next report."""
        request_id = settlement.request_id
        load = self._loading.get(request_id)
        if load is not None and request_id in self._requests and load.is_stale(settlement, self._epochs):
            block_ids = load.job.block_ids if load.job is not None else load.block_ids
            self._break(UnorderedLoad(request_id, block_ids, synchronous=True))
        else:
            self._loading.pop(request_id, None)
        self._credit.step_reported(request_id)

    def _spoilt_by(self, invalid_block_ids: set[int]) -> set[int]:
        """The invalid blocks and those behind them in the requests that were loading them, whose hits are less."""
        spoilt = set(invalid_block_ids)
        for request_id, load in list(self._loading.items()):
            blocks = load.block_ids
            first = next((place for place, block in enumerate(blocks) if block in invalid_block_ids), None)
            if first is not None:
                spoilt.update(blocks[first:])
                self._credit.load_failed(request_id, first * self._block_size)
                if request_id in self._distrusted:
                    self._credit.step_reported(request_id)
                    self._distrusted.discard(request_id)
                    del self._loading[request_id]
        return spoilt

    def request_finished(self, request_id: str) -> None:
        """The request ended or was cancelled, in whatever state."""
        self._stepped = True
        if (view := self._requests.pop(request_id, None)) is not None:
            view.release()
        self._answers.pop(request_id, None)
        self._loaded_for.pop(request_id, None)
        self._credit.request_finished(request_id)
        if self.cache is not None:
            self.cache.request_finished(request_id)

    # Whole engine

    def has_pending_work(self) -> bool:
        """Whether vLLM must keep stepping without requests, to bring in the workers' reports."""
        if self.cache is None or self.opened is None:
            return False
        self._use_late_tiers()
        pending = self.cache.has_pending_work
        if self._stats_file is not None and self._stepped and not pending:
            self._stats_file.offer(self.opened.observe())
            self._stepped = False
        return pending

    def collect_stats(self) -> PactStats | None:
        """`get_kv_connector_stats`: what was counted since the last time, for vLLM's own metrics."""
        return self._stats.collect(can_wait=self._budget.exhausted) if self._stats is not None else None

    def take_hit_corrections(self) -> tuple[int, int]:
        """See `HitCredit.take_corrections`."""
        return self._credit.take_corrections()

    def reset(self) -> None:
        """`reset_cache`: the weights may be others from now on."""
        self._stepped = True
        if self._weights is not None:
            self._weights.reset()

    def shutdown(self) -> None:
        """Flush the tiers in bounded time and say how the cache did."""
        self._identities.close()
        self._end_cache()

    def _end_cache(self) -> None:
        if self.opened is None:
            return
        self._use_late_tiers()
        if self._late_tiers is not None:
            self._late_tiers.close()
        snapshot = self.opened.observe()
        logger.info("kvpact: %s", explain_misses(snapshot))
        if self._weights is not None:
            self._weights.close()
            self._weights = None
        self._identities.adapters.bind(None)
        self._loaded_for.clear()
        self.opened.shutdown()
        if self._stats_file is not None:
            self._stats_file.close(snapshot)
        self.cache, self.opened, self._attached = None, None, []
