"""What a load or a save copies, as entries of a batch: device address, host address and size of each run of bytes.

Owns the arithmetic from blocks and slots to addresses, vectorised; calls no driver. Runs that are adjacent on both
sides become one entry, which never crosses the border of two pinned pieces of host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpact.errors import PactViolation
from kvpact.memory.arena import SlotClass
from kvpact.worker.cuda.driver import Addresses
from kvpact.worker.paged import PagedKV, PagedLayer

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
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([part.device for part in parts]),
            np.concatenate([part.host for part in parts]),
            np.concatenate([part.sizes for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class GroupRuns:
    """Where the pages of layers that are adjacent in each block lie, and their pieces of slots.

    All in bytes, for one class of slots, which `slots` counts from its first one.
    """

    layer: PagedLayer
    """The joined layers."""
    host_address: int
    """Of the group's piece in the class's first slot."""
    slot_bytes: int
    num_slots: int
    pinned_slots: int
    """Slots that were pinned together: an entry stays within as many, counted from 0."""

    @property
    def joins_blocks(self) -> bool:
        """Whether adjacent blocks are one run on both sides: the group is all of a block, and of its slot."""
        return self.layer.chunks == 1 and self.layer.chunk_bytes == self.layer.block_stride == self.slot_bytes

    def entries(self, block_ids: Indexes, slots: Indexes) -> Entries:
        """Copies between `block_ids[i]` and `slots[i]`. Raises PactViolation if one of them is not there."""
        _require_within(block_ids, self.layer.num_blocks, "blocks")
        _require_within(slots, self.num_slots, "slots")
        layer = self.layer
        device = layer.address + block_ids * layer.block_stride
        host = self.host_address + slots * self.slot_bytes
        sizes = np.full(len(slots), layer.chunk_bytes, np.int64)
        if layer.chunks > 1:
            chunks = np.arange(layer.chunks)
            device = (device[:, None] + chunks * layer.chunk_stride).ravel()
            host = (host[:, None] + chunks * layer.chunk_bytes).ravel()
            sizes = np.full(len(host), layer.chunk_bytes, np.int64)
        elif self.joins_blocks and len(slots) > 1:
            goes_on = (np.diff(block_ids) == 1) & (np.diff(slots) == 1) & (slots[1:] % self.pinned_slots != 0)
            starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
            device, host = device[starts], host[starts]
            sizes = np.diff(np.append(starts, len(slots))) * layer.chunk_bytes
        return Entries(device.astype(np.uint64), host.astype(np.uint64), sizes.astype(np.uint64))


def runs_of(
    paged: PagedKV, groups: Sequence[range], arena_address: int, slot_class: SlotClass, pinned_slots: int
) -> list[GroupRuns]:
    """For each group of adjacent layers; `arena_address` is where this process has mapped the segment."""
    if paged.layout.rank_slot_bytes > slot_class.slot_bytes:
        raise PactViolation(
            f"one block of this engine takes {paged.layout.rank_slot_bytes} bytes, a slot has only "
            f"{slot_class.slot_bytes}"
        )
    first = arena_address + slot_class.offset
    offsets = paged.layout.layer_offsets
    return [
        GroupRuns(
            paged.joined(group),
            first + offsets[group.start],
            slot_class.slot_bytes,
            len(slot_class.slots),
            pinned_slots,
        )
        for group in groups
    ]


def _require_within(numbers: Indexes, count: int, what: str) -> None:
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= count):
        raise PactViolation(f"{what} {numbers.min()} to {numbers.max()} cannot be copied: there are {count}")
