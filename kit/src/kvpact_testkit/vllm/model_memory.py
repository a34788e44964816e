"""A real model's KV memory as vLLM lays it out on a CUDA device, release by release, in plain CPU tensors.

Owns the tensors. KV cache groups overlay one another in them, as vLLM has it: a page belongs to the block's group.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpact.identity.groups import GroupKind
from kvpact_testkit.vllm.oracle import LayerMemory
from kvpact_testkit.vllm.real_models import ModelPlan, layout_named


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The layers, in forward order, and the allocations that they lie in."""

    layers: dict[str, LayerMemory]
    allocations: tuple[NDArray[np.uint8], ...]


def lay_out(plan: ModelPlan, layout: str) -> ModelMemory:
    """The memory that the release's model runner allocates for `plan`, all zeros."""
    allocate = getattr(import_module("vllm.v1.worker.utils"), "allocate_kv_cache", None)
    if allocate is not None:
        import torch

        tensors = allocate(plan.config, torch.device("cpu"), layout_named(layout))
    else:
        tensors = _reshaped(plan)
    layers = {name: _seen(tensors[name], plan, name) for name in plan.group_of}
    return ModelMemory(layers, _allocations(tensors))


def _reshaped(plan: ModelPlan) -> dict[str, Any]:
    """Allocate memory like `GPUModelRunner` before 0.29: each allocation has one layer of every group."""
    import torch

    specs = {name: group.kv_cache_spec for group in plan.config.kv_cache_groups for name in group.layer_names}
    tensors: dict[str, Any] = {}
    for shared in plan.config.kv_cache_tensors:
        raw = torch.zeros(shared.size, dtype=torch.int8)
        tensors |= {name: _layer(raw, specs[name]) for name in shared.shared_by}
    return tensors


def _layer(raw: Any, spec: Any) -> Any:
    """A layer's tensor in an allocation."""
    blocks = raw.numel() // spec.page_size_bytes
    match type(spec).__name__:
        case "MLAAttentionSpec":
            return raw.view(spec.dtype).view(blocks, spec.block_size, spec.head_size)
        case "MambaSpec":
            return raw.view(blocks, 1, 1, spec.page_size_bytes)
    # FlashAttention's [blocks, heads, tokens, key and value], with the heads of a token side by side.
    shape = (blocks, spec.block_size, spec.num_kv_heads, 2 * spec.head_size)
    return raw.view(spec.dtype).view(shape).permute(0, 2, 1, 3)


def _seen(tensor: Any, plan: ModelPlan, name: str) -> LayerMemory:
    """The layer's places as the oracle numbers them: blocks, then tokens; a state is one token."""
    import torch

    words = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int8).numpy()
    whole = words.view(f"u{words.itemsize}")
    if plan.groups[plan.group_of[name]].kind is GroupKind.STATE:
        return LayerMemory(tensor, whole[:, None])
    return LayerMemory(tensor, whole if whole.ndim == 3 else whole.swapaxes(1, 2))


def _allocations(tensors: dict[str, Any]) -> tuple[NDArray[np.uint8], ...]:
    import torch

    found = {}
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return tuple(found.values())
