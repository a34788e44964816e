"""What vLLM's connectors, requests, steps, layers and models have in some releases or for some models only."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

SCALES = ("_q_scale", "_k_scale", "_v_scale", "_q_scale_float", "_k_scale_float", "_v_scale_float")
"""What an attention layer multiplies by when it stores quantised keys and values, or reads them."""

LOAD_ADAPTER = "_load_adapter"
"""Of vLLM's `WorkerLoRAManager`: reads an adapter's files, and nothing else does."""


# Connectors


def connectors_of(connector: Any) -> tuple[Any, ...]:
    """A connector and, if it is MultiConnector, those under it."""
    return connector, *getattr(connector, "_connectors", ())


def failed_requests(connector_output: Any) -> Collection[str]:
    """Requests whose load failed as a whole, as far as the release tells."""
    return getattr(connector_output, "failed_recving", None) or ()


# Requests


def prompt_token_mask(request: Any) -> Any:
    """Which positions of a prompt with embeddings are tokens; None where the release does not say."""
    return getattr(request, "prompt_is_token_ids", None)


def has_3d_adapter(lora_request: Any) -> bool:
    """Whether an adapter has one weight for all experts of a layer."""
    return bool(getattr(lora_request, "is_3d_lora_weight", False))


def is_tensorized(lora_request: Any) -> bool:
    """Whether an adapter's weights are read from elsewhere than its files."""
    return bool(getattr(lora_request, "tensorizer_config_dict", None))


# Steps


def replays(new_request: Any) -> bool:
    """Whether a request that comes in a step computes tokens again that it has computed elsewhere."""
    return bool(getattr(new_request, "replay_start", 0))


def collects_outputs(scheduler_output: Any) -> bool:
    """Whether a step's forward pass leaves something of each token with another connector."""
    return getattr(scheduler_output, "aux_output_connector_metadata", None) is not None


def load_before_forward(scheduler_output: Any) -> dict[str, Any]:
    """The changes to a step after which `start_load_kv` comes before the forward pass: from 0.30 on it is asked for."""
    return {"has_sync_kv_loads": True} if hasattr(scheduler_output, "has_sync_kv_loads") else {}


def set_hit_sources(counted: Any, sources: Callable[[int], Any]) -> None:
    """Tell statistics where their hits came from, where they have room for it: from 0.32 on."""
    if hasattr(counted, "hits_by_source"):
        counted.hits_by_source = sources(counted.hits)


# Layers and models


def kernel_packing(layer: Any) -> Any:
    """How the CPU kernels of a layer pack keys and values (`layer.impl.isa` before 0.30); None for others."""
    return getattr(layer, "isa", None) or getattr(getattr(layer, "impl", None), "isa", None)


def kv_cache_dtype(layer: Any) -> Any:
    """The name of the type in which a layer's keys and values are stored; None without one."""
    return getattr(layer, "kv_cache_dtype", None)


def kv_cache_torch_dtype(layer: Any) -> Any:
    """The same as torch calls it."""
    return getattr(layer, "kv_cache_torch_dtype", None)


def kv_scales(layer: Any) -> dict[str, Any]:
    """A layer's scales by name, None for one that it does not have."""
    return {name: getattr(layer, name, None) for name in SCALES}


def rotary_modules() -> dict[Any, Any]:
    """vLLM's own list of the rotary modules that this process has made."""
    from vllm.model_executor.layers import rotary_embedding

    made: dict[Any, Any] = rotary_embedding._ROPE_DICT
    return made


def own_config(module: Any) -> Any:
    """The configuration that a module of a model keeps; None without one."""
    config = vars(module).get("config")
    return config if hasattr(config, "to_dict") else None


def weight_loader(model: Any) -> Callable[..., Any] | None:
    """A model's `load_weights`, if it has one."""
    found: Callable[..., Any] | None = getattr(model, "load_weights", None)
    return found


def draft_module(worker: Any) -> Any:
    """The draft model that a worker runs; None if it has none or cannot say."""
    find = getattr(worker, "get_draft_model", None)
    return find() if find is not None else None


def adapter_manager(runner: Any) -> Any:
    """A model runner's `WorkerLoRAManager`; None without adapters."""
    return getattr(runner, "lora_manager", None)


def wrap_adapter_loader(manager: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Put a wrapper around what reads an adapter's files; False if this manager does not show it."""
    load = getattr(manager, LOAD_ADAPTER, None)
    if load is not None:
        setattr(manager, LOAD_ADAPTER, wrap(load))
    return load is not None
