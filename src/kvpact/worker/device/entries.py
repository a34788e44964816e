"""Entries of a batch of copies for a load or a save: device address, host address and size of each run of bytes.

Owns the arithmetic from jobs to addresses, vectorised; calls no device. Runs that are adjacent on both sides become one
entry, which never crosses the border of two pinned pieces of host memory.
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
        """Concatenation of one or more parts, in order."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([part.device for part in parts]),
            np.concatenate([part.host for part in parts]),
            np.concatenate([part.sizes for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of bytes of one block in some layers, and their pieces of a slot of one class. All in bytes."""

    device: Indexes
    """Addresses of the runs of block 0."""
    host: Indexes
    """Addresses of their pieces of a slot at the segment's beginning."""
    sizes: Indexes
    block_stride: int
    slot_bytes: int
    segment_address: int
    pinned_bytes: int
    """Bytes of a pinned piece: an entry stays within one, counted from the segment's beginning."""
    cuts: bool
    """True if a slot may lie across a border of two such pieces."""

    def entries(self, block_ids: Indexes, slots: Indexes) -> Entries:
        """Copies between `block_ids[i]` and the slot `slots[i]` bytes behind the segment's beginning.

        The caller has checked that both exist.
        """
        sizes = np.tile(self.sizes, len(slots))
        if len(self.sizes) == 1 and int(self.sizes[0]) == self.block_stride == self.slot_bytes and len(slots) > 1:
            # Adjacent blocks are one run on both sides: the only run is all of a block, and of its slot.
            goes_on = (
                (np.diff(block_ids) == 1) & (np.diff(slots) == self.slot_bytes) & (slots[1:] % self.pinned_bytes != 0)
            )
            starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
            sizes = np.diff(np.append(starts, len(slots))) * self.slot_bytes
            block_ids = block_ids[starts]
            slots = slots[starts]
        device = (block_ids[:, None] * self.block_stride + self.device).ravel()
        host = (slots[:, None] + self.host).ravel()
        if self.cuts:
            device, host, sizes = self._cut(device, host, sizes)
        return Entries(device, host, sizes)

    def _cut(self, device: Indexes, host: Indexes, sizes: Indexes) -> tuple[Indexes, Indexes, Indexes]:
        """Cut runs at the borders of pinned pieces: a run across a border becomes several."""
        starts = host - self.segment_address
        first = starts // self.pinned_bytes
        counts = (starts + sizes - 1) // self.pinned_bytes - first + 1
        run = np.repeat(np.arange(len(counts)), counts)
        piece = first[run] + np.arange(len(run)) - (np.cumsum(counts) - counts)[run]
        begins = np.maximum(starts[run], piece * self.pinned_bytes)
        ends = np.minimum((starts + sizes)[run], (piece + 1) * self.pinned_bytes)
        skipped = begins - starts[run]
        return device[run] + skipped, host[run] + skipped, ends - begins


def runs_of(
    paged: PagedKV, groups: Sequence[range], segment: ArenaSegment, slot_class: SlotClass, pinned_bytes: int
) -> list[Runs]:
    """Runs of all layers of `groups`, each of adjacent layers; one `Runs` for each distance between blocks.

    All are of one KV cache group, whose slots are of this class. See `Runs` for `pinned_bytes`.
    """
    cuts = bool(pinned_bytes % max(1, slot_class.extent_bytes or slot_class.slot_bytes))
    runs: dict[int, list[tuple[int, int, int]]] = {}
    for group in groups:
        layer = paged.joined(group)
        piece = segment.mapped_at + paged.layer_offsets[group.start]
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
    """Entries for the blocks of jobs: the pages of the layers in a job's KV cache group, and its slots."""

    def __init__(self, paged: PagedKV, segment: ArenaSegment, pinned_bytes: int) -> None:
        """`pinned_bytes` as in `Runs`. Raises PactViolation for slots that are too small."""
        self._segment = segment
        self._pinned_bytes = pinned_bytes
        self._classes = group_classes(paged, segment.classes)
        """Class of the slots, per KV cache group."""
        self.rebind(paged)

    def rebind(self, paged: PagedKV) -> None:
        """Use pages that lie here from now on."""
        self._num_blocks = paged.num_blocks
        self._runs = [
            runs_of(paged, join_adjacent(paged.layers, group, len(group)), self._segment, one, self._pinned_bytes)
            for group, one in zip(paged.cache_groups, self._classes, strict=True)
        ]
        """Runs, per KV cache group."""
        self.entries_per_block = [sum(len(one.sizes) for one in runs) for runs in self._runs]
        """Entries of a block, per KV cache group, if no blocks are adjacent and no run is cut."""
        self.bytes_per_block = [sum(int(one.sizes.sum()) for one in runs) for runs in self._runs]
        """Bytes of a block on this rank, per KV cache group."""

    def places(self, job: Job) -> tuple[Indexes, Indexes]:
        """Blocks of a job, and the offsets of its slots in the segment, in bytes.

        Raises PactViolation if it names a KV cache group, a block or a slot that does not exist.
        """
        require_cache_group(job.group_id, len(self._runs))
        if len(job.block_ids) != len(job.slots):
            raise PactViolation(
                f"each block needs one slot, not {len(job.block_ids)} blocks and {len(job.slots)} slots"
            )
        slot_class = self._classes[job.group_id]
        blocks = np.asarray(job.block_ids, np.int64)
        slots = np.asarray(job.slots, np.int64)
        _require_within(blocks, range(self._num_blocks), "blocks")
        _require_within(slots, slot_class.slots, "slots")
        if slot_class.extent_bytes and slot_class.places:
            _require_within(slots & MAX_PLACES - 1, range(slot_class.places), "places in an extent")
        return blocks, slot_class.start_of(slots)

    def entries(self, group_id: int, blocks: Indexes, starts: Indexes) -> Entries:
        """Entries for these `places` of a KV cache group."""
        return Entries.joined([one.entries(blocks, starts) for one in self._runs[group_id]])


def _require_within(numbers: Indexes, there: range, name: str) -> None:
    if len(numbers) and (numbers.min() < there.start or numbers.max() >= there.stop):
        raise PactViolation(
            f"{name} {numbers.min()} to {numbers.max()} cannot be copied: there are {len(there)} from {there.start} on"
        )
