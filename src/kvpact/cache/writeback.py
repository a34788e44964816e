"""Writes to the tiers: what is saved or used in memory is offered to every tier that lacks it, when a step has time.

Owns the chains that wait for such a step, the writes under way, and the pins that keep their blocks until then. Runs on
the scheduler's thread and only submits work to the tiers' own threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from kvpact.cache.budget import StepBudget
from kvpact.cache.tier_set import ASK_AGAIN_SECONDS, LRUKeySet, TierSet
from kvpact.identity.epochs import Epoch, Epochs
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import BlockIndex, Pin
from kvpact.memory.arena import Arena, Standing
from kvpact.metrics import Metrics
from kvpact.tiers.client import TierClient
from kvpact.tiers.executor import PutDone

WRITE_BYTES = 128 << 20
"""Bytes of one write: each costs the scheduler's thread a wake-up, and nothing waits for its end."""

MAX_UNWRITTEN = 64
"""Chains that wait at most until a step has time to offer them to the tiers (P12)."""

BACKLOG_SLOTS = 64
"""Slots in which one step looks at most for blocks that late tiers lack (P11)."""


@dataclass(frozen=True, slots=True)
class WriteBackOp:
    """Blocks of `epoch` on their way to a tier; `pins` keep them and the chain before them."""

    keys: tuple[BlockKey, ...]
    pins: tuple[Pin, ...]
    epoch: Epoch


@dataclass(eq=False)
class WriteBack:
    """The way of blocks from one arena to `tiers`. The chains it is given belong to the current epoch of `epochs`.

    With `seen_once`, a block is written to the tiers when it is saved or loaded for the second time.
    """

    tiers: TierSet
    index: BlockIndex
    arena: Arena
    metrics: Metrics
    epochs: Epochs
    clock: Callable[[], float]
    budget: StepBudget
    seen_once: LRUKeySet | None
    _unwritten: deque[tuple[Sequence[BlockKey], int]] = field(default_factory=deque, init=False)
    _unwritten_sides: deque[Sequence[BlockKey]] = field(default_factory=deque, init=False)
    _backlog: range = field(default=range(0), init=False)
    """Slots whose blocks are still to be offered to tiers that were opened late."""

    # What waits for a step that has time

    @property
    def waiting(self) -> int:
        """Number of chains, and slots of the backlog, that wait to be offered to the tiers."""
        return len(self._unwritten) + len(self._unwritten_sides) + len(self._backlog)

    def note_saved(self, keys: Sequence[BlockKey], end: int) -> None:
        """The chain `keys[:end]` was saved: offer it to the tiers in this step or a later one.

        While ranks still check each of their copies, tiers get nothing; afterwards `begin_backlog` finds what there is.
        """
        if self.tiers.clients and self._is_trusted:
            self._unwritten.append((keys, end))

    def note_saved_sides(self, names: Sequence[BlockKey]) -> None:
        """Blocks of side groups were saved: offer them, as chains."""
        if self.tiers.clients and self._is_trusted:
            self._unwritten_sides.append(names)

    def note_used(self, keys: Sequence[BlockKey], end: int) -> None:
        """Blocks `keys[:end]` of the arena are used: offer them to tiers that get what is used twice, or that may have
        lost them."""
        if not self._is_trusted:
            return
        if self.seen_once is not None:
            self.offer(keys, end)
        elif self.tiers.shared and (held := self.index.held_prefix(keys, end)) and self._lacks(keys[held - 1]):
            self.note_saved(keys, held)

    def offer_some(self) -> None:
        """Offer waiting chains to the tiers, the oldest first, without blocks that memory has dropped since.

        At least one is offered, and all but `MAX_UNWRITTEN`; the others while the step is not late.
        """
        while self._unwritten:
            self.offer(*self._unwritten.popleft())
            if len(self._unwritten) <= MAX_UNWRITTEN and self.budget.exhausted:
                break
        while self._unwritten_sides:
            self._offer_sides(self._unwritten_sides.popleft())
            if len(self._unwritten_sides) <= MAX_UNWRITTEN and self.budget.exhausted:
                break

    @property
    def _is_trusted(self) -> bool:
        return self.arena.standing is Standing.PROVEN

    def refute_run(self) -> None:
        """A rank has found a wrong copy: no tier is to give anybody what this engine has written."""
        for client in self.tiers.clients:
            client.deletions.refute_run()

    def begin_backlog(self) -> None:
        """The tiers were opened late, or copies are proven now: what memory holds is written to them piece by piece."""
        self._backlog = range(self.index.num_slots)

    def offer_backlog(self) -> None:
        """Offer more of what memory held when the tiers were opened, while they have room."""
        for slot in self._backlog[:BACKLOG_SLOTS]:
            if self.budget.exhausted or not self._has_room:
                break
            self._backlog = self._backlog[1:]
            key = self.index.key_at(slot)
            if key is not None and self.index.is_last(key):
                chain = self.index.chain(key)
                if self.index.is_side(slot):
                    self._offer_sides([chain.pop()])
                self.offer(chain, len(chain))

    def clear(self) -> None:
        """A new epoch begins: drop what waits, which belongs to the old one."""
        self._unwritten.clear()
        self._unwritten_sides.clear()
        self._backlog = range(0)

    @property
    def _has_room(self) -> bool:
        """Whether every tier would take a write of `WRITE_BYTES` now."""
        return all(client.executor.has_room(WRITE_BYTES) for client in self.tiers.clients)

    def _lacks(self, last: BlockKey) -> bool:
        """Whether a tier may have lost a chain that the arena holds, so that it should be offered again.

        For one chain the answer is "yes" at most once in `ASK_AGAIN_SECONDS`.
        """
        now, found = self.clock(), False
        for client in self.tiers.shared if self.tiers.may_share(self.epochs.current) else ():
            contents = self.tiers.contents[client]
            known = contents.believes(last, now) or last in contents.being_written
            if not known and client.may_write:
                offered = contents.offered_again.added_since(last, now - ASK_AGAIN_SECONDS)
                contents.offered_again.add((last,), now)
                found |= not offered
        return found

    # Writing

    def offer(self, keys: Sequence[BlockKey], end: int) -> None:
        """Have every tier store what it lacks of the part of the chain `keys[:end]` that memory holds.

        A write whose tier is ill, or has a full queue, is dropped with all that it held (H52).
        """
        epoch, end = self.epochs.current, self.index.held_prefix(keys, end)
        if self.seen_once is not None:
            held, seen = keys[:end], self.seen_once
            end = next((at for at, key in enumerate(held) if key not in seen), end)
            seen.add(held)
        now = self.clock()
        for client in self.tiers.clients:
            if client.shared and not self.tiers.may_share(epoch):
                continue
            start = self._first_to_write(client, keys, end, now)
            if start < end and not client.may_write:
                self.metrics.add("dropped_writes", end - start, client.name)
            else:
                self._write(client, keys, start, end, epoch)

    def _offer_sides(self, names: Sequence[BlockKey]) -> None:
        """Have every tier store the blocks of side groups that memory holds and it lacks."""
        epoch, now = self.epochs.current, self.clock()
        held = [name for name in names if self.index.is_held(name)]
        for client in self.tiers.clients:
            if not held or (client.shared and not self.tiers.may_share(epoch)):
                continue
            contents = self.tiers.contents[client]
            lacks = [
                name
                for name in held
                if name not in contents.being_written and not (client.shared and contents.believes(name, now))
            ]
            if lacks and not client.may_write:
                self.metrics.add("dropped_writes", len(lacks), client.name)
            elif lacks:
                self._write_sides(client, lacks, epoch)

    def _write_sides(self, client: TierClient, names: Sequence[BlockKey], epoch: Epoch) -> None:
        op = WriteBackOp(tuple(names), tuple(map(self.index.pin, names)), epoch)
        op_id = self.tiers.begin(partial(self._end_write, client, op))
        self.tiers.contents[client].being_written.update(op.keys)
        number = self.index.space.number
        buffers = [self.arena.slot_views(number(slot)) for slot in self.index.slots_of(op.keys)]
        nbytes = sum(piece.nbytes for buffer in buffers for piece in buffer)
        if not client.submit_put(op_id, names, 0, buffers, nbytes, epoch, loose=True):
            self.tiers.withdraw(op_id)
            self._let_go(client, op)
            self.metrics.add("dropped_writes", len(names), client.name)

    def _first_to_write(self, client: TierClient, keys: Sequence[BlockKey], end: int, now: float) -> int:
        """The first block of `keys[:end]` that the tier is not known to hold and that is not being written to it."""
        contents = self.tiers.contents[client]
        start = 0 if client.shared else client.put_start(keys[:end], now)
        while start < end and (
            keys[start] in contents.being_written or (client.shared and contents.believes(keys[start], now))
        ):
            start += 1
        return start

    def _write(self, client: TierClient, keys: Sequence[BlockKey], start: int, end: int, epoch: Epoch) -> None:
        write_blocks = max(1, min(WRITE_BYTES // self.arena.slot_bytes, self.arena.least_slots // 2))
        while start < end:
            stop = min(end, start + write_blocks)
            op = WriteBackOp(tuple(keys[start:stop]), (self.index.pin(keys[stop - 1]),), epoch)
            op_id = self.tiers.begin(partial(self._end_write, client, op))
            self.tiers.contents[client].being_written.update(op.keys)
            buffers = [self.arena.slot_views(self.index.space.number(slot)) for slot in self.index.slots_of(op.keys)]
            nbytes = len(buffers) * self.arena.slot_bytes
            if not client.submit_put(op_id, keys, start, buffers, nbytes, epoch):
                self.tiers.withdraw(op_id)
                self._let_go(client, op)
                self.metrics.add("dropped_writes", end - start, client.name)
                break
            start = stop

    def _end_write(self, client: TierClient, op: WriteBackOp, done: PutDone, now: float) -> None:
        self._let_go(client, op)
        contents, stored, lost = self.tiers.contents[client], op.keys[: done.stored], op.keys[done.stored :]
        if done.each:
            stored = tuple(key for key, held in zip(op.keys, done.each, strict=True) if held)
            lost = tuple(key for key, held in zip(op.keys, done.each, strict=True) if not held)
        if client.shared:
            contents.found.add(stored, now)
            contents.found.discard(lost)
            if op.epoch.is_drawn:
                contents.unshareable.add(stored)
        contents.refuted.discard(stored)
        self.metrics.add("written_blocks", len(stored), client.name)
        self.metrics.add("written_bytes", len(stored) * self.arena.slot_bytes, client.name)
        self.metrics.add("dropped_writes", len(op.keys) - len(stored), client.name)

    def _let_go(self, client: TierClient, op: WriteBackOp) -> None:
        self.tiers.contents[client].being_written.difference_update(op.keys)
        for pin in op.pins:
            self.index.unpin(pin)

    def close(self) -> None:
        """Offer what waits while the tiers have room, and have shared tiers delete blocks of drawn epochs.

        No engine can ask for those. No step is late now.
        """
        self.budget = StepBudget(inf)
        self.offer_some()
        while self._backlog and self._has_room:
            self.offer_backlog()
        for client, contents in self.tiers.contents.items():
            if keys := [*contents.unshareable]:
                client.delete(keys)
