"""Start of a rank's copies on its device: pinned memory, and a test before anything is served.

Owns the requirements on the device, and the order in which its parts begin and end.
"""

from __future__ import annotations

import logging
import os
from functools import partial

from kvpact.config import KvpactConfig
from kvpact.errors import ConfigError
from kvpact.events.timeline import Timeline
from kvpact.memory.arena import ArenaSegment
from kvpact.memory.shared_slots import SharedSlots, take_turn
from kvpact.units import format_size
from kvpact.worker.device.base import Device
from kvpact.worker.device.engine import DeviceTransferEngine
from kvpact.worker.device.pinned import FIRST_SECONDS, PIN_LIMITS, PinnedSlots
from kvpact.worker.device.proof import Proof
from kvpact.worker.paged import PagedKV
from kvpact.worker.round_trip import require_round_trip
from kvpact.worker.timed import follow_copies

logger = logging.getLogger(__name__)


class OpenedDevice(DeviceTransferEngine):
    """Transfer engine of one rank, which owns its pinned memory and its checks on the device."""

    def __init__(
        self,
        config: KvpactConfig,
        paged: PagedKV,
        segment: ArenaSegment,
        device: Device,
        node: int | None = None,
        model: str = "a model",
    ) -> None:
        """`node` is the device's memory node, if known; `model` names the model, for people.

        Raises ConfigError if the device or its copies cannot be used, and leaves nothing pinned.
        """
        if config.timeline is not None:
            follow_copies(Timeline(config.timeline), device)
        segment.place_pages(huge=config.huge_pages == "on", node=node)
        self._pinned = PinnedSlots(device, segment)
        try:
            self._pin(device, segment)
            super().__init__(paged, segment, device, self._pinned.chunk_bytes[0])
            with take_turn(segment):
                require_round_trip(self, paged, segment, segment.usable_slots)
            stores = config.save != "off" and not isinstance(segment, SharedSlots)
            self.proof = Proof(paged, segment, device, stores=stores, model=model)
        except Exception as error:
            self._pinned.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"KV memory on {device.name} cannot be copied: {error}") from error
        logger.info("copies on %s, host memory %s", device.name, "pinned" if device.pinned else "not pinned: slower")

    def _pin(self, device: Device, segment: ArenaSegment) -> None:
        """Pin the first slots, and the others in the background; if most cannot be pinned, none is."""
        segment.usable_slots = 0
        self._pinned.start(partial(setattr, segment, "usable_slots"))
        self._pinned.wait_for_first(FIRST_SECONDS * segment.sharers)  # they pin the same pages in turns
        device.pinned = self._pinned.suffice()
        if not device.pinned:
            self._pinned.close()
            segment.pages.start()
            segment.usable_slots = segment.num_slots
            logger.warning(
                "arena: most of %s cannot be pinned on %s, so none is: copies to and from it are slower (%s)",
                format_size(len(segment.memory)),
                device.name,
                PIN_LIMITS,
            )

    def close(self, seconds: float) -> bool:
        """See `TransferEngine`. Memory stays pinned while a copy may still be under way, and for a parent process."""
        ended = super().close(seconds)
        if ended and self._process == os.getpid():
            self._pinned.close()
        return ended
