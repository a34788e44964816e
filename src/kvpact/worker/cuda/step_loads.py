"""Loads that a step waits for: on the device, group of layers by group, while the Python thread goes on.

Owns the events of one step's loads, and which streams were told to wait for them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpact.contract import LoadJob
from kvpact.errors import PactViolation
from kvpact.worker.cuda.bounce import Way
from kvpact.worker.cuda.copies import DeviceCopies
from kvpact.worker.cuda.driver import CudaError
from kvpact.worker.cuda.entries import Entries


class StepLoads:
    """Loads that a step waits for: together, group by group. For the computing thread, but `submit`."""

    def __init__(self, copies: DeviceCopies, stream: int, jobs: Sequence[LoadJob]) -> None:
        self._copies, self._stream = copies, stream
        self._changed = threading.Condition()
        self.transfers = [StepTransfer(job, self) for job in jobs]
        self._fence = 0
        """An event: what the computing stream had before."""
        self.error: Exception | None = None
        self.ended = False
        self.cancelled = False
        self._recorded: list[int] = []
        """An event for each group that was submitted."""
        self._submitted = False
        """Whether no more will be."""
        self._ordered: dict[int, int] = {}
        """Stream -> groups that it has been told to wait for."""

    def begin(self) -> bool:
        """They come after what the current stream has now. Returns whether they are to be submitted, or have failed."""
        try:
            if self._copies.error is not None:
                raise self._copies.error
            self._fence = self._copies.events.record(self._copies.current_stream())
        except CudaError as error:
            self._copies.note_error(error)
            self.error, self.ended = error, True
        return not self.ended

    def _build(self) -> list[Entries]:
        """The entries of each group; a job that names a block or a slot that is not there fails alone."""
        good: dict[int, tuple[list[int], list[int]]] = {}
        for transfer in self.transfers:
            job = transfer.job
            try:
                self._copies.require(job)
            except PactViolation as error:
                transfer.refused = error
                continue
            block_ids, slots = good.setdefault(job.group_id, ([], []))
            block_ids += job.block_ids
            slots += job.slots
        return self._copies.by_group(good)

    def submit(self, way: Way) -> None:
        """Put all of them into the engine's stream for it."""
        copies = self._copies
        try:
            copies.driver.stream_wait(self._stream, self._fence)
            for entries in self._build():
                if self.cancelled:
                    break
                if len(entries):
                    way.submit(entries, self._stream)
                self._record()
        except Exception as error:
            self.error = error
            copies.note_error(error)
        finally:
            if len(self._recorded) < len(copies.groups):  # some of a group may be on its way all the same
                try:
                    self._record()
                except CudaError as error:  # the device is lost: nothing is on its way any more
                    self.error = self.error or error
            copies.events.give_back(self._fence)
            with self._changed:
                self._submitted = True
                self._changed.notify_all()

    def _record(self) -> None:
        event = self._copies.events.record(self._stream)
        with self._changed:
            self._recorded.append(event)
            self._changed.notify_all()

    def wait(self, groups: int, seconds: float | None) -> bool:
        """What the current stream gets from now on comes after the first `groups` groups.

        Waits, on the host, only until they were submitted: at most `seconds`.
        """
        if self.ended:
            return True
        if len(self._recorded) < groups and not self._submitted:
            with self._changed:
                if not self._changed.wait_for(lambda: self._submitted or len(self._recorded) >= groups, seconds):
                    return False
        self._order(min(groups, len(self._recorded)))
        return True

    def _order(self, groups: int) -> None:
        """The current stream waits for so many groups; once, and again when it is to wait for more."""
        stream = self._copies.current_stream()
        if groups > self._ordered.get(stream, 0):
            try:
                self._copies.driver.stream_wait(stream, self._recorded[groups - 1])
            except CudaError as error:
                self.error = error
                self._copies.note_error(error)
            self._ordered[stream] = groups

    def poll(self) -> bool:
        """Whether the device has done, or dropped, all that was submitted."""
        if self.ended:
            return True
        if self.cancelled:  # nobody waits for it, and the engine may write to its blocks: after what is on its way
            self._order(len(self._recorded))
        if not self._submitted:
            return False
        try:
            done = not self._recorded or self._copies.driver.is_done(self._recorded[-1])
        except CudaError as error:
            self.error, done = error, True
            self._copies.note_error(error)
        if done:
            self._copies.events.give_back(*self._recorded)
            self.ended = True
        return done

    def synchronize(self, seconds: float | None) -> bool:
        """Wait for their end on the host, at a shutdown; at most `seconds` until they are submitted."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._submitted or self.ended, seconds):
                return False
        try:
            for event in self._recorded[-1:] if not self.ended else ():
                self._copies.driver.synchronize(event)
        except CudaError as error:
            self.error = error
        return self.poll()


@dataclass(slots=True, eq=False)
class StepTransfer:
    """One job of `StepLoads`."""

    job: LoadJob
    batch: StepLoads = field(repr=False)
    refused: Exception | None = None
    """Why it was not begun."""

    @property
    def ended(self) -> bool:
        """See `Transfer`."""
        return self.batch.poll()

    @property
    def error(self) -> Exception | None:
        """See `Transfer`."""
        return self.refused or self.batch.error

    @property
    def failed(self) -> Sequence[int]:
        """See `Transfer`."""
        return range(len(self.job.slots)) if self.error is not None or self.batch.cancelled else ()

    def wait(self, groups: int, seconds: float | None) -> bool:
        """See `Transfer`."""
        return self.batch.wait(groups, seconds)

    def cancel(self) -> None:
        """See `Transfer`."""
        self.batch.cancelled = True
