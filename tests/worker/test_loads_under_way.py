"""A step goes on while a device is still at its loads: they are neither given up nor reported before their end."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvpact.config import load_config
from kvpact.contract import JobOutcome, LoadJob, StepWork
from kvpact.ranges import RangeSet
from kvpact.wire import StepMessage
from kvpact.worker.worker import CacheWorker, RankInfo
from kvpact_testkit.device.played import OnDevice, PlayedDevice

torch = pytest.importorskip("torch")

BLOCKS = 8


@pytest.fixture
def device() -> PlayedDevice:
    return PlayedDevice(2)


@pytest.fixture
def worker(device: PlayedDevice) -> Iterator[CacheWorker]:
    config = load_config({"memory": "256KiB"}, {})
    made = CacheWorker(config, RankInfo(0, 1, BLOCKS), {"cuda": device.open})
    made.register_kv_caches({f"layer.{n}": OnDevice(torch.zeros((BLOCKS, 16, 8), dtype=torch.int8)) for n in range(3)})
    yield made
    made.shutdown()
    assert device.driver.violations == []


def step(worker: CacheWorker, *loads: LoadJob) -> set[int]:
    """One step with these loads. Returns the blocks that the engine must not use."""
    message = StepMessage(StepWork(loads=loads))
    worker.step_began()
    worker.begin_step(message)
    for layer in range(3) if loads else ():
        worker.wait_for_layer_load(f"layer.{layer}")
    worker.end_forward(message)
    return worker.poll().invalid_blocks


def test_a_load_that_the_device_has_not_done_when_the_step_is_over_is_not_given_up(
    worker: CacheWorker, device: PlayedDevice
) -> None:
    device.driver.stopped = True
    assert step(worker, LoadJob(1, "r", 0, (0, 1), (2, 3), synchronous=True)) == set()
    assert worker.report().ranks[0] == {}, "its slots are read still"
    assert step(worker) == set()
    device.driver.stopped = False
    until = time.monotonic() + 10
    while not (reported := worker.report().ranks[0]):
        assert time.monotonic() < until
        device.driver.finish()
        assert step(worker) == set()
    assert reported == {1: JobOutcome(done=RangeSet.span(0, 2))}


def test_a_load_that_could_not_be_ordered_is_named_in_its_step(worker: CacheWorker, device: PlayedDevice) -> None:
    device.driver.stopped = True
    loads = LoadJob(1, "r", 0, (0,), (2,), synchronous=True), LoadJob(2, "q", 0, (10_000,), (4,), synchronous=True)
    assert step(worker, *loads) == {4}
    device.driver.stopped = False
    device.driver.finish()


def test_what_a_lost_device_does_not_load_is_named(worker: CacheWorker, device: PlayedDevice) -> None:
    device.driver.stopped = True
    assert step(worker, LoadJob(1, "r", 0, (0,), (2,), synchronous=True)) == set()
    device.driver.lose()
    assert step(worker) == {2}
    assert worker.report().ranks[0] == {1: JobOutcome(failed=RangeSet.span(0, 1))}


def test_the_limits_of_a_step_reach_the_copies(worker: CacheWorker, device: PlayedDevice) -> None:
    """Three layers, so three copies a block; the next step without limits gives the device the rest."""
    before = device.driver.num_entries
    load = LoadJob(1, "r", 0, (0, 1, 2, 3), (4, 5, 6, 7), synchronous=False)
    worker.begin_step(StepMessage(StepWork(loads=(load,), max_copies=6, max_load_bytes=1 << 20)))
    assert device.driver.num_entries - before == 6
    worker.begin_step(StepMessage())
    assert device.driver.num_entries - before == 12
    device.driver.finish()
