"""Moving bytes between pages and slots: the protocol in `base.py`, and one module for each kind of device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from kvpact.config import KvpactConfig
from kvpact.errors import ConfigError
from kvpact.memory.arena import ArenaSegment
from kvpact.memory.prefault import START_SECONDS
from kvpact.worker.copy.base import TransferEngine
from kvpact.worker.copy.cpu import CpuTransferEngine
from kvpact.worker.paged import PagedKV

DeviceOpener: TypeAlias = Callable[[KvpactConfig, PagedKV, ArenaSegment, int], TransferEngine]
"""Opens the transfer engine for one type of device, whose libraries the core does not import; and places and takes the
segment's pages, see `ArenaSegment.place_pages`."""


def transfer_engine_for(
    config: KvpactConfig,
    paged: PagedKV,
    segment: ArenaSegment,
    rank: int,
    openers: Mapping[str, DeviceOpener],
) -> TransferEngine:
    """Open the transfer engine for the device that holds `paged`; `openers` by device type, as torch names it.

    Takes the segment's pages from the machine from now on, where it suits the device.
    Raises ConfigError if there is no transfer engine, or it cannot be used.
    """
    if paged.device_type == "cpu":
        segment.place_pages(huge=config.huge_pages != "off")
        segment.pages.start()
        segment.pages.wait_for_first(START_SECONDS)  # else the first prompt pays for them
        return CpuTransferEngine(paged, segment, segment.classes, rank)
    opener = openers.get(paged.device_type)
    if opener is None:
        raise ConfigError(
            f"KV memory on device {paged.device_type!r} cannot be copied by this release; supported: "
            f"{', '.join(repr(name) for name in ('cpu', *openers))}"
        )
    return opener(config, paged, segment, rank)
