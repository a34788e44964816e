"""Copies by way of a small pinned buffer, where the slots themselves cannot be pinned: slot, buffer, device.

Owns the buffer, and when a part of it is free: after the device has read it, or after its bytes are in their slots. The
copies on the host are made by the thread that submits, with the interpreter's lock released, at the speed of one core.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvpact.errors import ConfigError
from kvpact.units import format_size
from kvpact.worker.cuda.copies import DeviceCopies, Events
from kvpact.worker.cuda.driver import Addresses, CudaError, Driver
from kvpact.worker.cuda.entries import Entries
from kvpact.worker.cuda.pinned import RAISE_THE_LIMIT

PART_BYTES: Final = 8 << 20
"""Bytes of a part: 0.15 ms of a bus of 55 GB/s, half a millisecond of a core that copies."""

MIN_PART_BYTES: Final = 1 << 20
"""Of a part where that is too much: all parts together are below the usual limit of a container, 8 MiB."""

PARTS: Final = 2
"""For each stream: the device copies one while the host is at the other."""

STREAMS: Final = 3
"""Loads that a step waits for, other loads, saves."""


class Way:
    """How one stream's copies go: straight, because slots are pinned. For one thread at a time."""

    begun = 0
    """Parts of a buffer that copies were put into so far."""

    def __init__(self, copy: Callable[[Entries, int], None]) -> None:
        """`copy(entries, stream)` puts copies between the device and pinned memory into the stream."""
        self._copy = copy

    def submit(self, entries: Entries, stream: int) -> None:
        """Put copies between blocks and slots into `stream`. May wait for earlier ones of the same stream."""
        self._copy(entries, stream)

    def land(self, begun: int) -> None:
        """Do what is left to do on the host for what was submitted when `begun` was this."""


@dataclass(slots=True)
class Part:
    """Pinned memory that is in use from a copy's beginning until it has landed."""

    address: int
    num_bytes: int
    event: int = 0
    """The device has done its copies."""
    landing: tuple[Addresses, Addresses, Addresses] | None = field(default=None, repr=False)
    """What the host copies then: targets, sources, sizes in bytes."""


class _Bounced(Way):
    """By parts of a buffer, in turns. What was begun first lands first."""

    def __init__(self, copies: DeviceCopies, copy: Callable[[Entries, int], None], parts: Sequence[Part]) -> None:
        super().__init__(copy)
        self._driver: Driver = copies.driver
        self._events: Events = copies.events
        self._parts = parts
        self._landed = 0

    def submit(self, entries: Entries, stream: int) -> None:
        """See `Way`."""
        for piece, offsets in cut(entries, self._parts[0].num_bytes):
            self.land(self.begun + 1 - len(self._parts))
            part = self._parts[self.begun % len(self._parts)]
            self._begin(part, piece, offsets + np.uint64(part.address), stream)
            part.event = self._events.record(stream)
            self.begun += 1

    def land(self, begun: int) -> None:
        """See `Way`."""
        while self._landed < begun:
            part = self._parts[self._landed % len(self._parts)]
            self._driver.synchronize(part.event)
            self._events.give_back(part.event)
            self._landed += 1
            if part.landing is not None:
                copy_on_host(*part.landing)

    def _begin(self, part: Part, piece: Entries, addresses: Addresses, stream: int) -> None:
        """Put copies between blocks and the part's `addresses` into the stream."""
        raise NotImplementedError


class BouncedIn(_Bounced):
    """From slots into blocks."""

    def _begin(self, part: Part, piece: Entries, addresses: Addresses, stream: int) -> None:
        copy_on_host(addresses, piece.host, piece.sizes)
        self._copy(Entries(piece.device, addresses, piece.sizes), stream)


class BouncedOut(_Bounced):
    """From blocks into slots."""

    def _begin(self, part: Part, piece: Entries, addresses: Addresses, stream: int) -> None:
        self._copy(Entries(piece.device, addresses, piece.sizes), stream)
        part.landing = (piece.host, addresses, piece.sizes)


class BounceBuffer:
    """Pinned memory of kvpact's own, for the copies of one rank."""

    def __init__(self, driver: Driver) -> None:
        """Raises ConfigError if not even this can be pinned."""
        self._driver = driver
        self._memory: mmap.mmap | None = None
        self.part_bytes, self._address = self._pin()

    def _pin(self) -> tuple[int, int]:
        """Bytes of a part, and the first one's address: memory of the process's own, or else of the driver's."""
        refused: list[CudaError] = []
        for self.part_bytes in (PART_BYTES, MIN_PART_BYTES):
            for pin in (self._register, self._driver.allocate):
                try:
                    return self.part_bytes, pin(self.num_bytes)
                except CudaError as error:
                    refused.append(error)
        self._memory = None
        raise ConfigError(
            f"memory: not even {format_size(self.num_bytes)} can be pinned for copies to the GPU ({refused[-2]}; "
            f"{refused[-1]}); {RAISE_THE_LIMIT}"
        ) from refused[-1]

    def _register(self, num_bytes: int) -> int:
        self._memory = mmap.mmap(-1, num_bytes)  # shared, so that a fork leaves this process the pages that are pinned
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        try:
            self._driver.register(address, num_bytes)
        except CudaError:
            self._memory = None
            raise
        return address

    @property
    def num_bytes(self) -> int:
        """Of all parts, in whole pages."""
        return -(-self.part_bytes * PARTS * STREAMS // mmap.PAGESIZE) * mmap.PAGESIZE

    def parts(self, stream: int) -> list[Part]:
        """Those of one of the `STREAMS`, counted from 0."""
        numbers = range(stream * PARTS, (stream + 1) * PARTS)
        return [Part(self._address + number * self.part_bytes, self.part_bytes) for number in numbers]

    def close(self) -> None:
        """Give the memory back. No copy may be under way. Idempotent."""
        address, self._address = self._address, 0
        with contextlib.suppress(CudaError):  # the device is lost, and its memory with it
            if address:
                self._driver.unregister(address)
        self._memory = None


def ways_of(copies: DeviceCopies, bounce: BounceBuffer | None) -> tuple[Way, Way, Way]:
    """For loads that a step waits for, for other loads, and for saves."""
    if bounce is None:
        return Way(copies.copy_in), Way(copies.copy_in), Way(copies.copy_out)
    step, loads, saves = (bounce.parts(stream) for stream in range(STREAMS))
    return (
        BouncedIn(copies, copies.copy_in, step),
        BouncedIn(copies, copies.copy_in, loads),
        BouncedOut(copies, copies.copy_out, saves),
    )


def cut(entries: Entries, part_bytes: int) -> Iterator[tuple[Entries, Addresses]]:
    """The same runs packed one behind the other into parts of so many bytes, and where in its part each begins.

    A run that reaches over the end of a part becomes two.
    """
    ends = np.cumsum(entries.sizes, dtype=np.uint64)
    starts = ends - entries.sizes
    for low in range(0, entries.num_bytes, part_bytes):
        first, behind = np.uint64(low), np.uint64(low + part_bytes)
        some = slice(np.searchsorted(ends, first, "right"), np.searchsorted(starts, behind, "left"))
        begins = np.maximum(starts[some], first)
        sizes = np.minimum(ends[some], behind) - begins
        skipped = begins - starts[some]
        yield Entries(entries.device[some] + skipped, entries.host[some] + skipped, sizes), begins - first


def copy_on_host(targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
    """Copy runs of bytes between addresses of this process; those that are adjacent on both sides in one go."""
    adjacent = (targets[1:] == targets[:-1] + sizes[:-1]) & (sources[1:] == sources[:-1] + sizes[:-1])
    starts = np.flatnonzero(np.concatenate(([True], ~adjacent)))
    lengths = np.add.reduceat(sizes, starts)
    for target, source, length in zip(
        targets[starts].tolist(), sources[starts].tolist(), lengths.tolist(), strict=True
    ):
        ctypes.memmove(target, source, length)
