"""How fast bytes get over the bus: pinning, long copies, and loads and saves as an engine orders them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from kvpact.memory.arena import ArenaSegment
from kvpact.torch_cuda.doctor.bench import Bench
from kvpact.torch_cuda.doctor.facts import link
from kvpact.torch_cuda.doctor.shapes import Shape
from kvpact.torch_cuda.doctor.workspace import Amounts, Workspace, long_copy, workspace
from kvpact.torch_cuda.trial_memory import filled_segment, pinned_segment
from kvpact.worker.cuda.copies import Kernel
from kvpact.worker.cuda.driver import MAX_BATCH_ENTRIES, CudaError
from kvpact.worker.cuda.entries import Entries
from kvpact.worker.cuda.pinned import CHUNK_BYTES

KERNEL_BYTES = 128 << 10
"""Larger entries are not given to the kernel, even to see what it makes of them."""

PAUSE_SECONDS = 0.0002


def pinning(bench: Bench, amounts: Amounts) -> dict[str, Any]:
    """Seconds to pin a GiB, by size of a chunk, and the worst launch of a kernel on another thread meanwhile.

    With pages that were taken from the machine before, and with pages that are taken by pinning them.
    """
    rows = [
        _pinned_by(bench, make(amounts.pin_bytes // chunk_bytes, chunk_bytes), taken)
        for taken, make in ((True, filled_segment), (False, ArenaSegment.create))
        for chunk_bytes in amounts.pin_chunks
    ]
    return {"pinned_bytes": amounts.pin_bytes, "by_chunk": rows}


def _pinned_by(bench: Bench, segment: ArenaSegment, taken: bool) -> dict[str, Any]:
    """Pin a segment slot by slot. `taken`: whether its pages were taken from the machine before."""
    chunk_bytes = segment.rank_slot_bytes
    over, pinned, errors = threading.Event(), [0.0], []

    def pin() -> None:
        try:
            bench.driver.attach()
            began = bench.now()
            for slot in range(segment.num_slots):
                bench.driver.register(segment.mapped_at + slot * chunk_bytes, chunk_bytes)
                pinned.append(bench.now() - began)
        except CudaError as error:
            errors.append(str(error))
        finally:
            over.set()

    bench.launch()
    thread = threading.Thread(target=pin)
    thread.start()
    worst = 0.0
    while not over.is_set():
        began = bench.now()
        bench.launch()
        worst = max(worst, bench.now() - began)
        time.sleep(PAUSE_SECONDS)
    thread.join()
    bench.synchronize()
    chunks = len(pinned) - 1
    for slot in range(chunks):
        bench.driver.unregister(segment.mapped_at + slot * chunk_bytes)
    segment.close()
    return {
        "chunk_bytes": chunk_bytes,
        "pages_taken_before": taken,
        "seconds_per_gib": pinned[-1] / (chunks * chunk_bytes) * (1 << 30) if chunks else None,
        "worst_launch_ms": worst * 1e3,
        "pinned_chunks": chunks,
        "error": errors[0] if errors else None,
    }


def bus(bench: Bench, amounts: Amounts) -> dict[str, Any]:
    """One long copy each way, then both at once: what 100 % is on this machine."""
    size, driver = amounts.load_bytes, bench.driver
    chunk_bytes = min(size, CHUNK_BYTES)
    here, there = bench.allocate(size), bench.allocate(size)
    with pinned_segment(driver, 2 * size // chunk_bytes, chunk_bytes, 1) as segment:
        host, other = segment.mapped_at, segment.mapped_at + size
        into = bench.timed(lambda stream: long_copy(driver, here.address, host, size, "in", stream), amounts.rounds)
        out = bench.timed(lambda stream: long_copy(driver, there.address, other, size, "out", stream), amounts.rounds)
        second, begun, done = driver.create_stream(), driver.create_event(), driver.create_event()

        def both(stream: int) -> None:
            driver.record(begun, stream)
            driver.stream_wait(second, begun)
            long_copy(driver, there.address, other, size, "out", second)
            long_copy(driver, here.address, host, size, "in", stream)
            driver.record(done, second)
            driver.stream_wait(stream, done)

        together = bench.timed(both, amounts.rounds)
        busy = link(str(bench.about().get("pci_bus_id")))
        bench.synchronize()
        driver.destroy_stream(second)
    return {
        "copied_bytes": size,
        "in_gb_per_s": into.gb_per_s(size),
        "in_spread": into.spread,
        "out_gb_per_s": out.gb_per_s(size),
        "out_spread": out.spread,
        "both_at_once_gb_per_s": together.gb_per_s(2 * size),
        "link_generation_in_use": busy["link_generation_now"],
        "link_lanes_in_use": busy["link_lanes_now"],
    }


def bandwidth(bench: Bench, amounts: Amounts, shapes: Sequence[Shape]) -> dict[str, Any]:
    """Loads and saves of scattered blocks for each shape, by the copy engines and, for small pages, by the kernel.

    The entries are those that kvpact's own copies make of such a load. "chosen" is the way that they would go.
    """
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        with workspace(bench, shape, amounts.load_bytes) as space:
            rows += _rows(bench, amounts, shape, space)
    return {"loaded_bytes": amounts.load_bytes, "rows": rows}


def _rows(bench: Bench, amounts: Amounts, shape: Shape, space: Workspace) -> list[dict[str, Any]]:
    copies, kernel, rows = space.copies, bench.kernel, []

    def add(way: str, what: str, path: str, parts: list[Entries], copy: Any, chosen: bool) -> None:
        def work(stream: int) -> None:
            for part in parts:
                copy(part, stream)

        timing = bench.timed(work, amounts.rounds)
        count = sum(len(part) for part in parts)
        rows.append(
            {
                "way": way,
                "what": what,
                "path": path,
                "chosen": chosen,
                "layout": shape.layout,
                "page_bytes": shape.page_bytes,
                "entry_bytes": space.num_bytes // count,
                "entries": count,
                "gb_per_s": timing.gb_per_s(space.num_bytes),
                "spread": timing.spread,
                "call_us_per_entry": timing.call / count * 1e6,
            }
        )

    for what, parts in (("step", space.for_step), ("background", space.in_background)):
        by_kernel = kernel is not None and _suits(kernel, parts)
        add("load", what, "copy engines", parts, copies.copy_in, not by_kernel)
        if kernel is not None and _may(parts):
            add("load", what, "kernel", parts, kernel.load, by_kernel)
    add("save", "background", "copy engines", space.in_background, copies.copy_out, True)
    return rows


def _suits(kernel: Kernel, parts: list[Entries]) -> bool:
    return all(kernel.suits(part) for part in parts)


def _may(parts: list[Entries]) -> bool:
    """Whether the kernel can copy these at all, fast or slow."""
    sizes = {int(size) for part in parts for size in part.sizes[:MAX_BATCH_ENTRIES]}
    return len(sizes) == 1 and max(sizes) <= KERNEL_BYTES
