"""Several KV cache groups: a job moves the pages of its own group's layers, whatever memory the others have."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_beds import BLOCKS, HYBRIDS, SLOTS, Bed
from kvpact.config import load_config
from kvpact.contract import JobOutcome, LoadJob, SaveJob, StepWork
from kvpact.errors import ConfigError
from kvpact.index.slot_space import CLASS_SHIFT
from kvpact.memory.layout import PAGE_BYTES
from kvpact.ranges import BlockRange, RangeSet
from kvpact.wire import StepMessage
from kvpact.worker.paged import CopyPlan, PagedKV
from kvpact.worker.transfer import RankTransfers
from kvpact.worker.worker import CacheWorker, RankInfo
from kvpact_testkit.device.played import OnDevice, PlayedDevice
from kvpact_testkit.vllm.faulty_copies import FaultyEngine

torch = pytest.importorskip("torch")


# How layers are seen


def test_layers_are_grouped_by_their_groups_names_and_copied_in_forward_order() -> None:
    make, groups = HYBRIDS["overlaid"]
    paged = PagedKV.from_tensors(make(), BLOCKS, groups)
    assert paged.cache_groups == (range(3), range(3, 6))
    assert [layer.name for layer in paged.layers] == [*groups[0], *groups[1]]
    assert [list(group) for group in paged.groups] == [[0], [3], [1], [4], [2], [5]]
    assert [sum(layout.layer_page_bytes) for layout in paged.layouts] == [3 * 256, 3 * 192]
    assert paged.layers[0].address == paged.layers[3].address, "the same memory, in two groups"


def test_the_layers_of_a_group_stay_in_their_order_whatever_their_names_say() -> None:
    tensors = {name: torch.zeros(BLOCKS, 8) for name in ("layers.5", "layers.7", "draft.layers.0", "layers.6")}
    paged = PagedKV.from_tensors(tensors, BLOCKS, (("layers.5", "layers.7", "draft.layers.0"), ("layers.6",)))
    assert [paged.layers[group.start].name for group in paged.groups] == [
        "layers.5",
        "layers.6",
        "layers.7",
        "draft.layers.0",
    ]


def test_the_states_of_a_layer_are_one_page() -> None:
    make, groups = HYBRIDS["states"]
    paged = PagedKV.from_tensors(make(), BLOCKS, groups)
    assert paged.cache_groups == (range(0), range(1), range(1, 4))
    assert [(layer.page_bytes, layer.block_stride) for layer in paged.layers[:2]] == [(192, 512), (512, 512)]
    assert paged.layer_index["layer.2.recurrent"] == 2
    assert [layout.rank_slot_bytes for layout in paged.layouts] == [0, PAGE_BYTES, PAGE_BYTES]


@pytest.mark.parametrize(
    ("memory", "groups", "message"),
    [
        ({"a": (BLOCKS, 4), "b": (BLOCKS, 4)}, (("a",), ("c",)), "layer b is in none of the 2 KV cache groups"),
        ({"a": (BLOCKS, 4), "b": (BLOCKS, 4)}, (("a", "b"), ("b",)), "layer b is in KV cache group 0 and in group 1"),
        ({}, (("a",), ("b",)), "no layer with keys, values or states"),
    ],
)
def test_layers_whose_blocks_cannot_be_told_are_refused(memory: Any, groups: Any, message: str) -> None:
    made = {name: torch.zeros(shape) for name, shape in memory.items()}
    with pytest.raises(ConfigError, match=message):
        PagedKV.from_tensors(made, BLOCKS, groups)


def test_a_layer_of_no_group_may_share_the_memory_of_one_that_has_a_group() -> None:
    first, second = torch.zeros(BLOCKS, 4), torch.zeros(BLOCKS, 4)
    paged = PagedKV.from_tensors({"a": first, "b": second, "c": first}, BLOCKS, (("a",), ("b",)))
    assert [layer.name for layer in paged.layers] == ["a", "b"]
    assert "c" not in paged.layer_index, "so that a step waits for all layers before it reads it"


# What jobs copy


@pytest.fixture(params=[(layout, seed) for layout in HYBRIDS for seed in (None, 5)], ids=str)
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    made = Bed(*request.param)
    yield made
    made.close()


def transfers_of(bed: Bed, engine: Any = None) -> RankTransfers:
    paged = bed.paged
    return RankTransfers(
        engine or bed.engine, paged.layer_index, 0, time.monotonic, layerwise=True, cache_groups=paged.cache_groups
    )


def outcomes(bed: Bed, transfers: RankTransfers) -> dict[int, JobOutcome]:
    found: dict[int, JobOutcome] = {}
    until = time.monotonic() + 10
    while transfers.under_way and time.monotonic() < until:
        transfers.submit(computes=True)
        bed.finish()
        found |= transfers.poll()
    return found


ALL = JobOutcome(RangeSet.span(0, 2))


def test_each_job_says_itself_what_became_of_it(bed: Bed) -> None:
    engine = FaultyEngine(bed.engine, lambda job, block: job.group_id == 1 and block == 1)
    transfers = transfers_of(bed, engine)
    count = len(bed.paged.cache_groups)
    transfers.start_saves([SaveJob(g, "r", 0, (2 * g, 2 * g + 1), (3, 4), group_id=g) for g in range(count)])
    transfers.start_loads([LoadJob(9, "r", 0, (0, 1), (5, 6), synchronous=False, group_id=count)])
    found = outcomes(bed, transfers)
    assert found.pop(1) == JobOutcome(RangeSet.span(0, 1), RangeSet.span(1, 2))
    assert found.pop(9) == JobOutcome(failed=RangeSet.span(0, 2)), "there is no such group"
    assert all(outcome == ALL for outcome in found.values())


def test_a_load_of_no_such_group_fails_and_the_others_of_the_step_arrive(bed: Bed) -> None:
    transfers = transfers_of(bed)
    group = bed.paged.cache_groups[1]
    for layer in group:
        bed.views[layer][7] = layer + 1
    transfers.start_saves([SaveJob(1, "r", 0, (4,), (7,), group_id=1)])
    outcomes(bed, transfers)
    jobs = [LoadJob(2 + n, "r", 0, (4,), (8,), synchronous=True, group_id=g) for n, g in enumerate((-1, 1))]
    transfers.start_loads(jobs)
    transfers.wait_for_loads()
    found = outcomes(bed, transfers)
    assert [bool(found[job].failed.ranges) for job in (2, 3)] == [True, False]
    assert all((bed.views[layer][8] == layer + 1).all() for layer in group)


def test_a_group_without_layers_here_has_nothing_to_copy() -> None:
    for seed in (None, 3):
        bed = Bed("states", seed)
        transfers = transfers_of(bed)
        transfers.start_saves([SaveJob(1, "r", 0, (4, 5), (7, 8), group_id=0)])
        transfers.start_loads([LoadJob(2 + n, "r", 0, (4, 5), (7, 8), n > 0, group_id=0) for n in range(2)])
        transfers.wait_for_loads()
        assert outcomes(bed, transfers) == {1: ALL, 2: ALL, 3: ALL}
        bed.close()


def test_a_layer_waits_for_its_own_groups_loads_alone() -> None:
    bed = Bed("overlaid", None)
    scatter, gate = bed.engine.copier.scatter, threading.Semaphore(0)

    def slow(group: int, plan: CopyPlan) -> None:
        assert gate.acquire(timeout=10)
        scatter(group, plan)

    bed.engine.copier.scatter = slow
    transfers = transfers_of(bed)
    transfers.start_loads([LoadJob(1, "r", 0, (0,), (1,), synchronous=True, group_id=1)])
    for name in HYBRIDS["overlaid"][1][0]:
        transfers.wait_for_layer(name)
    waiting = threading.Thread(target=transfers.wait_for_layer, args=("layer.3",))
    gate.release()
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive(), "layer.1 has arrived, and layer.3 has not"
    gate.release(2)
    waiting.join(10)
    assert not waiting.is_alive()
    transfers.wait_for_loads()
    assert outcomes(bed, transfers) == {1: JobOutcome(RangeSet.span(0, 1))}
    bed.close()


@st.composite
def orders(draw: st.DrawFn, num_groups: int) -> list[tuple[int, list[int], list[int], bool]]:
    """(group, the blocks of one job, the blocks that it is loaded into, whether the step waits); no block twice."""
    some = draw(st.integers(1, SLOTS // 2))
    blocks = draw(st.permutations(range(BLOCKS)))
    cuts = sorted(draw(st.sets(st.integers(1, some), max_size=3)) | {0, some})
    return [
        (
            draw(st.integers(0, num_groups - 1)),
            list(blocks[start:stop]),
            list(blocks[some + start : some + stop]),
            draw(st.booleans()),
        )
        for start, stop in pairwise(cuts)
    ]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_what_jobs_of_any_groups_saved_comes_back_and_no_other_byte_changes(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(sorted(HYBRIDS)))
    bed = Bed(layout, data.draw(st.sampled_from([None, 1, 2, 3])))
    ordered = data.draw(orders(len(bed.paged.cache_groups)))
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in bed.paged.tensors}
    memories = [np.asarray(torch.empty(0, dtype=torch.uint8).set_(one)) for one in storages.values()]
    random = np.random.default_rng(data.draw(st.integers(0, 9)))
    for memory in memories:
        memory[:] = random.integers(0, 256, memory.shape, np.uint8)
    before = [memory.copy() for memory in memories]
    pages = {
        (layer, block): bed.views[layer][block].copy() for layer in range(len(bed.views)) for block in range(BLOCKS)
    }
    transfers = transfers_of(bed)
    slots = iter(data.draw(st.permutations(range(SLOTS))))
    saves = [
        SaveJob(number, "r", 0, tuple(next(slots) for _ in blocks), tuple(blocks), group_id)
        for number, (group_id, blocks, _, _) in enumerate(ordered)
    ]
    transfers.start_saves(saves)
    assert set(outcomes(bed, transfers)) == set(range(len(saves)))
    assert all((memory == old).all() for memory, old in zip(memories, before, strict=True)), "a save reads"
    for memory in memories:
        memory[:] = ~memory
    expected = [memory.copy() for memory in memories]
    transfers.start_loads(
        [
            LoadJob(10 + number, "r", 0, save.slots, tuple(targets), synchronous, group_id)
            for number, (save, (group_id, _, targets, synchronous)) in enumerate(zip(saves, ordered, strict=True))
        ]
    )
    transfers.wait_for_loads()
    assert not any(outcome.failed.ranges for outcome in outcomes(bed, transfers).values())
    found = [memory.copy() for memory in memories]
    for memory, old in zip(memories, expected, strict=True):
        memory[:] = old
    for group_id, blocks, targets, _ in ordered:
        for layer in bed.paged.cache_groups[group_id]:
            for block, target in zip(blocks, targets, strict=True):
                bed.views[layer][target] = pages[layer, block]
    assert all((memory == new).all() for memory, new in zip(memories, found, strict=True))
    del memories
    bed.close()


# A rank


class Rank:
    """A rank of an engine with several groups, on the CPU or on a device that is played."""

    def __init__(self, layout: str, *, on_device: bool = False, **settings: object) -> None:
        self.make, groups = HYBRIDS[layout]
        self.device = PlayedDevice(4) if on_device else None
        config = load_config({"memory": "1MiB", **settings}, {})
        openers = {"cuda": self.device.open} if self.device is not None else {}
        self.worker = CacheWorker(config, RankInfo(0, 1, BLOCKS, groups), openers)
        self.tensors = self.make()
        self.worker.register_kv_caches(self.seen(self.tensors))

    def seen(self, tensors: dict[str, Any]) -> dict[str, Any]:
        if self.device is None:
            return tensors
        return {name: OnDevice(memory) for name, memory in tensors.items()}

    def run(self, *jobs: LoadJob | SaveJob) -> dict[int, JobOutcome]:
        loads = tuple(job for job in jobs if isinstance(job, LoadJob))
        message = StepMessage(StepWork(loads=loads, saves=tuple(job for job in jobs if isinstance(job, SaveJob))))
        self.worker.begin_step(message)
        self.worker.wait_for_loads()
        self.worker.end_forward(message)
        found: dict[int, JobOutcome] = {}
        until = time.monotonic() + 10
        while len(found) < len(jobs) and time.monotonic() < until:
            self.worker.begin_step(StepMessage())
            self.worker.poll()
            found |= self.worker.report().ranks[0]
        return found


@pytest.mark.parametrize("layout", HYBRIDS)
def test_a_rank_says_how_large_the_blocks_of_each_group_are(layout: str) -> None:
    rank = Rank(layout)
    hello = rank.worker.hello()
    assert hello is not None
    assert hello.group_bytes == {"overlaid": (768, 576), "states": (0, 192, 3 * 512)}[layout]
    assert hello.segment.rank_slot_bytes >= max(hello.group_bytes)
    rank.worker.shutdown()


@pytest.mark.parametrize("on_device", [False, True])
def test_groups_are_copied_where_the_memory_is_when_it_is_back(on_device: bool) -> None:
    rank = Rank("states", on_device=on_device)
    rank.tensors["layer.2.recurrent"][3] = 5
    hello = rank.worker.hello()
    assert hello is not None
    assert hello.slot_classes == (0, 1, 1), "on a device as on the CPU"
    slot = hello.slot_classes[2] << CLASS_SHIFT
    rank.run(SaveJob(1, "r", 0, (slot,), (3,), group_id=2))
    rank.worker.suspend()
    if rank.device is not None:
        rank.device.unmap()
    fresh = rank.make()
    assert rank.worker.memory is not None
    if rank.device is not None:
        rank.device.map(*fresh.values())
    rank.worker.memory.resume(rank.seen(fresh))
    assert rank.run(LoadJob(2, "r", 0, (slot,), (6,), synchronous=True, group_id=2)) == {
        2: JobOutcome(RangeSet.span(0, 1))
    }
    if rank.device is not None:
        rank.device.driver.finish()
    assert (fresh["layer.2.recurrent"][6] == 5).all()
    assert not fresh["layer.3.attention"].any()
    rank.worker.shutdown()


def test_one_group_fails_and_the_other_is_stored() -> None:
    rank = Rank("overlaid")
    jobs = [
        SaveJob(1, "r", 0, (0, 1), (3, BLOCKS), group_id=0),
        SaveJob(2, "r", 4, (2, 3), (5, 6), group_id=1),
    ]
    assert rank.run(*jobs) == {
        1: JobOutcome(RangeSet.span(0, 1), RangeSet.span(1, 2)),
        2: JobOutcome(RangeSet.of(BlockRange(4, 2))),
    }
    rank.worker.shutdown()


def test_a_lookup_at_the_step_is_refused_with_several_groups() -> None:
    with pytest.raises(ConfigError, match=r'match_at="step" serves models with one KV cache group, and this one has 2'):
        Rank("overlaid", match_at="step")
