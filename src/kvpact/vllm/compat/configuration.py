"""Settings of vLLM that some releases, models or configurations lack, one function per setting."""

from __future__ import annotations

from typing import Any

KERNEL_SETTINGS = ("linear_backend", "linear_backend_per_quant", "moe_backend")
KERNEL_VARIABLES = ("VLLM_DISABLED_KERNELS", "VLLM_TEST_FORCE_FP8_MARLIN", "VLLM_USE_DEEP_GEMM", "VLLM_USE_MARLIN")
"""The settings that decide vLLM's quantised kernels; a release has some of them."""

SPLIT_CONTEXT = ("decode_context_parallel_size", "prefill_context_parallel_size")

LATENT_SPECS = ("MLAAttentionSpec", "SlidingWindowMLASpec")
"""vLLM's kinds of KV cache without heads; a release has some of them."""


def runs_second_runner(vllm_config: Any) -> bool:
    """True if vLLM is configured to use its second model runner."""
    return bool(getattr(vllm_config, "use_v2_model_runner", False))


def split_context(parallel_config: Any) -> dict[str, int]:
    """The settings that split a request's blocks over ranks, with their values where these exceed one."""
    return {name: size for name in SPLIT_CONTEXT if (size := getattr(parallel_config, name, 1)) > 1}


def replica_number(parallel_config: Any) -> int:
    """The engine's number among those of its data-parallel server, from 0: the label `engine` of vLLM's metrics."""
    return int(getattr(parallel_config, "data_parallel_index", None) or 0)


def moves_experts(vllm_config: Any) -> bool:
    """True if the engine moves experts between ranks while it runs."""
    return bool(getattr(vllm_config.parallel_config, "enable_eplb", False))


def publishes_events(vllm_config: Any) -> bool:
    """True if the engine publishes KV events."""
    return vllm_config.kv_events_config is not None and bool(vllm_config.kv_events_config.enable_kv_cache_events)


def encoder_cache_size(vllm_config: Any) -> int:
    """Tokens of media that the encoder's cache can hold; 0 where vLLM does not report it."""
    return int(getattr(vllm_config.scheduler_config, "encoder_cache_size", None) or 0)


def runs_encoder_with_adapters(lora_config: Any) -> bool:
    """True if adapters change what the encoder of media computes. `lora_config` may be None."""
    return bool(getattr(lora_config, "enable_tower_connector_lora", False))


def drops_draft_blocks(vllm_config: Any) -> bool:
    """True if a draft model keeps of a token what depends on the token after it (EAGLE, MTP)."""
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.use_eagle())


def hit_alignment(kv_cache_config: Any) -> int:
    """Tokens: vLLM wants hits to be a multiple of it; 1 before 0.32, where whole blocks of each group are meant."""
    return int(getattr(kv_cache_config, "cache_hit_alignment_tokens", None) or 1)


def match_unit(vllm_config: Any) -> int:
    """Tokens between the ends that vLLM's own hits may have inside a block of a KV cache group; 0 where it is not set,
    and before 0.32."""
    return int(getattr(vllm_config.cache_config, "prefix_match_unit", None) or 0)


def draft_model(vllm_config: Any) -> tuple[Any, Any] | None:
    """The configurations of the draft model and of its loading; None without one."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        return None
    return draft, getattr(speculative, "draft_load_config", None) or vllm_config.load_config


def load_format(load_config: Any) -> str:
    """Format of the weights' files; a text or an enumeration in vLLM."""
    return str(getattr(load_config.load_format, "value", load_config.load_format))


def resolved_revision(revision: Any, repository: str) -> str | None:
    """The commit that vLLM resolved a revision of this repository to, or else the revision itself.

    vLLM has huggingface_hub's `ResolvedRevision`, a string with more attributes, where the hub could be asked.
    """
    if getattr(revision, "_repo_id", repository) in (repository, None):  # a commit identifies only its own repository
        revision = getattr(revision, "resolved", revision)
    return None if revision is None else str(revision)


def code_references(model_config: Any) -> Any:
    """`auto_map` of the model's configuration: the classes that come as Python files; None without them."""
    return getattr(model_config.hf_config, "auto_map", None)


def quantization_settings(model_config: Any) -> Any:
    """The settings of an online quantisation: a dictionary, a dataclass or None."""
    return getattr(model_config, "quantization_config", None)


def kernel_settings(vllm_config: Any) -> dict[str, Any]:
    """The settings that decide the quantised kernels; None for each that the release does not have."""
    kernels = getattr(vllm_config, "kernel_config", None)
    return {name: getattr(kernels, name, None) for name in KERNEL_SETTINGS}


def kernel_variables() -> dict[str, Any]:
    """The environment variables that decide the quantised kernels, as vLLM has read them."""
    from vllm import envs

    return {name: getattr(envs, name, None) for name in KERNEL_VARIABLES}


def ranks_with_same_kv(vllm_config: Any, kv_cache_config: Any) -> int:
    """Neighbouring tensor-parallel ranks that hold the same bytes in every block: all, where attention is MLA.

    1 where any layer is of another kind. From 0.31 on vLLM must report the same: it knows splits over other ranks.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if not specs or not all(_is_latent(spec) for spec in specs):
        return 1
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    return ranks if getattr(kv_cache_config, "kv_tp_replicas", ranks) == ranks else 1


def _is_latent(spec: Any) -> bool:
    """True if each rank has the keys and values of all heads, as one vector a token."""
    of_layers = getattr(spec, "kv_cache_specs", None)
    if of_layers is not None:
        return all(_is_latent(one) for one in of_layers.values())
    return any(kind.__name__ in LATENT_SPECS for kind in type(spec).__mro__)
