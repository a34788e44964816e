"""A bench for examinations without a device: hostile streams, and a clock that runs as fast as a device would need."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvpact.config import load_config
from kvpact.memory.arena import ArenaSegment
from kvpact.testkit.device.hostile_driver import COMPUTING_STREAM, HostileDriver
from kvpact.torch_cuda import device as device_module
from kvpact.torch_cuda.doctor.bench import Memory, Timing
from kvpact.worker.cuda.driver import AccessOrder, Addresses, CudaError
from kvpact.worker.cuda.entries import Entries
from kvpact.worker.paged import PagedKV

BUS_BYTES = 55e9
"""A second."""

ENTRY_SECONDS = 0.6e-6
PIN_SECONDS_PER_BYTE = 0.1 / (1 << 30)
SMALL_SECONDS = 10e-6
GRAPH_SECONDS = 1e-3

LATE_KERNELS = 60
"""Before one that is late."""


class PlayedDriver(HostileDriver):
    """The hostile driver with a clock, and with what kvpact never asks for."""

    name, version, copies_in_batches, pci_bus_id, device = "Played", 12080, True, "0000:65:00.0", 0

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.clock = 0.0
        self.copying = 0.0
        """Seconds that all copies so far have taken the device."""
        self.calls = 0
        self.strict = 0
        """A thread that minds captures."""
        self.spoilt = False
        """Whether it has ended a capture."""

    def attribute(self, number: int) -> int:
        return 1

    def close(self) -> None:
        pass

    def register(self, address: int, num_bytes: int) -> None:
        super().register(address, num_bytes)
        self.clock += num_bytes * PIN_SECONDS_PER_BYTE

    def launch_copies(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, order: AccessOrder, stream: int
    ) -> None:
        super().launch_copies(targets, sources, sizes, order, stream)
        self.clock += ENTRY_SECONDS * len(sizes)
        self.copying += max(ENTRY_SECONDS * len(sizes), float(sizes.sum()) / BUS_BYTES)

    def attach_strictly(self) -> None:
        self._relaxed.add(threading.get_ident())
        self.strict = threading.get_ident()

    def _called(self, call: str) -> None:
        self.calls += 1
        if self.capturing and threading.get_ident() == self.strict:
            self.spoilt = True
            raise CudaError(call, 900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "a stream is capturing")
        super()._called(call)

    def copy_long_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        self.launch_copies(targets, sources, sizes, AccessOrder.ANY, stream)


class PlayedKernel:
    """Loads of small pages."""

    def __init__(self, driver: PlayedDriver) -> None:
        self._driver = driver

    def suits(self, entries: Entries) -> bool:
        return int(entries.sizes[0]) < 4096

    def load(self, entries: Entries, stream: int) -> None:
        self._driver.launch_copies(entries.device, entries.host, entries.sizes, AccessOrder.STREAM, stream)


class PlayedBench:
    """See `Bench`; `open` gives what an engine opens, over the played driver."""

    def __init__(self, monkeypatch: Any, driver: PlayedDriver | None = None) -> None:
        self.driver = driver or PlayedDriver()
        self.kernel = PlayedKernel(self.driver)
        self._memories: list[Memory] = []
        monkeypatch.setattr(device_module, "CudaDriver", lambda device: self.driver)
        monkeypatch.setattr(device_module, "kernel_for", lambda driver: self.kernel)
        monkeypatch.setattr(
            device_module.torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=COMPUTING_STREAM)
        )

    def about(self) -> dict[str, Any]:
        versions = {"cuda_of_driver": 12080, "torch": "2.13.0", "cuda_of_torch": "13.0"}
        return {"gpu": "Played", "pci_bus_id": self.driver.pci_bus_id, **versions}

    def now(self) -> float:
        return self.driver.clock

    def allocate(self, num_bytes: int) -> Memory:
        buffer = np.zeros(num_bytes, np.uint8)
        memory = Memory(buffer.ctypes.data, num_bytes, SimpleNamespace(device=torch.device("cuda:0"), buffer=buffer))
        self._memories.append(memory)  # none is freed: another one at its place would be taken for it
        self.driver.add_device_memory(memory.address, num_bytes)
        return memory

    def computing_stream(self) -> int:
        return COMPUTING_STREAM

    def timed(self, work: Callable[[int], None], rounds: int) -> Timing:
        stream = self.driver.create_stream()
        called, copying = self.driver.clock, self.driver.copying
        work(stream)
        self.synchronize()
        self.driver.destroy_stream(stream)
        return Timing(self.driver.copying - copying, 0.0, self.driver.clock - called)

    def decode(self) -> Callable[[], None]:
        return self._run_graph

    def _run_graph(self) -> None:
        self.driver.clock += GRAPH_SECONDS * (1.01 if self.driver.busy_streams else 1.0)
        self.driver.launch(lambda: None)

    def launch(self) -> None:
        self.driver.launch(lambda: None)

    def fill(self, memory: Memory, value: int) -> None:
        for _ in range(LATE_KERNELS):
            self.driver.launch(lambda: None)
        self.driver.launch(lambda: ctypes.memset(memory.address, value, memory.num_bytes) and None)

    def copy_small(self, way: str) -> None:
        self.driver.clock += SMALL_SECONDS

    def capture(self) -> None:
        """Takes until another thread has made some calls."""
        self.driver.spoilt, self.driver.capturing = False, True
        end = self.driver.calls + 10
        while self.driver.calls < end:
            time.sleep(0.001)
        self.driver.capturing = False
        if self.driver.spoilt:
            raise RuntimeError("operation failed due to a previous error during capture")

    def synchronize_computing(self) -> None:
        event = self.driver.create_event()
        self.driver.record(event, COMPUTING_STREAM)
        self.driver.synchronize(event)

    def synchronize(self) -> None:
        self.driver.finish()

    end_section = synchronize

    def open(self, paged: PagedKV, segment: ArenaSegment) -> device_module.OpenedDevice:
        return device_module.open_cuda(load_config({"gpu": "unproven"}, {}), paged, segment, 0)
