"""LMCache's connector for an engine that computes on the CPU, whose memory LMCache's server maps.

Where there is no device LMCache moves a tensor to shared memory when it is registered, but of layers with states only
its own view of it; the engine would go on in the old place. Here all of them are moved first, by LMCache's own call.
"""

from __future__ import annotations

from typing import Any

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.v1.platform.devices.cpu.shm import migrate_to_shm_and_wrap


class PlacedLMCacheMPConnector(LMCacheMPConnector):
    """See the module."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See `KVConnectorBase_V1`."""
        for tensor in kv_caches.values():
            migrate_to_shm_and_wrap(tensor)
        super().register_kv_caches(kv_caches)
