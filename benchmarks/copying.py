"""How fast pages are gathered into slots and scattered out of them, over one core's memcpy of the same bytes.

The engine's own way (`PageCopier`), page sizes from 4 KiB to 4 MiB, neighbouring and scattered blocks, in turn with
two memcpys over contiguous memory of the same size, past the caches. `ratio` is over one call for each page, in order:
the goal is 0.8 from 64 KiB on. `ratio_to_one_call` is over a single call for all of it, which no copy of pages reaches:
the C library writes past the caches (non-temporal stores) only in calls that exceed 3/4 of the last cache, and so
spares one of the three times that the bytes cross the memory bus.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import numpy as np

from benchmarks.table import spread

NAME = "copy"
LAYERS = 4
PAGES_KIB = (4, 16, 64, 256, 1024, 4096)


def _measure(page_bytes: int, blocks: int, scattered: bool, rounds: int) -> list[dict[str, Any]]:
    import torch

    from kvpact.memory.arena import ArenaSegment
    from kvpact.worker.copy.cpu import PageCopier
    from kvpact.worker.paged import CopyPlan, PagedKV

    total = 2 * blocks
    memory = torch.zeros((LAYERS, total, page_bytes), dtype=torch.uint8).random_(0, 255)
    paged = PagedKV.from_tensors({str(layer): memory[layer] for layer in range(LAYERS)}, total)
    segment = ArenaSegment.create(total, paged.layout.rank_slot_bytes)
    segment.pages.take_all()
    copier = PageCopier(paged, segment, segment.classes)
    order = np.random.default_rng(0)
    ids, slots = (order.permutation(total)[:blocks] if scattered else np.arange(blocks) for _ in range(2))
    plan = CopyPlan.of(ids.tolist(), slots.tolist())
    size = blocks * page_bytes * LAYERS
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    pairs = list(zip(target.reshape(-1, page_bytes), source.reshape(-1, page_bytes), strict=True))

    def each_page() -> None:
        for into, out_of in pairs:
            np.copyto(into, out_of)

    def seconds(copy: Any) -> float:
        began = time.perf_counter()
        copy()
        return time.perf_counter() - began

    groups = range(len(copier.pages))

    def every_group(one: Any) -> None:
        for group in groups:
            one(group, plan)

    found = []
    for way, one in (("gather", copier.gather), ("scatter", copier.scatter)):
        ours, by_page, one_call = list[float](), list[float](), list[float]()
        for number in range(rounds + 1):
            actions = [
                (ours, partial(every_group, one)),
                (by_page, each_page),
                (one_call, lambda: np.copyto(target, source)),
            ]
            for taken, action in actions if number % 2 else reversed(actions):
                taken.append(seconds(action))
        turns = list(zip(ours[1:], by_page[1:], one_call[1:], strict=True))
        found.append(
            {
                "way": way,
                "page_kib": page_bytes >> 10,
                "blocks": "scattered" if scattered else "neighbours",
                **spread("gb_per_s", [size / taken / 1e9 for taken, _, _ in turns]),
                **spread("memcpy_gb_per_s", [size / taken / 1e9 for _, taken, _ in turns]),
                **spread("one_call_gb_per_s", [size / taken / 1e9 for _, _, taken in turns]),
                **spread("ratio", [pages / taken for taken, pages, _ in turns]),
                **spread("ratio_to_one_call", [whole / taken for taken, _, whole in turns]),
            }
        )
    del copier
    segment.close()
    return found


def rows(rounds: int = 15, mib: int = 64, pages_kib: tuple[int, ...] = PAGES_KIB) -> list[dict[str, Any]]:
    """One row for each way, page size and order of blocks; `mib` are copied each time."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    found: list[dict[str, Any]] = []
    for kib in pages_kib:
        for scattered in (False, True):
            blocks = max(4, (mib << 10) // kib // LAYERS)
            found += _measure(kib << 10, blocks, scattered, rounds)
    return found
