"""Which way of copying pages is fastest, alone and beside a busy Python thread, and what a first touch of memory costs.

Compares ways to move one layer's pages between paged KV memory and arena slots, for the page sizes of a CPU engine
(128 tokens a block) and of a GPU engine (16 tokens), with neighbouring and with scattered block ids. "busy" runs a pure
Python loop on the main thread meanwhile: what then counts is how often a way takes the GIL. `index`, `pages` and
`runs` are what `PageCopier` uses. Then: what joining the layers of a block brings where they are neighbours. Takes a
minute on two idle cores. Usage: python benchmarks/copy_paths.py [--quick]
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from kvpact.memory.arena import ArenaSegment
from kvpact.threads import start_background
from kvpact.worker.copy.cpu import PageCopier
from kvpact.worker.paged import CopyPlan, PagedKV

LAYERS = 16
SHAPES = ((256 << 10, 32), (64 << 10, 64), (16 << 10, 256), (8 << 10, 512))
"""(page bytes, blocks copied): 16 layers x 32 blocks x 256 KiB are 4,096 tokens of the model in the demo."""


class Scene:
    """Paged KV memory, a segment, and one pairing of blocks with slots."""

    def __init__(self, page_bytes: int, blocks: int, scattered: bool, inside_blocks: bool = False) -> None:
        total = 2 * blocks
        shape = (total, LAYERS, page_bytes) if inside_blocks else (LAYERS, total, page_bytes)
        self.memory = torch.zeros(shape, dtype=torch.uint8).random_(0, 255)
        if inside_blocks:
            self.memory = self.memory.transpose(0, 1)
        self.paged = PagedKV.from_tensors({str(i): self.memory[i] for i in range(LAYERS)}, total)
        self.segment = ArenaSegment.create(total, self.paged.layout.rank_slot_bytes)
        self.segment.pages.take_all()
        self.copier = PageCopier(self.paged, self.segment, self.segment.classes)
        self.arena = np.frombuffer(self.segment.memory, np.uint8).reshape(total, LAYERS, page_bytes)
        order = np.random.default_rng(0)
        ids, slots = (order.permutation(total)[:blocks] if scattered else np.arange(blocks) for _ in range(2))
        self.plan = CopyPlan.of(ids.tolist(), slots.tolist())
        self.bytes = blocks * page_bytes * LAYERS


def way_memmove(scene: Scene, layer: int, load: bool) -> None:
    """ctypes.memmove, one call a page."""
    size = scene.memory.shape[2]
    pages, arena = scene.memory[layer].data_ptr(), scene.arena.ctypes.data + layer * size
    for block, slot in zip(scene.plan.block_ids.tolist(), scene.plan.slots.tolist(), strict=True):
        ends = (pages + block * size, arena + slot * size * LAYERS)
        ctypes.memmove(*(ends if load else ends[::-1]), size)


def way_runs(scene: Scene, layer: int, load: bool) -> None:
    """numpy.copyto, one call for each run of neighbours."""
    pages, pieces = scene.copier.pages[layer], scene.copier.pieces[layer]
    for block, slot, count in scene.plan.runs:
        ends = (pages[block : block + count], pieces[slot : slot + count])
        np.copyto(*(ends if load else ends[::-1]))


def way_pages(scene: Scene, layer: int, load: bool) -> None:
    """numpy, one page for another by their numbers."""
    pages, pieces = scene.copier.pages[layer], scene.copier.pieces[layer]
    for block, slot in zip(scene.plan.block_ids.tolist(), scene.plan.slots.tolist(), strict=True):
        if load:
            pages[block] = pieces[slot]
        else:
            pieces[slot] = pages[block]


def way_index(scene: Scene, layer: int, load: bool) -> None:
    """numpy indexing with arrays: two calls a layer, by way of a temporary."""
    pages, pieces = scene.copier.pages[layer], scene.copier.pieces[layer]
    if load:
        pages[scene.plan.block_ids] = pieces[scene.plan.slots]
    else:
        pieces[scene.plan.slots] = pages[scene.plan.block_ids]


def way_torch_copy(scene: Scene, layer: int, load: bool) -> None:
    """torch copy_, one call a page."""
    pages, arena = scene.memory[layer], torch.from_numpy(scene.arena)[:, layer]
    for block, slot in zip(scene.plan.block_ids.tolist(), scene.plan.slots.tolist(), strict=True):
        if load:
            pages[block].copy_(arena[slot])
        else:
            arena[slot].copy_(pages[block])


def way_torch_index(scene: Scene, layer: int, load: bool) -> None:
    """torch index_select and index_copy_."""
    pages, arena = scene.memory[layer], torch.from_numpy(scene.arena)[:, layer]
    ids, slots = torch.from_numpy(scene.plan.block_ids), torch.from_numpy(scene.plan.slots)
    if load:
        pages.index_copy_(0, ids, arena.index_select(0, slots))
    else:
        arena.index_copy_(0, slots, pages.index_select(0, ids))


def way_engine(scene: Scene, layer: int, load: bool) -> None:
    """What kvpact does."""
    (scene.copier.scatter if load else scene.copier.gather)(layer, scene.plan)


WAYS = (way_memmove, way_runs, way_pages, way_index, way_torch_copy, way_torch_index, way_engine)


def rate(scene: Scene, way: Callable[[Scene, int, bool], None], load: bool, busy: bool, repeats: int) -> float:
    """Median GB/s of copying all layers, in a background thread as in production."""
    seconds: list[float] = []

    def copy() -> None:
        for _ in range(repeats + 1):
            began = time.perf_counter()
            for layer in range(LAYERS):
                way(scene, layer, load)
            seconds.append(time.perf_counter() - began)

    thread = start_background("copies", copy)
    while thread.is_alive():
        if busy:
            sum(range(500))
        else:
            thread.join()
    return scene.bytes / statistics.median(seconds[1:]) / 1e9


def joined_layers(repeats: int) -> None:
    """Layers inside each block: all layers one by one, against groups of neighbours, in turn; median GB/s and ratio."""
    print(f"{'page':>8} {'blocks':>7} {'ids':>10}  way      one by one GB/s  joined GB/s  ratio")
    for page_bytes, blocks in SHAPES:
        for scattered in (False, True):
            scene = Scene(page_bytes, blocks, scattered, inside_blocks=True)
            singles = replace(scene.paged, groups=tuple(range(layer, layer + 1) for layer in range(LAYERS)))
            copiers = (PageCopier(singles, scene.segment, scene.segment.classes), scene.copier)
            for name in ("gather", "scatter"):
                seconds: tuple[list[float], list[float]] = ([], [])
                for _ in range(8 * repeats + 1):
                    for copier, taken in zip(copiers, seconds, strict=True):
                        began = time.perf_counter()
                        for group in range(len(copier.pages)):
                            getattr(copier, name)(group, scene.plan)
                        taken.append(time.perf_counter() - began)
                single, joined = (scene.bytes / statistics.median(taken[1:]) / 1e9 for taken in seconds)
                print(
                    f"{page_bytes >> 10:>5}KiB {blocks:>7} {'scattered' if scattered else 'neighbours':>10}  {name:<8} "
                    f"{single:>14.2f} {joined:>12.2f} {joined / single:>6.2f}",
                    flush=True,
                )
            del copiers
            scene.segment.close()


def first_touch(gibibytes: float) -> None:
    """What it costs to take memory from the machine: by use, and by `prefault`."""
    for prefault in (False, True):
        segment = ArenaSegment.create(int(gibibytes * 1024), 1 << 20)
        memory = np.frombuffer(segment.memory, np.uint8)
        steps: list[tuple[str, Callable[[], None]]] = [("prefault", segment.pages.take_all)] if prefault else []
        steps += [("write", partial(memory.fill, 1)), ("write again", partial(memory.fill, 2))]
        for name, step in steps:
            began = time.perf_counter()
            step()
            print(f"{gibibytes:g} GiB, {name}: {memory.nbytes / (time.perf_counter() - began) / 1e9:.2f} GB/s")
        del memory, steps, step
        segment.close()


def main() -> None:
    repeats = 1 if "--quick" in sys.argv else 3
    torch.set_num_threads(1)
    first_touch(0.25 if repeats == 1 else 1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(f"{'page':>8} {'blocks':>7} {'ids':>10} {'main':>5}  way              gather GB/s  scatter GB/s")
    for busy in (False, True):
        for page_bytes, blocks in SHAPES:
            for scattered in (False, True):
                scene = Scene(page_bytes, blocks, scattered)
                for way in WAYS:
                    gather, scatter = (rate(scene, way, load, busy, repeats) for load in (False, True))
                    print(
                        f"{page_bytes >> 10:>5}KiB {blocks:>7} {'scattered' if scattered else 'neighbours':>10} "
                        f"{'busy' if busy else 'idle':>5}  {way.__name__[4:]:<16} {gather:>11.2f} {scatter:>13.2f}",
                        flush=True,
                    )
                scene.segment.close()
    joined_layers(repeats)
    assert threading.active_count() == 1


if __name__ == "__main__":
    main()
