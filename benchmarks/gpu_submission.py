"""What a load costs the computing thread before a device does anything, beside vLLM's own handler in the same run.

    python benchmarks/gpu_submission.py [--rounds N]

Needs no GPU: the device's calls do nothing, so the times are Python's and numpy's alone: CPU time of the calling
thread, from order to end. Each round times all, in an order that turns. Both sides are timed with the making of arrays
from the blocks' numbers, as an engine has them, and without it, given arrays. Shape: 32 layers, blocks and slots in no
order, layer by layer (LBNHC) and block by block (BLNHC).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
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


def source_and_target(slots: tuple[int, ...], block_ids: tuple[int, ...]) -> tuple[Any, Any]:
    """vLLM's specs of a load."""
    return CPULoadStoreSpec([*slots]), GPULoadStoreSpec([*block_ids], (len(block_ids),), (0,))


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
        arrays: list[Any] = [np.array(one, np.int64) for one in (slots, block_ids)]
        jobs = [LoadJob(1, "r", 0, one, other, synchronous=False) for one, other in ((slots, block_ids), arrays)]
        specs = source_and_target(slots, block_ids)

        def ours(job: LoadJob) -> bool:
            (transfer,) = engine.load([job])
            engine.submit_all()
            return transfer.ended

        def theirs(given: tuple[Any, Any]) -> bool:
            handler.transfer_async(1, *given)
            return len(handler.get_finished()) == 1

        works: list[Callable[[], bool]] = [
            partial(ours, jobs[0]),
            lambda slots=slots, block_ids=block_ids: theirs(source_and_target(slots, block_ids)),  # type: ignore[misc]
            partial(ours, jobs[1]),
            partial(theirs, specs),
        ]
        times: list[list[float]] = [[] for _ in works]
        for number in range(rounds):
            device.entries = platform.entries = 0
            for turn in range(len(works)):
                which = (number + turn) % len(works)
                times[which].append(seconds_of(works[which]) * 1e3)
            assert device.entries == platform.entries
        medians = [statistics.median(one) for one in times]
        text = "".join(
            f"{median:9.2f} {min(one):6.2f} to {max(one):6.2f}" for median, one in zip(medians, times, strict=True)
        )
        ratios = f"{medians[0] / medians[1]:8.2f} {medians[2] / medians[3]:8.2f}"
        print(f"{layout:6} {blocks:6} {device.entries // 2:8} {text} {ratios}", flush=True)
    segment.close()


def main() -> None:
    """Print one line for each layout and number of blocks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    rounds, platform = parser.parse_args().rounds, NoPlatform()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; ms: median, least to most")
    both = "kvpact's                 vLLM's                 "
    print(f"with the making of arrays, then without it\nlayout blocks   copies  {both}  {both}   ratios")
    with ExitStack() as changed:
        changed.enter_context(patch.object(gpu_worker, "current_platform", platform))
        changed.enter_context(patch.object(torch, "Event", lambda **_: platform))
        changed.enter_context(patch.object(gpu_worker, "ops", SimpleNamespace(swap_blocks_batch=platform.swap)))
        for layout in ("LBNHC", "BLNHC"):
            rows(layout, rounds, platform)


if __name__ == "__main__":
    main()
