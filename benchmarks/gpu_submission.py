"""What a load costs the computing thread before a device does anything, beside vLLM's own handler in the same run.

    python benchmarks/gpu_submission.py [--rounds N]

Needs no GPU: the device's calls do nothing, so the times are Python's and numpy's alone: CPU time of the calling
thread, from order to end. Each round times both, in alternating order. Shape: 32 layers, blocks and slots in no
order, layer by layer (LBNHC) and block by block (BLNHC).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvpact.contract import LoadJob
from kvpact.memory.arena import ArenaSegment
from kvpact.worker.device.engine import DeviceTransferEngine
from kvpact.worker.paged import PagedKV

LAYERS, PAGE_BYTES, NUM_BLOCKS = 32, 64, 8300
BLOCKS = (256, 2048, 8192)


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

    def swap(self, *arrays: Any, is_src_access_order_any: bool) -> None:
        """vLLM's copy call."""
        self.entries += len(arrays[0])

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 1


class NoPlatform(NoDevice):
    """vLLM's platform, streams and events, in the same manner."""

    def stream(self, stream: Any) -> Any:
        """Copies go nowhere."""
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self

    def is_xpu(self) -> bool:
        """It has CUDA's pointers."""
        return False

    def elapsed_time(self, end: Any) -> float:
        """In no time."""
        return 0.0


class OnDevice(torch.Tensor):
    """vLLM's handler asks for such tensors when it is made."""

    is_cuda = True


def memory_of(layout: str) -> tuple[dict[str, Any], list[Any]]:
    """Each layer's memory, and the tensors that vLLM's offloading makes of them: `[blocks, bytes]`."""
    if layout == "LBNHC":
        apart = torch.zeros((LAYERS, NUM_BLOCKS, PAGE_BYTES), dtype=torch.int8)
        return {f"layer.{layer}": apart[layer] for layer in range(LAYERS)}, list(apart)
    together = torch.zeros((NUM_BLOCKS, LAYERS, PAGE_BYTES), dtype=torch.int8)
    return {f"layer.{layer}": together[:, layer] for layer in range(LAYERS)}, [together.view(NUM_BLOCKS, -1)]


def handler_of(tensors: list[Any]) -> Any:
    """vLLM's, for loads, as its worker makes it."""
    chunks = [torch.zeros_like(one) for one in tensors]
    refs = [CanonicalKVCacheRef(number, one.shape[1]) for number, one in enumerate(tensors)]
    handler = gpu_worker.SingleDirectionOffloadingHandler(
        [one.as_subclass(OnDevice) for one in tensors], chunks, 1, [refs], gpu_to_cpu=False
    )
    handler.dst_tensors = tensors  # a subclass is slower than what a GPU has
    return handler


def seconds_of(work: Callable[[], bool]) -> float:
    """CPU time of this thread."""
    began = time.thread_time()
    assert work()
    return time.thread_time() - began


def rows(layout: str, rounds: int, platform: NoPlatform) -> None:
    """Print a line for each number of blocks."""
    named, tensors = memory_of(layout)
    paged = PagedKV.from_tensors(named, NUM_BLOCKS)
    segment = ArenaSegment.create(NUM_BLOCKS, paged.rank_slot_bytes)
    device: Any = NoDevice()
    engine, handler = DeviceTransferEngine(paged, segment, device, len(segment.memory)), handler_of(tensors)
    random = np.random.default_rng(1)
    for blocks in BLOCKS:
        block_ids, slots = (tuple(random.permutation(NUM_BLOCKS)[:blocks].tolist()) for _ in range(2))
        job = LoadJob(1, "r", 0, slots, block_ids, synchronous=False)
        source, target = CPULoadStoreSpec([*slots]), GPULoadStoreSpec([*block_ids], (blocks,), (0,))

        def ours(job: LoadJob = job) -> bool:
            (transfer,) = engine.load([job])
            engine.submit_all()
            return transfer.ended

        def theirs(source: Any = source, target: Any = target) -> bool:
            handler.transfer_async(1, source, target)
            return len(handler.get_finished()) == 1

        times: dict[Callable[[], bool], list[float]] = {ours: [], theirs: []}
        for number in range(rounds):
            device.entries = platform.entries = 0
            for work in (ours, theirs) if number % 2 else (theirs, ours):
                times[work].append(seconds_of(work) * 1e3)
            assert device.entries == platform.entries
        text = "".join(f"{statistics.median(one):8.2f} {min(one):6.2f} to {max(one):6.2f}" for one in times.values())
        ratio = statistics.median(times[ours]) / statistics.median(times[theirs])
        print(f"{layout:6} {blocks:6} {device.entries:8} {text} {ratio:8.2f}", flush=True)
    segment.close()


def main() -> None:
    """Print one line for each layout and number of blocks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    rounds, platform = parser.parse_args().rounds, NoPlatform()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; ms: median, least to most")
    print("layout blocks   copies  kvpact's               vLLM's                    ratio")
    with ExitStack() as changed:
        changed.enter_context(patch.object(gpu_worker, "current_platform", platform))
        changed.enter_context(patch.object(torch, "Event", lambda **_: platform))
        changed.enter_context(patch.object(gpu_worker, "ops", SimpleNamespace(swap_blocks_batch=platform.swap)))
        for layout in ("LBNHC", "BLNHC"):
            rows(layout, rounds, platform)


if __name__ == "__main__":
    main()
