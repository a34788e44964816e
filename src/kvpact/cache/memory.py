"""Memory, as plans, saves and tiers use it: what it has of their runs, what it keeps for them, and room for new ones.

Owns no state besides the index. Knows no plans: who needs room says which may yield.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import NamedTuple, TypeAlias

from kvpact.cache.jobs import PactLedger, PactPlan
from kvpact.cache.needs.runs import NO_BLOCK, NOTHING, Has, Run, linked, loose
from kvpact.events.queue import EventQueue
from kvpact.identity.groups import GroupSet
from kvpact.identity.keys import BlockKey
from kvpact.identity.tenants import Tenants
from kvpact.index.block_index import BlockIndex, Pin, Reservation
from kvpact.index.column_file import ColumnFile
from kvpact.index.slot_space import PlainSlots
from kvpact.memory.arena import Arena
from kvpact.pool.neighbours import Neighbours
from kvpact.tiers.base import Tier
from kvpact.tiers.executor import TierExecutor

Reader: TypeAlias = Callable[[Tier], TierExecutor]
"""Starts the threads of a tier that is read."""

NAMES_PER_SLOT = 64
MAX_NAMES = 1 << 20
"""Rows of a chain without bytes: for each slot of the side groups' blocks, and at most."""


def _never(plan: PactPlan) -> bool:
    return False


class EngineKV(NamedTuple):
    """The KV of an engine."""

    namespace: bytes
    """32 bytes; engines of equal ones may use each other's blocks."""
    groups: GroupSet
    classes: Sequence[int] = ()
    """The class of slots of each group; none if all slots are of one."""
    copies_per_block: int = 0
    """Copies that the computing thread gives to a device for one block; 0 without a device."""
    events: EventQueue | None = None
    """Announcements to routers; None: nothing is announced."""
    neighbours: Neighbours | None = None
    """Other engines of this host whose memory it may load from, as they may from its own; None: none."""
    reader: Reader | None = None
    """Starts the threads that read from their memory into its own; None: its ranks copy from there, as on a CPU."""
    tenants: Tenants | None = None
    """Clients that have a share of memory; None: there are none."""


class Taken(NamedTuple):
    """Slots for the first blocks of a run, and the pin that keeps the last of them."""

    reservation: Reservation
    pin: Pin


@dataclass(eq=False)
class Memory:
    """The blocks of one arena, in `index`; plans of `ledger` end if their room is needed."""

    index: BlockIndex
    ledger: PactLedger
    has: Has = field(init=False)
    """Blocks that may be served."""
    in_slots: Has = field(init=False)
    """Blocks that may be served and have bytes: a chain's rows are names alone where no layer has full attention."""

    def __post_init__(self) -> None:
        index = self.index
        self.has = Has(index.held_prefix, index.is_held)
        is_named = index.space.slot_rows < index.num_slots
        self.in_slots = Has(NOTHING.count, index.is_held) if is_named else self.has

    def lease(self, runs: Sequence[Run]) -> list[Pin]:
        """Pins that keep these runs, which are used, and of which memory has all; each run gets its slots."""
        pins: list[Pin] = []
        for run in runs:
            if run.is_linked:
                pin, run.slots = self.index.lease(run.keys[-1], len(run.keys))
                pins.append(pin)
            else:
                held = self.index.pin_each(run.keys)
                pins += held
                run.slots = [pin.slot for pin in held]
        return pins

    def lost_any(self, runs: Sequence[Run]) -> bool:
        """True if blocks were dropped since these runs were leased."""
        return any(run.lost_any(self.index.key_at) for run in runs)

    def know(self, keys: Sequence[BlockKey]) -> int:
        """The rows of a chain that are known; without bytes they become known now, as far as there is room for keys."""
        known = self.index.known_prefix(keys)
        index = self.index
        if self.in_slots is not self.has and known < len(keys):
            reservation = index.reserve(keys, known, len(keys))
            if reservation is not None:
                index.complete(reservation.slots)
                return len(keys)
        return known

    def runs_of(self, key: BlockKey) -> list[Run]:
        """The chain that ends in a known block; or before it in the row to which it is attached, and the block."""
        chain = self.index.chain(key)
        if not self.index.is_side(self.index.slot(key)):
            return [linked(chain)]
        return [linked(chain[:-1]), loose([key])]

    def runs_that_end_in(self, keys: Sequence[BlockKey]) -> list[Run]:
        """Chains that end in one of these blocks, and the loose blocks among them."""
        is_loose = [self.index.is_side(self.index.slot(key)) for key in keys]
        ends = [key for key, is_one in zip(keys, is_loose, strict=True) if not is_one and self.index.is_last(key)]
        found = [linked(self.index.chain(key)) for key in ends]
        return [*found, loose([*compress(keys, is_loose)])] if any(is_loose) else found

    def room_for(self, run: Run, wanted: int, may_yield: Callable[[PactPlan], bool] = _never) -> int:
        """Slots that so many blocks of a run would get now; if they are too few, plans that `may_yield` end."""
        reservable = partial(self.index.reservable, run.needed, wanted, run.slot_class)
        return self.ledger.make_room(reservable, wanted, may_yield)

    def reserve(self, run: Run) -> Reservation | None:
        """Slots for new blocks, all or none."""
        if run.is_linked:
            return self.index.reserve(run.chain, run.start, run.start + len(run.keys), run.owner)
        return self.index.reserve_sides(run.keys, run.parents, run.slot_class)

    def take(self, run: Run, share: Callable[[int], int] | None) -> Taken | None:
        """Slots for as many blocks of a run as there is room for, of which it may have its `share`, by default all, and
        a pin on the last of them; None if there is none, or the row that the run needs is not known. Room that tenants
        use within their shares is none for another's run.

        `reservable` is an upper bound where neighbours lease: what they lease is evicted and not free yet."""
        needed = run.needed
        index = self.index
        wanted = room = len(run.keys)
        if needed != NO_BLOCK and needed not in index:
            return None
        if index.shares is not None:
            wanted = room = min(wanted, max(0, index.shares.most(run.owner) - run.start))
        before = None
        try:
            if share is not None or wanted > len(index.space.free[run.slot_class]):
                # without this pin each question about the chain walks to its start
                before = index.pin(needed) if needed != NO_BLOCK else None
                found = self.room_for(run, wanted)
                room = min(wanted, found if share is None else share(found))
            if not room:
                return None
            reservation = self.reserve(run if room == len(run.keys) else run.part(0, room))
            if reservation is None:  # neighbours lease what was evicted
                return None
            return Taken(reservation, index.pin_at(run.keys[room - 1], reservation.slots[-1]))
        finally:
            if before is not None:
                index.unpin(before)


def index_of(arena: Arena, engine: EngineKV) -> BlockIndex:
    """An index over the slots of an arena. A chain without bytes has rows of its own, which take no slots."""
    groups = engine.groups
    classes = engine.classes
    if groups.chain is not None:
        space = arena.slot_space(0)
        chain = classes[groups.chain] if classes else 0
    else:
        space = arena.slot_space(min(MAX_NAMES, NAMES_PER_SLOT * arena.num_slots * max(1, *arena.places)))
        chain = len(arena.places)
    classes_of_slots = len(space.free)
    return BlockIndex(
        space.num_rows,
        space=space,
        classes=classes_of_slots,
        chain_class=chain,
        bare_ends_first=groups.ends_at_states,
        columns=ColumnFile(space),
    )


def number_of(index: BlockIndex) -> Callable[[int], int] | None:
    """Numbers that workers use for the slots of an index; None if they are the same."""
    return None if isinstance(index.space, PlainSlots) else index.space.number
