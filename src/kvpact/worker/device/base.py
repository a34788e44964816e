"""Protocol of a device for copies: streams, events, batches of copies, pinned host memory.

The engine's own device is `kvpact.vllm.device`; the test kit has a simulated one. Streams and events are opaque objects
of the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Addresses: TypeAlias = npt.NDArray[np.int64]
Stream: TypeAlias = Any
Event: TypeAlias = Any
Result = TypeVar("Result")

MAX_BATCH_ENTRIES: Final = 4096
"""Copies in one call. A driver has crashed at 51,828 of them (vllm#49276)."""


class Device(Protocol):
    """Device for copies. Methods pass on its libraries' errors. Threads but the engine's call `attach` first."""

    name: str
    """Name of the device and its driver, for people."""
    pinned: bool
    """True if the host memory of copies is pinned; set by its registration before the first copy."""

    def attach(self) -> None:
        """Use the device on the calling thread, without harm to a graph that another thread captures meanwhile."""

    def create_stream(self) -> Stream:
        """Create a stream that waits for no other one by itself."""

    def current_stream(self) -> Stream:
        """Stream of the calling thread's computation."""

    def record(self, stream: Stream) -> Event:
        """Record an event, done when all that is in the stream now is done."""

    def stream_wait(self, stream: Stream, event: Event) -> None:
        """Begin all work put into the stream from now on after the event. The caller does not wait."""

    def is_done(self, event: Event) -> bool:
        """True if the event is done. Does not wait."""

    def seconds_between(self, begin: Event, end: Event) -> float:
        """Device's time from one event to a later one, both done; asked for under a `Timeline` only."""

    def synchronize(self) -> None:
        """Wait until nothing is under way on the device."""

    def load(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: Stream) -> None:
        """Put copies from host memory into the stream, at most `MAX_BATCH_ENTRIES`, in any order among them.

        A source may be read at any time until its copy is done: it must not change. The arrays may be reused when the
        call returns.
        """

    def save(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: Stream) -> None:
        """Put copies into host memory into the stream; a source is read in the order of the stream. See `load`."""

    def run(self, stream: Stream, work: Callable[[], Result]) -> Result:
        """Call `work` and return its result; it uses this stream and waits for the work it put there."""

    def register(self, address: int, num_bytes: int) -> bool:
        """Pin whole pages of host memory; returns False if they cannot be pinned, which does no other harm."""

    def unregister(self, address: int) -> None:
        """Unpin the memory registered from `address` on."""
