"""A connector of one's own that keeps its word, and runs on two engines: it leases what it promises.

    PYTHONPATH=examples vllm serve MODEL --scheduler-cls kvpact.vllm.scheduler.pact_scheduler
        --kv-transfer-config '{"kv_connector": "LeasingConnector", "kv_connector_module_path": "leasing_connector",
        "kv_role": "kv_both", "kv_connector_extra_config": {"blocks": 10000}}'

It keeps the last `blocks` blocks of finished requests in the workers' memory. A promised block is leased: it is not
dropped for another one until its match is committed or aborted. It needs a scheduler that says so: kvpact's class on
vLLM's releases, or vLLM 0.33 with `upstream/series`. It imports nothing of kvpact. For one KV cache group.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole


@dataclass
class Match:
    """What a scheduler reads of a match."""

    num_tokens: int
    load_kv_async: bool = False
    query_result: Sequence[bytes] = ()
    """The plan: the leased blocks. The scheduler knows it again by its identity."""


@dataclass
class Orders(KVConnectorMetadata):
    """Scheduler half to workers."""

    copies: list[tuple[str, bytes, int]] = field(default_factory=list)
    """"save", "load" or "drop", a stored block's key, the engine's block; in this order."""
    saved: set[str] = field(default_factory=set)
    """Finished requests whose blocks vLLM may free after the copies."""


class LeasingConnector(KVConnectorBase_V1):
    """The scheduler's half owns the index, the workers' half the bytes."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.capacity = int(vllm_config.kv_transfer_config.get_from_extra_config("blocks", 10_000))
        self.block_size = int(vllm_config.cache_config.block_size)
        self.stored: OrderedDict[bytes, None] = OrderedDict()
        self.leases: Counter[bytes] = Counter()
        self.plans: dict[str, Sequence[bytes]] = {}
        self.orders = Orders()
        self.layers: dict[str, Any] = {}
        self.blocks: dict[bytes, list[Any]] = {}

    # A match's life

    def prepare_external_match(self, request: Any, num_computed_tokens: int) -> Match:
        """The same plan for the same question; otherwise a new one, and the scheduler aborts the old one."""
        last = (request.num_tokens - 1) // self.block_size
        asked = request.block_hashes[num_computed_tokens // self.block_size : last]
        keys = [] if request.skip_reading_prefix_cache else [*takewhile(self.stored.__contains__, asked)]
        if not keys:
            return Match(0)
        plan = self.plans.get(request.request_id)
        if plan != keys:
            plan = self.plans[request.request_id] = keys
            self.leases.update(keys)
        return Match(len(keys) * self.block_size, query_result=plan)

    def commit_external_match(self, request: Any, match: Match, num_tokens: int, blocks: Any) -> int:
        """The load is ordered before anything can be dropped."""
        self.end(request, match.query_result)
        (block_ids,) = blocks.get_block_ids()
        first = request.block_hashes.index(match.query_result[0])
        wanted = match.query_result[: num_tokens // self.block_size]
        self.orders.copies += [
            ("load", key, block_id) for key, block_id in zip(wanted, block_ids[first:], strict=False)
        ]
        return num_tokens

    def abort_external_match(self, request: Any, match: Match, reason: Any) -> None:
        """Whatever the reason is."""
        self.end(request, match.query_result)

    def end(self, request: Any, plan: Sequence[bytes]) -> None:
        """Give the leases back."""
        if self.plans.get(request.request_id) is plan:
            del self.plans[request.request_id]
        self.leases -= Counter(plan)

    # What is stored

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Save its full blocks; vLLM frees them when the workers have."""
        full = min(request.num_computed_tokens, request.num_tokens - 1) // self.block_size
        for key, block_id in zip(request.block_hashes[:full], block_ids, strict=False):
            if key not in self.stored and self.make_room():
                self.orders.copies.append(("save", key, block_id))
                self.orders.saved.add(request.request_id)
                self.stored[key] = None
        return request.request_id in self.orders.saved, None

    def make_room(self) -> bool:
        """Drop the oldest block that nobody was promised, if there is no room for another."""
        if len(self.stored) < self.capacity:
            return True
        free = next((key for key in self.stored if key not in self.leases), None)
        if free is not None:
            del self.stored[free]
            self.orders.copies.append(("drop", free, 0))
        return free is not None

    def reset_cache(self) -> bool:
        """All matches have ended: forget all."""
        self.orders.copies += [("drop", key, 0) for key in self.stored]
        self.stored.clear()
        return True

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        """What there is to do before the step."""
        orders, self.orders = self.orders, Orders()
        return orders

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Nothing, under a scheduler that would not say how it ends."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request without a match."""

    # The workers' half

    @property
    def ordered(self) -> Orders:
        """What there is to do before the running step."""
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Blocks lie along the first axis."""
        self.layers = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """All copies."""
        for kind, key, block_id in self.ordered.copies:
            if kind == "save":
                self.blocks[key] = [tensor[block_id].clone() for tensor in self.layers.values()]
            elif kind == "drop":
                self.blocks.pop(key, None)
            else:
                for tensor, content in zip(self.layers.values(), self.blocks[key], strict=True):
                    tensor[block_id] = content

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose blocks are saved."""
        return self.ordered.saved or None, None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks are saved when their request has ended."""

    def wait_for_save(self) -> None:
        """Nothing is on its way."""
