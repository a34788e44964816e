"""Reads from the tiers: what they hold of a request's blocks, and whole blocks into slots before a promise.

Owns the lookups and reads under way, the slots that are being filled from a tier, and the pins that keep them until
then. Decides nothing about requests; runs on the scheduler's thread and only submits work to the tiers' own threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from operator import not_
from typing import NamedTuple

from kvpact.cache.jobs import PactLedger, PactPlan
from kvpact.cache.lookup import Availability
from kvpact.cache.request import RequestState, TierLookup
from kvpact.cache.tier_set import TierSet
from kvpact.cache.totals import Rows
from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import ROOT, BlockIndex, Pin, Reservation, SlotState
from kvpact.metrics import MEMORY, MissReason
from kvpact.tiers.client import TierClient
from kvpact.tiers.executor import GetDone, LookupDone


class Needed(NamedTuple):
    """A side group's block by its key, with the key of the row on which it hangs and the class of its slot."""

    key: BlockKey
    row: BlockKey
    slot_class: int


class Lacking(NamedTuple):
    """What memory lacks of what a match needs: the chain's rows [first, end), and blocks of side groups."""

    first: int
    end: int
    row_bytes: int
    """Bytes of a row."""
    hanging: Sequence[Needed] = ()

    def blocks_after(self, start: int) -> int:
        """The number of its blocks, where the engine has the rows before `start`."""
        return max(0, self.end - max(self.first, start)) + len(self.hanging)


Has = Callable[[BlockKey], bool]

READ_BYTES = 16 << 20
"""Bytes of one read: small enough that some blocks have arrived at a deadline, large enough for a disk."""


@dataclass(frozen=True, slots=True)
class PrefetchOp:
    """Blocks on their way from a tier into reserved slots; `pin` keeps the last of them, with what it needs."""

    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...] | range
    sizes: Sequence[int]
    """Bytes of each."""
    pin: Pin


@dataclass(eq=False)
class Prefetcher:
    """The way of blocks from `tiers` into one arena."""

    tiers: TierSet
    index: BlockIndex
    ledger: PactLedger
    note_became_held: Callable[[Sequence[BlockKey], Sequence[BlockKey]], None] | None = field(default=None, init=False)
    """Told what memory holds after a read, and what of it was read: other blocks may have waited for those."""
    _filling: set[int] = field(default_factory=set, init=False)

    # Finding

    def ask(self, keys: Sequence[BlockKey], is_too_slow: Callable[[float], bool]) -> TierLookup:
        """Begin to ask the shared tiers what they hold of `keys`, as far as they are asked now.

        Not those that are left alone, nor those of which `is_too_slow` says so, by the seconds of a look-up: these are
        probed, if that is due.
        """
        lookup, now = TierLookup(keys), self.tiers.clock()
        for client in self.tiers.shared:
            if client.health.is_paused:
                lookup.silent[client] = MissReason.TIER_DOWN
            elif is_too_slow(client.costs.lookup_seconds):
                lookup.silent[client] = MissReason.RECOMPUTE_FASTER
                client.note_too_slow(LookupDone, client.costs.lookup_seconds, now)
            else:
                op_id = lookup.pending[client] = self.tiers.begin(partial(self._end_lookup, client, lookup))
                client.submit_lookup(op_id, keys, before=())
        for client in lookup.silent:
            self.tiers.metrics.add("skipped_lookups", label=client.name)
            client.probe(keys, now, before=())
        return lookup

    def _end_lookup(self, client: TierClient, lookup: TierLookup, done: LookupDone, now: float) -> None:
        has_answered = done.ok and done.seconds > 0
        if has_answered:
            self.tiers.contents[client].note_found(lookup.keys, done.in_a_row, now)
        if lookup.pending.pop(client, None) is not None:
            lookup.hits[client] = done.in_a_row
            if not has_answered:
                lookup.silent[client] = MissReason.TIER_DOWN

    def readable(self, keys: Sequence[BlockKey], lookup: TierLookup | None, now: float) -> tuple[int, ...]:
        """The number of `keys` in a row that each tier can supply, in the user's order. Reads memory only.

        For a shared tier, what `lookup` has found.
        """
        return tuple(self._readable(client, keys, lookup, now) for client in self.tiers.clients)

    def _readable(self, client: TierClient, keys: Sequence[BlockKey], lookup: TierLookup | None, now: float) -> int:
        if client.shared:
            hits = lookup.hits.get(client, 0) if lookup is not None else 0
            held = client.readable(keys, min(hits, len(keys)))
        else:
            held = client.held(keys, now)
        return self.tiers.contents[client].without_refuted(keys, held, now)

    # What hangs on a chain

    def ask_more(self, lookup: TierLookup, keys: Sequence[BlockKey]) -> None:
        """Ask the shared tiers that have answered for blocks of side groups, too."""
        lookup.rounds += 1
        for client in self.tiers.shared:
            known = lookup.hanging.setdefault(client, {})
            unknown = [key for key in keys if key not in known]
            if not unknown or client not in lookup.hits:
                continue
            op_id = self.tiers.begin(partial(self._end_asking_more, client, lookup, unknown))
            if client.submit_lookup(op_id, unknown):
                lookup.pending[client] = op_id
            else:
                self.tiers.withdraw(op_id)
                known.update(dict.fromkeys(unknown, False))

    def _end_asking_more(
        self, client: TierClient, lookup: TierLookup, keys: Sequence[BlockKey], done: LookupDone, now: float
    ) -> None:
        if not done.ok:
            lookup.silent[client] = MissReason.TIER_DOWN
        lookup.hanging[client].update(zip(keys, done.each, strict=True))
        self.tiers.contents[client].found.add([*compress(keys, done.each)], now)
        lookup.pending.pop(client, None)

    def supplied(self, lookup: TierLookup | None, now: float, *, unknown: bool = False) -> Has:
        """Tells of a side group's block whether a tier can supply it. `unknown`: what a shared tier was not asked."""
        sources = [
            self._has(client, lookup, now, unknown)
            for client in self.tiers.clients
            if not client.shared or (lookup is not None and client in lookup.hits and client.health.may_read)
        ]
        return lambda key: any(has(key) for has in sources)

    def _has(self, client: TierClient, lookup: TierLookup | None, now: float, unknown: bool = False) -> Has:
        """Tells of a block whether this tier can supply it; of a shared one, as far as it was asked."""
        if client.shared:
            known = lookup.hanging.get(client, {}) if lookup is not None else {}
            return lambda key: known.get(key, unknown)
        contents = self.tiers.contents[client]
        return lambda key: contents.without_refuted((key,), 1, now) == 1 and client.has(key, now)

    def fetch_hanging(self, missing: Sequence[Needed], lookup: TierLookup | None) -> bool:
        """Begin to read blocks of side groups; False if one of them cannot be read."""
        now, there = self.tiers.clock(), 0
        for client, wanted in self._suppliers(missing, lookup, now):
            there += len(wanted)
            for slot_class in sorted({needed.slot_class for needed in wanted}):
                if not self._read_hanging(client, [each for each in wanted if each.slot_class == slot_class], now):
                    return False
        return there == len(missing)

    def _suppliers(
        self, hanging: Sequence[Needed], lookup: TierLookup | None, now: float
    ) -> Iterator[tuple[TierClient, list[Needed]]]:
        """The tiers from which blocks of side groups are read, each with its own: the first tier that has one."""
        rest = [*hanging]
        for client in self.tiers.clients:
            if rest and client.health.may_read:
                has = self._has(client, lookup, now)
                there = [has(needed.key) for needed in rest]
                yield client, [*compress(rest, there)]
                rest = [*compress(rest, map(not_, there))]

    def tiers_of(self, hanging: Sequence[Needed], lookup: TierLookup | None) -> dict[BlockKey, str]:
        """The names of the tiers from which blocks of side groups are read, by key."""
        suppliers = self._suppliers(hanging, lookup, self.tiers.clock())
        return {needed.key: client.name for client, its in suppliers for needed in its}

    def _read_hanging(self, client: TierClient, wanted: Sequence[Needed], now: float) -> bool:
        """Begin to read blocks of one class of slots from one tier; False, and nothing happens, if it is impossible."""
        keys, rows, slot_class = [each.key for each in wanted], [each.row for each in wanted], wanted[0].slot_class
        reservable = partial(self.index.reservable, rows[-1], len(keys), slot_class)
        if client.room < len(keys) or self.ledger.make_room(reservable, len(keys), self._may_yield) < len(keys):
            return False
        return self._read(client, keys, self.index.reserve_sides(keys, rows, slot_class), now, None)

    def rows_found(self, by_tier: Sequence[int], resident: int, earlier: Rows) -> Rows:
        """Where a prompt's rows were found: `resident` in memory, unless `earlier` a tier had them, others below."""
        found = [(min(end, resident), tier) for end, tier in earlier] + [(resident, MEMORY)]
        found += [(blocks, client.name) for client, blocks in zip(self.tiers.clients, by_tier, strict=True)]
        return tuple(found)

    # Costs

    def _supplier(self, row: int, by_tier: Sequence[int]) -> tuple[TierClient | None, int]:
        """The tier from which a row of a chain is read, and how many rows it can supply: the first that has it."""
        supplies = zip(self.tiers.clients, by_tier, strict=True)
        return next((each for each in supplies if each[1] > row and each[0].health.may_read), (None, 0))

    def _amounts(
        self, lacking: Lacking, by_tier: Sequence[int], lookup: TierLookup | None
    ) -> Iterator[tuple[TierClient, int]]:
        """The tiers from which this is read, each with bytes; a tier may come twice."""
        row, sizes = lacking.first, self.tiers.arena.class_bytes
        while row < lacking.end:
            client, readable = self._supplier(row, by_tier)
            if client is None:
                break
            stop = min(readable, lacking.end)
            yield client, (stop - row) * lacking.row_bytes
            row = stop
        for client, wanted in self._suppliers(lacking.hanging, lookup, self.tiers.clock()):
            yield client, sum(sizes[needed.slot_class] for needed in wanted)

    def seconds_to_load(self, lacking: Lacking, by_tier: Sequence[int], lookup: TierLookup | None) -> float | None:
        """Expected seconds until this has arrived; None if unknown."""
        seconds = 0.0
        for client, nbytes in self._amounts(lacking, by_tier, lookup):
            needed = client.costs.seconds_for(nbytes) if nbytes else 0.0
            if needed is None:
                return None
            seconds += needed
        return seconds

    def is_overdue(self, start: int, by_tier: Sequence[int]) -> bool:
        """True if a tier that can supply blocks from `start` on is overdue: it may keep its slots for long."""
        return any(
            end > start and client.health.has_overdue for client, end in zip(self.tiers.clients, by_tier, strict=True)
        )

    def note_declined(
        self, keys: Sequence[BlockKey], lacking: Lacking, found: Availability, lookup: TierLookup | None
    ) -> None:
        """The engine computes what is `lacking` of `keys`, as that is sooner than to read it.

        The tiers that would be read are probed, if that is due.
        """
        now, ends = self.tiers.clock(), dict(zip(self.tiers.clients, found.by_tier, strict=True))
        seconds = self.seconds_to_load(lacking, found.by_tier, lookup) or 0.0
        for client in {client for client, nbytes in self._amounts(lacking, found.by_tier, lookup) if nbytes}:
            client.note_too_slow(GetDone, seconds, now)
            client.probe(keys[: ends[client]], now, before=())

    def probe_silent(self, keys: Sequence[BlockKey], state: RequestState) -> MissReason | None:
        """Probe the exclusive tiers that are left alone, if that is due, with a prompt that they may have.

        Returns why a tier, shared or not, says nothing of it; None if all have. The record says what is believed of it.
        """
        silent = dict(state.tier_lookup.silent) if state.tier_lookup is not None else {}
        for client in self.tiers.clients:
            if not client.shared and client.health.is_paused:
                client.probe(keys, self.tiers.clock(), before=())
                silent[client] = MissReason.TIER_DOWN
        record = state.record
        record.belief = ""
        for client, reason in silent.items():
            why = client.health.trouble or client.probes.slowness or "its look-up failed"
            record.belief = f"{client.name}: {why:.300}"
            return reason
        return None

    # Reading

    def fetch(
        self,
        keys: Sequence[BlockKey],
        lacking: Lacking,
        by_tier: Sequence[int],
        share: Callable[[int], int],
    ) -> int:
        """Begin to read the rows of `lacking` into the arena; returns the row up to which they are there or on their
        way.

        Each row comes from the first tier in the user's order that can supply it, as `readable` says. A row that
        another request is fetching is not read again. The answer is smaller than the end if there is no room, of which
        `share` tells how much these rows may take.
        """
        end, now = lacking.end, self.tiers.clock()
        known = min(end, self.index.known_prefix(keys))
        read_blocks = max(1, READ_BYTES // lacking.row_bytes)
        while known < end:
            client, readable = self._supplier(known, by_tier)
            if client is None:
                break
            wanted = min(end - known, client.room)
            reservable = partial(self.index.reservable, keys[known - 1] if known else ROOT, wanted)
            room = min(wanted, share(self.ledger.make_room(reservable, wanted, self._may_yield)))
            stop = min(end, readable, known + min(room, read_blocks))
            if stop == known:
                break
            reservation = self.index.reserve(keys, known, stop)
            if not self._read(client, keys[known:stop], reservation, now, keys[:known]):
                break
            known = stop
        return known

    def _read(
        self,
        client: TierClient,
        keys: Sequence[BlockKey],
        reservation: Reservation | None,
        now: float,
        before: Sequence[BlockKey] | None,
    ) -> bool:
        """Read blocks into their new slots; False, and nothing happens, if that is impossible, or there are none."""
        if reservation is None:
            return False
        self.tiers.metrics.add("evicted_blocks", reservation.evicted, MEMORY)
        numbers = [*map(self.index.space.number, reservation.slots)]
        sizes = self.tiers.arena.bytes_of(numbers)
        op = PrefetchOp(tuple(keys), reservation.slots, sizes, self.index.pin(keys[-1]))
        op_id = self.tiers.begin(partial(self._end_read, client, op))
        views = [*map(self.tiers.arena.slot_views, numbers)]
        if not client.submit_get(op_id, op.keys, views, before=before):
            self.tiers.withdraw(op_id)
            self.index.abandon(op.slots)
            self.index.unpin(op.pin)
            return False
        self._filling.update(op.slots)
        return True

    def _end_read(self, client: TierClient, op: PrefetchOp, done: GetDone, now: float) -> None:
        self._filling.difference_update(op.slots)
        became_held = self.index.end_writes(op.slots, done.each)
        lost = [key for key, here in zip(op.keys, done.each, strict=True) if not here]
        self.index.unpin(op.pin)
        if self.note_became_held is not None:
            self.note_became_held(became_held, op.keys)
        contents = self.tiers.contents[client]
        contents.found.discard(lost)
        if done.seconds and len(self.tiers.clients) > 1:
            contents.refuted.add(lost, now)
        self.tiers.count_read(client, sum(done.each), sum(compress(op.sizes, done.each)))

    def _may_yield(self, plan: PactPlan) -> bool:
        """Whether the end of a plan for which blocks are read leaves room: all have arrived."""
        return not any(self.is_arriving(pin.key) for pin in plan.leases)

    def is_arriving(self, key: BlockKey) -> bool:
        """Whether `key` is being read from a tier."""
        return bool(self._filling) and key in self.index and self.index.slot(key) in self._filling

    def check(self) -> None:
        """Verify that reads under way have their slots; raises PactViolation."""
        for slot in self._filling:
            if self.index.state(slot) not in (SlotState.RESERVED, SlotState.CANCELLED):
                raise PactViolation(f"slot {slot} is being filled from a tier and {self.index.state(slot).name}")
