"""vLLM's OffloadingConnector over host memory and its tier `fs`, as a subject of the driver's scenarios.

Owns its configuration. Without a GPU its copies are plain ones, as `kvpact_testkit.vllm.offloading` has them.
"""

from __future__ import annotations

from kvpact_testkit.vllm.driver import VllmDriver
from kvpact_testkit.vllm.offloading import FILES

OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector:OffloadingConnector"

TIMEOUT_SECONDS = 3.0
"""How long a request may wait."""


def offloading_over_files() -> VllmDriver:
    """The driver of this connector."""
    return VllmDriver(OFFLOADING, FILES, timeout=TIMEOUT_SECONDS)
