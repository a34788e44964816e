"""Fields of vLLM's KV cache specifications and groups that only some releases or models have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CONTENT = (
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "dtype",
    "kv_quant_mode",
    "cache_dtype_str",
    "compress_ratio",
    "tokens_per_state",
    "model_version",
    "shapes",
    "dtypes",
    "mamba_type",
)
"""Fields of specifications that decide what a block's bytes mean. What is left out places pages in memory, counts
blocks, or sets when they are freed."""

DRAFTS = "num_speculative_blocks"
"""Field of a state's specification: the drafts of a step, whose inputs the state has room for. 0 counts as none."""


def content_of(spec: Any) -> dict[str, str]:
    """Return the fields of `CONTENT` that a specification has, and its `DRAFTS`, with their values."""
    found = {name: str(value) for name in CONTENT if (value := getattr(spec, name, None)) is not None}
    drafts = getattr(spec, DRAFTS, 0)
    return {**found, DRAFTS: str(drafts)} if drafts else found


def layer_specs(spec: Any) -> Sequence[Any]:
    """The specifications of a group's layers where these differ in size, else the group's own."""
    layers = getattr(spec, "kv_cache_specs", None)
    return list(layers.values()) if layers else [spec]


def window_reach(spec: Any) -> int:
    """The window, and the tokens before it that are kept for draft models of several modules."""
    return int(spec.sliding_window + spec.extra_retained_tokens)


def is_computed_again(spec: Any) -> bool:
    """True if vLLM computes the layers' last window again after each hit, from 0.31 on."""
    return bool(getattr(spec, "bounded_replay", False))
