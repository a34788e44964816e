"""KV memory that goes away for a sleep and comes back: no copy touches what is gone, none is lost without a word."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvpact.config import load_config
from kvpact.contract import JobOutcome, LoadJob, SaveJob, StepWork
from kvpact.errors import ConfigError, KvpactError
from kvpact.memory.arena import ArenaSegment, Standing
from kvpact.wire import StepMessage
from kvpact.worker.kv_memory import KVMemory
from kvpact.worker.worker import CacheWorker, RankInfo
from kvpact_testkit.device.played import OnDevice, PlayedDevice
from polling import until

torch = pytest.importorskip("torch")

LAYERS, BLOCKS = 3, 12


class Rank:
    """One rank of an engine: its KV memory, and the worker over it."""

    def __init__(self, device: PlayedDevice | None, **settings: object) -> None:
        self.device = device
        self.tensors = self.new_tensors()
        config = load_config({"memory": "1MiB", **settings}, {})
        openers = {"cuda": device.open} if device is not None else {}
        self.worker = CacheWorker(config, RankInfo(0, 1, BLOCKS), openers)
        self.worker.register_kv_caches({name: self.seen(tensor) for name, tensor in self.tensors.items()})

    @property
    def memory(self) -> KVMemory:
        assert self.worker.memory is not None
        return self.worker.memory

    def seen(self, tensor: object) -> object:
        return OnDevice(tensor) if self.device is not None else tensor

    @staticmethod
    def new_tensors(tokens: int = 16) -> dict[str, Any]:
        return {f"layer.{n}": torch.zeros((BLOCKS, 2, tokens, 8), dtype=torch.float16) for n in range(LAYERS)}

    def fill(self, block: int, value: float) -> None:
        for layer, tensor in enumerate(self.tensors.values()):
            tensor[block] = value + layer / 4

    def holds(self, block: int, value: float) -> bool:
        return all(
            bool((tensor[block] == value + layer / 4).all()) for layer, tensor in enumerate(self.tensors.values())
        )

    def order(self, *jobs: LoadJob | SaveJob) -> None:
        loads = tuple(job for job in jobs if isinstance(job, LoadJob))
        message = StepMessage(StepWork(loads=loads, saves=tuple(job for job in jobs if isinstance(job, SaveJob))))
        self.worker.begin_step(message)
        self.worker.wait_for_loads()
        self.worker.end_forward(message)

    def end(self, *jobs: LoadJob | SaveJob) -> set[int]:
        """The jobs of these that did not fail."""
        self.order(*jobs)
        outcomes: dict[int, JobOutcome] = {}
        until = time.monotonic() + 10
        while not {job.job_id for job in jobs} <= outcomes.keys():
            assert time.monotonic() < until, "jobs end in time"
            self.worker.begin_step(StepMessage())
            self.worker.poll()
            outcomes.update(self.worker.report().ranks[0])
            if self.device is not None:
                self.device.driver.finish()
        return {job_id for job_id, outcome in outcomes.items() if not outcome.failed.ranges}

    def move(self) -> dict[str, Any]:
        """The KV memory goes and comes back elsewhere. Returns the tensors of before, in which each byte is 7."""
        self.worker.suspend()
        before, self.tensors = self.tensors, self.new_tensors()
        if self.device is not None:
            self.device.unmap()
            self.device.map(*self.tensors.values())
        for tensor in before.values():
            tensor.fill_(7)
        self.memory.resume({name: self.seen(tensor) for name, tensor in self.tensors.items()})
        return before


def save_job(number: int, slots: list[int], blocks: list[int]) -> SaveJob:
    return SaveJob(number, "r", 0, tuple(slots), tuple(blocks))


def load_job(number: int, slots: list[int], blocks: list[int], synchronous: bool) -> LoadJob:
    return LoadJob(number, "r", 0, tuple(slots), tuple(blocks), synchronous)


@pytest.fixture(params=["cpu", "fake-cuda"])
def rank(request: pytest.FixtureRequest) -> Iterator[Rank]:
    made = Rank(PlayedDevice(3) if request.param == "fake-cuda" else None)
    yield made
    made.worker.shutdown()
    if made.device is not None:
        assert made.device.driver.violations == []
        assert made.device.driver.pinned_bytes == 0


@pytest.mark.parametrize("synchronous", [True, False])
def test_what_is_loaded_after_the_memory_has_moved_goes_to_where_it_is_now(rank: Rank, synchronous: bool) -> None:
    rank.fill(4, 2)
    assert rank.end(save_job(1, [5], [4])) == {1}
    before = rank.move()
    assert rank.end(load_job(2, [5], [9], synchronous)) == {2}
    assert rank.holds(9, 2)
    assert all(bool((tensor == 7).all()) for tensor in before.values()), "the old memory is somebody else's now"
    rank.fill(3, 5)
    assert rank.end(save_job(3, [6], [3])) == {3}
    rank.fill(3, 6)
    assert rank.end(load_job(4, [6], [3], synchronous)) == {4}
    assert rank.holds(3, 5)


def test_the_same_memory_at_the_same_place_is_used_as_before(rank: Rank) -> None:
    rank.fill(4, 2)
    assert rank.end(save_job(1, [5], [4])) == {1}
    engine = rank.memory.transfers.engine
    for _ in range(2):
        rank.worker.suspend()
    for _ in range(2):
        rank.memory.resume()
    rank.fill(4, 0)
    assert rank.end(load_job(2, [5], [4], True)) == {2}
    assert rank.holds(4, 2)
    assert rank.memory.transfers.engine is engine


def test_what_is_ordered_while_the_memory_is_away_fails_once_and_by_name(rank: Rank) -> None:
    rank.worker.suspend()
    if rank.device is not None:
        rank.device.unmap()
    rank.order(load_job(1, [0], [3], True), load_job(2, [1], [4], False), save_job(3, [2], [5]))
    ended = rank.worker.poll()
    assert ended.invalid_blocks == {3, 4}
    assert ended.arrived == {"r"}
    outcomes = rank.worker.report().ranks[0]
    assert sorted(outcomes) == [1, 2, 3]
    assert all(outcome.failed.ranges and not outcome.done.ranges for outcome in outcomes.values())
    assert rank.worker.report().ranks[0] == {}


@pytest.mark.parametrize("elsewhere", [False, True], ids=["the same place", "elsewhere"])
def test_copies_prove_themselves_anew_after_each_sleep(elsewhere: bool) -> None:
    """The same addresses are other memory of the device by then."""
    device = PlayedDevice(3)
    device.checks_first = 1
    rank = Rank(device)
    hello = rank.worker.hello()
    assert hello is not None
    arena = ArenaSegment.attach(hello.segment)

    def standing() -> Standing:
        return arena.standing

    rank.fill(4, 2)
    for number in range(2):
        assert rank.end(save_job(2 * number, [5], [4])) == {2 * number}
        assert standing() is Standing.OPEN
        assert rank.end(load_job(2 * number + 1, [5], [4], False)) == {2 * number + 1}
        assert standing() is Standing.PROVEN
        if elsewhere:
            rank.move()
        else:
            rank.worker.suspend()
            rank.memory.resume()
        assert standing() is Standing.OPEN
    rank.worker.shutdown()
    arena.close()


@pytest.mark.parametrize("seed", range(6))
def test_memory_that_a_device_unmaps_is_touched_by_no_copy(seed: int) -> None:
    device = PlayedDevice(seed)
    rank = Rank(device)
    rank.order(save_job(1, list(range(8)), list(range(8))))
    rank.order(
        load_job(2, [8, 9, 10], [8, 9, 10], False),
        load_job(3, [11], [11], True),
        save_job(4, [12, 13], [0, 5]),
    )
    rank.worker.suspend()
    device.unmap()
    device.driver.finish()
    assert device.driver.violations == []
    assert set(rank.worker.report().ranks[0]) == {1, 2, 3, 4}
    rank.worker.shutdown()


class Hanging:
    """Copies of a group that wait to be let through."""

    def __init__(self, gather: Callable[..., None]) -> None:
        self.gather = gather
        self.goes_on = False

    def __call__(self, group: int, plan: object) -> None:
        until(lambda: self.goes_on)
        self.gather(group, plan)


def test_memory_stays_while_a_copy_hangs_and_the_engine_serves_on() -> None:
    rank = Rank(None, shutdown_timeout="50ms")
    copier = rank.memory.transfers.engine.copier  # type: ignore[attr-defined]
    copier.gather = hanging = Hanging(copier.gather)
    rank.order(save_job(1, [0], [0]), save_job(2, [1], [1]))
    with pytest.raises(KvpactError, match=r"copies of KV memory go on 0\.1 s after the engine began to release it"):
        rank.worker.suspend()
    hanging.goes_on = True
    assert rank.end(save_job(3, [2], [2])) == {3}, "those that were cancelled have failed"
    rank.worker.suspend()
    rank.worker.shutdown()


def test_another_layout_is_refused_and_nothing_is_copied(rank: Rank) -> None:
    rank.worker.suspend()
    others = rank.new_tensors(tokens=8)
    with pytest.raises(ConfigError, match="came back in another layout"):
        rank.memory.resume({name: rank.seen(tensor) for name, tensor in others.items()})
    assert rank.end(load_job(1, [0], [0], True), save_job(2, [1], [1])) == set()
    rank.memory.resume()
    assert rank.end(save_job(3, [1], [1])) == {3}
