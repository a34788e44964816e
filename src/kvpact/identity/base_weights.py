"""Identity of the weights that an engine has loaded: names where they are enough, and files for the rest.

Owns the rule when files are evidence of the weights that this process has loaded. Without evidence there is one
ConfigError, which names `model_id`.
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
    """Identity of an engine's weights, those of its draft model included, or the files from which to compute it."""

    parts: tuple[str | WeightFiles, ...]
    """Names of the model, its code and its draft model, or their files."""

    @property
    def unread_bytes(self) -> int:
        """Number of bytes that `identity` has to read. Raises OSError."""
        return sum(part.unread_bytes for part in self.parts if isinstance(part, WeightFiles))

    def identity(self, stopped: Callable[[], bool] = lambda: False) -> str:
        """Compute the identity. Reads files, and raises like `WeightFiles.digest`.

        Raises WeightsUnknown if files changed after this process began: they are no evidence of the loaded weights.
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
    """Error for weights that cannot be identified, with the reason."""
    return ConfigError(f"cannot identify the engine's weights: {why}; {SET_MODEL_ID}")


def process_start_ns() -> int:
    """Start of this process in Unix time, in nanoseconds: weights are loaded later. 0 if it is unknown."""
    try:
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    since_boot = int(fields[19]) * (10**9 // os.sysconf("SC_CLK_TCK"))
    return time.time_ns() - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - since_boot)
