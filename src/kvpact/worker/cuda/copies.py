"""What every copy of a rank on a CUDA device needs: the driver, events, and the way from jobs to entries.

Owns the runs of bytes of pages and slots, the choice between copy engines and the kernel, and the one error after which
nothing is copied any more.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from kvpact.errors import PactViolation
from kvpact.index.classed_slots import MAX_PLACES
from kvpact.memory.arena import ArenaSegment
from kvpact.worker.copy.base import Job, group_classes, require_cache_group
from kvpact.worker.cuda.driver import MAX_BATCH_ENTRIES, AccessOrder, CudaError, Driver
from kvpact.worker.cuda.entries import NO_ENTRIES, Entries, Indexes, Runs, runs_of
from kvpact.worker.paged import GROUPS, PagedKV, join_adjacent

logger = logging.getLogger(__name__)

Places: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Block ids and slots, as many of each."""


class Kernel(Protocol):
    """Loads by a kernel instead of the device's copy engines."""

    def suits(self, entries: Entries) -> bool:
        """Whether the kernel can copy these, and is the faster way."""

    def load(self, entries: Entries, stream: int) -> None:
        """Put the copies into `stream`. Their host memory is registered, and stays as it is until they are done."""


class Events:
    """Events for use and reuse. An event may be given back once all calls that name it have returned."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._idle: deque[int] = deque()

    def record(self, stream: int) -> int:
        """An event that is done when all that is in `stream` now is done."""
        event = self._idle.popleft() if self._idle else self.driver.create_event()
        self.driver.record(event, stream)
        return event

    def give_back(self, *events: int) -> None:
        """They are not waited for any more by a call yet to come; streams may still be waiting."""
        self._idle.extend(events)


class DeviceCopies:
    """One rank's pages and slots, and how bytes get from one to the other. Used by several threads."""

    def __init__(
        self,
        paged: PagedKV,
        segment: ArenaSegment,
        driver: Driver,
        current_stream: Callable[[], int],
        pinned_bytes: int,
        kernel: Kernel | None,
    ) -> None:
        """`current_stream()` is the stream on which the caller computes; `pinned_bytes` bytes were pinned together.

        Raises PactViolation for slots that are too small.
        """
        self.driver, self.current_stream = driver, current_stream
        self.events = Events(driver)
        self.error: CudaError | None = None
        """Why nothing is copied any more."""
        self._kernel = kernel
        self._segment, self._pinned_bytes = segment, pinned_bytes
        self._classes = group_classes(paged, segment.classes)
        """Of each KV cache group, that of its slots."""
        self._num_blocks = paged.num_blocks
        self.rebind(paged)

    def rebind(self, paged: PagedKV) -> None:
        """The pages lie here, from now on. Nothing is being copied."""
        parts = [part for group in paged.cache_groups for part in _arrivals(paged.groups_in(group))]
        arriving = {range(part[0].start, part[-1].stop): part for part in parts}
        self.groups = paged.in_forward_order(arriving)
        """Layers that arrive together, in forward order."""
        self._cache_groups = [paged.cache_group_of(group.start) for group in self.groups]
        """Of each of `groups`, its KV cache group."""
        self._by_group = [
            self._runs_in(paged, arriving[group], cache_group)
            for group, cache_group in zip(self.groups, self._cache_groups, strict=True)
        ]
        self._whole = [
            self._runs_in(paged, join_adjacent(paged.layers, group, len(group)), number)
            for number, group in enumerate(paged.cache_groups)
        ]
        """Of each KV cache group."""
        self._entries_per_block = [0] * len(paged.cache_groups)
        for cache_group, runs in zip(self._cache_groups, self._by_group, strict=True):
            self._entries_per_block[cache_group] += sum(len(one.sizes) for one in runs)
        self._block_bytes = [max(1, layout.rank_slot_bytes) for layout in paged.layouts]

    def _runs_in(self, paged: PagedKV, groups: Sequence[range], cache_group: int) -> list[Runs]:
        return runs_of(paged, groups, self._segment, self._classes[cache_group], self._pinned_bytes)

    def note_error(self, error: Exception) -> None:
        """The device refused a call: nothing is copied from now on. Most such errors are for good."""
        if self.error is None and isinstance(error, CudaError):
            self.error = error

    def places(self, block_ids: Sequence[int], slots: Sequence[int], group_id: int = 0) -> tuple[Indexes, Indexes]:
        """Block ids, and where in the segment these slots of a KV cache group begin, in bytes.

        Raises PactViolation if one of them is not there, or the slot is not of the group's class.
        """
        if len(block_ids) != len(slots):
            raise PactViolation(f"each block needs one slot, not {len(block_ids)} blocks and {len(slots)} slots")
        slot_class = self._classes[group_id]
        blocks, numbers = np.asarray(block_ids, np.int64), np.asarray(slots, np.int64)
        _require_within(blocks, range(self._num_blocks), "blocks")
        _require_within(numbers, slot_class.slots, "slots")
        if slot_class.extent_bytes and slot_class.places:
            _require_within(numbers & MAX_PLACES - 1, range(slot_class.places), "places in an extent")
        return blocks, slot_class.start_of(numbers)

    def require(self, job: Job) -> None:
        """Raise PactViolation if a job names a KV cache group, a block or a slot that is not there."""
        require_cache_group(job.group_id, len(self._whole))
        self.places(job.block_ids, job.slots, job.group_id)

    def entries_of(self, job: Job) -> int:
        """How many entries a job has if none of its blocks are adjacent, over all `groups`; 0 for an unknown one."""
        known = 0 <= job.group_id < len(self._entries_per_block)
        return len(job.slots) * self._entries_per_block[job.group_id] if known else 0

    def blocks_in(self, num_bytes: int, job: Job) -> int:
        """How many of a job's blocks have so many bytes together; at least 1."""
        known = 0 <= job.group_id < len(self._block_bytes)
        return max(1, num_bytes // self._block_bytes[job.group_id]) if known else len(job.slots)

    def all_layers(self, block_ids: Sequence[int], slots: Sequence[int], group_id: int = 0) -> Entries:
        """What copies these blocks of a KV cache group as a whole. Raises PactViolation like `require`."""
        require_cache_group(group_id, len(self._whole))
        blocks, places = self.places(block_ids, slots, group_id)
        return Entries.joined([one.entries(blocks, places) for one in self._whole[group_id]])

    def by_group(self, wanted: Mapping[int, Places]) -> list[Entries]:
        """What copies these blocks of each KV cache group, for each of `groups`. Raises PactViolation like `places`."""
        places = {cache_group: self.places(*some, cache_group) for cache_group, some in wanted.items()}
        return [
            Entries.joined([one.entries(*places[cache_group]) for one in runs]) if cache_group in places else NO_ENTRIES
            for cache_group, runs in zip(self._cache_groups, self._by_group, strict=True)
        ]

    def copy_in(self, entries: Entries, stream: int) -> None:
        """Put copies from slots into blocks into `stream`. Slots do not change while a load reads them."""
        if self._kernel is not None and self._kernel.suits(entries):
            try:
                self._kernel.load(entries, stream)
                return
            except Exception:
                logger.warning("loads of small pages go by the device's copy engines: no kernel", exc_info=True)
                self._kernel = None
        for piece in entries.pieces(MAX_BATCH_ENTRIES):
            self.driver.copy_batch(piece.device, piece.host, piece.sizes, AccessOrder.ANY, stream)

    def copy_out(self, entries: Entries, stream: int) -> None:
        """Put copies from blocks into slots into `stream`."""
        for piece in entries.pieces(MAX_BATCH_ENTRIES):
            self.driver.copy_batch(piece.host, piece.device, piece.sizes, AccessOrder.STREAM, stream)


def _require_within(numbers: Indexes, there: range, what: str) -> None:
    if len(numbers) and (numbers.min() < there.start or numbers.max() >= there.stop):
        raise PactViolation(
            f"{what} {numbers.min()} to {numbers.max()} cannot be copied: there are {len(there)} from {there.start} on"
        )


def _arrivals(groups: Sequence[range]) -> list[Sequence[range]]:
    """Groups of adjacent layers that arrive together: about `GROUPS` lists of them."""
    share = max(1, -(-len(groups) // GROUPS))
    return [groups[start : start + share] for start in range(0, len(groups), share)]
