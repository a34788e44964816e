"""KV memory that says it is on a CUDA device, and a rank's copies over it by a hostile one, opened as a real one's are.

Owns the connection between the two: what a rank registers becomes the device's memory.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

from kvpact.config import KvpactConfig
from kvpact.memory.arena import ArenaSegment
from kvpact.testkit.device.hostile_driver import COMPUTING_STREAM, HostileDriver
from kvpact.worker.cuda.copies import DeviceCopies
from kvpact.worker.cuda.driver import CudaError
from kvpact.worker.cuda.engine import CudaTransferEngine
from kvpact.worker.paged import PagedKV


class OnDevice:
    """A tensor of host memory that says it is on a CUDA device."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.device = SimpleNamespace(type="cuda", index=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


class PlayedDevice:
    """One rank's device. Its `open` is for `CacheWorker`, like `kvpact.torch_cuda.device.open_cuda`."""

    def __init__(self, seed: int) -> None:
        self.driver = HostileDriver(seed)
        self._mapped: list[int] = []

    def map(self, *tensors: Any) -> None:
        """The memory of these tensors is the device's."""
        storages = {storage.data_ptr(): storage.nbytes() for storage in (one.untyped_storage() for one in tensors)}
        for address, num_bytes in storages.items():
            self.driver.add_device_memory(address, num_bytes)
            self._mapped.append(address)

    def unmap(self) -> None:
        """All of it is gone."""
        while self._mapped:
            self.driver.remove_device_memory(self._mapped.pop())

    def open(self, config: KvpactConfig, paged: PagedKV, segment: ArenaSegment, rank: int) -> CudaTransferEngine:
        """See `DeviceOpener`."""
        self.map(*paged.tensors)
        return _PlayedEngine(self.driver, paged, segment, rank)

    def synchronize(self) -> None:
        """Wait for what the computing stream has now."""
        self.driver.record(event := self.driver.create_event(), COMPUTING_STREAM)
        self.driver.synchronize(event)
        self.driver.destroy_event(event)


class _PlayedEngine(CudaTransferEngine):
    """Pins all slots while it is open."""

    def __init__(self, driver: HostileDriver, paged: PagedKV, segment: ArenaSegment, rank: int) -> None:
        self._driver, self._pinned_at = driver, segment.mapped_at
        driver.register(self._pinned_at, len(segment.memory))
        copies = DeviceCopies(paged, segment, driver, lambda: COMPUTING_STREAM, len(segment.memory), None)
        super().__init__(copies, rank, None)

    def close(self, seconds: float) -> bool:
        """See `TransferEngine`."""
        ended = super().close(seconds)
        if ended and self._pinned_at:
            with contextlib.suppress(CudaError):  # the device is lost, and its registrations with it
                self._driver.unregister(self._pinned_at)
            self._pinned_at = 0
        return ended


__all__ = ["OnDevice", "PlayedDevice"]
