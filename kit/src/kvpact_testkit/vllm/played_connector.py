"""`PlayedConnector`: kvpact in a real engine on the CPU, its own copies on a device that is played and copies late.

Name it by `kv_connector_module_path`. Owns the device of each rank. What computes is done when its call returns.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

from kvpact.config import KvpactConfig
from kvpact.memory.arena import ArenaSegment
from kvpact.vllm import PactConnector
from kvpact.worker import round_trip, worker
from kvpact.worker.device import opened
from kvpact.worker.device.opened import OpenedDevice
from kvpact.worker.device.proof import Proof
from kvpact.worker.paged import PagedKV
from kvpact_testkit.device.played import PlayedDevice

TRIAL_SECONDS = 60.0
"""For the test of the copies: a device that is played is as fast as a busy machine."""


FIRST = 2
"""Right jobs of each kind that prove a rank."""


class PlayedConnector(PactConnector):
    """See above. Raises AssertionError from `shutdown` if a wait was missing."""

    _device: PlayedDevice | None = None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The KV memory is the device's."""
        with (
            patch.object(worker, "transfer_engine_for", self._opened),
            patch.object(round_trip, "LIMIT_SECONDS", TRIAL_SECONDS),
            patch.object(opened, "Proof", partial(Proof, first=FIRST)),
        ):
            super().register_kv_caches(kv_caches)

    def _opened(self, config: KvpactConfig, paged: PagedKV, segment: ArenaSegment, rank: int, _: Any) -> OpenedDevice:
        self._device = PlayedDevice(seed=rank)
        self._device.computes_at_once()
        self._device.map(*paged.tensors)
        return OpenedDevice(config, paged, segment, self._device)

    def shutdown(self) -> None:
        """Stop, and look for mistakes."""
        super().shutdown()
        assert self._device is None or not self._device.driver.violations, self._device.driver.violations
