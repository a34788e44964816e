"""A device's copies are tried before anything is served: wrong bytes, failures and silence are refused by name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from device_beds import LAYERS, LAYOUTS, SIZED, SLOTS, Bed
from kvpact.errors import ConfigError
from kvpact.memory.arena import ArenaSegment
from kvpact.worker import round_trip
from kvpact.worker.paged import PagedKV
from kvpact.worker.round_trip import LIMIT_SECONDS, differing, require_round_trip
from kvpact_testkit.vllm.faulty_copies import FaultyEngine

torch = pytest.importorskip("torch")


@pytest.fixture(params=[None, 5], ids=["cpu", "hostile cuda"])
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    made = Bed("inside blocks", request.param)
    yield made
    made.close()


def test_blocks_go_out_and_back_and_are_left_as_they_were(bed: Bed) -> None:
    for layer in range(LAYERS):
        bed.views[layer][:] = layer + 1
    require_round_trip(bed.engine, bed.paged, bed.segment, SLOTS)
    for layer in range(LAYERS):
        assert (bed.views[layer] == layer + 1).all()
    assert not any(bed.segment.slot_view(slot)[0] for slot in range(SLOTS))


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("spoilt", [0, 1, 2])
def test_each_class_of_slots_is_tried_where_classes_share_extents(seed: int | None, spoilt: int) -> None:
    (layout,) = SIZED
    bed = Bed(layout, seed)
    require_round_trip(bed.engine, bed.paged, bed.segment, 4)
    assert not any(bed.segment.memory), "the slots are left empty"
    engine = FaultyEngine(bed.engine, lambda job, block: job.group_id == spoilt)
    with pytest.raises(ConfigError, match="out of the KV memory failed: injected"):
        require_round_trip(engine, bed.paged, bed.segment, 4)
    with pytest.raises(ConfigError, match="2 usable blocks are too few"):
        require_round_trip(bed.engine, bed.paged, bed.segment, 2)
    bed.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrong_bytes_are_found(layout: str) -> None:
    bed = Bed(layout, None)
    gather = bed.engine.copier.gather

    def spoilt(group: int, plan: object) -> None:
        gather(group, plan)
        bed.segment.slot_view(2 * (SLOTS // 3) + 1)[5] ^= group == 0

    bed.engine.copier.gather = spoilt
    with pytest.raises(ConfigError, match=r"1 of 5 blocks came back with other bytes"):
        require_round_trip(bed.engine, bed.paged, bed.segment, SLOTS)
    bed.close()


class Displaced:
    """Copies over other blocks than those that a job names, the same for loads and saves: all comes back."""

    def __init__(self, engine: Any, num_blocks: int) -> None:
        self._engine, self._num_blocks = engine, num_blocks
        self.groups, self.submit_all = engine.groups, engine.submit_all

    def _elsewhere(self, jobs: Any) -> Any:
        return [replace(job, block_ids=tuple((one + 1) % self._num_blocks for one in job.block_ids)) for job in jobs]

    def load(self, jobs: Any) -> Any:
        return self._engine.load(self._elsewhere(jobs))

    def save(self, jobs: Any) -> Any:
        return self._engine.save(self._elsewhere(jobs))


def test_wrong_addresses_do_not_prove_themselves(bed: Bed) -> None:
    """Blocks are read as the engine reads them, by its own tensors."""
    engine: Any = Displaced(bed.engine, bed.paged.num_blocks)
    with pytest.raises(ConfigError, match=r"5 of 5 blocks came back .* or were not where the engine reads them"):
        require_round_trip(engine, bed.paged, bed.segment, SLOTS)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2", "uint8", "bfloat16"])
def test_blocks_of_every_kind_of_number_are_compared(dtype: str) -> None:
    """Also of such as torch does not index."""
    numbers = getattr(torch, dtype)
    tensors = {
        f"layer.{n}": torch.randint(0, 256, (2, 24, 4, 2, 8), dtype=torch.uint8).view(numbers).transpose(3, 2)
        for n in range(2)
    }
    paged = PagedKV.from_tensors(tensors, 24)
    segment = ArenaSegment.create(4, paged.rank_slot_bytes)
    size = sum(paged.layouts[0].layer_page_bytes)
    slots = (2, 0, 3)
    for slot, block in zip(slots, (5, 7, 9), strict=True):
        pages = [layer.view()[block].ravel() for layer in paged.layers]
        segment.slot_view(slot)[:size] = np.concatenate(pages).tobytes()
    assert differing(paged, segment, 0, (5, 7, 9), slots) == set()
    segment.slot_view(0)[size - 1] ^= 1
    assert differing(paged, segment, 0, (5, 7, 9), slots) == {7}
    segment.close()


def test_a_copy_that_fails_is_named(bed: Bed) -> None:
    engine = FaultyEngine(bed.engine, lambda job, block: block == 2)
    with pytest.raises(ConfigError, match="out of the KV memory failed: injected"):
        require_round_trip(engine, bed.paged, bed.segment, SLOTS)


def test_a_copy_that_never_ends_is_named(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_trip, "DEADLINE_SECONDS", 0.0)
    with pytest.raises(ConfigError, match="did not end within 0 s"):
        require_round_trip(bed.engine, bed.paged, bed.segment, SLOTS)


class SlowAtFirst:
    """Copies whose first ones take their time, as where a kernel is compiled or a machine is busy."""

    def __init__(self, engine: Any, slow: int, clock: list[float]) -> None:
        self._engine, self._slow, self._clock = engine, slow, clock
        self.groups = engine.groups
        self.loads = 0

    def load(self, jobs: Any) -> Any:
        self.loads += 1
        self._clock[0] += 0.25 if self.loads <= self._slow else 0.01
        return self._engine.load(jobs)

    def save(self, jobs: Any) -> Any:
        return self._engine.save(jobs)

    def submit_all(self) -> None:
        self._engine.submit_all()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the trial sees; it passes in copies only."""
    now = [0.0]
    monkeypatch.setattr(round_trip, "LIMIT_SECONDS", LIMIT_SECONDS)
    monkeypatch.setattr(round_trip, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    return now


def test_a_device_that_is_too_slow_is_refused(bed: Bed, clock: list[float]) -> None:
    engine: Any = SlowAtFirst(bed.engine, 99, clock)
    with pytest.raises(ConfigError, match=r"5 blocks of .* took 0.25 s in the best of 3 attempts, and may take 0.2 s"):
        require_round_trip(engine, bed.paged, bed.segment, SLOTS)
    assert engine.loads == 4, "and what was in the blocks is back"


@pytest.mark.parametrize(("slow", "loads"), [(0, 2), (1, 3), (2, 4)])
def test_the_best_attempt_counts(bed: Bed, clock: list[float], slow: int, loads: int) -> None:
    engine: Any = SlowAtFirst(bed.engine, slow, clock)
    require_round_trip(engine, bed.paged, bed.segment, SLOTS)
    assert engine.loads == loads


def test_too_few_usable_slots_are_refused(bed: Bed) -> None:
    with pytest.raises(ConfigError, match="2 usable blocks are too few"):
        require_round_trip(bed.engine, bed.paged, bed.segment, 2)
