"""Copies in host memory: two background threads, one for loads and one for saves, that copy without the GIL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpact.contract import LoadJob, SaveJob
from kvpact.errors import PactViolation
from kvpact.memory.arena import ArenaSegment, SlotClass
from kvpact.threads import start_background
from kvpact.worker.copy.base import Job, require_cache_group
from kvpact.worker.paged import Bytes, CopyPlan, PagedKV

RUN_BYTES: Final = 32 << 10
"""Runs of neighbouring pages shorter than this, on average, are copied by index (benchmarks/copy_paths.py)."""

PIECE_BYTES: Final = 32 << 20
"""A background transfer advances by so many bytes at a time: few calls; between its layers it makes way for others."""


class PageCopier:
    """Copies one group of layers at a time, by numpy: long runs one call each, scattered small pages by index.

    For one class of slots; plans count them from its first one.
    """

    def __init__(self, paged: PagedKV, segment: ArenaSegment, slot_class: SlotClass) -> None:
        slot_bytes, self._num_slots = slot_class.slot_bytes, len(slot_class.slots)
        if paged.rank_slot_bytes > slot_bytes:
            raise PactViolation(
                f"one block of this engine takes {paged.rank_slot_bytes} bytes, a slot has only {slot_bytes}"
            )
        self._num_blocks = paged.num_blocks
        arena = np.frombuffer(segment.class_view(slot_class), np.uint8).reshape(self._num_slots, slot_bytes)
        joined = [paged.joined(group) for group in paged.groups]
        starts = [paged.layer_offsets[group.start] for group in paged.groups]
        self.pages: list[Bytes] = [layer.view() for layer in joined]
        """Of each group, `[num_blocks, chunks, chunk_bytes]`."""
        self.pieces: list[Bytes] = [
            arena[:, start : start + layer.page_bytes].reshape(len(arena), layer.chunks, layer.chunk_bytes)
            for layer, start in zip(joined, starts, strict=True)
        ]
        """The same of the class's slots, in the order of their numbers."""
        if not all(np.shares_memory(piece[0], arena[0]) for piece in self.pieces):
            raise PactViolation("the view of a layer's slots is a copy of them")

    def gather(self, group: int, plan: CopyPlan) -> None:
        """Pages into slots. Raises PactViolation, and copies nothing, if one of them is not there."""
        self._check(plan)
        runs = ((slot, block, count) for block, slot, count in plan.runs)
        _copy(self.pieces[group], plan.slots, self.pages[group], plan.block_ids, runs, len(plan.runs))

    def scatter(self, group: int, plan: CopyPlan) -> None:
        """Slots into pages. Raises like `gather`."""
        self._check(plan)
        _copy(self.pages[group], plan.block_ids, self.pieces[group], plan.slots, plan.runs, len(plan.runs))

    def _check(self, plan: CopyPlan) -> None:
        for block_id, slot, count in plan.runs:
            if not (0 <= block_id <= self._num_blocks - count and 0 <= slot <= self._num_slots - count):
                raise PactViolation(
                    f"blocks {block_id} to {block_id + count - 1} of {self._num_blocks} and slots {slot} to "
                    f"{slot + count - 1} of {self._num_slots} cannot be copied: outside the memory"
                )


def _copy(
    target: Bytes,
    to: npt.NDArray[np.intp],
    source: Bytes,
    of: npt.NDArray[np.intp],
    runs: Iterable[tuple[int, int, int]],
    num_runs: int,
) -> None:
    if num_runs > 1 and len(of) * source[0].nbytes < RUN_BYTES * num_runs:
        target[to] = source[of]
        return
    for first, first_source, count in runs:
        np.copyto(target[first : first + count], source[first_source : first_source + count])


@dataclass(slots=True, eq=False)
class CpuTransfer:
    """One job's copies. `queue` has it until it ends; all but reading is guarded by `changed`."""

    job: Job
    changed: threading.Condition = field(repr=False)
    queue: MutableSequence[CpuTransfer] = field(repr=False)
    ended: bool = False
    failed: tuple[int, ...] = ()
    error: Exception | None = None
    groups_arrived: int = 0
    position: int = 0
    """Blocks below have been tried."""
    running: bool = False
    """Whether a thread is at it."""
    cancelled: bool = False

    def wait(self, groups: int, seconds: float | None) -> bool:
        """See `Transfer`."""
        if self.ended or self.groups_arrived >= groups:  # the usual case, once a layer and step: no lock
            return True
        with self.changed:
            return self.changed.wait_for(lambda: self.ended or self.groups_arrived >= groups, seconds)

    def cancel(self) -> None:
        """See `Transfer`."""
        with self.changed:
            self.cancelled = True
            if not self.running and not self.ended:
                self.end(self.failed)

    def end(self, failed: Iterable[int]) -> None:
        """These blocks failed, and all that were not tried. The caller holds the lock."""
        self.failed = (*failed, *range(self.position, len(self.job.slots)))
        self.ended = True
        self.queue.remove(self)
        self.changed.notify_all()


class CpuTransferEngine:
    """See `TransferEngine`. Copies between these layers and the slots of one class."""

    def __init__(self, paged: PagedKV, segment: ArenaSegment, slot_class: SlotClass, rank: int) -> None:
        self._segment, self._slot_class = segment, slot_class
        self.rebind(paged)
        self._first_slot = slot_class.slots.start
        self._changed = threading.Condition()
        # All below is guarded by _changed.
        self._urgent: list[CpuTransfer] = []
        """Synchronous loads."""
        self._loads: list[CpuTransfer] = []
        self._saves: list[CpuTransfer] = []
        self._closing = False
        self._running = 2
        """Threads that have not ended."""
        self._threads = (
            start_background(f"kvpact-load-{rank}", self._run_loads),
            start_background(f"kvpact-save-{rank}", self._run_saves),
        )

    def load(self, jobs: Sequence[LoadJob]) -> Sequence[CpuTransfer]:
        """See `TransferEngine`."""
        return self._submit(jobs)

    def save(self, jobs: Sequence[SaveJob]) -> Sequence[CpuTransfer]:
        """See `TransferEngine`."""
        return self._submit(jobs)

    def rebind(self, paged: PagedKV) -> None:
        """See `TransferEngine`."""
        self.groups = paged.groups
        self._cache_groups = [paged.cache_group_of(group.start) for group in paged.groups]
        """Of each of `groups`, its KV cache group."""
        self._groups_in = [
            [number for number, one in enumerate(self._cache_groups) if one == cache_group]
            for cache_group in range(len(paged.cache_groups))
        ]
        """Of each KV cache group, the numbers of its `groups`."""
        self._block_bytes = [max(1, layout.rank_slot_bytes) for layout in paged.layouts]
        """Of each KV cache group."""
        self.copier = PageCopier(paged, self._segment, self._slot_class)
        """How a group is copied; both threads call it."""

    def close(self, seconds: float) -> bool:
        """See `TransferEngine`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            ended = self._changed.wait_for(lambda: not self._running, seconds)
        for thread in self._threads if ended else ():
            thread.join()
        return ended

    def _submit(self, jobs: Sequence[Job]) -> Sequence[CpuTransfer]:
        submitted = [CpuTransfer(job, self._changed, self._queue_of(job)) for job in jobs]
        with self._changed:
            for transfer in submitted:
                transfer.queue.append(transfer)
                if self._closing:
                    transfer.end(())
            self._changed.notify_all()
        return submitted

    def _queue_of(self, job: Job) -> list[CpuTransfer]:
        if isinstance(job, SaveJob):
            return self._saves
        return self._urgent if job.synchronous else self._loads

    def _run_loads(self) -> None:
        while (transfer := self._next(self._urgent, self._loads)) is not None:
            if transfer.queue is self._urgent:
                self._load_urgent()
            else:
                self._advance(transfer, self.copier.scatter, self._load_urgent)

    def _run_saves(self) -> None:
        while (transfer := self._next(self._saves)) is not None:
            self._advance(transfer, self.copier.gather, self._let_loads_pass)

    def _next(self, *queues: list[CpuTransfer]) -> CpuTransfer | None:
        """Wait for a transfer, the first queue's before others; None at the end, when all of them have failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or any(queues))
            if self._closing:
                for transfer in [transfer for queue in queues for transfer in queue]:
                    transfer.end(transfer.failed)
                self._running -= 1
                self._changed.notify_all()
                return None
            transfer = next(queue[0] for queue in queues if queue)
            transfer.running = transfer.queue is not self._urgent
            return transfer

    def _load_urgent(self) -> None:
        """Carry out the urgent loads, if any, group by group over all of them."""
        if not self._urgent:
            return
        with self._changed:
            batch = list(self._urgent)
            for transfer in batch:
                transfer.running = True
        plans: dict[CpuTransfer, CopyPlan] = {}
        for transfer in batch:
            try:
                self._groups_of(transfer.job)
                plans[transfer] = CopyPlan.of(transfer.job.block_ids, transfer.job.slots, self._first_slot)
            except Exception as error:
                transfer.error = error
        for group, cache_group in enumerate(self._cache_groups):
            for transfer in batch:
                if transfer.cancelled or transfer.error is not None or transfer.job.group_id != cache_group:
                    continue
                try:
                    self.copier.scatter(group, plans[transfer])
                except Exception as error:
                    transfer.error = error
            if group < len(self.groups) - 1:  # the last one arrives with the end
                with self._changed:
                    for transfer in batch:
                        transfer.groups_arrived = group + 1
                    self._changed.notify_all()
        with self._changed:
            for transfer in batch:
                if not transfer.cancelled and transfer.error is None:
                    transfer.position = len(transfer.job.slots)
                transfer.end(())

    def _let_loads_pass(self) -> None:
        """Hold the save thread while a load that somebody waits for wants the memory bus."""
        if self._urgent:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or all(transfer.cancelled for transfer in self._urgent))

    def _advance(
        self, transfer: CpuTransfer, copy: Callable[[int, CopyPlan], None], make_way: Callable[[], None]
    ) -> None:
        """Copy the next piece of a transfer, and end it after the last one."""
        job, start = transfer.job, transfer.position
        piece = range(start, min(start + self._piece_blocks(job), len(job.slots)))
        arrived = set(self._copy(transfer, piece, copy, make_way))
        with self._changed:
            transfer.failed += tuple(block for block in piece if block not in arrived)
            transfer.position = piece.stop
            transfer.running = False
            if transfer.cancelled or piece.stop == len(job.slots):
                transfer.end(transfer.failed)

    def _piece_blocks(self, job: Job) -> int:
        known = 0 <= job.group_id < len(self._block_bytes)
        return max(1, PIECE_BYTES // self._block_bytes[job.group_id]) if known else len(job.slots)

    def _groups_of(self, job: Job) -> list[int]:
        """The numbers of `groups` that a job copies. Raises PactViolation if there is no such KV cache group."""
        require_cache_group(job.group_id, len(self._groups_in))
        return self._groups_in[job.group_id]

    def _copy(
        self,
        transfer: CpuTransfer,
        blocks: Sequence[int],
        copy: Callable[[int, CopyPlan], None],
        make_way: Callable[[], None],
    ) -> Sequence[int]:
        """Copy all layers of these blocks of a job and return those that arrived: all, or what one by one succeeds."""
        job = transfer.job
        try:
            block_ids, slots = [job.block_ids[block] for block in blocks], [job.slots[block] for block in blocks]
            plan = CopyPlan.of(block_ids, slots, self._first_slot)
            for group in self._groups_of(job):
                make_way()
                if transfer.cancelled:
                    return ()
                copy(group, plan)
            return () if transfer.cancelled else blocks
        except Exception as error:
            transfer.error = error
            if len(blocks) == 1 or transfer.cancelled:
                return ()
            return [block for one in blocks for block in self._copy(transfer, [one], copy, make_way)]
