"""What every copy of a rank on a CUDA device needs: the driver, events, and the way from jobs to entries.

Owns the runs of bytes of pages and slots, the choice between copy engines and the kernel, and the one error after which
nothing is copied any more.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from kvpact.errors import PactViolation
from kvpact.memory.arena import ArenaSegment
from kvpact.worker.cuda.driver import MAX_BATCH_ENTRIES, AccessOrder, CudaError, Driver
from kvpact.worker.cuda.entries import Entries, Indexes, runs_of
from kvpact.worker.paged import GROUPS, PagedKV, join_adjacent

logger = logging.getLogger(__name__)


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
        pinned_slots: int,
        kernel: Kernel | None,
    ) -> None:
        """`current_stream()` is the stream on which the caller computes; `pinned_slots` slots were pinned together."""
        (slot_class,) = segment.classes
        self.driver, self.current_stream = driver, current_stream
        self.events = Events(driver)
        self.error: CudaError | None = None
        """Why nothing is copied any more."""
        self._kernel = kernel
        self._first_slot, self._num_slots = slot_class.slots.start, len(slot_class.slots)
        self._num_blocks = paged.num_blocks
        self.slot_bytes = slot_class.slot_bytes
        self._runs_in = partial(
            runs_of, arena_address=segment.address_of(slot_class), slot_class=slot_class, pinned_slots=pinned_slots
        )
        self.rebind(paged)

    def rebind(self, paged: PagedKV) -> None:
        """The pages lie here, from now on. Nothing is being copied."""
        arriving = _arrivals(paged.groups)
        self.groups = [range(one[0].start, one[-1].stop) for one in arriving]
        """Layers that arrive together, in forward order."""
        self._by_group = [self._runs_in(paged, one) for one in arriving]
        joined = join_adjacent(paged.layers, len(paged.layers))
        self._whole = self._runs_in(paged, joined)
        self.entries_per_block = sum(len(one.sizes) for runs in self._by_group for one in runs)
        """Of one block alone, over all groups."""

    def note_error(self, error: Exception) -> None:
        """The device refused a call: nothing is copied from now on. Most such errors are for good."""
        if self.error is None and isinstance(error, CudaError):
            self.error = error

    def places(self, block_ids: Sequence[int], slots: Sequence[int]) -> tuple[Indexes, Indexes]:
        """Block ids, and slots counted from their class's first. Raises PactViolation if one of them is not there."""
        if len(block_ids) != len(slots):
            raise PactViolation(f"each block needs one slot, not {len(block_ids)} blocks and {len(slots)} slots")
        blocks, places = np.asarray(block_ids, np.int64), np.asarray(slots, np.int64) - self._first_slot
        _require_within(blocks, self._num_blocks, "blocks")
        _require_within(places, self._num_slots, "slots")
        return blocks, places

    def all_layers(self, block_ids: Sequence[int], slots: Sequence[int]) -> Entries:
        """What copies these blocks as a whole. Raises PactViolation like `places`."""
        blocks, places = self.places(block_ids, slots)
        return Entries.joined([one.entries(blocks, places) for one in self._whole])

    def by_group(self, block_ids: Sequence[int], slots: Sequence[int]) -> list[Entries]:
        """What copies these blocks, for each of `groups`. Raises PactViolation like `places`."""
        blocks, places = self.places(block_ids, slots)
        return [Entries.joined([one.entries(blocks, places) for one in runs]) for runs in self._by_group]

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


def _require_within(numbers: Indexes, count: int, what: str) -> None:
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= count):
        raise PactViolation(f"{what} {numbers.min()} to {numbers.max()} cannot be copied: there are {count}")


def _arrivals(groups: Sequence[range]) -> list[Sequence[range]]:
    """Groups of adjacent layers that arrive together: about `GROUPS` lists of them."""
    share = -(-len(groups) // GROUPS)
    return [groups[start : start + share] for start in range(0, len(groups), share)]
