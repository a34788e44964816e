"""A read of blocks from the slabs of one directory: each from whichever has it.

Owns the set of blocks that have arrived, each verified. Knows no slab.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import BlockBuffer, Progress, leading, payload_digest
from kvpact.tiers.disk.two_threads import on_two_threads
from kvpact.tiers.record import groups_of

UNREADABLE: Final = "cannot be read in full"
"""Reason of a block whose bytes did not come."""

GONE: Final = "was evicted meanwhile"
"""Reason of a block in whose slot there is another one now."""

ReadSlots: TypeAlias = Callable[[Sequence[int], Sequence[BlockBuffer]], Sequence[bool]]
"""Fills buffers from slots; says of each that could be read whether its block is still there, and ends with the first
that could not."""


class Reading:
    """A call of `Tier.get`: `arrived` says of each block whether it is in its buffer, verified."""

    def __init__(self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None) -> None:
        self.keys = keys
        self.buffers = buffers
        self.arrived = [False] * len(keys)
        self._on_progress = on_progress
        self._ended = False
        """True once the caller wants no more."""

    def missing(self) -> list[int]:
        """The numbers of the blocks that have not arrived; none if the caller wants no more."""
        return [] if self._ended else [number for number, there in enumerate(self.arrived) if not there]

    def run(
        self, numbers: Sequence[int], slots: Sequence[int], digests: Sequence[bytes], read: ReadSlots
    ) -> dict[int, str]:
        """Read the blocks of these numbers from `slots` and verify them.

        Returns why blocks are unusable, by their index in `numbers`. The first that cannot be read ends the read.
        """
        buffers = [self.buffers[number] for number in numbers]
        unusable: dict[int, str] = {}
        caller = threading.current_thread()

        def read_group(first: int, end: int) -> bool:
            still_there = read(slots[first:end], buffers[first:end])
            for index, is_there in enumerate(still_there, first):
                if not is_there:
                    unusable[index] = GONE
                elif payload_digest(buffers[index]) != digests[index]:
                    unusable[index] = "payload does not match its checksum"
                else:
                    self.arrived[numbers[index]] = True
            if (unread := first + len(still_there)) < end:
                unusable[unread] = UNREADABLE
                return False
            return threading.current_thread() is not caller or self._report()

        on_two_threads(read_group, groups_of(buffers))
        self._report()
        return unusable

    def _report(self) -> bool:
        """Report the blocks that have arrived; returns whether the caller wants more."""
        if not self._ended and self._on_progress is not None:
            self._ended = not self._on_progress(leading(self.arrived))
        return not self._ended
