"""Graphs read KV memory that was loaded before they were replayed: no kernel in them asks, and no hook is called.

On a real device the graphs are CUDA's; on the played one they are the same kernels, late in every order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from device_beds import BLOCKS, LAYERS, LAYOUTS, SLOTS, Bed, CudaBed, bed_named
from device_plays import Page, page
from kvpact.contract import LoadJob, SaveJob

ROUNDS = {"fake-cuda": 40, "cuda": 200}
"""Of the played device there are more seeds elsewhere."""


class Memory:
    """What the blocks of a bed and its slots hold: a number for each, from which its pages are made."""

    def __init__(self, bed: Bed | CudaBed) -> None:
        self.bed, self.random = bed, random.Random(5)
        self.blocks, self.jobs = [0] * BLOCKS, 0
        for block in range(BLOCKS):
            self.write(block)
        self.slots = self.blocks[:SLOTS]
        (save,) = bed.engine.save([SaveJob(0, "r", 0, tuple(range(SLOTS)), tuple(range(SLOTS)))])
        assert save.wait(len(bed.engine.groups), 30)
        if getattr(bed.engine, "proof", None) is not None:
            bed.engine.proof.close()
            bed.engine.proof = None  # else the host waits for the first loads, to check them

    def write(self, block: int) -> None:
        """As a forward pass would."""
        self.blocks[block] = self.random.randrange(1 << 30)
        for layer in range(LAYERS):
            self.bed.write(layer, block, self.content(layer, self.blocks[block]))

    def content(self, layer: int, value: int) -> Page:
        return page(layer, value, self.bed.paged.layers[layer].page_bytes)

    def load(self) -> None:
        """Some blocks are written, and some of them and others loaded, for what is computed next."""
        for block in self.random.sample(range(BLOCKS), 3):
            self.write(block)
        count = self.random.randint(1, SLOTS)
        slots, blocks = self.random.sample(range(SLOTS), count), self.random.sample(range(BLOCKS), count)
        self.jobs += 1
        (load,) = self.bed.engine.load([LoadJob(self.jobs, "r", 0, tuple(slots), tuple(blocks), synchronous=True)])
        assert load.wait(len(self.bed.engine.groups), None)
        for slot, block in zip(slots, blocks, strict=True):
            self.blocks[block] = self.slots[slot]

    def now(self, layers: range) -> list[Page]:
        return [np.stack([self.content(layer, value) for value in self.blocks]) for layer in layers]


@pytest.fixture(params=[(name, layout) for name in ROUNDS for layout in LAYOUTS], ids="-".join)
def memory(request: pytest.FixtureRequest) -> Iterator[Memory]:
    bed = bed_named(*request.param)
    yield Memory(bed)
    bed.close()


def rounds(memory: Memory) -> range:
    return range(ROUNDS["cuda" if isinstance(memory.bed, CudaBed) else "fake-cuda"])


def same(seen: list[Page], expected: list[Page]) -> bool:
    return len(seen) == len(expected) and all(map(np.array_equal, seen, expected))


def test_a_graph_reads_what_a_step_has_loaded(memory: Memory) -> None:
    layers = range(LAYERS)
    replay = memory.bed.capture(layers)
    for number in rounds(memory):
        memory.load()
        seen, expected = replay(), memory.now(layers)
        memory.bed.finish()
        assert same(seen(), expected), number


def test_pieces_of_a_graph_read_what_was_loaded_between_them(memory: Memory) -> None:
    halves = range(LAYERS // 2), range(LAYERS // 2, LAYERS)
    replays = [memory.bed.capture(layers) for layers in halves]
    for number in rounds(memory):
        found = []
        for replay, layers in zip(replays, halves, strict=True):
            memory.load()
            found.append((replay(), memory.now(layers)))
        memory.bed.finish()
        assert all(same(seen(), expected) for seen, expected in found), number
