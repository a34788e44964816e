"""Engines with an index, neighbours and a ledger in one process, and the model of what they do: one dictionary of what
lies in each arena, and for each engine the blocks that it has not given up.

A block's bytes are the key that was written last where they lie; None while they are being written.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, TypeAlias

from kvpact.cache.ledger import Ledger
from kvpact.cache.plan import Plan, PlanState
from kvpact.index.block_index import BlockIndex, Pin, Reservation
from kvpact.index.claims import Claims
from kvpact.index.classed_slots import ClassedSlots
from kvpact.index.column_file import ColumnFile
from kvpact.index.neighbour import SHARE, Lease, Neighbour
from kvpact.index.row_locks import LockFile
from kvpact.index.slot_space import CLASS_SHIFT, EXTENT_SHIFT, PlainSlots
from kvpact.metrics import EndReason
from kvpact.ranges import BlockRange, RangeSet

ENGINES: Final = 4
EXTENTS: Final = 24
PLACES: Final = (4, 2)
"""Slots in an extent, per class."""
BLOCK_TOKENS: Final = 16
STEMS: Final = 6
DEPTH: Final = 14
LIFETIME: Final = 6
"""Steps that a plan lives without a commit."""

Key: TypeAlias = bytes
Source: TypeAlias = tuple[int, int, Key]
"""Arena, slot and the key that is to lie there."""


def chains_of(epoch: int) -> list[list[Key]]:
    """Chains of prompts under weights of one epoch; each two of a stem part in the middle."""
    chains = []
    for stem in range(STEMS):
        for branch in range(2):
            names = [(epoch, stem, branch if depth >= DEPTH // 2 else 0, depth) for depth in range(DEPTH)]
            chains.append([hashlib.sha256(repr(name).encode()).digest() for name in names])
    return chains


def side_of(key: Key) -> Key:
    """Key of the block of another class that is attached to a row."""
    return hashlib.sha256(key + b"side").digest()


CHAINS: Final = [chains_of(epoch) for epoch in range(2)]
KEYS: Final = {each for chains in CHAINS for chain in chains for key in chain for each in (key, side_of(key))}


class Model:
    """Arenas of all engines, as one dictionary: what lies in each place of each."""

    def __init__(self, seed: int, *, classed: bool) -> None:
        self.random = Random(seed)
        self.classed = classed
        """True if slots have several sizes."""
        self.bytes: dict[tuple[int, int], Key | None] = {}
        self.arenas = 0
        self.seen = Counter[str]()
        """Events that must have occurred for the plays to say anything."""

    def new_arena(self) -> int:
        """Number of an arena that nobody had before; nothing lies there."""
        self.arenas += 1
        return self.arenas

    def _places(self, slot: int) -> range:
        if not self.classed:
            return range(slot, slot + 1)
        units = PLACES[0] // PLACES[slot >> CLASS_SHIFT]
        extent = slot >> EXTENT_SHIFT & (1 << CLASS_SHIFT - EXTENT_SHIFT) - 1
        first = extent * PLACES[0] + (slot & (1 << EXTENT_SHIFT) - 1) * units
        return range(first, first + units)

    def write(self, arena: int, slots: Iterable[int], key: Key | None) -> None:
        """Bytes of a block are written into slots, or are about to be."""
        for slot in slots:
            for place in self._places(slot):
                self.bytes[arena, place] = key

    def require(self, arena: int, slot: int, key: Key) -> None:
        """Require that a block's bytes lie in a slot."""
        for place in self._places(slot):
            assert self.bytes[arena, place] == key, "a slot has other bytes than were promised"


@dataclass(eq=False)
class Met:
    """Another engine, as one has met it."""

    owner: Engine
    arena: int
    table: Neighbour
    refused: list[str]
    """Why nobody may use its blocks any more."""
    gone: bool = False
    leases: int = 0
    kept: list[set[Key]] = field(default_factory=list)
    """For each lock of the last lease, the blocks that the owner had not given up then."""

    def close_if_done(self) -> None:
        """End it once it is gone and nothing is leased."""
        if self.gone and not self.leases:
            self.table.close()


@dataclass(eq=False, frozen=True, slots=True)
class Elsewhere:
    """Leased blocks of another engine; equal ones are two leases."""

    met: Met
    lease: Lease


Kept: TypeAlias = Elsewhere | Pin


@dataclass(eq=False)
class Promise:
    """A plan, and where its blocks lie."""

    plan: Plan[Kept, tuple[()]]
    sources: list[Source]
    elsewhere: list[Elsewhere]
    own: Pin | None


class Watched(Claims):
    """Claims, with something in the midst of each."""

    __slots__ = ("_meanwhile",)

    def __init__(self, locks: LockFile, meanwhile: Callable[[range], None]) -> None:
        super().__init__(locks)
        self._meanwhile = meanwhile

    def granted(self, rows: range) -> list[range]:
        """See `Claims`."""
        self._meanwhile(rows)
        free = super().granted(rows)
        self._meanwhile(rows)
        return free


@dataclass(eq=False)
class Engine:
    """One engine. A restart gives it another arena, another index, and another lock file."""

    model: Model
    engines: list[Engine]
    """All of them."""
    during_claim: Callable[[Engine, range], None]
    """Called in the midst of each of its claims."""
    arena: int = 0
    refused: list[str] = field(default_factory=list)
    """Why nobody may use what was found here, since it has its file of columns."""
    epoch: int = 0
    kept: set[Key] = field(default_factory=set)
    """Blocks that it has not given up."""
    unreported: int = 0
    """Evicted blocks that no reservation has reported yet."""
    writes: list[tuple[list[Key], Sequence[int]]] = field(default_factory=list)
    met: dict[Engine, Met] = field(default_factory=dict)
    promises: dict[str, Promise] = field(default_factory=dict)
    steps: int = 0
    sums: Counter[str] = field(default_factory=Counter)
    """Tokens of its plans."""

    def start(self) -> None:
        """Begin with nothing."""
        self.arena = self.model.new_arena()
        self.refused = []
        self.kept = set()
        self.unreported = 0
        self.writes = []
        self.met = {}
        self.promises = {}
        self.sums = Counter()
        self.locks = LockFile()
        self.space = ClassedSlots(PLACES, EXTENTS) if self.model.classed else PlainSlots(EXTENTS * PLACES[0])
        claims = Watched(self.locks, lambda rows: self.during_claim(self, rows))
        columns = ColumnFile(self.space, claims)
        classes = len(PLACES) if self.model.classed else 1
        self.index = BlockIndex(self.space.num_rows, space=self.space, classes=classes, columns=columns)
        self.ledger: Ledger[Kept, tuple[()]] = Ledger(self.release, LIFETIME)

    # As an owner

    def look_for_losses(self) -> int:
        """Blocks that the index has given up since the last look."""
        gone = [key for key in self.kept if not self.index.is_held(key)]
        self.kept.difference_update(gone)
        return len(gone)

    def give_up(self, removed: Sequence[tuple[Key, int]]) -> None:
        """Blocks that the index has dropped because it was told to."""
        self.kept.difference_update(key for key, _ in removed)
        assert not self.look_for_losses(), "a block was lost that nobody has named"

    def save(self, chain: Sequence[Key]) -> None:
        """Write the unknown blocks of a chain, now or later."""
        known = self.index.known_prefix(chain)
        wanted = chain[known:]
        parent = chain[known - 1] if known else b""
        self.index.reservable(parent, len(wanted), 0)
        reservation = self.index.reserve(chain, known, len(chain))
        self._reserved([*wanted], reservation)

    def save_sides(self, chain: Sequence[Key]) -> None:
        """Write blocks of the other class, attached to the known rows of a chain."""
        rows = chain[: self.index.known_prefix(chain)]
        parents = [key for key in rows[-4:] if side_of(key) not in self.index]
        if not parents:
            return
        wanted = [side_of(key) for key in parents]
        self.index.reservable(parents[-1], len(wanted), 1)
        reservation = self.index.reserve_sides(wanted, parents, 1)
        self._reserved(wanted, reservation)

    def _reserved(self, keys: list[Key], reserved: Reservation | None) -> None:
        self.unreported += self.look_for_losses()
        if reserved is None:
            self.model.seen["no room"] += 1
            return
        rows = reserved.slots
        evicted = reserved.evicted
        assert evicted == self.unreported, f"{evicted} blocks are said to be evicted, {self.unreported} are gone"
        self.model.seen["evicted"] += evicted
        self.unreported = 0
        if rows:
            self.model.write(self.arena, map(self.space.number, rows), None)
            self.writes.append((keys, rows))

    def end_write(self, *, is_good: bool) -> None:
        """End a write: its blocks are listed, or abandoned."""
        keys, rows = self.writes.pop(self.model.random.randrange(len(self.writes)))
        if is_good:
            for key, row in zip(keys, rows, strict=True):
                self.model.write(self.arena, [self.space.number(row)], key)
            self.kept.update(self.index.complete(rows))
        else:
            self.give_up(self.index.abandon(rows))

    def evict_ahead(self) -> None:
        """Evict before room is needed; what extents lose then is reported later."""
        evicted = self.index.evict_ahead(8)
        self.unreported += self.look_for_losses() - evicted

    def resize(self) -> None:
        """Hand out fewer slots, or all again."""
        most = self.space.num_rows // max(1, self.space.extent_rows)
        if self.space.usable == most:
            self.give_up(self.index.withdraw_slots(self.model.random.randrange(most * 2 // 3, most)))
        else:
            self.index.use_slots(most)

    def refuse(self) -> None:
        """A copy was wrong: nobody may use what lies here."""
        assert self.index.columns is not None
        self.index.columns.refuse()
        self.refused.append("a wrong copy")

    def reset(self) -> None:
        """Other weights, perhaps; those that have met it meet it anew."""
        self.epoch = self.model.random.randrange(len(CHAINS))
        self.index.reset_columns()
        self.refused.append("a reset")
        self.refused = []
        for other in self.engines:
            other.leave(self)

    def end_step(self) -> None:
        """Take back rows, and end plans that nobody has committed."""
        self.steps += 1
        self.index.claim_again()
        for plan in self.ledger.expire(self.steps):
            self._ended(plan.request_id)

    # As a neighbour

    def meet(self, owner: Engine) -> None:
        """Find another engine, if it is not known."""
        if owner not in self.met and owner is not self:
            assert owner.index.columns is not None
            columns = os.open(f"/proc/self/fd/{owner.index.columns.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            table = Neighbour(columns, owner.locks.opened(), ENGINES - 1)
            self.met[owner] = Met(owner, owner.arena, table, owner.refused)

    def leave(self, owner: Engine) -> None:
        """End the connection to another engine: it is asked for nothing any more."""
        met = self.met.pop(owner, None)
        if met is not None:
            met.gone = True
            met.close_if_done()

    def lease(self, met: Met, keys: Sequence[Key]) -> Lease | None:
        """Lease first blocks; all that was leased is what its owner has not given up."""
        met.leases += 1  # its owner may end meanwhile
        met.kept.clear()
        leased = met.table.lease(keys)
        if leased is None:
            met.leases -= 1
            met.close_if_done()
            return None
        assert not met.refused, "a refused engine's blocks were leased"
        for key, slot in zip(keys, leased.slots, strict=False):
            self.model.require(met.arena, slot, key)
        first = 0
        for run, kept in zip(leased.runs, met.kept, strict=False):
            assert kept.issuperset(keys[first : first + len(run)]), "a block was leased that its owner had given up"
            first += len(run)
        rows = met.owner.space.num_rows
        assert met.table.leased_rows <= rows // SHARE // (ENGINES - 1), "a neighbour leases more than its share"
        return leased

    def release(self, lease: Kept) -> None:
        """End a lease."""
        if isinstance(lease, Pin):
            self.index.unpin(lease)
            return
        lease.met.table.release(lease.lease)
        lease.met.leases -= 1
        lease.met.close_if_done()

    def prepare(self, met: Met, chain: Sequence[Key], name: str) -> None:
        """Promise blocks of own memory, and those after them that a neighbour has."""
        before = self.promises.get(name)
        if before is not None and before.plan.state is PlanState.LOADING:
            return
        have = self.index.held_prefix(chain)
        sources: list[Source] = []
        own = None
        if have:
            own = self.index.pin(chain[have - 1])
            rows = self.index.slots_to(own.slot, have)
            sources += [(self.arena, self.space.number(row), key) for row, key in zip(rows, chain, strict=False)]
        elsewhere = list[Elsewhere]()
        leased = self.lease(met, chain[have:])
        if leased is not None:
            elsewhere.append(Elsewhere(met, leased))
            sources += [(met.arena, slot, key) for slot, key in zip(leased.slots, chain[have:], strict=False)]
        if self.model.classed and sources:
            beside = side_of(sources[-1][2])
            one = self.lease(met, [beside])
            if one is not None:
                elsewhere.append(Elsewhere(met, one))
                sources.append((met.arena, one.slots[0], beside))
        if not sources:
            return
        if before is not None:
            self._ended(name)
        leases: list[Kept] = [*elsewhere, *([own] if own is not None else [])]
        tokens = len(sources) * BLOCK_TOKENS
        blocks = BlockRange(0, len(sources))
        now = self.steps
        plan = self.ledger.open_plan(
            name, blocks, block_size=BLOCK_TOKENS, slots=(), now=now, leases=leases, promised_tokens=tokens
        )
        self.sums["promised"] += tokens
        self.promises[name] = Promise(plan, sources, elsewhere, own)
        self.model.seen["leased elsewhere"] += sum(len(each.lease.slots) for each in elsewhere)

    def _ended(self, name: str) -> None:
        """A plan that was not committed."""
        promise = self.promises.pop(name)
        self.sums["withdrawn"] += promise.plan.promised_tokens

    def abort(self, name: str) -> None:
        """End a plan that is not loading."""
        self.ledger.abort(self.promises[name].plan, EndReason.DECLINED)
        self._ended(name)

    def commit(self, name: str) -> None:
        """Load all of a promise, or the first blocks: what these do not need is let go at once."""
        promise = self.promises[name]
        plan = promise.plan
        count = len(promise.sources)
        taken = count if self.model.random.random() < 0.5 else self.model.random.randrange(1, count + 1)
        keep: list[Kept] | None = None
        if taken < count and promise.elsewhere:
            first = count - sum(len(each.lease.slots) for each in promise.elsewhere)
            keep = [promise.own] if promise.own is not None else []
            for each in promise.elsewhere:
                part = min(len(each.lease.slots), taken - first)
                if part > 0:
                    keep.append(Elsewhere(each.met, each.met.table.lease_again(each.lease, part)))
                    each.met.leases += 1
                first += len(each.lease.slots)
        tokens = taken * BLOCK_TOKENS
        self.ledger.commit(plan, tokens, now=self.steps, keep=keep)
        self.sums["committed"] += tokens
        self.sums["withdrawn"] += plan.promised_tokens - tokens
        promise.sources = promise.sources[:taken]

    def settle(self, name: str, failed: int) -> None:
        """End a load: of its blocks this one may have failed, and all if an engine refuses them by now."""
        promise = self.promises.pop(name)
        blocks = promise.plan.committed_blocks
        refused = any(each.met.table.is_refused for each in promise.elsewhere)
        assert refused == any(each.met.refused for each in promise.elsewhere), "a refused engine's blocks were loaded"
        lost = RangeSet.of(blocks if refused else BlockRange(min(failed, blocks.count), int(failed < blocks.count)))
        loaded = RangeSet.of(blocks).difference(lost)
        for some in loaded.ranges:
            for at in some:
                self.model.require(*promise.sources[at])
        self.model.seen["refused loads" if refused else "loads"] += 1
        used = loaded.ranges[0].count * BLOCK_TOKENS if loaded.ranges and not loaded.ranges[0].start else 0
        self.ledger.settle(promise.plan, loaded=loaded, failed=lost, used_tokens=used)
        self.ledger.finish_request(name)
        self.sums["loaded"] += len(loaded) * BLOCK_TOKENS
        self.sums["failed"] += len(lost) * BLOCK_TOKENS

    def die(self) -> None:
        """End as a killed process does: the kernel closes what it had open."""
        promised = [each.met for promise in self.promises.values() for each in promise.elsewhere]
        for met in [*self.met.values(), *promised]:
            met.table.close()
        for other in self.engines:
            other.leave(self)
        self.locks.close()

    # Accounts

    def check(self) -> None:
        """Verify index, ledger, and that the kernel has a lock for each leased row and no other."""
        self.index.check()
        self.ledger.check()
        assert self.index.held_count == len(self.kept), "blocks are held that were given up, or not held that were not"
        totals = self.ledger.totals
        for name in ("promised", "committed", "withdrawn", "loaded", "failed"):
            assert getattr(totals, f"{name}_tokens") == self.sums[name], f"{name} tokens are not what was played"
        leased = set[int]()
        for lease in self._leases():
            leased.update(row for run in lease.runs for row in run)
        locked = {row for row in range(self.space.num_rows) if self.locks.leased(range(row, row + 1)) is not None}
        assert locked == leased, "the kernel's locks are not those of the open plans"
        assert len(leased) <= self.space.num_rows // SHARE, "more than a quarter of the rows is leased"

    def _leases(self) -> Iterator[Lease]:
        """Leases on its rows."""
        for engine in self.engines:
            for promise in engine.promises.values():
                for kept in promise.plan.leases:
                    if isinstance(kept, Elsewhere) and kept.met.arena == self.arena:
                        yield kept.lease
