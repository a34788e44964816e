"""Copies on a CUDA device: ordered by streams and events, so that no Python thread that computes waits for a copy.

Owns the stream of the loads that a step waits for, and a thread that submits them when there are many. A load is put
into it behind a fence of the computing stream, and the computing stream is told to wait for it. Other loads, and saves,
go through a lane each.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

from kvpact.contract import LoadJob, SaveJob
from kvpact.threads import start_background
from kvpact.worker.cuda.bounce import STREAMS, BounceBuffer, ways_of
from kvpact.worker.cuda.copies import DeviceCopies
from kvpact.worker.cuda.driver import CudaError, Driver
from kvpact.worker.cuda.lane import CudaTransfer, Lane
from kvpact.worker.cuda.step_loads import StepLoads, StepTransfer
from kvpact.worker.paged import PagedKV

MAX_ENTRIES_AT_ONCE: Final = 512
"""Entries that the computing thread submits itself: 0.3 ms at 0.6 us each. More are handed to a thread."""


class CudaTransferEngine:
    """See `TransferEngine`."""

    def __init__(self, copies: DeviceCopies, rank: int, bounce: BounceBuffer | None) -> None:
        """With `bounce` all copies go by way of it: slots need not be pinned."""
        self._copies = copies
        self._way, loads, saves = ways_of(copies, bounce)
        self._most_at_once = MAX_ENTRIES_AT_ONCE if bounce is None else 0  # the computing thread copies no bytes itself
        self.groups: Sequence[range] = copies.groups
        self._step_stream, load_stream, save_stream = _streams(copies.driver, STREAMS)
        self._step_loads: list[StepLoads] = []
        """Those that have not ended, as far as was polled."""
        self._handed_over: deque[StepLoads] = deque()
        self._wanted = threading.Condition()
        """Guards `_handed_over` and `_closing`."""
        self._closing = False
        self._process = os.getpid()
        self._loads = Lane(f"kvpact-load-{rank}", copies, loads, load_stream)
        self._saves = Lane(f"kvpact-save-{rank}", copies, saves, save_stream)
        self._submitter = start_background(f"kvpact-step-{rank}", self._run)

    def load(self, jobs: Sequence[LoadJob]) -> Sequence[CudaTransfer | StepTransfer]:
        """See `TransferEngine`. What a step waits for was submitted when this returns, or a thread is submitting it."""
        awaited = iter(self._load_for_step([job for job in jobs if job.synchronous]))
        others = iter(self._loads.submit([job for job in jobs if not job.synchronous], self._copies.current_stream))
        return [next(awaited) if job.synchronous else next(others) for job in jobs]

    def _load_for_step(self, jobs: Sequence[LoadJob]) -> Sequence[StepTransfer]:
        if not jobs:
            return ()
        copies = self._copies
        batch = StepLoads(copies, self._step_stream, jobs)
        self._step_loads = [*(one for one in self._step_loads if not one.poll()), batch]
        if not batch.begin():
            return batch.transfers
        if sum(copies.entries_of(job) for job in jobs) <= self._most_at_once:
            batch.submit(self._way)
        else:
            with self._wanted:
                self._handed_over.append(batch)
                self._wanted.notify()
        return batch.transfers

    def save(self, jobs: Sequence[SaveJob]) -> Sequence[CudaTransfer]:
        """See `TransferEngine`."""
        return self._saves.submit(jobs, self._copies.current_stream)

    def rebind(self, paged: PagedKV) -> None:
        """See `TransferEngine`. Slots stay pinned."""
        self._copies.rebind(paged)
        self.groups = self._copies.groups

    def close(self, seconds: float) -> bool:
        """See `TransferEngine`. In a forked process there is nothing to end: threads and device are the parent's."""
        if self._process != os.getpid():
            return True
        with self._wanted:
            self._closing = True
            self._wanted.notify()
        self._submitter.join(seconds)
        ended = [lane.close(seconds) for lane in (self._loads, self._saves)]
        ended += [batch.synchronize(seconds) for batch in self._step_loads]
        self._step_loads = []
        closed = not self._submitter.is_alive() and all(ended)
        if closed and self._step_stream and self._copies.error is None:
            self._copies.driver.destroy_stream(self._step_stream)
            self._step_stream = 0
        return closed

    def _run(self) -> None:
        """Submit what is too much for the computing thread."""
        try:
            self._copies.driver.attach()
        except CudaError as error:
            self._copies.note_error(error)
        while True:
            with self._wanted:
                self._wanted.wait_for(lambda: self._closing or self._handed_over)
                if not self._handed_over:
                    return
                batch = self._handed_over.popleft()
            batch.submit(self._way)


def _streams(driver: Driver, count: int) -> list[int]:
    """As many new streams. Raises CudaError, and leaves none."""
    streams: list[int] = []
    try:
        while len(streams) < count:
            streams.append(driver.create_stream())
    except CudaError:
        for stream in streams:
            with contextlib.suppress(CudaError):
                driver.destroy_stream(stream)
        raise
    return streams
