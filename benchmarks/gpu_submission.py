"""What a load costs the CPU before the GPU does anything: entries, calls, and the time to build and submit them.

    python benchmarks/gpu_submission.py [--rounds N]

Needs no GPU: the driver's calls do nothing, so the times are Python's and numpy's alone. CPU time of the calling
thread, median of the rounds. Shapes: Llama-3-8B in bf16, blocks of 16 tokens, on one rank and on one of eight (TP 8).
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvpact.contract import LoadJob
from kvpact.memory.arena import SlotClass
from kvpact.torch_cuda.doctor.shapes import Shape
from kvpact.worker.cuda.copies import DeviceCopies
from kvpact.worker.cuda.driver import MAX_BATCH_ENTRIES
from kvpact.worker.cuda.engine import MAX_ENTRIES_AT_ONCE, CudaTransferEngine

LAYERS, HEADS, HEAD_BYTES, BLOCK_TOKENS = 32, 8, 128 * 2, 16
GIB = 1 << 30


class NoDriver:
    """Accepts everything and does nothing."""

    def __init__(self) -> None:
        self.calls = self.entries = 0

    def copy_batch(self, targets: Any, sources: Any, sizes: Any, order: Any, stream: int) -> None:
        self.calls += 1
        self.entries += len(sizes)

    def is_done(self, event: int) -> bool:
        return True

    def create_stream(self) -> int:
        return 1

    create_event = create_stream

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def copies_of(layout: str, page_bytes: int, num_blocks: int, driver: NoDriver) -> DeviceCopies:
    kv = Shape(layout, page_bytes, LAYERS).paged(1 << 40, num_blocks, None)
    slot_class = SlotClass(range(num_blocks), kv.layout.rank_slot_bytes)
    segment: Any = SimpleNamespace(classes=(slot_class,), mapped_at=1 << 44)
    pinned_bytes = max(1, (256 << 20) // slot_class.slot_bytes) * slot_class.slot_bytes
    return DeviceCopies(kv, segment, driver, lambda: 1, pinned_bytes, None)


def timed(work: Any, rounds: int) -> float:
    """Median CPU time of the calling thread, in microseconds."""
    spent = []
    for _ in range(rounds):
        began = time.thread_time()
        work()
        spent.append(time.thread_time() - began)
    return median(spent) * 1e6


def row(layout: str, ranks: int, tokens: int, rounds: int) -> str:
    """One shape and length."""
    page_bytes = 2 * HEADS // ranks * HEAD_BYTES * BLOCK_TOKENS
    blocks = tokens // BLOCK_TOKENS
    driver = NoDriver()
    copies = copies_of(layout, page_bytes, 2 * blocks, driver)
    scattered = np.random.default_rng(1).permutation(2 * blocks)[:blocks].tolist()
    job = LoadJob(1, "r", 0, tuple(range(blocks)), tuple(scattered), synchronous=True)

    def submit() -> None:
        for entries in copies.by_group({0: (job.block_ids, job.slots)}):
            copies.copy_in(entries, 1)

    submit()
    entries, calls = driver.entries, driver.calls
    spent = timed(submit, rounds)
    engine = CudaTransferEngine(copies, 0, None)
    handed_over = timed(lambda: engine.load([job]), rounds)
    assert engine.close(30)
    return (
        f"{layout:8} {ranks:2} {tokens:7} {page_bytes * LAYERS * blocks / entries / 1024:9.0f} {entries:8} {calls:5} "
        f"{spent:15.0f} {spent / entries:8.2f} {handed_over:12.0f}"
    )


def main() -> None:
    """Print one line for each shape and length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    print("layout   TP  tokens entry KiB  entries calls build+submit us us/entry in load() us")
    for layout in ("LBNHC", "BLNHC"):
        for ranks in (1, 8):
            for tokens in (4096, 32768, 131072):
                print(row(layout, ranks, tokens, rounds))
    print(f"at most {MAX_ENTRIES_AT_ONCE} entries are submitted within load(), {MAX_BATCH_ENTRIES} a call")


if __name__ == "__main__":
    main()
