"""The KV cache groups of the driver's models: what their layers read, and vLLM's specification of each.

Owns the shapes of made-up models, whose blocks have equally many tokens in all groups; `real_models.py` has the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvpact.identity.groups import GroupKind, KVCacheGroup
from kvpact_testkit.vllm.real_models import ModelPlan, planned


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """`layers` layers of one kind; `span` is the window or the chunk, in tokens, where the kind has one."""

    kind: GroupKind = GroupKind.FULL
    layers: int = 1
    span: int = 0


GEMMA = (LayerGroup(), LayerGroup(GroupKind.WINDOW, 2, 40), LayerGroup(GroupKind.WINDOW, 2, 40))
"""Groups like Gemma 3's: equally many bytes in each, more of them with a window."""
CHUNKED = (LayerGroup(), LayerGroup(GroupKind.CHUNK, 1, 64))
"""Groups like Llama 4's: attention, and chunked local attention."""
STATES = (LayerGroup(), LayerGroup(GroupKind.STATE, 1))
"""Groups like Qwen3-Next's: attention, and layers that keep one state."""


def group_config(settings: Any, members: Sequence[tuple[LayerGroup, list[str]]]) -> Any:
    """vLLM's `KVCacheConfig` of these groups, each with its layers, in sixteen-bit floats."""
    import torch
    from vllm.v1 import kv_cache_interface as vllm

    size, heads = settings.block_size, settings.rank_heads
    shape: dict[str, Any] = {"block_size": size, "head_size": settings.head_size, "dtype": torch.float16}
    shape["num_kv_heads"] = heads

    def spec(group: LayerGroup) -> Any:
        match group.kind:
            case GroupKind.FULL:
                return (vllm.MLAAttentionSpec if settings.latent else vllm.FullAttentionSpec)(**shape)
            case GroupKind.WINDOW:
                return vllm.SlidingWindowSpec(**shape, sliding_window=group.span)
            case GroupKind.CHUNK:
                return vllm.ChunkedLocalAttentionSpec(**shape, attention_chunk_size=group.span)
            case GroupKind.STATE:
                states = {"shapes": ((size, heads, 2 * settings.head_size),), "dtypes": (torch.float16,)}
                states["num_speculative_blocks"] = settings.draft_tokens
                return vllm.MambaSpec(block_size=size, **states, mamba_cache_mode="align")

    def drafts(group: LayerGroup) -> bool:
        return settings.draft_tokens > 0 and settings.draft_method == "mtp" and group.kind is GroupKind.FULL

    groups = [vllm.KVCacheGroupSpec(names, spec(group), is_eagle_group=drafts(group)) for group, names in members]
    config = vllm.KVCacheConfig(num_blocks=settings.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    config.prefix_cache_retention_interval = settings.retention
    if settings.match_unit and hasattr(config, "cache_hit_alignment_tokens"):
        config.hash_block_size = config.cache_hit_alignment_tokens = settings.match_unit
    return config


@cache
def plan_of(settings: Any) -> ModelPlan:
    """What vLLM makes of the real model of these settings."""
    return planned(settings.model, settings.num_blocks, settings.model_layout)


@cache
def groups_of(settings: Any) -> tuple[KVCacheGroup, ...]:
    """What the layers of each group read."""
    if settings.model is not None:
        return plan_of(settings).groups
    return tuple(KVCacheGroup(one.kind, settings.block_size, one.span) for one in settings.layer_groups)


def layer_names(settings: Any) -> list[str]:
    """The attention layers in forward order, as vLLM names them."""
    if settings.model is not None:
        return list(plan_of(settings).group_of)
    return [f"model.layers.{layer}.self_attn.attn" for layer in range(sum(one.layers for one in settings.layer_groups))]


@cache
def group_of_layers(settings: Any) -> Mapping[str, int]:
    """Layer -> the number of its KV cache group."""
    if settings.model is not None:
        return plan_of(settings).group_of
    numbers = [number for number, group in enumerate(settings.layer_groups) for _ in range(group.layers)]
    return dict(zip(layer_names(settings), numbers, strict=True))


def layers_of_worker(settings: Any, worker: int) -> list[str]:
    """The layers of the worker's stage."""
    stage, names = worker // settings.ranks, layer_names(settings)
    sizes = [len(names) // settings.stages + (one < len(names) % settings.stages) for one in range(settings.stages)]
    first = sum(sizes[:stage])
    return names[first : first + sizes[stage]]
