"""Moving bytes between pages and slots: the protocol in `base.py`, and one module for each kind of device."""

from __future__ import annotations

from kvpact.errors import ConfigError
from kvpact.memory.arena import ArenaSegment
from kvpact.worker.copy.base import TransferEngine
from kvpact.worker.copy.cpu import CpuTransferEngine
from kvpact.worker.paged import PagedKV


def transfer_engine_for(paged: PagedKV, segment: ArenaSegment, rank: int) -> TransferEngine:
    """The engine for the device that holds `paged`. Raises ConfigError if there is none."""
    if paged.device_type == "cpu":
        (slot_class,) = segment.classes  # a further class has layers of its own, and an engine of its own for them
        return CpuTransferEngine(paged, segment, slot_class, rank)
    raise ConfigError(f"KV memory on device {paged.device_type!r} cannot be copied by this release; supported: 'cpu'")


__all__ = ["transfer_engine_for"]
