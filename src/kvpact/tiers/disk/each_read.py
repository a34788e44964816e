"""A read of loose blocks from the slabs of one directory: each from whichever has it, and none for another.

Owns which of them have arrived. Knows no slab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import BlockBuffer, Progress, leading
from kvpact.tiers.disk.two_threads import read_verified


class EachRead:
    """A call of `Tier.get_each`: `arrived` says of each block whether it is in its buffer, verified."""

    def __init__(self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None) -> None:
        self.keys = keys
        self.buffers = buffers
        self.arrived = [False] * len(keys)
        self.ended = False
        """Whether the caller wants no more."""
        self._on_progress = on_progress

    def missing(self) -> list[int]:
        """The numbers of the blocks that have not arrived; none if the caller wants no more."""
        return [] if self.ended else [number for number, there in enumerate(self.arrived) if not there]

    def run(
        self,
        numbers: Sequence[int],
        slots: Sequence[int],
        digests: Sequence[bytes],
        read: Callable[[Sequence[int], Sequence[BlockBuffer]], int],
        end_unusable: Callable[[int, str], bool],
    ) -> None:
        """Read the blocks of these numbers from `slots`, as `read_verified`, past those that are unusable.

        `end_unusable` is called with an index of `numbers` and why that block is unusable; False ends the read.
        """
        begun = 0
        while begun < len(numbers) and not self.ended:
            left = numbers[begun:]
            buffers = [self.buffers[number] for number in left]
            count, reason = read_verified(
                read, slots[begun:], digests[begun:], buffers, partial(self._note_arrived, left)
            )
            begun += count
            if not reason or not end_unusable(begun, reason):
                return
            begun += 1

    def _note_arrived(self, numbers: Sequence[int], count: int) -> bool:
        for number in numbers[:count]:
            self.arrived[number] = True
        self.ended = self.ended or (self._on_progress is not None and not self._on_progress(leading(self.arrived)))
        return not self.ended
