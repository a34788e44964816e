"""What a load or a save copies, as entries of a batch: device address, host address and size of each run of bytes.

Owns the arithmetic from jobs to addresses, vectorised; calls no device. Runs that are
adjacent on both sides become one entry, which never crosses the border of two pinned pieces of host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpact.errors import PactViolation
from kvpact.index.classed_slots import MAX_PLACES
from kvpact.memory.arena import ArenaSegment, SlotClass
from kvpact.worker.copy.base import Job, group_classes, require_cache_group
from kvpact.worker.device.base import Addresses
from kvpact.worker.paged import PagedKV, join_adjacent

Indexes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Entries:
    """Runs of bytes on both sides, one element each, in bytes."""

    device: Addresses
    host: Addresses
    sizes: Addresses

    def __len__(self) -> int:
        return len(self.sizes)

    def pieces(self, most: int) -> Iterator[Entries]:
        """Yield the entries, at most `most` at a time."""
        for start in range(0, len(self), most):
            piece = slice(start, start + most)
            yield Entries(self.device[piece], self.host[piece], self.sizes[piece])

    @classmethod
    def joined(cls, parts: Sequence[Entries]) -> Entries:
        """All of them, one or more, in order."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([part.device for part in parts]),
            np.concatenate([part.host for part in parts]),
            np.concatenate([part.sizes for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of bytes of one block in some layers, and their pieces of a slot of one class. All in bytes."""

    device: Indexes
    """Addresses of the runs of block 0."""
    host: Indexes
    """Addresses of their pieces of a slot where the segment begins."""
    sizes: Indexes
    block_stride: int
    slot_bytes: int
    segment_address: int
    pinned_bytes: int
    """Bytes that were pinned together: an entry stays within as many, counted from the segment's beginning."""
    cuts: bool
    """Whether a slot may lie across a border of two such pieces."""

    @property
    def joins_blocks(self) -> bool:
        """Whether adjacent blocks are one run on both sides: the only run is all of a block, and of its slot."""
        return len(self.sizes) == 1 and int(self.sizes[0]) == self.block_stride == self.slot_bytes

    def entries(self, block_ids: Indexes, slots: Indexes) -> Entries:
        """Copies between `block_ids[i]` and the slot that begins `slots[i]` bytes behind the segment's beginning.

        The caller has found both to be there.
        """
        sizes = np.tile(self.sizes, len(slots))
        if self.joins_blocks and len(slots) > 1:
            goes_on = (
                (np.diff(block_ids) == 1) & (np.diff(slots) == self.slot_bytes) & (slots[1:] % self.pinned_bytes != 0)
            )
            starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
            sizes = np.diff(np.append(starts, len(slots))) * self.slot_bytes
            block_ids, slots = block_ids[starts], slots[starts]
        device = (block_ids[:, None] * self.block_stride + self.device).ravel()
        host = (slots[:, None] + self.host).ravel()
        if self.cuts:
            device, host, sizes = self._cut(device, host, sizes)
        return Entries(device, host, sizes)

    def _cut(self, device: Indexes, host: Indexes, sizes: Indexes) -> tuple[Indexes, Indexes, Indexes]:
        """Cut runs where chunks pinned together end: one that lies across a border becomes several."""
        starts = host - self.segment_address
        first, last = starts // self.pinned_bytes, (starts + sizes - 1) // self.pinned_bytes
        counts = last - first + 1
        run = np.repeat(np.arange(len(counts)), counts)
        piece = first[run] + np.arange(len(run)) - (np.cumsum(counts) - counts)[run]
        begins = np.maximum(starts[run], piece * self.pinned_bytes)
        ends = np.minimum((starts + sizes)[run], (piece + 1) * self.pinned_bytes)
        skipped = begins - starts[run]
        return device[run] + skipped, host[run] + skipped, ends - begins


def runs_of(
    paged: PagedKV, groups: Sequence[range], segment: ArenaSegment, slot_class: SlotClass, pinned_bytes: int
) -> list[Runs]:
    """For all layers of `groups`, each of adjacent layers; one for each distance between blocks that they have.

    All are of one KV cache group, whose slots are of this class. See `Runs` for `pinned_bytes`.
    """
    cuts = bool(pinned_bytes % max(1, slot_class.extent_bytes or slot_class.slot_bytes))
    runs: dict[int, list[tuple[int, int, int]]] = {}
    for group in groups:
        layer, piece = paged.joined(group), segment.mapped_at + paged.layer_offsets[group.start]
        runs.setdefault(layer.block_stride, []).extend(
            (layer.address + chunk * layer.chunk_stride, piece + chunk * layer.chunk_bytes, layer.chunk_bytes)
            for chunk in range(layer.chunks)
        )
    made = []
    for block_stride, found in runs.items():
        device, host, sizes = np.array(found, np.int64).T
        made.append(
            Runs(device, host, sizes, block_stride, slot_class.slot_bytes, segment.mapped_at, pinned_bytes, cuts)
        )
    return made


class JobRuns:
    """What copies the blocks of a job: the pages of the layers in its KV cache group, and its slots."""

    def __init__(self, paged: PagedKV, segment: ArenaSegment, pinned_bytes: int) -> None:
        """See `Runs` for `pinned_bytes`. Raises PactViolation for slots that are too small."""
        self._segment, self._pinned_bytes = segment, pinned_bytes
        self._classes = group_classes(paged, segment.classes)
        """Per KV cache group, the class of its slots."""
        self.rebind(paged)

    def rebind(self, paged: PagedKV) -> None:
        """The pages lie here, from now on."""
        self._num_blocks = paged.num_blocks
        self._runs = [
            runs_of(paged, join_adjacent(paged.layers, group, len(group)), self._segment, one, self._pinned_bytes)
            for group, one in zip(paged.cache_groups, self._classes, strict=True)
        ]
        """Per KV cache group, its runs."""
        self.entries_per_block = [sum(len(one.sizes) for one in runs) for runs in self._runs]
        """Per KV cache group, entries of a block, if no blocks are adjacent and no run is cut."""

    def places(self, job: Job) -> tuple[Indexes, Indexes]:
        """A job's blocks, and where in the segment its slots begin, in bytes.

        Raises PactViolation if it names a KV cache group, a block or a slot that is not there.
        """
        require_cache_group(job.group_id, len(self._runs))
        if len(job.block_ids) != len(job.slots):
            raise PactViolation(
                f"each block needs one slot, not {len(job.block_ids)} blocks and {len(job.slots)} slots"
            )
        slot_class = self._classes[job.group_id]
        blocks, slots = np.asarray(job.block_ids, np.int64), np.asarray(job.slots, np.int64)
        _require_within(blocks, range(self._num_blocks), "blocks")
        _require_within(slots, slot_class.slots, "slots")
        if slot_class.extent_bytes and slot_class.places:
            _require_within(slots & MAX_PLACES - 1, range(slot_class.places), "places in an extent")
        return blocks, slot_class.start_of(slots)

    def entries(self, group_id: int, blocks: Indexes, starts: Indexes) -> Entries:
        """What copies these `places` of a KV cache group."""
        return Entries.joined([one.entries(blocks, starts) for one in self._runs[group_id]])


def _require_within(numbers: Indexes, there: range, what: str) -> None:
    if len(numbers) and (numbers.min() < there.start or numbers.max() >= there.stop):
        raise PactViolation(
            f"{what} {numbers.min()} to {numbers.max()} cannot be copied: there are {len(there)} from {there.start} on"
        )
