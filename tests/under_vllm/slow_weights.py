"""`SlowWeights`: kvpact in a real engine whose model's files take long to read: until the file SLOW_WEIGHTS is there.

Name it by `kv_connector_module_path`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from kvpact.cache import late_tiers
from kvpact.identity import weights
from kvpact.vllm import PactConnector

GOES_ON = Path(os.environ["SLOW_WEIGHTS"])
file_digest = weights.file_digest


def slow_digest(path: Path, stopped: Callable[[], bool] = lambda: False) -> str:
    """Of the file, later."""
    while not GOES_ON.exists() and not stopped():
        time.sleep(0.02)
    return file_digest(path, stopped)


weights.file_digest = slow_digest
late_tiers.READ_AT_ONCE_BYTES = 0


class SlowWeights(PactConnector):
    """The connector itself, unchanged."""
