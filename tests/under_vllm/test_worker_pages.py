"""The worker tells its arena what the engine does, so that pages are taken out of its prompts' way."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvpact.config import load_config
from kvpact.contract import SaveJob, StepWork
from kvpact.memory.prefault import PIECE_BYTES, PageTaker
from kvpact.worker.worker import CacheWorker, RankInfo
from polling import until

MIB = 1 << 20
BLOCKS = 8
MEMORY_MIB = 400
AHEAD_BYTES = 32 * MIB
REST_SECONDS = 0.3


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[CacheWorker]:
    """One rank with blocks of 1 MiB, in its first step; nothing was taken before it."""
    monkeypatch.setattr("kvpact.memory.prefault.REST_SECONDS", REST_SECONDS)
    for name in ("AHEAD_BYTES", "FIRST_BYTES"):
        monkeypatch.setattr(f"kvpact.memory.prefault.{name}", AHEAD_BYTES)
    start = PageTaker.start
    monkeypatch.setattr(PageTaker, "start", lambda pages: (pages.step_began(), start(pages)))
    made = CacheWorker(load_config({"memory": f"{MEMORY_MIB}MiB"}, {}), RankInfo(0, 1, BLOCKS), {})
    made.register_kv_caches({"layer.0": torch.ones(BLOCKS, MIB, dtype=torch.uint8)})
    made.step_began()
    yield made
    made.shutdown()


def test_a_save_has_the_pages_after_its_slots_taken_and_a_step_holds_back_all_others(worker: CacheWorker) -> None:
    _wait_for(worker, AHEAD_BYTES)
    time.sleep(2 * REST_SECONDS)
    assert _taken(worker) == AHEAD_BYTES, "more was taken than the window, while the engine computes"
    worker.start_loads(StepWork(saves=(SaveJob(1, "request", 0, (50, 51), (0, 1)),)))
    _wait_for(worker, AHEAD_BYTES + 52 * MIB)
    time.sleep(0.3)
    assert _taken(worker) < AHEAD_BYTES + 52 * MIB + PIECE_BYTES
    worker.poll()
    _wait_for(worker, 2 * 52 * MIB)
    time.sleep(0.3)
    assert _taken(worker) < 2 * 52 * MIB + PIECE_BYTES, "what nobody will use soon is not taken"


def _taken(worker: CacheWorker) -> int:
    hello = worker.hello()
    assert hello is not None
    return os.stat(Path("/proc/self/fd", str(hello.segment.descriptor))).st_blocks * 512


def _wait_for(worker: CacheWorker, size: int) -> None:
    until(lambda: _taken(worker) >= size, 60.0, f"{size} bytes are taken")
