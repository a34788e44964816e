"""vLLM's own SimpleCPUOffloadConnector without a GPU: its scheduler half, and a worker half with plain copies.

Owns that worker half. Nothing of vLLM is changed: the connector here inherits from vLLM's, and replaces the object that
copies. For vLLM 0.32 and later.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import SimpleCPUOffloadConnector
from vllm.v1.kv_cache_interface import KVCacheTensor
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata

MEMORY = {"cpu_bytes_to_use": 1 << 20}
"""`kv_connector_extra_config` for eager saving."""

LAZY = {**MEMORY, "lazy_offload": True}
"""`kv_connector_extra_config` for lazy saving."""


class MemcpyWorker:
    """Copies blocks of KV memory to host memory and back, and reports each copy in the step in which it was ordered."""

    def __init__(self, kv_cache_config: Any, capacity_bytes: int) -> None:
        self.num_cpu_blocks = max(
            1, kv_cache_config.num_blocks * capacity_bytes // kv_cache_config.kv_cache_tensors[0].size
        )
        self._pairs: list[tuple[Any, Any]] = []
        self._orders = SimpleCPUOffloadMetadata()
        self._stored: dict[int, int] = {}

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Blocks lie along the first axis."""
        for memory in kv_caches.values():
            host = torch.zeros((self.num_cpu_blocks, *memory.shape[1:]), dtype=memory.dtype)
            self._pairs.append((memory, host))

    def bind_connector_metadata(self, metadata: SimpleCPUOffloadMetadata) -> None:
        """The step's orders."""
        self._orders = metadata

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        self._orders = SimpleCPUOffloadMetadata()

    def handle_preemptions(self, kv_connector_metadata: SimpleCPUOffloadMetadata) -> None:
        """No copy is under way between two calls."""

    def start_load_kv(self) -> None:
        """The step's loads."""
        for memory, host in self._pairs:
            memory[self._orders.load_gpu_blocks] = host[self._orders.load_cpu_blocks]

    def wait_for_save(self) -> None:
        """The step's stores."""
        for memory, host in self._pairs:
            host[self._orders.store_cpu_blocks] = memory[self._orders.store_gpu_blocks]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose load was ordered in this step."""
        if self._orders.store_event >= 0:
            self._stored[self._orders.store_event] = 1
        loaded = self._orders.load_event_to_reqs.get(self._orders.load_event, [])
        return None, set(loaded) or None

    def build_connector_worker_meta(self) -> SimpleCPUOffloadWorkerMetadata | None:
        """The stores since the last call."""
        stored, self._stored = self._stored, {}
        return SimpleCPUOffloadWorkerMetadata(completed_store_events=stored) if stored else None


class MemcpySimpleCPUOffloadConnector(SimpleCPUOffloadConnector):
    """vLLM's connector, whose worker half has this module's copies."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """The driver's models say nothing of allocations, by which vLLM decides how many blocks fit."""
        kv_cache_config = replace(kv_cache_config, kv_cache_tensors=[_allocation(kv_cache_config)])
        super().__init__(vllm_config, role, kv_cache_config)
        handler: Any = self.worker_handler
        if handler is not None:
            self.worker_handler: Any = MemcpyWorker(kv_cache_config, handler.cpu_capacity_bytes)


def _allocation(kv_cache_config: Any) -> KVCacheTensor:
    """All layers one after the other."""
    groups, num_blocks = kv_cache_config.kv_cache_groups, kv_cache_config.num_blocks
    pages = sum(len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in groups)
    page = groups[0].kv_cache_spec.page_size_bytes
    names = [name for group in groups for name in group.layer_names]
    return KVCacheTensor(size=pages * num_blocks, layers=names, layer_stride=page * num_blocks, block_stride=page)
