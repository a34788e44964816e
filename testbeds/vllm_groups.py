"""The KV cache groups that the installed vLLM makes of a model's configuration.

    python testbeds/vllm_groups.py FOLDER

writes one JSON file for each model of `MODELS` to the folder: what decides its KV cache, where that comes from, and the
groups under one and eight tensor-parallel ranks. The specs are built as vLLM's layers build them on an NVIDIA GPU,
where there is none; the groups are vLLM's own, from `vllm.v1.core.kv_cache_utils`.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

Specs = dict[str, KVCacheSpec]

BLOCK_TOKENS = 16
"""vLLM's default on a GPU for dense attention."""
MLA_BLOCK_TOKENS = 64
"""FlashMLA's block."""
HYBRID_MLA_TOKENS = 128
"""A block of latents beside states is a multiple of so many tokens."""
DEEPSEEK_V4_BLOCK_TOKENS = 256


def heads(config: Any, ranks: int) -> dict[str, Any]:
    """The arguments of an attention layer's spec on one of `ranks` tensor-parallel ranks."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {"num_kv_heads": max(1, config.num_key_value_heads // ranks), "head_size": size, "dtype": torch.bfloat16}


def by_layer_types(config: Any, ranks: int) -> Specs:
    """Full attention beside sliding windows or chunks."""
    shape = heads(config, ranks) | {"block_size": BLOCK_TOKENS}
    kinds: dict[str, Callable[[], KVCacheSpec]] = {
        "full_attention": lambda: FullAttentionSpec(**shape),
        "sliding_attention": lambda: SlidingWindowSpec(**shape, sliding_window=config.sliding_window),
        "chunked_attention": lambda: ChunkedLocalAttentionSpec(
            **shape, attention_chunk_size=config.attention_chunk_size
        ),
    }
    return {f"layers.{number}.attn": kinds[kind]() for number, kind in enumerate(config.layer_types)}


States = tuple[tuple[int, ...], tuple[int, ...]]
"""Shapes of the convolution's last inputs and of the state."""
Layers = Sequence[bool | None]
"""For each layer: full attention, a state, or (None) nothing to keep."""


def with_states(
    full: Layers, states: States, kept_in: torch.dtype, attention: Callable[[int], KVCacheSpec], tokens: int
) -> Specs:
    """`attention` in the layers that `full` says, and states, kept in a type of their own, in the others.

    The block of attention is the smallest multiple of `tokens` whose page holds a state, and the page of a state is
    padded to it, as vLLM's platforms choose them with prefix caching.
    """
    state: dict[str, Any] = {"shapes": states, "dtypes": (torch.bfloat16, kept_in), "mamba_cache_mode": "align"}
    unit = tokens * attention(1).page_size_bytes
    block_size = tokens * ceil(MambaSpec(block_size=1, **state).page_size_bytes / unit)
    made = attention(block_size)
    mamba = MambaSpec(block_size=block_size, page_size_padded=made.page_size_bytes, **state)
    return {f"layers.{number}": made if one else mamba for number, one in enumerate(full) if one is not None}


def keys_and_values(config: Any, ranks: int) -> Callable[[int], KVCacheSpec]:
    """Full attention with blocks of so many tokens."""
    return lambda tokens: FullAttentionSpec(**heads(config, ranks), block_size=tokens)


def qwen3_next(config: Any, ranks: int) -> Specs:
    """Gated delta nets: the convolution's last inputs, and a matrix for each head, of Qwen3.5 in float32."""
    keys = config.linear_key_head_dim * config.linear_num_key_heads
    values = config.linear_value_head_dim * config.linear_num_value_heads
    convolution = (config.linear_conv_kernel_dim - 1, (2 * keys + values) // ranks)
    matrices = (config.linear_num_value_heads // ranks, config.linear_value_head_dim, config.linear_key_head_dim)
    full = [kind == "full_attention" for kind in config.layer_types]
    kept_in = torch.float32 if config.model_type == "qwen3_5_text" else torch.bfloat16
    return with_states(full, (convolution, matrices), kept_in, keys_and_values(config, ranks), BLOCK_TOKENS)


def jamba(config: Any, ranks: int) -> Specs:
    """Mamba layers of the first kind: the convolution's last inputs, and a state for each channel."""
    channels = config.mamba_expand * config.hidden_size // ranks
    full = [number % config.attn_layer_period == config.attn_layer_offset for number in range(config.num_hidden_layers)]
    states = (config.mamba_d_conv - 1, channels), (channels, config.mamba_d_state)
    return with_states(full, states, torch.bfloat16, keys_and_values(config, ranks), BLOCK_TOKENS)


def nemotron_h(config: Any, ranks: int) -> Specs:
    """Mamba layers of the second kind, with states in float32; layers of experts keep nothing."""
    full = [{"linear_attention": False, "full_attention": True}.get(kind) for kind in config.layers_block_type]
    channels = config.mamba_num_heads * config.mamba_head_dim + 2 * config.n_groups * config.ssm_state_size
    states = (
        (config.conv_kernel - 1, channels // ranks),
        (config.mamba_num_heads // ranks, config.mamba_head_dim, config.ssm_state_size),
    )
    return with_states(full, states, torch.float32, keys_and_values(config, ranks), BLOCK_TOKENS)


def kimi_linear(config: Any, ranks: int) -> Specs:
    """Kimi delta attention, with states in float32, beside latents, which every rank holds all of."""
    full = [kind == "full_attention" for kind in config.layer_types]
    count = config.linear_num_heads // ranks
    size = config.linear_head_dim
    states = (config.linear_conv_kernel_dim - 1, 3 * count * size), (count, size, size)
    return with_states(full, states, torch.float32, latent(config), HYBRID_MLA_TOKENS)


def latent(config: Any) -> Callable[[int], KVCacheSpec]:
    """Multi-head latent attention with blocks of so many tokens."""
    shape: dict[str, Any] = {"num_kv_heads": 1, "dtype": torch.bfloat16, "max_tp_shards": 1}
    shape["head_size"] = config.kv_lora_rank + config.qk_rope_head_dim
    return lambda tokens: MLAAttentionSpec(block_size=tokens, **shape)


def latents(config: Any, ranks: int) -> Specs:
    """Multi-head latent attention: every rank holds all of it."""
    spec = latent(config)(MLA_BLOCK_TOKENS)
    return {f"layers.{number}.attn": spec for number in range(config.num_hidden_layers)}


def deepseek_v4(config: Any, ranks: int) -> Specs:
    """A window of latents in each layer; compressed latents, an indexer, and the compressors' states where it has them.

    The cache is `fp8_ds_mla`, vLLM's own choice for this model. Every rank holds all of it.
    """
    common: dict[str, Any] = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": 576}
    packed = {
        "head_size": config.head_dim,
        "dtype": torch.uint8,
        "cache_dtype_str": "fp8_ds_mla",
        "model_version": "deepseek_v4",
        "state_content_bytes": 584,
    }

    def compressed(ratio: int, **shape: Any) -> MLAAttentionSpec:
        return MLAAttentionSpec(block_size=DEEPSEEK_V4_BLOCK_TOKENS, tokens_per_state=ratio, **shape, **common)

    def compressor(ratio: int, size: int) -> SlidingWindowMLASpec:
        overlap = 1 + (ratio == 4)
        return SlidingWindowMLASpec(
            block_size=4 if ratio == 4 else 8,
            head_size=2 * overlap * size,
            dtype=torch.float32,
            sliding_window=overlap * ratio,
            **common,
        )

    specs: Specs = {}
    for number, kind in enumerate(config.layer_types):
        layer = f"layers.{number}.attn"
        specs[f"{layer}.swa_cache"] = SlidingWindowMLASpec(
            block_size=64, sliding_window=config.sliding_window, **packed, **common
        )
        ratio = config.compress_rates.get(kind)
        if ratio is None:
            continue
        specs[layer] = compressed(ratio, **packed)
        specs[f"{layer}.compressor.state_cache"] = compressor(ratio, config.head_dim)
        if ratio == 4:
            indexed = config.index_head_dim + config.index_head_dim // 128 * 4
            specs[f"{layer}.indexer.k_cache"] = compressed(ratio, head_size=indexed, dtype=torch.uint8)
            specs[f"{layer}.indexer.compressor.state_cache"] = compressor(ratio, config.index_head_dim)
    return specs


@dataclass(frozen=True)
class Model:
    """A class of `transformers`, what differs from its defaults and where that is published, and how to make specs."""

    config_class: str
    specs: Callable[[Any, int], Specs]
    keys: tuple[str, ...]
    changes: dict[str, Any] = field(default_factory=dict)
    published: str = ""
    layout: KVCacheLayout = KVCacheLayout.LBNHC

    def config(self) -> Any:
        """An instance of the class, with the changes."""
        module, _, name = self.config_class.rpartition(".")
        return getattr(importlib.import_module(f"transformers.models.{module}"), name)(**self.changes)


ATTENTION = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
JAMBA_ONLY = ("attn_layer_period", "attn_layer_offset", "mamba_expand", "mamba_d_conv", "mamba_d_state")
DELTA_NET = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_value_head_dim",
    "linear_num_value_heads",
)
MAMBA_2 = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "mamba_ssm_cache_dtype")
BLOCKS = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
KIMI_DELTA = ("linear_conv_kernel_dim", "linear_num_heads", "linear_head_dim")
KINDS_OF_KIMI = ("linear_attention", "full_attention")
LATENT = ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")

MODELS = {
    "gemma-3-27b": Model(
        "gemma3.Gemma3TextConfig",
        by_layer_types,
        (*ATTENTION, "sliding_window", "layer_types"),
        {
            "hidden_size": 5376,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
        },
        "github.com/huggingface/transformers at 0d7e95d, src/transformers/models/gemma3/convert_gemma3_weights.py",
    ),
    "gemma-3-default": Model("gemma3.Gemma3TextConfig", by_layer_types, (*ATTENTION, "sliding_window", "layer_types")),
    "gpt-oss-120b": Model("gpt_oss.GptOssConfig", by_layer_types, (*ATTENTION, "sliding_window", "layer_types")),
    "gpt-oss-20b": Model(
        "gpt_oss.GptOssConfig",
        by_layer_types,
        (*ATTENTION, "sliding_window", "layer_types"),
        {"num_hidden_layers": 24},
        "github.com/ParagEkbote/hf-model-inspector, model_inspection_report.md on openai/gpt-oss-20b",
    ),
    "llama-4-scout": Model(
        "llama4.Llama4TextConfig", by_layer_types, (*ATTENTION, "attention_chunk_size", "layer_types")
    ),
    "qwen3-next": Model("qwen3_next.Qwen3NextConfig", qwen3_next, (*ATTENTION, "layer_types", *DELTA_NET)),
    "qwen3.5-27b": Model(
        "qwen3_5.Qwen3_5TextConfig",
        qwen3_next,
        (*ATTENTION, "layer_types", *DELTA_NET),
        {
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "linear_num_value_heads": 48,
        },
        "huggingface.co/Qwen/Qwen3.5-27B, config.json, as quoted in public code",
    ),
    "nemotron-3-nano": Model(
        "nemotron_h.NemotronHConfig",
        nemotron_h,
        ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "layers_block_type", *MAMBA_2),
        {
            "hidden_size": 2688,
            "layers_block_type": [BLOCKS[kind] for kind in "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"],
            "num_key_value_heads": 2,
            "mamba_num_heads": 64,
        },
        "huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16, config.json, as quoted in public code",
    ),
    "kimi-linear": Model(
        "kimi_linear.KimiLinearConfig",
        kimi_linear,
        ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim", "layer_types", *KIMI_DELTA),
        {"layer_types": [KINDS_OF_KIMI[number in (4, 8, 12, 16, 20, 24, 27)] for number in range(1, 28)]},
        "huggingface.co/moonshotai/Kimi-Linear-48B-A3B-Instruct, config.json, as quoted in public code",
    ),
    "jamba": Model(
        "jamba.JambaConfig",
        jamba,
        ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", *JAMBA_ONLY),
    ),
    "deepseek-v4": Model(
        "deepseek_v4.DeepseekV4Config",
        deepseek_v4,
        ("num_hidden_layers", "head_dim", "sliding_window", "index_head_dim", "compress_rates", "layer_types"),
        layout=KVCacheLayout.BLHNC,
    ),
    "deepseek-v3": Model("deepseek_v3.DeepseekV3Config", latents, LATENT),
    "deepseek-v2-lite": Model(
        "deepseek_v2.DeepseekV2Config",
        latents,
        LATENT,
        {"num_hidden_layers": 27},
        "arXiv:2405.04434, appendix B.1",
    ),
}

KINDS: dict[type[KVCacheSpec], tuple[str, str]] = {
    FullAttentionSpec: ("full attention", ""),
    SlidingWindowSpec: ("sliding window", "sliding_window"),
    ChunkedLocalAttentionSpec: ("chunked local attention", "attention_chunk_size"),
    MambaSpec: ("state space", ""),
}
"""For each kind of spec kvpact's name of the kind, and the attribute that holds its span."""


def vllm_config(layout: KVCacheLayout, hybrid: bool) -> Any:
    """What vLLM's grouping reads of its configuration, and nothing else."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not hybrid),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        model_config=None,
    )


def layer_specs(group: Any) -> Iterator[tuple[str, KVCacheSpec]]:
    """The name and the spec of each layer of one of vLLM's groups."""
    spec = group.kv_cache_spec
    for layer in group.layer_names:
        yield layer, spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def described(group: Any) -> dict[str, Any]:
    """One of vLLM's groups: what a match needs of it, its layers, and the bytes of a block without and with padding."""
    specs = dict(layer_specs(group))
    first = next(iter(specs.values()))
    kind, span = next(described for cls, described in KINDS.items() if isinstance(first, cls))
    return {
        "kind": kind,
        "block_size": group.kv_cache_spec.block_size,
        "span": getattr(first, span) if span else 0,
        "payload_bytes": sum(spec.real_page_size_bytes for spec in specs.values()),
        "padded_bytes": sum(spec.page_size_bytes for spec in specs.values()),
        "layers": list(specs),
    }


def made_groups(model: Model, ranks: int, hybrid: bool = True) -> dict[str, Any]:
    """vLLM's groups on each of `ranks` tensor-parallel ranks, and the bytes of a block of its pool."""
    settings = vllm_config(model.layout, hybrid)
    made = get_kv_cache_groups(settings, model.specs(model.config(), ranks))
    config = get_kv_cache_config_from_groups(settings, made, 1 << 40)
    return {
        "physical_bytes": config.kv_cache_tensors[0].size // config.num_blocks,
        "groups": [described(group) for group in made],
    }


def hybrid_off(model: Model) -> dict[str, Any] | str:
    """vLLM's groups without its hybrid manager, or why it has none."""
    try:
        return made_groups(model, 1, hybrid=False)
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def frozen(name: str) -> dict[str, Any]:
    """What the model's file holds."""
    model = MODELS[name]
    config = model.config()
    return {
        "model": name,
        "config_class": f"transformers.models.{model.config_class}",
        "transformers": version("transformers"),
        "changes": model.changes,
        "changes_from": model.published,
        "config": {key: getattr(config, key) for key in model.keys},
        "vllm": vllm.__version__,
        "layout": model.layout.name,
        "ranks": {str(ranks): made_groups(model, ranks) for ranks in (1, 8)},
        "hybrid_off": hybrid_off(model),
    }


if __name__ == "__main__":
    for name in MODELS:
        Path(sys.argv[1], f"{name}.json").write_text(json.dumps(frozen(name), indent=1) + "\n")
