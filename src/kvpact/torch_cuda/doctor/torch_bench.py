"""A `Bench` on a real device: what of an examination torch does. Importing this imports torch."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median_high
from typing import Any

import torch

from kvpact.config import load_config
from kvpact.memory.arena import ArenaSegment
from kvpact.torch_cuda.calibration import KernelRange
from kvpact.torch_cuda.device import OpenedDevice, kernel_for, open_cuda
from kvpact.torch_cuda.doctor.bench import Memory, Timing
from kvpact.torch_cuda.doctor.free_driver import FreeDriver
from kvpact.worker.cuda.copies import Kernel
from kvpact.worker.cuda.driver import CAN_USE_HOST_POINTER
from kvpact.worker.paged import PagedKV

WEIGHTS, WIDTH, ROWS = 32, 4096, 32
"""Of the graph: 1 GiB of weights are read for 32 tokens, 0.3 ms on an H100."""

NO_KERNEL = KernelRange(0, 1)

LATE_CYCLES = 5_000_000
"""For which a late kernel waits: 3 ms."""

KERNELS_CAPTURED = 200


class TorchBench:
    """See `Bench`."""

    def __init__(self, device: int) -> None:
        """`device` counts those that the process sees. Raises ConfigError if there is no usable driver."""
        torch.cuda.set_device(device)
        torch.zeros(1, device="cuda")
        self._device = device
        self.driver = FreeDriver(device)
        self.kernel: Kernel | None = kernel_for(self.driver)
        self._tiny = torch.zeros(64, device="cuda")
        self._square = torch.randn(256, 256, device="cuda")
        torch.mm(self._square, self._square)  # what a capture needs is made before it
        self._here = torch.zeros(4096, dtype=torch.uint8, pin_memory=True)
        self._there = torch.zeros(4096, dtype=torch.uint8, device="cuda")
        self._side = torch.cuda.ExternalStream(self.driver.create_stream())

    def about(self) -> dict[str, Any]:
        """See `Bench`."""
        properties = torch.cuda.get_device_properties(self._device)
        try:
            from triton import __version__ as triton
        except ImportError:
            triton = None
        return {
            "device": self._device,
            "gpu": self.driver.name,
            "processors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "pci_bus_id": self.driver.pci_bus_id,
            "cuda_of_driver": self.driver.version,
            "copies_in_batches": self.driver.copies_in_batches,
            "kernel_below_bytes": getattr(self.kernel, "limits", NO_KERNEL).dma_bytes,
            "kernel_min_entries": getattr(self.kernel, "limits", NO_KERNEL).min_entries,
            "kernels_read_host_memory": bool(self.driver.attribute(CAN_USE_HOST_POINTER)),
            "torch": torch.__version__,
            "cuda_of_torch": torch.version.cuda,
            "triton": triton,
        }

    def now(self) -> float:
        """See `Bench`."""
        return time.perf_counter()

    def allocate(self, num_bytes: int) -> Memory:
        """See `Bench`."""
        tensor = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{self._device}")
        return Memory(tensor.data_ptr(), num_bytes, tensor)

    def computing_stream(self) -> int:
        """See `Bench`."""
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def timed(self, work: Callable[[int], None], rounds: int) -> Timing:
        """See `Bench`."""
        device, call = [], []
        for _ in range(rounds + 1):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            first.record(self._side)
            began = time.perf_counter()
            work(self._side.cuda_stream)
            call.append(time.perf_counter() - began)
            last.record(self._side)
            last.synchronize()
            device.append(first.elapsed_time(last) / 1e3)
        seen = device[1:]
        return Timing(median_high(seen), (max(seen) - min(seen)) / median_high(seen), median_high(call[1:]))

    def decode(self) -> Callable[[], None]:
        """See `Bench`."""
        weights = [torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(WEIGHTS)]
        rows = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        _products(rows, weights)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            _products(rows, weights)
        used = (graph, rows, weights)  # a graph keeps nothing of what it reads
        return lambda: used[0].replay()

    def launch(self) -> None:
        """See `Bench`."""
        self._tiny.add_(1)

    def fill(self, memory: Memory, value: int) -> None:
        """See `Bench`."""
        torch.cuda._sleep(LATE_CYCLES)
        memory.owner.fill_(value)

    def copy_small(self, way: str) -> None:
        """See `Bench`."""
        target, source = (self._there, self._here) if way == "in" else (self._here, self._there)
        target.copy_(source, non_blocking=True)
        self.synchronize_computing()

    def capture(self) -> None:
        """See `Bench`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(KERNELS_CAPTURED):
                torch.mm(self._square, self._square)
        graph.replay()
        self.synchronize_computing()

    def synchronize_computing(self) -> None:
        """See `Bench`."""
        torch.cuda.current_stream(self._device).synchronize()

    def synchronize(self) -> None:
        """See `Bench`."""
        torch.cuda.synchronize(self._device)

    def end_section(self) -> None:
        """See `Bench`."""
        self.synchronize()
        gc.collect()
        torch.cuda.empty_cache()

    def open(self, paged: PagedKV, segment: ArenaSegment) -> OpenedDevice:
        """See `Bench`."""
        return open_cuda(load_config({"gpu": "unproven"}, {}), paged, segment, 0)


def _products(rows: Any, weights: list[Any]) -> None:
    for weight in weights:
        rows = torch.mm(rows, weight) * 0.01
