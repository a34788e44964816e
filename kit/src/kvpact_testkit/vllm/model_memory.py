"""A real model's KV memory as vLLM lays it out on a CUDA device, release by release, in plain CPU tensors.

Owns the tensors. KV cache groups overlay one another in them, as vLLM has it: a page belongs to the block's group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpact.identity.groups import GroupKind
from kvpact_testkit.vllm.oracle import LayerMemory
from kvpact_testkit.vllm.real_models import ModelPlan

STATE_SLOTS = 8
"""Slots of a state's block, of equally many bytes."""


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The layers, in forward order, and the allocations that they lie in."""

    layers: dict[str, LayerMemory]
    allocations: tuple[NDArray[np.uint8], ...]


def lay_out(plan: ModelPlan, layout: str) -> ModelMemory:
    """The memory that the release's model runner allocates for `plan`, all zeros."""
    import torch
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    tensors = allocate_kv_cache(plan.config, torch.device("cpu"), KVCacheLayout[layout])
    layers = {name: _seen(tensors[name], plan, name) for name in plan.group_of}
    return ModelMemory(layers, _allocations(tensors))


def _seen(tensor: Any, plan: ModelPlan, name: str) -> LayerMemory:
    """The layer's places as the oracle numbers them: blocks, then tokens; a state is cut into `STATE_SLOTS`."""
    import torch

    words = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int8).numpy()
    whole = words.view(f"u{words.itemsize}")
    if plan.groups[plan.group_of[name]].kind is GroupKind.STATE:
        return LayerMemory(tensor, whole.reshape(len(whole), STATE_SLOTS, -1))
    return LayerMemory(tensor, whole if whole.ndim == 3 else whole.swapaxes(1, 2))


def _allocations(tensors: dict[str, Any]) -> tuple[NDArray[np.uint8], ...]:
    import torch

    found = {}
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return tuple(found.values())
