"""A small, right connector for vLLM's tuple API, as an example and a starting point; and a naive one.

Owns a dictionary of blocks in each worker's memory, without a limit. Not for production: every block is kept for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True, slots=True)
class Copy:
    """One block of a request, by its key, and the engine's block that it is loaded into or saved from."""

    request_id: str
    key: bytes
    block_id: int


@dataclass
class Orders(KVConnectorMetadata):
    """Scheduler half to workers: the copies of this step."""

    loads: list[Copy] = field(default_factory=list)
    saves: list[Copy] = field(default_factory=list)


@dataclass
class Saved(KVConnectorWorkerMetadata):
    """Workers to scheduler half: the number of ranks that saved each key."""

    ranks: dict[bytes, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Saved:
        """The sum of both counts."""
        assert isinstance(other, Saved)
        keys = self.ranks.keys() | other.ranks.keys()
        return Saved({key: self.ranks.get(key, 0) + other.ranks.get(key, 0) for key in keys})


class SimpleConnector(KVConnectorBase_V1):
    """Keeps every full computed block. With `"asynchronous": true` requests wait for their loads."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.block_size = int(vllm_config.cache_config.block_size)
        self.ranks = int(vllm_config.parallel_config.world_size)
        self.asynchronous = bool(vllm_config.kv_transfer_config.get_from_extra_config("asynchronous", False))
        # Scheduler half
        self.requests: dict[str, Any] = {}
        self.asked: dict[str, int] = {}
        """Request -> its computed tokens at the last probe."""
        self.saved: dict[bytes, int] = {}
        """Block -> the number of ranks that have it."""
        self.ordered: dict[str, int] = {}
        """Request -> its blocks ordered to be saved."""
        self.loads: list[Copy] = []
        self.tables: Any = None
        """vLLM's KV cache manager, which knows the blocks of each request."""
        self.generation = 0
        # Worker half
        self.layers: dict[str, Any] = {}
        self.blocks: dict[bytes, list[Any]] = {}
        self.just_saved: dict[bytes, int] = {}
        self.just_loaded: set[str] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache has no receiver that waits for a delivery."""
        return False

    # Scheduler half

    def keys(self, request: Any) -> Iterator[bytes]:
        """One key per full block; it names the block and all before it."""
        chain = blake2b(f"{self.generation}|{request.cache_salt}".encode(), digest_size=16).digest()
        tokens = request.all_token_ids
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            chain = blake2b(
                chain + repr(list(tokens[start : start + self.block_size])).encode(), digest_size=16
            ).digest()
            yield chain

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """vLLM offers its block tables."""
        self.tables = kv_cache_manager

    def on_new_request(self, request: Any) -> None:
        """Keep the request: a step's output does not have all its tokens."""
        self.requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Look up only: saved blocks stay, so nothing needs a reservation."""
        self.asked[request.request_id] = num_computed_tokens
        if request.skip_reading_prefix_cache or request.lora_request is not None:
            return 0, False
        held = 0
        for key in self.keys(request):
            if self.saved.get(key, 0) < self.ranks:
                break
            held += 1
        end = min(held, (request.num_tokens - 1) // self.block_size)
        tokens = max(0, end * self.block_size - num_computed_tokens)
        return tokens, self.asynchronous and tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load the tokens that vLLM finally takes, after those computed at the probe."""
        (block_ids,) = blocks.get_block_ids()
        start = self.asked[request.request_id] // self.block_size
        end = start + num_external_tokens // self.block_size
        keys = list(self.keys(request))
        self.loads += [Copy(request.request_id, keys[index], block_ids[index]) for index in range(start, end)]

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        """The step's loads, and saves of the blocks that it completes."""
        orders = Orders(loads=self.loads)
        self.loads = []
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            if request.lora_request is None:
                computed = min(request.num_computed_tokens + num_tokens, request.num_tokens)
                orders.saves += self.completed(request, computed)
        return orders

    def completed(self, request: Any, computed: int) -> list[Copy]:
        """Saves of the full blocks among the first `computed` tokens that are not ordered yet."""
        (block_ids,) = self.tables.get_block_ids(request.request_id)
        full, done = computed // self.block_size, self.ordered.get(request.request_id, 0)
        self.ordered[request.request_id] = max(full, done)
        keys = list(self.keys(request))[:full]
        return [Copy(request.request_id, keys[index], block_ids[index]) for index in range(done, full)]

    def update_connector_output(self, connector_output: Any) -> None:
        """A block counts as saved once all ranks have reported it."""
        if isinstance(connector_output.kv_connector_worker_meta, Saved):
            for key, ranks in connector_output.kv_connector_worker_meta.ranks.items():
                self.saved[key] = self.saved.get(key, 0) + ranks

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """No copy comes later, so vLLM may free the blocks."""
        for known in (self.requests, self.asked, self.ordered):
            known.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool | None:
        """New weights: old keys are never looked up again."""
        self.generation += 1
        return True

    # Worker half

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Blocks lie along the first axis."""
        self.layers = kv_caches

    def start_load_kv(self, /, forward_context: Any, **kwargs: Any) -> None:
        """Load at once, whether the request computes in this step or waits."""
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        for load in orders.loads:
            for tensor, content in zip(self.layers.values(), self.blocks[load.key], strict=True):
                tensor[load.block_id] = content
        if self.asynchronous:
            self.just_loaded |= {load.request_id for load in orders.loads}

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks are saved after the forward pass."""

    def wait_for_save(self) -> None:
        """Save what the step completed."""
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        for save in orders.saves:
            if save.key not in self.blocks:  # reported once per rank, however many requests compute the block
                self.blocks[save.key] = [tensor[save.block_id].clone() for tensor in self.layers.values()]
                self.just_saved[save.key] = 1

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Asynchronous loads, each once."""
        loaded, self.just_loaded = self.just_loaded, set()
        return None, loaded or None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What was saved."""
        saved, self.just_saved = self.just_saved, {}
        return Saved(saved)


class NaiveConnector(SimpleConnector):
    """Treats each lookup as a reservation: pins the promised blocks, and unpins them when they are loaded."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.pinned_blocks = 0
        self.promised: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Pin the match."""
        tokens, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.promised[request.request_id] = (tokens or 0) // self.block_size
        self.pinned_blocks += self.promised[request.request_id]
        return tokens, asynchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Unpin the match: the load begins."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self.pinned_blocks -= self.promised[request.request_id]


class HesitantConnector(SimpleConnector):
    """Answers "ask again later" to the first lookups of each request, and never has a match."""

    LOOKUPS = 5

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.lookups: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """No tokens, after the first lookups."""
        super().get_num_new_matched_tokens(request, num_computed_tokens)
        lookups = self.lookups[request.request_id] = self.lookups.get(request.request_id, 0) + 1
        return (0 if lookups > self.LOOKUPS else None), False
