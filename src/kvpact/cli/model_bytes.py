"""Bytes that a model keeps of a prompt, from its config.json alone: keys and values of a token, states.

Owns the shapes of states by family, and vLLM's rule for the tokens of a block, for one rank without speculative
decoding. The engine itself takes them from vLLM's specifications.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

STATES: Final = ("linear_attention", "mamba", "M")
ATTENTION: Final = ("full_attention", "attention", "*")
"""Names of a layer in a list of layers; others keep nothing."""

LATENT_UNIT: Final = 128
"""Least unit of tokens in a block of latent vectors beside states."""

MAMBA2: Final = (
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
)
"""Fields of Nemotron-H and Nemotron 3, and of Granite 4 and Bamba: heads, their size, the state's, groups, kernel."""

FAULTS: Final = (KeyError, TypeError, ValueError, ZeroDivisionError)
"""Exceptions of a field that is missing, or is not what it should be."""


class Build(NamedTuple):
    """Defaults of a build of vLLM."""

    block: int
    """Tokens of a block, at least."""
    recurrent: int = 0
    """Bytes of an element of a recurrent state; 0: by the model."""


GPU: Final = Build(16)
CPU: Final = Build(128)
CPU_BF16: Final = Build(128, recurrent=4)
"""vLLM 0.32 on a processor with AVX512-BF16."""


class StateBytes(NamedTuple):
    """Layers of a model with states."""

    layers: int
    """Layers that keep a state."""
    state: int
    """Bytes of one state, in all of them."""
    token: int
    """Bytes of a token's keys and values, in the layers with attention."""
    unit: int
    """Tokens of a block (the align unit): states are kept, and matches end, at multiples of it."""


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields of the language model."""
    return config.get("text_config") or config


def _element_bytes(config: Mapping[str, Any]) -> int:
    text = _text(config)
    named = [config.get("torch_dtype"), config.get("dtype"), text.get("torch_dtype"), text.get("dtype")]
    return 4 if "float32" in json.dumps(named) else 2


def _kv_elements(text: Mapping[str, Any]) -> int:
    """Elements of a token's keys and values in one layer."""
    if text.get("kv_lora_rank"):  # one vector for all heads
        return int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])
    heads = int(text["num_attention_heads"])
    width = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
    return 2 * width * int(text.get("num_key_value_heads") or heads)


def kv_bytes_per_token(config: Mapping[str, Any]) -> int:
    """Bytes of a token's keys and values in all layers; 0 if they do not follow from the configuration."""
    with suppress(*FAULTS):
        return int(_text(config)["num_hidden_layers"]) * _element_bytes(config) * _kv_elements(_text(config))
    return 0


def state_bytes(config: Mapping[str, Any], build: Build) -> StateBytes | None:
    """Bytes of a model with states; None for others, and for a family that is not known here."""
    text = _text(config)
    with suppress(*FAULTS):
        states, attention = _layers(text)
        if states and attention:
            state = _layer_state(text, _element_bytes(config), build.recurrent)
            token = _element_bytes(config) * _kv_elements(text)
            step = max(build.block, LATENT_UNIT) if text.get("kv_lora_rank") else build.block
            unit = step * -(-state // (step * token))
            return StateBytes(states, states * state, attention * token, unit)
    return None


def _layers(text: Mapping[str, Any]) -> tuple[int, int]:
    """Number of the layers with states, and of those with attention. Raises KeyError for a model without states."""
    linear = text.get("linear_attn_config")
    if linear is not None:
        return len(linear["kda_layers"]), len(linear["full_attn_layers"])
    kinds = text.get("layers_block_type") or text.get("layer_types") or text.get("hybrid_override_pattern")
    if kinds:
        return sum(kind in STATES for kind in kinds), sum(kind in ATTENTION for kind in kinds)
    count = int(text["num_hidden_layers"])
    if "attn_layer_period" in text:
        attention = len(range(int(text["attn_layer_offset"]), count, int(text["attn_layer_period"])))
    else:
        attention = count // int(text["full_attention_interval"])
    return count - attention, attention


def _layer_state(text: Mapping[str, Any], size: int, recurrent: int) -> int:
    """Bytes of one layer's state: the last inputs of the convolution, in elements of `size` bytes, and the recurrent
    state, in those of `recurrent` bytes, or of the family where that is 0.

    Raises KeyError for a family that is not known.
    """
    if "linear_attn_config" in text or "linear_num_heads" in text:  # Kimi-Linear, Kimi-K3; GLM-5.3
        linear = text.get("linear_attn_config") or {
            "num_heads": text["linear_num_heads"],
            "head_dim": text["linear_head_dim"],
            "short_conv_kernel_size": text["linear_conv_kernel_dim"],
        }
        inner = int(linear["num_heads"]) * int(linear["head_dim"])
        taps = 3 * inner * (int(linear["short_conv_kernel_size"]) - 1)
        return taps * size + inner * int(linear["head_dim"]) * (recurrent or 4)
    if "linear_num_value_heads" in text:  # Qwen3-Next, Qwen3.5 to 3.8
        keys = int(text["linear_num_key_heads"]) * int(text["linear_key_head_dim"])
        values = int(text["linear_num_value_heads"]) * int(text["linear_value_head_dim"])
        elements = values * int(text["linear_key_head_dim"])
        taps = (2 * keys + values) * (int(text["linear_conv_kernel_dim"]) - 1)
        return taps * size + elements * (_named(text, "mamba_ssm_dtype") or recurrent or size)
    names = next((names for names in MAMBA2 if names[0] in text), None)
    if names is not None:
        heads, head, width, groups, kernel = (int(text[name]) for name in names)
        own = _named(text, "mamba_ssm_cache_dtype") or 4 if names is MAMBA2[0] else 0
        taps = (heads * head + 2 * groups * width) * (kernel - 1)
        return taps * size + heads * head * width * (own or recurrent or size)
    inner = int(text["mamba_expand"]) * int(text["hidden_size"])  # Jamba
    return inner * ((int(text["mamba_d_conv"]) - 1) * size + int(text["mamba_d_state"]) * (recurrent or size))


def _named(text: Mapping[str, Any], field: str) -> int:
    """Bytes of an element of the type that a field names; 0 if it names none."""
    return {"float32": 4, "bfloat16": 2, "float16": 2}.get(str(text.get(field)), 0)
