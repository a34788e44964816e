"""The engine on a device that does everything in the worst order, beside the CPU's: no byte is ever wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from device_beds import HYBRIDS, LAYERS, LAYOUTS, SIZED, SLOTS, Bed
from device_plays import page
from kvpact.contract import LoadJob, SaveJob
from kvpact.memory.arena import ArenaSegment
from kvpact.worker.copy.base import Transfer
from kvpact.worker.device.base import Addresses
from kvpact.worker.device.engine import DeviceTransferEngine
from kvpact.worker.paged import PagedKV
from kvpact_testkit.device.hostile_driver import AccessOrder, HostileDriver
from kvpact_testkit.device.played import PlayedDevice

torch = pytest.importorskip("torch")

BEDS = [(layout, seed) for layout in LAYOUTS for seed in range(24)]
BEDS += [(layout, seed) for layout in (*HYBRIDS, *SIZED) for seed in range(24)]


@pytest.mark.parametrize(("layout", "seed"), BEDS)
def test_a_hostile_device_gives_back_what_was_saved(layout: str, seed: int) -> None:
    bed = Bed(layout, seed)
    assert bed.play(seed) == []
    bed.close()
    assert bed.driver is not None
    assert bed.driver.violations == []


def load_job(number: int, slots: list[int], blocks: list[int], synchronous: bool) -> LoadJob:
    return LoadJob(number, "r", 0, tuple(slots), tuple(blocks), synchronous)


def ends(bed: Bed, transfers: Sequence[Transfer], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not all(transfer.ended for transfer in transfers) and time.monotonic() < end:
        bed.engine.submit_some()
        bed.finish()
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
    assert ends(bed, [*slow, *urgent])
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
    assert ends(bed, [refused])
    driver.finish()
    assert list(refused.failed) == [0, 1, 2]
    for layer in range(LAYERS):
        for block in (4, 5, 6):
            assert (bed.views[layer][block].ravel() == page(layer, 5, bed.paged.layers[layer].page_bytes)).all()
    bed.close()


def test_a_cancelled_load_of_a_step_is_over_before_the_engine_computes_again() -> None:
    for seed in range(10):
        bed = Bed("one by one", seed)
        driver = hostile(bed)
        (load,) = bed.engine.load([load_job(1, [0], [0], True)])
        load.cancel()
        bed.write(0, 0, page(0, 9, bed.paged.layers[0].page_bytes))
        assert ends(bed, [load])
        driver.finish()
        assert list(load.failed) == [], "the device had all of it"
        assert (bed.views[0][0].ravel() == page(0, 9, bed.paged.layers[0].page_bytes)).all()
        bed.close()


@pytest.mark.parametrize("seed", range(20))
def test_a_cancelled_load_in_pieces_is_over_before_the_engine_computes_there(seed: int) -> None:
    bed = Bed("one by one", seed)
    hostile(bed)
    blocks = list(range(10))
    (load,) = bed.engine.load([load_job(1, blocks, blocks, False)])
    bed.engine.submit_some()
    load.cancel()
    for block in blocks:
        bed.write(0, block, page(0, 9, bed.paged.layers[0].page_bytes))
    assert ends(bed, [load])
    bed.finish()
    assert list(load.failed) == blocks[2:], "a step gives the device two blocks"
    assert all((bed.views[0][block].ravel() == page(0, 9, bed.paged.layers[0].page_bytes)).all() for block in blocks)
    bed.close()


def test_a_step_that_computes_gives_the_device_a_share_and_one_that_does_not_all(bed: Bed) -> None:
    driver = hostile(bed)
    slots = list(range(SLOTS))
    load, save = (
        bed.engine.load([load_job(1, slots[:8], slots[:8], False)]),
        bed.engine.save([SaveJob(2, "r", 0, tuple(slots[8:]), tuple(slots[8:]))]),
    )
    assert driver.num_entries == 0, "neither the next forward pass nor the step's tokens are behind them"
    bed.engine.submit_some()
    assert driver.num_entries == 12, "of each direction six: one block"
    (urgent,) = bed.engine.load([load_job(3, [0], [20], True)])
    assert driver.num_entries == 12 + LAYERS, "what a step waits for is not behind them"
    bed.engine.submit_all()
    assert driver.num_entries == 17 * LAYERS
    assert ends(bed, [*load, *save, urgent])


def test_jobs_of_one_direction_end_in_the_order_in_which_they_were_ordered(bed: Bed) -> None:
    """Whatever fails at once: who waits for several saves is told of the first one first."""
    driver = hostile(bed)
    driver.stopped = True
    saves = bed.engine.save([SaveJob(n, "r", 0, (slot,), (1,)) for n, slot in enumerate((0, SLOTS, 2))])
    bed.engine.submit_all()
    saves[2].cancel()
    assert [one.ended for one in saves] == [False, False, False]
    driver.stopped = False
    assert ends(bed, saves[:1])
    assert ends(bed, saves)
    assert [list(one.failed) for one in saves] == [[], [0], []]


def test_saves_that_wait_are_made_at_the_end(bed: Bed) -> None:
    bed.write(0, 3, page(0, 5, bed.paged.layers[0].page_bytes))
    (save,) = bed.engine.save([SaveJob(1, "r", 0, (4,), (3,))])
    assert bed.engine.close(10)
    assert save.ended
    assert list(save.failed) == []
    first = bytes(bed.segment.slot_view(4)[: bed.paged.layers[0].page_bytes])
    assert first == page(0, 5, bed.paged.layers[0].page_bytes).tobytes()


def test_a_call_that_fails_costs_its_job_alone_and_a_device_that_is_lost_is_told_once(
    bed: Bed, caplog: pytest.LogCaptureFixture
) -> None:
    driver = hostile(bed)
    calls: list[str] = []

    def refuse(call: str) -> None:
        calls.append(call)
        if call == "copy_batch" and calls.count(call) == 2:
            raise RuntimeError("once")

    driver.before_call = refuse
    transfers = bed.engine.load([load_job(n, [n], [n], False) for n in range(3)])
    bed.engine.submit_all()
    assert ends(bed, transfers)
    assert [list(one.failed) for one in transfers] == [[], [0], []]
    assert str(transfers[1].error) == "once"
    assert "synchronize_all" in calls
    assert not caplog.records
    driver.before_call = str
    transfers = bed.engine.load([load_job(n, [n], [n], False) for n in range(3)])
    driver.lose()
    bed.engine.submit_all()
    assert all(one.ended and list(one.failed) == [0] for one in transfers)
    assert [one.levelname for one in caplog.records] == ["ERROR"]


class Beside:
    """A model of 32 layers with so many blocks, in one slot each; steps that decode are played, and copies counted."""

    def __init__(self, blocks: int, copies_per_block: int = 32) -> None:
        if copies_per_block == 1:
            memory = torch.zeros((blocks + 1, 32, 8), dtype=torch.uint8)
            tensors = {f"layer.{layer}": memory[:, layer] for layer in range(32)}
        else:
            tensors = {f"layer.{layer}": torch.zeros((blocks + 1, 8), dtype=torch.uint8) for layer in range(32)}
        paged = self.paged = PagedKV.from_tensors(tensors, blocks + 1)
        self.segment = ArenaSegment.create(blocks, paged.rank_slot_bytes)
        self.device = PlayedDevice(1)
        self.device.map(*paged.tensors)
        self.device.register(self.segment.mapped_at, len(self.segment.memory))
        self.engine = DeviceTransferEngine(paged, self.segment, self.device, len(self.segment.memory))
        assert self.engine.copies_per_block == copies_per_block
        self.device.driver.copy_batch = self._count  # type: ignore[method-assign]

    def _count(self, targets: Addresses, sources: Addresses, sizes: Addresses, order: AccessOrder, stream: int) -> None:
        self.device.driver.num_entries += len(targets)

    def load(self, slots: range) -> Transfer:
        """Ordered in the background, into blocks of which no two are neighbours in the order of the slots."""
        (load,) = self.engine.load([LoadJob(1, "r", 0, tuple(slots), tuple(slots)[::-1], synchronous=False)])
        return load

    def step(self) -> float:
        """Seconds that a step's submissions take, at 0.6 us a copy."""
        before = self.device.driver.num_entries
        self.engine.submit_some()
        return (self.device.driver.num_entries - before) * 0.6e-6

    def steps_until_it_ends(self, load: Transfer) -> int:
        for number in range(1, 1000):
            assert self.step() <= 4096 * 0.6e-6
            self.device.driver.finish()
            if load.ended:
                return number
        pytest.fail("it never ends")

    def close(self) -> None:
        self.device.driver.finish()
        assert self.engine.close(10)
        self.segment.close()


@pytest.mark.parametrize(("copies_per_block", "steps", "spent"), [(32, 16, 2.46), (1, 1, 1.23)])
def test_32k_tokens_are_loaded_beside_a_decode_in_so_many_steps(
    copies_per_block: int, steps: int, spent: float
) -> None:
    """2,048 blocks of 32 layers, layer by layer and block by block; a submission costs 0.6 us a copy, and is played.

    Each step gives the device at most 4,096 copies, which cost its thread 2.5 ms; all of them at once cost 39.
    """
    blocks = 2048
    beside = Beside(blocks, copies_per_block)
    load = beside.load(range(blocks))
    seconds = list[float]()
    while sum(seconds) < blocks * copies_per_block * 0.6e-6 * 0.999:
        seconds.append(beside.step())
    assert len(seconds) == steps
    assert max(seconds) * 1e3 == pytest.approx(spent, abs=0.01)
    print(f"{copies_per_block} copies a block: {steps} steps, {max(seconds) * 1e3:.2f} ms of each")
    beside.device.driver.finish()
    assert load.ended
    beside.close()


@pytest.mark.parametrize(
    ("max_copies", "max_load_bytes", "blocks"),
    [(320, None, 10), (320, 3 * 256, 3), (1, None, 1), (4096, 1, 1), (None, 5 * 256, 5)],
)
def test_a_step_beside_decodes_gives_the_device_what_the_scheduler_allows_and_one_block_at_least(
    max_copies: int | None, max_load_bytes: int | None, blocks: int
) -> None:
    """A block has 32 copies of 8 bytes."""
    beside = Beside(64)
    load = beside.load(range(64))
    before = beside.device.driver.num_entries
    beside.engine.submit_some(max_copies, max_load_bytes)
    assert beside.device.driver.num_entries - before == 32 * blocks
    while not load.ended:
        beside.engine.submit_some(max_copies, max_load_bytes)
        beside.device.driver.finish()
    beside.close()


@pytest.mark.parametrize("saves", [False, True], ids=["alone", "beside saves"])
def test_64_tokens_ordered_behind_128k_are_loaded_in_one_step_and_these_are_not_starved(saves: bool) -> None:
    """Layer by layer, 128k tokens are 262,144 copies, 64 steps; beside short loads in each step, at most twice that."""
    beside = Beside(8192)
    large = beside.load(range(4, 8192))
    short = beside.load(range(4))
    if saves:
        beside.engine.save([SaveJob(2, "r", 0, (0,) * 256, tuple(range(256)))])
    assert beside.steps_until_it_ends(short) == 1
    assert not large.ended
    steps = 1
    while not large.ended and steps < 200:
        for _ in range(8):  # more than a step's copies
            beside.load(range(16))
        beside.step()
        beside.device.driver.finish()
        steps += 1
    print(f"the large one took {steps} steps")
    assert 64 < steps <= 2 * 64 + 2
    beside.close()


def test_a_short_load_does_not_wait_for_what_the_device_has_of_a_long_one(bed: Bed) -> None:
    """When nothing is computed the device gets all of a load at once: a short one goes by a stream of its own."""
    driver = hostile(bed)
    slots = list(range(SLOTS))
    for _ in range(20):
        (long,) = bed.engine.load([load_job(1, slots, slots, False)])
        bed.engine.submit_all()
        (short,) = bed.engine.load([load_job(2, [0], [20], False)])
        bed.engine.submit_all()
        while not short.ended:
            assert driver.busy_streams
        if not long.ended:
            return
        bed.finish()
    pytest.fail("the long load always ends first")


def test_of_loads_that_wait_together_the_shortest_ends_first() -> None:
    beside = Beside(1024)
    loads = [beside.load(range(count)) for count in (1000, 500, 100, 500)]
    ends: list[int] = []
    while len(ends) < len(loads):
        beside.step()
        beside.device.driver.finish()
        ends += [number for number, load in enumerate(loads) if load.ended and number not in ends]
    assert ends[:2] == [2, 1]
    beside.close()
