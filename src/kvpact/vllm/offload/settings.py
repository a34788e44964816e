"""Settings of a `PactTier`, checked, and the namespace of its blocks.

Owns what of kvpact's configuration counts here, and what two engines must have in common to share a chunk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from blake3 import blake3

from kvpact.config import KvpactConfig, load_config
from kvpact.errors import ConfigError
from kvpact.identity.keys import Namespace
from kvpact.vllm.compat.group_specs import content_of, layer_specs
from kvpact.vllm.identity import architecture_digest
from kvpact.vllm.quantization import quantization
from kvpact.vllm.worker_identity import machine

FORMAT: Final = "1"
"""Version of the layout of a chunk's row; it rises when the meaning of its bytes changes."""

COUNTED: Final = frozenset(
    {
        "hints",
        "io_threads",
        "model_id",
        "prepare_deadline",
        "record_key_file",
        "require_tiers",
        "share_drawn_epochs",
        "shutdown_timeout",
        "weights_version",
        "write_queue",
    }
)
"""The keys of kvpact's configuration that a tier has; others are vLLM's own here, or have no meaning."""

SHARED_HASHES: Final = ("sha256", "sha256_cbor")
"""The algorithms whose hashes name a block's tokens in every process."""

BY_NAME: Final = "by-name"


class Beside(NamedTuple):
    """Settings of a tier that kvpact's configuration does not have."""

    adapters: str | None = None
    """`BY_NAME`, or None: an engine with LoRA is refused."""
    locality: str | None = None
    """The tier's name in KV events and filters of requests; None: that of its kind."""
    events: bool = False
    """True if it reports stored blocks, where the engine's KV events are on."""


def tier_settings(given: Mapping[str, Any]) -> tuple[Beside, KvpactConfig]:
    """The settings of one tier, and its configuration with exactly one URL; the rest is of kvpact's other sources.

    Without `url` it is tier `number` of those sources, so that no secret need stand on vLLM's command line.

    Raises ConfigError.
    """
    given = dict(given)
    url = given.pop("url", None)
    number = given.pop("number", 0)
    beside = Beside(
        given.pop("adapters", None), given.pop("locality", None), bool(given.pop("enable_kv_events", False))
    )
    if beside.locality not in (None, "LOCAL", "REMOTE"):
        raise ConfigError(f'a PactTier\'s "locality" is {beside.locality!r}; it is "LOCAL" or "REMOTE"')
    if unknown := sorted(set(given) - COUNTED):
        raise ConfigError(
            f"a PactTier has no setting {unknown[0]!r}; it has url, number, adapters, locality, "
            f"enable_kv_events, {', '.join(sorted(COUNTED))}: "
            'host memory and what is saved are vLLM\'s own ("cpu_bytes_to_use" beside "secondary_tiers")'
        )
    if url is not None:
        return beside, load_config({**given, "tiers": [url]}, os.environ, extra_source="a PactTier")
    config = load_config(given, os.environ, extra_source="a PactTier")
    if not isinstance(number, int) or not 0 <= number < len(config.tiers):
        raise ConfigError(
            f'a PactTier needs a "url", such as "disk:///var/cache/kvpact?capacity=100GiB", or the tier\'s "number" in '
            f"KVPACT_TIERS, which names {len(config.tiers)}"
        )
    return beside, config.model_copy(update={"tiers": (config.tiers[number],)})


def engine_of(spec: Any) -> Any:
    """The engine's `VllmConfig`. vLLM does not give it to its specs; kvpact's plug-in keeps it with theirs.

    Raises ConfigError where the plug-in did not run.
    """
    try:
        return spec.config.kvpact_engine
    except AttributeError:
        raise ConfigError(
            "a PactTier needs kvpact's plug-in of vLLM, which VLLM_PLUGINS must not leave out: unset it, or add kvpact"
        ) from None


def refuse_unnameable(vllm_config: Any, adapters: str | None) -> None:
    """Raise ConfigError for an engine whose chunks cannot be distinguished from those of another."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in SHARED_HASHES:
        raise ConfigError(
            "a PactTier needs block hashes that are equal in every process, and those of --prefix-caching-hash-algo "
            f"{algorithm} begin with a random number: choose {SHARED_HASHES[0]}"
        )
    if vllm_config.lora_config is not None and adapters != BY_NAME:
        raise ConfigError(
            "vLLM's offloading names an adapter by its name and path, whatever weights are there: start without LoRA, "
            f'set "adapters": "{BY_NAME}" for the PactTier if a name always has the same weights, or use PactConnector'
        )


def offload_namespace(vllm_config: Any, spec: Any, row_bytes: int) -> Namespace:
    """Everything two engines must agree on to share chunks, except the weights.

    The scheduler's process sees no kernel and no layer: vLLM's release and its settings of attention stand for them.
    Of its two claims that ranks' number decides nothing, that of the canonical layout is true; in the direct one each
    rank's layers follow one another, so that other ranks would read other layers (H33).
    """
    import vllm

    config = spec.config
    model = vllm_config.model_config
    parallel = config.parallel
    sizes = (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
    members = config.kvpact_kv_cache.kv_cache_groups
    of_any_size = config.canonical_layout and parallel.is_parallelism_agnostic
    groups = [
        [group.group_id, group.tokens_per_block, group.layer_names, _contents(members[group.group_id], of_any_size)]
        for group in config.groups
    ]
    return Namespace(
        {
            "engine": "vllm-offloading",
            "format": FORMAT,
            "release": ".".join(str(vllm.__version__).split(".")[:2]),
            "machine": machine(),
            "attention": str(vllm_config.attention_config.compute_hash()),
            "architecture": architecture_digest(model.hf_config),
            "max_model_len": str(model.max_model_len),
            "dtype": str(model.dtype),
            "kv_dtype": str(vllm_config.cache_config.cache_dtype),
            "quantization": quantization(vllm_config),
            "layout": f"{config.kv_cache_layout}{' canonical' * config.canonical_layout}",
            "parallel": "any" if of_any_size else " ".join(map(str, sizes)),
            "copies": "one" if spec.replicated_layout else "each",
            "tokens_per_hash": str(config.cache.tokens_per_hash),
            "blocks_per_chunk": str(config.cache.blocks_per_chunk),
            "row_bytes": str(row_bytes),
            "groups": f"{len(groups)}, {blake3(json.dumps(groups).encode()).hexdigest()[:32]}",
        },
        str(model.served_model_name),
    )


def _contents(group: Any, of_any_size: bool) -> list[dict[str, str]]:
    """Content of a block of a group's layers, such as the shapes of states, which grow with the number of drafts;
    without a rank's heads where ranks of any number share them."""
    left_out = {"num_kv_heads"} if of_any_size else set()
    found = [{"kind": type(spec).__name__, **content_of(spec)} for spec in layer_specs(group.kv_cache_spec)]
    return [{name: value for name, value in one.items() if name not in left_out} for one in found]
