"""Opens a rank's copies on a CUDA device: the driver, pinned memory, the kernel, and a trial of them all.

Owns what must be true of the device before anything is served, and the order in which its parts begin and end.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from functools import partial

import torch

from kvpact.config import KvpactConfig
from kvpact.errors import ConfigError
from kvpact.memory.arena import ArenaSegment
from kvpact.memory.numa import near_node
from kvpact.memory.shared_slots import take_turn
from kvpact.units import format_size
from kvpact.worker.cuda.bounce import BounceBuffer
from kvpact.worker.cuda.copies import DeviceCopies, Kernel
from kvpact.worker.cuda.driver import CAN_USE_HOST_POINTER, CudaDriver, CudaError
from kvpact.worker.cuda.engine import CudaTransferEngine
from kvpact.worker.cuda.pinned import FIRST_SECONDS, RAISE_THE_LIMIT, PinnedSlots
from kvpact.worker.paged import PagedKV
from kvpact.worker.round_trip import require_round_trip

logger = logging.getLogger(__name__)

UNPROVEN = (
    "KV memory on a GPU: kvpact's copies for CUDA have run on no GPU yet, only on one that is played. To try them, "
    'set "gpu": "unproven"; each start then copies 64 blocks out and back before anything is served'
)


class OpenedDevice(CudaTransferEngine):
    """The transfer engine of one rank on its device, which owns what it needs there."""

    def __init__(self, paged: PagedKV, segment: ArenaSegment, rank: int, *, huge_pages: bool) -> None:
        """Raises ConfigError if the device or its copies cannot be used, and leaves nothing."""
        device = paged.tensors[0].device.index or 0
        try:
            with ExitStack() as owned:
                self._driver = CudaDriver(device)
                owned.callback(self._driver.close)
                segment.place_pages(huge=huge_pages, node=near_node(self._driver.pci_bus_id))
                bounce = self._pin(segment, owned)
                copies = DeviceCopies(
                    paged,
                    segment,
                    self._driver,
                    lambda: int(torch.cuda.current_stream(device).cuda_stream),
                    self._pinned.chunk_bytes[0],
                    kernel_for(self._driver),
                )
                super().__init__(copies, rank, bounce)
                self._owned = owned.pop_all()
            self._try_out(paged, segment, rank)
        except CudaError as error:
            raise ConfigError(f"KV memory on cuda:{device} cannot be copied: {error}") from error

    def _pin(self, segment: ArenaSegment, owned: ExitStack) -> BounceBuffer | None:
        """Pin the first slots, and the others in the background; or a buffer, which is returned."""
        self._pinned = PinnedSlots(self._driver, segment)
        owned.callback(self._pinned.close)
        segment.usable_slots = 0
        self._pinned.start(partial(setattr, segment, "usable_slots"))
        self._pinned.wait_for_first(FIRST_SECONDS * segment.sharers)  # they pin the same pages in turns
        if self._pinned.suffice():
            return None
        bounce = self._bounce_for(segment)
        owned.callback(bounce.close)
        return bounce

    def _try_out(self, paged: PagedKV, segment: ArenaSegment, rank: int) -> None:
        driver = self._driver
        try:
            with take_turn(segment):
                require_round_trip(self, paged, segment, segment.usable_slots)
            logger.info(
                "rank %d: copies on %s, driver for CUDA %d, %s",
                rank,
                driver.name,
                driver.version,
                "in batches" if driver.copies_in_batches else "one by one: the driver is older than 12.8",
            )
        except (ConfigError, CudaError):
            self.close(1.0)
            raise

    def _bounce_for(self, segment: ArenaSegment) -> BounceBuffer:
        """A buffer for copies to slots that cannot be pinned, all of which are usable then."""
        error = self._pinned.error
        self._pinned.close()
        bounce = BounceBuffer(self._driver)
        segment.pages.start()
        logger.warning(
            "arena: most of %s cannot be pinned (%s). Copies to and from the GPU go by way of a pinned buffer of %s, "
            "at the speed of one core; to have them faster, %s",
            format_size(len(segment.memory)),
            error,
            format_size(bounce.num_bytes),
            RAISE_THE_LIMIT,
        )
        segment.usable_slots = segment.num_slots
        return bounce

    def close(self, seconds: float) -> bool:
        """See `TransferEngine`. Memory stays pinned while a copy may still be under way, and for a parent process."""
        ended = super().close(seconds)
        if ended and self._process == os.getpid():
            self._owned.close()
        return ended


def open_cuda(config: KvpactConfig, paged: PagedKV, segment: ArenaSegment, rank: int) -> OpenedDevice:
    """The copies of a rank whose KV memory is on a CUDA device. Raises ConfigError for any reason not to use them."""
    if torch.version.hip is not None:
        raise ConfigError(
            "KV memory on a ROCm device cannot be copied by this release: kvpact calls NVIDIA's driver; what is "
            "missing is HIP's counterpart of kvpact.worker.cuda.driver"
        )
    if config.gpu != "unproven":
        raise ConfigError(UNPROVEN)
    return OpenedDevice(paged, segment, rank, huge_pages=config.huge_pages == "on")


def kernel_for(driver: CudaDriver) -> Kernel | None:
    """The kernel for small pages; None without Triton, or if kernels cannot read the host's memory.

    At the first start on a device it is measured which pages these are: 0.3 s at most, and the kernel's compilation.
    """
    if not driver.attribute(CAN_USE_HOST_POINTER):
        return None
    try:
        from kvpact.torch_cuda.kernel import calibrated_loads
    except ImportError as error:
        logger.info("loads of small pages go by the device's copy engines: %s", error)
        return None
    return calibrated_loads(driver)
