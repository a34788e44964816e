"""When computed blocks are copied out: at once, or when the engine is about to evict them (`"save": "lazy"`).

Owns the order of a copy (room in the index, the hold on the engine's blocks, the job) and its end. What the engine
holds and evicts next is in `lazy.py`. No clock: time comes in.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpact.cache.jobs import SaveState, TransferJobs
from kvpact.cache.lazy_offload import LazyOffload
from kvpact.contract import BlockHolder, JobOutcome, SchedulerContext
from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import ROOT, BlockIndex
from kvpact.metrics import Metrics, TierName

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Offloader:
    """The way of blocks from the engine into the arena."""

    index: BlockIndex
    jobs: TransferJobs
    metrics: Metrics
    lazy: LazyOffload | None = field(default=None, init=False)
    """None: blocks are saved as they are computed."""
    _context: BlockHolder | None = field(default=None, init=False)

    def bind(self, context: BlockHolder, *, lazy_window: int | None) -> None:
        """Blocks are held through `context` while they are copied out. With a window, what its head evicts is saved."""
        self._context = context
        self.lazy = None
        if lazy_window is not None:
            if isinstance(context, SchedulerContext):
                self.lazy = LazyOffload(context, self.index, lazy_window)
            else:
                logger.warning(
                    "kvpact: this engine does not show its free queue; blocks are saved as they are computed"
                )

    def order(
        self, request_id: str, keys: Sequence[BlockKey], start: int, block_ids: Sequence[int], now: float
    ) -> None:
        """Copy blocks from `start` on of the chain `keys`, none of which is known, as far as there is room."""
        end = self._room_for(keys, start)
        if end > start:
            self._order(request_id, keys[:end], start, tuple(block_ids[start:end]), now)

    def order_what_is_leaving(self, taken_blocks: int, now: float) -> None:
        """Copy what the engine is about to evict; in this step it took so many blocks."""
        if self.lazy is None:
            return
        for chain in self.lazy.due(taken_blocks):
            end = self._room_for(chain.keys, chain.start)
            held = chain.block_ids[: end - chain.start]
            if held:
                self._order(
                    chain.request_id, chain.keys[:end], chain.start, held, now, chain.leaving.intersection(held)
                )
                self.lazy.saving(len(held))

    def _room_for(self, keys: Sequence[BlockKey], start: int) -> int:
        """Up to where the blocks from `start` on find room; those behind are dropped."""
        end = min(len(keys), start + self.index.reservable(keys[start - 1] if start else ROOT))
        self.metrics.add("dropped_blocks", len(keys) - end)
        return end

    def _order(
        self,
        request_id: str,
        keys: Sequence[BlockKey],
        start: int,
        held: tuple[int, ...],
        now: float,
        leaving: frozenset[int] | None = None,
    ) -> None:
        """Copy the engine's blocks `held` as blocks `start` and further of `keys`. `leaving` as in `SaveState`."""
        reservation = self.index.reserve(keys, start, len(keys))
        if reservation is None:
            raise PactViolation(f"there is no room for {len(held)} blocks, although so many were reservable")
        self.metrics.add("evicted_blocks", len(reservation.evicted), TierName.MEMORY)
        if self._context is not None:
            self._context.touch(held)
        pin = self.index.pin(keys[-1])
        self.jobs.order_save(request_id, start, reservation.slots, held, keys, pin, now, leaving)

    def settle(self, save: SaveState) -> int:
        """All ranks have reported: the engine gets its blocks back. Returns how many blocks of the chain are saved."""
        job = save.job
        outcome = save.tally.saved() if save.trusted else JobOutcome()
        if self._context is not None:
            self._give_back(self._context, save)
        done = outcome.done.prefix_from(job.start_block)
        done = max(0, min(done, save.garbage_from - job.start_block))
        self.index.complete(job.slots[:done])
        self.index.abandon(job.slots[done:])
        self.index.unpin(save.pin)
        self.metrics.add("saved_blocks", done)
        self.metrics.add("dropped_blocks", len(job.slots) - done)
        if self.lazy is not None:
            self.lazy.saved(len(job.block_ids))
            self.lazy.forget(save.keys[job.start_block + done :])
        return job.start_block + done

    @staticmethod
    def _give_back(context: BlockHolder, save: SaveState) -> None:
        """The engine may have the blocks back, a chain's end first; what it was about to evict before all others."""
        block_ids = save.job.block_ids[::-1]
        if save.leaving:
            context.free_blocks([block_id for block_id in block_ids if block_id not in save.leaving])
            context.free_blocks([block_id for block_id in block_ids if block_id in save.leaving], evict_first=True)
        else:
            context.free_blocks(block_ids)
