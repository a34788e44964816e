"""Attributes of vLLM's connectors, requests, steps, layers and models that only some releases or models have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from typing import Any

SCALES = ("_q_scale", "_k_scale", "_v_scale", "_q_scale_float", "_k_scale_float", "_v_scale_float")
"""Scaling factors of an attention layer's quantised keys and values."""

LOAD_ADAPTER = "_load_adapter"
"""The method of vLLM's `WorkerLoRAManager` that reads an adapter's files; nothing else reads them."""


# Connectors


def connectors_of(connector: Any) -> tuple[Any, ...]:
    """A connector and, if it is MultiConnector, all those inside it, also inside one that is inside another. None: no
    connector."""
    if connector is None:
        return ()
    return connector, *chain.from_iterable(map(connectors_of, connectors_inside(connector)))


def connectors_inside(connector: Any) -> Sequence[Any]:
    """The connectors directly inside MultiConnector, in its order; none inside others."""
    inside: Sequence[Any] = getattr(connector, "_connectors", ())
    return inside


def invalid_blocks(model_output: Any) -> Collection[int]:
    """The blocks that a step was to load and did not."""
    output = model_output.kv_connector_output
    return output.invalid_block_ids if output else ()


def add_invalid_blocks(model_output: Any, block_ids: set[int]) -> None:
    """Make vLLM take these blocks for some that the step did not load."""
    from vllm.v1.outputs import KVConnectorOutput

    output = model_output.kv_connector_output = model_output.kv_connector_output or KVConnectorOutput()
    output.invalid_block_ids = output.invalid_block_ids | block_ids


# Steps


def end_step_at(request: Any, num_tokens: int) -> None:
    """Let a step of this request's prompt end after so many tokens, as vLLM does where its own cache lacks a state."""
    request.shared_prefix_boundary = max(request.shared_prefix_boundary, num_tokens)


def replays_full_graph(forward_context: Any) -> bool:
    """True if the forward pass may be one graph, replayed without the layers' hooks.

    Model runners that replay a full graph without a context, or without metadata for the layers, look the same.
    """
    mode = getattr(forward_context, "cudagraph_runtime_mode", None)
    return getattr(mode, "name", None) == "FULL" or getattr(forward_context, "attn_metadata", None) is None


def layers_without_hook(vllm_config: Any, names: Iterable[str]) -> list[str]:
    """Return the layers of an engine that have an attention of their own, so that none may ask for its load (H113)."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    layers = vllm_config.compilation_config.static_forward_context
    hooked = (Attention.forward, MLAAttention.forward)
    forwards = {name: getattr(type(layers[name]), "forward", None) for name in names if name in layers}
    return [name for name, forward in forwards.items() if forward is not None and forward not in hooked]


# Requests


ENVELOPE_ACTIONS = 16
"""Most actions of one request's envelope that are read."""


def session_of(request: Any) -> object:
    """Name of a request's session, of whatever form: None without one, and in releases that name none."""
    return getattr(request, "session_id", None)


def hints_of(request: Any, kind: str) -> object:
    """Hints of a request, or of a request's context, as `kv_transfer_params`: its own if they have the key `kind`, or
    else those in the payload of the first action of that type in its envelope (`vllm.v1.kv_hints`, since 0.31)."""
    params = request.kv_transfer_params
    envelope = getattr(request, "kv_hints", None)
    if envelope is None or (isinstance(params, dict) and kind in params):
        return params
    for action in envelope.actions[:ENVELOPE_ACTIONS]:
        if action.action_type == kind:
            return {kind: action.payload}
    return params


def is_tensorized(lora_request: Any) -> bool:
    """True if an adapter's weights are read from elsewhere than its files."""
    return bool(getattr(lora_request, "tensorizer_config_dict", None))


# Steps


def replays(new_request: Any) -> bool:
    """True if a request of the step computes again tokens that were computed elsewhere."""
    return bool(getattr(new_request, "replay_start", 0))


def collects_outputs(scheduler_output: Any) -> bool:
    """True if a step's forward pass leaves part of each token with another connector."""
    return getattr(scheduler_output, "aux_output_connector_metadata", None) is not None


def by_source(places: Mapping[str, int]) -> dict[Any, int]:
    """Numbers of tokens by vLLM's names for where they were found; none before 0.32, which has no such names."""
    names = hit_sources()
    return {names[place]: tokens for place, tokens in places.items() if tokens} if names else {}


@cache
def hit_sources() -> Mapping[str, Any]:
    """vLLM's members for places, by their names; none before 0.32."""
    with suppress(ImportError):
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        return {source.value: source for source in CacheHitSource}
    return {}


def correct_hit_sources(counted: Any, changes: Mapping[Any, int]) -> None:
    """Add to the sources of hits in the statistics where they have a field for them, from 0.32 on."""
    if hasattr(counted, "hits_by_source"):
        sources = Counter(counted.hits_by_source)
        sources.update(changes)
        counted.hits_by_source = {source: tokens for source, tokens in sources.items() if tokens}


def add_hits(counted: Any, request: Any, tokens: int, connector: Any, *, preempted: bool) -> None:
    """Add a request's hits to the statistics, and their sources where these have a field for them."""
    if preempted:  # vLLM counts them apart, without a source
        counted.preempted_hits += tokens
        return
    counted.hits += tokens
    if hasattr(counted, "hits_by_source"):
        for source, part in connector.get_external_cache_hit_sources(request, tokens).items():
            counted.hits_by_source[source] = counted.hits_by_source.get(source, 0) + part


# Layers and models


def kernel_packing(layer: Any) -> Any:
    """Packing of keys and values by a layer's CPU kernels; None for others."""
    return getattr(layer, "isa", None)


def kv_cache_dtype(layer: Any) -> Any:
    """The name of the type in which a layer's keys and values are stored; None without one."""
    return getattr(layer, "kv_cache_dtype", None)


def kv_cache_torch_dtype(layer: Any) -> Any:
    """The torch dtype in which a layer's keys and values are stored; None without one."""
    return getattr(layer, "kv_cache_torch_dtype", None)


def kv_scales(layer: Any) -> dict[str, Any]:
    """A layer's scales by name; None for each that it does not have."""
    return {name: getattr(layer, name, None) for name in SCALES}


def rotary_modules() -> dict[Any, Any]:
    """vLLM's own list of the rotary modules that this process has made."""
    from vllm.model_executor.layers import rotary_embedding

    made: dict[Any, Any] = rotary_embedding._ROPE_DICT
    return made


def own_config(module: Any) -> Any:
    """The configuration that a part of a model keeps; None without one."""
    config = vars(module).get("config")
    return config if hasattr(config, "to_dict") else None


def weight_loader(model: Any) -> Callable[..., Any] | None:
    """A model's `load_weights`, if it has one."""
    found: Callable[..., Any] | None = getattr(model, "load_weights", None)
    return found


def draft_module(worker: Any) -> Any:
    """The draft model that a worker runs; None if it has none or does not report it."""
    find = getattr(worker, "get_draft_model", None)
    return find() if find is not None else None


def adapter_manager(runner: Any) -> Any:
    """A model runner's `WorkerLoRAManager`; None without adapters."""
    return getattr(runner, "lora_manager", None)


def wrap_adapter_loader(manager: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Wrap the method that reads an adapter's files; returns False if this manager does not have it."""
    load = getattr(manager, LOAD_ADAPTER, None)
    if load is not None:
        setattr(manager, LOAD_ADAPTER, wrap(load))
    return load is not None
