"""A segment's slots as pinned memory: chunk by chunk in the background, low slots first.

Owns the registrations and the number of slots that are usable. Registering takes about 0.1 s per GiB and stalls other
calls of the driver meanwhile, so that no chunk is large, and its pages are taken from the machine before; an engine
starts with the first ones.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kvpact.memory.arena import ArenaSegment, SlotClass
from kvpact.memory.shared_slots import grant_turn
from kvpact.threads import start_background
from kvpact.units import format_size
from kvpact.worker.device.base import Device
from kvpact.worker.round_trip import TRIAL_SLOTS

logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 64 << 20
"""Bytes of a registration: about 6 ms, for which other calls of the driver wait.

Fewer, so that it has whole slots, or a slot that is larger. One of 512 GiB fails (vllm#51081); Linux 6.11 to 6.13 take
at most 2 GiB."""

FIRST_BYTES: Final = 4 << 30
"""An engine waits for these at its start, at most `FIRST_SECONDS`."""

FIRST_SECONDS: Final = 1.0

EXTENT_SECONDS: Final = 20.0
"""For the extents that the trial at the start needs: as a slot may have tens of MiB, and an extent many slots."""

MIN_SHARE: Final = 0.5
"""Share of the slots to pin, at least. If fewer can be pinned, all of them are worth more unpinned.

That costs a copy by one core; a block that is not there costs its computation."""

WHAT_LIMITS: Final = (
    "what bounds it is the machine's memory and the container's memory limit (cgroup), not the limit on locked memory"
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Memory that is pinned together."""

    start: int
    """Where in the segment it begins, in bytes."""
    num_bytes: int
    usable: int
    """All slots with lower numbers (extents, where there are some) are pinned when this is."""


class PinnedSlots:
    """Pins the slots of a segment, class by class: slots with numbers below `usable` are pinned now.

    Where classes share extents, `usable` is a number of extents. Several are pinned together, or one in several chunks.
    """

    def __init__(self, device: Device, segment: ArenaSegment) -> None:
        self._device, self._segment = device, segment
        self.chunk_bytes = [_chunk_bytes(one, segment.unit) for one in segment.pieces]
        """Per class, or for the extents, bytes pinned together: no copy goes over the border of two."""
        self._chunks = [
            chunk
            for one, num_bytes in zip(segment.pieces, self.chunk_bytes, strict=True)
            for chunk in _chunks_of(one, num_bytes)
        ]
        self._least = max(
            (-(-TRIAL_SLOTS // one.places) for one in segment.classes if one.extent_bytes and one.places), default=0
        )
        """Extents in which each class has as many slots as a trial needs."""
        self._done = 0
        """Chunks that are pinned."""
        self.refused = False
        """Whether the device has refused to pin more."""
        self._changed = threading.Condition()
        self._starting = True
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def usable(self) -> int:
        """Slots, from number 0 on, that are pinned."""
        return self._chunks[self._done - 1].usable if self._done else 0

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the segment that are pinned."""
        return sum(chunk.num_bytes for chunk in self._chunks[: self._done])

    def start(self, told: Callable[[int], None]) -> None:
        """Begin. `told(usable)` is called, on a thread of its own, whenever more slots are usable."""
        self._thread = start_background("kvpact-pin", lambda: self._run(told))

    def wait_for_first(self, seconds: float = FIRST_SECONDS) -> bool:
        """Wait until as much is pinned as an engine needs to begin, or nothing more will be; at most `seconds`.

        Longer only until the trial at the start has slots of each class. Returns whether as much is pinned.
        """
        with self._changed:
            enough = self._changed.wait_for(lambda: self.pinned_bytes >= FIRST_BYTES or self._ended, seconds)
            self._changed.wait_for(lambda: self.usable >= self._least or self._ended, EXTENT_SECONDS)
            return enough

    def suffice(self) -> bool:
        """End the start: whether to go on with the slots that are pinned, and will be. Says so if they are not all."""
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
        done, self._done = self._done, 0
        for chunk in self._chunks[:done]:
            with contextlib.suppress(Exception):  # the device is lost, and its registrations with it
                self._device.unregister(self._segment.mapped_at + chunk.start)

    @property
    def _ended(self) -> bool:
        return self.refused or self._closing or self._done == len(self._chunks)

    def _run(self, told: Callable[[int], None]) -> None:
        self._device.attach()
        while not self._ended:
            chunk = self._chunks[self._done]
            self._segment.pages.take(chunk.start, chunk.num_bytes)
            with grant_turn(self._segment):  # several processes at once can fail (vllm#52296)
                pinned = self._device.register(self._segment.mapped_at + chunk.start, chunk.num_bytes)
            if pinned:
                told(chunk.usable)
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
            WHAT_LIMITS,
        )


def _chunk_bytes(pieces: SlotClass, unit: str) -> int:
    """Return the bytes pinned together: whole slots or extents; an extent that is too large takes several chunks."""
    count = CHUNK_BYTES // pieces.slot_bytes
    if not count and unit == "extent":
        return CHUNK_BYTES
    return max(1, min(len(pieces.slots), count)) * pieces.slot_bytes


def _chunks_of(pieces: SlotClass, chunk_bytes: int) -> Iterator[Chunk]:
    """Their memory, so many bytes at a time."""
    size = len(pieces.slots) * pieces.slot_bytes
    for start in range(0, size, chunk_bytes):
        end = min(size, start + chunk_bytes)
        yield Chunk(pieces.offset + start, end - start, pieces.slots.start + end // pieces.slot_bytes)
