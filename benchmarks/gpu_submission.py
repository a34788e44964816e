"""What a load costs the computing thread before a device does anything: copies, and the time to make and submit them.

    python benchmarks/gpu_submission.py [--rounds N]

Needs no GPU: the device's calls do nothing, so the times are Python's and numpy's alone, the best of the rounds. Shape:
32 layers, blocks and slots in no order, layer by layer (LBNHC) and block by block (BLNHC).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch

from kvpact.contract import LoadJob
from kvpact.memory.arena import ArenaSegment
from kvpact.worker.device.engine import DeviceTransferEngine
from kvpact.worker.paged import PagedKV

LAYERS, PAGE_BYTES, NUM_BLOCKS = 32, 64, 8300


class NoDevice:
    """Accepts everything and does nothing."""

    name, pinned = "no device", True

    def __init__(self) -> None:
        self.entries = 0

    def load(self, *arrays: Any) -> None:
        """Make the tensors that vLLM's copy call takes."""
        for one in arrays[:3]:
            torch.from_numpy(one)
        self.entries += len(arrays[0])

    def is_done(self, event: int) -> bool:
        """Always."""
        return True

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 1


def rows(layout: str, rounds: int) -> None:
    """Print a line for each number of blocks."""
    if layout == "LBNHC":
        apart = torch.zeros((LAYERS, NUM_BLOCKS, PAGE_BYTES), dtype=torch.uint8)
        tensors = {f"layer.{layer}": apart[layer] for layer in range(LAYERS)}
    else:
        together = torch.zeros((NUM_BLOCKS, LAYERS, PAGE_BYTES), dtype=torch.uint8)
        tensors = {f"layer.{layer}": together[:, layer] for layer in range(LAYERS)}
    paged = PagedKV.from_tensors(tensors, NUM_BLOCKS)
    segment = ArenaSegment.create(NUM_BLOCKS, paged.rank_slot_bytes)
    device: Any = NoDevice()
    engine = DeviceTransferEngine(paged, segment, device, len(segment.memory))
    random = np.random.default_rng(1)
    for blocks in (256, 2048, 8192):
        block_ids, slots = (tuple(random.permutation(NUM_BLOCKS)[:blocks].tolist()) for _ in range(2))
        job, best = LoadJob(1, "r", 0, slots, block_ids, synchronous=False), float("inf")
        for _ in range(rounds):
            device.entries, began = 0, time.perf_counter()
            (transfer,) = engine.load([job])
            engine.submit_all()
            best = min(best, time.perf_counter() - began)
            assert transfer.ended
        print(f"{layout:6} {blocks:6} {device.entries:8} {best * 1e3:8.2f}")
    segment.close()


def main() -> None:
    """Print one line for each layout and number of blocks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    print("layout blocks   copies       ms")
    for layout in ("LBNHC", "BLNHC"):
        rows(layout, rounds)


if __name__ == "__main__":
    main()
