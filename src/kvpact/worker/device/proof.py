"""Whether a device's copies are right, asked again while they serve: blocks are read by another way and compared.

Owns which jobs are checked, the thread that checks them, and what the scheduler's process is told of it. Blocks are
read as in the trial at the start: see `differing`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Final

from kvpact.contract import SaveJob
from kvpact.errors import KvpactError
from kvpact.memory.arena import ArenaSegment, Standing
from kvpact.threads import start_background
from kvpact.worker.copy.base import Job
from kvpact.worker.device.base import Device, Event
from kvpact.worker.paged import PagedKV
from kvpact.worker.round_trip import differing

FIRST: Final = 64
"""Loads, saves, and loads that a step waits for, all of which are checked."""

ONE_IN: Final = 1000
"""Later, of each kind."""

LOAD, SAVE, STEP_LOAD = "load", "save", "load of a step"


class WrongCopy(KvpactError):
    """A copy did not do what it said."""


@dataclass(slots=True, eq=False)
class Check:
    """One job's. `has_ended` is written last."""

    job: Job
    fence: Event
    has_ended: bool = False
    error: Exception | None = None
    """What was found."""


class Proof:
    """One rank's. All but `_run` is for the computing thread."""

    def __init__(
        self,
        paged: PagedKV,
        segment: ArenaSegment,
        device: Device,
        *,
        stores: bool,
        first: int = FIRST,
        model: str = "a model",
    ) -> None:
        """`stores` is false of a rank that makes no saves: its loads prove it. `model` names it, for people."""
        self._paged, self._segment, self._device, self._first = paged, segment, device, first
        self._model = model
        self._needed = (LOAD, SAVE) if stores else (LOAD,)
        self._later = {kind: _sampled() for kind in (LOAD, SAVE, STEP_LOAD)}
        self._stream = device.create_stream()
        self._waiting: SimpleQueue[Check | None] = SimpleQueue()
        self._is_running = False
        self.begin_anew(paged)

    def begin_anew(self, paged: PagedKV) -> None:
        """The KV memory lies here, from now on: nothing is known of copies there."""
        self._paged = paged
        self._right = dict.fromkeys((LOAD, SAVE, STEP_LOAD), 0)
        """Kind of job -> jobs that were found to be right."""
        self._tell()

    def wants(self, job: Job) -> bool:
        """Whether a job is to be checked before it is reported."""
        kind = _kind_of(job)
        return self._right[kind] < self._first or next(self._later[kind])

    def begin(self, job: Job) -> Check:
        """Check a job whose copies are done, behind what was computed so far, on a thread of its own."""
        check = Check(job, self._device.record(self._device.current_stream()))
        if not self._is_running:
            self._is_running = True
            start_background("kvpact-check", self._run)
        self._waiting.put(check)
        return check

    def check_now(self, job: Job, event: Event) -> Check:
        """Check a job whose copies are done when the event is, while the caller waits."""
        check = Check(job, event)
        self._carry_out(check)
        return check

    def take(self, check: Check) -> None:
        """Count a check that has ended, and tell what follows from it. Says a difference once."""
        if check.error is not None:
            self._segment.standing = Standing.REFUTED
            return
        self._right[_kind_of(check.job)] += 1
        self._tell()

    def _tell(self) -> None:
        if self._segment.standing is not Standing.REFUTED:
            proven = all(self._right[kind] >= self._first for kind in self._needed)
            self._segment.standing = Standing.PROVEN if proven else Standing.OPEN

    def close(self) -> None:
        """End the thread, after the checks that wait."""
        self._waiting.put(None)

    def _run(self) -> None:
        self._device.attach()
        while (check := self._waiting.get()) is not None:
            self._carry_out(check)

    def _carry_out(self, check: Check) -> None:
        try:
            self._device.stream_wait(self._stream, check.fence)
            self._compare(check.job)
        except Exception as error:
            check.error = error
        check.has_ended = True

    def _compare(self, job: Job) -> None:
        """Raise WrongCopy unless each block is what its slot is."""
        paged, group_id, run = self._paged, job.group_id, partial(self._device.run, self._stream)
        if wrong := differing(paged, self._segment, group_id, job.block_ids, job.slots, run):
            layers, size = paged.cache_groups[group_id], sum(paged.layouts[group_id].layer_page_bytes)
            first = paged.layers[layers.start]
            raise WrongCopy(
                f"a {_kind_of(job)} of {len(job.slots)} blocks of {self._model}, KV cache group {group_id}, "
                f"{len(layers)} layers, {size} bytes a block (the first layer: {first.tensor.dtype} "
                f"{list(first.tensor.shape)}, {first.chunks} runs of {first.chunk_bytes} bytes a block, block stride "
                f"{first.block_stride}) on "
                f"{self._device.name}: {len(wrong)} blocks hold other bytes than their slots"
            )


def _sampled() -> Iterator[bool]:
    """True once in each `ONE_IN`, at random."""
    while True:
        chosen = random.randrange(ONE_IN)
        yield from (number == chosen for number in range(ONE_IN))


def _kind_of(job: Job) -> str:
    if isinstance(job, SaveJob):
        return SAVE
    return STEP_LOAD if job.synchronous else LOAD


__all__ = ["Check", "Proof", "WrongCopy"]
