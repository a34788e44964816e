"""Pinning of a segment's slots: chunk by chunk in the background, low slots first.

Owns the registrations and the number of usable slots. Registering takes about 0.1 s per GiB and stalls other calls of
the driver meanwhile, so no chunk is large, and its pages are taken from the machine before; an engine starts with the
first ones.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kvpact.memory.arena import ArenaSegment, SlotClass
from kvpact.memory.shared_slots import take_turn
from kvpact.threads import start_background
from kvpact.units import format_size
from kvpact.worker.device.base import Device
from kvpact.worker.round_trip import TRIAL_SLOTS

logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 64 << 20
"""Most bytes of a registration: about 6 ms, for which other calls of the driver wait.

Rounded down to whole slots; a larger slot is one registration. One of 512 GiB fails (vllm#51081); Linux 6.11 to 6.13
take at most 2 GiB."""

FIRST_BYTES: Final = 4 << 30
"""Bytes pinned before an engine's start goes on, within `FIRST_SECONDS`."""

FIRST_SECONDS: Final = 1.0

EXTENT_SECONDS: Final = 20.0
"""Seconds for the extents of the test at the start: a slot may have tens of MiB, and an extent many slots."""

MIN_SHARE: Final = 0.5
"""Least share of the slots to pin. If fewer can be pinned, all of them are worth more unpinned.

Unpinned, a copy costs one core's time; a missing slot costs a block's computation."""

PIN_LIMITS: Final = (
    "limited by the machine's memory and the container's memory limit (cgroup), not by the limit on locked memory"
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Memory of one registration."""

    start: int
    """Offset in the segment, in bytes."""
    num_bytes: int
    usable: int
    """Number of the first slot (or extent, where there are some) not pinned with this chunk and those before it."""


class PinnedSlots:
    """Pins the slots of a segment, class by class: slots with numbers below `usable` are pinned now.

    Where classes share extents, `usable` is a number of extents. Several are pinned together, or one in several chunks.
    """

    def __init__(self, device: Device, segment: ArenaSegment) -> None:
        self._device = device
        self._segment = segment
        self.chunk_bytes = [_chunk_bytes(one, segment.unit) for one in segment.pieces]
        """Bytes of a registration, per class, or for the extents: no copy crosses the border of two."""
        self._chunks = [
            chunk
            for one, num_bytes in zip(segment.pieces, self.chunk_bytes, strict=True)
            for chunk in _chunks_of(one, num_bytes)
        ]
        self._least = max(
            (-(-TRIAL_SLOTS // one.places) for one in segment.classes if one.extent_bytes and one.places), default=0
        )
        """Least number of extents in which each class has enough slots for the test at the start."""
        self._done = 0
        """Number of pinned chunks."""
        self.refused = False
        """True once the device has refused to pin more."""
        self._changed = threading.Condition()
        self._starting = True
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def usable(self) -> int:
        """Number of pinned slots, from number 0 on."""
        return self._chunks[self._done - 1].usable if self._done else 0

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the segment that are pinned."""
        return sum(chunk.num_bytes for chunk in self._chunks[: self._done])

    def start(self, on_usable: Callable[[int], None]) -> None:
        """Begin. Calls `on_usable(usable)`, on a thread of its own, whenever more slots are usable."""
        self._thread = start_background("kvpact-pin", lambda: self._run(on_usable))

    def wait_for_first(self, seconds: float = FIRST_SECONDS) -> bool:
        """Wait until `FIRST_BYTES` are pinned, or nothing more will be; at most `seconds`.

        Longer only until the test at the start has slots of each class. Returns whether these bytes are pinned.
        """
        with self._changed:
            enough = self._changed.wait_for(lambda: self.pinned_bytes >= FIRST_BYTES or self._ended, seconds)
            self._changed.wait_for(lambda: self.usable >= self._least or self._ended, EXTENT_SECONDS)
            return enough

    def suffice(self) -> bool:
        """End the start: True if enough slots are pinned, or will be. Warns if they are not all."""
        with self._changed:
            self._starting = False
        if self.refused and self.pinned_bytes < MIN_SHARE * len(self._segment.memory):
            return False
        if self.refused:
            self._warn()
        return True

    def close(self) -> None:
        """Unpin everything, after at most one more chunk. No copy may be under way. Idempotent."""
        with self._changed:
            self._closing = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for chunk in self._chunks[: self._done]:
            with contextlib.suppress(Exception):  # the device is lost, and its registrations with it
                self._device.unregister(self._segment.mapped_at + chunk.start)
        self._done = 0

    @property
    def _ended(self) -> bool:
        return self.refused or self._closing or self._done == len(self._chunks)

    def _run(self, on_usable: Callable[[int], None]) -> None:
        self._device.attach()
        while not self._ended:
            chunk = self._chunks[self._done]
            self._segment.pages.take(chunk.start, chunk.num_bytes)
            with take_turn(self._segment):  # several processes at once can fail (vllm#52296)
                pinned = self._device.register(self._segment.mapped_at + chunk.start, chunk.num_bytes)
            if pinned:
                on_usable(chunk.usable)
            with self._changed:
                self._done += pinned
                self.refused = not pinned
                warn = self.refused and not self._starting
                self._changed.notify_all()
            if warn:
                self._warn()
        logger.info("arena: %s pinned", format_size(self.pinned_bytes))

    def _warn(self) -> None:
        logger.warning(
            "arena: only %s of %s can be pinned; the rest of `memory` is not used: set a smaller `memory` (%s)",
            format_size(self.pinned_bytes),
            format_size(len(self._segment.memory)),
            PIN_LIMITS,
        )


def _chunk_bytes(pieces: SlotClass, unit: str) -> int:
    """Bytes of a registration: whole slots or extents; a larger extent takes several chunks."""
    count = CHUNK_BYTES // pieces.slot_bytes
    if not count and unit == "extent":
        return CHUNK_BYTES
    return max(1, min(len(pieces.slots), count)) * pieces.slot_bytes


def _chunks_of(pieces: SlotClass, chunk_bytes: int) -> Iterator[Chunk]:
    """Chunks of the memory of `pieces`, each of at most `chunk_bytes`."""
    size = len(pieces.slots) * pieces.slot_bytes
    for start in range(0, size, chunk_bytes):
        end = min(size, start + chunk_bytes)
        yield Chunk(pieces.offset + start, end - start, pieces.slots.start + end // pieces.slot_bytes)
