"""The KV memory of real models, and how many entries a block's copy must cost in each of vLLM's layouts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """One rank's KV cache of a model, at 2 bytes a number."""

    layers: int
    heads: int
    """Of keys and values; 0 for a latent, which every rank has whole."""
    numbers: int
    """A token's in one head, keys and values together."""
    block_tokens: int = 16


MODELS = {
    "Llama-3-8B": Model(32, 8, 256),
    "Qwen3-8B": Model(36, 8, 256),
    "GPT-OSS-20B, hybrid manager off": Model(24, 8, 128),
    "DeepSeek-V3": Model(61, 0, 576, block_tokens=64),
}

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def entries_per_block(model: Model, layout: str, ranks: int) -> int:
    """What a block's copy must cost: a run for all adjacent layers, or for each layer, or each head."""
    heads = max(1, model.heads // ranks)
    if layout.startswith("BL"):
        return 1
    apart = layout in ("LHBNC", "BHLNC") and heads > 1
    if layout == "BHLNC" and heads == 1:
        return 1
    return model.layers * (heads if apart else 1)
