"""Writes to the tiers: what is saved or used in memory is offered to every tier that lacks it, when a step has time.

Owns the chains that wait for such a step, the writes under way, and the pins that keep their blocks until then. Runs on
the scheduler's thread and only submits work to the tiers' own threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from math import inf
from sys import maxsize

from kvpact.cache.announcements import Announcements
from kvpact.cache.budget import StepBudget
from kvpact.cache.memory import Memory
from kvpact.cache.needs.runs import Has, Run
from kvpact.cache.tier_set import TierSet
from kvpact.identity.epochs import Epoch, Epochs
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import BlockIndex, Pin
from kvpact.memory.arena import Standing
from kvpact.tiers.client import TierClient
from kvpact.tiers.executor import PutDone
from kvpact.tiers.known_keys import ASK_AGAIN_SECONDS, LRUKeySet

MAX_UNWRITTEN = 64
"""Chains that wait at most until a step has time to offer them to the tiers (P12)."""

BACKLOG_SLOTS = 64
"""Most slots that one step searches for blocks that a late tier lacks (P11)."""


@dataclass(frozen=True, slots=True)
class WriteBackOp:
    """Blocks of `epoch` on their way to a tier; `pins` keep them and what they need."""

    keys: tuple[BlockKey, ...]
    sizes: Sequence[int]
    """Bytes of each."""
    pins: tuple[Pin, ...]
    epoch: Epoch
    run: Run


@dataclass(eq=False)
class WriteBack:
    """The way of blocks from one arena to `tiers`. The chains it is given belong to the current epoch of `epochs`.

    With `seen_once`, a block is written to the tiers when it is saved or loaded for the second time.
    """

    tiers: TierSet
    memory: Memory
    epochs: Epochs
    seen_once: LRUKeySet | None
    announcements: Announcements | None = None
    index: BlockIndex = field(init=False)
    _unwritten: deque[Run] = field(default_factory=deque, init=False)
    _backlog: dict[TierClient, range] = field(default_factory=dict, init=False)
    """A tier that was opened late -> the slots whose blocks are still to be offered to it."""

    def __post_init__(self) -> None:
        self.index = self.memory.index

    # Chains that wait for a step that has time

    @property
    def waiting(self) -> int:
        """Number of chains, and slots of the backlog, that wait to be offered to the tiers."""
        return len(self._unwritten) + sum(map(len, self._backlog.values()))

    def note_saved(self, run: Run) -> None:
        """Offer saved blocks to the tiers, in this step or a later one.

        While ranks still check each of their copies, tiers get nothing; afterwards `begin_backlog` finds what there is.
        """
        if self.tiers.written and self._is_trusted:
            self._unwritten.append(run)

    def note_became_held(self, keys: Sequence[BlockKey], own: Sequence[BlockKey] = ()) -> None:
        """Memory holds these blocks, which were saved before what they need; `own` are noted by themselves."""
        if len(keys) == len(own) and keys[-1:] == [*own[-1:]]:
            return
        noted = {*own}
        for run in self.memory.runs_that_end_in([key for key in keys if key not in noted]):
            if self.announcements is not None:
                self.announcements.saved(run, len(run.keys))
            self.note_saved(run)

    def note_used(self, run: Run) -> None:
        """Blocks of the arena are used: offer them to tiers that get what is used twice, or that may have lost them."""
        if (self.seen_once is None and not self.tiers.shared) or not self._is_trusted:
            return
        if self.seen_once is not None:
            self.offer(run)
        elif (held := run.held(self.memory.in_slots)).keys and self._lacks(held.kept_by):
            self.note_saved(run)

    def offer_some(self) -> None:
        """Offer waiting blocks to the tiers, the oldest first, without those that memory has dropped since.

        At least one run is offered, and all but `MAX_UNWRITTEN`; the others while the step is not late.
        """
        while self._unwritten:
            run = self._unwritten.popleft()
            self.offer(run)
            self._count_gone(run)
            if len(self._unwritten) <= MAX_UNWRITTEN and self.tiers.budget.is_late:
                break

    def _count_gone(self, run: Run) -> None:
        """Count blocks that memory has dropped before the tiers, which lack them, were offered them."""
        if self.seen_once is not None or all(map(self.index.is_held, run.kept_by)):
            return
        gone = {key for key in run.keys if not self.index.is_held(key)}
        for client in self._writers() if gone else ():
            lacks = gone.intersection(run.lacked(self._written(client)).keys)
            self.tiers.metrics.add("dropped_writes", len(lacks), client.name)

    @property
    def _is_trusted(self) -> bool:
        return self.tiers.arena.standing is Standing.PROVEN

    def refute_run(self) -> None:
        """A rank has found a wrong copy: no tier is to give anybody what this engine has written."""
        for client in self.tiers.written:
            client.deletions.refute_run()

    def begin_backlog(self) -> None:
        """The tiers were opened late, or copies are proven now: what memory holds is written to them piece by piece."""
        self._backlog = dict.fromkeys(self.tiers.written, range(self.index.space.slot_rows))

    def offer_backlog(self) -> bool:
        """Offer more blocks that memory held when the tiers were opened, to each that has room and may be written.

        Returns True if any was offered. A paused or slow tier keeps its place, and holds up no other.
        """
        return sum(map(self._offer_slots, [*self._backlog])) > 0

    def _offer_slots(self, client: TierClient) -> bool:
        """Offer a tier the blocks of its next slots; whether it got those of one at least."""
        slots = self._backlog[client]
        left = slots
        for slot in slots[:BACKLOG_SLOTS]:
            if self.tiers.budget.is_late or not self._offer_slot(client, slot):
                break
            left = left[1:]
        self._backlog[client] = left
        if not left:
            del self._backlog[client]
        return len(left) < len(slots)

    def _offer_slot(self, client: TierClient, slot: int) -> bool:
        """Offer a tier the chain that ends in a slot; False if it is paused, or has no room for all of it now."""
        key = self.index.key_at(slot)
        if key is None or not self.index.is_last(key):
            return True
        if not client.health.may_write or self._room(client) < self._most_per_write(client):
            return False
        runs = self.memory.runs_of(key)
        for run in runs:
            held = self._admitted(run.held(self.memory.in_slots))
            if held.names and not self._give(client, held, self._room(client)):
                return False
        if self.seen_once is not None and sum(slot in slots for slots in self._backlog.values()) == 1:
            for run in runs:
                self.seen_once.add(run.names)
        return True

    def clear(self) -> None:
        """A new epoch begins: drop what waits, which belongs to the old one."""
        self._unwritten.clear()
        self._backlog.clear()

    def _room(self, client: TierClient) -> int:
        """Number of blocks that a tier's queue would take now."""
        return client.executor.room // self.tiers.arena.slot_bytes

    def _most_per_write(self, client: TierClient) -> int:
        """Most blocks that one write to a tier may have."""
        most = client.executor.most_per_write(self.tiers.arena.slot_bytes)
        return max(1, min(most, self.tiers.arena.least_slots // 2))

    def _lacks(self, keys: Sequence[BlockKey]) -> bool:
        """True if a tier may have lost any of these blocks that memory holds, so that they should be offered again.

        For one block that is so at most once in `ASK_AGAIN_SECONDS`.
        """
        now = self.tiers.clock()
        found = False
        for client in self.tiers.shared if self.tiers.may_share(self.epochs.current) else ():
            contents = self.tiers.contents[client]
            for key in keys if client.health.may_write else ():
                if not (contents.believes(key, now) or key in contents.being_written):
                    found |= not contents.offered_again.added_since(key, now - ASK_AGAIN_SECONDS)
                    contents.offered_again.add((key,), now)
        return found

    # Writing

    def offer(self, run: Run) -> None:
        """Have every tier store what it lacks of the blocks that memory holds."""
        held = run.held(self.memory.in_slots)
        admitted = self._admitted(held)
        if self.seen_once is not None:
            self.seen_once.add(held.names)
        for client in self._writers() if admitted.names else ():
            self._give(client, admitted)

    def _give(self, client: TierClient, held: Run, most: int = maxsize) -> bool:
        """Have a tier store what it lacks of these blocks, the first `most` of that; whether it lacked no more.

        A write whose tier is paused, or has a full queue, is dropped with all that it held (H52).
        """
        lacks = held.lacked(self._written(client))
        if lacks.keys and not client.health.may_write:
            self.tiers.metrics.add("dropped_writes", len(lacks.keys), client.name)
        elif lacks.keys:
            self._write(client, lacks.part(0, most), self.epochs.current)
        return len(lacks.keys) <= most

    def _writers(self) -> Iterator[TierClient]:
        """The tiers that get blocks of this epoch."""
        may_share = self.tiers.may_share(self.epochs.current)
        return (client for client in self.tiers.written if may_share or not client.shared)

    def _admitted(self, held: Run) -> Run:
        """Run that the tiers get of blocks in memory: with `"admit": "second-use"` those that were offered before."""
        if self.seen_once is None:
            return held
        return held.held(Has(partial(_in_a_row, self.seen_once.__contains__, None), self.seen_once.__contains__))

    def _written(self, client: TierClient) -> Has:
        """Blocks that a tier is known to hold, or that are being written to it."""
        now = self.tiers.clock()
        each = partial(self._has, client, now)
        first = partial(client.put_start, now=now) if not client.shared else None
        return Has(partial(_in_a_row, each, first), each)

    def _has(self, client: TierClient, now: float, key: BlockKey) -> bool:
        contents = self.tiers.contents[client]
        return key in contents.being_written or (client.shared and contents.believes(key, now))

    def _write(self, client: TierClient, run: Run, epoch: Epoch) -> None:
        """Write blocks in pieces; of a chain each piece goes after the one before it."""
        write_blocks = self._most_per_write(client)
        number = self.index.space.number
        for start in range(0, len(run.keys), write_blocks):
            piece = run.part(start, start + write_blocks)
            keys = tuple(piece.keys)
            pins = tuple(map(self.index.pin, piece.kept_by))
            slots = [number(slot) for slot in self.index.slots_of(keys)]
            op = WriteBackOp(keys, self.tiers.arena.bytes_of(slots), pins, epoch, piece)
            op_id = self.tiers.begin(partial(self._end_write, client, op))
            self.tiers.contents[client].being_written.update(keys)
            buffers = [*map(self.tiers.arena.slot_views, slots)]
            if not client.submit_put(op_id, keys, buffers, sum(op.sizes), epoch, before=piece.before):
                self.tiers.withdraw(op_id)
                self._let_go(client, op)
                self.tiers.metrics.add("dropped_writes", len(run.keys) - start, client.name)
                break

    def _end_write(self, client: TierClient, op: WriteBackOp, done: PutDone, now: float) -> None:
        self._let_go(client, op)
        contents = self.tiers.contents[client]
        stored = op.keys
        lost = tuple[BlockKey, ...]()
        if not all(done.each):
            stored = tuple(compress(op.keys, done.each))
            lost = tuple(key for key, held in zip(op.keys, done.each, strict=True) if not held)
        if client.shared:
            contents.found.add(stored, now)
            contents.found.discard(lost)
            if op.epoch.is_drawn:
                contents.unshareable.add(stored)
        contents.refuted.discard(stored)
        if self.announcements is not None:
            self.announcements.written(client, contents, op.run, done.each)
        self.tiers.metrics.add("written_blocks", len(stored), client.name)
        self.tiers.metrics.add("written_bytes", sum(compress(op.sizes, done.each)), client.name)
        self.tiers.metrics.add("dropped_writes", len(lost), client.name)

    def _let_go(self, client: TierClient, op: WriteBackOp) -> None:
        self.tiers.contents[client].being_written.difference_update(op.keys)
        for pin in op.pins:
            self.index.unpin(pin)

    def close(self) -> None:
        """Offer waiting blocks while the tiers have room, and have shared tiers delete blocks of drawn epochs.

        No engine can ask for those. No step is late now.
        """
        self.tiers.budget = StepBudget(inf)
        self.offer_some()
        while self.offer_backlog():
            pass
        for client, contents in self.tiers.contents.items():
            if keys := [*contents.unshareable]:
                client.delete(keys)


def _in_a_row(
    has: Callable[[BlockKey], bool],
    start: Callable[[Sequence[BlockKey]], int] | None,
    keys: Sequence[BlockKey],
) -> int:
    """The number of the first `keys` in a row that a place has; those before `start(keys)` are not asked for."""
    first = start(keys) if start is not None else 0
    return next((at for at in range(first, len(keys)) if not has(keys[at])), len(keys))
