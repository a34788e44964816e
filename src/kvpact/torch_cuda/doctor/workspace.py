"""Memory on both sides for a measurement: pinned slots as an engine's arena has them, and pages on the device.

Owns what is pinned, and unpins it. Knows no figures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvpact.memory.arena import ArenaSegment
from kvpact.torch_cuda.doctor.bench import Bench
from kvpact.torch_cuda.doctor.shapes import Shape
from kvpact.torch_cuda.trial_memory import pinned_segment
from kvpact.worker.cuda.copies import DeviceCopies
from kvpact.worker.cuda.driver import AccessOrder, Driver
from kvpact.worker.cuda.entries import Entries
from kvpact.worker.cuda.pinned import CHUNK_BYTES
from kvpact.worker.paged import PagedKV


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is measured."""

    pin_bytes: int
    """For each size of a chunk."""
    pin_chunks: tuple[int, ...]
    load_bytes: int
    """Of one load or save, and of one long copy over the bus."""
    arena_bytes: int
    """Of an engine that is started."""
    rounds: int
    seconds: float
    """Of a graph beside copies, in each round."""
    batches: tuple[int, ...]
    """Entries of long batches."""
    captures: int
    small_copies: int


FULL = Amounts(
    pin_bytes=1 << 30,
    pin_chunks=(16 << 20, 64 << 20, 256 << 20, 1 << 30),
    load_bytes=512 << 20,
    arena_bytes=8 << 30,
    rounds=5,
    seconds=0.2,
    batches=(4096, 16384, 51828, 60000, 120000),
    captures=20,
    small_copies=200,
)
QUICK = Amounts(
    pin_bytes=256 << 20,
    pin_chunks=(64 << 20, 256 << 20),
    load_bytes=128 << 20,
    arena_bytes=2 << 30,
    rounds=3,
    seconds=0.1,
    batches=(4096, 51828),
    captures=5,
    small_copies=50,
)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Blocks and slots of one shape; twice as many as a load takes, so that those of a load are scattered."""

    paged: PagedKV
    segment: ArenaSegment
    copies: DeviceCopies
    """By the device's copy engines alone."""
    block_ids: tuple[int, ...]
    slots: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of one load."""
        return sum(self.paged.layout.layer_page_bytes) * len(self.slots)

    @property
    def for_step(self) -> list[Entries]:
        """Of a load that a step waits for: group of layers by group."""
        return self.copies.by_group({0: (self.block_ids, self.slots)})

    @property
    def in_background(self) -> list[Entries]:
        """Of any other load, and of saves: all layers together."""
        return [self.copies.all_layers(self.block_ids, self.slots)]


def paged_on(bench: Bench, shape: Shape, num_blocks: int) -> PagedKV:
    """Pages of this shape in new memory of the device."""
    memory = bench.allocate(num_blocks * shape.block_bytes)
    return shape.paged(memory.address, num_blocks, memory.owner)


def scattered(count: int, of: int, seed: int) -> tuple[int, ...]:
    """`count` of the numbers below `of`, in no order."""
    return tuple(np.random.default_rng(seed).permutation(of)[:count].tolist())


def blocks_in(shape: Shape, num_bytes: int) -> int:
    """Blocks that a load of about so many bytes has."""
    return max(1, num_bytes // shape.block_bytes)


@contextlib.contextmanager
def workspace(bench: Bench, shape: Shape, num_bytes: int) -> Iterator[Workspace]:
    """Memory for loads of about `num_bytes`. Raises CudaError if it cannot be pinned."""
    count = blocks_in(shape, num_bytes)
    paged = paged_on(bench, shape, 2 * count)
    slot_bytes = paged.layout.rank_slot_bytes
    chunk_slots = max(1, CHUNK_BYTES // slot_bytes)
    with pinned_segment(bench.driver, 2 * count, slot_bytes, chunk_slots) as segment:
        copies = DeviceCopies(paged, segment, bench.driver, bench.computing_stream, chunk_slots * slot_bytes, None)
        places = [scattered(count, 2 * count, seed) for seed in (1, 2)]
        yield Workspace(paged, segment, copies, *places)
        bench.synchronize()


def long_copy(driver: Driver, device: int, host: int, num_bytes: int, way: str, stream: int) -> None:
    """One long copy "in" to the device or "out" of it, in pieces of `CHUNK_BYTES` because none spans two chunks."""
    starts = np.arange(0, num_bytes, CHUNK_BYTES, dtype=np.uint64)
    sizes = np.minimum(np.uint64(num_bytes) - starts, np.uint64(CHUNK_BYTES)).astype(np.uint64)
    targets, sources = (starts + np.uint64(start) for start in ((device, host) if way == "in" else (host, device)))
    driver.copy_batch(targets, sources, sizes, AccessOrder.STREAM, stream)
