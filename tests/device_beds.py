"""An engine's KV memory in any layout, over the CPU's copies or over a hostile device's, for plays."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from kvpact.memory.arena import ArenaSegment
from kvpact.testkit.device.hostile_driver import COMPUTING_STREAM, HostileDriver
from kvpact.testkit.device.plays import Page, Play
from kvpact.worker.copy.cpu import CpuTransferEngine
from kvpact.worker.cuda import bounce, copies, engine, lane
from kvpact.worker.cuda.driver import AccessOrder
from kvpact.worker.cuda.entries import Entries
from kvpact.worker.paged import PagedKV

BLOCKS, SLOTS, LAYERS = 24, 16, 6
PINNED_SLOTS = 3


def one_by_one() -> dict[str, Any]:
    """LBNHC: each layer is apart."""
    return {f"layer.{n}": torch.zeros((BLOCKS, 4, 16), dtype=torch.uint8) for n in range(LAYERS)}


def inside_blocks() -> dict[str, Any]:
    """BLNHC: all layers of a block together, a whole number of pages of memory, so that blocks are joined too."""
    memory = torch.zeros((BLOCKS, LAYERS, 4096 * 2), dtype=torch.uint8)
    return {f"layer.{n}": memory[:, n] for n in range(LAYERS)}


def halves() -> dict[str, Any]:
    """Keys, then values: two runs of bytes for each page."""
    return {f"layer.{n}": torch.zeros((2, BLOCKS, 4, 2, 8), dtype=torch.uint8) for n in range(LAYERS)}


LAYOUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "one by one": one_by_one,
    "inside blocks": inside_blocks,
    "halves": halves,
}


class PlayedKernel:
    """Loads by a kernel, which reads host memory in stream order."""

    def __init__(self, driver: HostileDriver) -> None:
        self._driver = driver
        self.loads = 0

    def suits(self, entries: Entries) -> bool:
        return len(entries) >= 4

    def load(self, entries: Entries, stream: int) -> None:
        self.loads += 1
        self._driver.launch_copies(entries.device, entries.host, entries.sizes, AccessOrder.STREAM, stream)


class Bed:
    """KV memory in the process's own; what computes runs at once, or when the hostile device lets it."""

    def __init__(
        self,
        layout: str,
        seed: int | None,
        copies: ModuleType = copies,
        engine: ModuleType = engine,
        lane: ModuleType = lane,
        bounce: ModuleType = bounce,
        *,
        bounced: bool = False,
    ) -> None:
        """With a seed the copies are those of a hostile CUDA device, by the classes of these modules.

        If `bounced`, no slot is pinned.
        """
        self._limits = pytest.MonkeyPatch()
        self.tensors = LAYOUTS[layout]()
        self.paged = PagedKV.from_tensors(self.tensors, BLOCKS)
        self.segment = ArenaSegment.create(SLOTS, self.paged.layout.rank_slot_bytes)
        self.views = [layer.view() for layer in self.paged.layers]
        self.driver: HostileDriver | None = None
        self.bounce: Any = None
        if seed is None:
            self.engine: Any = CpuTransferEngine(self.paged, self.segment, *self.segment.classes, 0)
            return
        # Copies are cut into pieces, and handed over, at sizes that plays reach.
        self._limits.setattr(lane, "PIECE_BYTES", 4 * self.segment.rank_slot_bytes)
        self._limits.setattr(engine, "MAX_ENTRIES_AT_ONCE", 40)
        self.driver = HostileDriver(seed)
        for tensor in self.tensors.values():
            storage = tensor.untyped_storage()
            self.driver.add_device_memory(storage.data_ptr(), storage.nbytes())
        if bounced:  # a part has one block and a half
            self._limits.setattr(bounce, "PART_BYTES", sum(self.paged.layout.layer_page_bytes) * 3 // 2 + 1)
            self.bounce = bounce.BounceBuffer(self.driver)
        else:
            self._pin_slots(self.driver)
        self.copies = copies.DeviceCopies(
            self.paged, self.segment, self.driver, lambda: COMPUTING_STREAM, PINNED_SLOTS, self._kernel(seed)
        )
        self.engine = engine.CudaTransferEngine(self.copies, 0, self.bounce)

    def _pin_slots(self, driver: HostileDriver) -> None:
        slot_bytes = self.segment.rank_slot_bytes
        for slot in range(0, SLOTS, PINNED_SLOTS):
            count = min(PINNED_SLOTS, SLOTS - slot)
            driver.register(self.segment.mapped_at + slot * slot_bytes, count * slot_bytes)

    def _kernel(self, seed: int) -> Any:
        return PlayedKernel(self.driver) if (seed % 4 == 3 or seed % 8 == 6) and self.driver is not None else None

    def _do(self, kernel: Callable[[], None]) -> None:
        if self.driver is None:
            kernel()
        else:
            self.driver.launch(kernel)

    def write(self, layer: int, block: int, content: Page) -> None:
        def kernel() -> None:
            view = self.views[layer][block]
            view[:] = content.reshape(view.shape)

        self._do(kernel)

    def read(self, layer: int, block: int) -> Callable[[], Page]:
        found: list[Page] = []
        self._do(lambda: found.append(self.views[layer][block].ravel().copy()))
        return lambda: found[0]

    def finish(self) -> None:
        if self.driver is not None:
            self.driver.finish()

    def close(self) -> None:
        self._limits.undo()
        assert self.engine.close(10)
        if self.bounce is not None:
            self.bounce.close()
        self.views.clear()
        self.segment.close()

    def play(self, seed: int, steps: int = 40) -> list[str]:
        problems = Play(self, seed).run(steps)
        return problems + (self.driver.violations if self.driver is not None else [])

    def end_abruptly(self, seed: int) -> list[str]:
        """End with copies under way: nothing may touch the memory afterwards."""
        assert self.driver is not None
        play = Play(self, seed + 1)
        play.begin(10)
        if not self.engine.close(5):
            return ["the copies do not end"]
        return [*self.driver.violations, *(["copies are under way after the end"] if self.driver.busy_streams else [])]
