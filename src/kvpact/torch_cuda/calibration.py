"""Which loads are faster by the kernel than by the device's copy engines: measured once for a device, and remembered.

Owns the measurement, its limit in time, and the file in the user's cache folder. Nothing here is an error: what cannot
be measured is as usual, and what cannot be remembered is measured again. Needs no torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from kvpact.own_files import CacheFile, NotOurs
from kvpact.torch_cuda.trial_memory import pinned_segment
from kvpact.worker.cuda.copies import Kernel
from kvpact.worker.cuda.driver import AccessOrder, Driver
from kvpact.worker.cuda.entries import Entries

logger = logging.getLogger(__name__)

FILE: Final = "gpu_copies.json"

FORMAT: Final = 1
"""Of the file, and of how is measured: what another format says is measured again."""

MAX_DEVICES: Final = 32
"""That are remembered: a home folder may be that of many machines."""

SECONDS: Final = 0.3
"""For the whole measurement, without the kernel's compilation, which its first load would take too."""

POLL_SECONDS: Final = 0.1
"""A load that takes longer is waited for asleep; it is too slow to be compared."""

SCRATCH_BYTES: Final = 16 << 20
"""On each side."""

SIZES: Final = (4 << 10, 8 << 10, 16 << 10, 24 << 10, 32 << 10)
"""Of an entry."""

LARGE_BYTES: Final = 64 << 10
"""Entries of this size are never loaded by the kernel: copy engines reach the bus, and take no processors."""

COUNTS: Final = (512, 256, 128, 64, 32, 16, 8)
"""Of entries; sizes are compared at the first."""

ATTEMPTS: Final = 3
"""The best one counts."""

MARGIN: Final = 1.1
"""The kernel has to be so many times faster: it takes processors from what computes."""


@dataclass(frozen=True, slots=True)
class KernelRange:
    """Loads for the kernel: at least `min_entries`, each below `dma_bytes`. The defaults are what others measured."""

    dma_bytes: int = 32 << 10
    """51 of 55 GB/s at 64 KiB by the copy engines, 7 at 8 KiB (vllm#42212)."""
    min_entries: int = 16


USUAL: Final = KernelRange()


Seconds = Callable[[bool, int, int], float]
"""(whether by the kernel, bytes of an entry, entries) -> seconds of such a load."""


def found_range(seconds: Seconds, clock: Callable[[], float]) -> KernelRange | None:
    """Measure; None if that takes over `SECONDS`, so that there is no answer."""
    for by_kernel in (True, False):
        seconds(by_kernel, SIZES[0], COUNTS[0])  # compiles, and makes what is made once
    end = clock() + SECONDS

    def kernel_wins(size: int, count: int) -> bool:
        engines, kernel = (min(seconds(by_kernel, size, count) for _ in range(ATTEMPTS)) for by_kernel in (False, True))
        return kernel * MARGIN < engines

    won = []
    for size in SIZES:
        if kernel_wins(size, COUNTS[0]):
            won.append(size)
        if clock() > end:
            return None
    if not won:
        return KernelRange(0, 1)
    larger = [size for size in (*SIZES, LARGE_BYTES) if size > won[-1]]
    least = COUNTS[0]
    for count in COUNTS[1:]:
        if clock() > end:
            return None
        if not kernel_wins(won[len(won) // 2], count):
            break
        least = count
    return KernelRange(larger[0], least)


class LoadTimer:
    """Times loads of scattered entries between two pieces of memory. See `Seconds`."""

    def __init__(self, driver: Driver, kernel: Kernel, device: int, host: int, clock: Callable[[], float]) -> None:
        """`device` and `host` are addresses of `SCRATCH_BYTES`; the latter are pinned together."""
        self._driver, self._kernel, self._device, self._host, self._clock = driver, kernel, device, host, clock
        self._stream, self._event = driver.create_stream(), driver.create_event()

    def __call__(self, by_kernel: bool, size: int, count: int) -> float:
        """Returns when nothing of the load is under way. Raises CudaError, and whatever a kernel's launch raises."""
        order = np.random.default_rng(count).permutation(SCRATCH_BYTES // size)[:count].astype(np.uint64)
        places = order * np.uint64(size)
        targets, sources = places + np.uint64(self._device), places[::-1] + np.uint64(self._host)
        entries = Entries(targets, sources.copy(), np.full(len(order), size, np.uint64))
        began = self._clock()
        if by_kernel:
            self._kernel.load(entries, self._stream)
        else:
            self._driver.copy_batch(entries.device, entries.host, entries.sizes, AccessOrder.ANY, self._stream)
        self._driver.record(self._event, self._stream)
        while not self._driver.is_done(self._event):
            if self._clock() - began > POLL_SECONDS:
                self._driver.synchronize(self._event)
        return self._clock() - began

    def close(self) -> None:
        """Give back what the driver has made for it."""
        self._driver.destroy_stream(self._stream)
        self._driver.destroy_event(self._event)


class RememberedRanges:
    """The ranges of the devices that this user has had."""

    def __init__(self, file: CacheFile) -> None:
        self._file = file

    def find(self, device: str) -> KernelRange | None:
        """Of a device by its name, driver and all that may change it."""
        match self._devices().get(device):
            case {"dma_bytes": int(size), "min_entries": int(least)} if 0 <= size <= LARGE_BYTES and least >= 1:
                return KernelRange(size, least)
        return None

    def remember(self, device: str, found: KernelRange) -> None:
        """Above `MAX_DEVICES` the oldest are forgotten. A file that cannot be written is logged."""
        devices = self._devices()
        devices.pop(device, None)
        devices[device] = asdict(found)
        try:
            self._file.write({"format": FORMAT, "devices": dict(list(devices.items())[-MAX_DEVICES:])})
        except (OSError, NotOurs) as error:
            logger.info("what was measured on this device is not remembered: %s", error)

    def _devices(self) -> dict[str, object]:
        content = self._file.read()
        devices = content.get("devices") if content.get("format") == FORMAT else None
        return devices if isinstance(devices, dict) else {}


def kernel_range(
    driver: Driver, kernel: Kernel, device: str, allocate: Callable[[int], tuple[int, object]], file: CacheFile
) -> KernelRange:
    """The range of `device`, remembered or measured now; the usual one where neither can be had.

    `allocate(bytes)` gives (address, owner) of memory on the device.
    """
    remembered = RememberedRanges(file)
    known = remembered.find(device)
    if known is not None:
        return known
    began = time.perf_counter()
    try:
        found = _measured(driver, kernel, allocate)
    except Exception as error:  # a kernel's launch may raise anything; loads fall back as it does
        logger.info("how this device loads small pages could not be measured: %s", error)
        return USUAL
    if found is None:
        logger.info("how this device loads small pages was not measured within %g s", SECONDS)
        return USUAL
    remembered.remember(device, found)
    logger.info(
        "loads of %d entries and more below %d bytes go by a kernel: measured in %.2f s, and remembered",
        found.min_entries, found.dma_bytes, time.perf_counter() - began,
    )  # fmt: skip
    return found


def _measured(driver: Driver, kernel: Kernel, allocate: Callable[[int], tuple[int, object]]) -> KernelRange | None:
    address, owner = allocate(SCRATCH_BYTES)
    with pinned_segment(driver, 1, SCRATCH_BYTES, 1) as segment:
        timer = LoadTimer(driver, kernel, address, segment.mapped_at, time.perf_counter)
        try:
            return found_range(timer, time.perf_counter)
        finally:
            timer.close()
            del owner
