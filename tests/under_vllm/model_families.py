"""Tiny models with random weights of families that keep several KV cache groups."""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection
from pathlib import Path

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from engines import BLOCK
from kvpact_testkit.demo.model import TINY_SHAPE

WINDOW = 2 * BLOCK
"""Tokens of a window, or of a chunk."""

SHAPE = {
    "vocab_size": TINY_SHAPE.vocabulary,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "initializer_range": 0.06,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


MLA_LAYERS = 3
LATENT = 576
"""Numbers that a latent attention keeps of a token."""

DECAY = 0.002
"""How fast a state forgets: after 400 tokens about half of it is left. With what transformers draws at random, nothing
is left after ten, and a wrong state changes an answer no more than rounding does."""


def with_memory(model: PreTrainedModel) -> PreTrainedModel:
    """The model, whose states keep what they have seen."""
    for name, weights in model.named_parameters():
        if name.endswith("A_log"):
            weights.data.fill_(math.log(DECAY))
    return model


def save_model(model: PreTrainedModel, directory: Path, tokenizer: Path) -> Path:
    """The model, with the tokenizer of the tiny one."""
    model.to(torch.bfloat16).save_pretrained(directory)
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, directory)
    return directory


def gemma_like(directory: Path, tokenizer: Path, full: Collection[int] = (2,), layers: int = 4) -> Path:
    """Like Gemma 3: layers with a sliding window, and one in four with full attention, or those with these numbers."""
    torch.manual_seed(0)
    kinds = ["full_attention" if number in full else "sliding_attention" for number in range(layers)]
    shape = SHAPE | {"num_hidden_layers": layers}
    config = Gemma3TextConfig(**shape, query_pre_attn_scalar=64, sliding_window=WINDOW, layer_types=kinds)
    return save_model(Gemma3ForCausalLM(config), directory, tokenizer)


def gemma_of_two_sizes(directory: Path, tokenizer: Path) -> Path:
    """With two layers in the KV cache groups but one, which has a single layer."""
    return gemma_like(directory, tokenizer, full=(1, 3), layers=5)


def gpt_oss_like(directory: Path, tokenizer: Path) -> Path:
    """Like GPT-OSS: windows in every other layer, attention sinks, experts."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * 2
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = GptOssConfig(**SHAPE, **experts, sliding_window=WINDOW, layer_types=kinds)
    return save_model(GptOssForCausalLM(config), directory, tokenizer)


def llama4_like(directory: Path, tokenizer: Path) -> Path:
    """Like Llama 4: attention within chunks, and one layer in four with full attention."""
    torch.manual_seed(0)
    kinds = ["chunked_attention"] * 3 + ["full_attention"]
    experts = {"num_local_experts": 2, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 512}
    config = Llama4TextConfig(**SHAPE, **experts, attention_chunk_size=WINDOW, layer_types=kinds)
    return save_model(Llama4ForCausalLM(config), directory, tokenizer)


def qwen3_next_like(directory: Path, tokenizer: Path) -> Path:
    """Like Qwen3-Next: gated delta nets, which keep a state, and one layer in four with full attention.

    All experts compute all tokens: else rounding would choose between two that are as good as equal.
    """
    torch.manual_seed(0)
    states = {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    experts = {
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    }
    config = Qwen3NextConfig(**SHAPE, **states, **experts)
    return save_model(with_memory(Qwen3NextForCausalLM(config)), directory, tokenizer)


def nemotron_h_like(directory: Path, tokenizer: Path) -> Path:
    """Like Nemotron-H: Mamba 2's state-space layers, one with full attention, and feed-forward layers between."""
    torch.manual_seed(0)
    states = {"mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 64, "chunk_size": 128}
    kinds = ["mamba", "mlp", "mamba", "attention", "mlp"]
    shape = {name: value for name, value in SHAPE.items() if name != "num_hidden_layers"}
    config = NemotronHConfig(**shape, **states, layers_block_type=kinds)
    return save_model(with_memory(NemotronHForCausalLM(config)), directory, tokenizer)


def deepseek_like(directory: Path, tokenizer: Path) -> Path:
    """A DeepSeek V2 with three layers of latent attention and no experts, in bfloat16."""
    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=MLA_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=LATENT - 64,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        first_k_dense_replace=MLA_LAYERS,
        n_routed_experts=8,
        max_position_embeddings=8192,
        initializer_range=0.06,
        bos_token_id=0,
        eos_token_id=0,
    )
    return save_model(DeepseekV2ForCausalLM(config).to(torch.bfloat16), directory, tokenizer)
