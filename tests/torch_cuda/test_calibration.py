"""Which loads go by the kernel: found within a limit of time, remembered, and never a reason not to start."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpact.own_files import CacheFile
from kvpact.testkit.device.hostile_driver import HostileDriver
from kvpact.torch_cuda import calibration
from kvpact.torch_cuda.calibration import (
    COUNTS,
    SIZES,
    USUAL,
    KernelRange,
    RememberedRanges,
    found_range,
    kernel_range,
)
from kvpact.worker.cuda.driver import AccessOrder, CudaError
from kvpact.worker.cuda.entries import Entries

KIB = 1 << 10


class PlayedClock:
    """Copy engines that are slow below `fast_from` bytes, a kernel that takes its time to launch."""

    def __init__(self, fast_from: int, launch: float = 20e-6, kernel_rate: float = 50e9) -> None:
        self.now = 0.0
        self.fast_from, self.launch, self.kernel_rate = fast_from, launch, kernel_rate
        self.slow_at_first = 5.0
        """The kernel's compilation, in seconds."""

    def cost(self, by_kernel: bool, size: int, count: int) -> float:
        if by_kernel:
            return self.launch + size * count / self.kernel_rate
        return 5e-6 + size * count / (55e9 if size >= self.fast_from else 6e9)

    def seconds(self, by_kernel: bool, size: int, count: int) -> float:
        spent = self.cost(by_kernel, size, count) + (self.slow_at_first if by_kernel else 0.0)
        self.slow_at_first *= not by_kernel
        self.now += spent
        return spent


@pytest.mark.parametrize(
    ("played", "expected"),
    [
        (PlayedClock(24 * KIB), KernelRange(24 * KIB, 16)),
        (PlayedClock(32 * KIB, launch=400e-6), KernelRange(32 * KIB, 256)),
        (PlayedClock(1 << 30, launch=0), KernelRange(64 * KIB, 8)),
        (PlayedClock(4 * KIB), KernelRange(0, 1)),
        (PlayedClock(1 << 30, kernel_rate=5.9e9), KernelRange(0, 1)),
    ],
    ids=["a crossing", "a slow launch", "always the kernel", "never the kernel", "hardly faster"],
)
def test_the_faster_way_is_found_by_size_and_number(played: PlayedClock, expected: KernelRange) -> None:
    assert found_range(played.seconds, lambda: played.now) == expected
    assert played.now < 5.0 + calibration.SECONDS


def test_a_slow_device_is_not_measured_to_the_end() -> None:
    played = PlayedClock(24 * KIB, launch=0.05, kernel_rate=1e9)
    assert found_range(played.seconds, lambda: played.now) is None
    longest = 2 * calibration.ATTEMPTS * (0.06 + max(SIZES) * COUNTS[0] / 1e9)
    assert played.now < 5.2 + calibration.SECONDS + longest


def test_an_outlier_changes_nothing() -> None:
    played, calls = PlayedClock(24 * KIB), [0]

    def seconds(by_kernel: bool, size: int, count: int) -> float:
        calls[0] += 1
        return played.seconds(by_kernel, size, count) + (calls[0] % calibration.ATTEMPTS == 0) * 0.002

    assert found_range(seconds, lambda: played.now) == KernelRange(24 * KIB, 16)


# On a device


class PlayedKernel:
    def __init__(self, driver: HostileDriver, works: bool = True) -> None:
        self._driver, self._works = driver, works
        self.loads = 0

    def suits(self, entries: Entries) -> bool:
        return True

    def load(self, entries: Entries, stream: int) -> None:
        self.loads += 1
        if not self._works:
            raise RuntimeError("the kernel cannot be compiled")
        self._driver.launch_copies(entries.device, entries.host, entries.sizes, AccessOrder.STREAM, stream)


class Device:
    """A hostile device with scratch memory, on which a start may ask for its range."""

    def __init__(self, works: bool = True) -> None:
        self.driver = HostileDriver(3)
        self.kernel = PlayedKernel(self.driver, works)

    def allocate(self, num_bytes: int) -> tuple[int, object]:
        memory = np.zeros(num_bytes, np.uint8)
        self.driver.add_device_memory(memory.ctypes.data, num_bytes)
        return memory.ctypes.data, memory

    def range(self, file: CacheFile, name: str = "A device, driver 580") -> KernelRange:
        return kernel_range(self.driver, self.kernel, name, self.allocate, file)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """As little as a hostile device, on which a copy takes 20 us, can do in a moment."""
    monkeypatch.setattr(calibration, "COUNTS", (8, 4))
    monkeypatch.setattr(calibration, "SCRATCH_BYTES", 1 << 19)
    monkeypatch.setattr(calibration, "SECONDS", 60.0)


def test_a_device_is_measured_once_and_gets_its_memory_back(few: None, tmp_path: Path) -> None:
    device, file = Device(), CacheFile(tmp_path / "kvpact" / "gpu_copies.json")
    found = device.range(file)
    assert device.kernel.loads > 2 * calibration.ATTEMPTS
    assert (device.driver.violations, device.driver.pinned_bytes, device.driver.busy_streams) == ([], 0, 0)
    again = Device()
    assert (again.range(file), again.kernel.loads) == (found, 0)
    again.range(file, "A device, driver 590")
    assert again.kernel.loads > 0, "another driver may be another matter"
    assert set(json.loads((tmp_path / "kvpact" / "gpu_copies.json").read_text())["devices"]) == {
        "A device, driver 580",
        "A device, driver 590",
    }


def test_what_cannot_be_measured_is_as_usual_and_not_remembered(
    few: None, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = CacheFile(tmp_path / "kvpact" / "gpu_copies.json")
    with caplog.at_level(logging.INFO):
        assert Device(works=False).range(file) == USUAL
        monkeypatch.setattr(calibration, "SECONDS", 0.0)
        assert Device().range(file) == USUAL
        full = Device()
        monkeypatch.setattr(full.driver, "register", refuse)
        assert full.range(file) == USUAL
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "how this device loads small pages could not be measured",
        "how this device loads small pages was not measured within 0 s",
        "how this device loads small pages could not be measured",
    ]
    assert not (tmp_path / "kvpact").exists()


def refuse(address: int, num_bytes: int) -> None:
    raise CudaError("cuMemHostRegister", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")


# What is remembered


@pytest.mark.parametrize(
    "content",
    [
        "no json",
        "[]",
        '{"format": 2, "devices": {"a": {"dma_bytes": 4096, "min_entries": 1}}}',
        '{"format": 1, "devices": {"a": {"dma_bytes": -1, "min_entries": 1}}}',
        '{"format": 1, "devices": {"a": {"dma_bytes": 4096, "min_entries": 0}}}',
        '{"format": 1, "devices": {"a": {"dma_bytes": 131072, "min_entries": 1}}}',
        '{"format": 1, "devices": {"a": {"dma_bytes": "4096", "min_entries": 1}}}',
        '{"format": 1, "devices": []}',
    ],
)
def test_a_damaged_file_counts_as_none_and_is_replaced(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "kvpact"
    folder.mkdir(mode=0o700)
    (folder / "gpu_copies.json").write_text(content)
    remembered = RememberedRanges(CacheFile(folder / "gpu_copies.json"))
    assert remembered.find("a") is None
    remembered.remember("a", KernelRange(4096, 3))
    assert remembered.find("a") == KernelRange(4096, 3)


def not_a_folder(tmp_path: Path) -> CacheFile:
    (tmp_path / "kvpact").write_text("")
    return CacheFile(tmp_path / "kvpact" / "gpu_copies.json")


@pytest.mark.parametrize("place", [not_a_folder, lambda tmp_path: CacheFile(Path("/proc/kvpact/gpu_copies.json"))])
def test_a_file_that_cannot_be_written_is_one_line_in_the_log(
    tmp_path: Path, place: Callable[[Path], CacheFile], caplog: pytest.LogCaptureFixture
) -> None:
    remembered = RememberedRanges(place(tmp_path))
    with caplog.at_level(logging.INFO):
        remembered.remember("a", KernelRange(4096, 3))
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "what was measured on this device is not remembered"
    ]
    assert remembered.find("a") is None


def test_two_processes_at_once_leave_a_whole_file_and_old_devices_are_forgotten(tmp_path: Path) -> None:
    ours, theirs = (RememberedRanges(CacheFile(tmp_path / "kvpact" / "gpu_copies.json")) for _ in range(2))
    for number in range(calibration.MAX_DEVICES + 3):
        (ours, theirs)[number % 2].remember(f"device {number}", KernelRange(4096, number + 1))
    content: Any = json.loads((tmp_path / "kvpact" / "gpu_copies.json").read_text())
    assert len(content["devices"]) == calibration.MAX_DEVICES
    assert ours.find("device 2") is None
    assert ours.find("device 34") == theirs.find("device 34") == KernelRange(4096, 35)
    CacheFile(None).write({})
    assert RememberedRanges(CacheFile(None)).find("device 34") is None
