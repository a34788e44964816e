"""`PlayedConnector`: kvpact in a real engine on the CPU whose KV memory counts as a device's, which copies late.

Name it by `kv_connector_module_path`. What computes is done when its call returns; so nothing may write to what a copy
reads or writes from its order to its end. The environment variable PLAYED_LOG names a directory: `wrong` gets a line
for each mistake, `jobs` one for each job that was ordered, `standing`, after each step, what is known of a rank's
copies. PLAYED_FIRST is how many jobs of each kind are checked, PLAYED_SEED chooses the order of copies.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvpact.contract import SaveJob
from kvpact.memory.arena import ArenaSegment
from kvpact.vllm import PactConnector
from kvpact.worker import round_trip, worker
from kvpact.worker.copy.base import Job
from kvpact.worker.device import engine as engine_module
from kvpact.worker.device import opened as opened_module
from kvpact.worker.device.entries import JobRuns
from kvpact.worker.device.opened import OpenedDevice
from kvpact.worker.device.proof import FIRST, Proof
from kvpact.worker.paged import PagedKV
from kvpact_testkit.device.hostile_driver import Copy, WatchedCopy
from kvpact_testkit.device.played import PlayedDevice, WrittenDown

LOG = Path(os.environ["PLAYED_LOG"])


def say(file: str, line: str) -> None:
    with (LOG / file).open("a") as log:
        log.write(f"{line}\n")


class Noting(Proof):
    """Notes each job: its kind, its number of blocks, whether it is checked."""

    def wants(self, job: Job) -> bool:
        wanted = super().wants(job)
        kind = "save" if isinstance(job, SaveJob) else "step load" if job.synchronous else "load"
        say("jobs", f"{kind} {len(job.slots)} {'checked' if wanted else 'believed'}")
        return wanted


WRONG = WrittenDown(LOG / "wrong")


class WatchedRuns(JobRuns):
    """Knows what lies where jobs were ordered to copy from and to."""

    def __init__(self, paged: PagedKV, segment: ArenaSegment, pinned_bytes: int) -> None:
        super().__init__(paged, segment, pinned_bytes)
        WATCHES.append(self)
        self.ordered: dict[tuple[int, int, int], WatchedCopy] = {}
        """(target, source, size) -> the copy, which knows what both held at the order."""

    def order(self, job: Job) -> None:
        entries = self.entries(job.group_id, *self.places(job))
        for device, host, size in zip(entries.device, entries.host, entries.sizes, strict=True):
            copy = (int(host), int(device)) if isinstance(job, SaveJob) else (int(device), int(host))
            self.ordered[*copy, int(size)] = WatchedCopy(WRONG, *copy, int(size))

    def begin(self, target: int, source: int, size: int) -> Copy:
        """In the place of `Copy`."""
        watched = self.ordered.pop((target, source, size), None)
        if watched is None:
            WRONG.append(f"{size} bytes are copied that nobody ordered")
        return watched or Copy(target, source, size)


class AtOnce(PlayedDevice):
    """What computes waits on the host, because it is no part of a stream."""

    def __init__(self, seed: int, segment: ArenaSegment) -> None:
        super().__init__(seed)
        self.segment = segment
        self.computes_at_once()


DEVICES: list[AtOnce] = []
WATCHES: list[WatchedRuns] = []
"""This process's: one each."""


def opened(config: Any, paged: PagedKV, segment: ArenaSegment, rank: int, openers: Any) -> OpenedDevice:
    """In the place of `transfer_engine_for`."""
    device = AtOnce(int(os.environ.get("PLAYED_SEED", "1")) + rank, segment)
    DEVICES.append(device)
    device.map(*paged.tensors)
    vars(opened_module)["Proof"] = partial(Noting, first=int(os.environ.get("PLAYED_FIRST", str(FIRST))))
    vars(engine_module)["JobRuns"] = WatchedRuns
    engine = OpenedDevice(config, paged, segment, device)
    device.driver.copy_kind = WATCHES[-1].begin
    load, save = engine.load, engine.save
    engine.load = lambda jobs: load(ordered(jobs))  # type: ignore[method-assign]
    engine.save = lambda jobs: save(ordered(jobs))  # type: ignore[method-assign]
    return engine


def ordered(jobs: Sequence[Any]) -> Sequence[Any]:
    for job in jobs:
        WATCHES[-1].order(job)
    return jobs


vars(worker)["transfer_engine_for"] = opened
vars(round_trip)["LIMIT_SECONDS"] = 60.0  # a played bus is as fast as a busy machine


class PlayedConnector(PactConnector):
    """See above. While the engine sleeps its KV memory is gone; it comes back elsewhere."""

    def build_connector_worker_meta(self) -> Any:
        """The report at the end of each step."""
        for device in DEVICES:
            for violation in device.driver.violations:
                say("wrong", violation)
            device.driver.violations.clear()
        beside = LOG / f"standing.{os.getpid()}"
        beside.write_text(" ".join(device.segment.standing.name for device in DEVICES))
        beside.replace(LOG / "standing")
        return super().build_connector_worker_meta()

    def unregister_kv_caches(self) -> None:
        """The memory goes, with all that was in it."""
        memory = self.cache_worker.memory
        was_there = memory is not None and memory.is_there
        super().unregister_kv_caches()
        if was_there:
            for device in DEVICES:
                device.unmap()
            move([layer.kv_cache for layer in self._vllm_config.compilation_config.static_forward_context.values()])

    def restore_kv_caches(self) -> None:
        """The memory is there again."""
        memory = self.cache_worker.memory
        if memory is not None and not memory.is_there:
            for device in DEVICES:
                device.map(*memory.kv_caches.values())
        super().restore_kv_caches()


def move(tensors: Sequence[torch.Tensor]) -> None:
    """Give these tensors other memory, where nothing is; nobody may read from or write to what they had."""
    moved: dict[int, torch.UntypedStorage] = {}
    with torch.inference_mode():
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in moved:
                moved[storage.data_ptr()] = torch.zeros(storage.nbytes(), dtype=torch.uint8).untyped_storage()
                storage.fill_(0x55)
                GONE.append(storage)
            offset, size, stride = tensor.storage_offset(), tensor.size(), tensor.stride()
            tensor.set_(moved[storage.data_ptr()], offset, size, stride)


GONE: list[torch.UntypedStorage] = []
"""Kept, so that no other memory lies there."""
