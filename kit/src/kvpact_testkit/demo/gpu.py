"""The GPUs that vLLM's engines compute on, if they do.

Owns the question. A process of its own asks torch, because asking makes a context on the device that stays until the
process ends.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

ASK_TIMEOUT = 120.0
"""Seconds that torch may take for its first look at the devices of a machine."""

_ASK = """
import torch
if torch.version.cuda is not None:
    for number in range(torch.cuda.device_count()):
        print(torch.cuda.get_device_name(number))
"""


def cuda_devices() -> list[str]:
    """The names of the GPUs that torch's CUDA build sees, by their number; none beside its CPU build or if it fails."""
    try:
        if version("torch").endswith("+cpu"):
            return []
        asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=ASK_TIMEOUT)
    except (PackageNotFoundError, subprocess.TimeoutExpired):
        return []
    return asked.stdout.splitlines() if asked.returncode == 0 else []
