"""`kvpact doctor`: tests and times copies to and from this machine's GPU, through vLLM's own calls."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvpact.cli.screen import console, print_json
from kvpact.errors import ConfigError, KvpactError
from kvpact.own_files import replace_own
from kvpact.worker.device.examination import Bench, examine


def bench_of(number: int) -> Bench:
    """Device with this number. Raises ConfigError if there is none, or vLLM cannot use it."""
    missing = [name for name in ("torch", "vllm") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"no {' and no '.join(missing)} in this environment: vLLM's own calls test the GPU")
    import torch

    if not torch.accelerator.is_available():
        raise ConfigError(f"torch {torch.__version__} finds no GPU")
    if not 0 <= number < torch.accelerator.device_count():
        raise ConfigError(f"--device {number}: torch finds {torch.accelerator.device_count()} devices, from 0 on")
    from kvpact.vllm.device import VllmDevice

    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    at = torch.device(kind.type, number)
    matrix = torch.ones((8192, 8192), dtype=torch.bfloat16, device=at)

    def compute() -> None:
        for _ in range(64):
            matrix @ matrix[:, :8]
        torch.accelerator.current_stream(at).synchronize()  # the device's own would wait for the load, too

    device = VllmDevice(at, 64 << 10)
    device.attach()
    return Bench(device, lambda rows, size: torch.zeros((rows, size), dtype=torch.uint8, device=at), compute)


def examine_gpu(number: int, file: Path | None, *, as_json: bool) -> bool:
    """Print the figures, and write them to `file`, as they come; returns whether the copies can be used.

    With `as_json` prints one document at the end. Raises ConfigError if `file` cannot be written.
    """
    screen = console(quiet=as_json)
    found: dict[str, Any] = {"sections": {}, "sound": False}

    def show(section: str, figures: dict[str, Any]) -> None:
        found["sections"][section] = figures
        screen.print(f"{section}: " + ", ".join(f"{name} {_shown(value)}" for name, value in figures.items()))
        write()

    def write() -> None:
        if file is not None:
            replace_own(file, json.dumps(found, indent=1).encode())

    try:
        write()
    except OSError as error:
        raise ConfigError(f"--output: {file} cannot be written: {error.strerror}") from None
    try:
        bench = bench_of(number)
        found["device"] = bench.device.name
        screen.print(bench.device.name)
        examine(bench, show)
        found["sound"] = True
    except (KvpactError, RuntimeError) as error:
        found["error"] = str(error)
        screen.print(f"kvpact: {error}")
    write()
    if as_json:
        print_json(found)
    return bool(found["sound"])


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
