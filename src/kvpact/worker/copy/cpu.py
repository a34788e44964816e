"""Copies in host memory: two background threads, one for loads and one for saves, that copy without the GIL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpact.contract import LoadJob, SaveJob
from kvpact.errors import PactViolation
from kvpact.index.classed_slots import MAX_PLACES
from kvpact.index.slot_space import EXTENT_SHIFT
from kvpact.memory.arena import ArenaSegment, SlotClass
from kvpact.memory.layout import PAGE_BYTES
from kvpact.memory.neighbour_slots import NeighbourSlots
from kvpact.threads import start_background
from kvpact.worker.copy.base import Job, group_classes, require_cache_group
from kvpact.worker.paged import Bytes, CopyPlan, PagedKV

RUN_BYTES: Final = 32 << 10
"""Runs of neighbouring pages shorter than this, on average, are copied by index (benchmarks/copy_paths.py)."""

PIECE_BYTES: Final = 32 << 20
"""Bytes of one advance of a background transfer: few calls; between its layers it lets urgent loads pass."""


class Slots:
    """Slots of one class as rows of bytes; `slice` and `rows` find those of a plan, which counts as the class does.

    Where classes share extents a row begins at every page of the segment, and a slot takes several of them.
    """

    def __init__(self, segment: ArenaSegment | NeighbourSlots, slot_class: SlotClass) -> None:
        size = slot_class.slot_bytes
        self.slot_class = slot_class
        memory = np.frombuffer(segment.memory[slot_class.offset : slot_class.end], np.uint8)
        self.count = 0 if slot_class.extent_bytes else len(slot_class.slots)
        """Number of adjacent slots; 0 if classes share extents."""
        self._pages = size // PAGE_BYTES
        self._extent_pages = slot_class.extent_bytes // PAGE_BYTES
        if self.count:
            self.bytes: Bytes = memory.reshape(-1, size)
        else:
            shape = ((len(memory) - size) // PAGE_BYTES + 1, size)
            self.bytes = np.lib.stride_tricks.as_strided(memory, shape, (PAGE_BYTES, 1))
        """`[rows, slot bytes]`."""

    def slice(self, slot: int, count: int) -> slice:
        """Rows of neighbouring slots."""
        if self.count:
            return slice(slot, slot + count)
        row = (slot >> EXTENT_SHIFT) * self._extent_pages + (slot & MAX_PLACES - 1) * self._pages
        return slice(row, row + (count - 1) * self._pages + 1, self._pages)

    def rows(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Row of each slot."""
        if self.count:
            return slots
        return (slots >> EXTENT_SHIFT) * self._extent_pages + (slots & MAX_PLACES - 1) * self._pages

    def has(self, slot: int, count: int) -> bool:
        """True if these neighbouring slots exist."""
        if self.count:
            return 0 <= slot <= self.count - count
        first = self.slot_class.slots.start + slot
        return self.slot_class.has(first) and self.slot_class.has(first + count - 1)


class PageCopier:
    """Copies one group of layers at a time, by numpy: long runs one call each, scattered small pages by an index array.

    Each KV cache group has slots of its size's class, or of the only one; plans count them from the class's first one.
    """

    def __init__(
        self, paged: PagedKV, segment: ArenaSegment | NeighbourSlots, slot_classes: Sequence[SlotClass]
    ) -> None:
        each = group_classes(paged, slot_classes)
        of_class = {one: Slots(segment, one) for one in each}
        self._num_blocks = paged.num_blocks
        of_groups = [of_class[each[paged.cache_group_of(group.start)]] for group in paged.groups]
        self._slots = of_groups
        joined = [paged.joined(group) for group in paged.groups]
        starts = [paged.layer_offsets[group.start] for group in paged.groups]
        self.pages: list[Bytes] = [layer.view() for layer in joined]
        """Pages per group of layers, as `[num_blocks, chunks, chunk_bytes]`."""
        self.pieces: list[Bytes] = [
            slots.bytes[:, start : start + layer.page_bytes].reshape(-1, layer.chunks, layer.chunk_bytes)
            for slots, layer, start in zip(of_groups, joined, starts, strict=True)
        ]
        """Pieces of the class's slots per group of layers, as `[slots, chunks, chunk_bytes]`, by slot number."""
        for piece, slots in zip(self.pieces, of_groups, strict=True):
            if not np.shares_memory(piece[0], slots.bytes[0]):
                raise PactViolation("the view of a layer's slots is a copy of them")

    def gather(self, group: int, plan: CopyPlan) -> None:
        """Copy pages into slots. Raises PactViolation, and copies nothing, if one of them does not exist."""
        slots = self._slots[group]
        self._check(plan, slots)
        runs = ((slots.slice(slot, count), slice(block, block + count)) for block, slot, count in plan.runs)
        _copy(self.pieces[group], slots.rows(plan.slots), self.pages[group], plan.block_ids, runs, len(plan.runs))

    def scatter(self, group: int, plan: CopyPlan) -> None:
        """Copy slots into pages. Raises like `gather`."""
        slots = self._slots[group]
        self._check(plan, slots)
        runs = ((slice(block, block + count), slots.slice(slot, count)) for block, slot, count in plan.runs)
        _copy(self.pages[group], plan.block_ids, self.pieces[group], slots.rows(plan.slots), runs, len(plan.runs))

    def _check(self, plan: CopyPlan, slots: Slots) -> None:
        for block_id, slot, count in plan.runs:
            if not (0 <= block_id <= self._num_blocks - count and slots.has(slot, count)):
                raise PactViolation(
                    f"blocks {block_id} to {block_id + count - 1} of {self._num_blocks} and slots {slot} to "
                    f"{slot + count - 1} of {slots.slot_class} cannot be copied: outside the memory"
                )


def _copy(
    target: Bytes,
    to: npt.NDArray[np.intp],
    source: Bytes,
    of: npt.NDArray[np.intp],
    runs: Iterable[tuple[slice, slice]],
    num_runs: int,
) -> None:
    if num_runs > 1 and len(of) * source[0].nbytes < RUN_BYTES * num_runs:
        target[to] = source[of]
        return
    if num_runs == len(of):  # numbers cost a sixth of slices, which add a third to a copy of 64 KiB
        for row, source_row in zip(to.tolist(), of.tolist(), strict=True):
            target[row] = source[source_row]
        return
    for rows, source_rows in runs:
        target[rows] = source[source_rows]


@dataclass(slots=True, eq=False)
class CpuTransfer:
    """Copies of one job. `queue` has it until it ends; `changed` guards all but reading."""

    job: Job
    changed: threading.Condition = field(repr=False)
    queue: MutableSequence[CpuTransfer] = field(repr=False)
    ended: bool = False
    failed: tuple[int, ...] = ()
    error: Exception | None = None
    groups_arrived: int = 0
    position: int = 0
    """Number of blocks that have been tried."""
    running: bool = False
    """True while a thread copies it."""
    cancelled: bool = False

    def wait(self, groups: int, seconds: float | None) -> bool:
        """See `Transfer`. Takes no lock if the groups have arrived."""
        if self.ended or self.groups_arrived >= groups:  # the usual case, once a layer and step: no lock
            return True
        with self.changed:
            return self.changed.wait_for(lambda: self.ended or self.groups_arrived >= groups, seconds)

    def cancel(self) -> None:
        """See `Transfer`. A running copy ends after its piece."""
        with self.changed:
            self.cancelled = True
            if not self.running and not self.ended:
                self.end(self.failed)

    def end(self, failed: Iterable[int]) -> None:
        """End the transfer: these blocks failed, and all not tried. The caller holds the lock."""
        self.failed = (*failed, *range(self.position, len(self.job.slots)))
        self.ended = True
        self.queue.remove(self)
        self.changed.notify_all()


class CpuTransferEngine:
    """`TransferEngine` in host memory, between these layers and the slots of these classes."""

    layerwise = True
    copies_per_block = 0

    def __init__(self, paged: PagedKV, segment: ArenaSegment, slot_classes: Sequence[SlotClass], rank: int) -> None:
        self._segment = segment
        self._slot_classes = slot_classes
        self._others: dict[int, tuple[NeighbourSlots, PageCopier]] = {}
        """Memory of other engines, by number, each with its copier; replaced whole."""
        self.rebind(paged)
        self._changed = threading.Condition()
        # All below is guarded by _changed.
        self._urgent: list[CpuTransfer] = []
        """Synchronous loads."""
        self._loads: list[CpuTransfer] = []
        self._saves: list[CpuTransfer] = []
        self._closing = False
        self._running = 2
        """Number of threads that have not ended."""
        self._threads = (
            start_background(f"kvpact-load-{rank}", self._run_loads),
            start_background(f"kvpact-save-{rank}", self._run_saves),
        )

    def load(self, jobs: Sequence[Job]) -> Sequence[CpuTransfer]:
        """See `TransferEngine`. After `close` every load fails at once."""
        submitted = [CpuTransfer(job, self._changed, self._queue_of(job)) for job in jobs]
        with self._changed:
            for transfer in submitted:
                transfer.queue.append(transfer)
                if self._closing:
                    transfer.end(())
            self._changed.notify_all()
        return submitted

    save = load

    def submit_some(self, max_copies: int | None = None, max_load_bytes: int | None = None) -> None:
        """See `TransferEngine`. The threads have all jobs already."""

    submit_all = submit_some

    def use_neighbours(self, memory: Mapping[int, NeighbourSlots]) -> None:
        """Copy from these engines' slots, too; see `TransferEngine`."""
        known = self._others
        self._others = {
            number: known[number] if number in known else (slots, PageCopier(self._paged, slots, slots.classes))
            for number, slots in memory.items()
        }

    def rebind(self, paged: PagedKV) -> None:
        """Take the layout of other pages; no copy may be under way."""
        self._paged = paged
        memory = {number: slots for number, (slots, _) in self._others.items()}
        self._others = {}
        self.use_neighbours(memory)
        self.groups = paged.groups
        self._cache_groups = [paged.cache_group_of(group.start) for group in paged.groups]
        """KV cache group of each of `groups`."""
        self._groups_in = [
            [number for number, one in enumerate(self._cache_groups) if one == cache_group]
            for cache_group in range(len(paged.cache_groups))
        ]
        """Numbers of `groups` per KV cache group."""
        self._block_bytes = [max(1, layout.rank_slot_bytes) for layout in paged.layouts]
        """Bytes of a block per KV cache group; at least 1."""
        each = group_classes(paged, self._slot_classes)
        self._first_slots = [one.slots.start for one in each]
        """Number of its class's first slot, per KV cache group."""
        self.copier = PageCopier(paged, self._segment, self._slot_classes)
        """Copier of both threads."""

    def close(self, seconds: float) -> bool:
        """End both threads, in at most `seconds`; True if they have ended."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            ended = self._changed.wait_for(lambda: not self._running, seconds)
        for thread in self._threads if ended else ():
            thread.join()
        return ended

    def _queue_of(self, job: Job) -> list[CpuTransfer]:
        if isinstance(job, SaveJob):
            return self._saves
        return self._urgent if job.synchronous else self._loads

    def _run_loads(self) -> None:
        while (transfer := self._next(self._urgent, self._loads)) is not None:
            if transfer.queue is self._urgent:
                self._load_urgent()
            else:
                self._advance(transfer, partial(self._scatter, transfer.job), self._load_urgent)

    def _run_saves(self) -> None:
        while (transfer := self._next(self._saves)) is not None:
            self._advance(transfer, self.copier.gather, self._let_loads_pass)

    def _next(self, *queues: list[CpuTransfer]) -> CpuTransfer | None:
        """Wait for a transfer, the first queue's before others; None when closing, when all of them have failed."""
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
                plans[transfer] = self._plan(transfer.job, transfer.job.block_ids, transfer.job.slots)
            except Exception as error:
                transfer.error = error
        for group, cache_group in enumerate(self._cache_groups):
            for transfer in batch:
                if transfer.cancelled or transfer.error is not None or transfer.job.group_id != cache_group:
                    continue
                try:
                    self._scatter(transfer.job, group, plans[transfer])
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

    def _scatter(self, job: Job, group: int, plan: CopyPlan) -> None:
        """Copy slots into pages. Raises PactViolation if they are not there, or are another engine's and not to be used
        by now."""
        if not isinstance(job, LoadJob) or not job.neighbour:
            self.copier.scatter(group, plan)
            return
        found = self._others.get(job.neighbour)
        if found is None:
            raise PactViolation(f"the memory of engine {job.neighbour} of this host is not mapped")
        slots, copier = found
        copier.scatter(group, plan)
        if slots.is_refused:
            raise PactViolation(f"engine {job.neighbour} of this host lets nobody use its blocks any more")

    def _let_loads_pass(self) -> None:
        """Block the save thread while a synchronous load needs the memory bus."""
        if self._urgent:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or all(transfer.cancelled for transfer in self._urgent))

    def _advance(
        self, transfer: CpuTransfer, copy: Callable[[int, CopyPlan], None], make_way: Callable[[], None]
    ) -> None:
        """Copy the next piece of a transfer, and end it after the last one."""
        job = transfer.job
        start = transfer.position
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

    def _plan(self, job: Job, block_ids: Sequence[int], slots: Sequence[int]) -> CopyPlan:
        return CopyPlan.of(block_ids, slots, self._first_slots[job.group_id])

    def _groups_of(self, job: Job) -> list[int]:
        """Numbers of `groups` that a job copies. Raises PactViolation if there is no such KV cache group."""
        require_cache_group(job.group_id, len(self._groups_in))
        return self._groups_in[job.group_id]

    def _copy(
        self,
        transfer: CpuTransfer,
        blocks: Sequence[int],
        copy: Callable[[int, CopyPlan], None],
        make_way: Callable[[], None],
    ) -> Sequence[int]:
        """Copy all layers of these blocks of a job, after an error one by one; returns the blocks that arrived."""
        job = transfer.job
        try:
            groups = self._groups_of(job)
            slots = [job.slots[block] for block in blocks]
            plan = self._plan(job, [job.block_ids[block] for block in blocks], slots)
            for group in groups:
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
