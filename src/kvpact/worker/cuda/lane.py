"""Copies in the background: a stream and a thread for each direction, and two pieces in flight.

Owns what was ordered and has not ended. Nobody but its own thread waits for a copy. A slot or a block is let go when
the device has finished with it, never before.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvpact.threads import start_background
from kvpact.worker.copy.base import Job
from kvpact.worker.cuda.bounce import Way
from kvpact.worker.cuda.copies import DeviceCopies
from kvpact.worker.cuda.driver import CudaError

PIECE_BYTES: Final = 32 << 20
"""Bytes of a piece: 0.6 ms of a bus of 55 GB/s, which is how long a small copy may wait behind one."""

PIECES_IN_FLIGHT: Final = 2
"""So that the device has the next piece when it ends one."""


@dataclass(slots=True)
class Fence:
    """What the caller of `Lane.submit` had launched before, for all jobs of the call."""

    event: int
    """0 once the lane's stream waits for it."""


@dataclass(slots=True, eq=False)
class CudaTransfer:
    """One job's copies through a lane. All but reading is guarded by the lane's lock."""

    job: Job
    lane: Lane = field(repr=False)
    fence: Fence | None = field(default=None, repr=False)
    """None if the device refused it."""
    ended: bool = False
    failed: Sequence[int] = ()
    error: Exception | None = None
    position: int = 0
    """Blocks below were submitted."""
    running: bool = False
    """Whether the lane's thread is at it, or pieces of it are in flight."""
    cancelled: bool = False

    def wait(self, groups: int, seconds: float | None) -> bool:
        """See `Transfer`: for its end, on the host."""
        with self.lane.changed:
            return self.lane.changed.wait_for(lambda: self.ended, seconds)

    def cancel(self) -> None:
        """See `Transfer`."""
        with self.lane.changed:
            self.cancelled = True
            if not self.running and not self.ended:
                self.lane.drop(self)


class Lane:
    """Transfers of one direction, in order, a piece at a time on a stream and a thread of their own.

    The stream is destroyed at the end.
    """

    def __init__(self, name: str, copies: DeviceCopies, way: Way, stream: int) -> None:
        self.changed = threading.Condition()
        """Guards all transfers of the lane."""
        self._copies, self._driver, self._events = copies, copies.driver, copies.events
        self._way = way
        self._stream = stream
        self._queue: deque[CudaTransfer] = deque()
        """What has blocks that were not submitted."""
        self._in_flight: deque[tuple[CudaTransfer, int, int, int]] = deque()
        """(transfer, its blocks submitted by then, event, what the way had begun) of each piece."""
        self._closing = False
        self._thread = start_background(name, self._run)

    def submit(self, jobs: Sequence[Job], computing_stream: Callable[[], int]) -> list[CudaTransfer]:
        """Copy these after what the stream `computing_stream()` has now."""
        fence = None
        try:
            if jobs and self._copies.error is None:
                fence = Fence(self._events.record(computing_stream()))
        except CudaError as error:
            self._copies.note_error(error)
        transfers = [CudaTransfer(job, self, fence) for job in jobs]
        with self.changed:
            for transfer in transfers:
                if self._closing or fence is None:
                    self._fail(transfer)
                else:
                    self._queue.append(transfer)
            self.changed.notify_all()
        return transfers

    def drop(self, transfer: CudaTransfer) -> None:
        """End a transfer that has not begun. The caller holds the lock."""
        self._queue.remove(transfer)
        self._fail(transfer)
        self.changed.notify_all()

    def close(self, seconds: float) -> bool:
        """Begin no more pieces. Returns whether those in flight ended within `seconds`."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._driver.attach()
            while (transfer := self._next()) is not None:
                self._advance(transfer)
            self._driver.destroy_stream(self._stream)
        except CudaError as error:
            self._copies.note_error(error)
            with contextlib.suppress(CudaError):  # what was submitted may still be running, unless the device is lost
                self._driver.synchronize(self._events.record(self._stream))
        finally:
            self._end_all()

    def _next(self) -> CudaTransfer | None:
        """The transfer whose next piece is due; None at the end, when nothing is in flight any more."""
        while True:
            with self.changed:
                if not self._in_flight:
                    self.changed.wait_for(lambda: self._closing or self._queue)
                stopped = self._closing or self._copies.error is not None
                if stopped and not self._in_flight:
                    return None
                if self._queue and not stopped and len(self._in_flight) < PIECES_IN_FLIGHT:
                    self._queue[0].running = True
                    return self._queue[0]
            self._finish_oldest()

    def _advance(self, transfer: CudaTransfer) -> None:
        """Submit a transfer's next piece."""
        job, start, cancelled = transfer.job, transfer.position, transfer.cancelled
        end = len(job.slots) if cancelled else min(start + self._copies.blocks_in(PIECE_BYTES, job), len(job.slots))
        fence = transfer.fence
        if fence is not None and fence.event:
            self._driver.stream_wait(self._stream, fence.event)
            self._events.give_back(fence.event)
            fence.event = 0
        copied = False
        try:
            if not cancelled:
                block_ids, slots = job.block_ids[start:end], job.slots[start:end]
                self._way.submit(self._copies.all_layers(block_ids, slots, job.group_id), self._stream)
                copied = True
        except CudaError:
            raise
        except Exception as error:
            transfer.error = error
        if not copied:
            transfer.failed = (*transfer.failed, *range(start, end))
        event = self._events.record(self._stream)
        with self.changed:
            transfer.position = end
            self._in_flight.append((transfer, end, event, self._way.begun))
            if end == len(job.slots):
                self._queue.popleft()

    def _finish_oldest(self) -> None:
        """Wait for the oldest piece in flight."""
        transfer, end, event, begun = self._in_flight[0]
        self._driver.synchronize(event)
        self._events.give_back(event)
        self._way.land(begun)
        with self.changed:
            self._in_flight.popleft()
            if end == len(transfer.job.slots):
                transfer.ended = True
                self.changed.notify_all()

    def _end_all(self) -> None:
        """No copy is made any more, and none is in flight: the device has done them, or is lost."""
        with self.changed:
            self._closing = True
            for transfer in dict.fromkeys([*(piece[0] for piece in self._in_flight), *self._queue]):
                self._fail(transfer)
            self._queue.clear()
            self._in_flight.clear()
            self.changed.notify_all()

    def _fail(self, transfer: CudaTransfer) -> None:
        """All of it has failed, whatever arrived."""
        transfer.error = self._copies.error or transfer.error
        transfer.failed, transfer.ended = range(len(transfer.job.slots)), True
