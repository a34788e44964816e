"""The worker's copies: any paged layout survives a round trip, waiting is exact, failures are exact, threads end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from at_the_end import at_the_end
from hook_time import assert_ends_within
from kvpact.config import load_config
from kvpact.contract import JobOutcome, LoadJob, SaveJob
from kvpact.errors import ConfigError, PactViolation
from kvpact.index.column_file import ColumnFile
from kvpact.index.slot_space import PlainSlots
from kvpact.memory.arena import ArenaSegment, SlotClass
from kvpact.memory.extents import Extents
from kvpact.memory.layout import PAGE_BYTES
from kvpact.memory.neighbour_slots import NeighbourSlots
from kvpact.memory.prefault import HUGE_BYTES
from kvpact.ranges import BlockRange, RangeSet
from kvpact.threads import start_background
from kvpact.worker.copy import cpu, transfer_engine_for
from kvpact.worker.copy.base import Job, classes_by_group
from kvpact.worker.copy.cpu import CpuTransferEngine, PageCopier
from kvpact.worker.paged import CopyPlan, PagedKV, PagedLayer
from kvpact.worker.transfer import RankTransfers
from kvpact_testkit.vllm.faulty_copies import FaultyEngine

torch = pytest.importorskip("torch")

LAYERS = 4
BLOCKS = 12
SLOTS = 10


def permuted(shape: tuple[int, ...], order: tuple[int, ...]) -> Callable[[int], Any]:
    """A layer of logical `shape` whose memory runs in `order` of its axes."""

    def make(_: int) -> Any:
        memory = torch.zeros([shape[axis] for axis in order], dtype=torch.bfloat16)
        return memory.permute([order.index(axis) for axis in range(len(shape))])

    return make


def interleaved_layers() -> Callable[[int], Any]:
    """Layers inside each block of one buffer: BLHNC."""
    memory = torch.zeros((BLOCKS, LAYERS, 2, 4, 8), dtype=torch.bfloat16)
    return lambda layer: memory[:, layer]


def one_buffer() -> Callable[[int], Any]:
    """All layers in one byte buffer, seen as bf16: what vLLM 0.32 registers (LBHNC)."""
    memory = torch.zeros((LAYERS, BLOCKS, 2 * 4 * 8 * 2), dtype=torch.int8)
    return lambda layer: memory[layer].view(torch.bfloat16).view(BLOCKS, 2, 4, 8)


LAYOUTS: dict[str, Callable[[], Callable[[int], Any]]] = {
    "[B,H,N,C] contiguous": lambda: permuted((BLOCKS, 2, 4, 8), (0, 1, 2, 3)),
    "[B,H,N,C] tokens before heads": lambda: permuted((BLOCKS, 2, 4, 8), (0, 2, 1, 3)),
    "[B,H,N,C] in one byte buffer": one_buffer,
    "[B,H,N,C] layers inside blocks": interleaved_layers,
    "(2,NB,BS,H,D) keys, then values": lambda: permuted((2, BLOCKS, 4, 2, 8), (0, 1, 2, 3, 4)),
    "(2,NB,H,BS,D) of the old CPU backend": lambda: permuted((2, BLOCKS, 2, 4, 8), (0, 1, 2, 3, 4)),
    "(NB,2,BS,H,D) keys and values in the block": lambda: permuted((BLOCKS, 2, 4, 2, 8), (0, 1, 2, 3, 4)),
    "(NB,2,BS,H,D) heads first in memory": lambda: permuted((BLOCKS, 2, 4, 2, 8), (0, 1, 3, 2, 4)),
    "(2,NB,BS,H,D) of a model with states: keys and values in the block": lambda: permuted(
        (2, BLOCKS, 4, 2, 8), (1, 0, 2, 3, 4)
    ),
    "(2,4NB,BS/4,H,D) of a model with states, kernel blocks": lambda: permuted(
        (2, BLOCKS * 4, 1, 2, 8), (1, 0, 2, 3, 4)
    ),
    "(NB,BS,H,2D)": lambda: permuted((BLOCKS, 4, 2, 16), (0, 1, 2, 3)),
    "(NB,BS,C) latent": lambda: permuted((BLOCKS, 4, 12), (0, 1, 2)),
    "(4NB,BS/4,C) kernel blocks": lambda: permuted((BLOCKS * 4, 1, 2, 8), (0, 1, 2, 3)),
    "(2,4NB,BS/4,H,D) kernel blocks behind halves": lambda: permuted((2, BLOCKS * 4, 1, 2, 8), (0, 1, 2, 3, 4)),
}


def block_of(tensor: Any, block: int) -> Any:
    """One block's elements, found the slow way."""
    axis = 1 if tensor.dim() == 5 and tensor.shape[0] == 2 else 0
    parts = tensor.shape[axis] // BLOCKS
    return tensor.narrow(axis, block * parts, parts)


class Scene:
    """An engine's KV memory, a segment and a worker over both; it is closed with its test."""

    def __init__(
        self,
        layout: str = "[B,H,N,C] contiguous",
        layerwise: bool = True,
        fails: Callable[[Job, int], bool] | None = None,
        **settings: Any,
    ) -> None:
        make = LAYOUTS[layout]()
        self.tensors = {f"layer.{layer}": make(layer) for layer in range(LAYERS)}
        for layer, tensor in enumerate(self.tensors.values()):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(layer)))
        self.paged = PagedKV.from_tensors(self.tensors, BLOCKS)
        self.segment = ArenaSegment.create(SLOTS, self.paged.layout.rank_slot_bytes)
        self.engine = CpuTransferEngine(self.paged, self.segment, self.segment.classes, 0)
        engine = self.engine if fails is None else FaultyEngine(self.engine, fails)
        self.worker = RankTransfers(engine, self.paged.layer_index, 0, time.monotonic, layerwise=layerwise, **settings)
        self.jobs = 0
        self._is_open = True
        at_the_end(self.close)

    def copies(self) -> list[Any]:
        return [tensor.clone() for tensor in self.tensors.values()]

    def clear(self) -> None:
        for tensor in self.tensors.values():
            tensor.zero_()

    def save(self, slots: list[int], blocks: list[int], start: int = 0) -> JobOutcome:
        self.jobs += 1
        self.worker.start_saves([SaveJob(self.jobs, "r", start, tuple(slots), tuple(blocks))])
        assert self.worker.drain(10)
        return self.worker.poll()[self.jobs]

    def load_job(self, slots: list[int], blocks: list[int], start: int = 0, synchronous: bool = False) -> LoadJob:
        self.jobs += 1
        return LoadJob(self.jobs, "r", start, tuple(slots), tuple(blocks), synchronous)

    def load(self, slots: list[int], blocks: list[int], start: int = 0, synchronous: bool = False) -> JobOutcome:
        job = self.load_job(slots, blocks, start, synchronous)
        self.worker.start_loads([job])
        self.worker.wait_for_loads() if synchronous else self.worker.drain(10)
        return self.worker.poll()[job.job_id]

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            assert self.worker.shutdown(10)
            self.segment.close()


@pytest.fixture
def scene() -> Scene:
    return Scene()


class SlowCopier:
    """Copies of which every layer's load waits to be let through; it records what it was asked."""

    def __init__(self, inner: PageCopier) -> None:
        self.inner = inner
        self.gate = threading.Semaphore(0)
        self.calls: list[tuple[str, int]] = []

    @classmethod
    def of(cls, scene: Scene) -> SlowCopier:
        """The scene's copies, from now on."""
        made = cls(scene.engine.copier)
        scene.engine.copier = cast(PageCopier, made)
        return made

    def gather(self, layer: int, plan: CopyPlan) -> None:
        self.calls.append(("gather", layer))
        self.inner.gather(layer, plan)

    def scatter(self, layer: int, plan: CopyPlan) -> None:
        assert self.gate.acquire(timeout=10)
        self.calls.append(("scatter", layer))
        self.inner.scatter(layer, plan)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("synchronous", [True, False])
def test_a_block_saved_comes_back_bit_for_bit_and_no_other_is_touched(layout: str, synchronous: bool) -> None:
    scene = Scene(layout)
    before = scene.copies()
    assert scene.save([7, 2, 3], [4, 9, 10], start=5).done == RangeSet.span(5, 8)
    scene.clear()
    assert scene.load([7, 2, 3], [4, 9, 0], start=5, synchronous=synchronous) == JobOutcome(RangeSet.span(5, 8))
    for old, tensor in zip(before, scene.tensors.values(), strict=True):
        for block in range(BLOCKS):
            source = {4: 4, 9: 9, 0: 10}.get(block)
            expected = torch.zeros_like(block_of(old, 0)) if source is None else block_of(old, source)
            assert torch.equal(block_of(tensor, block), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slot_holds_the_pages_layer_by_layer(layout: str) -> None:
    scene = Scene(layout)
    scene.save([1], [3])
    piece = np.frombuffer(scene.segment.slot_view(1), np.uint8)
    for offset, layer in zip(scene.paged.layout.layer_offsets, scene.paged.layers, strict=True):
        assert piece[offset : offset + layer.page_bytes].tobytes() == layer.view()[3].tobytes()
    del piece


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_pairing_of_blocks_and_slots_survives_a_round_trip(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
    count = data.draw(st.integers(0, SLOTS))
    blocks = data.draw(st.permutations(range(BLOCKS)))[:count]
    slots = data.draw(st.permutations(range(SLOTS)))[:count]
    targets = data.draw(st.permutations(range(BLOCKS)))[:count]
    scene = Scene(layout)
    before = scene.copies()
    scene.save(slots, blocks)
    scene.clear()
    scene.load(slots, targets, synchronous=data.draw(st.booleans()))
    for old, tensor in zip(before, scene.tensors.values(), strict=True):
        for block, target in zip(blocks, targets, strict=True):
            assert torch.equal(block_of(tensor, target), block_of(old, block))
        for untouched in set(range(BLOCKS)).difference(targets):
            assert not block_of(tensor, untouched).any()
    scene.close()


def test_large_runs_and_scattered_small_pages_give_the_same_bytes() -> None:
    shape = (BLOCKS, 2, 128, 512)  # 256 KiB pages: beyond the limit for copying by index
    tensors = {"a": torch.randn(shape).to(torch.bfloat16), "b": torch.randn((BLOCKS, 2, 4, 8))}
    paged = PagedKV.from_tensors(tensors, BLOCKS)
    segment = ArenaSegment.create(SLOTS, paged.layout.rank_slot_bytes)
    copier = PageCopier(paged, segment, segment.classes)
    plan = CopyPlan.of([5, 6, 7, 1], [0, 1, 2, 9])
    for layer, view in enumerate(layer.view() for layer in paged.layers):
        copier.gather(layer, plan)
        start = paged.layout.layer_offsets[layer]
        for block, slot in ((5, 0), (6, 1), (7, 2), (1, 9)):
            assert bytes(segment.slot_view(slot)[start : start + view[0].nbytes]) == view[block].tobytes()
    assert plan.runs == ((5, 0, 3), (1, 9, 1))
    segment.close()


def test_a_copy_reaches_the_slots_of_its_class_alone() -> None:
    paged = PagedKV.from_tensors({"a": torch.randn(BLOCKS, 2, 4, 8)}, BLOCKS)
    slot_bytes = paged.layout.rank_slot_bytes
    segment = ArenaSegment.create(SLOTS, slot_bytes)
    behind = SlotClass(range(4, SLOTS), slot_bytes, 4 * slot_bytes)
    copier = PageCopier(paged, segment, [behind])
    copier.gather(0, CopyPlan.of([2, 3], [4, 6], behind.slots.start))
    written = [slot for slot in range(SLOTS) if any(segment.slot_view(slot))]
    assert written == [4, 6]
    with pytest.raises(PactViolation, match="outside the memory"):
        copier.gather(0, CopyPlan.of([2], [3], behind.slots.start))
    segment.close()


@pytest.mark.parametrize("small_pages", [True, False])
def test_copies_of_classes_that_share_extents_reach_their_own_slots(
    monkeypatch: pytest.MonkeyPatch, small_pages: bool
) -> None:
    """By index, and as runs; a block of each class has its slots between those of the other."""
    monkeypatch.setattr(cpu, "RUN_BYTES", 1 << 30 if small_pages else 0)
    caches = {
        "a": torch.randn(BLOCKS, 2, 4, 8),
        "b": torch.randn(BLOCKS, 64, 4, 32),
        "c": torch.randn(BLOCKS, 4, 8),
    }
    paged = PagedKV.from_tensors(caches, BLOCKS, (("a", "c"), ("b",)))
    sizes = tuple(layout.rank_slot_bytes for layout in paged.layouts)
    segment = ArenaSegment.create_extents(Extents(4, 2 * max(sizes) + PAGE_BYTES, sizes), 1)
    worker = RankTransfers(
        CpuTransferEngine(paged, segment, segment.classes, 0),
        paged.layer_index,
        0,
        time.monotonic,
        layerwise=True,
        cache_groups=paged.cache_groups,
    )
    small, large = (one.slots.start for one in segment.classes)
    slots = (
        (small + 5, small + 6, small + 7, small + (2 << 24)),
        (large + (1 << 24), large + (1 << 24) + 1, large + (3 << 24) + 1),
    )
    blocks = ((1, 2, 3, 7), (4, 5, 0))
    for group, (of, to) in enumerate(zip(blocks, slots, strict=True)):
        worker.start_saves([SaveJob(group, "r", 0, to, of, group_id=group)])
    assert worker.drain(10)
    assert not any(outcome.failed.ranges for outcome in worker.poll().values())
    for group, layers in enumerate((("a", "c"), ("b",))):
        for block, slot in zip(blocks[group], slots[group], strict=True):
            content = b"".join(caches[layer][block].numpy().tobytes() for layer in layers)
            assert bytes(segment.slot_view(slot)[: len(content)]) == content
    kept = {name: cache.clone() for name, cache in caches.items()}
    for cache in caches.values():
        cache.zero_()
    for group, (of, to) in enumerate(zip(blocks, slots, strict=True)):
        worker.start_loads([LoadJob(group, "r", 0, to, of, synchronous=False, group_id=group)])
    wrong = LoadJob(7, "r", 0, (large + 2, slots[0][0]), (8, 9), synchronous=False, group_id=1)
    worker.start_loads([wrong])
    assert worker.drain(10)
    outcomes = worker.poll()
    assert outcomes[7] == JobOutcome(RangeSet.of(), RangeSet.span(0, 2)), "one is no place, one is of another class"
    for group, layers in enumerate((("a", "c"), ("b",))):
        for layer in layers:
            for block in range(BLOCKS):
                expected = kept[layer][block] if block in blocks[group] else torch.zeros_like(kept[layer][block])
                assert torch.equal(caches[layer][block], expected)
    assert worker.shutdown(10)
    segment.close()


def test_a_group_has_the_slots_of_its_size_or_the_only_ones() -> None:
    small, large = (SlotClass(range(number << 48, number + 1 << 48), size, 0, 64) for number, size in enumerate((4, 8)))
    assert classes_by_group([8, 4, 8], [small, large]) == [large, small, large]
    assert classes_by_group([8, 4], [small, large]) == [large, small]
    assert classes_by_group([4, 8], [large]) == [large, large]
    stages = [replace(small, slot_bytes=4), replace(large, slot_bytes=4)]
    assert classes_by_group([4, 4], stages) == stages, "where ranks differ each group has a class of its own"
    with pytest.raises(PactViolation, match="no slots have 16 bytes, only 4, 8"):
        classes_by_group([16, 4], [small, large])


def test_slots_of_two_classes_are_taken_filled_and_read_back_each_with_its_own_layers() -> None:
    small = PagedKV.from_tensors({"a": torch.randn(BLOCKS, 2, 4, 8)}, BLOCKS)
    large = PagedKV.from_tensors({"b": torch.randn(BLOCKS, 64, 4, 32), "c": torch.randn(BLOCKS, 4, 8)}, BLOCKS)
    sizes = [paged.layout.rank_slot_bytes for paged in (small, large)]
    assert sizes[0] < sizes[1]
    classes = (SlotClass(range(4), sizes[0]), SlotClass(range(4, SLOTS), sizes[1], 4 * sizes[0]))
    descriptor = os.memfd_create("classes")
    os.ftruncate(descriptor, classes[-1].end + HUGE_BYTES)
    segment = ArenaSegment(descriptor, classes)
    segment.pages.start()
    assert segment.pages.wait_for_first(60.0)
    for number, (paged, one) in enumerate(zip((small, large), classes, strict=True)):
        before = [layer.view().copy() for layer in paged.layers]
        worker = RankTransfers(
            CpuTransferEngine(paged, segment, [one], 0), paged.layer_index, 0, time.monotonic, layerwise=True
        )
        slots = (one.slots[-1], one.slots[0])
        segment.use(slots)
        worker.start_saves([SaveJob(1, "r", 0, slots, (5, 2))])
        assert worker.drain(10)
        assert worker.poll()[1] == JobOutcome(RangeSet.span(0, 2))
        other = classes[1 - number].slots[0]
        worker.start_loads([LoadJob(2, "r", 0, (*slots, other), (0, 1, 3), synchronous=False)])
        assert worker.drain(10)
        assert worker.poll()[2] == JobOutcome(RangeSet.span(0, 2), RangeSet.span(2, 3)), "of another class"
        for layer, old in zip(paged.layers, before, strict=True):
            assert np.array_equal(layer.view()[[0, 1]], old[[5, 2]])
            assert np.array_equal(layer.view()[2:], old[2:])
        assert worker.shutdown(10)
    assert [slot for slot in range(SLOTS) if any(segment.slot_view(slot))] == [0, 3, 4, SLOTS - 1]
    segment.close()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (lambda: torch.zeros(7, 2, 4, 8), "no axis"),
        (lambda: torch.zeros(2, 2, 4, 2, 8), "no axis"),
        (lambda: torch.zeros(BLOCKS, 1, 8).expand(BLOCKS, 4, 8), "equal runs"),
        (lambda: torch.zeros(2, 4, BLOCKS, 3, 8)[:, :3].permute(2, 0, 1, 3, 4), "equal runs"),
        (lambda: [torch.zeros(BLOCKS, 4)], "not paged"),
    ],
)
def test_a_layout_that_is_not_paged_is_refused(tensor: Callable[[], Any], message: str) -> None:
    made = tensor()
    blocks = 2 if getattr(made, "shape", (0,))[0] == 2 else BLOCKS
    with pytest.raises(ConfigError, match=message):
        PagedLayer.from_tensor("layer.0", made, blocks)


def test_layers_that_share_one_memory_are_copied_once() -> None:
    first, second = torch.zeros(BLOCKS, 2, 4, 8), torch.zeros(BLOCKS, 2, 4, 8)
    paged = PagedKV.from_tensors({"a": first, "b": second, "c": first}, BLOCKS)
    assert [layer.name for layer in paged.layers] == ["a", "b"]
    assert paged.layer_index == {"a": 0, "b": 1, "c": 0}


@pytest.mark.parametrize("synchronous", [True, False])
def test_layers_that_lie_inside_blocks_are_joined_and_come_back_bit_for_bit(synchronous: bool) -> None:
    memory = torch.randn((BLOCKS, 10, 2, 4, 8))
    before = memory.clone()
    paged = PagedKV.from_tensors({f"layer.{layer}": memory[:, layer] for layer in range(10)}, BLOCKS)
    assert paged.groups == (range(3), range(3, 6), range(6, 9), range(9, 10))
    segment = ArenaSegment.create(SLOTS, paged.layout.rank_slot_bytes)
    engine = CpuTransferEngine(paged, segment, segment.classes, 0)
    worker = RankTransfers(engine, paged.layer_index, 0, time.monotonic, layerwise=True)
    worker.start_saves([SaveJob(1, "r", 0, (4, 5, 0), (1, 2, 7))])
    assert worker.drain(10)
    piece = np.frombuffer(segment.slot_view(5), np.uint8)
    for layer, start in enumerate(paged.layout.layer_offsets):
        assert piece[start : start + 256].tobytes() == before[2, layer].numpy().tobytes()
    memory.zero_()
    worker.start_loads([LoadJob(2, "r", 0, (4, 5, 0), (1, 2, 3), synchronous)])
    for layer in range(10) if synchronous else ():
        worker.wait_for_layer(f"layer.{layer}")
        assert torch.equal(memory[1:3, layer], before[1:3, layer])
    assert worker.drain(10)
    assert torch.equal(memory[[1, 2, 3]], before[[1, 2, 7]])
    assert not memory[[0, *range(4, BLOCKS)]].any()
    assert worker.shutdown(10)
    del piece
    segment.close()


def test_layers_are_joined_only_where_they_are_neighbours() -> None:
    def groups(*layers: Any) -> list[int]:
        named = {f"layer.{number}": layer for number, layer in enumerate(layers)}
        return [len(group) for group in PagedKV.from_tensors(named, BLOCKS).groups]

    inside = torch.zeros((BLOCKS, 8, 16))
    assert groups(*(inside[:, layer] for layer in range(8))) == [2] * 4
    assert groups(*(inside[:, layer] for layer in reversed(range(8)))) == [1] * 8
    assert groups(*(inside[:, layer] for layer in (0, 1, 3, 4, 6, 7))) == [2] * 3
    assert groups(*(torch.zeros((8, BLOCKS, 16)))) == [1] * 8, "one after another"
    halves = torch.zeros((2, BLOCKS, 8, 4, 2, 8))
    assert groups(*(halves[:, :, layer] for layer in range(8))) == [1] * 8, "keys and values lie apart"


def test_a_device_without_a_copy_engine_is_named() -> None:
    paged = PagedKV.from_tensors({"a": torch.zeros(BLOCKS, 4)}, BLOCKS)
    segment = ArenaSegment.create(SLOTS, paged.layout.rank_slot_bytes)
    elsewhere = replace(paged, device_type="cuda")
    with pytest.raises(ConfigError, match="'cuda'"):
        transfer_engine_for(load_config({}, {}), elsewhere, segment, 0, {})
    with pytest.raises(ConfigError, match="no layer"):
        PagedKV.from_tensors({}, BLOCKS)
    segment.close()


@pytest.mark.parametrize(("block", "slot"), [(BLOCKS, 0), (-1, 0), (0, SLOTS), (0, -1)])
def test_nothing_outside_the_memory_is_ever_touched(scene: Scene, block: int, slot: int) -> None:
    copier = scene.engine.copier
    for copy in (copier.gather, copier.scatter):
        with pytest.raises(PactViolation, match="outside the memory"):
            copy(0, CopyPlan.of([1, block], [1, slot]))


def test_a_layer_is_waited_for_and_no_longer(scene: Scene) -> None:
    scene.save([0, 1], [0, 1])
    copier = SlowCopier.of(scene)
    before = scene.copies()
    scene.clear()
    scene.worker.start_loads([scene.load_job([0, 1], [0, 1], synchronous=True)])
    passed: list[int] = []

    def forward() -> None:
        for layer, tensor in enumerate(scene.tensors.values()):
            scene.worker.wait_for_layer(f"layer.{layer}")
            assert torch.equal(tensor[:2], before[layer][:2])
            passed.append(layer)

    compute = threading.Thread(target=forward)
    compute.start()
    for layer in range(LAYERS):
        time.sleep(0.02)
        assert passed == list(range(layer)), "went ahead of a layer that was not there"
        copier.gate.release()
        deadline = time.monotonic() + 5
        while len(passed) == layer and time.monotonic() < deadline:
            time.sleep(0.001)
        assert passed == list(range(layer + 1)), "waited for more than the layer asked for"
    compute.join()
    assert copier.calls == [("scatter", layer) for layer in range(LAYERS)]


def test_an_unknown_layer_waits_for_all_of_them(scene: Scene) -> None:
    copier = SlowCopier.of(scene)
    scene.worker.start_loads([scene.load_job([0], [0], synchronous=True)])
    threading.Timer(0.05, lambda: copier.gate.release(LAYERS)).start()
    scene.worker.wait_for_layer("no such layer")
    assert len(copier.calls) == LAYERS
    assert scene.worker.poll()


def test_without_layerwise_the_loads_are_there_when_start_loads_returns() -> None:
    scene = Scene(layerwise=False)
    before = scene.copies()
    scene.save([0], [3])
    scene.clear()
    job = scene.load_job([0], [3], synchronous=True)
    scene.worker.start_loads([job])
    assert scene.worker.poll() == {job.job_id: JobOutcome(RangeSet.span(0, 1))}
    assert torch.equal(scene.tensors["layer.3"][3], before[3][3])


def test_a_synchronous_load_overtakes_a_background_load_and_holds_saves_up(scene: Scene) -> None:
    scene.save([0, 1], [0, 1])
    copier = SlowCopier.of(scene)
    background = scene.load_job([0], [5])
    urgent = scene.load_job([1], [6], synchronous=True)
    scene.worker.start_loads([background])
    time.sleep(0.02)  # it waits inside its first layer now
    scene.worker.start_loads([urgent])
    scene.worker.start_saves([SaveJob(99, "r", 0, (2,), (2,))])
    copier.gate.release(1 + LAYERS)  # the background job's first layer, then all of the urgent one
    scene.worker.wait_for_loads()
    ended = scene.worker.poll()
    assert urgent.job_id in ended
    assert background.job_id not in ended
    copier.gate.release(LAYERS)
    assert scene.worker.drain(5)
    first_gather = copier.calls.index(("gather", 0))
    assert first_gather >= 1 + LAYERS, "a save ran while a synchronous load was waited for"
    assert set(scene.worker.poll()) | set(ended) >= {background.job_id, urgent.job_id, 99}


@pytest.mark.parametrize("layerwise", [True, False])
def test_p9_a_failed_load_names_exactly_the_blocks_that_failed(*, layerwise: bool) -> None:
    def fails(job: Job, block: int) -> bool:
        return isinstance(job, LoadJob) and block in (12, 13, 16)

    scene = Scene(fails=fails, layerwise=layerwise)
    before = scene.copies()
    scene.save(list(range(8)), list(range(8)), start=10)
    scene.clear()
    outcome = scene.load(list(range(8)), list(range(8)), start=10)
    failed = RangeSet.of(BlockRange(12, 2), BlockRange(16, 1))
    assert outcome == JobOutcome(RangeSet.span(10, 18).difference(failed), failed)
    for tensor, expected in zip(scene.tensors.values(), before, strict=True):
        for block in range(BLOCKS):
            arrived = block < 8 and 10 + block not in failed
            assert torch.equal(tensor[block], expected[block] if arrived else torch.zeros_like(expected[block]))
    assert scene.load(list(range(8)), list(range(8))).done == RangeSet.span(0, 8), "the thread did not survive"


def test_h51_nothing_grows_with_the_number_of_jobs_or_of_their_errors() -> None:
    scene = Scene(fails=lambda job, block: isinstance(job, LoadJob) and job.job_id % 3 == 0)

    def live(jobs: int) -> dict[str, int]:
        """What the worker keeps after so many jobs more, one after another: sound ones, failing ones, late ones."""
        for number in range(jobs):
            synchronous = number % 2 == 0
            assert scene.load([number % SLOTS], [number % BLOCKS], start=number, synchronous=synchronous)
            assert scene.save([number % SLOTS, SLOTS], [number % BLOCKS, 0], start=number)
        assert scene.worker.drain(0)
        assert scene.worker.poll() == {}
        kept = {**vars(scene.worker), **vars(scene.engine)}
        return {name: len(some) for name, some in kept.items() if hasattr(some, "__len__")}

    assert live(200) == live(20)


def test_a_block_that_cannot_be_copied_fails_alone_and_is_logged_once(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert scene.save([0, SLOTS, 2], [0, 1, 2]) == JobOutcome(
            RangeSet.of(BlockRange(0, 1), BlockRange(2, 1)), RangeSet.span(1, 2)
        )
        assert scene.load([0, 1], [0, BLOCKS]) == JobOutcome(RangeSet.span(0, 1), RangeSet.span(1, 2))
        assert scene.load([0, 1], [0, BLOCKS], synchronous=True).failed == RangeSet.span(0, 2)
        assert scene.load([0, 1], [0], synchronous=True).failed == RangeSet.span(0, 2)
        assert scene.load([0, 1], [0]) == JobOutcome(RangeSet.span(0, 1), RangeSet.span(1, 2))
    assert len(caplog.records) == 3


def test_every_job_ends_exactly_once(scene: Scene) -> None:
    ended: list[int] = []
    jobs = [scene.load_job([i % SLOTS], [i % BLOCKS], synchronous=i % 3 == 0) for i in range(60)]
    for job in jobs:
        scene.worker.start_loads([job])
        scene.worker.start_saves([SaveJob(1000 + job.job_id, "r", 0, (1, 2), (1, 2))])
        ended.extend(scene.worker.poll())
    assert scene.worker.drain(10)
    ended.extend(scene.worker.poll())
    assert sorted(ended) == sorted(number for job in jobs for number in (job.job_id, 1000 + job.job_id))
    assert scene.worker.poll() == {}


def test_h10_shutdown_is_bounded_fails_what_is_left_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())  # an earlier test's too
    assert_ends_within(_shut_down_under_way, 0.045, 0.1)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("kvpact-")]


def _shut_down_under_way() -> float:
    """How long a shutdown waits that may wait 50 ms for a copy under way."""
    scene = Scene()
    copier = SlowCopier.of(scene)
    first, second = scene.load_job([0, 1], [0, 1]), scene.load_job([2], [2], start=7)
    scene.worker.start_loads([first, second])
    assert not scene.worker.drain(0.02)
    began = time.monotonic()
    assert not scene.worker.shutdown(0.05), "a copy under way was not waited for, yet reported as ended"
    seconds = time.monotonic() - began
    copier.gate.release(100)
    assert scene.worker.shutdown(5)
    assert scene.worker.poll()[second.job_id] == JobOutcome(RangeSet(), RangeSet.span(7, 8))
    late = scene.load_job([0], [0], synchronous=True)
    scene.worker.start_loads([late])
    scene.worker.start_saves([SaveJob(500, "r", 3, (1,), (1,))])
    scene.worker.wait_for_layer("layer.3")
    assert scene.worker.poll() == {
        late.job_id: JobOutcome(RangeSet(), RangeSet.span(0, 1)),
        500: JobOutcome(RangeSet(), RangeSet.span(3, 4)),
    }
    assert scene.worker.drain(0)
    scene.close()
    return seconds


PATIENCE = 0.2


def failed_whole(job: LoadJob) -> JobOutcome:
    return JobOutcome(failed=RangeSet.of(job.blocks))


@pytest.mark.parametrize("layerwise", [True, False])
def test_h10_a_synchronous_load_that_hangs_is_left_by_its_deadline(layerwise: bool) -> None:
    scene = Scene(layerwise=layerwise, timeout=PATIENCE)
    scene.save([0, 1, 2], [0, 1, 2])
    copier = SlowCopier.of(scene)
    scene.clear()
    hangs = scene.load_job([0, 1], [3, 4], synchronous=True)
    began = time.monotonic()
    scene.worker.start_loads([hangs])
    for name in scene.tensors:
        scene.worker.wait_for_layer(name)
    scene.worker.wait_for_loads()
    assert PATIENCE <= time.monotonic() - began < 2 * PATIENCE, "once, not for each layer"
    assert scene.worker.poll() == {}, "it may still write"
    scene.worker.start_saves([SaveJob(99, "r", 0, (5,), (5,))])
    until = time.monotonic() + 5
    while not (ended := scene.worker.poll()):
        assert time.monotonic() < until, "saves go on"
        time.sleep(0.001)
    assert list(ended) == [99]
    copier.gate.release(1)
    assert scene.worker.drain(5)
    assert scene.worker.poll() == {hangs.job_id: failed_whole(hangs)}
    assert copier.calls == [("gather", layer) for layer in range(LAYERS)] + [("scatter", 0)], "no layer more"
    copier.gate.release(LAYERS)
    assert scene.load([0], [6], synchronous=True).failed == RangeSet()


def test_h10_a_synchronous_load_behind_a_copy_that_hangs_is_left_and_never_begins() -> None:
    scene = Scene(timeout=PATIENCE)
    copier = SlowCopier.of(scene)
    hangs = scene.load_job([0], [0])
    scene.worker.start_loads([hangs])
    time.sleep(0.02)
    behind = scene.load_job([1], [1], synchronous=True)
    scene.worker.start_loads([behind])
    scene.worker.wait_for_loads()
    assert scene.worker.poll() == {behind.job_id: failed_whole(behind)}
    copier.gate.release(LAYERS)
    assert scene.worker.drain(5)
    assert scene.worker.poll()[hangs.job_id].failed == RangeSet()
    assert len(copier.calls) == LAYERS


def test_h10_loads_that_are_left_go_no_farther_and_end_once() -> None:
    scene = Scene()
    copier = SlowCopier.of(scene)
    hangs, queued, wanted = scene.load_job([0, 1], [0, 1]), scene.load_job([2], [2]), scene.load_job([3], [3])
    scene.worker.start_loads([hangs, queued, wanted])
    time.sleep(0.02)
    scene.worker.leave([hangs.job_id, queued.job_id, 99])
    assert scene.worker.poll() == {queued.job_id: failed_whole(queued)}
    copier.gate.release(1 + LAYERS)
    assert scene.worker.drain(5)
    ended = scene.worker.poll()
    assert ended[hangs.job_id] == failed_whole(hangs)
    assert ended[wanted.job_id].failed == RangeSet()
    assert len(copier.calls) == 1 + LAYERS


def test_shutdown_frees_whoever_waits_for_a_layer() -> None:
    scene = Scene()
    copier = SlowCopier.of(scene)
    scene.worker.start_loads([scene.load_job([0], [0])])
    time.sleep(0.02)
    waiter = threading.Thread(target=lambda: scene.worker.wait_for_layer("layer.0"))
    scene.worker.start_loads([scene.load_job([0], [0], synchronous=True)])
    waiter.start()
    scene.worker.shutdown(0)
    copier.gate.release(100)
    waiter.join(5)
    assert not waiter.is_alive()


def test_copies_keep_off_the_cpu_that_computes_and_inside_the_limit_of_the_process() -> None:
    allowed = os.sched_getaffinity(0)
    found: list[set[int]] = []

    def compute() -> None:
        os.sched_setaffinity(0, {min(allowed)})
        start_background("kvpact-test", lambda: found.append(os.sched_getaffinity(0))).join()

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert found == [allowed - {min(allowed)} or allowed]
    start_background("kvpact-test", lambda: found.append(os.sched_getaffinity(0))).join()
    assert found[1] == allowed, "a caller that is not pinned has no CPU of its own to avoid"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one CPU there is none to keep off")
def test_what_a_background_thread_starts_keeps_off_the_cpu_that_computes_too() -> None:
    """As a thread that opens tiers, each of which starts threads."""
    allowed = os.sched_getaffinity(0)
    found: list[set[int]] = []

    def note() -> None:
        found.append(os.sched_getaffinity(0))

    def start_another() -> None:
        thread = threading.Thread(target=note)  # as a library's
        thread.start()
        thread.join()
        start_background("kvpact-inner", note).join()

    def compute() -> None:
        os.sched_setaffinity(0, {min(allowed)})
        start_background("kvpact-outer", start_another).join()

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert found == [allowed - {min(allowed)}] * 2


def test_the_kernel_shows_the_name_of_a_background_thread() -> None:
    def comm() -> None:
        shown.append(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip())

    def look() -> None:
        comm()
        child = threading.Thread(target=comm)
        child.start()
        child.join()

    shown: list[str] = []
    before = Path("/proc/self/comm").read_text()
    start_background("kvpact-a-long-name-of-a-tier", look).join()
    assert shown == ["kvpact-a-long-n"] * 2, "what belongs to kvpact cannot be told from the engine's threads"
    assert Path("/proc/self/comm").read_text() == before


@pytest.mark.parametrize("synchronous", [True, False])
def test_slots_of_another_engine_are_loaded_from_until_it_refuses(synchronous: bool) -> None:
    owner, scene = Scene(), Scene()
    owner.save([3, 4, 7], [1, 2, 3])
    owner.segment.seal()
    columns = ColumnFile(PlainSlots(SLOTS))
    memory = os.open(f"/proc/self/fd/{owner.segment.descriptor}", os.O_RDONLY)
    slots = NeighbourSlots(memory, owner.segment.classes, columns.descriptor)
    os.close(memory)

    def load() -> JobOutcome:
        scene.clear()
        job = replace(scene.load_job([3, 4, 7], [1, 2, 3], synchronous=synchronous), neighbour=1)
        scene.worker.start_loads([job])
        assert scene.worker.drain(10)
        return scene.worker.poll()[job.job_id]

    whole = RangeSet.span(0, 3)
    assert load() == JobOutcome(failed=whole), "an engine that is not mapped"
    scene.engine.use_neighbours({1: slots})
    assert load() == JobOutcome(done=whole)
    for here, there in zip(scene.tensors.values(), owner.tensors.values(), strict=True):
        assert all(torch.equal(block_of(here, block), block_of(there, block)) for block in (1, 2, 3))
    scene.engine.rebind(scene.paged)
    assert load() == JobOutcome(done=whole), "also after the engine's memory came back elsewhere"
    columns.refuse()
    assert load() == JobOutcome(failed=whole), "read again when the load ends"
