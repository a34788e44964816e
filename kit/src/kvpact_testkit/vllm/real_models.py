"""Real models as the driver plays them: their layers' KV cache, and the groups that the release makes of them.

Owns the shapes. All sizes of a token's or state's content are divided by one number; layers, windows, chunks and blocks
are the models' own. The groups and where they lie are the decision of vLLM's own functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from math import ceil
from types import SimpleNamespace
from typing import Any

from kvpact.identity.groups import GroupKind, KVCacheGroup

SCALE = 64
"""By which the played models' heads and states are smaller."""

KINDS = {"F": GroupKind.FULL, "L": GroupKind.FULL, "W": GroupKind.WINDOW, "C": GroupKind.CHUNK, "S": GroupKind.STATE}
"""Letter of a layer -> what it reads. L is a latent vector instead of keys and values."""

LETTERS = {
    "FullAttentionSpec": "F",
    "MLAAttentionSpec": "L",
    "SlidingWindowSpec": "W",
    "ChunkedLocalAttentionSpec": "C",
    "MambaSpec": "S",
}
"""The class of a layer's specification -> its letter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealModel:
    """A model on one rank. Sizes are tokens or elements of two bytes."""

    name: str
    layers: str
    """A letter of `KINDS` for each."""
    heads: int = 1
    head_size: int
    """Elements of a head's key, or of a whole latent vector."""
    span: int = 0
    """The window or the chunk."""
    states: tuple[tuple[int, ...], ...] = ()
    """The shapes of what a state-space layer keeps."""
    drafts: int = 0
    """Tokens that a draft module, the last layer, guesses in each step."""

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token in one layer."""
        return (2 if "L" in self.layers else 4) * self.heads * self.head_size

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one layer."""
        return sum(2 * _product(shape) for shape in self.states)

    @property
    def block_size(self) -> int:
        """vLLM's choice: with states the smallest multiple of 16 tokens whose page holds them."""
        if self.states:
            return 16 * ceil(self.state_bytes / (16 * self.token_bytes))
        return 64 if "L" in self.layers else 16

    def match(self, num_tokens: int) -> int:
        """The longest hit for a prompt of so many tokens, of which the last one is computed in any case."""
        return (num_tokens - 1) // self.block_size * self.block_size

    def scaled(self, scale: int) -> RealModel:
        """The model with heads and states that are smaller by `scale`, which must divide them."""
        states = tuple(_smaller(shape, scale) for shape in self.states)
        return replace(self, head_size=self.head_size // scale, states=states)

    def drafting(self, tokens: int) -> RealModel:
        """The model with a module of attention that guesses so many tokens. The window of a convolution, the first of
        the states, is longer by as many."""
        (width, channels), *others = self.states
        layers = self.layers + ("L" if "L" in self.layers else "F")
        return replace(self, layers=layers, states=((width + tokens, channels), *others), drafts=tokens)

    def specs(self) -> dict[str, Any]:
        """Layer -> vLLM's specification, in forward order."""
        return {f"model.layers.{number}.attn": self._spec(letter) for number, letter in enumerate(self.layers)}

    def _spec(self, letter: str) -> Any:
        import torch
        from vllm.v1 import kv_cache_interface as vllm

        shape: dict[str, Any] = {
            "block_size": self.block_size,
            "num_kv_heads": self.heads,
            "head_size": self.head_size,
            "dtype": torch.bfloat16,
        }
        match letter:
            case "L":
                return vllm.MLAAttentionSpec(**shape)
            case "W":
                return vllm.SlidingWindowSpec(**shape, sliding_window=self.span)
            case "C":
                return vllm.ChunkedLocalAttentionSpec(**shape, attention_chunk_size=self.span)
            case "S":
                return vllm.MambaSpec(
                    block_size=self.block_size,
                    shapes=self.states,
                    dtypes=(torch.bfloat16,) * len(self.states),
                    page_size_padded=self.block_size * self.token_bytes,
                    mamba_cache_mode="align",
                    num_speculative_blocks=self.drafts,
                )
        return vllm.FullAttentionSpec(**shape)


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _smaller(shape: tuple[int, ...], scale: int) -> tuple[int, ...]:
    """`shape` with its largest axis divided by `scale`."""
    axis = max(range(len(shape)), key=lambda one: shape[one] if shape[one] % scale == 0 else 0)
    return tuple(size // scale if one == axis else size for one, size in enumerate(shape))


MODELS = {
    model.name: model
    for model in (
        RealModel(name="qwen3-next", layers="SSSF" * 12, heads=2, head_size=256, states=((3, 8192), (32, 128, 128))),
        RealModel(name="jamba", layers="SSSSFSSS" * 4, heads=8, head_size=128, states=((3, 8192), (8192, 16))),
        RealModel(name="deepseek-v3", layers="L" * 61, head_size=576),
        RealModel(name="deepseek-v2-lite", layers="L" * 27, head_size=576),
        RealModel(name="gemma-3-27b", layers=("WWWWWF" * 11)[:62], heads=16, head_size=128, span=1024),
        RealModel(name="gemma-3-default", layers=("WWWWWF" * 5)[:26], heads=4, head_size=256, span=4096),
        RealModel(name="gpt-oss-20b", layers="WF" * 12, heads=8, head_size=64, span=128),
        RealModel(name="gpt-oss-120b", layers="WF" * 18, heads=8, head_size=64, span=128),
        RealModel(name="llama-4-scout", layers="CCCF" * 12, heads=8, head_size=128, span=8192),
    )
}
"""By name; as frozen in tests/data/models, whole and on one rank."""

DRAFTING = {
    model.name: model.drafting(2)
    for model in (
        MODELS["qwen3-next"],
        RealModel(name="qwen3.5-35b", layers="SSSF" * 10, heads=2, head_size=256, states=((3, 8192), (32, 128, 128))),
        RealModel(name="nemotron-h-8b", layers="SSSSFSSSSSFSSSSSFSSSSSFSSSSS", heads=8, head_size=128,
                  states=((3, 10240), (128, 64, 128))),
        RealModel(name="kimi-linear", layers="SSSL" * 6 + "SSL", head_size=576, states=((3, 12288), (32, 128, 128))),
        MODELS["jamba"],
    )
}  # fmt: skip
"""By name, with a draft module, which Jamba does not have; states in elements of two bytes."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What vLLM makes of a model: its configuration of the KV cache, and the sizes that the engine derives from it."""

    config: Any
    scheduler_block_size: int
    hash_block_size: int
    groups: tuple[KVCacheGroup, ...]
    """What the layers of each group read."""
    group_of: Mapping[str, int]
    """Layer -> the number of its group, in forward order of the layers."""

    @property
    def block_bytes(self) -> int:
        """Bytes of the largest group's pages of one block."""
        return max(
            len(group.layer_names) * int(group.kv_cache_spec.page_size_bytes) for group in self.config.kv_cache_groups
        )


def planned(model: RealModel, num_blocks: int, layout: str) -> ModelPlan:
    """What the release makes of `model` with so many blocks, laid out as `layout` says."""
    plans, settings = _plans(), _settings(model, num_blocks, layout)
    specs = model.specs()
    groups = plans.get_kv_cache_groups(settings, specs)
    config = plans.get_kv_cache_config_from_groups(settings, groups, 1 << 50)
    utils = import_module("vllm.v1.core.kv_cache_utils")
    scheduler, hashes = utils.resolve_kv_cache_block_sizes(config, settings)
    if hasattr(config, "cache_hit_alignment_tokens"):
        config.hash_block_size = hashes
        config.cache_hit_alignment_tokens = utils.resolve_cache_hit_alignment_tokens(
            config, settings, scheduler, hashes
        )
    of_layers = {name: number for number, group in enumerate(groups) for name in group.layer_names}
    read = tuple(_read(model, specs[group.layer_names[0]], group) for group in groups)
    return ModelPlan(config, scheduler, hashes, read, {name: of_layers[name] for name in specs})


def _read(model: RealModel, spec: Any, group: Any) -> KVCacheGroup:
    kind = KINDS[LETTERS[type(spec).__name__]]
    span = model.span if kind.has_span else 0
    return KVCacheGroup(kind, int(group.kv_cache_spec.block_size), span)


@cache
def _plans() -> Any:
    """The module in which the release plans the KV cache."""
    try:
        return import_module("vllm.v1.core.kv_cache_planning")
    except ImportError:
        return import_module("vllm.v1.core.kv_cache_utils")


def _drafting(model: RealModel) -> Any:
    """What vLLM's plans read of the configuration of drafts."""
    if not model.drafts:
        return None
    return SimpleNamespace(method="mtp", use_eagle=lambda: True, use_eagle_block_drop=lambda: True)


def _settings(model: RealModel, num_blocks: int, layout: str) -> Any:
    """What vLLM's plans read of its configuration, and nothing else."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: import_module("vllm.v1.kv_cache_layout").KVCacheLayout[layout],
            num_gpu_blocks_override=num_blocks,
            prefix_cache_retention_interval=None,
            block_size=model.block_size,
            enable_prefix_caching=True,
            prefix_match_unit=None,
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        attention_config=SimpleNamespace(hisparse_config=None),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
        speculative_config=_drafting(model),
        model_config=None,
    )
