"""Time of a save: as blocks are computed, or when the engine is about to evict them (`"save": "lazy"`).

Owns nothing: a request's progress is in its `RequestState`, what waits in `put_off.py`, and what the engine holds and
evicts next in `lazy_offload.py`. `BlockTags` says what a block was filled with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvpact.cache.lazy_offload import MIN_WINDOW, LazyOffload
from kvpact.cache.needs.engine_groups import EngineGroups, Tables
from kvpact.cache.needs.owed import Computed
from kvpact.cache.put_off import PutOff
from kvpact.cache.request import ALL_ROWS, RequestState
from kvpact.cache.saves import Saves
from kvpact.config import KvpactConfig
from kvpact.contract import BlockHolder, EngineRequest, SchedulerContext
from kvpact.identity.groups import LooseBlock
from kvpact.identity.tags import NO_TAG, BlockTags

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Offloader:
    """The way of blocks from the engine into the arena."""

    config: KvpactConfig
    saves: Saves
    groups: EngineGroups = field(init=False)
    tags: BlockTags = field(init=False)
    put_off: PutOff = field(init=False)
    lazy_window: int = MIN_WINDOW
    """With `"save": "lazy"`, at least so many of the engine's blocks that are evicted next are watched."""

    def __post_init__(self) -> None:
        self.groups = self.saves.groups
        self.tags = self.saves.tags
        self.put_off = PutOff(self.saves)

    def bind(self, context: BlockHolder) -> None:
        """Hold blocks through `context` while they are copied; its free queue says when to save lazily."""
        self.groups.bind(context)
        if not self.groups.shows_all:
            logger.warning(
                "kvpact: the model has %d KV cache groups, and this engine does not show the blocks of each: nothing "
                "is stored or served",
                len(self.groups.groups.groups),
            )
        lazy = None
        if self.config.save == "lazy" and self.groups.shows_all:
            if isinstance(context, SchedulerContext):
                lazy = LazyOffload(context, self.saves.memory.index, self.groups, self.tags, self.lazy_window)
            else:
                text = "kvpact: this engine does not show its free queue; blocks are saved as they are computed"
                logger.warning(text)
        self.saves.bind(context, lazy)

    @property
    def lazy(self) -> LazyOffload | None:
        """Memo of the engine's blocks; None: blocks are saved as they are computed."""
        return self.saves.lazy

    @property
    def saves_any(self) -> bool:
        """True if anything is saved that requests compute."""
        return self.config.save != "off" and self.groups.shows_all

    # What a step computes

    def note(
        self,
        request: EngineRequest,
        state: RequestState,
        computed: int,
        block_ids: Callable[[], Sequence[int]],
        has_plan: bool,
    ) -> None:
        """After this step the first `computed` tokens are computed: save full blocks that are not stored.

        The request is quiet until it next fills a block, if nothing is to be done until then, and it has no plan.
        """
        lazy = self.saves.lazy
        groups = self.groups
        if computed < state.computed:  # drafts were rejected, or the engine computes again what it has dropped
            first = computed // groups.block_size
            self.saves.jobs.cut_put_off(request.request_id, first)
            state.go_back(first, groups.block_size)
        before = state.computed
        smallest = groups.smallest_block
        saves_any = self.saves_any
        begun = before // groups.block_size
        tables = None
        offered: Sequence[LooseBlock] = ()
        if saves_any:
            known = len(request.token_ids)
            tables, filled, offered = groups.tables_of_step(request.request_id, block_ids, before, computed, known)
            if offered and state.stored_end < ALL_ROWS:
                offered = groups.attached_to(offered, 0, state.stored_end)
        if tables is not None and state.sound < begun:
            state.note_sound(self._sound_rows(state, begun, tables))
        next_fill = 0 if has_plan or lazy is not None else computed - computed % smallest + smallest
        tag, rows = state.advance(computed, len(request.token_ids), groups.block_size, next_fill)
        if rows.stop > state.stored_end:  # what a hint keeps out, another request that has these blocks may store
            rows = range(rows.start, max(rows.start, state.stored_end))
        if tables is not None:
            self.tags.fill(filled, tag)
        if lazy is not None and tables is not None:
            if state.keys is None:
                lazy.invalidate_blocks(each for table in tables for each in table)
            else:  # filled, and without a key until the next token is known
                lazy.invalidate_blocks(groups.filled(tables, max(before, rows.stop * groups.block_size), computed))
        if offered or request.request_id in self.saves.jobs.unnamed:
            self._note_loose(request, state, rows, offered, tables or groups.tables(request.request_id, block_ids))
        elif saves_any and rows:
            self._note_full(request, state, rows, tables or groups.tables(request.request_id, block_ids))

    def _note_loose(
        self,
        request: EngineRequest,
        state: RequestState,
        rows: range,
        offered: Sequence[LooseBlock],
        tables: Tables,
    ) -> None:
        """Save `rows` of a request, and the loose blocks that the engine has `offered` now, or before they had a key.

        Those that have none yet are held until they have.
        """
        name = request.request_id
        keys = state.keys
        full = state.offloaded_blocks
        held = self.put_off.named(name, full)
        good = [waiting for waiting in held if waiting.tag == state.tag and self.put_off.still_holds(waiting)]
        loose = [each for waiting in good for each in waiting.pieces[0].loose]
        for each in offered:
            (row,) = self.groups.rows_of((each,))
            self.tags.fill((each[2],), state.tag if row < state.sound else NO_TAG)
            if row < full:
                loose.append(each)
            elif row < state.sound and keys is not None:
                of_row = Computed(name, keys, request.token_ids, state.tag, row, row + 1, row, (), (each,))
                self.put_off.hold(of_row)
        is_saved = False
        try:
            if loose:
                loose += self.groups.windows_at(loose, tables)
                late = self.groups.rows_of(loose)
                rows = range(min(rows.start, late.start), max(rows.stop, late.stop)) if rows else late
            if rows:
                self._note_full(request, state, rows, tables, loose)
                is_saved = True
        finally:
            for waiting in held:
                self.put_off.end_hold(waiting, is_saved=is_saved and waiting in good)

    def _note_full(
        self,
        request: EngineRequest,
        state: RequestState,
        rows: range,
        tables: Tables,
        offered: Sequence[LooseBlock] = (),
    ) -> None:
        """Save computed `rows` of a request, which have keys, and all blocks attached to them that others may need,
        with those that the engine has `offered`.

        Rows after a bound are left to later steps.
        """
        assert state.keys is not None
        name = request.request_id
        first = rows.start
        full = rows.stop
        lazy = self.saves.lazy
        groups = self.groups
        if state.sound < full:
            state.note_sound(self._sound_rows(state, full, tables))
        tokens = request.token_ids
        prompt = state.record.prompt_tokens
        ids, loose = groups.worth_saving(tables, rows, state.computed, len(tokens), state.branches)
        loose = [*dict.fromkeys((*loose, *offered))]
        owed = Computed(
            name, state.keys, tokens, state.tag, first, full, 0, ids, loose, prompt, state.sound, owner=state.owner
        )
        left = 0
        if lazy is not None:
            lazy.confirm(name, tables)
        elif self.saves.context is not None and self.config.match_at != "step":
            left = self.put_off.rows_left(first, full, owed)  # a step's lookups look for what the step saves
        stop = owed.end = full - left
        if left:
            owed = replace(owed, loose=groups.attached_to(loose, first, stop))
        sound, _ = self.saves.save(owed, state.loose_keys, self.saves.tiers.clock())
        if lazy is not None:
            lazy.invalidate_blocks(ids[max(first, sound) : full])
        if left and sound == stop:
            self.put_off.put_off(replace(owed, start=stop, end=full, loose=loose))

    def _sound_rows(self, state: RequestState, rows: int, tables: Tables) -> int:
        return self.groups.sound_rows(tables, rows, state.sound, state.loaded_rows, self.tags, state.tag)

    # Other times

    @property
    def dirty(self) -> bool:
        """True if lazy saving has something to do in a step of an idle engine."""
        return self.saves.lazy is not None and self.saves.lazy.dirty

    def request_finished(self, request_id: str) -> None:
        """The engine has forgotten the request; what it computed is still saved."""
        self.put_off.forget(request_id)
        if self.saves.lazy is not None:
            self.saves.lazy.request_finished(request_id)

    def clear(self) -> None:
        """A new epoch begins: what the engine holds belongs to the old one."""
        self.put_off.forget_all()
        if self.saves.lazy is not None:
            self.saves.lazy.clear()

    def order_what_is_leaving(self, loading_blocks: int, computed_tokens: int, now: float) -> None:
        """Save blocks that the engine is about to evict; in this step it took blocks for these."""
        if (lazy := self.saves.lazy) is not None:
            refused = lazy.refused
            for owed in lazy.due(loading_blocks + self.groups.blocks_of(computed_tokens)):
                lazy.saving(self.saves.order(owed, now))
            if lazy.refused > refused:
                self.saves.tiers.metrics.add("dropped_blocks", lazy.refused - refused)

    def give_up(self) -> None:
        """Cancel all saves, ordered or put off, and release the engine's blocks (H106)."""
        for save in self.saves.jobs.saves.values():
            save.trusted = False
            self.saves.release(save)
        self.put_off.give_up()

    def check(self) -> None:
        """See `LazyOffload.check`; verify what is put off. Raises PactViolation."""
        if self.saves.lazy is not None:
            self.saves.lazy.check()
        self.put_off.check()
