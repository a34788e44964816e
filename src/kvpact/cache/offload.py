"""When computed blocks are saved: at once, or when the engine is about to evict them (`"save": "lazy"`).

Owns the order of a save (room in the index, the hold on the engine's blocks, the job) and its end. `BlockTags` says
what a block was filled with, `lazy_offload.py` what the engine holds and evicts next.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvpact.cache.jobs import PutOffSave, SaveState, TransferJobs
from kvpact.cache.lazy_offload import LazyOffload
from kvpact.cache.lazy_sides import LazySides, OffloadRun, SideRun
from kvpact.cache.request import RequestState
from kvpact.cache.room import ArenaRoom
from kvpact.cache.side_saves import SideSaves, give_back, hold
from kvpact.cache.writeback import WriteBack
from kvpact.config import KvpactConfig
from kvpact.contract import BlockHolder, EngineRequest, JobOutcome, SchedulerContext, num_blocks_for
from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKeys
from kvpact.identity.tags import NO_TAG, BlockTags
from kvpact.index.block_index import ROOT, BlockIndex
from kvpact.metrics import MEMORY, Metrics

logger = logging.getLogger(__name__)

PIECE_BLOCKS = 512
"""Blocks that one step orders saves of before it leaves others to later steps: about 0.7 ms of the scheduler's thread
with all that becomes of them."""

CATCH_UP_STEPS = 8
"""If more wait than so many steps would take in pieces, a step orders the part that lets them take so many."""


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
    piece_blocks: int = PIECE_BLOCKS
    _left: int = field(default=PIECE_BLOCKS, init=False)
    """Blocks of which the running step may still order saves."""
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
            state.sound = self.tags.same_prefix(held, state.sound, state.tag, begun)
        tag = state.tag_of_filled(before, computed_tokens, size)
        self.tags.fill(held[begun:filled], tag)
        if tag != NO_TAG and begun <= state.sound < filled:
            state.sound = filled
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
        stop = full - self._to_put_off(first, full, state.keys)
        keys = state.keys.extend(request.token_ids, stop)
        named = min(stop, len(keys))
        known = min(named, self.index.known_prefix(keys))
        if known and (known == named or lazy is not None):
            self.index.touch(keys[known - 1])
            self.writeback.note_used(keys, named)
        if lazy is None and known == named and stop == full:
            return
        held = held or block_ids()
        sound = named
        if state.sound < named:
            sound = state.sound = self.tags.same_prefix(held, state.sound, state.tag, named)
        if lazy is not None:
            lazy.invalidate_blocks(held[max(first, sound) : full])
            lazy.note(request.request_id, keys, first, max(first, sound), held)
        elif known < sound:
            run = OffloadRun(request.request_id, keys, known, tuple(held[known:sound]))
            self._save(run, self.clock())
        if stop < full and sound == stop:
            self._put_off(request, state, state.keys, stop, held[stop:full])

    def _to_put_off(self, first: int, full: int, names: BlockKeys) -> int:
        """How many of a request's blocks [first, full) later steps save; those that are stored do not count."""
        if self.lazy is not None or self._context is None or self.config.match_at == "step":
            return 0  # a step's lookups look for what the step saves
        if full - first <= self._left and not self.jobs.put_off:
            self._left -= full - first
            return 0
        new = full - max(first, min(full, self.index.known_prefix(names.keys)))
        now = 0 if self.jobs.put_off else min(new, self._left)
        self._left -= now
        return new - now

    def _put_off(
        self, request: EngineRequest, state: RequestState, names: BlockKeys, start: int, block_ids: Sequence[int]
    ) -> None:
        """Have later steps save these blocks of a request, the first of which is its block `start`; hold them."""
        assert self._context is not None
        pieces = deque[tuple[int, ...]]()
        for at in range(0, len(block_ids), self.piece_blocks):
            pieces.append(tuple(block_ids[at : at + self.piece_blocks])[::-1])
            self._context.touch(pieces[-1])
        self.jobs.put_off.append(PutOffSave(request.request_id, names, request.token_ids, state.tag, start, pieces))

    def order_put_off(self, now: float) -> None:
        """End the step: order saves that earlier steps have put off, the oldest first, as far as the step may."""
        waiting = self.jobs.put_off
        while waiting and self._left > 0:
            try:
                self._order_piece(waiting[0], now)
            finally:
                if not waiting[0].pieces:
                    waiting.popleft()
        left = sum(len(piece) for each in waiting for piece in each.pieces)
        self._left = max(self.piece_blocks, left // CATCH_UP_STEPS)

    def _order_piece(self, waiting: PutOffSave, now: float) -> None:
        """Order the next piece; if it cannot be saved as a whole, drop what is left."""
        assert self._context is not None
        piece, saved, goes_on = waiting.pieces.popleft(), 0, False
        self._left -= len(piece)
        try:
            saved, goes_on = self._save_piece(waiting, piece[::-1], now)
        finally:
            if saved < len(piece):
                self._context.free_blocks(piece)
            while waiting.pieces and not goes_on:
                dropped = waiting.pieces.popleft()
                self.metrics.add("dropped_blocks", len(dropped))
                self._context.free_blocks(dropped)

    def _save_piece(self, waiting: PutOffSave, block_ids: tuple[int, ...], now: float) -> tuple[int, bool]:
        """Order the next blocks, as far as they are not stored; returns how many, and whether those after them can be
        saved too."""
        start = waiting.start
        end = waiting.start = start + len(block_ids)
        if not waiting.trusted or start >= waiting.garbage_from:
            return 0, False
        keys = waiting.names.extend(waiting.token_ids, end)
        sound = min(start + self.tags.same_prefix(block_ids, 0, waiting.tag), waiting.garbage_from, len(keys))
        known = min(sound, self.index.known_prefix(keys))
        if known < start:
            return 0, False
        saved = 0
        if known < sound:
            whole = known == start and sound == end
            held = block_ids[known - start : sound - start]
            saved = self._save(OffloadRun(waiting.request_id, keys, known, held, is_held=whole), now)
        return saved, sound == end

    def _note_groups(
        self, side_saves: SideSaves, request: EngineRequest, state: RequestState, before: int, computed: int
    ) -> None:
        """Save full blocks of a model of several groups that are not stored: the chain first, then what hangs on it."""
        sides, size = side_saves.sides, self.block_size
        if sides.context is None:
            return
        smallest, known_tokens = sides.smallest_block, min(computed, len(request.token_ids))
        named = min(known_tokens, len(request.token_ids) - sides.groups.tokens_ahead) // size
        if before // smallest == computed // smallest and 0 < state.offloaded_blocks >= named:
            state.tag_of_filled(before, computed, size)
            return
        lazy = self.lazy
        tables = sides.context.get_block_ids(request.request_id)
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
                run = OffloadRun(request.request_id, keys, known, tuple(chain[known:sound]))
                self._save(run, now)
        if known and rows > state.offloaded_blocks:
            self.index.touch(keys[known - 1])
            if chain is not None:
                self.writeback.note_used(keys, known)
        state.sound, state.offloaded_blocks = sound, max(named, state.offloaded_blocks)
        side_saves.note(request.request_id, state, known_tokens, len(request.token_ids), sound, now)

    @property
    def dirty(self) -> bool:
        """Whether lazy saving has something to do in a step of an idle engine."""
        return self.lazy is not None and self.lazy.dirty

    def request_finished(self, request_id: str) -> None:
        """The engine has forgotten the request; what it computed is still saved."""
        if self.lazy is not None:
            self.lazy.request_finished(request_id)

    def clear(self) -> None:
        """A new epoch begins: what the engine holds belongs to the old one."""
        if self.lazy is not None:
            self.lazy.clear()

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
        before, wanted = run.keys[run.start - 1] if run.start else ROOT, len(run.block_ids)
        room = self.room.reservable(before, wanted)
        self.metrics.add("dropped_blocks", max(0, wanted - room))
        keys, held = run.keys, run.block_ids[:room]
        end = run.start + len(held)
        if not held:
            return 0
        reservation = self.index.reserve(keys, run.start, end)
        if reservation is None:
            raise PactViolation(f"there is no room for {len(held)} blocks, although so many were reservable")
        self.metrics.add("evicted_blocks", len(reservation.evicted), MEMORY)
        pin, leaving = self.index.pin(keys[end - 1]), run.leaving.intersection(held)
        if self._context is not None and not (run.is_held and len(held) == wanted):
            hold(self._context, held, leaving)
        chain = self.side_saves.sides.groups.chain or 0 if self.side_saves is not None else 0
        self.jobs.order_save(run.request_id, run.start, reservation.slots, held, keys, pin, now, leaving, chain)
        return len(held)

    def check(self) -> None:
        """See `LazyOffload.check`; verify what is put off. Raises PactViolation."""
        if self.lazy is not None:
            self.lazy.check()
        if not all(waiting.pieces and all(waiting.pieces) for waiting in self.jobs.put_off):
            raise PactViolation("a save without blocks is put off")

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
        self.index.complete(save.slots[:done])
        self.index.abandon(save.slots[done:])
        self.index.unpin(save.pin)
        self.metrics.add("saved_blocks", done)
        self.metrics.add("dropped_blocks", len(job.slots) - done)
        if self.lazy is not None:
            self.lazy.saved(len(job.block_ids))
            self.lazy.forget(save.keys[job.start_block + done : job.blocks.end])
        return job.start_block + done
