"""Names of vLLM that kvpact uses, and the ability that is lost if a release does not have them.

Owns the table; `kvpact.vllm.compat.shape` looks at a release with it. Imports nothing of vLLM by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from typing import Any, Final

from kvpact.vllm.compat.configuration import publishes_events, ranks_with_same_kv, runs_encoder_with_adapters
from kvpact.vllm.compat.platforms import KVPACT_WORKER

When = Callable[[Any, Any], bool]
"""True if a configuration (`VllmConfig`, `KVCacheConfig`) uses something."""


def _always(vllm_config: Any, kv_cache_config: Any) -> bool:
    return True


def _has_states(vllm_config: Any, kv_cache_config: Any) -> bool:
    return any(type(one.kv_cache_spec).__name__ == "MambaSpec" for one in kv_cache_config.kv_cache_groups)


def _has_several_groups(vllm_config: Any, kv_cache_config: Any) -> bool:
    return len(kv_cache_config.kv_cache_groups) > 1


def _has_latents(vllm_config: Any, kv_cache_config: Any) -> bool:
    return ranks_with_same_kv(vllm_config, kv_cache_config) > 1


def _publishes_events(vllm_config: Any, kv_cache_config: Any) -> bool:
    return publishes_events(vllm_config)


OF_GROUPS: Final = (_has_states, _has_several_groups, _has_latents)
"""Conditions that only the KV cache groups decide."""


def _has_adapters(vllm_config: Any, kv_cache_config: Any) -> bool:
    return vllm_config.lora_config is not None


def _encodes_with_adapters(vllm_config: Any, kv_cache_config: Any) -> bool:
    return vllm_config.lora_config is not None and not runs_encoder_with_adapters(vllm_config.lora_config)


def _is_quantized(vllm_config: Any, kv_cache_config: Any) -> bool:
    return vllm_config.model_config.quantization is not None


def _has_quantized_kv(vllm_config: Any, kv_cache_config: Any) -> bool:
    return "fp8" in str(vllm_config.cache_config.cache_dtype) or "int8" in str(vllm_config.cache_config.cache_dtype)


def _has_our_worker(vllm_config: Any, kv_cache_config: Any) -> bool:
    return bool(vllm_config.parallel_config.worker_cls == KVPACT_WORKER)


def _has_several_engines(vllm_config: Any, kv_cache_config: Any) -> bool:
    return int(vllm_config.parallel_config.data_parallel_size) > 1


@dataclass(frozen=True, slots=True)
class Use:
    """Names that kvpact uses of one class, or of one module."""

    place: str
    """`module:Class`, or `module:` for the module itself."""
    names: str
    """Members, separated by spaces; `a|b` means one of the two, `a(2)` a method called with two arguments."""
    _: KW_ONLY
    without: str = ""
    """The ability that is lost without them; empty: kvpact would not work, or wrongly."""
    when: When = _always
    """Condition for an engine to use them."""
    in_workers: bool = False
    """True if to look at it only where the module is imported already."""
    is_hook: bool = False
    """vLLM calls the methods on the connector, which has to accept the arguments of the base class."""


BASE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"
CONNECTOR: Final = f"{BASE}:KVConnectorBase_V1"
OUTPUT: Final = "vllm.v1.core.sched.output"
LAYERS: Final = "vllm.model_executor.layers"
SPECS: Final = "vllm.v1.kv_cache_interface"
RESULTS: Final = f"{BASE}:KVConnectorTransferResults"
MANAGER: Final = "vllm.v1.core.kv_cache_manager:KVCacheManager"
WEIGHTS: Final = "the notice that weights change through {} (call kvpact_weights_changed by collective_rpc)"

USES: tuple[Use, ...] = (
    # What vLLM calls. A hook that it does not call any more would be missed silently.
    Use(
        CONNECTOR,
        "on_new_request get_num_new_matched_tokens update_state_after_alloc build_connector_meta "
        "update_connector_output request_finished has_pending_push_work reset_cache shutdown "
        "bind_kv_cache_manager "
        "set_xfer_handshake_metadata_pp_aware|set_xfer_handshake_metadata "
        "register_kv_caches get_handshake_metadata bind_connector_metadata start_load_kv wait_for_layer_load "
        "save_kv_layer wait_for_save get_transfer_results get_block_ids_with_load_errors "
        "build_connector_worker_meta",
        is_hook=True,
    ),
    Use(f"{BASE}:SupportsHMA", "request_finished_all_groups", when=_has_several_groups, is_hook=True),
    Use(
        CONNECTOR,
        "get_kv_connector_stats build_kv_connector_stats build_prom_metrics",
        without="kvpact's metrics on vLLM's endpoint",
        is_hook=True,
    ),
    Use(CONNECTOR, "get_required_kvcache_layout", without='kv_layout="blocks"', is_hook=True),
    Use(CONNECTOR, "take_events(0)", without="KV events", when=_publishes_events),
    # What is inherited, and what is sent and returned.
    Use(CONNECTOR, "_get_connector_metadata _vllm_config _kv_transfer_config"),
    Use(
        f"{BASE}:",
        "KVConnectorMetadata KVConnectorHandshakeMetadata KVConnectorWorkerMetadata KVConnectorRole SupportsHMA",
    ),
    Use(f"{BASE}:KVConnectorRole", "SCHEDULER WORKER"),
    Use(f"{BASE}:KVConnectorWorkerMetadata", "aggregate"),
    Use("vllm.distributed.kv_transfer.kv_connector.v1.metrics:", "KVConnectorStats KVConnectorPromMetrics"),
    Use(RESULTS, "finished_recving failed_recving"),
    Use("vllm.v1.outputs:KVConnectorOutput", "kv_connector_worker_meta invalid_block_ids failed_recving"),
    # The steps, and the requests.
    Use(
        f"{OUTPUT}:SchedulerOutput",
        "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens finished_req_ids preempted_req_ids "
        "kv_connector_metadata",
    ),
    Use(f"{OUTPUT}:SchedulerOutput", "kv_connector_block_state", when=_has_states),
    Use(f"{OUTPUT}:KVConnectorBlockState", "boundary_state_offloads", when=_has_states),
    Use(
        "vllm.v1.request:Request",
        "request_id all_token_ids num_computed_tokens num_preemptions prefill_stats skip_reading_prefix_cache "
        "mm_features lora_request cache_salt prompt_embeds prompt_is_token_ids pooling_params status is_finished(0)",
    ),
    Use(
        "vllm.v1.request:RequestStatus",
        "WAITING WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR PREEMPTED",
        without="the list of waiting requests of kvpact.vllm.scheduler_context",
    ),
    Use(
        "vllm.v1.metrics.stats:PrefillStats",
        "num_cached_tokens num_external_cached_tokens num_computed_tokens num_cache_creation_tokens",
    ),
    Use("vllm.lora.request:LoRARequest", "lora_int_id lora_path load_inplace is_3d_lora_weight", when=_has_adapters),
    # The blocks.
    Use(MANAGER, "block_pool num_kv_cache_groups get_block_ids(1) get_blocks(1) log_stats"),
    Use("vllm.v1.core.kv_cache_manager:KVCacheBlocks", "get_block_ids(0)"),
    Use(
        "vllm.v1.core.block_pool:BlockPool",
        "blocks null_block free_block_queue touch(1) free_blocks(1) evict_blocks(1)",
    ),
    Use("vllm.v1.core.kv_cache_utils:", "get_group_id(1)"),
    Use("vllm.v1.core.kv_cache_utils:", "resolve_block_hashes(3) generate_block_hash_extra_keys(4)"),
    Use("vllm.distributed.kv_events:", "BlockStored BlockRemoved"),
    Use(MANAGER, "kv_cache_event_metadata", when=_publishes_events),
    Use("vllm.v1.core.block_pool:BlockPool", "hash_block_size cached_block_hash_to_block", when=_publishes_events),
    Use("vllm.v1.request:Request", "block_hashes", when=_publishes_events),
    Use("vllm.v1.core.kv_cache_utils:KVCacheBlock", "block_id ref_cnt block_hash is_null"),
    Use(
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue",
        "iter_blocks_after(1) remove(1) prepend_n(1)",
        without='"save": "lazy", and blocks of windows that leave the engine first',
    ),
    Use(f"{SPECS}:KVCacheConfig", "num_blocks kv_cache_groups"),
    Use(f"{SPECS}:KVCacheConfig", "cache_hit_alignment_tokens", when=_has_several_groups),
    Use(f"{SPECS}:KVCacheConfig", "kv_tp_replicas", when=_has_latents),
    Use(f"{SPECS}:KVCacheGroupSpec", "layer_names kv_cache_spec is_eagle_group enable_kv_transfer host_resident"),
    Use(f"{SPECS}:AttentionSpec", "block_size num_kv_heads head_size dtype page_size_bytes"),
    Use(f"{SPECS}:SlidingWindowSpec", "sliding_window extra_retained_tokens", when=_has_several_groups),
    Use(f"{SPECS}:SlidingWindowMLASpec", "bounded_replay", when=_has_several_groups),
    Use(f"{SPECS}:MambaSpec", "shapes dtypes mamba_type mamba_cache_mode", when=_has_states),
    # The settings on which promises depend.
    Use(
        "vllm.config:VllmConfig",
        "kv_transfer_config cache_config model_config parallel_config scheduler_config lora_config load_config "
        "compilation_config speculative_config ec_transfer_config kv_events_config",
    ),
    Use("vllm.config:KVTransferConfig", "kv_role kv_load_failure_policy kv_connector_extra_config engine_id"),
    Use("vllm.config:CacheConfig", "block_size cache_dtype enable_prefix_caching"),
    Use(
        "vllm.config:ParallelConfig",
        "tensor_parallel_size pipeline_parallel_size decode_context_parallel_size prefill_context_parallel_size "
        "worker_cls",
    ),
    Use("vllm.config:ParallelConfig", "data_parallel_index", when=_has_several_engines),
    Use(
        "vllm.config:ParallelConfig", "enable_eplb", without="telling experts that move between ranks from new weights"
    ),
    Use("vllm.config:ModelConfig", "model model_weights dtype quantization hf_config enable_sleep_mode"),
    Use("vllm.config:SchedulerConfig", "policy"),
    Use("vllm.config:SpeculativeConfig", "use_eagle(0) draft_model_config"),
    Use("vllm.config:LoRAConfig", "enable_tower_connector_lora", when=_encodes_with_adapters),
    Use("vllm.config:KernelConfig", "linear_backend moe_backend", when=_is_quantized),
    # The forward pass.
    Use("vllm.forward_context:ForwardContext", "attn_metadata cudagraph_runtime_mode"),
    Use(
        f"{LAYERS}.attention.attention:Attention",
        "kv_cache_dtype get_attn_backend(0)",
        without="sharing with other engines",
        in_workers=True,
    ),
    Use(
        f"{LAYERS}.attention.attention:set_default_quant_scales",
        "_q_scale_float _k_scale_float _v_scale_float",
        when=_has_quantized_kv,
        in_workers=True,
    ),
    Use("vllm.distributed.parallel_state:", "get_tp_group(0) get_pp_group(0)"),
    Use("vllm.distributed.kv_transfer:", "get_kv_transfer_group(0) has_kv_transfer_group(0)"),
    Use(f"{LAYERS}.rotary_embedding:", "_ROPE_DICT", without="sharing with other engines", in_workers=True),
    *(
        Use(worker, names, without=without, when=_has_our_worker, in_workers=True)
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
