"""When computed blocks are saved: at once, or when the engine is about to evict them (`"save": "lazy"`).

Owns the order of a save (room in the index, the hold on the engine's blocks, the job) and its end. `BlockTags` says
what a block was filled with, `lazy_offload.py` what the engine holds and evicts next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvpact.cache.jobs import SaveState, TransferJobs
from kvpact.cache.lazy_offload import LazyOffload
from kvpact.cache.lazy_sides import LazySides, OffloadRun, SideRun
from kvpact.cache.request import RequestState
from kvpact.cache.room import ArenaRoom
from kvpact.cache.side_saves import SideSaves, give_back
from kvpact.cache.writeback import WriteBack
from kvpact.config import KvpactConfig
from kvpact.contract import BlockHolder, EngineRequest, JobOutcome, SchedulerContext, num_blocks_for
from kvpact.errors import PactViolation
from kvpact.identity.tags import BlockTags
from kvpact.index.block_index import ROOT, BlockIndex
from kvpact.metrics import MEMORY, Metrics

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Offloader:
    """The way of blocks from the engine into the arena. A request's progress is in its `RequestState`."""

    config: KvpactConfig
    index: BlockIndex
    room: ArenaRoom
    jobs: TransferJobs
    tags: BlockTags
    writeback: WriteBack
    metrics: Metrics
    block_size: int
    clock: Callable[[], float]
    lazy: LazyOffload | None = field(default=None, init=False)
    """None: blocks are saved as they are computed."""
    side_saves: SideSaves | None = None
    """The side groups' blocks; None if the model has none."""
    _context: BlockHolder | None = field(default=None, init=False)

    def bind(self, context: BlockHolder, *, lazy_window: int | None) -> None:
        """Hold blocks through `context` while they are copied. With a window, save only what the engine evicts next."""
        self._context = context
        self.lazy = None
        chosen, sides = self.side_saves, None
        if chosen is not None:
            chosen.sides.bind(context)
            chosen.lazy = None
            if chosen.sides.context is None:
                return
        if lazy_window is None:
            return
        if not isinstance(context, SchedulerContext):
            logger.warning("kvpact: this engine does not show its free queue; blocks are saved as they are computed")
            return
        if chosen is not None:
            sides = chosen.lazy = LazySides(context, self.index, chosen.sides, self.tags)
        self.lazy = LazyOffload(context, self.index, lazy_window, sides)

    def note_probe(self, request_id: str, state: RequestState, computed_tokens: int) -> None:
        """The engine probes for a request of which it has `computed_tokens`; their blocks are unknown."""
        state.computed, state.sound, state.loaded_rows = computed_tokens, 0, 0
        if self.lazy is not None and state.offloaded_blocks:  # preempted: the request gets other blocks
            state.offloaded_blocks = state.sides_from = 0
            self.lazy.rewind(request_id)

    def note(
        self, request: EngineRequest, state: RequestState, computed_tokens: int, block_ids: Callable[[], Sequence[int]]
    ) -> None:
        """After this step the first `computed_tokens` tokens are computed: save full blocks that are not stored."""
        before, lazy, size = state.computed, self.lazy, self.block_size
        state.advance(computed_tokens)
        if self.config.save == "off":
            return
        if self.side_saves is not None:
            self._note_groups(self.side_saves, request, state, before, computed_tokens)
            return
        begun, filled = before // size, computed_tokens // size
        held = block_ids() if filled > begun else ()
        if filled > begun and state.sound < begun:
            state.sound = self.tags.same_prefix(held[:begun], state.sound, state.tag)
        self.tags.fill(held[begun:filled], state.tag_of_filled(before, computed_tokens, size))
        if state.keys is None:
            if lazy is not None:
                lazy.invalidate_blocks(held)
            return
        full = min(filled, state.keys.count(len(request.token_ids)))
        if lazy is not None:
            lazy.invalidate_blocks(held[full:filled])  # filled, and without a name until the next token is known
        if full <= state.offloaded_blocks:
            return
        first, state.offloaded_blocks = state.offloaded_blocks, full
        keys = state.keys.extend(request.token_ids)
        named = min(full, len(keys))
        known = min(named, self.index.known_prefix(keys))
        if known and (known == named or lazy is not None):
            self.index.touch(keys[known - 1])
            self.writeback.note_used(keys[:named])
        if lazy is None and known == named:
            return
        held = held or block_ids()
        sound = state.sound = self.tags.same_prefix(held[:named], min(state.sound, named), state.tag)
        if lazy is not None:
            lazy.invalidate_blocks(held[max(first, sound) : full])
            lazy.note(request.request_id, keys, first, max(first, sound), held)
        elif known < sound:
            run = OffloadRun(request.request_id, tuple(keys[:sound]), known, tuple(held[known:sound]))
            self._save(run, self.clock())

    def _note_groups(
        self, side_saves: SideSaves, request: EngineRequest, state: RequestState, before: int, computed: int
    ) -> None:
        """The same for a model of several groups: the chain first, and then what hangs on it."""
        sides, size = side_saves.sides, self.block_size
        if sides.context is None:
            return
        smallest, known_tokens = sides.smallest_block, min(computed, len(request.token_ids))
        named = min(known_tokens, len(request.token_ids) - sides.groups.tokens_ahead) // size
        if before // smallest == computed // smallest and 0 < state.offloaded_blocks >= named:
            state.tag_of_filled(before, computed, size)
            return
        lazy = self.lazy
        tables = sides.context.blocks_of(request.request_id)
        chain = tables[sides.groups.chain] if sides.groups.chain is not None else None
        begun = before // size
        if state.sound < begun:
            state.sound = side_saves.sound_rows(state, begun, tables)
        tag = state.tag_of_filled(before, computed, size)
        side_saves.tag_filled(tag, before, computed, tables)
        if chain is not None:
            self.tags.fill(chain[begun : computed // size], tag)
        if state.keys is None:
            if lazy is not None:
                lazy.invalidate_blocks([block_id for table in tables for block_id in table])
            return
        now, keys = self.clock(), state.keys.extend(request.token_ids)
        rows = min(named, len(keys))
        known = min(rows, self.index.known_prefix(keys))
        sound = side_saves.sound_rows(state, rows, tables)
        if chain is None:
            sides.keep_names(keys[:sound])
        else:
            if lazy is not None and rows > (first := state.offloaded_blocks):
                lazy.invalidate_blocks(chain[max(first, sound) : rows])
                lazy.note(request.request_id, keys, first, max(first, sound), chain)
            elif rows > state.offloaded_blocks and known < sound:
                run = OffloadRun(request.request_id, tuple(keys[:sound]), known, tuple(chain[known:sound]))
                self._save(run, now)
        if known and rows > state.offloaded_blocks:
            self.index.touch(keys[known - 1])
            if chain is not None:
                self.writeback.note_used(keys[:known])
        state.sound, state.offloaded_blocks = sound, max(named, state.offloaded_blocks)
        side_saves.note(request.request_id, state, known_tokens, len(request.token_ids), sound, now)

    def order_what_is_leaving(self, loading_blocks: int, computed_tokens: int, now: float) -> None:
        """Save what the engine is about to evict; in this step it took blocks for these."""
        if self.lazy is None:
            return
        chosen = self.side_saves
        sizes = [group.block_size for group in chosen.sides.groups.groups] if chosen is not None else [self.block_size]
        taken = loading_blocks + sum(num_blocks_for(computed_tokens, size) for size in sizes)
        for run in self.lazy.due(taken):
            saved = chosen.save(run, now) if chosen is not None and isinstance(run, SideRun) else self._save(run, now)
            self.lazy.saving(saved)

    def _save(self, run: OffloadRun, now: float) -> int:
        """Save blocks while there is room, and drop those after them; returns the number saved."""
        if not run.start:
            return self._order(run, now)
        before = self.index.pin(run.keys[run.start - 1])  # else each question about the chain walks to its start
        try:
            return self._order(run, now)
        finally:
            self.index.unpin(before)

    def _order(self, run: OffloadRun, now: float) -> int:
        before, wanted = run.keys[run.start - 1] if run.start else ROOT, len(run.keys) - run.start
        end = min(len(run.keys), run.start + self.room.reservable(before, wanted))
        self.metrics.add("dropped_blocks", len(run.keys) - end)
        keys, held = run.keys[:end], run.block_ids[: end - run.start]
        if not held:
            return 0
        reservation = self.index.reserve(keys, run.start, end)
        if reservation is None:
            raise PactViolation(f"there is no room for {len(held)} blocks, although so many were reservable")
        self.metrics.add("evicted_blocks", len(reservation.evicted), MEMORY)
        if self._context is not None:
            self._context.touch(held)
        pin, leaving = self.index.pin(keys[-1]), run.leaving.intersection(held)
        chain = self.side_saves.sides.groups.chain or 0 if self.side_saves is not None else 0
        self.jobs.order_save(run.request_id, run.start, reservation.slots, held, keys, pin, now, leaving, chain)
        return len(held)

    def check(self) -> None:
        """See `LazyOffload.check`."""
        if self.lazy is not None:
            self.lazy.check()

    def settle(self, save: SaveState) -> int:
        """All ranks have reported: release the engine's blocks; returns the number of the chain's saved blocks."""
        job = save.job
        if save.sides and self.side_saves is not None:
            self.writeback.note_saved_sides(self.side_saves.settle(save))
            if self.lazy is not None:
                self.lazy.saved(len(job.block_ids))
            return 0
        self.jobs.end(save)
        outcome = save.tally.saved() if save.trusted else JobOutcome()
        if self._context is not None:
            give_back(self._context, save)
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
