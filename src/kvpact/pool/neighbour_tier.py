"""Blocks in the memory of other engines of this host, as a tier that is read and never written to.

For an engine on a device: a read-only mapping of another engine's slots is not pinned, so no rank can copy from it. A
thread reads them from the memory file into this engine's own slots, as blocks of a disk. Owns the leases of the reads
under way: a block is leased, compared, read and compared again, and its lease ends with the read.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence

from kvpact.errors import DataError
from kvpact.identity.keys import BlockKey
from kvpact.index.neighbour import Lease
from kvpact.memory.arena import SegmentAddress
from kvpact.pool.met_engine import MetEngine
from kvpact.pool.neighbours import OtherEngine
from kvpact.tiers.backends import NEIGHBOURS
from kvpact.tiers.base import BlockBuffer, Entry, Progress, Tier, TierCapacity, TierHealth, leading
from kvpact.tiers.log_once import LogOnce
from kvpact.tiers.vectored import completely

logger = logging.getLogger(__name__)


class NeighbourTier(Tier):
    """See `Tier`. `lookup` and `leading` read mappings of the engines' tables, in microseconds."""

    name = NEIGHBOURS
    exclusive = True

    def __init__(self) -> None:
        self._engines: tuple[MetEngine, ...] = ()
        """Replaced whole: threads that read go on with those that they have begun with."""
        self._leasing = threading.Lock()
        self._is_over = False
        self._told = LogOnce(logger)

    @property
    def others_evict(self) -> bool:
        """See `Tier`: their owners do."""
        return True

    def use(self, met: Iterable[OtherEngine]) -> None:
        """Look up and read in these engines' memory from now on, those on this engine's memory node first."""
        known = {each.engine: each for each in self._engines}
        self._engines = tuple(known.get(engine) or MetEngine(engine) for engine in met)

    # Finding

    def _holders(self, keys: Sequence[BlockKey]) -> list[MetEngine]:
        """Engines that seem to hold the first of `keys`, that with most of them first."""
        holders = [each for each in self._engines if not each.is_refused and each.has(keys[0])]
        if len(holders) > 1:
            holders.sort(key=lambda each: -each.count(keys))
        return holders

    def holder(self, keys: Sequence[BlockKey]) -> str:
        """Name of the engine from which the first of `keys` would be read now; "" if none seems to hold it."""
        holders = self._holders(keys)
        return holders[0].engine.name if holders else ""

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """True for each block that an engine seems to hold."""
        return [any(each.has(key) and not each.is_refused for each in self._engines) for key in keys]

    def leading(self, keys: Sequence[BlockKey]) -> int:
        """Number of leading `keys` that the engine with most of them seems to hold."""
        holders = self._holders(keys) if keys else []
        return holders[0].count(keys) if holders else 0

    # Reading

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None = None
    ) -> list[bool]:
        """See `Tier`. It ends at the first block that no engine has any more: those after it are needed with it."""
        arrived: list[bool] = []
        while len(arrived) < len(keys) and not self._is_over:
            at = len(arrived)
            read = self._read_first(keys[at:], buffers[at:])
            arrived += read
            if not all(read) or not read or (on_progress is not None and not on_progress(leading(arrived))):
                break
        return arrived + [False] * (len(keys) - len(arrived))

    def _read_first(self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer]) -> list[bool]:
        """Read the first of these blocks, as many as one engine lets be leased now; return whether each arrived."""
        for each in self._holders(keys):
            index = each.engine.index
            with self._leasing:
                lease = index.lease(keys[: each.count(keys)])
            if lease is None:
                continue
            try:
                return self._read(each, lease, keys[: len(lease.slots)], buffers)
            finally:
                with self._leasing:
                    index.release(lease)
        return []

    def _read(
        self, engine: MetEngine, lease: Lease, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer]
    ) -> list[bool]:
        """Read leased blocks, each of which counts only if its owner still has it, and lets it be used, afterwards."""
        try:
            for segment, views in zip(_pieces_of(engine.engine), zip(*buffers[: len(keys)], strict=True), strict=True):
                _read_piece(segment, lease.slots, views)
        except (DataError, OSError, ValueError) as error:  # also other numbers of ranks
            engine.refuted.add(keys)
            text = "kvpact: the memory of engine %s of this host cannot be read: %s"
            self._told.log("unreadable", logging.WARNING, text, engine.engine.name, error)
            return [False] * len(keys)
        return engine.engine.index.are_held(lease, keys)

    def leased_from(self) -> dict[str, int]:
        """Blocks leased in each engine by reads under way; on any thread."""
        return {each.engine.name: each.engine.index.leased_rows for each in self._engines}

    # The rest of a tier

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        """See `Tier`: nothing is written to another engine's memory."""
        return [False] * len(entries)

    def delete(self, keys: Iterable[BlockKey]) -> int:
        """See `Tier`: none of the engines is asked for these blocks again. Waits for nothing."""
        gone = [*keys]
        for each in self._engines:
            each.refuted.add(gone)
        return len(gone)

    def clear(self) -> None:
        """See `Tier`: no engine is asked for anything any more."""
        self._is_over = True
        self._engines = ()

    def capacity(self) -> TierCapacity:
        """See `Tier`: unknown, as each engine counts its own."""
        return TierCapacity(0, 0, 0)

    def health(self) -> TierHealth:
        """See `Tier`: an engine that cannot be read costs its own blocks, not those of the others."""
        return TierHealth(True)

    def close(self) -> None:
        """End reads under way after their current part, as misses."""
        self.clear()


def _pieces_of(engine: OtherEngine) -> list[SegmentAddress]:
    """The segments of an engine, each once: ranks with equal bytes share one."""
    return [*{(each.device, each.inode): each for each in engine.segments}.values()]


def _read_piece(segment: SegmentAddress, slots: Sequence[int], views: Sequence[memoryview]) -> None:
    """Read one rank's piece of each of these slots. Raises DataError if there is no such slot, OSError."""
    for offset, run in _runs(segment, slots, views):
        wanted = sum(view.nbytes for view in run)
        if completely(os.preadv, segment.descriptor, run, offset) < wanted:
            raise DataError(f"it ends before the {wanted} bytes from {offset} on")


def _runs(
    segment: SegmentAddress, slots: Sequence[int], views: Sequence[memoryview]
) -> Iterator[tuple[int, list[memoryview]]]:
    """Adjacent slots together: the offset of the first in the file, and the views that get them."""
    classes = segment.classes
    first = end = 0
    run: list[memoryview] = []
    for slot, view in zip(slots, views, strict=True):
        found = next((one for one in classes if slot in one.slots and one.has(slot)), None)
        if found is None or found.slot_bytes != view.nbytes:
            raise DataError(f"it has no slot {slot} of {view.nbytes} bytes")
        start = found.start_of(slot)
        if run and start != end:
            yield first, run
            run = []
        if not run:
            first = start
        if view.nbytes:
            run.append(view)
        end = start + view.nbytes
    if run:
        yield first, run
