"""Loads of small pages by a kernel: which they are, and, in Triton's interpreter, that every byte arrives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpact.own_files import CacheFile
from kvpact.torch_cuda.calibration import USUAL, KernelRange, RememberedRanges
from kvpact.torch_cuda.doctor.facts import nvidia_release
from kvpact.worker.cuda.entries import Entries

kernel = pytest.importorskip("kvpact.torch_cuda.kernel")
DMA_BYTES, MIN_ENTRIES = USUAL.dma_bytes, USUAL.min_entries

IN_THE_INTERPRETER = """
import numpy as np, torch
from kvpact.memory.arena import ArenaSegment
from kvpact.torch_cuda.kernel import launch

RUNS, SLOT = 13, 1 << 17
segment = ArenaSegment.create(RUNS, SLOT)
slots = np.frombuffer(segment.memory, np.uint8).reshape(RUNS, SLOT)
slots[:] = np.random.default_rng(1).integers(0, 256, slots.shape, np.uint8)
for size in (8, 16, 24, 1000, 4096, 8192, 8200, 16384, 28672, 65536):
    for programs in (1, 12):
        pages = np.zeros((RUNS, size + 64), np.uint8)
        order = np.random.default_rng(size).permutation(RUNS)
        sources = torch.from_numpy(slots.ctypes.data + 8 + np.arange(RUNS) * SLOT)
        targets = torch.from_numpy(pages.ctypes.data + order * (size + 64))
        launch(sources, targets, size, programs)
        for run, page in enumerate(order):
            assert (pages[page, :size] == slots[run, 8 : 8 + size]).all(), (size, programs, run)
            assert not pages[page, size:].any(), (size, programs, run)
print("all arrived")
"""


def test_every_byte_of_every_page_size_arrives_and_no_other_is_written() -> None:
    source = Path(__file__).parents[2] / "src"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(source)}
    run = subprocess.run(
        [sys.executable, "-c", IN_THE_INTERPRETER], env=environment, capture_output=True, text=True, timeout=200
    )
    assert run.stdout == "all arrived\n", run.stderr


def entries(count: int, size: int, **changed: Any) -> Entries:
    start = np.arange(count, dtype=np.uint64) * np.uint64(1 << 20)
    made = {"device": start, "host": start + np.uint64(1 << 30), "sizes": np.full(count, size, np.uint64), **changed}
    return Entries(**made)


@pytest.mark.parametrize(
    ("asked", "suits"),
    [
        (entries(MIN_ENTRIES, 8192), True),
        (entries(MIN_ENTRIES - 1, 8192), False),
        (entries(MIN_ENTRIES, DMA_BYTES), False),
        (entries(MIN_ENTRIES, DMA_BYTES - 8), True),
        (entries(MIN_ENTRIES, 8196), False),
        (entries(MIN_ENTRIES, 8192, host=np.arange(MIN_ENTRIES, dtype=np.uint64) * np.uint64(8196)), False),
        (entries(MIN_ENTRIES, 8192, sizes=np.array([8192] * (MIN_ENTRIES - 1) + [16384], np.uint64)), False),
    ],
    ids=["small", "few", "large", "almost large", "no words", "not aligned", "uneven"],
)
def test_small_pages_of_one_size_go_by_the_kernel(asked: Entries, suits: bool) -> None:
    assert kernel.KernelLoads(0, USUAL).suits(asked) is suits


def test_what_was_measured_says_which_entries_go_by_the_kernel() -> None:
    assert not kernel.KernelLoads(0, KernelRange(16384, 32)).suits(entries(32, 16384))
    assert kernel.KernelLoads(0, KernelRange(16384, 32)).suits(entries(32, 8192))
    assert not kernel.KernelLoads(0, KernelRange(16384, 33)).suits(entries(32, 8192))
    assert not kernel.KernelLoads(0, KernelRange(0, 1)).suits(entries(500, 8))


def test_what_is_remembered_of_this_device_and_driver_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    driver: Any = SimpleNamespace(name="Played", version=12080, device=0)
    assert kernel.calibrated_loads(driver).limits == USUAL, "this torch has no device to measure on"
    remembered = RememberedRanges(CacheFile(tmp_path / "kvpact" / "gpu_copies.json"))
    remembered.remember(f"Played, driver {nvidia_release()}, CUDA 12080", KernelRange(9, 7))
    assert kernel.calibrated_loads(driver).limits == KernelRange(9, 7)
