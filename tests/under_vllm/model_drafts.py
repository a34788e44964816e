"""A tiny Qwen3-Next whose own draft module is often right: the answer goes from token to token round one cycle.

With random weights no draft is ever accepted. Here the next token is the last one's successor, whatever was before;
states and keys and values only move log-probabilities. Drafts know the successors of most tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from model_families import SHAPE, save_model
from safetensors.torch import load_file, save_file
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

UNIT = 32
"""Tokens between two states that can be kept (vLLM's mode "align"), and of a block of attention."""

DRAFTS = 2
"""Tokens that are guessed ahead in each step."""

KINDS = ["linear_attention", "full_attention", "linear_attention"]
STATES = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 2,  # all: where one is chosen, a rounding chooses the other
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
SLOW_DECAY = -5.0
"""Logarithm of the rate at which a state forgets: what is in it matters for a hundred tokens."""

DRAFT_NOISE = 4.5
"""What drafts read of a token beside the token itself: so much that some are wrong."""


def successors(vocabulary: int) -> torch.Tensor:
    """Each token's successor: all tokens but 0, in one cycle whose length shares no factor with a unit."""
    draw = torch.Generator().manual_seed(1)
    order = torch.randperm(vocabulary - 1, generator=draw) + 1
    found = torch.zeros(vocabulary, dtype=torch.int64)
    found[order] = order.roll(-1)
    return found


def qwen3_next_with_drafts(directory: Path, tokenizer: Path) -> Path:
    """The model, with its draft module in the same file."""
    torch.manual_seed(0)
    shape = SHAPE | {"num_hidden_layers": len(KINDS)}
    config = Qwen3NextConfig(**shape, **STATES, **EXPERTS, layer_types=KINDS)
    save_model(Qwen3NextForCausalLM(config), directory, tokenizer)
    (file,) = directory.glob("*.safetensors")
    weights = load_file(str(file))
    draw = torch.Generator().manual_seed(2)
    size = config.hidden_size
    vocabulary = config.vocab_size
    embedding = torch.randn(vocabulary, size, generator=draw)
    head = torch.zeros_like(embedding)
    head[successors(vocabulary)] = embedding
    weights["model.embed_tokens.weight"] = embedding.to(torch.bfloat16)
    weights["lm_head.weight"] = (head * 8 / size).to(torch.bfloat16)
    for name in [name for name in weights if name.endswith(".A_log")]:
        weights[name] = torch.full_like(weights[name], SLOW_DECAY)
    (full,) = (f"model.layers.{number}." for number, kind in enumerate(KINDS) if kind == "full_attention")
    for name in [name for name in weights if name.startswith(full)]:
        weights[f"mtp.layers.0.{name.removeprefix(full)}"] = weights[name].clone()
    noise = torch.randn(size, 2 * size, generator=draw) * (DRAFT_NOISE / size**0.5)
    noise[:, size:] *= 0.05
    noise[:, :size] += torch.eye(size)
    weights["mtp.fc.weight"] = noise.to(torch.bfloat16)
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        weights[f"mtp.{name}.weight"] = torch.zeros(size, dtype=torch.bfloat16)
    save_file(weights, str(file), metadata={"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    return directory
