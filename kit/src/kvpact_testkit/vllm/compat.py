"""vLLM's configurations, requests, schedulers and ranks, made without a model or device, on releases 0.30 to 0.33.

Owns the driver's objects of vLLM. Decides nothing.
"""

from __future__ import annotations

import atexit
import copy
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvpact.identity.groups import GroupKind
from kvpact.vllm.step_hook import StepHook, hook_of
from kvpact_testkit.device.played import PlayedDevice
from kvpact_testkit.vllm.model_groups import (
    LayerGroup,
    group_config,
    group_of_layers,
    layer_names,
    layers_of_worker,
    plan_of,
)
from kvpact_testkit.vllm.rank_group import RankGroup
from kvpact_testkit.vllm.real_models import RealModel


def _choose_platform() -> None:
    """Make vLLM choose the CPU and a quiet log, once; child processes do not inherit the settings."""
    defaults = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
    ours = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        from vllm.platforms import current_platform

        logging.getLogger(__name__).debug("vLLM runs on %s", current_platform.device_type)
    finally:
        for name in ours:
            os.environ.pop(name, None)


_choose_platform()

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
HEADS = 2
"""KV heads of the simulated model; divided over the ranks."""
HEAD_SIZE = 16
"""Elements of a head's key, two bytes each; keys and values are side by side."""
ATTENTION_HEADS = 4
"""Heads of the simulated model that ask; as many as there are ranks, if those are more."""
MAX_MODEL_LEN = 8192
"""Tokens of the longest request."""
REAL_MODEL_LEN = 2 * MAX_MODEL_LEN
"""Tokens of the longest request of a real model, whose windows and chunks are longer."""
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": ATTENTION_HEADS,
    "num_key_value_heads": HEADS,
    "num_hidden_layers": 2,
    "vocab_size": 32_000,
    "max_position_embeddings": REAL_MODEL_LEN,
    "torch_dtype": "float16",
}
"""`config.json` of the simulated model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """A scenario's engine; sizes in blocks, tokens or requests as named."""

    num_blocks: int = 65
    """KV blocks, of which vLLM keeps one for itself."""
    block_size: int = 16
    """Tokens in a block."""
    layers: int = 2
    heads: int = HEADS
    """KV heads of the model; a rank has its share of them, or one."""
    head_size: int = HEAD_SIZE
    """Elements of a head's key; with `latent`, of a token in all."""
    latent: bool = False
    """Keys and values are one latent vector, which every rank has whole."""
    kv_layout: str = ""
    """How the layers lie in memory: see `PageShape.layout`."""
    device: Callable[[int], PlayedDevice] | None = None
    """Rank -> the device on which its KV memory is, and that the connector opens; None: in the process."""
    ranks: int = 1
    """Tensor-parallel ranks of each stage, all in this process."""
    stages: int = 1
    """Pipeline stages, each with its own layers; if the layers do not divide evenly, the first stages have one more."""
    max_num_seqs: int = 16
    """Requests that run at once."""
    token_budget: int = 2048
    """Tokens of one step."""
    workers_room: int = 0
    """Tokens for which the workers have room in one step, if that is more."""
    chunked_prefill: bool = True
    chunk: int = 0
    """Tokens of one request in one step, while others wait; 0 means no limit."""
    by_priority: bool = False
    """Schedule waiting requests by priority instead of in order of arrival."""
    overlap: bool = False
    """Schedule a step before the output of the last one is known, as GPU engines do."""
    draft_tokens: int = 0
    """Tokens that a draft model adds to each decode step."""
    accepted_drafts: int = 0
    """Percent of the drafts that are what the model samples."""
    draft_method: str = "ngram"
    """vLLM's name for what makes the drafts, "ngram" or "mtp"."""
    retention: int | None = None
    """vLLM's `prefix_cache_retention_interval`, in tokens, of made-up models: None keeps the states at all ends of
    blocks, vLLM's default of 0 a prompt's last one and those where prompts part."""
    match_unit: int = 0
    """vLLM's `prefix_match_unit` of made-up models: each hit in its own cache is a multiple of so many tokens; 0: of a
    block."""
    runner: int = 1
    """Which of vLLM's model runners is played: see `runners.py`."""
    adapters: int = 0
    """LoRA adapters that run at once; 0 turns LoRA off."""
    kv_events: bool = False
    """vLLM publishes KV events, to nobody: `Observed.events` has them."""
    failure_policy: str = "recompute"
    """What vLLM does with a request whose load failed: "recompute" or "fail"."""
    scheduler: str = ""
    """vLLM's `scheduler_cls`, such as "kvpact.vllm.scheduler.pact_scheduler"; by default vLLM's own."""
    load_format: str = "dummy"
    """vLLM's setting for loading the model's weights, of which there are none."""
    unhooked_layers: int = 0
    """How many of the last layers have an attention of their own, which does not ask for loads (H113)."""
    groups: tuple[LayerGroup, ...] = ()
    """The model's KV cache groups, on one pipeline stage; empty for one with `layers` layers of full attention."""
    model: RealModel | None = None
    """A real model on one rank, instead of all that says what the layers are; `block_size` is then the model's."""

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """All groups, in vLLM's order, which is also that of their layers."""
        return self.groups or (LayerGroup(layers=self.layers),)

    @property
    def model_layout(self) -> str:
        """How the layers lie in memory."""
        return self.kv_layout or ("LBNHC" if self.model else "LBHNC")

    @property
    def rank_heads(self) -> int:
        """KV heads on each rank."""
        return 1 if self.latent else max(1, self.heads // self.ranks)

    @property
    def workers(self) -> int:
        """All ranks of all stages; they are numbered stage by stage."""
        return self.ranks * self.stages


def release() -> str:
    """The release of vLLM that this process imports, such as "0.32.0"."""
    import vllm

    return str(vllm.__version__).partition("+")[0]


def _model_directory(attention_heads: int) -> str:
    directory = tempfile.TemporaryDirectory(prefix="kvpact-testkit-")
    atexit.register(directory.cleanup)
    Path(directory.name, "config.json").write_text(json.dumps({**MODEL, "num_attention_heads": attention_heads}))
    return directory.name


@cache
def _model_config(attention_heads: int, max_model_len: int) -> Any:
    """One `ModelConfig` for all engines of the process: making it takes seconds."""
    from vllm.config import ModelConfig

    return ModelConfig(
        model=_model_directory(attention_heads),
        skip_tokenizer_init=True,
        dtype="float16",
        max_model_len=max_model_len,
        seed=0,
    )


def _model_of(settings: EngineSettings) -> Any:
    return _model_config(max(ATTENTION_HEADS, settings.ranks), REAL_MODEL_LEN if settings.model else MAX_MODEL_LEN)


def make_vllm_config(settings: EngineSettings, transfer: Mapping[str, Any], model: Any = None) -> Any:
    """A `VllmConfig` for an engine with the connector that `transfer` (fields of `KVTransferConfig`) names.

    Its model is `model`, a `ModelConfig`, by default `MODEL`.
    """
    from vllm import config

    model = model or _model_of(settings)
    vllm_config = config.VllmConfig(
        model_config=model,
        load_config=config.LoadConfig(load_format=settings.load_format),
        device_config=config.DeviceConfig(device="cpu"),
        cache_config=config.CacheConfig(block_size=settings.block_size, enable_prefix_caching=True),
        parallel_config=config.ParallelConfig(
            tensor_parallel_size=settings.ranks,
            pipeline_parallel_size=settings.stages,
            distributed_executor_backend="mp" if settings.workers > 1 else "uni",
        ),
        scheduler_config=config.SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.workers_room or settings.token_budget,
            max_num_scheduled_tokens=settings.token_budget if settings.workers_room else None,
            max_model_len=model.max_model_len if settings.chunked_prefill else settings.token_budget,
            enable_chunked_prefill=settings.chunked_prefill,
            long_prefill_token_threshold=settings.chunk,
            is_encoder_decoder=False,
            policy="priority" if settings.by_priority else "fcfs",
            scheduler_cls=settings.scheduler or None,
        ),
        lora_config=config.LoRAConfig(max_loras=settings.adapters, max_lora_rank=8) if settings.adapters else None,
        speculative_config=_draft_config(settings),
        kv_events_config=config.KVEventsConfig(settings.kv_events, "null"),
        kv_transfer_config=config.KVTransferConfig(
            **{"kv_role": "kv_both", "kv_load_failure_policy": settings.failure_policy, **transfer}
        ),
    )
    # The CPU platform forces this off, because it has one stream; the simulated engine has more.
    vllm_config.scheduler_config.async_scheduling = settings.overlap
    vllm_config.cache_config.num_gpu_blocks = settings.num_blocks
    vllm_config.cache_config.prefix_match_unit = settings.match_unit or None
    if any(group.kind is GroupKind.STATE for group in settings.groups) or (settings.model and settings.model.states):
        vllm_config.cache_config.mamba_cache_mode = "align"
    vllm_config.cache_config.kv_cache_layout = settings.model_layout
    return vllm_config


def _draft_config(settings: EngineSettings) -> Any:
    if not settings.draft_tokens:
        return None
    from vllm.config import ParallelConfig, SpeculativeConfig

    speculative = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=settings.draft_tokens,
        prompt_lookup_max=2,
        prompt_lookup_min=1,
        target_model_config=_model_of(settings),
        target_parallel_config=ParallelConfig(),
    )
    speculative.method = settings.draft_method  # its own check would want a draft module's weights
    return speculative


@contextmanager
def runs_runner(number: int) -> Iterator[None]:
    """Within, vLLM's configurations say that the engine runs its first or second model runner."""
    before = os.environ.get(RUNNER_VARIABLE)
    os.environ[RUNNER_VARIABLE] = str(number - 1)
    try:
        yield
    finally:
        del os.environ[RUNNER_VARIABLE]
        if before is not None:
            os.environ[RUNNER_VARIABLE] = before


def make_kv_cache_config(settings: EngineSettings, worker: int | None = None) -> Any:
    """The model's groups: with all of their layers, or with those of one worker."""
    if settings.model is not None:
        return copy.deepcopy(plan_of(settings).config)
    names = layer_names(settings) if worker is None else layers_of_worker(settings, worker)
    numbers, groups = group_of_layers(settings), settings.layer_groups
    members = [(group, [name for name in names if numbers[name] == number]) for number, group in enumerate(groups)]
    config = group_config(settings, members)
    if settings.latent and hasattr(config, "kv_tp_replicas"):
        config.kv_tp_replicas = settings.ranks
    return config


def make_scheduler(
    settings: EngineSettings,
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    log_stats: bool = False,
) -> Any:
    """The scheduler that the configuration names, by default vLLM's own; it builds the connector's scheduler half."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.structured_output import StructuredOutputManager

    with set_current_vllm_config(vllm_config):
        return vllm_config.scheduler_config.get_scheduler_cls()(
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(vllm_config),
            **block_sizes(settings),
            log_stats=log_stats,
        )


def block_sizes(settings: EngineSettings) -> dict[str, int]:
    """The scheduler's unit, and that of the hashes of a request's blocks, in tokens."""
    if settings.model is None:
        return {"block_size": settings.block_size, "hash_block_size": settings.match_unit or settings.block_size}
    plan = plan_of(settings)
    return {"block_size": plan.scheduler_block_size, "hash_block_size": plan.hash_block_size}


@cache
def block_hasher(block_size: int) -> Any:
    """vLLM's hasher of a request's blocks."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    return get_request_block_hasher(block_size, function)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """A scenario's request."""

    prompt: Sequence[int]
    max_tokens: int = 2
    """Output tokens, all of which are made."""
    priority: int = 0
    """Lower goes first, if the engine schedules by priority."""
    salt: str | None = None
    """The tenant: requests with different salts share nothing."""
    prompt_logprobs: bool = False
    """Ask for the prompt's log-probabilities, for which vLLM must compute the prompt itself."""
    adapter: str | None = None
    """Directory of a LoRA adapter."""


def make_request(request_id: str, wanted: RequestSettings, block_size: int) -> Any:
    """vLLM's own request."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(
        max_tokens=wanted.max_tokens, ignore_eos=True, prompt_logprobs=1 if wanted.prompt_logprobs else None
    )
    return Request(
        request_id,
        list(wanted.prompt),
        sampling,
        None,
        priority=wanted.priority,
        cache_salt=wanted.salt,
        lora_request=_adapter_request(wanted.adapter) if wanted.adapter else None,
        block_hasher=block_hasher(block_size),
    )


def _adapter_request(directory: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(Path(directory).name, 1 + int.from_bytes(directory.encode(), "big") % 997, directory)


# Ranks


@contextmanager
def acting_as(settings: EngineSettings, worker: int, connector: Any = None) -> Iterator[None]:
    """Within, vLLM's globals describe this process as that worker, with that worker half of the connector."""
    from vllm.distributed import parallel_state
    from vllm.distributed.kv_transfer import kv_transfer_state

    stage, rank = divmod(worker, settings.ranks)
    ours = {
        (parallel_state, "_TP"): RankGroup(rank, settings.ranks),
        (parallel_state, "_PP"): RankGroup(stage, settings.stages),
        (parallel_state, "_DCP"): RankGroup(0, 1),
        (parallel_state, "_PCP"): RankGroup(0, 1),
        (parallel_state, "_WORLD"): RankGroup(worker, settings.workers),
        (kv_transfer_state, "_KV_CONNECTOR_AGENT"): connector,
    }
    before = {(module, name): getattr(module, name, None) for module, name in ours}
    for (module, name), value in ours.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


def make_worker_connector(settings: EngineSettings, vllm_config: Any, worker: int) -> Any:
    """The connector's worker half, as the worker's own process would build it."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    own = copy.copy(vllm_config)
    own.parallel_config = copy.copy(vllm_config.parallel_config)
    own.parallel_config.rank = worker
    with acting_as(settings, worker), set_current_vllm_config(own):
        return KVConnectorFactory.create_connector(
            config=own, role=KVConnectorRole.WORKER, kv_cache_config=make_kv_cache_config(settings, worker)
        )


def step_hook_of(connector: Any, vllm_config: Any) -> StepHook | None:
    """The hook before each step, as `kvpact.vllm.worker` binds it, for a worker whose connector has one.

    Ranks played in one thread find the same.
    """
    if hook_of(connector) is None:
        return None
    from kvpact.vllm.scheduler import counts_step_hits

    hook = StepHook(connector, new_requests_only=False, minimum=None)
    hook.bound()
    if counts_step_hits(vllm_config):
        hook.report_hits()
    return hook


def shake_hands(settings: EngineSettings, scheduler_connector: Any, worker_connectors: Sequence[Any]) -> None:
    """Exchange handshake metadata, as `EngineCore` does after its workers have started."""
    hellos = {}
    for worker, connector in enumerate(worker_connectors):
        with acting_as(settings, worker, connector):
            if (hello := connector.get_handshake_metadata()) is not None:
                hellos[divmod(worker, settings.ranks)] = hello
    if hellos:
        scheduler_connector.set_xfer_handshake_metadata_pp_aware(hellos)


def make_aggregator(scheduler_connector: Any, world_size: int) -> Any:
    """vLLM's own combination of the ranks' outputs."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

    return KVOutputAggregator.from_connector(scheduler_connector, world_size)
