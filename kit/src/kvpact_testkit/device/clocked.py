"""A device with a clock: bytes over a bandwidth, a cost for each copy, one copy engine for each direction.

Owns the time of the host and of each stream, in seconds that nobody waits for. Copies move no bytes: what they bring is
the hostile driver's to prove. It is not calibrated: its times compare rules, and are no result about any GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvpact.worker.device.base import Addresses

Result = TypeVar("Result")

COMPUTING_STREAM = 0


class ClockedDevice:
    """See `kvpact.worker.device.base.Device`; an event is the time at which it is done.

    A direction's engine makes copies in the order in which they were submitted, whatever their streams: a short copy
    waits behind long ones of its direction (NVIDIA/cudf#15620). Both directions go at once.
    """

    name = "a clocked device"
    pinned = True

    def __init__(self, bytes_per_second: float = 55e9, copy_seconds: float = 0.6e-6, bytes_per_byte: int = 1) -> None:
        """Each byte of memory stands for `bytes_per_byte`, so that a model of any size takes little of it."""
        self.now = 0.0
        """The host's time."""
        self.given_seconds = 0.0
        """Time that the host has spent on giving copies to the device."""
        self.idle_until = {"loads": 0.0, "saves": 0.0}
        """End of the last copy that each direction's engine has."""
        self._copy_seconds = copy_seconds
        self._seconds_per_byte = bytes_per_byte / bytes_per_second
        self._streams = {COMPUTING_STREAM: 0.0}
        """Stream -> end of what it has."""

    def compute(self, seconds: float) -> float:
        """Put work into the computing stream; returns the time for which that waits for events from now on."""
        begins = max(self.now, self._streams[COMPUTING_STREAM])
        self._streams[COMPUTING_STREAM] = begins + seconds
        return begins - self.now

    def finish_computing(self) -> None:
        """Have the host wait for what the computing stream has now."""
        self.now = max(self.now, self._streams[COMPUTING_STREAM])

    def attach(self) -> None:
        """Any thread may use it."""

    def create_stream(self) -> int:
        """Return the number of a new stream."""
        stream = len(self._streams)
        self._streams[stream] = 0.0
        return stream

    def current_stream(self) -> int:
        """All threads compute on one."""
        return COMPUTING_STREAM

    def record(self, stream: int) -> float:
        """Time at which all is done that is in the stream."""
        return max(self.now, self._streams[stream])

    def stream_wait(self, stream: int, event: float) -> None:
        """Have what is put into the stream from now on begin after the event."""
        self._streams[stream] = max(self._streams[stream], event)

    def is_done(self, event: float) -> bool:
        """True once the host's time is the event's."""
        return event <= self.now

    def seconds_between(self, begin: float, end: float) -> float:
        """Time from one event to the other."""
        return end - begin

    def synchronize(self) -> None:
        """Have the host wait for all streams."""
        self.now = max(self.now, *self._streams.values())

    def load(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        """Put copies into the stream; the host takes its time for each."""
        self._copy("loads", sizes, stream)

    def save(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        """Like `load`, in the other direction."""
        self._copy("saves", sizes, stream)

    def _copy(self, direction: str, sizes: Addresses, stream: int) -> None:
        seconds = len(sizes) * self._copy_seconds
        self.given_seconds += seconds
        self.now += seconds  # the engine begins when the call returns
        begins = max(self.now, self._streams[stream], self.idle_until[direction])
        self._streams[stream] = self.idle_until[direction] = begins + int(sizes.sum()) * self._seconds_per_byte

    def run(self, stream: int, work: Callable[[], Result]) -> Result:
        """Have the host wait for the stream, then do `work`, which takes no time."""
        self.now = self.record(stream)
        return work()

    def register(self, address: int, num_bytes: int) -> bool:
        """Take any memory as pinned."""
        return True

    def unregister(self, address: int) -> None:
        """Take it as not pinned."""
