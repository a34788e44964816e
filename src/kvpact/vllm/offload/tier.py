"""`PactTier`: a tier of kvpact's as a secondary tier of vLLM's OffloadingConnector.

Owns the names of vLLM's chunks as our block keys, the epoch that they belong to, and which requests live over a reset.
vLLM's manager owns host memory. All methods run on the scheduler's thread; only a reset and the end wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, Final

from blake3 import blake3
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, OffloadingEvent, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvpact.cache.late_tiers import LateTiers, OpenTiers
from kvpact.errors import TierError
from kvpact.hints.schema import KEY, Store, parse_hints
from kvpact.identity.epochs import Epochs
from kvpact.identity.keys import BlockKey
from kvpact.metrics import Metrics
from kvpact.tiers.backends import BACKEND_OF
from kvpact.tiers.client import LentSlots, TierClient
from kvpact.tiers.registry import load_seal
from kvpact.vllm.base_weights import base_weights
from kvpact.vllm.compat.objects import hints_of
from kvpact.vllm.offload.counts import TierStats, metric_definitions
from kvpact.vllm.offload.settings import engine_of, offload_namespace, refuse_unnameable, tier_settings
from kvpact.vllm.offload.tier_jobs import TierJobs

logger = logging.getLogger(__name__)

KEY_CONTEXT: Final = "kvpact 2026-11 vLLM offload key"

ANSWERS: Final = {True: LookupResult.HIT, False: LookupResult.MISS, None: LookupResult.RETRY}

SAY_SECONDS: Final = 10.0
"""Seconds; a reset that waits for longer logs the reason."""


class PactTier(SecondaryTierManager):
    """One tier URL, of every kind; `kvpact.vllm.offload.settings` has its other settings.

    A reset begins a new epoch: nothing from before is found any more, and what a request that lives over it computes is
    not stored.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        """Raises ConfigError for settings that cannot be right, and for an engine whose chunks cannot be named."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        beside, config = tier_settings(settings)
        self._config = config
        vllm_config = engine_of(offloading_spec)
        refuse_unnameable(vllm_config, beside.adapters)
        self._tokens_per_hash = int(offloading_spec.tokens_per_hash)
        has_events = beside.events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] | None = [] if has_events else None
        self._epochs = Epochs(config.weights_version)
        self._live: set[str] = set()
        """Requests that vLLM has named and not ended."""
        self._outdated: set[str] = set()
        """Live requests that were there at a reset."""
        self._unstored: set[str] = set()
        """Live requests that are not stored, by their clients' hints."""
        self._since: dict[str, float] = {}
        """When a request first asked."""
        self._metrics = Metrics()
        self._jobs: TierJobs | None = None
        """None until the weights are identified and the tier is open."""
        self._stats: TierStats | None = None
        self._refused: list[JobResult] = []
        self._late = LateTiers(
            config,
            load_seal(config.record_key_file),
            offload_namespace(vllm_config, offloading_spec, self.block_size_bytes),
            self.block_size_bytes,
            base_weights(vllm_config, config.model_id),
        )
        opened = self._late.open()
        self._memory = primary_kv_view.cast("B")  # vLLM cannot close it any more before this tier is
        self._use(opened)
        backend = BACKEND_OF.get(config.tiers[0].scheme)
        is_local = backend is not None and not backend.shared
        self.locality = Locality(beside.locality or ("LOCAL" if is_local else "REMOTE"))

    def _use(self, opened: OpenTiers | None) -> None:
        """Use these tiers, if they are open: one, or none that will ever be."""
        if opened is None:
            return
        for queue in opened.queues:
            patience = self._config.prepare_deadline
            clock = time.monotonic
            rows = LentSlots(len(self._memory) // self.block_size_bytes)
            client = TierClient(queue, rows, timeout=patience, clock=clock, metrics=self._metrics)
            self._jobs = TierJobs(
                client, self._memory, self.block_size_bytes, patience, self._metrics, self._note_stored
            )
            self._stats = TierStats(self._metrics, client, self.block_size_bytes)
            logger.info(
                "kvpact: %s below vLLM's offloading, namespace %s", self._config.tiers[0], opened.namespace.name
            )

    def _names(self, keys: Iterable[bytes]) -> list[BlockKey]:
        epoch = self._epochs.current.value
        return [blake3(epoch + key, derive_key_context=KEY_CONTEXT).digest() for key in keys]

    # Requests

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Begin a request (as in the other methods: `SecondaryTierManager`)."""
        self._live.add(req_context.req_id)
        if self._config.hints == "clients":
            hints = parse_hints(hints_of(req_context, KEY))
            if hints is not None and hints.store is Store.NONE:
                self._unstored.add(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._live.discard(req_context.req_id)
        self._outdated.discard(req_context.req_id)
        self._unstored.discard(req_context.req_id)
        self._since.pop(req_context.req_id, None)

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """An exclusive tier answers at once, if a step asks little; else a key is asked with all others of the step."""
        if self._jobs is None:
            return LookupResult.MISS
        now = time.monotonic()
        since = self._since.setdefault(req_context.req_id, now)
        (name,) = self._names((key,))
        return ANSWERS[self._jobs.holds(name, since, now)]

    def on_schedule_end(self, context: Any) -> None:
        if self._jobs is not None:
            self._jobs.begin(time.monotonic())

    # Jobs

    def submit_load(self, job_metadata: Any) -> None:
        if self._jobs is not None:
            self._jobs.load(job_metadata, self._names(job_metadata.keys), time.monotonic())
        else:
            self._refuse(job_metadata)

    def submit_store(self, job_metadata: Any) -> None:
        """Store no blocks of a request from before a reset, or whose client wants none stored, and in a shared tier
        none that other engines cannot use."""
        jobs = self._jobs
        context = job_metadata.req_context
        epoch = self._epochs.current
        if (
            jobs is None
            or context.req_id in self._outdated
            or context.req_id in self._unstored
            or (jobs.client.shared and epoch.is_drawn and not self._config.share_drawn_epochs)
        ):
            self._refuse(job_metadata)
            return
        ends = [context.get_offload_key_position(key) or 0 for key in job_metadata.keys]
        depths = [end // self._tokens_per_hash for end in ends]
        jobs.store(job_metadata, self._names(job_metadata.keys), depths, epoch, time.monotonic())

    def _refuse(self, job: Any) -> None:
        self._refused.append(JobResult(job.job_id, success=False))

    def _note_stored(self, keys: Sequence[Any]) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent([*keys], self.medium, removed=False, locality=self.locality))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._use(self._late.poll())
        results = self._refused
        self._refused = []
        return results + (self._jobs.poll(time.monotonic()) if self._jobs is not None else [])

    def has_pending_work(self) -> bool:
        return bool(self._refused) or (self._jobs is not None and self._jobs.pending)

    # Resets and the end

    def drain_jobs(self) -> None:
        """Begin a new epoch, and wait until nothing of ours touches host memory: vLLM is about to reset its cache.

        Writes that have not begun are cancelled. Those that have begun are waited for, as long as their store blocks.
        """
        self._epochs.reset()
        self._outdated |= self._live
        self._since.clear()
        if (jobs := self._jobs) is None:
            return
        say_at = time.monotonic() + SAY_SECONDS
        jobs.give_up(time.monotonic())
        while jobs.uses_memory:
            jobs.client.executor.flush()
            self._refused += jobs.poll(now := time.monotonic())
            if now >= say_at:
                logger.warning("kvpact: a reset waits for %s, which still reads or writes", self._config.tiers[0])
                say_at = inf
            time.sleep(0.0005)

    def shutdown(self) -> None:
        """Flush the queue within `shutdown_timeout` seconds, and close the tier.

        Raises TierError if it still uses host memory: vLLM then keeps that.
        """
        self._late.close()
        jobs = self._jobs
        self._jobs = None
        self._stats = None
        if jobs is not None and not jobs.close(self._config.shutdown_timeout):
            raise TierError(f"{self._config.tiers[0]} did not end within {self._config.shutdown_timeout:g} s")
        del jobs
        self._memory.release()

    # Reports

    def take_events(self) -> Iterable[OffloadingEvent]:
        events = self._events or []
        self._events = [] if self._events is not None else None
        return events

    def get_stats(self) -> Any:
        return self._stats.changes(time.monotonic()) if self._stats is not None else None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return metric_definitions()
