"""`KvpactWorker`: the worker that a user names in `worker_cls` to give connectors `before_update_states`.

Owns which engines the hook is known to be right on, and the class over the platform's own worker. With a connector that
has no such hook it is that worker, unchanged. Imported by workers only. Floor 3.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from kvpact.errors import ConfigError
from kvpact.vllm.step_hook import Minimum, StepHook

logger = logging.getLogger(__name__)

KNOWN_RELEASES = ("0.26", "0.28", "0.30", "0.32", "0.33")
"""Releases whose model runners were read: how they take in a step's numbers is no promise of vLLM's."""

FIRST_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
SECOND_RUNNER = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"

BASE_WORKERS = {
    "cpu": "vllm.v1.worker.cpu_worker.CPUWorker",
    "cuda": "vllm.v1.worker.gpu_worker.Worker",
    "rocm": "vllm.v1.worker.gpu_worker.Worker",
    "xpu": "vllm.v1.worker.xpu_worker.XPUWorker",
}
"""Platform -> what vLLM itself puts for `worker_cls="auto"`, which it does not do for a class that the user names."""


def base_worker(platform: Any) -> Any:
    """The worker class of the platform. Raises ConfigError for one that is not known here."""
    kind = next((name for name in BASE_WORKERS if getattr(platform, f"is_{name}")()), None)
    if kind is None:
        raise ConfigError(
            f"kvpact.vllm.worker knows no worker for the platform {platform.device_name!r}; it knows "
            f"{', '.join(BASE_WORKERS)}: leave worker_cls out"
        )
    module, _, name = BASE_WORKERS[kind].rpartition(".")
    return getattr(import_module(module), name)


def bind_step_hook(worker: Any, connector: Any, kv_cache_config: Any) -> StepHook | None:
    """The hook of this worker's connector; None if it has none, and then nothing changes.

    Raises ConfigError where the hook would not be right: an unknown release or model runner, split or recurrent state.
    """
    if getattr(connector, "before_update_states", None) is None:
        return None
    import vllm

    release = str(vllm.__version__)
    if release.split(".")[:2] not in [known.split(".") for known in KNOWN_RELEASES]:
        raise ConfigError(
            f"the step hook is not known to be right on vLLM {release}, only on {', '.join(KNOWN_RELEASES)}: "
            "leave worker_cls out"
        )
    parallel = worker.vllm_config.parallel_config
    for setting in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, setting, 1) > 1:
            raise ConfigError(f"the step hook does not serve {setting}={getattr(parallel, setting)}: a rank has a part")
    for group in kv_cache_config.kv_cache_groups:
        if "Mamba" in type(group.kv_cache_spec).__name__:
            raise ConfigError("the step hook does not serve models with recurrent state: leave worker_cls out")
    hook = StepHook(
        connector, new_requests_only=is_second_runner(worker.model_runner), minimum=minimum_over_ranks(_rank_groups())
    )
    if (bound := getattr(connector, "step_hook_bound", None)) is not None:
        bound()
    logger.info("kvpact: %s is asked before each step", type(connector).__name__)
    return hook


def is_second_runner(runner: Any) -> bool:
    """Whether the model runner is vLLM's second one, whose running requests keep their position on the device.

    Asked of the object that will run and not of a setting (H92). Raises ConfigError if it is neither of the two.
    """
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(runner).__mro__}
    if SECOND_RUNNER in names:
        return True
    if FIRST_RUNNER in names:
        return False
    raise ConfigError(
        f"the step hook does not know the model runner {type(runner).__module__}.{type(runner).__qualname__}; it knows "
        f"{FIRST_RUNNER} and {SECOND_RUNNER}: leave worker_cls out"
    )


def minimum_over_ranks(groups: Sequence[Any]) -> Minimum | None:
    """The minimum over the members of each process group in turn; None without groups."""
    if not groups:
        return None
    import torch

    def minimum(numbers: Sequence[int]) -> Sequence[int]:
        agreed = torch.tensor(numbers, dtype=torch.int64)
        for group in groups:
            torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN, group=group)
        result: Sequence[int] = agreed.tolist()
        return result

    return minimum


def _rank_groups() -> list[Any]:
    """The groups over which ranks must skip the same tokens: a layer's parts, and the layers behind one another."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return [group.cpu_group for group in (get_tp_group(), get_pp_group()) if group.world_size > 1]


def _connector() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group() if has_kv_transfer_group() else None


def _platform() -> Any:
    from vllm.platforms import current_platform

    return current_platform


class KvpactWorker(base_worker(_platform())):  # type: ignore[misc]
    """The platform's worker, which asks the connector before each step; `worker_cls="kvpact.vllm.worker.KvpactWorker"`.

    See `kvpact.vllm.step_hook.StepHookConnector` for what the connector needs.
    """

    step_hook: StepHook | None = None

    def initialize_from_config(self, kv_cache_config: Any) -> Any:
        """The connector exists once this has run. Raises ConfigError if its hook cannot be served on this engine."""
        answer = super().initialize_from_config(kv_cache_config)
        if (tell := getattr(_connector(), "model_at", None)) is not None:
            tell(self.get_model)
        self.step_hook = bind_step_hook(self, _connector(), kv_cache_config)
        return answer

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the step, less what the connector supplies; returns what the platform's worker returns (H91)."""
        if self.step_hook is not None:
            scheduler_output = self.step_hook.apply(scheduler_output)
        return super().execute_model(scheduler_output)


__all__ = ["KvpactWorker", "StepHook", "base_worker", "bind_step_hook"]
