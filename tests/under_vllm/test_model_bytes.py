"""`kvpact config --check MODEL` of models with states, compared with what vLLM itself makes of the same config.json."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import MambaSpec

from kvpact.cli.model_bytes import CPU_BF16, GPU, Build, state_bytes
from kvpact_testkit.vllm.compat import EngineSettings, make_vllm_config

PACT = {"kv_connector": "PactConnector", "kv_connector_module_path": "kvpact.vllm"}
SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 32_000, "torch_dtype": "bfloat16"}
ATTENTION = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256}
GDN = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
KDA = {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}
MAMBA = {"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}
GRANITE = {"mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}


def of(name: str, kind: str, layers: int, **fields: Any) -> dict[str, Any]:
    return {"architectures": [name], "model_type": kind, "num_hidden_layers": layers, **SIZES, **fields}


CONFIGS: Mapping[str, tuple[dict[str, Any], int, int]] = {
    "Qwen3-Next": (of("Qwen3NextForCausalLM", "qwen3_next", 8, full_attention_interval=4, **ATTENTION, **GDN), 6, 2),
    "Qwen3.5": (
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": of(
                "Qwen3_5ForConditionalGeneration",
                "qwen3_5_text",
                4,
                mamba_ssm_dtype="float32",
                full_attention_interval=4,
                **ATTENTION,
                **GDN,
            ),
        },
        3,
        1,
    ),
    "Nemotron-H": (
        of("NemotronHForCausalLM", "nemotron_h", 5, hybrid_override_pattern="M-M*-", **ATTENTION, **MAMBA),
        2,
        1,
    ),
    "Kimi-Linear": (
        of(
            "KimiLinearForCausalLM",
            "kimi_linear",
            4,
            linear_attn_config={"kda_layers": [1, 2, 3], "full_attn_layers": [4], **KDA},
            **{**ATTENTION, "num_key_value_heads": 16, "head_dim": 128},
            **LATENT,
        ),
        3,
        1,
    ),
    "Jamba": (
        of(
            "JambaForCausalLM",
            "jamba",
            8,
            attn_layer_period=8,
            attn_layer_offset=4,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
            num_attention_heads=16,
            num_key_value_heads=2,
        ),
        7,
        1,
    ),
    "Granite 4": (
        of(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            3,
            layer_types=["mamba", "attention", "mamba"],
            num_attention_heads=16,
            num_key_value_heads=2,
            mamba_expand=2,
            **GRANITE,
        ),
        2,
        1,
    ),
}
"""Family -> its config.json, its layers with states, and those with attention."""


CLASSES = {
    "Qwen3-Next": "vllm.model_executor.models.qwen3_next:Qwen3NextForCausalLM",
    "Qwen3.5": "vllm.model_executor.models.qwen3_next:Qwen3NextForCausalLM",  # its own needs torchvision
    "Nemotron-H": "vllm.model_executor.models.nemotron_h:NemotronHForCausalLM",
    "Kimi-Linear": "vllm.models.kimi_k3:KimiLinearForCausalLM",
    "Jamba": "vllm.model_executor.models.jamba:JambaForCausalLM",
    "Granite 4": "vllm.model_executor.models.granitemoehybrid:GraniteMoeHybridForCausalLM",
}
"""vLLM's classes, which say what their states are."""


def engine_of(config: Mapping[str, Any], build: Build) -> Any:
    """As much of a `VllmConfig` as vLLM reads to size blocks, with what it sets for this build and model."""
    text = SimpleNamespace(**config.get("text_config", config))
    latent = bool(getattr(text, "kv_lora_rank", 0))
    of_model = getattr(text, "mamba_ssm_dtype", "auto")
    made = make_vllm_config(EngineSettings(block_size=build.block), PACT)
    made.cache_config.mamba_ssm_cache_dtype = (
        "float32" if build.recurrent == 4 or text.model_type == "nemotron_h" else of_model
    )
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    made.model_config = SimpleNamespace(
        dtype=torch.bfloat16,
        hf_config=text,
        hf_text_config=text,
        architecture=text.architectures[0],
        use_mla=latent,
        get_num_kv_heads=lambda parallel: 1 if latent else text.num_key_value_heads,
        get_head_size=lambda: text.kv_lora_rank + text.qk_rope_head_dim if latent else width,
    )
    return made


@pytest.mark.parametrize("build", [GPU, CPU_BF16], ids=["GPU", "CPU"])
@pytest.mark.parametrize("family", CONFIGS)
def test_bytes_of_a_state_and_the_align_unit_are_vllms(
    family: str, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, states, attention = CONFIGS[family]
    engine = engine_of(config, build)
    module, _, name = CLASSES[family].partition(":")
    kind = getattr(importlib.import_module(module), name)
    spec = MambaSpec(
        shapes=kind.get_mamba_state_shape_from_config(engine),
        dtypes=kind.get_mamba_state_dtype_from_config(engine),
        block_size=-1,
    )
    found = state_bytes(config, build)
    assert found is not None
    assert (found.layers, found.state) == (states, states * spec.page_size_bytes)

    monkeypatch.setattr(ModelRegistry, "resolve_model_cls", lambda *_, **__: (kind, ""))
    monkeypatch.setattr(CPUAttentionBackend, "get_supported_kernel_block_sizes", lambda: [MultipleOf(16)])
    monkeypatch.setattr(current_platform, "_find_non_ssm_backends", lambda _: [CPUAttentionBackend], raising=False)
    current_platform._align_hybrid_block_size(engine, CPUAttentionBackend)
    assert found.unit == engine.cache_config.block_size
    page = engine.cache_config.mamba_page_size_padded or spec.page_size_bytes
    assert found.token == attention * page // found.unit
