"""When computed blocks are saved: at once, or when the engine is about to evict them (`"save": "lazy"`).

Owns what a step owes of each KV cache group, the order of a save (room in the index, the hold on the engine's blocks,
the job) and its end. `BlockTags` says what a block was filled with, `lazy_offload.py` what the engine holds and evicts
next.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kvpact.cache.groups import RequestGroups, Tables, runs_of
from kvpact.cache.jobs import OffloadRun, PactLedger, Piece, PutOffSave, SaveState, TransferJobs
from kvpact.cache.lazy_offload import MIN_WINDOW, LazyOffload
from kvpact.cache.request import RequestState
from kvpact.cache.tier_set import TierSet
from kvpact.cache.waiting import Queue
from kvpact.cache.writeback import Offer, WriteBack
from kvpact.config import KvpactConfig
from kvpact.contract import BlockHolder, EngineRequest, JobOutcome, SchedulerContext, num_blocks_for
from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey, BlockKeys
from kvpact.identity.tags import BlockTags
from kvpact.index.block_index import ROOT, BlockIndex
from kvpact.metrics import MEMORY

logger = logging.getLogger(__name__)

PIECE_BLOCKS = 512
"""Rows that one step orders saves of before it leaves others to later steps: about 0.7 ms of the scheduler's thread
with all that becomes of them."""

QUIET_BLOCKS = 32
"""A step that saves at most so many rows makes room for later ones, of `PIECE_BLOCKS` at most."""

CATCH_UP_STEPS = 8
"""If more wait than so many steps would take in pieces, a step orders the part that lets them take so many."""


@dataclass(eq=False)
class Offloader:
    """The way of blocks from the engine into the arena. A request's progress is in its `RequestState`."""

    config: KvpactConfig
    groups: RequestGroups
    ledger: PactLedger
    jobs: TransferJobs
    tags: BlockTags
    writeback: WriteBack
    index: BlockIndex = field(init=False)
    tiers: TierSet = field(init=False)
    queue: Queue = field(init=False)
    """The requests that wait for room to read."""
    lazy: LazyOffload | None = field(default=None, init=False)
    """None: blocks are saved as they are computed."""
    piece_blocks: int = PIECE_BLOCKS
    lazy_window: int = MIN_WINDOW
    """With `"save": "lazy"`, at least so many of the engine's blocks that are evicted next are watched."""
    _left: int = field(default=PIECE_BLOCKS, init=False)
    """Rows of which the running step may still order saves."""
    _context: BlockHolder | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.index, self.tiers = self.groups.index, self.writeback.tiers

    def bind(self, context: BlockHolder) -> None:
        """Hold blocks through `context` while they are copied; its free queue says when to save lazily."""
        self._context, self.lazy = context, None
        self.groups.bind(context)
        if self.config.save != "lazy" or not self.groups.shows_all:
            return
        if isinstance(context, SchedulerContext):
            self.lazy = LazyOffload(context, self.index, self.groups, self.tags, self.lazy_window)
        else:
            logger.warning("kvpact: this engine does not show its free queue; blocks are saved as they are computed")

    @property
    def saves_any(self) -> bool:
        """Whether anything is saved that requests compute."""
        return self.config.save != "off" and self.groups.shows_all

    # What a step computes

    def note(
        self, request: EngineRequest, state: RequestState, computed_tokens: int, block_ids: Callable[[], Sequence[int]]
    ) -> int:
        """After this step the first `computed_tokens` tokens are computed: save full blocks that are not stored.

        Returns the number of tokens with which the request next fills a block, if nothing is to be done until then.
        """
        self._note(request, state, computed_tokens, block_ids)
        return self._quiet_until(state)

    def _note(
        self, request: EngineRequest, state: RequestState, computed_tokens: int, block_ids: Callable[[], Sequence[int]]
    ) -> None:
        before, lazy, groups = state.computed, self.lazy, self.groups
        state.advance(computed_tokens)
        if not self.saves_any:
            return
        size, tables = groups.groups.block_size, None
        begun, filled = before // size, computed_tokens // size
        if before // groups.smallest_block < computed_tokens // groups.smallest_block:
            tables = groups.tables(request.request_id, block_ids)
            if state.sound < begun:
                state.note_sound(self._sound_rows(state, begun, tables))
        tag = state.tag_of_filled(before, computed_tokens, size)
        if tables is not None:
            self.tags.fill(groups.filled(tables, before, computed_tokens), tag)
        if state.keys is None:
            if lazy is not None:
                lazy.invalidate_blocks(each for table in tables or () for each in table)
            return
        full = min(filled, state.keys.count(len(request.token_ids)))
        if lazy is not None and tables is not None:  # filled, and without a key until the next token is known
            lazy.invalidate_blocks(groups.filled(tables, max(before, full * size), computed_tokens))
        if full > state.offloaded_blocks:
            self._note_full(request, state, full, lambda: tables or groups.tables(request.request_id, block_ids))

    def _quiet_until(self, state: RequestState) -> int:
        if self.lazy is not None or state.loads_without_progress or state.computed < state.max_computed:
            return 0
        if self.saves_any and (state.keys is None or state.offloaded_blocks < state.computed // self.groups.block_size):
            return 0
        return state.computed - state.computed % self.groups.smallest_block + self.groups.smallest_block

    def _note_full(
        self, request: EngineRequest, state: RequestState, full: int, tables_of: Callable[[], Tables]
    ) -> None:
        """The first `full` rows of a request are computed, and have keys: save what others may need of all groups.

        Its rows, of which those before `first` were offered in earlier steps; a region may be empty:

            0          known           sound               named      stop            full
            | is held  | is saved now  | blocks of another | cannot   | saved in      | still being
            | already  |               | tag, not stored   | be named | later steps   | computed
        """
        assert state.keys is not None
        name, groups, lazy = request.request_id, self.groups.groups, self.lazy
        first = state.offloaded_blocks
        state.note_offloaded(full)
        stop = full - self._to_put_off(first, full, state.keys)
        keys = state.keys.extend(request.token_ids, stop)
        named = min(stop, len(keys))
        known = min(named, self.index.known_prefix(keys))
        if known and (known == named or lazy is not None):
            self.index.touch(keys[known - 1])
            if groups.chain is not None:
                self.writeback.note_used(Offer(keys, named))
        if known == named and stop == full and lazy is None and not groups.sides:
            return
        tables, sound = tables_of(), named
        if state.sound < named:
            sound = self._sound_rows(state, named, tables)
            state.note_sound(sound)
        chain = tables[groups.chain] if groups.chain is not None else ()
        hanging = self._hanging(request, state, range(first, full), tables) if groups.sides else []
        if lazy is not None:
            lazy.invalidate_blocks(chain[max(first, sound) : full])
            lazy.confirm(name, tables)
            known = min(first, sound)
        now = self.tiers.clock()
        if groups.chain is not None and known < sound:
            ids = tuple(chain[known:sound])
            run = OffloadRun(name, groups.chain, known, keys[known:sound], range(known, sound), keys, ids)
            self._owe(run, state, now)
        for run in self._runs(name, keys, sound, hanging, state) if hanging else ():
            self._owe(run, state, now)
        if stop < full and sound == stop:
            self._put_off(request, state, range(stop, full), chain, hanging)

    def _owe(self, run: OffloadRun, state: RequestState, now: float) -> None:
        """Save these blocks now, or when the engine is about to evict them."""
        if self.lazy is not None:
            self.lazy.note(run, state.tag)
        else:
            self.save(run, now)

    def _sound_rows(self, state: RequestState, rows: int, tables: Tables) -> int:
        """How many of the first `rows` have the request's tag in all groups, as far as it still has their blocks.

        Rows that were found to have it stay so until the request gets another tag.
        """
        groups = self.groups.groups
        size = groups.block_size
        if groups.chain is not None:
            rows = self.tags.same_prefix(tables[groups.chain], min(state.sound, rows), state.tag, rows)
        for number in groups.sides:
            group, table = groups.groups[number], tables[number]
            first = max(state.sound * size // group.block_size, group.needed(state.loaded_rows * size).start)
            for block in range(first, min(rows * size // group.block_size, len(table))):
                if not self.tags.has(table[block], state.tag) and not self.groups.is_null(table[block]):
                    rows = min(rows, groups.row_of(number, block))
                    break
        return rows

    def _hanging(
        self, request: EngineRequest, state: RequestState, rows: range, tables: Tables
    ) -> list[tuple[int, int, int]]:
        """What others may need of the computed blocks that hang on these rows: group, block, engine's block."""
        groups, known, found = self.groups.groups, len(request.token_ids), []
        computed = min(state.computed, known)
        for number in groups.sides:
            size, table = groups.groups[number].block_size, tables[number]
            new = range(rows.start * groups.block_size // size, min(computed // size, len(table)))
            found += [
                (number, block, table[block])
                for block in groups.worth_saving(number, new, computed, known, state.branches)
                if groups.row_of(number, block) < rows.stop
                and not self.groups.is_null(table[block])
                and self.tags.has(table[block], state.tag)
            ]
        return found

    def _runs(
        self,
        name: str,
        keys: Sequence[BlockKey],
        sound: int,
        hanging: Sequence[tuple[int, int, int]],
        state: RequestState | None,
    ) -> Iterator[OffloadRun]:
        """What hangs on the first `sound` rows, in runs of one group; without lazy saving, what memory does not know.

        The tiers are offered what it knows: they may have lost it. `state` keeps the keys of a request that lives.
        """
        groups, lazy = self.groups.groups, self.lazy is not None
        rows = sound if lazy and groups.chain is not None else self.groups.know_rows(keys[:sound])
        by_group: dict[int, dict[int, tuple[BlockKey, int]]] = {}
        used: list[BlockKey] = []
        for number, block, block_id in hanging:
            if (row := groups.row_of(number, block)) < rows:
                key = self.groups.key(state, number, block) if state is not None else None
                key = key or groups.side_key(keys[row], number, block)
                if lazy or key not in self.index:
                    by_group.setdefault(number, {})[block] = key, block_id
                else:
                    used.append(key)
        self.writeback.note_used(Offer(used, follow=False))
        for number, blocks in by_group.items():
            for start, end in runs_of(sorted(blocks)):
                names, ids = zip(*(blocks[block] for block in range(start, end)), strict=True)
                below = [groups.row_of(number, block) for block in range(start, end)]
                yield OffloadRun(name, number, start, names, below, keys, ids)

    # What is put off

    def _to_put_off(self, first: int, full: int, names: BlockKeys) -> int:
        """How many of a request's rows [first, full) later steps save; those that are stored do not count."""
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
        self, request: EngineRequest, state: RequestState, rows: range, chain: Sequence[int],
        hanging: Sequence[tuple[int, int, int]],
    ) -> None:  # fmt: skip
        """Have later steps save these rows of a request, and what hangs on them; hold the engine's blocks."""
        assert self._context is not None
        assert state.keys is not None
        pieces = deque[Piece]()
        for start in range(rows.start, rows.stop, self.piece_blocks):
            end = min(start + self.piece_blocks, rows.stop)
            there = [each for each in hanging if start <= self.groups.groups.row_of(each[0], each[1]) < end]
            piece = Piece(start, end, tuple(chain[start:end]), there)
            pieces.append(piece)
            for ids in filter(None, (piece.chain[::-1], _ids_of(piece))):
                self._context.touch(ids)
        self.jobs.put_off.append(PutOffSave(request.request_id, state.keys, request.token_ids, state.tag, pieces))

    def order_put_off(self, now: float) -> None:
        """End the step: order saves that earlier steps have put off, the oldest first, as far as the step may."""
        waiting = self.jobs.put_off
        if not waiting:
            if self.piece_blocks - self._left <= QUIET_BLOCKS:
                self.tiers.metrics.add("evicted_blocks", self.index.evict_ahead(self.piece_blocks), MEMORY)
            self._left = self.piece_blocks
            return
        while waiting and self._left > 0:
            try:
                self._order_piece(waiting[0], now)
            finally:
                if not waiting[0].pieces:
                    waiting.popleft()
        left = sum(piece.end - piece.start for each in waiting for piece in each.pieces)
        self._left = max(self.piece_blocks, left // CATCH_UP_STEPS)

    def _order_piece(self, waiting: PutOffSave, now: float) -> None:
        """Order the next piece; if it cannot be saved as a whole, drop what is left."""
        piece = waiting.pieces.popleft()
        is_taken, end = False, piece.start
        self._left -= piece.end - piece.start
        try:
            is_taken, end = self._save_piece(waiting, piece, now)
        finally:
            self._let_go(piece, () if is_taken else piece.chain)
            self._count_dropped(piece, end)
            while waiting.pieces and end < piece.end:
                self._drop(waiting.pieces.popleft())

    def _let_go(self, piece: Piece, chain: Sequence[int]) -> None:
        """Release what hangs on a piece's rows, of which each save holds its own, and these blocks of the chain."""
        assert self._context is not None
        for ids in filter(None, (_ids_of(piece), chain[::-1])):
            self._context.free_blocks(ids)

    def _save_piece(self, waiting: PutOffSave, piece: Piece, now: float) -> tuple[bool, int]:
        """Order a piece, as far as it is not stored; returns whether its save has taken over all the chain's blocks,
        and the row up to which it could be ordered: the pieces after it can be saved too if that is its end."""
        start, end, chain = piece.start, piece.end, self.groups.groups.chain
        if not waiting.trusted or start >= waiting.garbage_from:
            return False, start
        keys = waiting.names.extend(waiting.token_ids, end)
        sound = min(end, waiting.garbage_from, len(keys))
        if chain is not None:
            sound = min(sound, start + self.tags.same_prefix(piece.chain, 0, waiting.tag))
        known, is_taken = min(sound, self.groups.know_rows(keys)), False
        if known < start:
            return False, start
        if known < sound and chain is not None:
            whole, ids = known == start and sound == end, piece.chain[known - start : sound - start]
            rows = range(known, sound)
            run = OffloadRun(
                waiting.request_id, chain, known, keys[known:sound], rows, keys, ids, is_held=whole
            )  # fmt: skip
            is_taken = self.save(run, now) == len(piece.chain)
        still = [each for each in piece.hanging if self.tags.has(each[2], waiting.tag)]
        for run in self._runs(waiting.request_id, keys, sound, still, None) if still else ():
            self.save(run, now)
        return is_taken, sound

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
        if self.lazy is not None:
            refused = self.lazy.refused
            sizes = [group.block_size for group in self.groups.groups.groups]
            for run in self.lazy.due(loading_blocks + sum(num_blocks_for(computed_tokens, size) for size in sizes)):
                self.lazy.saving(self.save(run, now))
            if self.lazy.refused > refused:
                self.tiers.metrics.add("dropped_blocks", self.lazy.refused - refused)

    # A save

    def save(self, run: OffloadRun, now: float) -> int:
        """Save blocks while there is room, and drop those after them; returns the number saved."""
        if run.group == self.groups.groups.chain:
            needed = run.chain[run.start - 1] if run.start else ROOT
        else:
            needed = run.chain[run.rows[-1]]
        if needed == ROOT:
            return self._order(run, needed, now)
        if needed not in self.index:
            self.tiers.metrics.add("dropped_blocks", len(run.block_ids))
            return 0
        before = self.index.pin(needed)  # else each question about the chain walks to its start
        try:
            return self._order(run, needed, now)
        finally:
            self.index.unpin(before)

    def _order(self, run: OffloadRun, needed: BlockKey, now: float) -> int:
        """Order a save of the blocks that there is room for, after the row `needed` or hanging on it and others."""
        wanted = len(run.block_ids)
        reservable = partial(self.index.reservable, needed, wanted, self.groups.class_of(run.group))
        room = min(wanted, self.queue.room_to_save(self.ledger.make_room(reservable, wanted)))
        self.tiers.metrics.add("dropped_blocks", wanted - room)
        if not room:
            return 0
        if room < wanted:
            ids = run.block_ids[:room]
            leaving = run.leaving.intersection(ids)
            run = replace(
                run, keys=run.keys[:room], rows=run.rows[:room], block_ids=ids, leaving=leaving, is_held=False
            )
        if run.group == self.groups.groups.chain:
            reservation = self.index.reserve(run.chain, run.start, run.start + room)
        else:
            parents = [run.chain[row] for row in run.rows]
            reservation = self.index.reserve_sides(run.keys, parents, self.groups.class_of(run.group))
        if reservation is None:
            raise PactViolation(f"there is no room for {room} blocks, although so many were reservable")
        self.tiers.metrics.add("evicted_blocks", reservation.evicted, MEMORY)
        pin = self.index.pin(run.keys[-1])
        if self._context is not None and not run.is_held:
            for part in filter(None, _parts(run)):
                self._context.touch(part)
        self.jobs.order_save(run, reservation.slots, pin, now)
        return room

    def settle(self, save: SaveState) -> int:
        """All ranks have reported: release the engine's blocks, and offer the tiers what was saved; its blocks."""
        run = save.run
        self.jobs.end(save)
        self._release(save)
        good = self._good(save)
        saved = sum(good)
        became_held = self.index.end_writes(save.slots, good)
        self.index.unpin(save.pin)
        self.tiers.metrics.observe("save_seconds", self.tiers.clock() - save.ordered_at)
        self.tiers.metrics.add("saved_blocks", saved)
        self.tiers.metrics.add("dropped_blocks", len(good) - saved)
        if self.lazy is not None:
            self.lazy.saved(len(run.block_ids))
            self.lazy.forget(key for key, is_good in zip(run.keys, good, strict=True) if not is_good)
        if saved and run.group == self.groups.groups.chain:
            self.writeback.note_saved(Offer(run.chain, run.start + saved, new=run.start))
        elif saved:
            self.writeback.note_saved(Offer(run.keys, follow=False))
        self.writeback.note_became_held(became_held, run.keys)
        return saved

    def _release(self, save: SaveState) -> None:
        if self._context is not None and save.holds:
            kept, leaving = _parts(save.run)
            self._context.free_blocks(kept)
            if leaving:  # the engine evicts these before all others
                self._context.free_blocks(leaving, evict_first=True)
        save.holds = False

    def give_up(self) -> None:
        """Store nothing of what is being saved, or put off, and release the engine's blocks (H106)."""
        for save in self.jobs.saves.values():
            save.trusted = False
            self._release(save)
        while self.jobs.put_off:
            for piece in self.jobs.put_off.popleft().pieces:
                self._drop(piece)

    def _drop(self, piece: Piece) -> None:
        self._count_dropped(piece, piece.start)
        self._let_go(piece, piece.chain)

    def _count_dropped(self, piece: Piece, start: int) -> None:
        """Count what will not be saved of a piece: its rows from `start` on, and what hangs on them."""
        hanging = sum(self.groups.groups.row_of(group, block) >= start for group, block, _ in piece.hanging)
        self.tiers.metrics.add("dropped_blocks", len(piece.chain[start - piece.start :]) + hanging)

    def _good(self, save: SaveState) -> list[bool]:
        """Which blocks of a save hold what their keys say; of the chain's none after one that does not."""
        run, outcome = save.run, save.tally.saved() if save.trusted else JobOutcome()
        if run.group == self.groups.groups.chain:
            done = outcome.done.prefix_from(run.start)
            count = max(0, min(done, save.garbage_from - run.start))
            return [True] * count + [False] * (len(run.keys) - count)
        arrived = set(outcome.done.blocks())
        blocks = zip(save.job.blocks, run.rows, strict=True)
        return [block in arrived and row < save.garbage_from for block, row in blocks]

    def check(self) -> None:
        """See `LazyOffload.check`; verify what is put off. Raises PactViolation."""
        if self.lazy is not None:
            self.lazy.check()
        if not all(waiting.pieces for waiting in self.jobs.put_off):
            raise PactViolation("a save without blocks is put off")


def _ids_of(piece: Piece) -> list[int]:
    """The engine's blocks that hang on a piece's rows."""
    return [block_id for _, _, block_id in piece.hanging]


def _parts(run: OffloadRun) -> tuple[Sequence[int], Sequence[int]]:
    """The engine's blocks of a save that stay and those that leave, each with the last one first."""
    turned = run.block_ids[::-1]
    if not run.leaving:
        return turned, ()
    return [each for each in turned if each not in run.leaving], [each for each in turned if each in run.leaving]
