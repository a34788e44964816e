"""Steps beside decodes on a device with a clock: what they give it and wait for follows their time, and loads end.

The clock is not calibrated: its times compare rules. The shape is Llama-3-8B's: 32 layers, 2 MiB a block of 16 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from sys import maxsize

import pytest

from kvpact.cache.load_budget import LoadBudget
from kvpact.contract import LoadJob, SaveJob
from kvpact.memory.arena import ArenaSegment
from kvpact.worker.device.engine import DeviceTransfer, DeviceTransferEngine
from kvpact.worker.paged import PagedKV
from kvpact_testkit.device.clocked import ClockedDevice

torch = pytest.importorskip("torch")

LAYERS, PAGE, BLOCKS = 32, 128, 512
BLOCK_BYTES = 2 << 20
BYTES_PER_BYTE = BLOCK_BYTES // (LAYERS * PAGE)
"""Bytes of the model for each byte of this memory."""

COPY_SECONDS, BYTES_PER_SECOND = 0.6e-6, 55e9
LIMIT = 256 << 20
"""`sync_load_budget`."""

LAST_ARRIVAL, MOST_STEPS = 10, 600

LAYOUTS = ("block by block", "layer by layer")


@cache
def memory_of(layout: str) -> tuple[PagedKV, ArenaSegment]:
    """An engine's blocks, and as many slots."""
    if layout == "block by block":
        memory = torch.zeros((BLOCKS, LAYERS, PAGE), dtype=torch.uint8)
        tensors = {f"layer.{layer}": memory[:, layer] for layer in range(LAYERS)}
    else:
        tensors = {f"layer.{layer}": torch.zeros((BLOCKS, PAGE), dtype=torch.uint8) for layer in range(LAYERS)}
    paged = PagedKV.from_tensors(tensors, BLOCKS)
    return paged, ArenaSegment.create(BLOCKS, paged.rank_slot_bytes)


class Today(LoadBudget):
    """The rules before steps were timed: 256 MiB and 512 copies that a step waits for, 4,096 others."""

    def end_step(self, now: float, tokens: int = 0, *, copies: bool = False) -> tuple[int, int] | None:
        return super().end_step(0.0, tokens, copies=copies)


class NoBudget(LoadBudget):
    """A mutant: each step waits for all loads that it can."""

    def hold(self, request_id: str, blocks: int) -> bool:
        return True


class ManyCopies(LoadBudget):
    """A mutant: 4,096 copies whatever the step takes."""

    @property
    def max_copies(self) -> int:
        return 4096


class AnyBytes(LoadBudget):
    """A mutant: the bus may be busy with other loads for longer than a step."""

    def end_step(self, now: float, tokens: int = 0, *, copies: bool = False) -> tuple[int, int] | None:
        limits = super().end_step(now, tokens, copies=copies)
        return limits and (limits[0], maxsize)


class OneStream(ClockedDevice):
    """A mutant of the copies: one stream for all."""

    stream: int | None = None

    def create_stream(self) -> int:
        if self.stream is None:
            self.stream = super().create_stream()
        return self.stream


@dataclass
class UnderWay:
    """A load or a save from its order to its end."""

    ordered_at: float
    transfer: DeviceTransfer


@dataclass
class Run:
    """Random loads and saves beside 16 requests that decode; nothing is computed but their tokens."""

    seed: int
    layout: str
    budget_type: type[LoadBudget] = LoadBudget
    device_type: type[ClockedDevice] = ClockedDevice
    decode_seconds: float = 0.0
    """Time of a step without copies; 0: drawn from 4 to 32 ms, short ones more often."""
    problems: list[str] = field(default_factory=list)
    load_seconds: float = 0.0
    """Sum over loads of the time from the order until the engine can use it."""
    _jobs: int = 0
    _open: list[UnderWay] = field(default_factory=list)
    _loads: list[UnderWay] = field(default_factory=list)
    _times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        self.decode_seconds = self.decode_seconds or 4e-3 * 8 ** chance.random()
        paged, segment = memory_of(self.layout)
        self.device = self.device_type(BYTES_PER_SECOND, COPY_SECONDS, BYTES_PER_BYTE)
        self.engine = DeviceTransferEngine(paged, segment, self.device, len(segment.memory))
        self.budget = self.budget_type(LIMIT, BLOCK_BYTES, self.engine.copies_per_block)
        self.arrivals = self._drawn(chance, chance.randint(2, 6), 4)
        self.computed = self._drawn(chance, chance.randint(0, 3), BLOCKS // 4)

    @staticmethod
    def _drawn(chance: random.Random, count: int, least: int) -> dict[int, list[int]]:
        """Step -> numbers of blocks, from `least` to all, short ones more often."""
        drawn: dict[int, list[int]] = {}
        for _ in range(count):
            drawn.setdefault(chance.randrange(3, LAST_ARRIVAL + 1), []).append(
                int(least * (BLOCKS / least) ** chance.random())
            )
        return drawn

    def run(self) -> Run:
        """All steps until the last copy has ended."""
        for step in range(MOST_STEPS):
            self._step(step)
            if step > LAST_ARRIVAL and not (self._loads or self._open):
                return self
        self.problems.append("loads do not end")
        return self

    def _step(self, step: int) -> None:
        began = self.device.now
        given = self.device.given_seconds
        jobs = [*self._ordered(self.arrivals.get(step, []))]
        self.budget.note_running(f"decode {number}" for number in range(16))
        waiting = sum(load.transfer.blocks_left for load in self._loads)
        limits = self.budget.end_step(began, 16, copies=bool(jobs or self._loads or self._open))
        transfers = self.engine.load(jobs)
        for job, transfer in zip(jobs, transfers, strict=True):
            if job.synchronous:
                transfer.wait(len(self.engine.groups), None)
        if limits is None:
            self.engine.submit_some()
        else:
            self.engine.submit_some(limits[0], limits[1] // BYTES_PER_BYTE)
        if waiting and sum(load.transfer.blocks_left for load in self._loads) >= waiting:
            self.problems.append("a load does not go on")
        waited = self.device.compute(self.decode_seconds)
        self._judge(self.device.given_seconds - given, waited)
        for job, transfer in zip(jobs, transfers, strict=True):
            if job.synchronous:
                self.load_seconds += self.device.now + waited - began
            else:
                self._loads.append(UnderWay(began, transfer))
        self.device.finish_computing()
        self._save(self.computed.get(step, []))
        self._take_ended()
        self._times.append(self.device.now - began)

    def _ordered(self, sizes: list[int]) -> Iterator[LoadJob]:
        for blocks in sizes:
            self._jobs += 1
            request_id = f"load {self._jobs}"
            waits = self.budget.hold(request_id, blocks)
            self.budget.release(request_id)
            self.budget.spend(blocks if waits else 0)
            places = tuple(range(blocks))
            yield LoadJob(self._jobs, request_id, 0, places, places[::-1], synchronous=waits)

    def _save(self, sizes: list[int]) -> None:
        for blocks in sizes:
            self._jobs += 1
            places = tuple(range(blocks))
            (transfer,) = self.engine.save([SaveJob(self._jobs, "computed", 0, places, places[::-1])])
            self._open.append(UnderWay(self.device.now, transfer))

    def _take_ended(self) -> None:
        ended = [load for load in self._loads if load.transfer.ended]
        self.load_seconds += sum(self.device.now - load.ordered_at for load in ended)
        self._loads = [load for load in self._loads if load not in ended]
        self._open = [each for each in self._open if not each.transfer.ended]

    def _judge(self, given: float, waited: float) -> None:
        """A tenth to give, a half to wait for, of the longest of the last three steps; and two blocks more."""
        if len(self._times) < 3:
            return
        step = max(self._times[-3:])
        copies = 2 * self.engine.copies_per_block
        if given > 0.1 * step + copies * COPY_SECONDS:
            self.problems.append(f"a step after {step * 1e3:.1f} ms gives copies for {given * 1e3:.2f} ms")
        if waited > 0.5 * step + 2 * BLOCK_BYTES / BYTES_PER_SECOND:
            self.problems.append(f"a step after {step * 1e3:.1f} ms waits for {waited * 1e3:.2f} ms")


@pytest.mark.parametrize("runs", [200, pytest.param(10_000, marks=pytest.mark.soak)])
def test_p11_each_step_keeps_its_shares_and_each_load_ends(runs: int) -> None:
    for seed in range(runs):
        assert Run(seed, LAYOUTS[seed % 2]).run().problems == [], f"seed {seed}"


@pytest.mark.parametrize("mutant", [NoBudget, ManyCopies, AnyBytes, OneStream])
def test_each_mutant_is_found(mutant: type[LoadBudget | ClockedDevice]) -> None:
    for seed in range(200):
        if issubclass(mutant, LoadBudget):
            run = Run(seed, LAYOUTS[seed % 2], budget_type=mutant).run()
        else:
            run = Run(seed, LAYOUTS[seed % 2], device_type=mutant).run()
        if run.problems:
            print(f"seed {seed}: {run.problems[0]}")
            return
    pytest.fail("200 runs find nothing")


@pytest.mark.parametrize("runs", [100, pytest.param(2000, marks=pytest.mark.soak)])
def test_all_loads_together_take_hardly_longer_than_by_the_rules_before(runs: int) -> None:
    """Steps of 5 to 50 ms, half of the runs in each layout; layer by layer, short steps alone are above that."""
    now = 0.0
    before = 0.0
    for seed in range(runs):
        layout = LAYOUTS[seed % 2]
        decode_seconds = random.Random(seed).uniform(5e-3, 50e-3)
        now += Run(seed, layout, decode_seconds=decode_seconds).run().load_seconds
        before += Run(seed, layout, Today, decode_seconds=decode_seconds).run().load_seconds
    print(f"{now / before:.3f} times")
    assert now <= 1.1 * before
