"""Which weights an engine has loaded: what is known by name, and the files that tell the rest.

Owns when files are evidence of what this process has loaded. What cannot be told is one ConfigError that names
`model_id`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvpact.errors import ConfigError
from kvpact.identity.weights import WeightFiles

SET_MODEL_ID = "set `model_id` in kv_connector_extra_config to a name that changes when the weights change"


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """The identity of an engine's weights, those of its draft model included, or how to find it."""

    parts: tuple[str | WeightFiles, ...]
    """What the model, its code and its draft model are, or the files that tell."""

    @property
    def unread_bytes(self) -> int:
        """What `identity` has to read. Raises OSError."""
        return sum(part.unread_bytes for part in self.parts if isinstance(part, WeightFiles))

    def identity(self, stopped: Callable[[], bool] = lambda: False) -> str:
        """The identity. Reads files; see `WeightFiles.digest` for what it raises.

        Files that changed after this process began are no evidence of what it has loaded: WeightsUnknown.
        """
        found = []
        for part in self.parts:
            if isinstance(part, WeightFiles):
                digest = part.digest(stopped)
                part.require_older_than(process_start_ns())
                part = f"files:{digest}"
            found.append(part)
        return " + ".join(found)


def cannot_tell(why: object) -> ConfigError:
    """What the user gets to read."""
    return ConfigError(f"cannot tell which weights the engine has: {why}; {SET_MODEL_ID}")


def process_start_ns() -> int:
    """When this process began, in Unix time: weights are loaded later. 0 where the kernel does not say."""
    try:
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    since_boot = int(fields[19]) * (10**9 // os.sysconf("SC_CLK_TCK"))
    return time.time_ns() - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - since_boot)
