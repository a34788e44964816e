"""What an examination asks of a device beside its driver: memory, a graph to run, kernels, and time between events.

The seam between what is measured, which needs no torch, and what of it torch does (`torch_bench.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvpact.memory.arena import ArenaSegment
from kvpact.worker.copy.base import TransferEngine
from kvpact.worker.cuda.copies import Kernel
from kvpact.worker.cuda.driver import Addresses, Driver
from kvpact.worker.paged import PagedKV


@dataclass(frozen=True, slots=True)
class Memory:
    """A piece of the device's memory, as long as `owner` is kept."""

    address: int
    num_bytes: int
    owner: Any


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one piece of work, in seconds: medians over the rounds."""

    device: float
    """Between its first and its last operation in the stream."""
    spread: float
    """Of `device`: (slowest - fastest) / median."""
    call: float
    """Until the call that submits it returns."""

    def gb_per_s(self, num_bytes: int) -> float:
        """10^9 bytes a second on the device."""
        return num_bytes / self.device / 1e9


class ExaminedDriver(Driver, Protocol):
    """A driver that also does what kvpact never asks of it."""

    def attach_strictly(self) -> None:
        """Use the device on the calling thread as CUDA has it by default: its calls may end a capture elsewhere."""

    def copy_long_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        """`copy_batch` of any number of entries, at any time. Raises CudaError, also where there are no batches."""


class Bench(Protocol):
    """A device under examination. All methods are for one thread, but `driver`'s after `attach`."""

    @property
    def driver(self) -> ExaminedDriver:
        """The driver of the device."""

    @property
    def kernel(self) -> Kernel | None:
        """What loads small pages, if kernels can read the host's memory."""

    def about(self) -> dict[str, Any]:
        """Names and versions; "pci_bus_id" as in /sys/bus/pci/devices."""

    def now(self) -> float:
        """A clock, in seconds."""

    def allocate(self, num_bytes: int) -> Memory:
        """Memory of the device, with any content."""

    def computing_stream(self) -> int:
        """The stream on which the calling thread computes."""

    def timed(self, work: Callable[[int], None], rounds: int) -> Timing:
        """Run `work(stream)` in a stream of its own, once unseen and `rounds` times timed."""

    def decode(self) -> Callable[[], None]:
        """A graph like a decode step, bound by memory; each call puts it once into the computing stream."""

    def launch(self) -> None:
        """Put the smallest kernel into the computing stream."""

    def fill(self, memory: Memory, value: int) -> None:
        """In stream order, and late: a kernel writes `value` into every byte."""

    def copy_small(self, way: str) -> None:
        """4 KiB "in" to the device or "out" of it, as sampled tokens go, and wait."""

    def capture(self) -> None:
        """Capture a graph of many kernels and run it, as an engine does at its start. Raises if that fails."""

    def synchronize_computing(self) -> None:
        """Wait until the computing stream is done."""

    def synchronize(self) -> None:
        """Wait until all streams are done. Raises if the device was lost."""

    def end_section(self) -> None:
        """`synchronize`, and give back what is used no more."""

    def open(self, paged: PagedKV, segment: ArenaSegment) -> TransferEngine:
        """The copies of a rank, as an engine opens them. Raises ConfigError if they may not be used."""
