"""vLLM's own worker class for each platform, and kvpact's classes in the place of vLLM's.

Owns the tables; imports a worker's module only when the class is asked for, so that a front end can ask whether there
is one.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvpact.errors import ConfigError
from kvpact.vllm.compat.releases import is_known

BASE_WORKERS = {
    "cpu": "vllm.v1.worker.cpu_worker.CPUWorker",
    "cuda": "vllm.v1.worker.gpu_worker.Worker",
    "rocm": "vllm.v1.worker.gpu_worker.Worker",
    "xpu": "vllm.v1.worker.xpu_worker.XPUWorker",
}
"""Platform -> the class that vLLM uses for `worker_cls="auto"`. vLLM does no such lookup for a class that a user
names."""


KVPACT_WORKER = "kvpact.vllm.worker.KvpactWorker"
"""The class that a user names instead: it reports changes of the weights."""

PACT_SCHEDULER = "kvpact.vllm.scheduler.pact_scheduler"
"""The class that a user names as the scheduler's: it reports the matches that it does not take."""

PACT_SPEC = "PactTieringSpec"
"""The spec of vLLM's own offloading that `kvpact serve` names instead of both."""

OFFLOADING = "offloading"
"""The value of its option `--through` for that."""

OUR_CLASSES = {"--worker-cls": KVPACT_WORKER, "--scheduler-cls": PACT_SCHEDULER}
"""vLLM's options for classes of its own, and kvpact's: what `kvpact serve` gives beside `--kv-transfer-config`."""


def platform_kind(platform: Any) -> str | None:
    """vLLM's platform, as a key of `BASE_WORKERS`; None for another one."""
    return next((name for name in BASE_WORKERS if getattr(platform, f"is_{name}")()), None)


def classes_for(platform: Any, release: str) -> dict[str, str]:
    """Return the `OUR_CLASSES` that fit: none where vLLM's worker is unknown, no scheduler on an unknown release."""
    if platform_kind(platform) is None:
        return {}
    return dict(OUR_CLASSES) if is_known(release) else {"--worker-cls": KVPACT_WORKER}


def base_worker(platform: Any) -> Any:
    """The platform's worker class. Raises ConfigError for an unknown platform."""
    kind = platform_kind(platform)
    if kind is None:
        raise ConfigError(
            f"kvpact.vllm.worker knows no worker for the platform {platform.device_name!r}; it knows "
            f"{', '.join(BASE_WORKERS)}: leave worker_cls out"
        )
    module, _, name = BASE_WORKERS[kind].rpartition(".")
    return getattr(import_module(module), name)
