"""One way of blocks from the engine into memory, whoever owes them: named, given slots, held, ordered, settled.

Blocks come from a step that computed them (`offload.py`), from an earlier one that left them (`put_off.py`), or because
the engine is about to evict them (`lazy_offload.py`). Owns nothing but the hold on the engine's blocks, which `jobs.py`
keeps with each save.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpact.cache.announcements import Announcements
from kvpact.cache.jobs import SaveState, TransferJobs
from kvpact.cache.lazy_offload import LazyOffload
from kvpact.cache.memory import Memory
from kvpact.cache.needs.engine_groups import EngineGroups
from kvpact.cache.needs.owed import Computed, Owed
from kvpact.cache.needs.runs import linked, loose
from kvpact.cache.retaining import Retaining
from kvpact.cache.tier_set import TierSet
from kvpact.cache.waiting import Queue
from kvpact.cache.writeback import WriteBack
from kvpact.contract import BlockHolder
from kvpact.identity.keys import BlockKey
from kvpact.identity.tags import BlockTags, Tag
from kvpact.metrics import MEMORY


@dataclass(eq=False)
class Saves:
    """Saves of one engine's blocks."""

    memory: Memory
    groups: EngineGroups
    jobs: TransferJobs
    tags: BlockTags
    writeback: WriteBack
    queue: Queue
    """The requests that wait for room to read."""
    announcements: Announcements | None = None
    retaining: Retaining | None = None
    """Notes whose blocks they are; None: no client can release them."""
    tiers: TierSet = field(init=False)
    lazy: LazyOffload | None = field(default=None, init=False)
    """None: blocks are saved as they are computed."""
    context: BlockHolder | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.tiers = self.writeback.tiers

    def bind(self, context: BlockHolder, lazy: LazyOffload | None) -> None:
        """Hold blocks through `context` while they are copied; a memo `lazy` says when to save them."""
        self.context = context
        self.lazy = lazy

    def save(self, computed: Computed, known: dict[tuple[int, int], BlockKey], now: float) -> tuple[int, int]:
        """Save computed rows, and what is attached to them, as far as memory has not got them; with lazy saving note
        them instead.

        Returns the row up to which they have names and the tag, and the number of blocks of the chain that are saved
        now. `known` has the keys of the loose blocks.

            0          known           sound               named            end
            | is held  | is saved now  | blocks of another | cannot be      |
            | already  |               | tag, not stored   | named          |
        """
        lazy = self.lazy
        groups = self.groups
        start = computed.start
        keys = computed.names.keys
        if len(keys) < computed.end:
            keys = computed.names.extend(computed.token_ids, computed.end)
        named = min(computed.end, len(keys))
        held = min(named, self.memory.index.known_prefix(keys, min(start, len(keys) - 1)))
        if held and (held == named or lazy is not None):
            self.memory.index.touch(keys[held - 1])
            if self.tiers.written:
                self.writeback.note_used(linked(keys[:named], request_id=computed.request_id))
        sound = min(named, computed.sound)
        if held < computed.first:
            held = self.memory.know(keys[:sound])
        if held < computed.first:
            return start, 0  # the piece before it was not saved
        run = groups.linked_run(computed, keys, held if lazy is None else min(start, sound), sound)
        saved = 0
        if run is not None:
            is_held = computed.is_held and len(run.keys) == len(computed.ids)
            saved = self._owe(Owed(computed.request_id, run, is_held=is_held), computed.tag, now)
        if computed.loose:
            rows = sound if lazy is not None and groups.row_bytes else self.memory.know(keys[:sound])
            for run in groups.loose_runs(computed, keys, rows, known, self.tags):
                parts, used = ([run], ()) if lazy is not None else run.unknown_parts(self.memory.index.__contains__)
                self.writeback.note_used(loose(used))  # tiers may have lost them
                for part in parts:
                    self._owe(Owed(computed.request_id, part), computed.tag, now)
        return sound, saved

    def _owe(self, owed: Owed, tag: Tag, now: float) -> int:
        if self.lazy is None:
            return self.order(owed, now)
        self.lazy.note(owed.request_id, owed.run, tag)
        return 0

    def order(self, owed: Owed, now: float) -> int:
        """Order a save of as many blocks as there is room for, and drop those after them; returns their number."""
        wanted = len(owed.run.keys)
        metrics = self.tiers.metrics
        taken = self.memory.take(owed.run, self.queue.room_to_save if self.queue.lacks else None)
        if taken is None:
            metrics.add("dropped_blocks", wanted)
            return 0
        slots = taken.reservation.slots
        evicted = taken.reservation.evicted
        if len(slots) < wanted:
            metrics.add("dropped_blocks", wanted - len(slots))
            owed = owed.part(len(slots))
        if evicted:
            metrics.add("evicted_blocks", evicted, MEMORY)
        owed.run.slots = slots
        if self.retaining is not None:
            self.retaining.note_saving(owed.request_id, slots)
        if self.context is not None and not owed.is_held:
            self.context.touch(owed.run.block_ids[::-1])  # as `release` gives them back, mostly
        self.jobs.order_save(owed, taken.pin, now)
        return len(slots)

    def settle(self, save: SaveState) -> int:
        """All ranks have reported: release the engine's blocks, and offer the tiers what was saved; its blocks."""
        run = save.run
        self.jobs.end(save)
        self.release(save)
        good = save.good()
        saved = sum(good)
        became_held = self.memory.index.end_writes(run.slots, good)
        self.memory.index.unpin(save.pin)
        metrics = self.tiers.metrics
        metrics.observe("save_seconds", self.tiers.clock() - save.ordered_at)
        metrics.add("saved_blocks", saved)
        metrics.add("dropped_blocks", len(good) - saved)
        if self.lazy is not None:
            self.lazy.saved(len(run.block_ids))
            self.lazy.forget(key for key, is_good in zip(run.keys, good, strict=True) if not is_good)
        if saved and self.announcements is not None:
            self.announcements.saved(run, saved)
        if saved:
            self.writeback.note_saved(run.stored(saved))
            if run.replaces:
                self.memory.index.outdate(run.parents[-1], run.replaces)
        self.writeback.note_became_held(became_held, run.keys)
        return saved

    def release(self, save: SaveState) -> None:
        """Give back the engine's blocks of a save, if they are held."""
        if self.context is not None and save.holds:
            kept, leaving = save.owed.in_turn
            if kept:
                self.context.free_blocks(kept)
            if leaving:  # the engine evicts these before all others
                self.context.free_blocks(leaving, evict_first=True)
        save.holds = False
