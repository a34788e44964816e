"""Measurements of a device's copies: pinning, speed by page size and layout, beside busy Python and computation.

Owns the sections of figures, over any `Device`, and reports each as soon as it is complete.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from kvpact.contract import LoadJob, SaveJob
from kvpact.memory.arena import ArenaSegment
from kvpact.memory.layout import PAGE_BYTES
from kvpact.worker.copy.base import Job
from kvpact.worker.device.base import Device
from kvpact.worker.device.engine import DeviceTransferEngine
from kvpact.worker.paged import PagedKV
from kvpact.worker.round_trip import require_round_trip

LAYERS: Final = 32
PAGES: Final = (8 << 10, 64 << 10)
"""Bytes of a block in a layer: Llama-3-8B on eight ranks, and on one."""

LAYOUTS: Final = ("layer by layer", "block by block")


@dataclass(frozen=True, slots=True)
class Bench:
    """Device, with the memory and the computation for measurements on it."""

    device: Device
    allocate: Callable[[int, int], Any]
    """Allocates a tensor of bytes on the device with two axes: (rows, bytes of a row)."""
    compute: Callable[[], None]
    """Computes for a few milliseconds on the current stream, like a decoding step. Waits for that stream alone."""
    num_bytes: int = 1 << 30
    """Bytes that are copied at a time."""
    rounds: int = 5


def examine(bench: Bench, report: Callable[[str, dict[str, Any]], None]) -> None:
    """Measure all sections; calls `report(section, figures)` after each. Passes on the device's errors."""
    for page_bytes in PAGES:
        for layout in LAYOUTS:
            report(f"{layout}, {page_bytes >> 10} KiB", _copies(bench, layout, page_bytes))


def _copies(bench: Bench, layout: str, page_bytes: int) -> dict[str, Any]:
    blocks = max(4, bench.num_bytes // (LAYERS * page_bytes))
    if layout == LAYOUTS[0]:
        memory = [bench.allocate(blocks, page_bytes) for _ in range(LAYERS)]
    else:
        whole = bench.allocate(blocks, LAYERS * page_bytes)
        memory = [whole[:, layer * page_bytes : (layer + 1) * page_bytes] for layer in range(LAYERS)]
    paged = PagedKV.from_tensors({f"layer.{number}": one for number, one in enumerate(memory)}, blocks)
    segment = ArenaSegment.create(blocks, -(-LAYERS * page_bytes // PAGE_BYTES) * PAGE_BYTES)
    size = len(segment.memory)
    segment.pages.take(0, size)
    began = time.perf_counter()
    pinned = bench.device.pinned = bench.device.register(segment.mapped_at, size)
    pinning = time.perf_counter() - began
    engine = DeviceTransferEngine(paged, segment, bench.device, size)
    try:
        require_round_trip(engine, paged, segment, blocks)
        slots = tuple(range(blocks))
        load = LoadJob(1, "examination", 0, slots, slots[::-1], synchronous=False)
        save = SaveJob(2, "examination", 0, slots, slots[::-1])
        moved = blocks * LAYERS * page_bytes / 1e9
        alone = _median(bench, bench.compute)
        with _busy_python():
            beside_python = moved / _median(bench, lambda: _copy(engine, load))
        return {
            "entries": blocks * LAYERS if layout == LAYOUTS[0] else blocks,
            "pinned": pinned,
            "pinning, s a GiB": pinning / size * (1 << 30),
            "loads, GB/s": moved / _median(bench, lambda: _copy(engine, load)),
            "saves, GB/s": moved / _median(bench, lambda: _copy(engine, save)),
            "loads beside busy Python, GB/s": beside_python,
            "computing beside a load, times as long": _beside(bench, engine, load) / alone,
        }
    finally:
        engine.close(30)
        if pinned:
            bench.device.unregister(segment.mapped_at)
        segment.close()


def _copy(engine: DeviceTransferEngine, job: Job) -> None:
    (transfer,) = engine.load([job]) if isinstance(job, LoadJob) else engine.save([job])
    transfer.wait(len(engine.groups), None)
    if transfer.error is not None:
        raise transfer.error


def _beside(bench: Bench, engine: DeviceTransferEngine, job: LoadJob) -> float:
    """Seconds of `compute` while a load is under way."""
    seconds = []
    for _ in range(bench.rounds):
        (transfer,) = engine.load([job])
        engine.submit_all()
        began = time.perf_counter()
        bench.compute()
        seconds.append(time.perf_counter() - began)
        transfer.wait(len(engine.groups), None)
    return median(seconds)


def _median(bench: Bench, work: Callable[[], None]) -> float:
    """Median seconds of `work`."""
    seconds = []
    for _ in range(bench.rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


@contextmanager
def _busy_python() -> Iterator[None]:
    """Context of another thread that holds the interpreter's lock as much as it can."""
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
