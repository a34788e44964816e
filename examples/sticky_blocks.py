"""A connector of one's own over kvpact's scheduler context: vLLM keeps what a conversation has just computed.

    PYTHONPATH=examples vllm serve MODEL --kv-transfer-config '{"kv_connector": "StickyBlocks", "kv_role": "kv_both",
        "kv_connector_module_path": "sticky_blocks", "kv_connector_extra_config": {"steps": 500}}'

It stores and loads nothing. When a request with a cache salt ends, its published blocks are touched, so that no other
request can push them out of vLLM's prefix cache; after so many steps, or as soon as somebody waits for room, they are
given back to the end of vLLM's free queue.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from kvpact.vllm import scheduler_context


class StickyBlocks(KVConnectorBase_V1):
    """The scheduler's half does it all; the workers' half does nothing."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.policy = str(vllm_config.scheduler_config.policy)
        self.steps = int(vllm_config.kv_transfer_config.get_from_extra_config("steps", 500))
        self.step = 0
        self.scheduler_context: Any = None
        self.kept: deque[tuple[int, list[int]]] = deque()
        """Until which step, and which blocks."""

    @property
    def requires_kv_delivery(self) -> bool:
        """It owes nobody a delivery."""
        return False

    # The context, and the two hooks that it wants to hear of

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """vLLM offers its block tables and its block pool."""
        self.scheduler_context = scheduler_context(kv_cache_manager, self.policy)

    def on_new_request(self, request: Any) -> None:
        """Passed on."""
        self.scheduler_context.on_new_request(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Passed on; then what was kept long enough, or is in somebody's way, is given back."""
        self.scheduler_context.build_connector_meta(scheduler_output)
        self.step += 1
        somebody_waits = bool(self.scheduler_context.waiting_requests())
        while self.kept and (somebody_waits or self.kept[0][0] <= self.step):
            self.scheduler_context.free_blocks(self.kept.popleft()[1])
        return KVConnectorMetadata()

    # What it is for

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Hold what can be used again; the end of the prompt comes first, as it would be evicted first."""
        if request.cache_salt is None:
            return False, None
        views = [self.scheduler_context.get_block(block_id) for block_id in reversed(block_ids)]
        worth = [view.block_id for view in views if view.block_hash is not None and not view.is_null]
        if worth:
            self.scheduler_context.touch(worth)
            self.kept.append((self.step + self.steps, worth))
        return False, None

    def has_pending_push_work(self) -> bool:
        """Steps without requests count too."""
        return bool(self.kept)

    # It stores and loads nothing

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """No hit."""
        return 0, False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""
