"""Copies on a device: ordered by streams and events, and put into them a piece at a time by the thread that computes.

Owns four streams: of synchronous loads, of other loads, of short ones among these, and of saves. A load runs behind the
computation before its order, a save behind the forward pass, and the next computation behind the step's loads. The host
waits for no copy.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from sys import maxsize
from typing import Final

from kvpact.contract import LoadJob, SaveJob
from kvpact.errors import PactViolation
from kvpact.memory.arena import ArenaSegment
from kvpact.memory.neighbour_slots import NeighbourSlots
from kvpact.worker.copy.base import Job
from kvpact.worker.device.base import MAX_BATCH_ENTRIES, Addresses, Device, Event, Stream
from kvpact.worker.device.entries import Indexes, JobRuns
from kvpact.worker.device.proof import Check, Proof, Verdict
from kvpact.worker.paged import PagedKV

logger = logging.getLogger(__name__)

STEP_ENTRIES: Final = 4096
"""Most asynchronous copies that a step without decodes gives the device beside its forward pass: 2.5 ms at 0.6 us each.
Beside decodes the scheduler's half sets the limit (`StepWork.max_copies`)."""

PIECE_ENTRIES: Final = 1 << 14
"""Addresses made at a time, for several calls. With a fourth of it, a load of 262,144 copies takes the thread 1.6 times
as long; all addresses at once would take fresh memory."""

SHORT_ENTRIES: Final = STEP_ENTRIES // 2
"""Most copies of a load on a stream of its own, which passes longer ones: few steps submit it."""

POLL_SECONDS: Final = 0.0002


@dataclass(slots=True)
class Room:
    """Copies and bytes that may still be submitted."""

    copies: int = maxsize
    num_bytes: int = maxsize

    @property
    def is_left(self) -> bool:
        """True while neither is used up."""
        return self.copies > 0 and self.num_bytes > 0

    def split_half(self) -> Room:
        """Split one half off, and return it."""
        half = Room(self.copies // 2, self.num_bytes // 2)
        self.copies -= half.copies
        self.num_bytes -= half.num_bytes
        return half

    def give_back(self, other: Room) -> None:
        """Add the rest of `other`, which is negative if that was overdrawn."""
        self.copies += other.copies
        self.num_bytes += other.num_bytes


@dataclass(slots=True, eq=False)
class CopyQueue:
    """Transfers of one kind."""

    stream: Stream
    copy: Callable[[Addresses, Addresses, Addresses, Stream], None]
    """`Device.load` or `Device.save`."""
    in_order: bool = False
    """True if they end in the order in which they were ordered."""
    open: deque[DeviceTransfer] = field(default_factory=deque)
    """Transfers that have not ended, the oldest first."""
    waiting: deque[DeviceTransfer] = field(default_factory=deque)
    """Transfers with blocks that were not submitted to the device, the oldest first."""


@dataclass(slots=True, eq=False)
class DeviceTransfer:
    """Copies of one job. For the computing thread."""

    job: Job
    engine: DeviceTransferEngine = field(repr=False)
    queue: CopyQueue = field(repr=False)
    stream: Stream = field(repr=False)
    has_ended: bool = False
    failed: Sequence[int] = ()
    error: Exception | None = None
    places: tuple[Indexes, Indexes] | None = field(default=None, repr=False)
    """Blocks of the job and offsets of their slots; None once all are submitted, or none is to be copied."""
    position: int = 0
    """Number of blocks submitted to the device."""
    fence: Event = None
    """Event the copies must wait for; None once queued on the stream."""
    event: Event = None
    """Event after all submitted copies of this transfer; None if there are none."""
    is_to_be_checked: bool = False
    """True if it is reported only after its blocks were compared with their slots."""
    check: Check | None = None
    """Comparison of the blocks under way, or ended and not taken in."""

    @property
    def ended(self) -> bool:
        """See `Transfer`. Asks the device."""
        self.engine.poll(self)
        return self.has_ended

    def wait(self, groups: int, seconds: float | None) -> bool:
        """See `Transfer`. Orders the next computation behind a synchronous load, without waiting here."""
        if isinstance(self.job, LoadJob) and self.job.synchronous:
            self.engine.order(self)
            return True
        end = None if seconds is None else time.monotonic() + seconds
        while not self.ended:
            if end is not None and time.monotonic() > end:
                return False
            self.engine.submit_all()
            time.sleep(POLL_SECONDS)
        return True

    @property
    def blocks_left(self) -> int:
        """Number of the job's blocks not submitted to the device."""
        return len(self.places[0]) - self.position if self.places is not None else 0

    def cancel(self) -> None:
        """See `Transfer`. Copies that the device has got go on."""
        self.engine.cancel(self)

    def refuse(self, error: Exception | None) -> None:
        """Fail all of it, whatever arrives of the submitted copies."""
        self.error = error
        self.failed = range(len(self.job.slots))
        self.places = None

    def fail(self, error: Exception | None) -> None:
        """Fail all of it, of which nothing is being copied."""
        self.refuse(error)
        self.event = None


def _oldest(waiting: Sequence[DeviceTransfer]) -> DeviceTransfer:
    return waiting[0]


class DeviceTransferEngine:
    """`TransferEngine` of a device. Layers arrive all at once, before the forward pass."""

    layerwise = False

    def __init__(self, paged: PagedKV, segment: ArenaSegment, device: Device, pinned_bytes: int) -> None:
        """`pinned_bytes` is the size of the segment's pinned pieces. Raises PactViolation like `JobRuns`."""
        self._device = device
        self.proof: Proof | None = None
        """Checks of jobs, once the test of the copies is over."""
        self._runs = JobRuns(paged, segment, pinned_bytes)
        self.groups = _groups_of(paged)
        self._awaited = CopyQueue(device.create_stream(), device.load)
        self._loads = CopyQueue(device.create_stream(), device.load)
        self._saves = CopyQueue(device.create_stream(), device.save, in_order=True)
        self._short_loads = device.create_stream()
        self._closing = False
        self.error: Exception | None = None
        """Reason why no copy is made any more."""
        self._process = os.getpid()

    @property
    def copies_per_block(self) -> int:
        """Most entries per block among the KV cache groups."""
        return max(self._runs.entries_per_block)

    def load(self, jobs: Sequence[LoadJob]) -> Sequence[DeviceTransfer]:
        """See `TransferEngine`. Submits synchronous loads to the device at once."""
        fence = self._fence() if jobs else None
        transfers = [self._opened(job, self._awaited if job.synchronous else self._loads, fence) for job in jobs]
        self._submit_up_to(self._awaited, Room())
        for transfer in transfers if self.proof is not None else ():
            if transfer.queue is self._awaited and transfer.is_to_be_checked:
                self._begin_check(transfer)
        return transfers

    def save(self, jobs: Sequence[SaveJob]) -> Sequence[DeviceTransfer]:
        """See `TransferEngine`. Submits them later, so that the step's tokens do not wait behind them."""
        fence = self._fence() if jobs else None
        return [self._opened(job, self._saves, fence) for job in jobs]

    def submit_some(self, max_copies: int | None = None, max_load_bytes: int | None = None) -> None:
        """See `TransferEngine`. If several loads wait, half goes to the shortest, half to the oldest ones."""
        queues = [queue for queue in (self._loads, self._saves) if queue.waiting]
        most = STEP_ENTRIES if max_copies is None else max_copies
        for queue in queues:
            room = Room(max(1, most // len(queues)))
            if queue is self._loads and max_load_bytes is not None:
                room.num_bytes = max(1, max_load_bytes)
            if queue is self._loads and len(queue.waiting) > 1:
                half = room.split_half()
                self._submit_up_to(queue, half, self._with_least_left)
                room.give_back(half)
            self._submit_up_to(queue, room)

    def submit_all(self) -> None:
        """See `TransferEngine`. Loads come before saves."""
        self._submit_up_to(self._loads, Room(), self._with_least_left)
        self._submit_up_to(self._saves, Room())

    def use_neighbours(self, memory: Mapping[int, NeighbourSlots]) -> None:
        """See `TransferEngine`. Not built yet: the scheduler's half orders no such loads on devices."""

    def rebind(self, paged: PagedKV) -> None:
        """See `TransferEngine`. Slots stay pinned."""
        self._runs.rebind(paged)
        self.groups = _groups_of(paged)
        if self.proof is not None:
            self.proof.begin_anew(paged)

    def close(self, seconds: float) -> bool:
        """See `TransferEngine`. Makes waiting saves. In a forked process the device is the parent's."""
        if self._process != os.getpid():
            return True
        self._closing = True
        self._submit_up_to(self._saves, Room())
        for transfer in list(self._loads.waiting):
            self.cancel(transfer)
        end = time.monotonic() + seconds
        while self._poll_all() and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        if self.proof is not None:
            self.proof.close()
        return not self._poll_all()

    def _fence(self) -> Event | Exception:
        """Event after the calling thread's computation so far, or the error with which the device refused it."""
        try:
            return self.error or self._device.record(self._device.current_stream())
        except Exception as error:
            if not self._is_at_rest():
                self._lose(error)
            return error

    def _opened(self, job: Job, queue: CopyQueue, fence: Event | Exception) -> DeviceTransfer:
        transfer = DeviceTransfer(job, self, queue, queue.stream)
        queue.open.append(transfer)
        if isinstance(fence, Exception) or self._closing:
            transfer.fail(fence if isinstance(fence, Exception) else None)
            self._end(queue)
            return transfer
        transfer.fence = fence
        try:
            if isinstance(job, LoadJob) and job.neighbour:
                raise PactViolation(f"the memory of engine {job.neighbour} of this host cannot be copied to a device")
            transfer.places = self._runs.places(job)
        except PactViolation as error:
            transfer.fail(error)
            return transfer
        if not self._runs.entries_per_block[job.group_id]:  # no layer of the group is on this rank
            transfer.places = None
            transfer.position = len(job.slots)
        else:
            if queue is self._loads and self._entries_left(transfer) <= SHORT_ENTRIES:
                transfer.stream = self._short_loads
            queue.waiting.append(transfer)
            transfer.is_to_be_checked = self.proof is not None and self.proof.wants(job)
        return transfer

    def _entries_left(self, transfer: DeviceTransfer) -> int:
        return transfer.blocks_left * self._runs.entries_per_block[transfer.job.group_id]

    def _with_least_left(self, waiting: Sequence[DeviceTransfer]) -> DeviceTransfer:
        return min(waiting, key=self._entries_left)

    def _submit_up_to(
        self,
        queue: CopyQueue,
        room: Room,
        choose: Callable[[Sequence[DeviceTransfer]], DeviceTransfer] = _oldest,
    ) -> None:
        """Submit waiting copies of the transfers chosen one after another, until `room` is used up."""
        while queue.waiting and self.error is None and room.is_left:
            transfer = choose(queue.waiting)
            try:
                self._submit(transfer, room)
            except Exception as error:
                if not self._fails(transfer, error):
                    break
            if transfer.places is None:
                queue.waiting.remove(transfer)

    def _submit(self, transfer: DeviceTransfer, room: Room) -> None:
        """Submit a transfer's next blocks: a piece, as far as there is `room`, and at least one block."""
        assert transfer.places is not None
        queue = transfer.queue
        group_id = transfer.job.group_id
        blocks, starts = transfer.places
        block_bytes = self._runs.bytes_per_block[group_id]
        fitting = min(room.copies, PIECE_ENTRIES) // self._runs.entries_per_block[group_id]
        count = max(1, min(fitting, room.num_bytes // block_bytes))
        some = slice(transfer.position, transfer.position + count)
        if transfer.fence is not None:
            self._device.stream_wait(transfer.stream, transfer.fence)
            transfer.fence = None
        entries = self._runs.entries(group_id, blocks[some], starts[some])
        for piece in entries.pieces(MAX_BATCH_ENTRIES):
            targets, sources = (piece.host, piece.device) if queue is self._saves else (piece.device, piece.host)
            queue.copy(targets, sources, piece.sizes, transfer.stream)
        transfer.event = self._device.record(transfer.stream)
        transfer.position = min(some.stop, len(blocks))
        if transfer.position == len(blocks):
            transfer.places = None
        room.copies -= len(entries)
        room.num_bytes -= (transfer.position - some.start) * block_bytes

    def poll(self, transfer: DeviceTransfer) -> None:
        """End a transfer whose copies are done and checked."""
        if transfer.has_ended or not self._has_arrived(transfer):
            return
        if transfer.is_to_be_checked:
            self._begin_check(transfer)
        if self._was_checked(transfer) and not transfer.has_ended:
            queue = transfer.queue
            if not queue.in_order or queue.open[0] is transfer:
                queue.open.remove(transfer)
                transfer.has_ended = True

    def _poll_all(self) -> bool:
        """End all transfers whose copies are done; returns whether any are left."""
        queues = (self._awaited, self._loads, self._saves)
        for transfer in [transfer for queue in queues for transfer in queue.open]:
            self.poll(transfer)
        return any(queue.open for queue in queues)

    def _has_arrived(self, transfer: DeviceTransfer) -> bool:
        """True if nothing of a transfer is being copied, and nothing will be."""
        if transfer.places is not None:
            return False
        try:
            return transfer.event is None or self._device.is_done(transfer.event)
        except Exception as error:
            return self._fails(transfer, error)

    def _begin_check(self, transfer: DeviceTransfer) -> None:
        """Begin to compare the blocks of a transfer with their slots.

        Of a synchronous load it ends when the call returns, because the next computation may write to the last block.
        """
        assert self.proof is not None
        transfer.is_to_be_checked = False
        if self.error is not None or transfer.failed or transfer.event is None:
            self.proof.owe(transfer.job)
        elif isinstance(transfer.job, LoadJob) and transfer.job.synchronous:
            transfer.check = self.proof.check_now(transfer.job, transfer.event)
            self._was_checked(transfer)
        else:
            transfer.check = self.proof.begin(transfer.job)

    def _was_checked(self, transfer: DeviceTransfer) -> bool:
        """Take in the verdict on a transfer; False while its check is under way. A wrong copy ends all copies.

        A copy that could not be checked has failed, unless the rank is proven without it.
        """
        check = transfer.check
        if check is None or self.proof is None:
            return True
        if check.verdict is None:
            return False
        transfer.check = None
        if self.error is None:
            self.proof.take(check)
        if check.verdict is Verdict.WRONG:
            self._refute(check.error)
        if check.verdict is Verdict.WRONG or (check.verdict is Verdict.CANNOT_SAY and not self.proof.is_proven):
            transfer.fail(check.error)
        return True

    def _refute(self, error: Exception | None) -> None:
        """End all copies after a wrong one: none is trusted. Transfers under way end when the device is done."""
        if self.error is None:
            self.error = error
            logger.error(
                "kvpact stops loading and saving in this process, and the engine goes on without it: %s. Please report "
                "this",
                error,
            )
        for queue in (self._awaited, self._loads, self._saves):
            queue.waiting.clear()
            for transfer in queue.open:
                transfer.refuse(error)

    def order(self, transfer: DeviceTransfer) -> None:
        """Order the calling thread's next computation behind the submitted copies of a transfer."""
        if transfer.has_ended or transfer.event is None:
            return
        try:
            self._device.stream_wait(self._device.current_stream(), transfer.event)
        except Exception as error:
            self._fails(transfer, error)

    def cancel(self, transfer: DeviceTransfer) -> None:
        """Submit no more of it, and order the next computation, which may write to its blocks, behind its copies."""
        if transfer.places is not None:
            transfer.queue.waiting.remove(transfer)
            transfer.failed = range(transfer.position, len(transfer.job.slots))
            transfer.places = None
        if isinstance(transfer.job, LoadJob):
            self.order(transfer)

    def _fails(self, transfer: DeviceTransfer, error: Exception) -> bool:
        """Fail a transfer after the device refused a call; False if the device is lost, and all have failed."""
        if not self._is_at_rest():
            self._lose(error)
            return False
        transfer.fail(error)
        return True

    def _is_at_rest(self) -> bool:
        """Wait until nothing is being copied; False if the device does not answer."""
        try:
            self._device.synchronize()
        except Exception:
            return False
        return True

    def _lose(self, error: Exception) -> None:
        """Fail all transfers, now and from now on, as the device is lost."""
        self.error = error
        logger.error("the device refuses copies (%s): kvpact loads and saves nothing from now on", error)
        for queue in (self._awaited, self._loads, self._saves):
            queue.waiting.clear()
            for transfer in queue.open:
                transfer.fail(error)
            self._end(queue)

    def _end(self, queue: CopyQueue) -> None:
        """End the transfers of which nothing is being copied; in order, only up to the first other one."""
        for transfer in [*queue.open]:
            if transfer.places is None and transfer.event is None:
                queue.open.remove(transfer)
                transfer.has_ended = True
            elif queue.in_order:
                break


def _groups_of(paged: PagedKV) -> Sequence[range]:
    return paged.in_forward_order(group for group in paged.cache_groups if group)
