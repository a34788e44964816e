"""When pages move: the worker's threads that carry out load and save jobs between the engine's KV memory and the arena.

Owns the order of copies (synchronous loads first, layer by layer behind the forward pass; the rest in the background)
and the outcome of each job, reported exactly once. Decides nothing about slots or blocks: they come in jobs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import xxhash

from kvpact.contract import JobOutcome, LoadJob, SaveJob
from kvpact.identity.keys import BlockRange, RangeSet
from kvpact.memory.arena import ArenaSegment
from kvpact.threads import start_background
from kvpact.worker.paged import CopyPlan, PagedKV, copy_engine_for

logger = logging.getLogger(__name__)

Job: TypeAlias = LoadJob | SaveJob

GROUP_BYTES: Final = 32 << 20
"""A background job advances by so many bytes at a time: few calls; between its layers it makes way for others."""


@dataclass(slots=True)
class TransferCounts:
    """What one rank has copied since it started, in bytes, and the seconds spent on it."""

    load_bytes: int = 0
    load_seconds: float = 0.0
    save_bytes: int = 0
    save_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Progress:
    """A background job under way: blocks below `position` have been tried, `failed` are those that did not arrive."""

    job: Job
    fence: Callable[[], None]
    position: int = 0
    failed: list[int] = field(default_factory=list)
    left: bool = False
    """Whether nobody waits for it any more: what is not being copied in this moment is not copied."""

    def outcome(self) -> JobOutcome:
        """The job's end: what was not tried has failed too."""
        start = self.job.start_block
        failed = RangeSet.of(
            *(BlockRange(start + block, 1) for block in self.failed),
            BlockRange(start + self.position, len(self.job.slots) - self.position),
        )
        return JobOutcome(RangeSet.of(self.job.blocks).difference(failed), failed)


class TransferWorker:
    """Carries out one rank's jobs in two background threads, one for loads and one for saves.

    `start_loads`, `wait_for_layer`, `wait_for_loads` and `start_saves` are for the computing thread; nothing here
    raises because of a job: what cannot be copied is reported as failed. With `layerwise`, synchronous loads run beside
    the forward pass, else `start_loads` returns when they are done. They are waited for at most `timeout` seconds
    (None: without end); then they are left, and end as failed when the copy does. `fault(job, block)`, for tests, is
    called before each block of an asynchronous load, in the request's numbering; if it raises, that block fails.
    """

    def __init__(
        self,
        paged: PagedKV,
        segment: ArenaSegment,
        rank: int,
        layerwise: bool = True,
        clock: Callable[[], float] = time.monotonic,
        timeout: float | None = None,
        fault: Callable[[LoadJob, int], None] | None = None,
    ) -> None:
        self.rank = rank
        self.counts = TransferCounts()
        self._engine = copy_engine_for(paged, segment)
        self._layer_index = paged.layer_index
        self._num_layers = len(paged.layers)
        self._group_blocks = max(1, GROUP_BYTES // segment.rank_slot_bytes)
        self._block_bytes = sum(paged.layout.layer_page_bytes)
        self._layerwise = layerwise
        self._clock = clock
        self._timeout = timeout
        self._fault = fault
        self._changed = threading.Condition()
        # All below is guarded by _changed; a job stays in its queue until its outcome is recorded.
        self._loads: deque[_Progress] = deque()
        self._saves: deque[_Progress] = deque()
        self._synchronous: list[_Progress] = []
        self._copying: list[_Progress] = []
        """What the loading thread is at: some synchronous loads, or one of the others."""
        self._leave_at = 0.0
        self._layers_arrived = self._num_layers
        self._outcomes: dict[int, JobOutcome] = {}
        self._stopping = False
        self._logged: set[str] = set()
        self._threads = (
            start_background(f"kvpact-load-{rank}", self._run_loads),
            start_background(f"kvpact-save-{rank}", self._run_saves),
        )

    def start_loads(self, jobs: Sequence[LoadJob]) -> None:
        """Begin loads: the synchronous ones at once, before everything else, the others in the background."""
        if not jobs:
            return
        self.wait_for_loads()
        fence = self._engine.fence()
        with self._changed:
            started = [_Progress(job, fence) for job in jobs]
            if self._stopping:
                self._settle(started)
                return
            self._synchronous = [progress for progress in started if _is_synchronous(progress.job)]
            self._loads.extend(progress for progress in started if not _is_synchronous(progress.job))
            if self._synchronous:
                self._layers_arrived = 0
                self._leave_at = time.monotonic() + (self._timeout or 0.0)
            self._changed.notify_all()
        if not self._layerwise:
            self.wait_for_loads()

    def wait_for_layer(self, layer_name: str) -> None:
        """Return when this layer of all synchronous loads has arrived; an unknown name waits for all layers."""
        if self._layers_arrived == self._num_layers:  # the usual case, once per layer and step: no lock
            return
        layer = self._layer_index.get(layer_name, self._num_layers - 1)
        self._wait_until(lambda: self._layers_arrived > layer)

    def wait_for_loads(self) -> None:
        """Return when all synchronous loads have ended; their outcomes are then there to `poll`, but for those left."""
        if self._layers_arrived == self._num_layers:
            return
        self._wait_until(lambda: self._layers_arrived == self._num_layers)

    def _wait_until(self, arrived: Callable[[], bool]) -> None:
        """Wait for layers of synchronous loads, or leave those loads when patience ends."""
        with self._changed:
            timeout = None if self._timeout is None else max(0.0, self._leave_at - time.monotonic())
            if self._changed.wait_for(arrived, timeout):
                return
            if self._copying is not self._synchronous:
                self._settle(self._synchronous)  # the loading thread hangs elsewhere and never began
            for progress in self._synchronous:
                progress.left = True
            self._end_synchronous()

    def leave(self, job_ids: Collection[int]) -> None:
        """Nobody waits for these asynchronous loads any more: they end as failed, at once unless they are being copied.

        What is being copied goes no farther than the call that copies now, which may never return.
        """
        with self._changed:
            for progress in self._loads:
                progress.left |= progress.job.job_id in job_ids
            kept = [progress for progress in self._loads if not progress.left or progress in self._copying]
            self._settle(progress for progress in self._loads if progress not in kept)
            self._loads.clear()
            self._loads.extend(kept)

    def start_saves(self, jobs: Sequence[SaveJob]) -> None:
        """Begin saves in the background, after what the caller has computed. They make way for synchronous loads."""
        if not jobs:
            return
        fence = self._engine.fence()
        with self._changed:
            started = [_Progress(job, fence) for job in jobs]
            if self._stopping:
                self._settle(started)
                return
            self._saves.extend(started)
            self._changed.notify_all()

    def poll(self) -> dict[int, JobOutcome]:
        """Job id -> outcome of the jobs that ended since the last call; done and failed together are the whole job."""
        with self._changed:
            ended, self._outcomes = self._outcomes, {}
        return ended

    @property
    def idle(self) -> bool:
        """Whether every job has ended."""
        return not (self._synchronous or self._loads or self._saves or self._copying)

    def drain(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until every job has ended; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self.idle, timeout)

    def shutdown(self, timeout: float) -> bool:
        """End both threads within `timeout` seconds; unfinished jobs fail. Whether both have ended. Idempotent."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run_loads(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._synchronous or self._loads)
                if self._stopping:
                    self._settle([*self._synchronous, *self._loads])
                    self._loads.clear()
                    self._end_synchronous()
                    return
                progress = None if self._synchronous else self._loads[0]
                self._copying = [] if progress is None else [progress]
            if progress is None:
                self._load_synchronous()
            else:
                self._advance(progress, self._loads, self._engine.scatter, self._load_synchronous)

    def _run_saves(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._saves)
                if self._stopping:
                    self._settle(self._saves)
                    self._saves.clear()
                    self._changed.notify_all()
                    return
                progress = self._saves[0]
            self._advance(progress, self._saves, self._engine.gather, self._let_loads_pass)

    def _load_synchronous(self) -> None:
        """Load the step's synchronous jobs, if any, layer by layer over all of them."""
        if not self._synchronous:
            return
        with self._changed:
            loads, before = self._synchronous, self._copying
            if not loads:  # they were left meanwhile
                return
            self._copying = loads
        began = self._clock()
        copying = []
        for progress in loads:
            try:
                progress.fence()
                copying.append((progress, CopyPlan.of(progress.job.block_ids, progress.job.slots)))
            except Exception as error:
                self._log_once("a synchronous load", error)
        for layer in range(self._num_layers):
            for progress, plan in [(progress, plan) for progress, plan in copying if not progress.left]:
                try:
                    self._engine.scatter(layer, plan)
                except Exception as error:
                    self._log_once("a synchronous load", error)
                    copying.remove((progress, plan))
            if layer < self._num_layers - 1:
                with self._changed:
                    if self._synchronous is loads:
                        self._layers_arrived = layer + 1
                        self._changed.notify_all()
        with self._changed:
            arrived = [progress for progress, _ in copying if not progress.left]
            for progress in arrived:
                progress.position = len(progress.job.slots)
            self._count_load(sum(len(progress.job.slots) for progress in arrived), began)
            self._settle(loads)
            self._copying = before
            if self._synchronous is loads:
                self._end_synchronous()
            self._changed.notify_all()

    def _let_loads_pass(self) -> None:
        """Hold the save thread while a synchronous load wants the memory bus."""
        if self._synchronous:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or not self._synchronous)

    def _advance(
        self,
        progress: _Progress,
        queue: deque[_Progress],
        copy: Callable[[int, CopyPlan], None],
        make_way: Callable[[], None],
    ) -> None:
        """Copy the next group of blocks of the first job in `queue`; at its end record its outcome and remove it."""
        began = self._clock()
        end = min(progress.position + self._group_blocks, len(progress.job.slots))
        wanted = [block for block in range(progress.position, end) if not self._faulty(progress.job, block)]
        arrived = self._copy(progress, wanted, copy, make_way)
        progress.failed.extend(sorted(set(range(progress.position, end)).difference(arrived)))
        progress.position = end
        with self._changed:
            if queue is self._loads:
                self._copying = []
                self._count_load(len(arrived), began)
            else:
                self.counts.save_bytes += len(arrived) * self._block_bytes
                self.counts.save_seconds += self._clock() - began
            if end == len(progress.job.slots) or progress.left:
                self._settle([queue.popleft()])
                self._changed.notify_all()

    def _copy(
        self,
        progress: _Progress,
        blocks: Sequence[int],
        copy: Callable[[int, CopyPlan], None],
        make_way: Callable[[], None],
    ) -> list[int]:
        """Copy all layers of these blocks of a job and return those that arrived: all, or what one by one succeeds."""
        if not blocks:
            return []
        try:
            progress.fence()
            slots = [progress.job.slots[block] for block in blocks]
            plan = CopyPlan.of([progress.job.block_ids[block] for block in blocks], slots)
            for layer in range(self._num_layers):
                make_way()
                if progress.left:
                    return []
                copy(layer, plan)
            return [] if progress.left else list(blocks)
        except Exception as error:
            self._log_once("a load" if isinstance(progress.job, LoadJob) else "a save", error)
            if len(blocks) == 1 or progress.left:
                return []
            return [block for one in blocks for block in self._copy(progress, [one], copy, make_way)]

    def _faulty(self, job: Job, block: int) -> bool:
        """Whether the fault hook wants this block of an asynchronous load to fail."""
        if self._fault is None or not isinstance(job, LoadJob):
            return False
        try:
            self._fault(job, job.start_block + block)
        except Exception as error:
            self._log_once("a load", error)
            return True
        return False

    def _settle(self, ended: Iterable[_Progress]) -> None:
        """Record final outcomes; the caller holds the lock."""
        for progress in ended:
            self._outcomes[progress.job.job_id] = progress.outcome()

    def _end_synchronous(self) -> None:
        """Nobody waits for a synchronous load any more; the caller holds the lock."""
        self._synchronous = []
        self._layers_arrived = self._num_layers
        self._changed.notify_all()

    def _count_load(self, blocks: int, began: float) -> None:
        self.counts.load_bytes += blocks * self._block_bytes
        self.counts.load_seconds += self._clock() - began

    def _log_once(self, what: str, error: Exception) -> None:
        """Say the first failure of a kind with its trace; later ones are in the outcomes."""
        if what not in self._logged:
            self._logged.add(what)
            logger.warning("rank %d: %s failed; such blocks are computed instead", self.rank, what, exc_info=error)


def slot_digest(segment: ArenaSegment, slot: int) -> bytes:
    """16 bytes, xxh3-128 over one rank's piece of a slot; for tests and for finding damage."""
    return xxhash.xxh3_128_digest(segment.slot_view(slot))


def _is_synchronous(job: Job) -> bool:
    return isinstance(job, LoadJob) and job.synchronous


__all__ = ["PagedKV", "TransferCounts", "TransferWorker", "slot_digest"]
