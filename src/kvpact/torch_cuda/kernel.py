"""Loads of small pages by a kernel: below 32 KiB a copy engine is slower than a few programs that read host memory.

Owns the choice between the two, and the launch. Importing this imports torch and Triton, which are the engine's.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from kvpact.torch_cuda.gather_kernel import CHUNK_WORDS, WORD_BYTES, copy_runs
from kvpact.worker.cuda.entries import Entries

DMA_BYTES: Final = 32 << 10
"""Entries of this size or more go by the device's copy engines: 51 of 55 GB/s at 64 KiB, 7 at 8 KiB (vllm#42212)."""

MIN_ENTRIES: Final = 16
"""Fewer are not worth a launch."""

PROGRAMS: Final = 12
"""Of the kernel: 48 to 55 GB/s with 9 % of an H100's processors (vllm#42212)."""


class KernelLoads:
    """Carries out loads of small pages on one device. See `kvpact.worker.cuda.copies.Kernel`."""

    def __init__(self, device: int) -> None:
        """`device` counts those that the process sees."""
        self._device = device

    def suits(self, entries: Entries) -> bool:
        """See `Kernel`."""
        if len(entries) < MIN_ENTRIES:
            return False
        size = int(entries.sizes[0])
        if size >= DMA_BYTES or size % WORD_BYTES or (entries.sizes != size).any():
            return False
        return not ((entries.device | entries.host) % WORD_BYTES).any()

    def load(self, entries: Entries, stream: int) -> None:
        """See `Kernel`."""
        size = int(entries.sizes[0])
        addresses = np.concatenate([entries.host, entries.device]).astype(np.int64)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self._device)):
            # pinned and copied within the stream: torch keeps both until the kernel has read them
            on_device = torch.from_numpy(addresses).pin_memory().to(f"cuda:{self._device}", non_blocking=True)
            launch(on_device[: len(entries)], on_device[len(entries) :], size, PROGRAMS)


def launch(sources: Any, targets: Any, size: int, programs: int) -> None:
    """Copy `size` bytes from each address of the tensor `sources` to that of `targets`, on the current stream."""
    grid = (min(programs, len(sources)),)
    copy_runs[grid](sources, targets, size // WORD_BYTES, len(sources), chunk=CHUNK_WORDS)
