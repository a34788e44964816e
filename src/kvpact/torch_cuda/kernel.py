"""Loads of small pages by a kernel: a copy engine is slower there than a few programs that read host memory.

Owns the choice between the two, and the launch. Importing this imports torch and Triton, which are the engine's.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from kvpact.own_files import CacheFile
from kvpact.torch_cuda.calibration import FILE, USUAL, KernelRange, kernel_range
from kvpact.torch_cuda.doctor.facts import nvidia_release
from kvpact.torch_cuda.gather_kernel import CHUNK_WORDS, WORD_BYTES, copy_runs
from kvpact.worker.cuda.driver import CudaDriver
from kvpact.worker.cuda.entries import Entries

PROGRAMS: Final = 12
"""Of the kernel: 48 to 55 GB/s with 9 % of an H100's processors (vllm#42212)."""


class KernelLoads:
    """Carries out loads of small pages on one device. See `kvpact.worker.cuda.copies.Kernel`."""

    def __init__(self, device: int, limits: KernelRange) -> None:
        """`device` counts those that the process sees; `limits`: which loads are faster this way on it."""
        self._device = device
        self.limits = limits

    def suits(self, entries: Entries) -> bool:
        """See `Kernel`."""
        if len(entries) < self.limits.min_entries:
            return False
        size = int(entries.sizes[0])
        if size >= self.limits.dma_bytes or size % WORD_BYTES or (entries.sizes != size).any():
            return False
        return not ((entries.device | entries.host) % WORD_BYTES).any()

    def load(self, entries: Entries, stream: int) -> None:
        """See `Kernel`.

        Harmless beside the capture of a graph: the calling thread is RELAXED, so that torch may allocate, and this
        stream is not captured, so that nothing goes into the graph's own pool of memory.
        """
        size = int(entries.sizes[0])
        addresses = np.concatenate([entries.host, entries.device]).astype(np.int64)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self._device)):
            # torch notes an event of this stream when it copies from pinned memory, and gives the memory to nobody
            # before that is done; the device's memory, allocated in this stream, is reused in the order of this stream
            on_device = torch.from_numpy(addresses).pin_memory().to(f"cuda:{self._device}", non_blocking=True)
            launch(on_device[: len(entries)], on_device[len(entries) :], size, PROGRAMS)


def calibrated_loads(driver: CudaDriver) -> KernelLoads:
    """Loads by the kernel where they are faster on this device, as far as that is known or can be measured."""
    device = f"{driver.name}, driver {nvidia_release()}, CUDA {driver.version}"

    def allocate(num_bytes: int) -> tuple[int, object]:
        tensor = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{driver.device}")
        return tensor.data_ptr(), tensor

    usual = KernelLoads(driver.device, USUAL)
    return KernelLoads(driver.device, kernel_range(driver, usual, device, allocate, CacheFile.of_user(FILE)))


def launch(sources: Any, targets: Any, size: int, programs: int) -> None:
    """Copy `size` bytes from each address of the tensor `sources` to that of `targets`, on the current stream."""
    grid = (min(programs, len(sources)),)
    copy_runs[grid](sources, targets, size // WORD_BYTES, len(sources), chunk=CHUNK_WORDS)
