"""Memory of other engines, as a rank maps it: again where no descriptor was left for it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvpact.config import load_config
from kvpact.contract import JobOutcome, LoadJob, SaveJob, StepWork
from kvpact.index.column_file import SEALS, ColumnFile
from kvpact.index.slot_space import PlainSlots
from kvpact.memory.neighbour_slots import NeighbourMemory, encode_addresses
from kvpact.wire import StepMessage
from kvpact.worker.worker import CacheWorker, RankInfo
from meeting_engine import allow
from polling import until

torch = pytest.importorskip("torch")

BLOCKS = 8


class Rank:
    """The one rank of an engine."""

    def __init__(self) -> None:
        self.jobs = 0
        self.tensor = torch.zeros((BLOCKS, 2, 16, 8), dtype=torch.float16)
        self.worker = CacheWorker(load_config({"memory": "1MiB"}, {}), RankInfo(0, 1, BLOCKS), {})
        self.worker.register_kv_caches({"layer": self.tensor})

    def does(self, job: LoadJob | SaveJob, extra: bytes | None = None) -> bool:
        """True if this job succeeds in a step with this list of other engines."""
        loads = (job,) if isinstance(job, LoadJob) else ()
        message = StepMessage(StepWork(loads, (job,) if isinstance(job, SaveJob) else (), extra=extra))
        self.worker.begin_step(message)
        self.worker.wait_for_loads()
        self.worker.end_forward(message)
        found: list[JobOutcome] = []

        def has_ended() -> bool:
            self.worker.begin_step(StepMessage())
            self.worker.poll()
            found.extend(outcome for number, outcome in self.worker.report().ranks[0].items() if number == job.job_id)
            return bool(found)

        until(has_ended)
        return not found[-1].failed.ranges


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    """Those of two engines."""
    made = [Rank(), Rank()]
    yield made
    allow(os.getpid(), None)
    for rank in made:
        rank.worker.shutdown()


def test_memory_for_which_no_descriptor_was_left_is_mapped_at_a_later_load(
    ranks: list[Rank], caplog: pytest.LogCaptureFixture
) -> None:
    owner, other = ranks
    owner.tensor[3] = 1.5
    assert owner.does(SaveJob(1, "r", 0, (0,), (3,)))
    hello = owner.worker.hello()
    assert hello is not None
    there = hello.segment
    fcntl.fcntl(there.descriptor, fcntl.F_ADD_SEALS, SEALS)
    columns = ColumnFile(PlainSlots(there.num_slots))
    known = (there.descriptor, there.device, there.inode, there.num_slots)
    extra = encode_addresses([NeighbourMemory(1, os.getpid(), columns.descriptor, (known,))])
    load = LoadJob(2, "r", 0, (0,), (5,), synchronous=True, neighbour=1)
    before = len(os.listdir("/proc/self/fd"))
    for spare in range(4):  # two are opened, and Python maps through a copy of each
        allow(os.getpid(), spare)
        loaded = other.does(replace(load, job_id=2 + spare), extra if not spare else None)
        allow(os.getpid(), None)
        assert not loaded
        assert len(os.listdir("/proc/self/fd")) == before
    assert other.does(replace(load, job_id=6))
    assert bool((other.tensor[5] == 1.5).all())
    (said,) = [record.message for record in caplog.records if "cannot be mapped" in record.message]
    assert said.endswith("so nothing is loaded from it until it can: Too many open files")
    owner.worker.shutdown()
    assert other.does(replace(load, job_id=7)), "it was mapped once"
