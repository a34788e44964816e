"""What copies cost an engine: its start, its computing thread, and a decode-like graph that runs beside them.

Everything here goes through the engine of copies as a rank opens it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any

from kvpact.contract import LoadJob, SaveJob
from kvpact.errors import ConfigError
from kvpact.memory.arena import ArenaSegment
from kvpact.memory.limits import available_memory_bytes
from kvpact.torch_cuda.doctor.bench import Bench
from kvpact.torch_cuda.doctor.shapes import Shape
from kvpact.torch_cuda.doctor.workspace import Amounts, blocks_in, paged_on, scattered
from kvpact.worker.copy.base import Transfer, TransferEngine
from kvpact.worker.cuda.engine import MAX_ENTRIES_AT_ONCE
from kvpact.worker.paged import PagedKV
from kvpact.worker.round_trip import require_round_trip
from kvpact.worker.transfer import RankTransfers

IN_FLIGHT = 3
"""Jobs that are under way at any time beside the graph."""

JOB_BYTES = 128 << 20
"""Of a load or a save beside the graph, at most."""

ROUNDS = 3
"""At most, for each kind of copies."""

REPLAYS = 5
"""Of the graph, between two looks at the copies."""

END_SECONDS = 20.0

_REACHED: list[ArenaSegment] = []
"""Memory that copies may still reach; it stays where they were not opened, or did not end."""

STEPS = 30
"""Of the computing thread, of each kind."""


@dataclass(slots=True)
class _Rank:
    """A rank's copies as an engine opens them, with blocks and slots for a load."""

    paged: PagedKV
    segment: ArenaSegment
    engine: TransferEngine
    block_ids: tuple[int, ...]
    start_seconds: float
    jobs: int = 0
    block_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.block_bytes = sum(self.paged.layout.layer_page_bytes)

    @property
    def usable_slots(self) -> int:
        return min(self.segment.usable_slots, len(self.block_ids))

    def load_for_step(self, blocks: int) -> LoadJob:
        """Of the first `blocks` of its blocks, and slots in order."""
        self.jobs += 1
        return LoadJob(self.jobs, "doctor", 0, tuple(range(blocks)), self.block_ids[:blocks], synchronous=True)


@contextlib.contextmanager
def _opened(bench: Bench, shape: Shape, blocks: int, arena_bytes: int) -> Iterator[_Rank]:
    paged = paged_on(bench, shape, 2 * blocks)
    slot_bytes = paged.layout.rank_slot_bytes
    segment = ArenaSegment.create(max(3, blocks, arena_bytes // slot_bytes), slot_bytes)
    _REACHED.append(segment)
    began = bench.now()
    engine = bench.open(paged, segment)
    seconds = bench.now() - began
    try:
        yield _Rank(paged, segment, engine, scattered(blocks, 2 * blocks, 1), seconds)
    finally:
        if not engine.close(END_SECONDS):
            raise ConfigError(f"copies did not end within {END_SECONDS:g} s")
        _REACHED.remove(segment)
        segment.close()


def start(bench: Bench, amounts: Amounts, shapes: Sequence[Shape]) -> dict[str, Any]:
    """Start a rank's copies over a large arena, with the trial of every start; then blocks out and back once more."""
    blocks = blocks_in(shapes[0], amounts.load_bytes)
    arena_bytes = min(amounts.arena_bytes, available_memory_bytes() // 4)
    with _opened(bench, shapes[0], blocks, arena_bytes) as rank:
        began = bench.now()
        require_round_trip(rank.engine, rank.paged, rank.segment, rank.segment.usable_slots)
        seconds = bench.now() - began
        return {
            "arena_bytes": arena_bytes,
            "start_seconds": rank.start_seconds,
            "usable_bytes_at_start": rank.segment.usable_slots * rank.segment.rank_slot_bytes,
            "round_trip_seconds": seconds,
            "bit_exact": True,
        }


def computing_thread(bench: Bench, amounts: Amounts, shapes: Sequence[Shape]) -> dict[str, Any]:
    """Microseconds that a step's hooks take of the computing thread, without loads and with loads of two sizes."""
    shape, rows = shapes[0], []
    blocks = max(2, blocks_in(shape, amounts.load_bytes))
    with _opened(bench, shape, blocks, 2 * blocks * shape.block_bytes) as rank:
        transfers = RankTransfers(rank.engine, rank.paged.layer_index, 0, time.monotonic, layerwise=True)
        at_once = min(max(1, MAX_ENTRIES_AT_ONCE // shape.layers), rank.usable_slots)
        for name, count in (("no loads", 0), ("submitted at once", at_once), ("handed over", rank.usable_slots)):
            steps = [_step(bench, rank, transfers, count) for _ in range(STEPS + 1)][1:]
            rows.append(
                {
                    "step": name,
                    "blocks": count,
                    "entries_at_most": count * shape.layers,
                    "begin_us": median_high([begin for begin, _, _ in steps]) * 1e6,
                    "hooks_us": median_high([hooks for _, hooks, _ in steps]) * 1e6,
                    "cpu_us": median_high([spent for _, _, spent in steps]) * 1e6,
                }
            )
    return {"layers": shape.layers, "rows": rows}


def _step(bench: Bench, rank: _Rank, transfers: RankTransfers, blocks: int) -> tuple[float, float, float]:
    """(seconds to begin loads, seconds of the other hooks, CPU seconds of both) of one step."""
    jobs = [rank.load_for_step(blocks)] if blocks else []
    spent, began = time.thread_time(), bench.now()
    transfers.start_loads(jobs)
    begun = bench.now()
    for name in rank.paged.layer_index:
        transfers.wait_for_layer(name)
    transfers.wait_for_loads()
    transfers.start_saves([])
    ended, spent = bench.now(), time.thread_time() - spent
    bench.synchronize()
    transfers.drain(END_SECONDS)
    transfers.poll()
    return begun - began, ended - begun, spent


def beside(bench: Bench, amounts: Amounts, shapes: Sequence[Shape]) -> dict[str, Any]:
    """How much longer a decode-like graph takes, and a copy of 4 KiB, while loads or saves go on all the time."""
    graph = bench.decode()
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        blocks = max(2, blocks_in(shape, min(amounts.load_bytes, JOB_BYTES)))
        with _opened(bench, shape, blocks, 2 * blocks * shape.block_bytes) as rank:
            for way in ("load", "save"):
                row: dict[str, Any] = {"way": way, "layout": shape.layout, "page_bytes": shape.page_bytes}
                row |= _graph_beside(bench, amounts, rank, way, graph)
                rows.append(row | _small_copies_beside(bench, amounts, rank, way))
    return {"rows": rows}


class _Copies:
    """Copies without end: `keep` sees to it that some are always under way."""

    def __init__(self, rank: _Rank, way: str) -> None:
        self._rank, self._way = rank, way
        blocks = rank.usable_slots
        self._places = (tuple(range(blocks)), rank.block_ids[:blocks])  # once: it is the engine that makes these
        self._job_bytes = blocks * rank.block_bytes
        self._pending: list[Transfer] = []
        self.num_bytes = 0
        """Of those that have ended."""

    def keep(self) -> None:
        pending = [transfer for transfer in self._pending if not transfer.ended]
        self.num_bytes += (len(self._pending) - len(pending)) * self._job_bytes
        while len(pending) < IN_FLIGHT:
            pending += self._begin()
        self._pending = pending

    def _begin(self) -> Sequence[Transfer]:
        engine, self._rank.jobs = self._rank.engine, self._rank.jobs + 1
        if self._way == "save":
            return engine.save([SaveJob(self._rank.jobs, "doctor", 0, *self._places)])
        return engine.load([LoadJob(self._rank.jobs, "doctor", 0, *self._places, synchronous=False)])

    def end(self) -> None:
        for transfer in self._pending:
            transfer.wait(len(self._rank.engine.groups), END_SECONDS)


def _graph_beside(bench: Bench, amounts: Amounts, rank: _Rank, way: str, graph: Callable[[], None]) -> dict[str, float]:
    alone: list[float] = []
    with_copies: list[float] = []
    rates: list[float] = []
    for _ in range(min(amounts.rounds, ROUNDS)):  # in turns, because clocks of a device change with its heat
        alone.append(_seconds_of(bench, graph, amounts.seconds, lambda: None))
        copies = _Copies(rank, way)
        began = bench.now()
        with_copies.append(_seconds_of(bench, graph, amounts.seconds, copies.keep))
        rates.append(copies.num_bytes / max(bench.now() - began, 1e-9) / 1e9)
        copies.end()
    slower = [late / one - 1 for late, one in zip(with_copies, alone, strict=True)]
    return {
        "graph_alone_ms": median_high(alone) * 1e3,
        "graph_beside_copies_ms": median_high(with_copies) * 1e3,
        "slower": median_high(slower),
        "slower_most": max(slower),
        "copies_gb_per_s": median_high(rates),
    }


def _seconds_of(bench: Bench, graph: Callable[[], None], seconds: float, keep: Callable[[], None]) -> float:
    """Seconds of one run of the graph."""
    keep()
    graph()
    bench.synchronize_computing()
    began, count = bench.now(), 0
    while bench.now() - began < seconds:
        keep()
        for _ in range(REPLAYS):
            graph()
        bench.synchronize_computing()
        count += REPLAYS
    return (bench.now() - began) / count


def _small_copies_beside(bench: Bench, amounts: Amounts, rank: _Rank, way: str) -> dict[str, float]:
    """Microseconds until a copy of 4 KiB is there, as sampled tokens and a step's inputs are copied."""
    found: dict[str, float] = {}
    copies = _Copies(rank, way)
    for name in ("alone", "beside"):
        for direction in ("in", "out"):
            times = []
            for _ in range(amounts.small_copies):
                if name == "beside":
                    copies.keep()
                began = bench.now()
                bench.copy_small(direction)
                times.append(bench.now() - began)
            found[f"small_{direction}_{name}_us"] = median_high(times) * 1e6
            found[f"small_{direction}_{name}_most_us"] = max(times) * 1e6
    copies.end()
    return found
