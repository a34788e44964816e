"""What a load or a save copies, as entries of a batch: device address, host address and size of each run of bytes.

Owns the arithmetic from blocks and slots to addresses, vectorised; calls no driver. Runs that are adjacent on both
sides become one entry, which never crosses the border of two pinned pieces of host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpact.errors import PactViolation
from kvpact.memory.arena import SlotClass
from kvpact.worker.cuda.driver import Addresses
from kvpact.worker.paged import PagedKV

Indexes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Entries:
    """Runs of bytes on both sides, one element each, in bytes."""

    device: Addresses
    host: Addresses
    sizes: Addresses

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def num_bytes(self) -> int:
        """Of all entries."""
        return int(self.sizes.sum())

    def pieces(self, most: int) -> Iterator[Entries]:
        """The same, at most `most` entries at a time."""
        for start in range(0, len(self), most):
            piece = slice(start, start + most)
            yield Entries(self.device[piece], self.host[piece], self.sizes[piece])

    @classmethod
    def joined(cls, parts: Sequence[Entries]) -> Entries:
        """All of them, in order."""
        if not parts:
            return NO_ENTRIES
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([part.device for part in parts]),
            np.concatenate([part.host for part in parts]),
            np.concatenate([part.sizes for part in parts]),
        )


NO_ENTRIES: Final = Entries(*(np.empty(0, np.uint64) for _ in range(3)))


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of bytes of one block in some layers, and their pieces of a slot, for one class of slots.

    All in bytes; the caller counts slots from their class's first.
    """

    device: Indexes
    """Addresses of the runs of block 0."""
    host: Indexes
    """Addresses of their pieces of the first slot."""
    sizes: Indexes
    block_stride: int
    slot_bytes: int
    pinned_slots: int
    """Slots that were pinned together: an entry stays within as many, counted from 0."""

    @property
    def joins_blocks(self) -> bool:
        """Whether adjacent blocks are one run on both sides: the only run is all of a block, and of its slot."""
        return len(self.sizes) == 1 and int(self.sizes[0]) == self.block_stride == self.slot_bytes

    def entries(self, block_ids: Indexes, slots: Indexes) -> Entries:
        """Copies between `block_ids[i]` and `slots[i]`, which the caller has found to be there."""
        sizes = np.tile(self.sizes, len(slots))
        if self.joins_blocks and len(slots) > 1:
            goes_on = (np.diff(block_ids) == 1) & (np.diff(slots) == 1) & (slots[1:] % self.pinned_slots != 0)
            starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
            sizes = np.diff(np.append(starts, len(slots))) * self.slot_bytes
            block_ids, slots = block_ids[starts], slots[starts]
        device = (block_ids[:, None] * self.block_stride + self.device).ravel()
        host = (slots[:, None] * self.slot_bytes + self.host).ravel()
        return Entries(device.astype(np.uint64), host.astype(np.uint64), sizes.astype(np.uint64))


def runs_of(
    paged: PagedKV, groups: Sequence[range], arena_address: int, slot_class: SlotClass, pinned_slots: int
) -> list[Runs]:
    """For all layers of `groups`, each of adjacent layers; one for each distance between blocks that they have.

    `arena_address` is where this process has mapped the class's first slot. Raises PactViolation for slots too small.
    """
    if paged.rank_slot_bytes > slot_class.slot_bytes:
        raise PactViolation(
            f"one block of this engine takes {paged.rank_slot_bytes} bytes, a slot has only {slot_class.slot_bytes}"
        )
    runs: dict[int, list[tuple[int, int, int]]] = {}
    for group in groups:
        layer, piece = paged.joined(group), arena_address + paged.layer_offsets[group.start]
        runs.setdefault(layer.block_stride, []).extend(
            (layer.address + chunk * layer.chunk_stride, piece + chunk * layer.chunk_bytes, layer.chunk_bytes)
            for chunk in range(layer.chunks)
        )
    made = []
    for block_stride, found in runs.items():
        device, host, sizes = np.array(found, np.int64).T
        made.append(Runs(device, host, sizes, block_stride, slot_class.slot_bytes, pinned_slots))
    return made
