"""vLLM's own worker class for each platform.

Owns the table; loads a worker's module only when asked for the class, so that a front end can ask whether there is one.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvpact.errors import ConfigError

BASE_WORKERS = {
    "cpu": "vllm.v1.worker.cpu_worker.CPUWorker",
    "cuda": "vllm.v1.worker.gpu_worker.Worker",
    "rocm": "vllm.v1.worker.gpu_worker.Worker",
    "xpu": "vllm.v1.worker.xpu_worker.XPUWorker",
}
"""Platform -> what vLLM itself puts for `worker_cls="auto"`, which it does not do for a class that the user names."""


def platform_kind(platform: Any) -> str | None:
    """Which of `BASE_WORKERS` vLLM's platform is; None for another one."""
    return next((name for name in BASE_WORKERS if getattr(platform, f"is_{name}")()), None)


def base_worker(platform: Any) -> Any:
    """The worker class of the platform. Raises ConfigError for one that is not known here."""
    kind = platform_kind(platform)
    if kind is None:
        raise ConfigError(
            f"kvpact.vllm.worker knows no worker for the platform {platform.device_name!r}; it knows "
            f"{', '.join(BASE_WORKERS)}: leave worker_cls out"
        )
    module, _, name = BASE_WORKERS[kind].rpartition(".")
    return getattr(import_module(module), name)


__all__ = ["BASE_WORKERS", "base_worker", "platform_kind"]
