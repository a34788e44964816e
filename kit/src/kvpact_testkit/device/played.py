"""A device that is played, and KV memory that says it is on one.

Owns the connection between the two: what a rank registers becomes the device's memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from kvpact.config import KvpactConfig
from kvpact.memory.arena import ArenaSegment
from kvpact.worker.copy.base import Job
from kvpact.worker.device.base import Addresses
from kvpact.worker.device.engine import DeviceTransferEngine
from kvpact.worker.device.proof import Proof
from kvpact.worker.paged import PagedKV
from kvpact_testkit.device.hostile_driver import COMPUTING_STREAM, AccessOrder, HostileDriver, HostileError, WatchedCopy

Result = TypeVar("Result")


class OnDevice:
    """A tensor of host memory that says it is on a CUDA device."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.device = SimpleNamespace(type="cuda", index=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


class WrittenDown(list[str]):
    """Lines that are in a file, too."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def append(self, line: str) -> None:
        super().append(line)
        with self._file.open("a") as log:
            log.write(f"{line}\n")


class EachJob(Proof):
    """Checks every job, also once the rank is proven."""

    def wants(self, job: Job) -> bool:
        """See `Proof`."""
        super().wants(job)
        return True


class PlayedDevice:
    """One rank's device over a `HostileDriver`; see `kvpact.worker.device.base.Device`.

    Its `open` is for `CacheWorker`, like `kvpact.vllm.device.open_device`.
    """

    name = "a played device"
    pinned = True
    proof: type[Proof] | None = None
    """What checks its engine's jobs; by default nothing, or a `Proof` with `checks_first`."""

    def __init__(self, seed: int, current_stream: Callable[[], int] | None = None) -> None:
        """`current_stream()` is that of the calling thread; by default all threads compute on one."""
        self.driver = HostileDriver(seed)
        self.attach = self.driver.attach
        self.create_stream = self.driver.create_stream
        self.current_stream = current_stream or (lambda: COMPUTING_STREAM)
        self.stream_wait = self.driver.stream_wait
        self.is_done = self.driver.is_done
        self.synchronize = self.driver.synchronize_all
        self._mapped: list[int] = []
        self.checks_first = 0
        """Jobs of each kind that its engine checks before it is proven; 0: it is proven from the start."""

    def write_mistakes_to(self, file: Path) -> None:
        """Each mistake becomes a line of this file at once, for a test in another process. Called before any copy."""
        self.driver.violations = WrittenDown(file)

    def computes_at_once(self) -> None:
        """What computes is done when its call returns, as on a CPU: it is in no stream, and waits on the host.

        So nothing may write to what a copy reads or writes until it is done. Called after `write_mistakes_to`.
        """
        self.driver.copy_kind = partial(WatchedCopy, self.driver.violations)
        self.stream_wait = self._wait_on_host

    def _wait_on_host(self, stream: int, event: int) -> None:
        if stream == COMPUTING_STREAM:
            self.driver.synchronize(event)
        else:
            self.driver.stream_wait(stream, event)

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

    def record(self, stream: int) -> int:
        """See `Device`."""
        self.driver.record(event := self.driver.create_event(), stream)
        return event

    def seconds_between(self, begin: int, end: int) -> float:
        """No time: it has no clock."""
        return 0.0

    def load(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        """See `Device`."""
        self.driver.needs_pinned = self.pinned
        self.driver.copy_batch(targets, sources, sizes, AccessOrder.ANY, stream)

    def save(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        """See `Device`."""
        self.driver.needs_pinned = self.pinned
        self.driver.copy_batch(targets, sources, sizes, AccessOrder.STREAM, stream)

    def run(self, stream: int, work: Callable[[], Result]) -> Result:
        """See `Device`."""
        results: list[Result] = []
        self.driver.launch(lambda: results.append(work()), stream)
        self.driver.synchronize(self.record(stream))
        return results[0]

    def register(self, address: int, num_bytes: int) -> bool:
        """See `Device`."""
        try:
            self.driver.register(address, num_bytes)
        except HostileError:
            return False
        return True

    def unregister(self, address: int) -> None:
        """See `Device`."""
        self.driver.unregister(address)

    def finish_computing(self) -> None:
        """Wait for what the computing stream has now."""
        self.driver.synchronize(self.record(COMPUTING_STREAM))

    def open(self, config: KvpactConfig, paged: PagedKV, segment: ArenaSegment, rank: int) -> DeviceTransferEngine:
        """See `DeviceOpener`."""
        self.map(*paged.tensors)
        return _PlayedEngine(self, paged, segment)


class _PlayedEngine(DeviceTransferEngine):
    """Pins all slots while it is open."""

    def __init__(self, device: PlayedDevice, paged: PagedKV, segment: ArenaSegment) -> None:
        self._pinned_at = segment.mapped_at
        device.register(self._pinned_at, len(segment.memory))
        super().__init__(paged, segment, device, len(segment.memory))
        if device.proof is not None:
            self.proof = device.proof(paged, segment, device, stores=True, first=device.checks_first)
        elif device.checks_first:
            self.proof = Proof(paged, segment, device, stores=True, first=device.checks_first)

    def close(self, seconds: float) -> bool:
        """See `TransferEngine`."""
        ended = super().close(seconds)
        if ended and self._pinned_at:
            with contextlib.suppress(HostileError):  # the device is lost, and its registrations with it
                self._device.unregister(self._pinned_at)
            self._pinned_at = 0
        return ended
