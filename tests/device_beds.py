"""An engine's KV memory in any layout, over the CPU's copies, a hostile device's or a real one's, for plays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="no engine is installed; `make setup` installs one")

import torch

from device_plays import Page, Play
from kvpact.config import load_config
from kvpact.contract import LoadJob
from kvpact.memory.arena import ArenaSegment
from kvpact.memory.extents import Extents, slot_classes
from kvpact.memory.layout import PAGE_BYTES
from kvpact.worker import round_trip
from kvpact.worker.copy.cpu import CpuTransferEngine
from kvpact.worker.device import engine, pinned
from kvpact.worker.paged import PagedKV, PagedLayer
from kvpact_testkit.device.hostile_driver import COMPUTING_STREAM, HostileDriver
from kvpact_testkit.device.played import PlayedDevice

Replay = Callable[[], Callable[[], list[Page]]]
"""Launches a graph's kernels. What it returns gives, once they are done, what each layer's saw: `[blocks, bytes]`."""

BLOCKS, SLOTS, LAYERS = 24, 16, 6
PINNED_SLOTS = 3
STEP_ENTRIES = 12


def one_by_one(device: str = "cpu") -> dict[str, Any]:
    """LBNHC: each layer is apart."""
    return {f"layer.{n}": torch.zeros((BLOCKS, 4, 16), dtype=torch.uint8, device=device) for n in range(LAYERS)}


def inside_blocks(device: str = "cpu") -> dict[str, Any]:
    """BLNHC: all layers of a block together, a whole number of pages of memory, so that blocks are joined too."""
    memory = torch.zeros((BLOCKS, LAYERS, 4096 * 2), dtype=torch.uint8, device=device)
    return {f"layer.{n}": memory[:, n] for n in range(LAYERS)}


def halves(device: str = "cpu") -> dict[str, Any]:
    """Keys, then values: two runs of bytes for each page."""
    return {f"layer.{n}": torch.zeros((2, BLOCKS, 4, 2, 8), dtype=torch.uint8, device=device) for n in range(LAYERS)}


def overlaid(device: str = "cpu") -> dict[str, Any]:
    """Two KV cache groups on the same memory, in different views: pages of the second are smaller, and in two parts."""
    memory = [torch.zeros((BLOCKS, 4, 64), dtype=torch.uint8, device=device) for _ in range(3)]
    views = [one.view(2 * BLOCKS, 2, 64)[..., :48] for one in memory]
    return {f"layer.{2 * n + half}": one for n in range(3) for half, one in enumerate((memory[n], views[n]))}


def states(device: str = "cpu") -> dict[str, Any]:
    """Attention in padded pages, and recurrent layers, whose states are one run of bytes, in the same and their own."""
    memory = [torch.zeros((BLOCKS, 512), dtype=torch.uint8, device=device) for _ in range(3)]
    made: dict[str, Any] = {"layer.3.attention": memory[0][:, :192].view(BLOCKS, 3, 64)}
    for number, one in enumerate(memory):
        made[f"layer.{2 * number}.recurrent"] = one.view(torch.int8).view(BLOCKS, 1, 1, 512)
    return made


def of_three_sizes(device: str = "cpu") -> dict[str, Any]:
    """Layers of three groups side by side in their blocks, each in memory of its own, and of whole pages or less."""
    large = torch.zeros((BLOCKS, 3, 2 * PAGE_BYTES), dtype=torch.uint8, device=device)
    middle = torch.zeros((BLOCKS, 2, PAGE_BYTES), dtype=torch.uint8, device=device)
    small = torch.zeros((2, BLOCKS, 4, 2, 8), dtype=torch.uint8, device=device)
    made = {f"layer.{2 * n}": large[:, n] for n in range(3)}
    return made | {"layer.1": middle[:, 0], "layer.5": middle[:, 1], "layer.3": small}


LAYOUTS: dict[str, Callable[..., dict[str, Any]]] = {
    "one by one": one_by_one,
    "inside blocks": inside_blocks,
    "halves": halves,
}
"""Of models with one KV cache group."""

HYBRIDS: dict[str, tuple[Callable[..., dict[str, Any]], tuple[tuple[str, ...], ...]]] = {
    "overlaid": (overlaid, (("layer.0", "layer.2", "layer.4"), ("layer.1", "layer.3", "layer.5"))),
    "states": (
        states,
        (("layer.7.of another rank",), ("layer.3.attention",), tuple(f"layer.{n}.recurrent" for n in (0, 2, 4))),
    ),
}
"""Of models with several, and the layers of each."""


SIZED = {
    "of three sizes": (
        of_three_sizes,
        (
            ("layer.0", "layer.2", "layer.4"),
            ("layer.1", "layer.5"),
            ("layer.3",),
            ("layer.6.of another rank",),
        ),
    )
}
"""The same for models whose slots are of several classes, which share extents."""

EXTENT_PAGES = 6
"""One slot of the largest size of `of_three_sizes`, six of its smallest, and three of the one between; or a page more,
which is lost to two of them."""


def memory_of(layout: str, device: str = "cpu") -> tuple[dict[str, Any], PagedKV]:
    """The tensors of a layout, and how they are seen."""
    make, groups = {**HYBRIDS, **SIZED}.get(layout) or (LAYOUTS[layout], ())
    tensors = make(device)
    return tensors, PagedKV.from_tensors(tensors, BLOCKS, groups)


def segment_for(layout: str, paged: PagedKV, seed: int = 3) -> ArenaSegment:
    """`SLOTS` slots, or as many extents."""
    if layout not in SIZED:
        return ArenaSegment.create(SLOTS, paged.rank_slot_bytes)
    classes = slot_classes([one.rank_slot_bytes for one in paged.layouts], ranks_differ=False)[1]
    extent_pages = EXTENT_PAGES + (seed // 2) % 2
    return ArenaSegment.create_extents(Extents(SLOTS, extent_pages * PAGE_BYTES, classes), 1)


def pinned_bytes(segment: ArenaSegment, seed: int = 0) -> int:
    """Of a piece that is pinned: three slots; two extents, or less than one, whose slots then lie across borders."""
    if segment.unit == "slot":
        return PINNED_SLOTS * segment.rank_slot_bytes
    return 2 * segment.classes[0].extent_bytes if seed % 2 else 5 * PAGE_BYTES


LIMITS = [
    (module, name, getattr(module, name))
    for module, name in (
        (round_trip, "LIMIT_SECONDS"),
        (engine, "STEP_ENTRIES"),
        (engine, "SHORT_ENTRIES"),
        (pinned, "CHUNK_BYTES"),
    )
]


def undo_limits() -> None:
    """All as it was when this file was loaded: beds may be open at the same time, and end in any order."""
    for module, name, value in LIMITS:
        setattr(module, name, value)


class Bed:
    """KV memory in the process's own; what computes runs at once, or when the hostile device lets it."""

    def __init__(self, layout: str, seed: int | None, engine: ModuleType = engine) -> None:
        """With a seed the copies are those of a hostile device, by the engine of this module."""
        self._limits = pytest.MonkeyPatch()
        # A played device takes its time, and a machine that runs tests does too.
        self._limits.setattr(round_trip, "LIMIT_SECONDS", 5.0)
        self.tensors, self.paged = memory_of(layout)
        self.segment = segment_for(layout, self.paged, seed or 0)
        self.views = [layer.view() for layer in self.paged.layers]
        self.device: PlayedDevice | None = None
        self._second = ThreadPoolExecutor(1)
        """The engine's second computing thread."""
        self.streams: dict[int, int] = {}
        """Thread -> the stream on which it computes; the others have the engine's."""
        if seed is None:
            self.engine: Any = CpuTransferEngine(self.paged, self.segment, self.segment.classes, 0)
            return
        self._limits.setattr(engine, "STEP_ENTRIES", STEP_ENTRIES)  # so that plays reach it
        self._limits.setattr(engine, "SHORT_ENTRIES", STEP_ENTRIES)
        self.device = PlayedDevice(seed, self.current_stream)
        self.device.map(*self.paged.tensors)
        driver = self.device.driver
        self._pin_slots(driver, pinned_bytes(self.segment, seed))
        self.streams = {self._second.submit(self._second_stream, driver).result(): driver.create_stream()}
        self.engine = engine.DeviceTransferEngine(
            self.paged, self.segment, self.device, pinned_bytes(self.segment, seed)
        )
        self._entries_per_block = self.engine.copies_per_block * (2 if layout in SIZED else 1)  # pieces may cut a run
        self._transfers: dict[str, list[Any]] = {"load": [], "save": []}
        """Those ordered in the background that the device does not have all of."""
        self._submit_some, self.engine.submit_some = self.engine.submit_some, self._submit_fairly
        for kind in ("load", "save"):
            setattr(self.engine, kind, partial(self._noted, kind, getattr(self.engine, kind)))

    def _noted(self, kind: str, order: Callable[..., Any], jobs: Any) -> Any:
        transfers = order(jobs)
        self._transfers[kind] += [one for one in transfers if one.blocks_left]
        return transfers

    def _submit_fairly(self, max_copies: int | None = None, max_load_bytes: int | None = None) -> None:
        """A step that computes gives the device its share of copies, and in each direction less than a block more.

        Of several loads that wait, those with the least left and the oldest go on.
        """
        assert self.driver is not None
        loads, saves = ([one for one in kind if one.blocks_left] for kind in self._transfers.values())
        before, left = self.driver.num_entries, {load: load.blocks_left for load in loads}
        self._submit_some(max_copies, max_load_bytes)
        if self.driver.num_entries - before > STEP_ENTRIES + 2 * self._entries_per_block:
            self.driver.violations.append(f"{self.driver.num_entries - before} copies in a step")
        if len({load.job.group_id for load in loads}) == 1:
            has_room = self._entries_per_block <= STEP_ENTRIES // (4 if saves else 2)
            for load in (min(loads, key=lambda one: left[one]), *loads[: int(has_room)]):
                if load.blocks_left == left[load]:
                    self.driver.violations.append(f"a load of {left[load]} blocks waits behind others")
        self._transfers = {"load": loads, "save": saves}

    @property
    def driver(self) -> HostileDriver | None:
        """The hostile device's."""
        return self.device.driver if self.device is not None else None

    def _pin_slots(self, driver: HostileDriver, chunk_bytes: int) -> None:
        num_bytes = len(self.segment.memory)
        for start in range(0, num_bytes, chunk_bytes):
            driver.register(self.segment.mapped_at + start, min(chunk_bytes, num_bytes - start))

    @staticmethod
    def _second_stream(driver: HostileDriver) -> int:
        driver.attach()
        return threading.get_ident()

    def current_stream(self) -> int:
        """The calling thread's."""
        return self.streams.get(threading.get_ident(), COMPUTING_STREAM)

    def _do(self, kernel: Callable[[], None]) -> None:
        if self.driver is None:
            kernel()
        else:
            self.driver.launch(kernel, self.current_stream())

    def beside(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.driver is None:
            return self._second.submit(work).result
        if not self.streams:
            work()
            return lambda: None
        (stream,) = self.streams.values()
        self._follow(stream, COMPUTING_STREAM)
        running = self._second.submit(work)

        def join() -> None:
            running.result()
            self._follow(COMPUTING_STREAM, stream)

        return join

    def _follow(self, stream: int, other: int) -> None:
        """What `stream` gets from now on comes after what `other` has now."""
        assert self.driver is not None
        event = self.driver.create_event()
        self.driver.record(event, other)
        self.driver.stream_wait(stream, event)

    def write(self, layer: int, block: int, content: Page) -> None:
        def kernel() -> None:
            view = self.views[layer][block]
            view[:] = content.reshape(view.shape)

        self._do(kernel)

    def read(self, layer: int, block: int) -> Callable[[], Page]:
        found: list[Page] = []
        self._do(lambda: found.append(self.views[layer][block].ravel().copy()))
        return lambda: found[0]

    def capture(self, layers: Sequence[int]) -> Replay:
        """A graph of kernels that read all blocks of these layers; a replay launches them one by one."""

        def kernel(layer: int, seen: list[Page]) -> Callable[[], None]:
            return lambda: seen.append(self.views[layer].reshape(BLOCKS, -1).copy())

        def replay() -> Callable[[], list[Page]]:
            seen: list[Page] = []
            for layer in layers:
                self._do(kernel(layer, seen))
            return lambda: seen

        return replay

    def finish(self) -> None:
        if self.driver is not None:
            self.driver.finish()

    def close(self) -> None:
        undo_limits()
        self._second.shutdown()
        assert self.engine.close(10)
        self.views.clear()
        self.segment.close()

    def play(self, seed: int, steps: int = 40) -> list[str]:
        problems = Play(self, seed).run(steps)
        return problems + (self.driver.violations if self.driver is not None else [])

    def end_abruptly(self, seed: int) -> list[str]:
        """End with copies under way, and more loads than steps make: nothing may touch the memory afterwards."""
        assert self.driver is not None
        self.streams = {}
        play = Play(self, seed + 1)
        play.begin(10)
        slots = tuple(islice(self.segment.classes[-1].numbers(range(SLOTS)), SLOTS))
        for _ in range(8):
            counts = (SLOTS, 3, 3)
            self.engine.load([LoadJob(1 << 20, "r", 0, slots[:n], tuple(range(n)), synchronous=False) for n in counts])
            self.engine.submit_some()
        self.engine.load([LoadJob(1 << 20, "last", 0, slots, tuple(range(SLOTS)), synchronous=True)])
        if not self.engine.close(5):
            return ["the copies do not end"]
        return [*self.driver.violations, *(["copies are under way after the end"] if self.driver.busy_streams else [])]


class CudaBed:
    """KV memory on the first CUDA device, and its copies as an engine opens them; what computes are torch's kernels."""

    def __init__(self, layout: str) -> None:
        from kvpact.vllm.device import open_device

        self._limits = pytest.MonkeyPatch()
        self.tensors, self.paged = memory_of(layout, "cuda:0")
        self.segment = segment_for(layout, self.paged)
        self._limits.setattr(pinned, "CHUNK_BYTES", pinned_bytes(self.segment))
        self._limits.setattr(engine, "STEP_ENTRIES", STEP_ENTRIES)
        self._limits.setattr(engine, "SHORT_ENTRIES", STEP_ENTRIES)
        self.engine: Any = open_device(load_config({}, {}), self.paged, self.segment)
        self._pages = [self._view(one) for one in self.paged.layers]
        self._second = ThreadPoolExecutor(1)
        self._second_stream = torch.cuda.Stream()

    @staticmethod
    def _view(layer: PagedLayer) -> Any:
        """A layer's memory as bytes, `[blocks, chunks, chunk_bytes]`, on the device."""
        storage = layer.tensor.untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8, device=layer.tensor.device).set_(storage)
        shape = (layer.num_blocks, layer.chunks, layer.chunk_bytes)
        strides = (layer.block_stride, layer.chunk_stride, 1)
        return torch.as_strided(memory, shape, strides, layer.address - storage.data_ptr())

    def write(self, layer: int, block: int, content: Page) -> None:
        target = self._pages[layer][block]
        target.copy_(torch.from_numpy(content).to(target.device).reshape(target.shape))

    def read(self, layer: int, block: int) -> Callable[[], Page]:
        found = self._pages[layer][block].clone()
        return lambda: np.asarray(found.cpu()).ravel()

    def beside(self, work: Callable[[], None]) -> Callable[[], None]:
        ours, theirs = torch.cuda.current_stream(), self._second_stream
        theirs.wait_stream(ours)

        def run() -> None:
            with torch.cuda.stream(theirs):
                work()

        running = self._second.submit(run)

        def join() -> None:
            running.result()
            ours.wait_stream(theirs)

        return join

    def capture(self, layers: Sequence[int]) -> Replay:
        """A CUDA graph of kernels that read all blocks of these layers."""
        pages = [self._pages[layer] for layer in layers]
        seen = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in pages]

        def kernels() -> None:
            for target, source in zip(seen, pages, strict=True):
                target.copy_(source)

        aside = torch.cuda.Stream()  # before they are captured, kernels run once, and not on the default stream
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            kernels()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernels()

        def replay() -> Callable[[], list[Page]]:
            graph.replay()
            found = [one.clone() for one in seen]
            return lambda: [np.asarray(one.cpu()).reshape(BLOCKS, -1) for one in found]

        return replay

    def finish(self) -> None:
        torch.cuda.synchronize()

    def close(self) -> None:
        self._second.shutdown()
        assert self.engine.close(10)
        undo_limits()
        self.segment.close()

    def play(self, seed: int, steps: int = 40) -> list[str]:
        return Play(self, seed).run(steps)


BEDS = ("cpu", "fake-cuda", "cuda")
"""Kinds of devices: the CPU, a hostile device that is played, and the first CUDA device."""


def bed_named(name: str, layout: str, seed: int = 7) -> Bed | CudaBed:
    """A bed of one of `BEDS`. Skips the test where there is no such device."""
    if name == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("torch.cuda.is_available() is false: this machine has no CUDA device, or torch is not for one")
        return CudaBed(layout)
    return Bed(layout, seed if name == "fake-cuda" else None)
