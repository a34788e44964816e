"""vLLM's own copies, and kvpact's calls of vLLM's, on a device that is played: every byte, every wait.

The plays are those of kvpact's own copies. vLLM's worker is driven by its own calls alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

import device_plays as plays
from device_beds import BLOCKS, HYBRIDS, LAYOUTS, SIZED, Bed, pinned_bytes
from kvpact.contract import LoadJob, SaveJob
from kvpact.memory.arena import ArenaSegment
from kvpact.vllm.device import VllmDevice
from kvpact.worker.copy.base import Job
from kvpact.worker.device import engine
from kvpact.worker.paged import PagedKV
from kvpact_testkit.device import hostile_driver
from kvpact_testkit.vllm.played_copies import PlayedEvent, PlayedPlatform, PlayedStream

SEEDS = 12
STEPS = 25


class SlotRegion:
    """As much of vLLM's `SharedOffloadRegion` as its worker uses: a chunk is a slot, and slots are pinned already."""

    rank, total_size_bytes = 0, 0

    def __init__(self, segment: ArenaSegment) -> None:
        self._base = torch.frombuffer(segment.memory, dtype=torch.int8)
        self._row_stride = self.page_size = self.cpu_page_size = segment.classes[0].slot_bytes
        self.is_pinned, self.pinned_addresses = False, list[int]()
        self._offset = 0

    def create_next_worker_view(self, num_bytes: int) -> Any:
        """The next bytes of each slot."""
        shape = (self._base.numel() // self._row_stride, num_bytes)
        view = torch.as_strided(self._base, shape, (self._row_stride, 1), self._offset)
        self._offset += num_bytes
        return view


@dataclass(eq=False)
class VllmTransfer:
    """See `Transfer`."""

    job: Job
    copies: VllmCopies = field(repr=False)
    failed: Sequence[int] = ()
    error: Exception | None = None

    @property
    def ended(self) -> bool:
        return self.copies.has_ended(self.job.job_id)

    def wait(self, groups: int, seconds: float | None) -> bool:
        self.copies.worker.wait({self.job.job_id})
        return True

    def cancel(self) -> None:
        """vLLM cancels nothing."""


class VllmCopies:
    """`TransferEngine` by vLLM's worker, for models of one KV cache group whose blocks are one run in each tensor."""

    layerwise, copies_per_block = False, 0

    def __init__(self, bed: Bed) -> None:
        self.groups = bed.engine.groups
        tensors = [one.view(torch.int8).view(BLOCKS, -1) for one in memory_of_blocks(bed.paged)]
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(one, one.shape[1]) for one in tensors],
            [[CanonicalKVCacheRef(number, one.shape[1]) for number, one in enumerate(tensors)]],
        )
        region: Any = SlotRegion(bed.segment)
        self.worker = CPUOffloadingWorker(caches, blocks_per_chunk=1, num_cpu_chunks=0, mmap_region=region)
        self._ended: set[int] = set()

    def has_ended(self, job_id: int) -> bool:
        self._ended.update(one.job_id for one in self.worker.get_finished())
        return job_id in self._ended

    def load(self, jobs: Sequence[LoadJob]) -> list[VllmTransfer]:
        for job in jobs:
            assert self.worker.submit_load(job.job_id, CPULoadStoreSpec([*job.slots]), blocks_of(job))
        return [VllmTransfer(job, self) for job in jobs]

    def save(self, jobs: Sequence[SaveJob]) -> list[VllmTransfer]:
        for job in jobs:
            assert self.worker.submit_store(job.job_id, blocks_of(job), CPULoadStoreSpec([*job.slots]))
        return [VllmTransfer(job, self) for job in jobs]

    def submit_some(self, max_copies: int | None = None, max_load_bytes: int | None = None) -> None:
        """All is submitted."""

    submit_all = submit_some

    def close(self, seconds: float) -> bool:
        return True


def memory_of_blocks(paged: PagedKV) -> list[Any]:
    """The tensors, or the one in which all layers of a block lie together."""
    (first, *_) = paged.tensors
    together = first.untyped_storage().nbytes() > first.nbytes
    return [torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage())] if together else list(paged.tensors)


def blocks_of(job: Job) -> GPULoadStoreSpec:
    return GPULoadStoreSpec([*job.block_ids], group_sizes=(len(job.block_ids),), block_indices=(0,))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile_driver, "FOREVER_SECONDS", 1.0)
    monkeypatch.setattr(plays, "END_SECONDS", 2.0)


def problem_of(seed: int, layouts: Sequence[str], copies: Callable[[Bed, int], Any]) -> str:
    """What the play of this seed finds with these copies; "" for nothing."""
    bed = Bed(layouts[seed % len(layouts)], seed)
    assert bed.device is not None
    try:
        with PlayedPlatform(bed.device).installed():
            bed.engine = copies(bed, seed)
            found = bed.play(seed, STEPS)
    except Exception as error:
        return repr(error)
    return found[0] if found else ""


def kvpacts(bed: Bed, seed: int) -> engine.DeviceTransferEngine:
    """kvpact's copies, by the calls of vLLM that they make on a GPU."""
    device = VllmDevice(torch.device("cuda", 0), max(layer.chunk_bytes for layer in bed.paged.layers))
    return engine.DeviceTransferEngine(bed.paged, bed.segment, device, pinned_bytes(bed.segment, seed))


def vllms(bed: Bed, seed: int) -> VllmCopies:
    """vLLM's own."""
    return VllmCopies(bed)


SUBJECTS: dict[str, tuple[Sequence[str], Callable[[Bed, int], Any]]] = {
    "vLLM's": (("one by one", "inside blocks"), vllms),
    "kvpact's": ((*LAYOUTS, *HYBRIDS, *SIZED), kvpacts),
}
"""Whose copies -> the layouts of memory that they copy, and what makes them."""


@pytest.mark.parametrize("whose", SUBJECTS)
def test_copies_by_vllms_calls_bring_back_what_was_there(whose: str) -> None:
    assert [problem for seed in range(SEEDS) if (problem := problem_of(seed, *SUBJECTS[whose]))] == []


SWAP: Callable[..., None] = PlayedPlatform.swap

WITHOUT: dict[str, tuple[str, type, str, Callable[..., Any]]] = {
    "vLLM's fence behind what is computed": ("vLLM's", PlayedStream, "wait_stream", lambda *_: None),
    "vLLM's question whether a copy is done": ("vLLM's", PlayedEvent, "query", lambda *_: True),
    "vLLM's wait for a copy": ("vLLM's", PlayedEvent, "synchronize", lambda *_: None),
    "vLLM's order of a store": ("vLLM's", PlayedPlatform, "swap", lambda *given, **_: SWAP(*given[:4], True)),
    "kvpact's fences": ("kvpact's", PlayedStream, "wait_event", lambda *_: None),
    "kvpact's question whether a copy is done": ("kvpact's", PlayedEvent, "query", lambda *_: True),
    "kvpact's order of a save": ("kvpact's", PlayedPlatform, "swap", lambda *given, **_: SWAP(*given[:4], True)),
}
"""What is missing -> whose copies call it, and what stands in the call's place."""


@pytest.mark.parametrize("missing", WITHOUT)
def test_without_a_wait_some_seed_finds_wrong_bytes(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whose, kind, name, instead = WITHOUT[missing]
    monkeypatch.setattr(kind, name, instead)
    assert any(problem_of(seed, *SUBJECTS[whose]) for seed in range(SEEDS))


def last_of_two_loads(seed: int) -> int:
    """What is in a block for which two slots were ordered, one after the other."""
    bed = Bed("one by one", seed)
    assert bed.device is not None
    with PlayedPlatform(bed.device).installed():
        copies = VllmCopies(bed)
        bed.device.driver.stopped = True
        for slot in (0, 1):
            bed.segment.slot_view(slot)[:64] = bytes([slot] * 64)
            copies.load([LoadJob(slot, "r", 0, (slot,), (5,), synchronous=False)])
        bed.device.driver.stopped = False
        copies.worker.wait({0, 1})
    return int(bed.tensors["layer.0"][5, 0, 0])


def test_jobs_of_one_direction_are_copied_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {last_of_two_loads(seed) for seed in range(SEEDS)} == {1}
    monkeypatch.setattr(PlayedStream, "wait_event", lambda *_: None)
    assert {last_of_two_loads(seed) for seed in range(SEEDS)} == {0, 1}
