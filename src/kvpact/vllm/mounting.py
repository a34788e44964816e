"""From the workers' handshakes to a mounted cache: which ranks there are, whose slots these are, and what tells engines
apart.

Owns nothing. Reads vLLM's configuration and the handshakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpact.cache.budget import StepBudget
from kvpact.cache.mounted import MountedCache
from kvpact.config import KvpactConfig
from kvpact.errors import ConfigError
from kvpact.identity.adapter_digests import AdapterDigests
from kvpact.metrics import Metrics
from kvpact.tiers.record import RecordMac
from kvpact.vllm.base_weights import base_weights
from kvpact.vllm.compat.configuration import replica_number
from kvpact.vllm.groups import EngineGroups
from kvpact.vllm.identity import engine_namespace
from kvpact.vllm.worker_identity import facts_of_slots
from kvpact.wire import WorkerHandshake


def block_size_of(vllm_config: Any, groups: EngineGroups) -> int:
    """Tokens in a block of the chain."""
    return groups.groups.block_size if groups.several else int(vllm_config.cache_config.block_size)


def require_all_ranks(vllm_config: Any, hellos: Sequence[WorkerHandshake]) -> tuple[int, list[WorkerHandshake]]:
    """The number of ranks, and their handshakes in order.

    Raises ConfigError if a rank is missing: what the others saved would count as saved by all (H40).
    """
    hellos = sorted(hellos, key=lambda hello: hello.rank)
    parallel = vllm_config.parallel_config
    ranks = int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
    present = [hello.rank for hello in hellos]
    if present != list(range(ranks)):
        raise ConfigError(
            f"the engine has {ranks} ranks; {present} have set up their memory for kvpact, see the others' log"
        )
    return ranks, hellos


def require_hooks(config: KvpactConfig, hellos: Sequence[WorkerHandshake]) -> None:
    """Raise ConfigError if the workers are to look when a step begins, and are not asked then."""
    if config.match_at == "step" and not all(hello.step_hook for hello in hellos):
        raise ConfigError(
            'match_at="step" needs a worker that asks when a step begins: add '
            "--worker-cls kvpact.vllm.worker.KvpactWorker (MultiConnector does not pass the question on)"
        )


def require_no_restarts(config: KvpactConfig, vllm_config: Any, groups: EngineGroups) -> None:
    """Raise ConfigError if a step may rely on blocks that turn out wrong, and vLLM's own scheduler takes no word of it:
    what a step finds may not arrive; an adapter may be exchanged between a load and its use."""
    adapters = vllm_config.lora_config is not None and groups.several
    if adapters or config.match_at == "step":
        raise ConfigError(
            f"{'LoRA with several KV cache groups' if adapters else 'match_at=step'} needs a scheduler that begins "
            "requests again whose blocks turn out wrong: add --scheduler-cls kvpact.vllm.scheduler.pact_scheduler "
            "(not for diffusion models)"
        )


def mount(
    vllm_config: Any,
    config: KvpactConfig,
    hellos: Sequence[WorkerHandshake],
    groups: EngineGroups,
    adapters: AdapterDigests,
    seal: RecordMac,
    metrics: Metrics,
    budget: StepBudget,
) -> MountedCache:
    """The cache over these workers' memory. A tier that cannot be opened is left out with one message."""
    with_slots = sum(hello.slots_of is None for hello in hellos)
    return MountedCache(
        config,
        hellos,
        engine_namespace(vllm_config, facts_of_slots(hellos), len(hellos) // with_slots, groups),
        base_weights(vllm_config, config.model_id) if config.tiers else None,
        adapters,
        seal=seal,
        block_size=block_size_of(vllm_config, groups),
        metrics=metrics,
        budget=budget,
        groups=groups.groups if groups.several or groups.groups.tokens_ahead else None,
        replica=replica_number(vllm_config.parallel_config),
    )


__all__ = ["block_size_of", "mount", "require_all_ranks", "require_hooks", "require_no_restarts"]
