"""vLLM's KV cache groups as kvpact's: what each one keeps of a prefix, and which models cannot be served.

Owns the meaning of vLLM's KV cache specifications, by the name of their class, and the digest under which a group's
blocks are known. A specification that is not named here is refused: docs/vllm-hybrid.md lists them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

from kvpact.config import KvpactConfig
from kvpact.contract import ExternalCache
from kvpact.errors import ConfigError
from kvpact.identity.groups import GroupKind, GroupSet, KVCacheGroup
from kvpact.vllm.compat.configuration import drops_draft_blocks, hit_alignment
from kvpact.vllm.compat.group_specs import (
    content_of,
    is_computed_again,
    layer_specs,
    window_reach,
)

FORMAT = "1"
"""Version of a group's digest."""

Span = Callable[[Any], int]


def _no_span(spec: Any) -> int:
    return 0


KINDS: dict[str, tuple[GroupKind, Span]] = {
    # One of these with a window or a chunk of its own has it from vLLM's hybrid manager being off: it keeps all blocks.
    "FullAttentionSpec": (GroupKind.FULL, _no_span),
    "TQFullAttentionSpec": (GroupKind.FULL, _no_span),
    "MLAAttentionSpec": (GroupKind.FULL, _no_span),
    "SlidingWindowSpec": (GroupKind.WINDOW, window_reach),
    "SlidingWindowMLASpec": (GroupKind.WINDOW, window_reach),
    "ChunkedLocalAttentionSpec": (GroupKind.CHUNK, lambda spec: int(spec.attention_chunk_size)),
    "MambaSpec": (GroupKind.STATE, _no_span),
}
"""Class of a specification -> what its layers read of earlier tokens, and how many tokens that reaches back."""

UNSERVED = {
    "CrossAttentionSpec": "its keys and values come from an encoder's input, which no token of the prompt names",
    "EncoderOnlyAttentionSpec": "an encoder keeps nothing that a later request could read",
    "SinkFullAttentionSpec": "its sink blocks belong to no request",
    "RSWASpec": "it drops blocks from the middle of a prefix",
    "HiddenStateCacheSpec": "it holds hidden states that another connector takes out",
    "CircularBufferSpec": "its one block a request is overwritten all the time",
    "KpoolTailSpec": "vLLM itself does not keep it for other requests",
    "HiSparseHotSpec": "it mirrors blocks that lie in host memory; leave HiSparse off",
    "HiSparseResidentSpec": "it mirrors blocks that lie in host memory; leave HiSparse off",
}
"""Class of a specification -> why its blocks are not stored."""


STATES_AND_DRAFTS = (
    "the model has state-space layers, and with speculative decoding pipeline stages before the last put no state into "
    "its block by the time it is saved: leave --pipeline-parallel-size or --speculative-config out"
)
STATES_IN_MODE = (
    'the model keeps its states in mode "{}", where no block holds the state at its end: add --enable-prefix-caching '
    "and, before vLLM 0.33, --mamba-cache-mode align"
)
"""Why some models with state-space layers are refused."""


@dataclass(frozen=True, slots=True)
class EngineGroups:
    """An engine's groups, as vLLM numbers them, and the layers of each."""

    groups: GroupSet
    layers: tuple[tuple[str, ...], ...]
    unserved: str = ""
    """Why no request can be cached, and what to do; "" if some can."""

    @property
    def several(self) -> bool:
        """True if there is more to a request than the one block table of all layers."""
        return len(self.layers) > 1 or self.groups.chain is None

    @property
    def are_served(self) -> bool:
        """True if some request can be cached."""
        return not self.unserved

    @property
    def digest(self) -> str:
        """For the namespace: equal for equal groups in the same order."""
        return blake3(b"".join(group.digest for group in self.groups.groups)).hexdigest()[:32]


def engine_groups(vllm_config: Any, kv_cache_config: Any) -> EngineGroups:
    """The groups of an engine. Raises ConfigError, with the remedy, for a model that cannot be served."""
    members = kv_cache_config.kv_cache_groups
    if not members:
        raise ConfigError("the model keeps no KV cache, so there is nothing to store: leave --kv-transfer-config out")
    specs = [layer_specs(one.kv_cache_spec) for one in members]
    dropping = _dropping(vllm_config, members, specs)
    groups = tuple(
        _group(one, own, drops_last=number in dropping)
        for number, (one, own) in enumerate(zip(members, specs, strict=True))
    )
    if any(group.kind is GroupKind.STATE for group in groups):
        refuse_states(vllm_config)
    layers = tuple(tuple(one.layer_names) for one in members)
    found = EngineGroups(GroupSet(groups, hit_alignment(kv_cache_config)), layers)
    return replace(found, unserved=_why_unserved(vllm_config.model_config, found))


def refuse_states(vllm_config: Any) -> None:
    """Raise ConfigError for a model with states whose blocks do not have them in time."""
    if vllm_config.speculative_config is not None and vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ConfigError(STATES_AND_DRAFTS)


def _why_unserved(model: Any, groups: EngineGroups) -> str:
    """Why no request of the engine can be cached, and what to do; "" if some can."""
    if model.runner_type == "pooling":
        return "requests of a pooling model are never cached: start it with vllm serve, without kvpact"
    longest = int(model.max_model_len)
    least = groups.groups.alignment
    if longest > least:
        return ""
    return (
        f"--max-model-len {longest} lets no prompt be longer than a block, and what is cached is whole blocks of "
        f"{least} tokens: raise it, or set a smaller --block-size"
    )


def _dropping(vllm_config: Any, members: Sequence[Any], specs: Sequence[Sequence[Any]]) -> set[int]:
    """The groups whose last block is volatile. vLLM takes all for such, if none is marked; draft models have no
    state-space layers."""
    if not drops_draft_blocks(vllm_config):
        return set()
    marked = {number for number, one in enumerate(members) if one.is_eagle_group}
    every = {number for number, own in enumerate(specs) if type(own[0]).__name__ != "MambaSpec"}
    return marked or every


def _group(member: Any, specs: Sequence[Any], *, drops_last: bool) -> KVCacheGroup:
    found = {_read(spec) for spec in specs}
    if len(found) > 1:
        shown = ", ".join(sorted(f"{kind} of {span} tokens" if span else str(kind) for kind, span in found))
        raise ConfigError(f"the layers of one KV cache group differ: {shown}; add --disable-hybrid-kv-cache-manager")
    if member.host_resident or not member.enable_kv_transfer:
        raise ConfigError(f"vLLM does not hand out the KV cache of {member.layer_names[:1]}...; leave HiSparse off")
    ((kind, span),) = found
    block_size = int(member.kv_cache_spec.block_size)
    return KVCacheGroup(kind, block_size, span, drops_last, _digest(member, specs, kind, span))


def _read(spec: Any) -> tuple[GroupKind, int]:
    name = type(spec).__name__
    if name in UNSERVED:
        raise ConfigError(
            f"KV cache of kind {name} is not supported: {UNSERVED[name]}; serve this model without kvpact"
        )
    if name not in KINDS:
        raise ConfigError(f"KV cache of kind {name} is not supported; kvpact serves {', '.join(KINDS)}")
    if is_computed_again(spec):
        raise ConfigError(
            f"the model's {name} is computed again after each hit and not kept: add --no-swa-bounded-replay"
        )
    kind, span = KINDS[name]
    if kind is GroupKind.STATE and (mode := str(spec.mamba_cache_mode)) != "align":
        raise ConfigError(STATES_IN_MODE.format(mode))
    return kind, span(spec)


def _digest(member: Any, specs: Sequence[Any], kind: GroupKind, span: int) -> bytes:
    """32 bytes over the group's layers, in order, and what a block of theirs holds; not over how many blocks exist."""
    fields = [content_of(spec) for spec in specs]
    distinct = fields if len(specs) == len(member.layer_names) else fields[:1]
    words = [FORMAT, str(kind), int(member.kv_cache_spec.block_size), span, list(member.layer_names), distinct]
    return blake3(json.dumps(words, sort_keys=True).encode()).digest()


def require_groups(cache: ExternalCache, groups: EngineGroups) -> None:
    """Raise ConfigError if the cache does not keep the blocks of all of the engine's groups."""
    if groups.several and not cache.supports_kv_cache_groups:
        raise ConfigError(
            f"the model has {len(groups.layers)} KV cache group(s), not all of full attention, and "
            f"{type(cache).__name__} keeps one: add --disable-hybrid-kv-cache-manager"
        )


def fit_to_engine(config: KvpactConfig, groups: EngineGroups, vllm_config: Any) -> KvpactConfig:
    """The settings for this engine, in which all loads are asynchronous where no step may wait for one.

    With several groups vLLM takes reports of failed requests, not of failed blocks. Under asynchronous scheduling the
    next step computes already when a load fails that this step waited for: vLLM's own scheduler drops the failed step's
    output and delivers the next one's, kvpact's class drops both (P9).
    """
    delivers_next = vllm_config.scheduler_config.async_scheduling and not _drops_output(vllm_config)
    return config.model_copy(update={"sync_load_budget": 0}) if groups.several or delivers_next else config


def _drops_output(vllm_config: Any) -> bool:
    from kvpact.vllm.scheduler import counts_step_hits  # brings vLLM's schedulers, which a worker does without

    return counts_step_hits(vllm_config)
