"""`PactConnector`: kvpact as stock vLLM loads it.

Owns no logic beyond vLLM's calling convention: it imports and builds one of the two halves and passes every hook on,
guarded so that a mistake of kvpact costs a hit and never the engine. Written for vLLM 0.30 to 0.33.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvpact.config import load_config
from kvpact.contract import WorkerReport
from kvpact.errors import ConfigError
from kvpact.events.timeline import Timeline
from kvpact.metrics import Metrics
from kvpact.vllm.checks import check_engine, check_settings, log_like_vllm
from kvpact.vllm.compat.configuration import replica_number
from kvpact.vllm.compat.layouts import wanted_layout
from kvpact.vllm.compat.objects import by_source, replays_full_graph
from kvpact.vllm.compat.scheduler import transfer_results
from kvpact.vllm.guard import Guard, guarded
from kvpact.vllm.kv_memory import KVMemoryHooks
from kvpact.vllm.match_hooks import MatchHooks
from kvpact.vllm.messages import PactHandshake, PactMetadata, PactWorkerMetadata
from kvpact.vllm.stats import PactPromMetrics, PactStats
from kvpact.vllm.timeline import follow_hooks
from kvpact.vllm.worker_identity import worker_facts
from kvpact.wire import StepMessage

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvpact.vllm.context import VllmContext
    from kvpact.worker.rank_jobs import EndedLoads

logger = logging.getLogger(__name__)


class PactConnector(KVMemoryHooks, MatchHooks, SupportsHMA, KVConnectorBase_V1):
    """The connector. `kv_connector_extra_config` holds kvpact's settings (`kvpact.config.KvpactConfig`)."""

    _of_engine: ClassVar[WeakValueDictionary[str, PactConnector]] = WeakValueDictionary()
    """The scheduler's half of each engine in this process, until it is shut down."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises ConfigError if a setting is wrong or this engine cannot be served correctly."""
        super().__init__(vllm_config, role, kv_cache_config)
        log_like_vllm()
        config = load_config(vllm_config.kv_transfer_config.kv_connector_extra_config, os.environ)
        self._groups = check_engine(vllm_config, kv_cache_config, type(self))
        check_settings(config, vllm_config, self._groups)
        engine = replica_number(vllm_config.parallel_config)
        logger.info("kvpact: engine %d, %s side: settings %s", engine, role.name.lower(), config.described())
        self.metrics = Metrics()
        self.guard = Guard(self.metrics)
        self._scheduler = self._worker = None
        self._find_model: Callable[[], torch.nn.Module] | None = None
        self._pages = {}
        self._facts: dict[str, str] = {}
        self._invalid_blocks: set[int] = set()
        """Blocks that the step's end found invalid; vLLM asks for them after the requests."""
        if role == KVConnectorRole.SCHEDULER:
            from kvpact.vllm.scheduler_side import SchedulerSide

            self._require_alone(vllm_config.kv_transfer_config.engine_id)
            self._scheduler = SchedulerSide(config, vllm_config, self.metrics, self.guard, self._groups)
            if self._scheduler.events.queue is not None:
                self.take_events = self._take_events
        else:
            from kvpact.vllm.worker_side import open_worker

            self._worker = open_worker(config, vllm_config, kv_cache_config, self._groups)
            if config.match_at == "step":
                self.before_update_states = self._find_hits

        if config.timeline is not None:
            follow_hooks(Timeline(config.timeline), self, of_scheduler=role == KVConnectorRole.SCHEDULER)

    def _require_alone(self, engine_id: str) -> None:
        """Two connectors in one engine would share one arena: MultiConnector hands the first one's handshake to
        both."""
        if self._of_engine.setdefault(engine_id, self) is not self:
            raise ConfigError("this engine has a PactConnector already; MultiConnector can have one of them")

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a cache owes no request a delivery."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The layout that the user wants. vLLM keeps its own, with a warning, where attention cannot work on it."""
        config = load_config(vllm_config.kv_transfer_config.kv_connector_extra_config, os.environ)
        return wanted_layout(config.kv_layout)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A full graph skips the layers' hooks: all loads of such a step are ordered before it."""
        return False

    # Worker

    before_update_states: Callable[[SchedulerOutput], Mapping[str, int]] | None = None
    """A function with `match_at` "step"; then `kvpact.vllm.worker` calls it before each step."""

    def step_hook_bound(self) -> None:
        """The worker will call `before_update_states` before each step."""
        self.cache_worker.has_step_hook = True

    @guarded(dict)
    def _find_hits(self, scheduler_output: SchedulerOutput) -> Mapping[str, int]:
        """Look in the shared tiers for what the step is to compute."""
        metadata = scheduler_output.kv_connector_metadata
        return self.cache_worker.find_hits(metadata.message()) if isinstance(metadata, PactMetadata) else {}

    def external_hits_applied(self, hits: Mapping[str, int]) -> None:
        """The step skips these tokens, on all ranks. Not guarded: they must be loaded."""
        self.cache_worker.apply_hits(hits)

    @property
    def scheduler_context(self) -> VllmContext | None:
        """The context over vLLM's scheduler; None until vLLM has offered it."""
        return self._scheduler.context if self._scheduler is not None else None

    def model_at(self, find_model: Callable[[], torch.nn.Module]) -> None:
        """`kvpact.vllm.worker` passes a way to the model, which shows position encoding that nothing else shows."""
        self._find_model = find_model

    @guarded(lambda: None)
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Greeting to the scheduler's half: the rank's segment, and the facts that give its blocks' bytes a meaning."""
        hello = self.cache_worker.hello()
        if hello is None:
            return None
        if not self._facts:  # vLLM asks again at each wake; the facts of the first time are repeated
            self._facts = worker_facts(self._vllm_config, self._pages, self._find_model)
        return PactHandshake.of(replace(hello, facts=self._facts))

    def _message(self) -> StepMessage:
        metadata = self._get_connector_metadata()
        return metadata.message() if isinstance(metadata, PactMetadata) else StepMessage()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The step begins. The engine starts loads after the forward pass unless one has to come before it."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.step_began()

    @guarded(lambda: None)
    def start_load_kv(self, /, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin the step's loads; all of them are waited for where no layer will."""
        self.cache_worker.begin_step(self._message())
        if self._has_layers_without_hook or replays_full_graph(forward_context):
            with self.cache_worker.giving_up_loads():
                self.cache_worker.wait_for_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Called before each layer's attention."""
        if self._worker is not None and self._worker.synchronous:
            self._wait_for_layer(layer_name)

    @guarded(lambda: None)
    def _wait_for_layer(self, layer_name: str) -> None:
        with self.cache_worker.giving_up_loads():
            self.cache_worker.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: whole blocks are saved after the forward pass."""

    @guarded(lambda: None)
    def wait_for_save(self) -> None:
        """The forward pass is over: copy its blocks in the background, protected by the scheduler's half."""
        message = self._message()
        if message.computes:
            self.cache_worker.end_forward(message)

    @guarded(lambda: None)
    def _begin_other_saves(self) -> None:
        """Begin the saves of a step that computes nothing, in which vLLM 0.30 does not call `wait_for_save`."""
        message = self._message()
        if not message.computes:
            self.cache_worker.end_forward(message)

    @guarded(lambda: transfer_results(set(), set()))
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose asynchronous load ended, and those of them whose load counts for nothing."""
        self._begin_other_saves()
        ended = self._poll() or self.cache_worker.give_up_step()  # the next step would be too late to report them
        self._invalid_blocks |= ended.invalid_blocks
        return transfer_results(ended.arrived, ended.lost)

    @guarded(lambda: None)
    def _poll(self) -> EndedLoads | None:
        return self.cache_worker.poll()

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were to be loaded and were not."""
        invalid = self._invalid_blocks
        self._invalid_blocks = set()
        return invalid

    @guarded(lambda: None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return the rank's report, every step, even if it is empty."""
        return PactWorkerMetadata.of(self.cache_worker.report())

    # Scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The workers are up. Not guarded: what the configuration gets wrong here must stop the start."""
        if not self._groups.are_served:
            return  # no rank has a segment
        hellos = [handshake.message() for handshake in metadata.values() if isinstance(handshake, PactHandshake)]
        if not hellos:
            raise ConfigError(
                "the workers' handshake is not PactConnector's; under MultiConnector vLLM passes on only the first "
                "one: put PactConnector before the other connectors"
            )
        self.scheduler_side.attach(hellos)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Take in the handshakes inside MultiConnector, which leaves the pipeline ranks out."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): handshake for rank, handshake in metadata.items()})

    @guarded(lambda: None)
    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """vLLM offers its block tables and its block pool."""
        self.scheduler_side.bind_scheduler_context(kv_cache_manager)

    @guarded(lambda: None)
    def on_new_request(self, request: Request) -> None:
        """vLLM accepted a request."""
        self.scheduler_side.on_new_request(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """End the step."""
        metadata = self._end_step(scheduler_output)
        if metadata is None:
            metadata = self.scheduler_side.end_broken_step()
            self._abandon_step()
        self.guard.end_step()
        if (mounted := self.scheduler_side.mounted) is not None and (mounted.queues or mounted.reading):
            self._wake_tiers()
        return metadata

    @guarded(lambda: None)
    def _end_step(self, scheduler_output: SchedulerOutput) -> PactMetadata | None:
        return self.scheduler_side.end_step(scheduler_output)

    @guarded(lambda: None)
    def _abandon_step(self) -> None:
        self.scheduler_side.abandon_step()

    @guarded(lambda: None, in_step=False)
    def _wake_tiers(self) -> None:
        self.scheduler_side.wake_tiers()

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Settle the workers' reports, combined over ranks."""
        metadata = connector_output.kv_connector_worker_meta
        report = metadata.message() if isinstance(metadata, PactWorkerMetadata) else WorkerReport({})
        if connector_output.finished_recving:
            self.scheduler_side.loads_ended(connector_output.finished_recving)
        failed = connector_output.failed_recving
        self.scheduler_side.apply_report(report, set(connector_output.invalid_block_ids), failed)

    @guarded(lambda: (False, None))
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Abort the request's plan, if it has one; the outcomes of its hints go into its answer. The block pool holds
        blocks under copy, so none is delayed."""
        try:
            self.scheduler_side.note_end(request)
        finally:
            outcomes = self.scheduler_side.request_finished(request.request_id)
        return False, outcomes

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End the request as with one group. With this hook vLLM leaves its hybrid KV cache manager on."""
        return self.request_finished(request, [])

    @guarded(lambda: False, in_step=False)
    def has_pending_push_work(self) -> bool:
        """True if vLLM must keep stepping until the workers' reports are in. vLLM asks when it has no request left."""
        return self.scheduler_side.poll_idle()

    @guarded(lambda: None)
    def requests_begin_again(self, invalid: set[int], tables: Mapping[str, Sequence[int]]) -> None:
        """Steps relied on blocks that were not loaded. The scheduler has unpublished the `invalid` ones, which are
        those and what was computed over them, and takes them from these requests after this call."""
        self.scheduler_side.requests_begin_again(invalid, tables)

    @guarded(lambda: None)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """The scheduler's half counts; the workers' half reports to it."""
        return self._scheduler.collect_stats() if self._scheduler is not None else None

    @guarded(list)
    def _take_events(self) -> list[KVCacheEvent]:
        """Events of blocks that memory and the tiers have got and lost: `take_events` of an engine that wants them."""
        mounted = self.scheduler_side.mounted
        announcements = mounted.announcements if mounted is not None else None
        return self.scheduler_side.events.take(announcements) if announcements is not None else []

    @guarded(lambda: (0, 0, {}))
    def take_hit_corrections(self) -> tuple[int, int, Mapping[Any, int]]:
        """For `kvpact.vllm.scheduler`: tokens to add to vLLM's hits, for first admissions, after preemptions, and the
        first of these by their source."""
        hits, again, places = self.scheduler_side.credit.corrections()
        return hits, again, by_source(places)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Rebuild statistics in the front end."""
        return PactStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **named: Any) -> PactPromMetrics:
        """The series for vLLM's Prometheus endpoint."""
        return PactPromMetrics(*arguments, **named)

    @guarded(lambda: True)
    def reset_cache(self) -> bool | None:
        """Forget everything stored: the weights change. Never False, with which vLLM's sleep and pause would fail.

        If forgetting fails, nothing is served or stored from then on, until a reset works.
        """
        self.scheduler_side.reset()
        return True

    @guarded(lambda: 0.0)
    def prepare_reset(self) -> float:
        """vLLM's prefix cache is to be emptied: hold no block for a save. Returns in how many seconds loads end."""
        return self.scheduler_side.give_up_saves()

    @guarded(lambda: None)
    def shutdown(self) -> None:
        """Stop in bounded time."""
        if self._scheduler is not None:
            self._scheduler.shutdown()
            self._of_engine.pop(self._kv_transfer_config.engine_id, None)
        if self._worker is not None:
            self._worker.shutdown()
