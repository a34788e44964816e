"""A rank's copies in which chosen blocks fail: a `TransferEngine` around another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kvpact.contract import LoadJob, SaveJob
from kvpact.memory.neighbour_slots import NeighbourSlots
from kvpact.worker.copy.base import Job, Transfer, TransferEngine
from kvpact.worker.paged import PagedKV

AnyJob = TypeVar("AnyJob", LoadJob, SaveJob)


@dataclass(frozen=True, slots=True)
class FaultyTransfer:
    """A transfer without the blocks that fail."""

    inner: Transfer
    kept: Sequence[int]
    """Indices of the job's blocks that `inner` copies."""
    lost: Sequence[int]

    @property
    def ended(self) -> bool:
        """See `Transfer`."""
        return self.inner.ended

    @property
    def failed(self) -> Sequence[int]:
        """See `Transfer`."""
        return sorted([*self.lost, *(self.kept[block] for block in self.inner.failed)])

    @property
    def error(self) -> Exception | None:
        """See `Transfer`."""
        return OSError("injected") if self.lost else self.inner.error

    def wait(self, groups: int, seconds: float | None) -> bool:
        """See `Transfer`."""
        return self.inner.wait(groups, seconds)

    def cancel(self) -> None:
        """See `Transfer`."""
        self.inner.cancel()


class FaultyEngine:
    """Blocks of the request for which `fails(job, block)` are not copied and fail."""

    def __init__(self, inner: TransferEngine, fails: Callable[[Job, int], bool]) -> None:
        self.inner = inner
        self.groups = inner.groups
        self.layerwise = inner.layerwise
        self.copies_per_block = inner.copies_per_block
        self._fails = fails

    def load(self, jobs: Sequence[LoadJob]) -> Sequence[Transfer]:
        """See `TransferEngine`."""
        return self._copy(jobs, self.inner.load)

    def save(self, jobs: Sequence[SaveJob]) -> Sequence[Transfer]:
        """See `TransferEngine`."""
        return self._copy(jobs, self.inner.save)

    def submit_some(self, max_copies: int | None = None, max_load_bytes: int | None = None) -> None:
        """See `TransferEngine`."""
        self.inner.submit_some(max_copies, max_load_bytes)

    def submit_all(self) -> None:
        """See `TransferEngine`."""
        self.inner.submit_all()

    def use_neighbours(self, memory: Mapping[int, NeighbourSlots]) -> None:
        """See `TransferEngine`."""
        self.inner.use_neighbours(memory)

    def rebind(self, paged: PagedKV) -> None:
        """See `TransferEngine`."""
        self.inner.rebind(paged)
        self.groups = self.inner.groups

    def close(self, seconds: float) -> bool:
        """See `TransferEngine`."""
        return self.inner.close(seconds)

    def _copy(self, jobs: Sequence[AnyJob], copy: Callable[[Sequence[AnyJob]], Sequence[Transfer]]) -> list[Transfer]:
        chosen = [self._choose(job) for job in jobs]
        transfers = copy([_part(job, kept) for job, (kept, _) in zip(jobs, chosen, strict=True)])
        return [FaultyTransfer(inner, *of_job) for inner, of_job in zip(transfers, chosen, strict=True)]

    def _choose(self, job: Job) -> tuple[list[int], list[int]]:
        lost = [block for block in range(len(job.slots)) if self._fails(job, job.start_block + block)]
        return [block for block in range(len(job.slots)) if block not in lost], lost


def _part(job: AnyJob, kept: Sequence[int]) -> AnyJob:
    slots = tuple(job.slots[block] for block in kept)
    return replace(job, slots=slots, block_ids=tuple(job.block_ids[block] for block in kept))
