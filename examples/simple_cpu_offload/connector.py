"""The connector that vLLM is given: its hooks, translated for `Offloader` on one side and `HostMemory` on the other.

Owns the messages between both halves. The scheduler half asks vLLM's objects for a request's id, its number of tokens,
the hashes of its blocks, and whether it may read a cache; all else comes from the scheduler context.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from kvpact import ConfigError, SchedulerContext
from kvpact.identity.groups import GroupKind, GroupSet
from kvpact.vllm import scheduler_context
from kvpact.vllm.compat.scheduler import COUNTS_HELD_BLOCKS, transfer_results
from kvpact.vllm.groups import engine_groups
from kvpact_testkit.engine.block_pool import BlockPool
from simple_cpu_offload.host_memory import HostMemory
from simple_cpu_offload.host_pool import HostPool
from simple_cpu_offload.offloader import Copy, Offloader

STEPS_AHEAD = 2
"""Lazy: a block is saved when it could be reused within so many steps. A save is over in the step after it."""

MAX_SHARE_AHEAD = 4
"""Lazy: at most one of so many blocks of the engine is looked at, and held while it is copied."""

MAX_SHARE_OF_HOST = 2
"""Lazy: the blocks looked at fill at most one of so many parts of host memory. If they did not fit, the last ones saved
would push out the first ones, which are still looked at, and saving would never end."""


@dataclass
class Orders(KVConnectorMetadata):
    """Scheduler half to ranks: the copies of this step."""

    loads: list[Copy] = field(default_factory=list)
    saves: list[Copy] = field(default_factory=list)


@dataclass
class Report(KVConnectorWorkerMetadata):
    """Ranks to scheduler half: which ranks have ended which copies, and which copies failed on any of them."""

    done: dict[int, set[int]]
    failed: set[int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        """What both say."""
        assert isinstance(other, Report)
        jobs = self.done.keys() | other.done.keys()
        done = {job: self.done.get(job, set()) | other.done.get(job, set()) for job in jobs}
        return Report(done, self.failed | other.failed)


class SimpleCPUOffload(KVConnectorBase_V1, SupportsHMA):
    """Eager or, with `"lazy_offload": true`, lazy; `"num_cpu_blocks"` are as many as the engine's own by default."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.config, self.num_blocks = vllm_config, int(kv_cache_config.num_blocks)
        self.groups = _served_groups(vllm_config, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        self.host_blocks = int(extra.get("num_cpu_blocks", self.num_blocks))
        self.lazy = bool(extra.get("lazy_offload", False))
        if self.host_blocks < 1:
            raise ConfigError(f"num_cpu_blocks is {self.host_blocks}; at least 1 is needed")
        # Scheduler half
        self.scheduler_context: Any = None
        self.offloader: Any = None
        # Worker half
        self.rank = int(vllm_config.parallel_config.rank)
        self.memory: Any = None
        self.ended: dict[int, str] = {}
        """Copies that this rank has ended since its last report -> the request that waits for it."""
        self.failed: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        """It owes nobody a delivery."""
        return False

    # Scheduler half: the context, and what it wants to hear of

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """The engine's blocks are there, behind the scheduler context."""
        scheduler = self.config.scheduler_config
        self.scheduler_context = scheduler_context(kv_cache_manager, str(scheduler.policy), self.groups)
        self.offloader = self.make_offloader(self.scheduler_context)

    def make_offloader(self, context: SchedulerContext) -> Offloader:
        """The part that decides, over this context and a pool of host blocks."""
        step = -(-int(self.config.scheduler_config.max_num_batched_tokens) // self.groups.block_size)
        most = min(self.num_blocks // MAX_SHARE_AHEAD, self.host_blocks // MAX_SHARE_OF_HOST)
        ahead = max(1, min(STEPS_AHEAD * step * len(self.groups.groups), most))
        return Offloader(
            context,
            HostPool(BlockPool(self.host_blocks + 1, len(self.groups.groups))),
            self.groups,
            ranks=int(self.config.parallel_config.world_size),
            look_ahead=ahead if self.lazy else 0,
        )

    def on_new_request(self, request: Any) -> None:
        """A request arrived: its blocks have the names under which vLLM publishes them."""
        self.scheduler_context.on_new_request(request)
        hashes = request.block_hashes

        def name(group: int, block: int) -> bytes | None:
            return bytes(make_block_hash_with_group_id(hashes[block], group)) if block < len(hashes) else None

        self.offloader.begin(request.request_id, name, request.num_tokens)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """What is in host memory behind the engine's own hit; held until it is taken or the request ends."""
        sound = not (request.skip_reading_prefix_cache or num_computed_tokens % self.groups.block_size)
        # The last token of the prompt is computed in any case.
        tokens = self.offloader.promise(request.request_id, num_computed_tokens, request.num_tokens - 1 if sound else 0)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM takes so many of the promised tokens."""
        self.offloader.load(request.request_id, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The copies of the step that vLLM has just decided on."""
        self.scheduler_context.build_connector_meta(scheduler_output)
        return Orders(*self.offloader.order_step(scheduler_output.num_scheduled_tokens))

    def update_connector_output(self, connector_output: Any) -> None:
        """What the ranks say."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, Report):
            self.offloader.settle(report.done, report.failed)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The blocks under copy are held by touch, so vLLM may free its own hold on them."""
        self.offloader.forget(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same for several groups."""
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        """Copies are reported in later steps."""
        return bool(self.offloader.jobs)

    def reset_cache(self) -> bool | None:
        """Nothing that is stored is served any more."""
        self.offloader.reset()
        return True

    # Worker half

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The engine's KV memory is there."""
        self.memory = HostMemory(kv_caches.values(), self.num_blocks, self.host_blocks)

    def start_load_kv(self, /, forward_context: Any, **kwargs: Any) -> None:
        """Loads; the requests do not compute before they are reported."""
        self._copy(self._orders().loads, self.memory.load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No request computes while its load is under way."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks are saved after the forward pass."""

    def wait_for_save(self) -> None:
        """Saves of what is computed now."""
        self._copy(self._orders().saves, self.memory.save)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Requests whose load is over, and those of them that got nothing."""
        over = {job: request_id for job, request_id in self.ended.items() if request_id}
        return transfer_results({*over.values()}, {over[job] for job in over.keys() & self.failed})

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The same for the scheduler half, and saves."""
        ended, failed = self.ended, self.failed
        self.ended, self.failed = {}, set()
        return Report({job: {self.rank} for job in ended}, failed)

    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders

    def _copy(self, copies: Iterable[Copy], run: Any) -> None:
        for copy in copies:
            try:
                if copy.lost:
                    raise LookupError("a block that the load needs is not stored any more")
                run(copy.engine_blocks, copy.host_blocks)
            except (LookupError, OSError, RuntimeError) as error:
                logging.getLogger(__name__).warning("copy %d failed: %s", copy.job_id, error)
                self.failed.add(copy.job_id)
            self.ended[copy.job_id] = copy.request_id


def _served_groups(vllm_config: Any, kv_cache_config: Any) -> GroupSet:
    """The model's KV cache groups. Raises ConfigError for a release or a model that this example does not serve."""
    if COUNTS_HELD_BLOCKS:
        raise ConfigError("SimpleCPUOffload needs vLLM 0.32 or later")
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError("SimpleCPUOffload finds blocks by the engine's names: leave prefix caching on")
    groups = engine_groups(vllm_config, kv_cache_config).groups
    size = int(vllm_config.cache_config.block_size)
    for group in groups.groups:
        if group.kind is GroupKind.STATE or group.drops_last or group.block_size != size:
            raise ConfigError(
                f"a KV cache group of {group.kind} with blocks of {group.block_size} tokens is not served: no states, "
                f"no draft model, and blocks of {size} tokens in all groups"
            )
    return groups
