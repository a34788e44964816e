"""Facts about the content of blocks that only a worker knows: kernels, layouts, position encoding, the model as loaded.

Owns the reading of vLLM's layers, rotary modules and loaded configuration into short strings, the facts. Equal facts
mean that the same bytes have the same meaning. A fact that cannot be read differs from every other. No fact has a
host's name, a path, a process id or a device's index.
"""

from __future__ import annotations

import json
import logging
import math
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from blake3 import blake3

from kvpact.vllm.compat.objects import (
    kernel_packing,
    kv_cache_dtype,
    kv_cache_torch_dtype,
    kv_scales,
    own_config,
    rotary_modules,
)
from kvpact.vllm.identity import architecture_digest
from kvpact.wire import WorkerHandshake
from kvpact.worker.paged import block_axis

logger = logging.getLogger(__name__)

CPU_FEATURES = ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported")
"""Functions of `torch.cpu` by which vLLM chooses CPU kernels."""

NO_SETTING = object()
"""Replaces an attribute that is no setting."""

ROTARY = re.compile("[Rr]otary|RoPE|Rope")
"""Part of the name of each class that encodes positions, vLLM's or a model's own."""

SHOWN = 4
"""At most this many kinds are named in a fact; a digest covers all."""

SHOWN_CHARACTERS = 240
"""Up to this length the ranks' values are given in full: a namespace's description must fit in 3 KiB."""


def layer_pages(kv_caches: Mapping[str, Any], num_blocks: int) -> dict[str, str]:
    """Layer -> where the bytes of one block lie in it, for any number of blocks, in order of registration."""
    return {name: _page(tensor, num_blocks) for name, tensor in kv_caches.items()}


def worker_facts(
    vllm_config: Any, pages: Mapping[str, str], find_model: Callable[[], Any] | None = None
) -> dict[str, str]:
    """Name -> fact of this worker. Call it once the model is loaded and the layers are set up.

    `pages` is the result of `layer_pages`, `find_model` returns the model, where the worker gives it to connectors.
    Never raises: a fact that cannot be read is drawn at random, so the engine shares nothing, and logs one warning.
    """
    readers: dict[str, Callable[[], str]] = {
        "machine": machine,
        "page_layout": lambda: _kinds(pages.values()),
        "attention": lambda: _kinds(_kernels(layer) for layer in _layers(vllm_config, pages).values()),
        "layers": lambda: _layers_fact(_layers(vllm_config, pages), pages),
        "architecture": lambda: _architecture(vllm_config.model_config, find_model),
        "position": lambda: _position(vllm_config.model_config, find_model),
    }
    facts = {}
    problems = []
    for name, read in readers.items():
        try:
            facts[name] = read()
        except Exception as error:
            facts[name] = f"unknown {secrets.token_hex(16)}"
            problems.append(f"{name} ({type(error).__name__}: {error})")
    if problems:
        logger.warning(
            "kvpact: this engine shares nothing with others or with its own next start, because the content of its "
            "blocks cannot be identified: %s",
            "; ".join(problems),
        )
    return facts


def facts_of_ranks(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The facts of all ranks, each name's values in the order of the ranks, as a slot holds the ranks' parts."""
    names = sorted({name for facts in ranks for name in facts})
    return {name: _in_order([facts.get(name, "absent") for facts in ranks]) for name in names}


def facts_of_slots(hellos: Sequence[WorkerHandshake]) -> dict[str, str]:
    """`facts_of_ranks` of the ranks with slots of their own. Another one counts only if it differs from the rank whose
    slots it shares: then the engine shares nothing with one that has a single rank."""
    facts = {hello.rank: hello.facts for hello in hellos}
    return facts_of_ranks([one.facts for one in hellos if one.slots_of is None or one.facts != facts[one.slots_of]])


def _in_order(values: Sequence[str]) -> str:
    """The ranks' values, equal neighbours merged: "2 x a | b"."""
    runs = [(value, len(list(run))) for value, run in groupby(values)]
    text = " | ".join(_times(count, value) for value, count in runs)
    return text if len(runs) == 1 or len(text) <= SHOWN_CHARACTERS else f"{len(values)} ranks, {_digest(values)}"


def _kinds(values: Iterable[str]) -> str:
    """The distinct values, for readers; the digest over the layers covers their order."""
    counts = Counter(values)
    shown = [_times(count, value) for value, count in sorted(counts.items())[:SHOWN]]
    return ", ".join([*shown, *([f"{len(counts) - SHOWN} more"] if len(counts) > SHOWN else [])])


def _times(count: int, value: str) -> str:
    return f"{count} x {value}" if count > 1 else value


# Bytes inside a block (H33)


def _page(tensor: Any, num_blocks: int) -> str:
    shape = list(tensor.shape)
    strides = list(tensor.stride())
    blocks = block_axis(shape, num_blocks)
    if blocks is None:
        raise ValueError(f"KV memory of shape {tuple(shape)} has no axis for its {num_blocks} blocks")
    parts = shape[blocks] // num_blocks
    axes = []
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if axis != blocks:
            # All keys may come before all values: their distance depends on the number of blocks.
            axes.append(f"{size}:{stride if stride < strides[blocks] * parts else 'apart'}")
    return f"{_word(tensor.dtype)} {_times(parts, '[' + ' '.join(axes) + ']')}"


def _layers(vllm_config: Any, names: Iterable[str]) -> dict[str, Any]:
    """The attention layers, in order of registration. Raises KeyError for one that vLLM does not know."""
    known = vllm_config.compilation_config.static_forward_context
    return {name: known[name] for name in names}


def _kernels(layer: Any) -> str:
    """Backend, packing of keys and values by CPU kernels, and the KV cache's dtype."""
    names = [layer.get_attn_backend().get_name(), kernel_packing(layer), kv_cache_dtype(layer)]
    return " ".join(str(name) for name in names if name)


def _layers_fact(layers: Mapping[str, Any], pages: Mapping[str, str]) -> str:
    lines = []
    for name, layer in layers.items():
        scales = {name: _value(scale) for name, scale in kv_scales(layer).items()}
        stored = str(kv_cache_torch_dtype(layer))
        lines.append(json.dumps([name, _kernels(layer), stored, pages[name], scales]))
    return f"{len(lines)}, {_digest(lines)}"


def machine() -> str:
    """The platform, and the settings that choose its kernels.

    GPU kernels of another device generation do not change the layout under one backend's name, strides and dtype, so
    the device's capability is left out; but the device decides which eight-bit format "fp8" means.
    """
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return f"{current_platform.device_name} {_word(current_platform.fp8_dtype())}"
    features = [name for name in CPU_FEATURES if getattr(torch.cpu, name, lambda: False)()]
    words = [name.removeprefix("_is_").removesuffix("_supported") for name in features]
    architecture = current_platform.get_cpu_architecture().name.lower()
    return f"cpu {architecture}, torch {torch.backends.cpu.get_cpu_capability()}, {' '.join(words)}"


# Position encoding (H34)


def _architecture(model_config: Any, find_model: Callable[[], Any] | None) -> str:
    """The configuration as the model has changed it while it was loaded, and those of the model's parts."""
    configs = [model_config.hf_config]
    if find_model is not None:
        configs += [config for module in find_model().modules() if (config := own_config(module)) is not None]
    digests = sorted({architecture_digest(config) for config in {id(config): config for config in configs}.values()})
    return digests[0] if len(digests) == 1 else _digest(digests)


def _position(model_config: Any, find_model: Callable[[], Any] | None) -> str:
    """Each rotary module by its class, tables and settings; and `max_model_len` where an unseen module may depend on
    it."""
    import torch

    roots = list(rotary_modules().values()) if find_model is None else [find_model()]
    modules = {id(module): module for root in roots for module in root.modules() if ROTARY.search(_class(module))}
    dtype = model_config.dtype if isinstance(model_config.dtype, torch.dtype) else getattr(torch, model_config.dtype)
    described = sorted({_rotary(module, dtype) for module in modules.values()})
    if not described:
        return f"max_model_len {model_config.max_model_len}"
    with_tables = {_short_form(module) for module in modules.values() if any(True for _ in module.buffers())}
    words = [_kinds(with_tables) or "no tables", _digest(described)]
    if find_model is None and _hides_positions(model_config):
        words.append(f"max_model_len {model_config.max_model_len}")
    return ", ".join(words)


def _hides_positions(model_config: Any) -> bool:
    """True if the model may depend on `max_model_len` in a way that only the model itself shows.

    A part of a model gets a copy of the configuration and changes that (Llama 4 within a multi-modal model); modules of
    transformers are not in vLLM's list.
    """
    config = model_config.hf_config
    return config.get_text_config() is not config or model_config.using_transformers_backend()


def _class(module: Any) -> str:
    return type(module).__name__


def _short_form(module: Any) -> str:
    """The class and its settings that are true, for readers: `Phi3LongRoPEScaledRotaryEmbedding(use_long_rope)`."""
    chosen = sorted(name for name, value in _settings(module).items() if value is True)
    return f"{_class(module)}({' '.join(chosen)})" if chosen else _class(module)


def _rotary(module: Any, dtype: Any) -> str:
    """All that decides a rotary module's results: its class, its scalar attributes, its tables in `dtype`.

    vLLM casts a table to the model's dtype at first use, or each time, depending on whether the engine is compiled.
    """
    import torch

    tables = {**dict(module.named_buffers(recurse=False)), **dict(module.named_parameters(recurse=False))}
    tables.update((name, value) for name, value in vars(module).items() if isinstance(value, torch.Tensor))
    content = {
        name: _value(table.to(dtype) if table.is_floating_point() else table) for name, table in sorted(tables.items())
    }
    return json.dumps([_class(module), dict(sorted(_settings(module).items())), content])


def _settings(module: Any) -> dict[str, Any]:
    """A module's plain attributes: numbers, strings, dtypes, and lists and mappings of them."""
    import torch

    of_every_module = vars(torch.nn.Module())
    settings = {name: _plain(value) for name, value in vars(module).items() if name not in of_every_module}
    return {name: value for name, value in settings.items() if value is not NO_SETTING}


def _plain(value: Any) -> Any:
    """`value` in JSON's types; NO_SETTING for what is none, such as a module, and for a container of such."""
    import torch

    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, torch.dtype):
        return _word(value)
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return NO_SETTING if NO_SETTING in items else items
    if isinstance(value, Mapping):
        entries = {str(name): _plain(item) for name, item in value.items()}
        return NO_SETTING if NO_SETTING in entries.values() else dict(sorted(entries.items()))
    return NO_SETTING


# Words and digests


def _value(value: Any) -> str:
    """A number, or a tensor as dtype, shape and content."""
    import torch

    if not isinstance(value, torch.Tensor):
        return str(value)
    value = value.detach().cpu().contiguous()
    digest = blake3(value.reshape(-1).view(torch.uint8).numpy()).hexdigest()[:32]
    return f"{_word(value.dtype)} {list(value.shape)} {digest}"


def _word(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _digest(lines: Iterable[str]) -> str:
    return blake3("\n".join(lines).encode()).hexdigest()[:32]
