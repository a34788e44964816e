"""The CUDA engine on a device that does everything in the worst order, beside the CPU's: no byte is ever wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from device_beds import BLOCKS, HYBRIDS, LAYERS, LAYOUTS, SIZED, SLOTS, Bed
from kvpact.contract import LoadJob, SaveJob
from kvpact.testkit.device.hostile_driver import COMPUTING_STREAM, HostileDriver
from kvpact.testkit.device.plays import page
from kvpact.worker.copy.base import Transfer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cpus_engine_gives_back_what_was_saved(layout: str) -> None:
    bed = Bed(layout, None)
    assert bed.play(1) == []
    bed.close()


BEDS = [(layout, seed, False) for layout in LAYOUTS for seed in range(12)]
BEDS += [(layout, seed, True) for layout in LAYOUTS for seed in range(4)]
BEDS += [(layout, seed, seed % 2 > 0) for layout in HYBRIDS for seed in range(6)]
BEDS += [(layout, seed, seed % 5 == 1) for layout in SIZED for seed in range(8)]
"""Seed, and whether a bounce buffer is used."""


@pytest.mark.parametrize(("layout", "seed", "bounced"), BEDS)
def test_a_hostile_device_gives_back_what_was_saved(layout: str, seed: int, bounced: bool) -> None:
    bed = Bed(layout, seed, bounced=bounced)
    assert bed.play(seed) == []
    bed.close()
    assert bed.driver is not None
    assert bed.driver.violations == []


def load_job(number: int, slots: list[int], blocks: list[int], synchronous: bool) -> LoadJob:
    return LoadJob(number, "r", 0, tuple(slots), tuple(blocks), synchronous)


def ends(transfers: Sequence[Transfer], driver: HostileDriver, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not all(transfer.ended for transfer in transfers) and time.monotonic() < end:
        driver.finish()
        time.sleep(0.001)
    return all(transfer.ended for transfer in transfers)


@pytest.fixture
def bed() -> Iterator[Bed]:
    made = Bed("one by one", 7)
    yield made
    made.close()


def hostile(bed: Bed) -> HostileDriver:
    assert bed.driver is not None
    return bed.driver


def test_a_device_that_is_lost_fails_every_job_once_and_is_left_alone() -> None:
    bed = Bed("one by one", 3)
    driver = hostile(bed)
    driver.stopped = True
    slow = bed.engine.save([SaveJob(1, "r", 0, tuple(range(12)), tuple(range(12)))])
    urgent = bed.engine.load([load_job(2, [0, 1], [20, 21], True)])
    driver.lose()
    assert ends([*slow, *urgent], driver)
    assert [len(transfer.failed) for transfer in (*slow, *urgent)] == [12, 2]
    assert all("the device was lost" in str(transfer.error) for transfer in (*slow, *urgent))
    calls = driver.num_calls
    later = [
        *bed.engine.save([SaveJob(3, "r", 0, (1,), (1,))]),
        *bed.engine.load([load_job(4, [1], [2], False)]),
        *bed.engine.load([load_job(5, [1], [2], True)]),
    ]
    assert all(transfer.ended and len(transfer.failed) == 1 for transfer in later), "at once, without a call"
    assert all(transfer.wait(4, 0.0) for transfer in later)
    assert driver.num_calls == calls
    bed.close()
    bed.close()
    assert driver.violations == []


@pytest.mark.parametrize("seed", range(20))
def test_copies_before_a_refused_one_are_over_before_the_engine_computes_there(seed: int) -> None:
    """A batch is refused after others of the same load went off: the engine gets its blocks when those are done."""
    bed = Bed("one by one", seed)
    driver = hostile(bed)
    driver.unregister(bed.segment.mapped_at + 9 * bed.segment.rank_slot_bytes)  # slots 9 to 11
    bed.views[0][:] = 77
    (refused,) = bed.engine.load([load_job(1, [0, 1, 9], [4, 5, 6], True)])
    assert refused.wait(4, 1.0)
    for layer in range(LAYERS):
        for block in (4, 5, 6):
            bed.write(layer, block, page(layer, 5, bed.paged.layers[layer].page_bytes))
    assert ends([refused], driver)
    driver.finish()
    assert list(refused.failed) == [0, 1, 2]
    for layer in range(LAYERS):
        for block in (4, 5, 6):
            assert (bed.views[layer][block].ravel() == page(layer, 5, bed.paged.layers[layer].page_bytes)).all()
    bed.close()


def test_a_job_that_names_what_is_not_there_fails_alone(bed: Bed) -> None:
    driver = hostile(bed)
    for urgent in (True, False):
        jobs = [load_job(1, [1], [BLOCKS], urgent), load_job(2, [1], [2], urgent), load_job(3, [SLOTS], [3], urgent)]
        transfers = bed.engine.load(jobs)
        assert ends(transfers, driver)
        assert [list(transfer.failed) for transfer in transfers] == [[0], [], [0]]
        assert "there are 24" in str(transfers[0].error)
    (save,) = bed.engine.save([SaveJob(4, "r", 0, (1,), (-1,))])
    assert ends([save], driver)
    assert list(save.failed) == [0]
    assert driver.violations == []


def test_a_few_entries_are_submitted_at_once_and_many_by_a_thread(bed: Bed) -> None:
    driver = hostile(bed)
    bed.engine.load([load_job(1, [0, 1], [0, 1], True)])
    assert driver.num_entries == 2 * LAYERS
    (many,) = bed.engine.load([load_job(2, list(range(12)), list(range(12)), True)])
    assert many.wait(4, 5.0)
    assert driver.num_entries == 14 * LAYERS
    assert ends([many], driver)


def test_all_jobs_of_a_call_have_one_fence(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = hostile(bed)
    streams: list[int] = []
    record = driver.record

    def noted(event: int, stream: int) -> None:
        streams.append(stream)
        record(event, stream)

    monkeypatch.setattr(driver, "record", noted)
    transfers = bed.engine.save([SaveJob(number, "r", 0, (number,), (number,)) for number in range(10)])
    assert ends(transfers, driver)
    assert streams.count(COMPUTING_STREAM) == 1
    assert not any(len(transfer.failed) for transfer in transfers)


def test_each_computing_stream_waits_once(bed: Bed) -> None:
    driver = hostile(bed)
    other = driver.create_stream()
    streams = iter([1, 1, 1, other, other])
    bed.copies.current_stream = lambda: next(streams)
    (load,) = bed.engine.load([load_job(1, [0], [0], True)])
    waits = driver.num_waits
    for _ in range(4):
        assert load.wait(4, None)
    assert driver.num_waits - waits == 2


def test_a_cancelled_load_in_the_background_ends_at_once_if_it_has_not_begun(bed: Bed) -> None:
    driver = hostile(bed)
    first, second = bed.engine.load(
        [load_job(1, list(range(16)), list(range(16)), False), load_job(2, [1], [20], False)]
    )
    second.cancel()
    assert ends([first, second], driver)
    assert first.failed == ()
    assert list(second.failed) in ([0], []), "it may have been submitted by then"


def test_a_cancelled_load_of_a_step_is_over_before_the_engine_computes_again() -> None:
    for seed in range(10):
        bed = Bed("one by one", seed)
        driver = hostile(bed)
        (load,) = bed.engine.load([load_job(1, [0], [0], True)])
        load.cancel()
        load.ended  # noqa: B018 - as it is asked after each step
        bed.write(0, 0, page(0, 9, bed.paged.layers[0].page_bytes))
        assert ends([load], driver)
        driver.finish()
        assert list(load.failed) == [0]
        assert (bed.views[0][0].ravel() == page(0, 9, bed.paged.layers[0].page_bytes)).all()
        bed.close()
