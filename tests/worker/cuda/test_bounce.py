"""A bounce buffer, where slots cannot be pinned: whatever can be pinned for it, and who copies what on the host."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from device_beds import Bed
from kvpact.contract import LoadJob, SaveJob
from kvpact.errors import ConfigError
from kvpact.testkit.device.hostile_driver import HostileDriver
from kvpact.worker.cuda import bounce
from kvpact.worker.cuda.bounce import MIN_PART_BYTES, PART_BYTES, PARTS, STREAMS, BounceBuffer, copy_on_host, cut
from kvpact.worker.cuda.driver import CudaError
from kvpact.worker.cuda.entries import Entries


class Limited(HostileDriver):
    """A device that pins so many bytes of the process's memory, and so many of its own."""

    def __init__(self, registers: int, allocates: int) -> None:
        super().__init__(1)
        self.most = {"register": registers, "allocate": allocates}

    def _check(self, call: str, num_bytes: int) -> None:
        if num_bytes > self.most[call]:
            raise CudaError(call, 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")

    def register(self, address: int, num_bytes: int) -> None:
        self._check("register", num_bytes)
        super().register(address, num_bytes)

    def allocate(self, num_bytes: int) -> int:
        self._check("allocate", num_bytes)
        self.most["register"] = 1 << 30  # the played driver allocates by registering
        return super().allocate(num_bytes)


WHOLE, MIN = (size * PARTS * STREAMS for size in (PART_BYTES, MIN_PART_BYTES))


@pytest.mark.parametrize(
    ("registers", "allocates", "got"),
    [(WHOLE, 0, WHOLE), (MIN, WHOLE, WHOLE), (MIN, MIN, MIN), (0, MIN, MIN)],
)
def test_what_can_be_pinned_is_the_buffer(registers: int, allocates: int, got: int) -> None:
    driver = Limited(registers, allocates)
    buffer = BounceBuffer(driver)
    assert buffer.num_bytes == driver.pinned_bytes == got
    parts = [part for stream in range(STREAMS) for part in buffer.parts(stream)]
    assert np.diff([part.address for part in parts]).tolist() == [got // len(parts)] * (len(parts) - 1)
    assert {part.num_bytes for part in parts} == {got // len(parts)}
    buffer.close()
    buffer.close()
    assert driver.pinned_bytes == 0
    assert driver.violations == []


def test_where_nothing_can_be_pinned_the_limit_is_named() -> None:
    with pytest.raises(ConfigError, match=r"not even 6MiB can be pinned .*register failed.*allocate failed.*ulimit -l"):
        BounceBuffer(Limited(MIN - 1, MIN - 1))


@pytest.mark.parametrize("part_bytes", [1, 7, 100, 1000, 1 << 20])
def test_runs_are_packed_into_parts_and_no_byte_is_lost(part_bytes: int) -> None:
    random = np.random.default_rng(part_bytes)
    source, target = random.integers(0, 256, 2000, np.uint8), np.zeros(2000, np.uint8)
    sizes = random.integers(1, 40, 30).astype(np.uint64)
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.uint64)
    order = np.sort(random.choice(30, 20, replace=False))
    chosen = Entries(
        starts[order] + np.uint64(target.ctypes.data), starts[order] + np.uint64(source.ctypes.data), sizes[order]
    )
    packed = 0
    for piece, offsets in cut(chosen, part_bytes):
        assert offsets.tolist() == np.cumsum([0, *piece.sizes])[:-1].tolist()
        assert piece.num_bytes <= part_bytes
        packed += piece.num_bytes
        copy_on_host(piece.device, piece.host, piece.sizes)
    assert packed == chosen.num_bytes
    wanted = np.zeros(2000, bool)
    for start, size in zip(starts[order].astype(int), sizes[order].astype(int), strict=True):
        wanted[start : start + size] = True
    assert (target[wanted] == source[wanted]).all()
    assert not target[~wanted].any()


def test_the_computing_thread_copies_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def noted(targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> None:
        threads.append(threading.current_thread().name)
        copy_on_host(targets, sources, sizes)

    monkeypatch.setattr(bounce, "copy_on_host", noted)
    bed = Bed("one by one", 0, bounced=True)
    transfers = [
        *bed.engine.load([LoadJob(1, "r", 0, (1,), (1,), True), LoadJob(2, "r", 0, (2,), (2,), False)]),
        *bed.engine.save([SaveJob(3, "r", 0, (3,), (3,))]),
    ]
    end = time.monotonic() + 5
    while not all(transfer.ended for transfer in transfers) and time.monotonic() < end:
        bed.finish()
        time.sleep(0.001)
    assert not any(len(transfer.failed) for transfer in transfers)
    assert set(threads) == {"kvpact-step-0", "kvpact-load-0", "kvpact-save-0"}
    bed.close()
