"""Which blocks of side groups are saved: with the step that fills them, or, with `"save": "lazy"`, with their rows.

Owns the order of such a save and its end. `offload.py` saves the chain that they hang on.

Of windows only those are saved from which a request will go on: those at the end of a prompt, of its answer, and where
two prompts part. All others would be most of what is stored, and nobody asks for them (research/hybrid_trace.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from kvpact.cache.jobs import SaveState, TransferJobs
from kvpact.cache.lazy_sides import LazySides, SideRun
from kvpact.cache.request import RequestState
from kvpact.cache.room import ArenaRoom
from kvpact.cache.sides import Sides, runs_of
from kvpact.contract import BlockHolder, JobOutcome
from kvpact.errors import PactViolation
from kvpact.identity.groups import GroupKind
from kvpact.identity.keys import BlockKey
from kvpact.identity.tags import BlockTags, Tag
from kvpact.index.block_index import BlockIndex
from kvpact.metrics import MEMORY, Metrics

Tables = Sequence[Sequence[int]]
"""The engine's blocks of a request, by group."""


def hold(context: BlockHolder, block_ids: Sequence[int], leaving: frozenset[int]) -> None:
    """Hold the engine's blocks of a save, in the sequences in which `give_back` releases them."""
    for part in filter(None, _parts(block_ids, leaving)):
        context.touch(part)


def give_back(context: BlockHolder, save: SaveState) -> None:
    """Release the engine's blocks of a save, the last first; the engine evicts `leaving` blocks before all others."""
    kept, leaving = _parts(save.job.block_ids, save.leaving)
    context.free_blocks(kept)
    if leaving:
        context.free_blocks(leaving, evict_first=True)


def _parts(block_ids: Sequence[int], leaving: frozenset[int]) -> tuple[Sequence[int], Sequence[int]]:
    """The blocks that stay and those that leave, each with the last one first."""
    turned = block_ids[::-1]
    if not leaving:
        return turned, ()
    return [each for each in turned if each not in leaving], [each for each in turned if each in leaving]


@dataclass(eq=False, slots=True)
class SideSaves:
    """The way of side groups' blocks from the engine into the arena."""

    sides: Sides
    index: BlockIndex
    room: ArenaRoom
    jobs: TransferJobs
    tags: BlockTags
    metrics: Metrics
    lazy: LazySides | None = None
    """None: blocks are saved as they are computed."""

    def tag_filled(self, tag: Tag, before: int, computed: int, tables: Tables) -> None:
        """The step computes a request's tokens [before, computed): tag the side groups' blocks that it fills."""
        groups = self.sides.groups
        for number in groups.sides:
            size = groups.groups[number].block_size
            filled = tables[number][before // size : computed // size]
            if filled:
                self.tags.fill(self.sides.not_null(filled), tag)

    def sound_rows(self, state: RequestState, rows: int, tables: Tables) -> int:
        """How many of the first `rows` have the request's tag in all groups, as far as it still has their blocks.

        Rows that were found to have it stay so until the request gets another tag.
        """
        groups, size = self.sides.groups, self.sides.groups.block_size
        if groups.chain is not None:
            rows = self.tags.same_prefix(tables[groups.chain][:rows], min(state.sound, rows), state.tag)
        for number in groups.sides:
            group, table = groups.groups[number], tables[number]
            first = max(state.sound * size // group.block_size, group.needed(state.loaded_rows * size).start)
            for block in range(first, min(rows * size // group.block_size, len(table))):
                if not self.tags.has(table[block], state.tag) and not self.sides.is_null(table[block]):
                    rows = min(rows, groups.row_of(number, block))
                    break
        return rows

    def note(
        self, request_id: str, state: RequestState, computed: int, known: int, sound_rows: int, now: float
    ) -> None:
        """After this step the first `computed` of the request's `known` tokens are computed: save what others may need.

        Only blocks before row `sound_rows` hold what their names say.
        """
        context, groups = self.sides.context, self.sides.groups
        assert context is not None
        first = state.sides_from
        state.sides_from = max(first, min(computed, state.offloaded_blocks * groups.block_size))
        tables = context.get_block_ids(request_id)
        keys = state.keys.keys if state.keys is not None else []
        rows = sound_rows
        if self.lazy is not None:
            self.lazy.confirm(request_id, tables)
        else:
            rows = self.index.known_prefix(keys[:sound_rows])
        for number in groups.sides:
            size, table = groups.groups[number].block_size, tables[number]
            end = min(computed // size, len(table))
            wanted = [
                block
                for block in self._wanted(state, number, range(first // size, end), computed, known)
                if not self.sides.is_null(table[block])
                and groups.row_of(number, block) < rows
                and self.tags.has(table[block], state.tag)
            ]
            if self.lazy is not None:
                self.lazy.note(request_id, state, number, wanted, table)
                continue
            new = [block for block in wanted if self._is_new(state, number, block)]
            for start, end in runs_of(new):
                self._save(request_id, state, number, range(start, end), table, now)

    def _is_new(self, state: RequestState, number: int, block: int) -> bool:
        """Whether a block, whose row has a key, is not known yet."""
        name = self.sides.key(state, number, block)
        return name is not None and name not in self.index

    def _wanted(self, state: RequestState, number: int, new: range, computed: int, known: int) -> Sequence[int]:
        """Return the new blocks of a group that a later request may need: all, or those where windows and steps end."""
        group, size = self.sides.groups.groups[number], self.sides.groups.block_size
        if group.kind is GroupKind.FULL:
            return new
        if group.kind is GroupKind.STATE:  # a step leaves the state of its end, and what it was begun with
            return [block for block in new if (block + 1) * group.block_size == computed]
        ends = [known - 1, *(rows * size for rows in state.branches)]
        whole = [end - end % self.sides.groups.alignment for end in ends if end > 0]
        last = range(max(new.start, group.needed(whole[0]).start if whole else 0), new.stop)
        tails = [range(max(new.start, tail.start), min(new.stop, tail.end)) for tail in map(group.needed, whole[1:])]
        return sorted({*last, *(block for tail in tails for block in tail)})

    def _save(
        self, request_id: str, state: RequestState, number: int, blocks: range, table: Sequence[int], now: float
    ) -> None:
        """Save a run of new blocks as they are computed."""
        assert state.keys is not None
        names = [name for block in blocks if (name := self.sides.key(state, number, block)) is not None]
        rows = tuple(self.sides.groups.row_of(number, block) for block in blocks)
        held = tuple(table[blocks.start : blocks.stop])
        chain = tuple(state.keys.keys[: rows[-1] + 1])
        self.save(SideRun(request_id, chain, blocks.start, held, group=number, names=tuple(names), rows=rows), now)

    def save(self, run: SideRun, now: float) -> int:
        """Save blocks while there is room, and drop those after them; returns the number saved."""
        assert self.sides.context is not None
        slot_class, wanted = self.sides.class_of(run.group), len(run.names)
        room = self.room.reservable(run.keys[-1], wanted, slot_class) if run.keys[-1] in self.index else 0
        self.metrics.add("dropped_blocks", max(0, wanted - room))
        names, rows, held = run.names[:room], run.rows[:room], run.block_ids[:room]
        if not names:
            return 0
        reservation = self.index.reserve_sides(names, [run.keys[row] for row in rows], slot_class)
        if reservation is None:
            raise PactViolation(f"there is no room for {len(names)} side blocks, although so many were reservable")
        self.metrics.add("evicted_blocks", len(reservation.evicted), MEMORY)
        pin, chain, leaving = self.index.pin(names[-1]), run.keys[: rows[-1] + 1], run.leaving.intersection(held)
        hold(self.sides.context, held, leaving)
        save = self.jobs.order_save(
            run.request_id, run.start, reservation.slots, held, chain, pin, now, leaving, run.group
        )
        save.sides, save.side_rows = names, rows
        return len(names)

    def settle(self, save: SaveState) -> list[BlockKey]:
        """All ranks have reported: release the engine's blocks; returns the names of the blocks that are saved."""
        assert self.sides.context is not None
        job = save.job
        self.jobs.end(save)
        outcome = save.tally.saved() if save.trusted else JobOutcome()
        give_back(self.sides.context, save)
        arrived = set(outcome.done.blocks())
        done = [
            block in arrived and row < save.garbage_from for block, row in zip(job.blocks, save.side_rows, strict=True)
        ]
        self.index.complete(list(compress(job.slots, done)))
        self.index.abandon([slot for slot, good in zip(job.slots, done, strict=True) if not good])
        self.index.unpin(save.pin)
        self.metrics.add("saved_blocks", sum(done))
        self.metrics.add("dropped_blocks", len(done) - sum(done))
        return list(compress(save.sides, done))
