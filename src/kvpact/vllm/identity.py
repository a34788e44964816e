"""Namespace of an engine under vLLM: all that decides the content of its KV blocks.

Owns the translation from vLLM's configuration into `Namespace`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from kvpact.identity.keys import Namespace
from kvpact.vllm.quantization import quantization

if TYPE_CHECKING:
    from kvpact.vllm.groups import EngineGroups

FORMAT = "1"
"""Version of a slot's content; it rises when the meaning of the bytes changes."""

VOLATILE_CONFIG = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_commit_hash")
"""Fields of a Hugging Face configuration that describe its origin and do not change what the model computes."""


def architecture_digest(hf_config: Any) -> str:
    """Digest over a model's configuration; equal for equal architectures."""
    config = {key: value for key, value in hf_config.to_dict().items() if key not in VOLATILE_CONFIG}
    return blake3(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:32]


def engine_namespace(
    vllm_config: Any, workers: Mapping[str, str], same_kv: int = 1, groups: EngineGroups | None = None
) -> Namespace:
    """Everything two engines must agree on to share KV bytes, except the weights.

    `workers` has the facts of all ranks, by name; `same_kv` tensor-parallel ranks hold the same bytes, of which a slot
    has one copy, so that their number decides nothing. One group of full attention is not named: its blocks hold what
    they do with vLLM's hybrid manager off. Block keys are always made with this namespace, so that they are the same
    whether the weights were known at once or later.
    """
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    return Namespace(
        {
            "engine": "vllm",
            "format": FORMAT,
            "dtype": str(model.dtype),
            "kv_dtype": str(cache.cache_dtype),
            "quantization": quantization(vllm_config),
            "block_size": str(cache.block_size),
            "tensor_parallel": str(parallel.tensor_parallel_size // same_kv),
            "pipeline_parallel": str(parallel.pipeline_parallel_size),
            **workers,
            **({"kv_cache_groups": groups.digest} if groups is not None and groups.several else {}),
        },
        str(model.served_model_name),
    )
