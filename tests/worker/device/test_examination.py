"""`kvpact doctor --gpu` on a device that is played: every figure is there, and bytes that are wrong end it."""

from __future__ import annotations

from typing import Any

import pytest

from kvpact.errors import KvpactError
from kvpact.worker import round_trip
from kvpact.worker.device import examination
from kvpact.worker.device.examination import LAYERS, Bench, examine
from kvpact_testkit.device.played import PlayedDevice

torch = pytest.importorskip("torch")


class PlayedBench:
    """A bench of two blocks, whose memory is a played device's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(round_trip, "LIMIT_SECONDS", 60.0)
        monkeypatch.setattr(examination, "PAGES", (8 << 10,))
        self.device = PlayedDevice(3)
        self.told: dict[str, dict[str, Any]] = {}
        self.bench = Bench(self.device, self.allocate, self.device.finish_computing, num_bytes=1, rounds=2)

    def allocate(self, rows: int, num_bytes: int) -> Any:
        memory = torch.zeros((rows, num_bytes), dtype=torch.uint8)
        self.device.map(memory)
        return memory

    def run(self) -> None:
        examine(self.bench, self.told.__setitem__)


def test_each_layout_has_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedBench(monkeypatch)
    played.run()
    assert list(played.told) == ["layer by layer, 8 KiB", "block by block, 8 KiB"]
    assert [figures["entries"] for figures in played.told.values()] == [4 * LAYERS, 4]
    for figures in played.told.values():
        assert figures["pinned"]
        assert all(value > 0 for value in figures.values())
    assert played.device.driver.violations == []


def test_a_wrong_byte_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedBench(monkeypatch)
    load = played.device.load
    monkeypatch.setattr(
        played.device,
        "load",
        lambda targets, sources, sizes, stream: load(targets, sources[::-1].copy(), sizes, stream),
    )
    with pytest.raises(KvpactError):
        played.run()
    assert played.told == {}
