"""What a `TransferEngine` promises, on each kind of device: the CPU, one that is played, and a real one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from device_beds import BEDS, BLOCKS, HYBRIDS, LAYERS, LAYOUTS, SIZED, SLOTS, Bed, CudaBed, bed_named
from device_plays import Page, page
from kvpact.contract import LoadJob, SaveJob
from kvpact.worker.copy.base import Transfer


@pytest.mark.parametrize("layout", [*LAYOUTS, *HYBRIDS, *SIZED])
@pytest.mark.parametrize("name", BEDS)
def test_what_is_loaded_was_saved_whatever_is_copied_when(name: str, layout: str) -> None:
    """The hostile device has more seeds in `device/test_engine.py`."""
    for seed in range(12) if name == "cuda" else (23,):
        bed = bed_named(name, layout, seed)
        assert bed.play(seed, steps=25) == []
        bed.close()


@pytest.fixture(params=BEDS)
def bed(request: pytest.FixtureRequest) -> Iterator[Bed | CudaBed]:
    made = bed_named(request.param, "inside blocks")
    yield made
    made.close()


def ends(bed: Bed | CudaBed, transfers: Sequence[Transfer], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not all(transfer.ended for transfer in transfers) and time.monotonic() < end:
        bed.engine.submit_some()
        bed.finish()
        time.sleep(0.0005)
    return all(transfer.ended for transfer in transfers)


def content(bed: Bed | CudaBed, layer: int, value: int) -> Page:
    return page(layer, value, bed.paged.layers[layer].page_bytes)


def fill(bed: Bed | CudaBed, block: int, value: int) -> None:
    for layer in range(LAYERS):
        bed.write(layer, block, content(bed, layer, value))


def holds(bed: Bed | CudaBed, block: int, value: int) -> bool:
    seen = [bed.read(layer, block) for layer in range(LAYERS)]
    bed.finish()
    return all(np.array_equal(one(), content(bed, layer, value)) for layer, one in enumerate(seen))


def load_job(number: int, slots: list[int], blocks: list[int], synchronous: bool) -> LoadJob:
    return LoadJob(number, "r", 0, tuple(slots), tuple(blocks), synchronous)


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_copy_comes_after_what_was_computed_before_it(bed: Bed | CudaBed, synchronous: bool) -> None:
    fill(bed, 4, 1)
    fill(bed, 9, 2)
    assert ends(bed, bed.engine.save([SaveJob(1, "r", 0, (7, 2), (4, 9))]))
    for block in range(BLOCKS):
        fill(bed, block, 3)
    (load,) = bed.engine.load([load_job(2, [7, 2], [5, 4], synchronous)])
    if synchronous:
        assert load.wait(len(bed.engine.groups), 10)
    else:
        assert ends(bed, [load])
    assert holds(bed, 5, 1)
    assert holds(bed, 4, 2)
    assert all(holds(bed, block, 3) for block in (0, 3, 6, 9, BLOCKS - 1))
    assert ends(bed, [load])
    assert (list(load.failed), load.error) == ([], None)


def test_the_layers_of_a_step_arrive_group_by_group(bed: Bed | CudaBed) -> None:
    fill(bed, 1, 5)
    assert ends(bed, bed.engine.save([SaveJob(1, "r", 0, (0,), (1,))]))
    fill(bed, 1, 6)
    assert [layer for group in bed.engine.groups for layer in group] == list(range(LAYERS))
    (load,) = bed.engine.load([load_job(2, [0], [1], True)])
    seen = []
    for number, group in enumerate(bed.engine.groups, start=1):
        assert load.wait(number, 10)
        seen += [(layer, bed.read(layer, 1)) for layer in group]
    bed.finish()
    assert all(np.array_equal(one(), content(bed, layer, 5)) for layer, one in seen)


def test_a_job_that_names_what_is_not_there_fails_without_the_others(bed: Bed | CudaBed) -> None:
    fill(bed, 2, 8)
    assert ends(bed, bed.engine.save([SaveJob(1, "r", 0, (1,), (2,))]))
    fill(bed, 2, 9)
    transfers = bed.engine.load([load_job(2, [1], [BLOCKS], False), load_job(3, [1], [2], False)])
    assert ends(bed, transfers)
    assert [list(transfer.failed) for transfer in transfers] == [[0], []]
    assert transfers[0].error is not None
    assert holds(bed, 2, 8)
    (save,) = bed.engine.save([SaveJob(4, "r", 0, (SLOTS,), (2,))])
    assert ends(bed, [save])
    assert list(save.failed) == [0]


def test_a_load_that_is_cancelled_ends_and_names_what_was_not_copied(bed: Bed | CudaBed) -> None:
    first, second = bed.engine.load(
        [load_job(1, list(range(SLOTS)), list(range(SLOTS)), False), load_job(2, [1], [BLOCKS - 1], False)]
    )
    second.cancel()
    assert ends(bed, [first, second])
    assert list(first.failed) == []
    assert list(second.failed) in ([0], []), "it may have begun by then"


def test_nothing_is_copied_after_the_end(bed: Bed | CudaBed) -> None:
    slots = list(range(SLOTS))
    begun = bed.engine.load([load_job(1, slots, slots, False)])
    assert bed.engine.close(10)
    assert all(transfer.ended for transfer in begun)
    assert bed.engine.close(10)
    (late,) = bed.engine.load([load_job(2, [0], [0], False)])
    (save,) = bed.engine.save([SaveJob(3, "r", 0, (0,), (0,))])
    assert late.ended
    assert save.ended
    assert (list(late.failed), list(save.failed)) == ([0], [0])
