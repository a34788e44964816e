"""Checks of an engine's settings, with one clear message per refusal.

Owns the settings under which kvpact's promises hold. A wrong configuration is refused when vLLM has made it
(`check_configuration`, called by `kvpact.vllm.plugin`), the rest when the weights are loaded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, Final

from kvpact.config import KvpactConfig, check_cache, find_factory, load_config
from kvpact.errors import ConfigError
from kvpact.identity.groups import GroupKind
from kvpact.identity.tenants import load_tenants
from kvpact.memory.limits import require_possible
from kvpact.metrics import MissReason, StartVerdict, series
from kvpact.tiers.registry import load_seal
from kvpact.vllm.base_weights import base_weights
from kvpact.vllm.compat.platforms import BASE_WORKERS, KVPACT_WORKER, OUR_CLASSES, classes_for
from kvpact.vllm.compat.releases import is_known, refuse_older, refuse_unread
from kvpact.vllm.compat.scheduler import COUNTS_HELD_BLOCKS, TELLS_OF_SLEEP
from kvpact.vllm.groups import STATES_IN_MODE, UNSERVED, EngineGroups, engine_groups, refuse_states
from kvpact.wire import WorkerHandshake

logger = logging.getLogger(__name__)

FALLS_WITHOUT: Final = {
    "--worker-cls": (
        "the weights may change unseen and old keys and values be served for new weights (P13), unless each update "
        "begins with a pause with clear_cache=True or reset_prefix_cache(reset_connector=True) and ends with a resume, "
        "or is announced through --worker-extension-cls kvpact.vllm.worker.WeightsExtension"
    ),
    "--scheduler-cls": (
        "vLLM's counts of external hits hold loads that failed, and a match that it does not take ends late and "
        "without its reason (exits)"
    ),
}
"""Option of `OUR_CLASSES` -> what an engine without that class does not keep."""

NO_STEP_HOOK: Final = (
    'match_at="step" needs a worker that asks when a step begins: add --worker-cls kvpact.vllm.worker.KvpactWorker'
)
NO_STEP_BESIDE: Final = (
    'match_at="step" makes steps wait for loads, and {} may store what a step computes before vLLM learns that a load '
    'failed: set match_at to "schedule", or name PactConnector alone'
)
NO_RESTARTS: Final = (
    "{} needs a scheduler that begins requests again whose blocks turn out wrong: add --scheduler-cls "
    "kvpact.vllm.scheduler.pact_scheduler (not for diffusion models)"
)
"""Why an engine is refused that was started without one of those classes."""

DEVICES: Final = ("cuda", "xpu")
"""torch's kinds of device from and to which vLLM's copies are used."""


def check_configuration(vllm_config: Any, connector: Callable[[], type] | None = None) -> None:
    """Raise ConfigError for a configuration that kvpact cannot serve, before weights are loaded.

    `connector` imports the class whose hooks vLLM will call, which are examined on a release that is not known.
    The other checks examine workers and their KV cache groups.
    """
    import vllm

    release = str(vllm.__version__)
    refuse_older(release)
    config = load_config(vllm_config.kv_transfer_config.kv_connector_extra_config, os.environ)
    require_possible(config.memory, max(1, vllm_config.parallel_config.data_parallel_size_local))
    if not is_known(release):
        from kvpact.vllm.compat.shape import check_shape

        check_shape(release, vllm_config, None, connector and connector())
    if config.match_at == "step":
        refuse_unread(release)
    if (model := vllm_config.model_config) is None:
        return
    _refuse_settings_of_engine(vllm_config)
    _refuse_model(vllm_config)
    check_settings(config, vllm_config)
    if config.cache is not None:
        find_factory(config.cache)
    load_seal(config.record_key_file)
    load_tenants(config.tenants)
    if config.tiers and Path(str(model.model)).exists():  # one of the hub may not be here yet
        base_weights(vllm_config, config.model_id)
    _refuse_device(config)
    stock_worker, stock_scheduler = _stock_classes(vllm_config)
    if config.match_at == "step" and stock_worker:
        raise ConfigError(NO_STEP_HOOK)
    if config.match_at == "step" and stock_scheduler:
        raise ConfigError(NO_RESTARTS.format("match_at=step"))
    if config.require == "all" and (stock_worker or stock_scheduler):
        _say_missing(config, [*compress(OUR_CLASSES, (stock_worker, stock_scheduler))])


def let_no_step_wait(settings: Mapping[str, Any]) -> None:
    """Make kvpact's loads asynchronous beside other connectors in MultiConnector's settings, with one line.

    They store computed blocks at once, and the report of a failed load reaches vLLM after the step that relied on the
    load (H48). Raises ConfigError for match_at "step", whose steps all wait.
    """
    company = list(_inside(settings))
    if others := sorted({one["kv_connector"] for one in company} - {"MultiConnector", "PactConnector"}):
        for one in company:
            if one["kv_connector"] != "PactConnector":
                continue
            ours = one.get("kv_connector_extra_config") or {}
            config = load_config(ours, os.environ)
            if config.match_at == "step":
                raise ConfigError(NO_STEP_BESIDE.format(", ".join(others)))
            if config.sync_load_budget:
                one["kv_connector_extra_config"] = {**ours, "sync_load_budget": 0}
                log_like_vllm()
                logger.warning(
                    "kvpact: beside %s no step waits for a load of kvpact's (sync_load_budget=0), because other "
                    "connectors may store what a step computes before vLLM learns that a load failed", ", ".join(others)
                )  # fmt: skip


def _inside(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The connectors in MultiConnector's settings, also those of one that is inside another."""
    for one in settings.get("connectors", ()):
        yield one
        yield from _inside(one.get("kv_connector_extra_config") or {})


def _stock_classes(vllm_config: Any) -> tuple[bool, bool]:
    """True for the worker's class, and for the scheduler's, that is vLLM's own."""
    worker = vllm_config.parallel_config.worker_cls
    return worker in ("auto", *BASE_WORKERS.values()), vllm_config.scheduler_config.scheduler_cls is None


def _refuse_model(vllm_config: Any) -> None:
    """Raise ConfigError for models whose KV cache groups `engine_groups` would refuse."""
    model = vllm_config.model_config
    if model.is_encoder_decoder:
        raise ConfigError(f"an encoder-decoder model is not supported: {UNSERVED['CrossAttentionSpec']}")
    if not model.has_inner_state:
        return
    refuse_states(vllm_config)
    if (mode := str(vllm_config.cache_config.mamba_cache_mode)) != "align":
        raise ConfigError(STATES_IN_MODE.format(mode))


def _refuse_device(config: KvpactConfig) -> None:
    """Raise ConfigError for a platform whose KV memory kvpact would refuse."""
    from vllm.platforms import current_platform

    if current_platform.device_type not in ("cpu", *DEVICES):
        known = ", ".join(("cpu", *DEVICES))
        raise ConfigError(f"KV memory on {current_platform.device_type}: kvpact copies from and to {known}")
    if current_platform.device_type in DEVICES:
        refuse_device_settings(config, current_platform.device_type)


def refuse_device_settings(config: KvpactConfig, device: str) -> None:
    """Raise ConfigError for settings of kvpact with which KV memory on a device is not used."""
    where = f"KV memory on {device}"
    if config.gpu == "off":
        raise ConfigError(f'{where}: "gpu": "off" refuses it; leave "gpu" out')
    if config.match_at == "step":
        raise ConfigError(
            f'{where}: match_at="step" loads while the step waits, before the copies are proven; set "match_at": '
            '"schedule"'
        )


def check_engine(vllm_config: Any, kv_cache_config: Any, connector: type | None = None) -> EngineGroups:
    """The engine's KV cache groups. `connector` is the class whose hooks vLLM will call.

    Raises ConfigError if its settings break a promise, or if an unknown release lacks what kvpact needs; warns of what
    only costs speed or safety margins.
    """
    import vllm

    release = str(vllm.__version__)
    if not is_known(release):
        from kvpact.vllm.compat.shape import check_shape

        logger.warning("kvpact: %s", check_shape(release, vllm_config, kv_cache_config, connector))
    _refuse_settings_of_engine(vllm_config)
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        logger.warning(
            'kvpact: kv_load_failure_policy is "%s": a load that fails ends its request with an error; '
            'set "kv_load_failure_policy": "recompute" in --kv-transfer-config',
            transfer.kv_load_failure_policy,
        )
    return engine_groups(vllm_config, kv_cache_config)


def start_verdict(groups: EngineGroups, missing: Sequence[str], *, has_statistics: bool, unit: int = 0) -> StartVerdict:
    """The verdict on an engine that is served; the log gets each note, but for the `missing` classes, which it has.

    `missing` is what `check_classes` returned, `unit` what `match_unit` did.
    """
    notes = list[str]()
    sizes = sorted({group.block_size for group in groups.groups.groups})
    if not has_statistics:
        notes.append(
            "--disable-log-stats: vLLM's metrics page has nothing of kvpact; kvpact status on this machine has"
        )
    if groups.groups.alignment > sizes[0]:
        notes.append(
            f"KV cache groups with blocks of {', '.join(map(str, sizes))} tokens: a match is a multiple of "
            f"{groups.groups.alignment}, so that shorter prompts are never loaded"
        )
    if 0 < unit < groups.groups.alignment:
        notes.append(
            f"--prefix-match-unit {unit}: behind a hit of vLLM's own that ends inside {groups.groups.alignment} tokens "
            "nothing is loaded (`unaligned` among the misses): leave the option out"
        )
    for note in notes:
        logger.warning("kvpact: %s", note)
    if missing:
        notes.append(f"without kvpact's {' and '.join(missing)}: the log names what is lost, and what to add")
    return StartVerdict(notes=tuple(notes))


def state_limits(groups: EngineGroups, vllm_config: Any) -> list[tuple[str, str, str]]:
    """Limits of vLLM's settings on the states that it keeps, each with the series that counts what lacks one, and its
    remedy; the log gets them.

    The scheduler may cut prompts for blocks of another size than those that keep states: on CPUs the handshake after
    the start of vLLM 0.32's engine process sets its size back to the platform's default, unless the user has given one.
    And by default vLLM neither keeps nor offers the states of answers.
    """
    sizes = [each.block_size for each in groups.groups.groups if each.kind is GroupKind.STATE]
    if not sizes:
        return []
    unit = max(sizes)
    settings = vllm_config.cache_config
    found = list[tuple[str, str, str]]()
    if settings.block_size % unit:
        limit = (
            f"vLLM's scheduler cuts prompts for blocks of {settings.block_size} tokens, and the model's states are "
            f"kept every {unit}: a prompt hits from its third time on, not from its second"
        )
        found.append((series("misses", MissReason.STATE_MISSING), limit, f"add --block-size {unit}"))
    if settings.prefix_cache_retention_interval == 0:
        limit = "vLLM keeps no states of answers: a prompt that goes on after one computes the answer's tokens again"
        found.append(("lost_answer_tokens", limit, f"add --prefix-cache-retention-interval {groups.groups.alignment}"))
    for _, limit, remedy in found:
        logger.warning("kvpact: %s; %s", limit, remedy)
    return found


def _refuse_settings_of_engine(vllm_config: Any) -> None:
    """Raise ConfigError for settings of vLLM that break a promise."""
    import vllm

    release = str(vllm.__version__)
    role = vllm_config.kv_transfer_config.kv_role
    if role != "kv_both":
        raise ConfigError(f'kv_role is "{role}"; a cache both stores and loads: set "kv_role": "kv_both"')
    if COUNTS_HELD_BLOCKS and not vllm_config.model_config.disable_cascade_attn:
        raise ConfigError(
            f"cascade attention on vLLM {release} counts the uses of each block, and kvpact holds blocks in copies: "
            "vLLM would take prefixes for common that are not, and answer wrongly; leave --no-disable-cascade-attn out"
        )
    if vllm_config.model_config.enable_sleep_mode and _stock_classes(vllm_config)[0] and not TELLS_OF_SLEEP:
        raise ConfigError(
            f"sleep mode on vLLM {release} unmaps KV memory without notice to connectors, and a copy in flight would "
            f"end the engine: add --worker-cls {KVPACT_WORKER}, or leave --enable-sleep-mode out"
        )
    parallel = vllm_config.parallel_config
    context_parallel = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    if context_parallel > 1:
        raise ConfigError(
            f"context parallelism of {context_parallel} is not supported; blocks are then split over ranks"
        )


def check_classes(config: KvpactConfig, hellos: Sequence[WorkerHandshake], *, speaks_the_pact: bool) -> list[str]:
    """The options of kvpact's classes that the engine was started without; one line in the log names what is lost.

    Raises ConfigError instead if the configuration requires them. Decided by the reports of workers and scheduler, so
    that classes which inherit from kvpact's count. `speaks_the_pact`: true of the scheduler.
    """
    present = {"--worker-cls": all(hello.watches_weights for hello in hellos), "--scheduler-cls": speaks_the_pact}
    if missing := [option for option in OUR_CLASSES if not present[option]]:
        _say_missing(config, missing)
    return missing


def _say_missing(config: KvpactConfig, missing: Sequence[str]) -> None:
    import vllm
    from vllm.platforms import current_platform

    fitting = classes_for(current_platform, str(vllm.__version__))
    added = " ".join(f"{option} {fitting[option]}" for option in missing if option in fitting)
    falls = "; and ".join(FALLS_WITHOUT[option] for option in missing)
    said = f"this engine was started without kvpact's {' and '.join(missing)}, so {falls}: " + (
        f"add {added}, as kvpact serve does" if added else "kvpact has none for this platform and release of vLLM"
    )
    if config.require == "all":
        raise ConfigError(f'{said}, or leave out "require": "all"')
    logger.warning("kvpact: %s", said)


def require_all_ranks(vllm_config: Any, hellos: Sequence[WorkerHandshake]) -> list[WorkerHandshake]:
    """The handshakes of all ranks, in order.

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
    return hellos


def require_hooks(config: KvpactConfig, hellos: Sequence[WorkerHandshake]) -> None:
    """Raise ConfigError if the workers are to look up hits when a step begins, and have no hook for it."""
    if config.match_at == "step" and not all(hello.step_hook for hello in hellos):
        raise ConfigError(NO_STEP_HOOK)


def require_no_restarts(config: KvpactConfig, vllm_config: Any, groups: EngineGroups) -> None:
    """Raise ConfigError if a step may rely on blocks that turn out wrong, which vLLM's own scheduler cannot be told:
    what a step finds may not arrive; an adapter may be exchanged between a load and its use."""
    adapters = vllm_config.lora_config is not None and groups.several
    if adapters or config.match_at == "step":
        raise ConfigError(NO_RESTARTS.format("LoRA with several KV cache groups" if adapters else "match_at=step"))


def check_settings(config: KvpactConfig, vllm_config: Any, groups: EngineGroups | None = None) -> None:
    """Raise ConfigError for settings of kvpact that exclude each other, or settings of the engine."""
    check_cache(config)
    if config.match_at == "step" and groups is not None and groups.several:
        raise ConfigError(
            'match_at="step" is for models with one KV cache group of full attention: what a step finds late has no '
            'blocks in the others; set "match_at": "schedule"'
        )
    if config.save == "lazy" and not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            'save="lazy" follows the engine\'s own prefix cache, which is off: add --enable-prefix-caching, or set '
            '"save": "eager"'
        )
    if config.match_at == "step" and config.save != "eager":
        raise ConfigError(
            f'match_at="step" loads what it finds through the slots of saves, and save="{config.save}" has none then; '
            'set "save": "eager" or "match_at": "schedule"'
        )
    if config.match_at == "step" and not config.sync_load_budget:
        raise ConfigError(
            'match_at="step" loads what it finds while the step waits, and sync_load_budget=0 lets no step wait: set '
            '"sync_load_budget", by default "256MiB", or "match_at": "schedule"'
        )


def log_like_vllm() -> None:
    """Send kvpact's log to the engine's handlers, unless the user has set up logging for kvpact."""
    ours = logging.getLogger("kvpact")
    engine = logging.getLogger("vllm")
    if not ours.handlers and not logging.getLogger().handlers:
        ours.handlers = engine.handlers
        ours.setLevel(engine.level)
        ours.propagate = False
