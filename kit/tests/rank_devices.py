"""Simulated devices in the place of those that a connector's ranks would open."""

from __future__ import annotations

from typing import Any

import pytest

from kvpact.memory.arena import ArenaSegment
from kvpact_testkit.device.played import PlayedDevice


class Devices:
    """A device for each rank, opened where the connector would open a real one."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seed: int = 1, kind: type[PlayedDevice] = PlayedDevice, first: int = 0
    ) -> None:
        """`first`: see `PlayedDevice.checks_first`."""
        self._seed, self._kind, self._first = seed, kind, first
        self._devices: list[PlayedDevice] = []
        self._opened = 0
        self.segments: list[ArenaSegment] = []
        """Opened so far."""
        monkeypatch.setattr("kvpact.vllm.device.open_device", self._open)

    def _open(self, config: Any, paged: Any, segment: Any, model: str) -> Any:
        """Ranks open theirs in order."""
        assert model, "an error names it"
        self.segments.append(segment)
        rank = self._opened % len(self._devices)
        self._opened += 1
        return self._devices[rank].open(config, paged, segment, rank)

    def of_rank(self, rank: int) -> PlayedDevice:
        """A new one; ranks are made in order, again for each engine."""
        del self._devices[rank:]
        if rank == 0:
            self._opened = 0
        self._devices.append(self._kind(self._seed + rank))
        self._devices[rank].checks_first = self._first
        return self._devices[rank]

    @property
    def entries(self) -> list[int]:
        """Copies so far, rank by rank."""
        return [device.driver.num_entries for device in self._devices]

    @property
    def violations(self) -> list[str]:
        return [violation for device in self._devices for violation in device.driver.violations]
