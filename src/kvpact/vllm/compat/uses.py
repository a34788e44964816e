"""What kvpact uses of vLLM, by name, and what it means if a release does not have it.

Owns the table; `kvpact.vllm.compat.shape` looks at a release with it. Imports nothing of vLLM by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from kvpact.vllm.compat.configuration import ranks_with_same_kv, runs_encoder_with_adapters
from kvpact.vllm.compat.platforms import KVPACT_WORKER

When = Callable[[Any, Any], bool]
"""Whether a configuration (`VllmConfig`, `KVCacheConfig`) uses something."""


def _always(vllm_config: Any, kv_cache_config: Any) -> bool:
    return True


def _has_states(vllm_config: Any, kv_cache_config: Any) -> bool:
    return any(type(one.kv_cache_spec).__name__ == "MambaSpec" for one in kv_cache_config.kv_cache_groups)


def _has_several_groups(vllm_config: Any, kv_cache_config: Any) -> bool:
    return len(kv_cache_config.kv_cache_groups) > 1


def _has_latents(vllm_config: Any, kv_cache_config: Any) -> bool:
    return ranks_with_same_kv(vllm_config, kv_cache_config) > 1


def _has_adapters(vllm_config: Any, kv_cache_config: Any) -> bool:
    return vllm_config.lora_config is not None


def _encodes_with_adapters(vllm_config: Any, kv_cache_config: Any) -> bool:
    return vllm_config.lora_config is not None and not runs_encoder_with_adapters(vllm_config.lora_config)


def _is_quantized(vllm_config: Any, kv_cache_config: Any) -> bool:
    return vllm_config.model_config.quantization is not None


def _has_quantized_kv(vllm_config: Any, kv_cache_config: Any) -> bool:
    return "fp8" in str(vllm_config.cache_config.cache_dtype) or "int8" in str(vllm_config.cache_config.cache_dtype)


def reports_blocks_only(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether failed loads can be reported by their blocks alone."""
    return not exists(RESULTS)


def _has_our_worker(vllm_config: Any, kv_cache_config: Any) -> bool:
    return bool(vllm_config.parallel_config.worker_cls == KVPACT_WORKER)


def _has_several_engines(vllm_config: Any, kv_cache_config: Any) -> bool:
    return int(vllm_config.parallel_config.data_parallel_size) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What kvpact uses of one class, or of one module."""

    place: str
    """`module:Class`, or `module:` for the module itself."""
    names: str
    """Members, separated by spaces; `a|b` means one of the two, `a(2)` a method called with two arguments."""
    without: str = ""
    """What does not work without them; empty: nothing would, or wrongly."""
    when: When = _always
    """Which engines use it."""
    given: str = ""
    """Another place; this one is used only where that one exists."""
    in_workers: bool = False
    """Whether to look at it only where the module is imported already."""
    is_hook: bool = False
    """vLLM calls the methods on the connector, which has to accept the arguments of the base class."""


BASE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"
OUTPUT: Final = "vllm.v1.core.sched.output"
SPECS: Final = "vllm.v1.kv_cache_interface"
RESULTS: Final = f"{BASE}:KVConnectorTransferResults"
MANAGER: Final = "vllm.v1.core.kv_cache_manager:KVCacheManager"
WEIGHTS: Final = "the notice that weights change through {} (call kvpact_weights_changed by collective_rpc)"

USES: tuple[Use, ...] = (
    # What vLLM calls. A hook that it does not call any more would be missed silently.
    Use(
        place=f"{BASE}:KVConnectorBase_V1",
        names="on_new_request get_num_new_matched_tokens update_state_after_alloc build_connector_meta "
        "update_connector_output request_finished has_pending_push_work reset_cache shutdown "
        "bind_kv_cache_manager|bind_gpu_block_pool "
        "set_xfer_handshake_metadata_pp_aware|set_xfer_handshake_metadata "
        "register_kv_caches get_handshake_metadata bind_connector_metadata start_load_kv wait_for_layer_load "
        "save_kv_layer wait_for_save get_transfer_results|get_finished get_block_ids_with_load_errors "
        "build_connector_worker_meta",
        is_hook=True,
    ),
    Use(place=f"{BASE}:KVConnectorBase_V1", names="get_transfer_results", given=RESULTS, is_hook=True),
    Use(place=f"{BASE}:KVConnectorBase_V1", names="get_finished", is_hook=True, when=reports_blocks_only),
    Use(place=f"{BASE}:SupportsHMA", names="request_finished_all_groups", when=_has_several_groups, is_hook=True),
    Use(
        place=f"{BASE}:KVConnectorBase_V1",
        names="get_kv_connector_stats build_kv_connector_stats build_prom_metrics",
        without="kvpact's metrics on vLLM's endpoint",
        is_hook=True,
    ),
    Use(
        place=f"{BASE}:KVConnectorBase_V1",
        names="get_required_kvcache_layout",
        without='kv_layout="blocks"',
        is_hook=True,
    ),
    # What is inherited, and what is sent and returned.
    Use(place=f"{BASE}:KVConnectorBase_V1", names="_get_connector_metadata _vllm_config _kv_transfer_config"),
    Use(
        place=f"{BASE}:",
        names="KVConnectorMetadata KVConnectorHandshakeMetadata KVConnectorWorkerMetadata KVConnectorRole SupportsHMA",
    ),
    Use(place=f"{BASE}:KVConnectorRole", names="SCHEDULER WORKER"),
    Use(place=f"{BASE}:KVConnectorWorkerMetadata", names="aggregate"),
    Use(place="vllm.distributed.kv_transfer.kv_connector.v1.metrics:", names="KVConnectorStats KVConnectorPromMetrics"),
    Use(place=RESULTS, names="finished_recving failed_recving", given=RESULTS),
    Use(place="vllm.v1.outputs:KVConnectorOutput", names="kv_connector_worker_meta invalid_block_ids"),
    Use(place="vllm.v1.outputs:KVConnectorOutput", names="failed_recving", given=RESULTS),
    Use(
        place=f"{BASE}:",
        names="KVConnectorTransferResults",
        without="asynchronous loads, and states of state-space layers",
        when=_has_several_groups,
    ),
    # The steps, and the requests.
    Use(
        place=f"{OUTPUT}:SchedulerOutput",
        names="scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens finished_req_ids preempted_req_ids "
        "kv_connector_metadata",
    ),
    Use(
        place=f"{OUTPUT}:SchedulerOutput",
        names="kv_connector_block_state",
        when=_has_states,
    ),
    Use(place=f"{OUTPUT}:KVConnectorBlockState", names="boundary_state_offloads", when=_has_states),
    Use(
        place="vllm.v1.request:Request",
        names="request_id all_token_ids num_computed_tokens num_preemptions prefill_stats skip_reading_prefix_cache "
        "mm_features lora_request cache_salt prompt_embeds prompt_is_token_ids pooling_params status is_finished(0)",
    ),
    Use(
        place="vllm.v1.request:RequestStatus",
        names="WAITING WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR PREEMPTED",
        without="the list of waiting requests of kvpact.vllm.scheduler_context",
    ),
    Use(
        place="vllm.v1.metrics.stats:PrefillStats",
        names="num_cached_tokens num_external_cached_tokens num_computed_tokens num_cache_creation_tokens",
    ),
    Use(
        place="vllm.lora.request:LoRARequest",
        names="lora_int_id lora_path load_inplace is_3d_lora_weight",
        when=_has_adapters,
    ),
    # The blocks.
    Use(place=MANAGER, names="block_pool num_kv_cache_groups get_block_ids(1)", given=MANAGER),
    Use(place="vllm.v1.core.kv_cache_manager:KVCacheBlocks", names="get_block_ids(0)"),
    Use(
        place="vllm.v1.core.block_pool:BlockPool",
        names="blocks null_block free_block_queue touch(1) free_blocks(1) evict_blocks(1)",
    ),
    Use(place="vllm.v1.core.kv_cache_utils:", names="get_group_id(1)"),
    Use(place="vllm.v1.core.kv_cache_utils:KVCacheBlock", names="block_id ref_cnt block_hash is_null"),
    Use(
        place="vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue",
        names="iter_blocks_after(1) remove(1) prepend_n(1)",
        without='"save": "lazy", and blocks of windows that leave the engine first',
    ),
    Use(place=f"{SPECS}:KVCacheConfig", names="num_blocks kv_cache_groups"),
    Use(place=f"{SPECS}:KVCacheConfig", names="cache_hit_alignment_tokens", when=_has_several_groups),
    Use(place=f"{SPECS}:KVCacheConfig", names="kv_tp_replicas", when=_has_latents),
    Use(
        place=f"{SPECS}:KVCacheGroupSpec",
        names="layer_names kv_cache_spec is_eagle_group enable_kv_transfer host_resident",
    ),
    Use(place=f"{SPECS}:AttentionSpec", names="block_size num_kv_heads head_size dtype page_size_bytes"),
    Use(place=f"{SPECS}:SlidingWindowSpec", names="sliding_window extra_retained_tokens", when=_has_several_groups),
    Use(place=f"{SPECS}:SlidingWindowMLASpec", names="bounded_replay", when=_has_several_groups),
    Use(place=f"{SPECS}:MambaSpec", names="shapes dtypes mamba_type mamba_cache_mode", when=_has_states),
    # The settings on which promises depend.
    Use(
        place="vllm.config:VllmConfig",
        names="kv_transfer_config cache_config model_config parallel_config scheduler_config lora_config load_config "
        "compilation_config speculative_config ec_transfer_config",
    ),
    Use(
        place="vllm.config:KVTransferConfig",
        names="kv_role kv_load_failure_policy kv_connector_extra_config engine_id",
    ),
    Use(place="vllm.config:CacheConfig", names="block_size cache_dtype enable_prefix_caching"),
    Use(
        place="vllm.config:ParallelConfig",
        names="tensor_parallel_size pipeline_parallel_size decode_context_parallel_size prefill_context_parallel_size "
        "worker_cls",
    ),
    Use(place="vllm.config:ParallelConfig", names="data_parallel_index", when=_has_several_engines),
    Use(
        place="vllm.config:ParallelConfig",
        names="enable_eplb",
        without="telling experts that move between ranks from new weights",
    ),
    Use(place="vllm.config:ModelConfig", names="model model_weights dtype quantization hf_config enable_sleep_mode"),
    Use(place="vllm.config:SchedulerConfig", names="policy"),
    Use(place="vllm.config:SpeculativeConfig", names="use_eagle(0) draft_model_config"),
    Use(place="vllm.config:LoRAConfig", names="enable_tower_connector_lora", when=_encodes_with_adapters),
    Use(place="vllm.config:KernelConfig", names="linear_backend moe_backend", when=_is_quantized),
    # The forward pass.
    Use(place="vllm.forward_context:ForwardContext", names="attn_metadata cudagraph_runtime_mode"),
    Use(
        place="vllm.model_executor.layers.attention.attention:Attention",
        names="kv_cache_dtype get_attn_backend(0)",
        without="sharing with other engines",
        in_workers=True,
    ),
    Use(
        place="vllm.model_executor.layers.attention.attention:set_default_quant_scales",
        names="_q_scale_float _k_scale_float _v_scale_float",
        when=_has_quantized_kv,
        in_workers=True,
    ),
    Use(place="vllm.distributed.parallel_state:", names="get_tp_group(0) get_pp_group(0)"),
    Use(place="vllm.distributed.kv_transfer:", names="get_kv_transfer_group(0) has_kv_transfer_group(0)"),
    Use(
        place="vllm.model_executor.layers.rotary_embedding:",
        names="_ROPE_DICT",
        without="sharing with other engines",
        in_workers=True,
    ),
    *(
        Use(place=worker, names=names, without=without, when=_has_our_worker, in_workers=True)
        for worker in ("vllm.v1.worker.cpu_worker:CPUWorker", "vllm.v1.worker.gpu_worker:Worker")
        for names, without in (
            ("load_model initialize_from_config(1) execute_model(1) sleep wake_up", ""),
            ("reload_weights start_weight_update update_weights finish_weight_update", WEIGHTS),
        )
    ),
)
"""Everything that kvpact uses of vLLM, as it is in 0.33, but for what `before_update_states` needs: on unknown releases
that hook is refused."""


def find(place: str) -> Any:
    """The class, function or module; None if it is not there."""
    module, _, name = place.partition(":")
    try:
        found = import_module(module)
    except ImportError:
        return None
    return getattr(found, name, None) if name else found


def exists(place: str) -> bool:
    """Whether it is there."""
    return find(place) is not None


__all__ = ["USES", "Use", "exists", "find", "reports_blocks_only"]
