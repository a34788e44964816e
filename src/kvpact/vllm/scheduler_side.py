"""The scheduler's half of the connector: passes vLLM's hooks to the cache in the order in which they come.

Owns the cache while there is one, and this step's message to the workers. Lives in the scheduler's process only; never
blocks on I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kvpact.cache.mounted import EngineIdentity, MountedCache, answer_without_cache
from kvpact.config import KvpactConfig
from kvpact.contract import ExternalCache, ExternalKVMatch, ExternalMatchExit, WorkerReport
from kvpact.errors import KvpactError, PactViolation
from kvpact.identity.groups import one_group
from kvpact.identity.tenants import load_tenants
from kvpact.metrics import Metrics, StartVerdict
from kvpact.tiers.registry import load_seal
from kvpact.vllm.base_weights import base_weights
from kvpact.vllm.checks import (
    check_classes,
    require_all_ranks,
    require_hooks,
    require_no_restarts,
    start_verdict,
    state_limits,
)
from kvpact.vllm.client_hints import ClientHints
from kvpact.vllm.compat.configuration import match_unit, replica_number
from kvpact.vllm.compat.objects import end_step_at
from kvpact.vllm.computed_tokens import ComputedTokens
from kvpact.vllm.context import VllmContext, scheduler_context
from kvpact.vllm.groups import EngineGroups, fit_to_engine, require_groups
from kvpact.vllm.guard import Guard
from kvpact.vllm.hit_accounting import UNKNOWN_PLACE, HitCredit, places_of
from kvpact.vllm.identity import engine_namespace
from kvpact.vllm.kv_events import KVEvents
from kvpact.vllm.loads import CommittedLoad, CommittedLoads
from kvpact.vllm.messages import NOTHING_TO_DO, PactMetadata
from kvpact.vllm.probes import Probes
from kvpact.vllm.reports import Reports
from kvpact.vllm.request_identity import OfferedMatch, RequestIdentities
from kvpact.vllm.requests import EngineRequests
from kvpact.vllm.stats import PactStats, StatsCollector
from kvpact.vllm.worker_identity import facts_of_slots
from kvpact.wire import StepMessage, WorkerHandshake

logger = logging.getLogger(__name__)

NO_MATCH: Final = ExternalKVMatch(0)
_NO_WORK: Final = StepMessage().work


class SchedulerSide:
    """The scheduler's half. It has no cache and returns no hit until the workers' handshakes have arrived."""

    def __init__(
        self, config: KvpactConfig, vllm_config: Any, metrics: Metrics, guard: Guard, groups: EngineGroups
    ) -> None:
        self._config = fit_to_engine(config, groups, vllm_config)
        self._groups = groups
        self._seal = load_seal(config.record_key_file)
        self._tenants = load_tenants(config.tenants)
        self._vllm_config = vllm_config
        self._metrics = metrics
        self._budget = guard.budget
        self._hints = ClientHints(metrics, config.hints, self._tenants) if config.hints != "off" else None
        is_plain = not (groups.several or groups.groups.tokens_ahead)
        self._kv_groups = one_group(int(vllm_config.cache_config.block_size)) if is_plain else groups.groups
        """The KV cache groups that the cache keeps."""
        self._block_size = self._kv_groups.block_size
        """Tokens in a block of the chain."""
        self.identities = RequestIdentities(vllm_config)
        self.events = KVEvents(vllm_config, self._kv_groups, self.identities, metrics)
        self.mounted: MountedCache | None = None
        self.context: VllmContext | None = None
        self._requests = EngineRequests(self.identities)
        self.credit = HitCredit()
        self._places = places_of(config.tiers)
        """vLLM's names for the places of tiers, by the tiers' labels; `UNKNOWN_PLACE` for those not named."""
        self.loads = CommittedLoads(self.credit, self._block_size, whole_requests=groups.several)
        self._computed = ComputedTokens(vllm_config, self.identities, self._requests, self.loads)
        self._probes = Probes(guard, self._config.prepare_deadline)
        self._reports = Reports(self._requests, self.loads)
        self._stats: StatsCollector | None = None
        self._has_statistics = True
        """True if vLLM asks for counts."""
        self._model = str(vllm_config.model_config.model)
        self._without_cache = None
        """Socket that answers in the place of a cache, where there will be none."""
        if groups.unserved:
            logger.warning("kvpact: this engine runs without a cache: %s", groups.unserved)
            verdict = StartVerdict(groups.unserved)
            self._without_cache = answer_without_cache(metrics, self._model, self._block_size, verdict)
        self._compared_sizes = False
        """True once vLLM's block sizes were compared: at rest, as it may set one of them after the start."""
        self.speaks_the_pact = False
        """True if the engine's scheduler reports each match's exit, and begins requests again whose steps relied on
        blocks that were not loaded."""

    @property
    def cache(self) -> ExternalCache | None:
        """The cache; None until the workers are up."""
        return self.mounted.cache if self.mounted is not None else None

    # Start

    def attach(self, hellos: Sequence[WorkerHandshake]) -> None:
        """The workers are up: map their memory, open the tiers, begin to serve.

        A tier that cannot be opened is left out with one message; the engine serves on without it. vLLM may repeat this
        call whenever it wakes: the same memory is attached once, and for other memory a new cache begins.
        """
        hellos = require_all_ranks(self._vllm_config, hellos)
        if self.mounted is not None and self.mounted.segments == [hello.segment for hello in hellos]:
            return
        require_hooks(self._config, hellos)
        missing = check_classes(self._config, hellos, speaks_the_pact=self.speaks_the_pact)
        if not self.speaks_the_pact:
            require_no_restarts(self._config, self._vllm_config, self._groups)
        self._end_cache()
        self.mounted = self._mount(hellos)
        require_groups(self.mounted.cache, self._groups)
        if self._hints is not None:
            self._hints.give_all(self._requests.views, self.mounted.hints)
        if self._has_statistics:
            self._stats = StatsCollector(self.mounted.observe, collect_samples=self._metrics.collect_samples)
            self._stats.is_behind = True  # the page shows tiers before the first request, absent ones too
        if self.context is not None:
            self.mounted.cache.bind_scheduler_context(self.context)
        self._compared_sizes = False
        unit = match_unit(self._vllm_config)
        verdict = start_verdict(self._groups, missing, has_statistics=self._has_statistics, unit=unit)
        self.mounted.listen(self._model, verdict)

    def _mount(self, hellos: Sequence[WorkerHandshake]) -> MountedCache:
        vllm_config = self._vllm_config
        with_slots = sum(hello.slots_of is None for hello in hellos)
        return MountedCache(
            self._config,
            hellos,
            EngineIdentity(
                engine_namespace(vllm_config, facts_of_slots(hellos), len(hellos) // with_slots, self._groups),
                base_weights(vllm_config, self._config.model_id) if self._config.tiers else None,
                self.identities.adapters,
                self._seal,
                self.events.queue,
                lambda stopped: base_weights(vllm_config, self._config.model_id).identity(stopped),
                self._tenants,
            ),
            self._kv_groups,
            metrics=self._metrics,
            budget=self._budget,
            replica=replica_number(vllm_config.parallel_config),
        )

    def bind_scheduler_context(self, kv_cache_manager: Any) -> None:
        """Attach to the block tables and the block pool of vLLM's KV cache manager."""
        if not self._groups.are_served:
            return
        self._has_statistics = bool(kv_cache_manager.log_stats)
        policy = str(self._vllm_config.scheduler_config.policy)
        self.context = scheduler_context(
            kv_cache_manager, policy, self._groups.groups if self._groups.several else None
        )
        self.events.bind(kv_cache_manager)
        self.identities.use_engine_hashes(self._vllm_config.cache_config, self.context.hash_block_size)
        if self.mounted is not None:
            self.mounted.cache.bind_scheduler_context(self.context)

    # Requests

    def on_new_request(self, request: Any) -> None:
        """vLLM accepted a request."""
        view = self._requests.view(request)
        if self.context is not None:
            self.context.on_new_request(request)
        if self._hints is not None:
            self._hints.on_new_request(view, self.mounted)
        if self.mounted is not None:
            self.mounted.apply_notices()
            if self.mounted.serves:
                self.mounted.cache.on_new_request(view)

    def prepare(self, request: Any, num_computed_tokens: int) -> ExternalKVMatch | None:
        """The tokens that can be loaded after `num_computed_tokens`; None: ask again later.

        On an error the request has no plan that the engine does not know of.
        """
        view = self._requests.view(request)
        view.answer = None
        mounted = self.mounted
        if self.loads.must_step_aside:
            return None
        if mounted is None:
            return NO_MATCH
        mounted.apply_notices()
        if not mounted.serves:
            return NO_MATCH
        cache = mounted.cache
        match = self._probes.answer(cache, view, num_computed_tokens)
        if match is None:
            return None
        step_end = mounted.step_end(view.request_id) if self._groups.several else 0
        if step_end:
            end_step_at(request, step_end)
        if not match.num_tokens:
            return match
        if self._groups.several and not match.load_kv_async:
            cache.abort_external_match(view.request_id, match, "synchronous")
            raise PactViolation("a load of several KV cache groups is asynchronous: vLLM takes no report of its blocks")
        if not mounted.copies_are_proven:
            match = replace(match, load_kv_async=True)
        view.answer = OfferedMatch(match, num_computed_tokens // self._block_size)
        return match

    def commit(self, request: Any, blocks: Any, num_tokens: int) -> None:
        """`update_state_after_alloc`: the engine takes `num_tokens` tokens of the last answer, perhaps 0.

        The engine cannot be refused here, so what will not come the workers report as not loaded.
        """
        self._commit(request, blocks, num_tokens, self.loads.fail)

    def may_refuse(self, request: Any) -> bool:
        """True if the engine can be refused the request's match, because its load is asynchronous."""
        answer = self._requests.view(request).answer
        return answer is not None and answer.match.load_kv_async

    def commit_or_refuse(self, request: Any, blocks: Any, num_tokens: int) -> int:
        """Commit `num_tokens` tokens for a scheduler that takes less; return how many will come."""
        return self._commit(request, blocks, num_tokens, self.loads.refuse)

    def _commit(
        self, request: Any, blocks: Any, num_tokens: int, nothing_comes: Callable[[CommittedLoad], None]
    ) -> int:
        view = self._requests.view(request)
        mounted = self.mounted
        answer = view.answer
        view.answer = None
        if num_tokens:
            self._probes.on_taken(view)
        if answer is None or mounted is None:
            return 0
        epochs = mounted.weights.epochs
        accepted = 0
        tables = blocks.get_block_ids()
        found = [
            (self._places.get(tier, UNKNOWN_PLACE), part) for tier, part in mounted.found_in(answer.match, num_tokens)
        ]
        load = self.loads.admit(view, answer, num_tokens, tables, epochs, found) if num_tokens else None
        try:
            mounted.apply_notices()
            if not mounted.serves:
                raise KvpactError("the last reset of the cache failed; nothing is loaded")
            accepted = mounted.cache.commit_external_match(view, answer.match, num_tokens, tables[0])
        finally:
            if load is not None and not accepted:
                nothing_comes(load)
        if load is not None and accepted:
            self.loads.order(load, accepted, mounted.weights.changes)
        return accepted

    def abort(self, request_id: str, match: ExternalKVMatch, reason: ExternalMatchExit) -> None:
        """End the match: the engine's scheduler has reported that it is not taken."""
        if self.mounted is not None:
            self.mounted.cache.abort_external_match(request_id, match, reason)
        view = self._requests.get(request_id)
        if view is not None and view.answer is not None and view.answer.match.query_result is match.query_result:
            view.answer = None

    def postpone(self, request_id: str, reason: ExternalMatchExit) -> None:
        """The engine could not take the request's match in this step."""
        if self.mounted is not None:
            self.mounted.cache.postpone_external_match(request_id, reason)

    def end_step(self, scheduler_output: Any) -> PactMetadata:
        """End the step (`build_connector_meta`): the orders for the workers."""
        scheduled = scheduler_output.num_scheduled_tokens
        self.loads.scheduled(scheduled.keys())
        if self.context is not None:
            self.context.build_connector_meta(scheduler_output)
        self.credit.scheduled(scheduled)
        mounted = self.mounted
        if mounted is None:
            return PactMetadata.of(StepMessage())
        mounted.apply_notices()
        if not mounted.serves:
            self.abandon_step()
            return self.end_broken_step()
        if scheduled:
            mounted.weights.engine_computes()
        mounted.use_late_tiers()
        self._computed.note_step(mounted.cache, self.context, scheduler_output)
        if mounted.step_lookup is not None:
            self._computed.look_up(mounted.step_lookup, scheduler_output)
        work = mounted.cache.end_step()
        adapters = self.loads.run(scheduled.keys())
        computes = bool(scheduled)
        if work == _NO_WORK and not (adapters or self.loads.broken):
            self.loads.end_step()
            return NOTHING_TO_DO[computes]
        self.loads.begin_jobs(work.loads)
        if work.saves:
            mounted.last_save = work.saves[-1].job_id
        changes = (self.loads.ordered_at or mounted.weights.changes) if work.loads or work.saves else ()
        store = mounted.store if work.lookups else None
        broken = tuple(self.loads.broken)
        metadata = PactMetadata.of(StepMessage(work, broken, store, adapters, changes, computes=computes))
        self.loads.end_step()
        return metadata

    def wake_tiers(self) -> None:
        """The step is over: the tiers' threads begin its work. In the middle of the step they would take its core."""
        if self.mounted is not None:
            self.mounted.wake_tiers()

    def end_broken_step(self) -> PactMetadata:
        """The message to the workers when `end_step` raised: none of the step's loads will happen."""
        self.loads.fail_step()
        metadata = PactMetadata.of(StepMessage(broken=tuple(self.loads.broken)))
        self.loads.end_step()
        return metadata

    def abandon_step(self) -> None:
        """Cancel the copies that the cache was about to order when `end_step` raised: later they would write to other
        blocks."""
        if self.mounted is not None:
            self.mounted.cache.abandon_step(len(self.mounted.segments))

    def requests_begin_again(self, invalid: set[int], tables: Mapping[str, Sequence[int]]) -> None:
        """Requests with these tables begin again, over `invalid` blocks."""
        self._reports.begin_again(self.cache, invalid, tables)

    def apply_report(
        self, report: WorkerReport, invalid_block_ids: set[int], failed_requests: Collection[str] = ()
    ) -> None:
        """Settle the workers' reports (`update_connector_output`)."""
        mounted = self.mounted
        overdue = mounted is not None and mounted.cache.has_overdue_loads
        received = self._reports.receive(self.context, report, invalid_block_ids, failed_requests, overdue=overdue)
        if received and mounted is not None:
            mounted.apply_notices()  # blocks reported as saved may be from weights that are gone
            self._reports.settle(mounted.cache, mounted.weights.epochs, self.context, invalid_block_ids)

    def loads_ended(self, request_ids: Collection[str]) -> None:
        """Note the requests of whose asynchronous loads the engine learns that they have ended."""
        self.loads.ended.update(self._requests.ids & request_ids)

    def note_end(self, request: Any) -> None:
        """Save the last whole block of a request that ends, where its key is known only now."""
        mounted = self.mounted
        context = self.context
        if mounted is None or context is None or not self._computed.is_named_at_end(request):
            return
        mounted.apply_notices()
        if mounted.serves:
            self._computed.note_end(mounted.cache, context, request)

    def request_finished(self, request_id: str) -> dict[str, Any] | None:
        """The request ended or was cancelled, in whatever state; returns the outcomes of its hints for its answer."""
        view = self._requests.end(request_id)
        self._probes.request_finished(request_id)
        self.loads.request_finished(request_id)
        self.credit.request_finished(request_id)
        if self.mounted is not None:
            self.mounted.cache.request_finished(request_id)
        return self._hints.answer(view) if self._hints is not None and view is not None else None

    # Whole engine

    def poll_idle(self) -> bool:
        """Go on without requests; returns True while vLLM must step: for the workers' reports, then once for the
        counts."""
        if self.mounted is not None and not self._compared_sizes:
            self._compared_sizes = True
            for limit in state_limits(self._groups, self._vllm_config):
                self.mounted.note(*limit)
        pending = self.mounted is not None and self.mounted.poll_idle()
        return pending or (self._stats is not None and self._stats.ask_for_step())

    def collect_stats(self) -> PactStats | None:
        """`get_kv_connector_stats`: the counts since the last call, for vLLM's own metrics."""
        stats = self._stats
        if stats is None:
            return None
        if not stats.is_due or (self._budget.exhausted and stats.can_wait):
            stats.is_behind = True
            return None
        return stats.collect()

    def reset(self) -> None:
        """`reset_cache`: the weights may have changed."""
        if self.mounted is not None:
            self.mounted.reset()

    def give_up_saves(self) -> float:
        """Hold no block for a save; returns the seconds within which loads end."""
        if self.mounted is not None:
            self.mounted.give_up_saves()
        return self._config.load_deadline

    def shutdown(self) -> None:
        """Flush the tiers in bounded time and log a summary of the cache's work."""
        self.identities.close()
        if self._without_cache is not None:
            self._without_cache.close()
        self._end_cache()

    def _end_cache(self) -> None:
        mounted = self.mounted
        self.mounted = None
        if mounted is not None:
            mounted.close()
