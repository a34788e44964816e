"""Reads from the tiers: what they hold of a request's blocks, and whole blocks into slots before a promise.

Owns the lookups and reads under way, the slots that are being filled from a tier, and the pins that keep them until
then. Decides nothing about requests; runs on the scheduler's thread and only submits work to the tiers' own threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import NamedTuple

from kvpact.cache.jobs import PactPlan
from kvpact.cache.memory import Memory
from kvpact.cache.needs.match import Missing
from kvpact.cache.needs.runs import NOTHING, Has, Run, Supply, excepting, known_by
from kvpact.cache.request import RequestState, TierLookup
from kvpact.cache.tier_set import TierSet
from kvpact.cache.totals import Rows
from kvpact.cache.writeback import WriteBack
from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import BlockIndex, Pin, SlotState
from kvpact.metrics import MEMORY, MissReason
from kvpact.tiers.client import TierClient
from kvpact.tiers.executor import GetDone, LookupDone


class Lacking(NamedTuple):
    """Blocks that a match needs and memory lacks, with the price of their reads."""

    missing: Missing
    by_tier: tuple[Supply, ...]
    """Supply of each tier, in the user's order."""
    seconds: float | None
    """Expected until all have arrived; None if unknown."""
    clients: frozenset[TierClient]
    """The tiers that would be read."""


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
    memory: Memory
    writes: WriteBack
    """Offers blocks to the other tiers after a read: saved blocks may have waited for those."""
    index: BlockIndex = field(init=False)
    _filling: set[int] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.index = self.memory.index

    # Finding

    def ask(
        self, keys: Sequence[BlockKey], is_too_slow: Callable[[float], bool], answered: TierLookup | None
    ) -> TierLookup:
        """Ask the shared tiers for the rows `keys`, or, where they have `answered` for rows, for these loose blocks.

        For rows, tiers that are paused are not asked, nor those of which `is_too_slow` says so, by the seconds of a
        lookup: these are probed, if that is due.
        """
        lookup = answered or TierLookup(keys)
        lookup.rounds += answered is not None
        for client in self.tiers.shared:
            unknown = keys
            if answered is not None:
                known = lookup.loose.setdefault(client, {})
                unknown = [key for key in keys if key not in known]
                if not unknown or client not in lookup.hits:
                    continue
            elif client.health.is_paused:
                self._skip(client, lookup, MissReason.TIER_DOWN)
                continue
            elif is_too_slow(client.costs.lookup_seconds):
                client.note_too_slow(LookupDone, client.costs.lookup_seconds, self.tiers.clock())
                self._skip(client, lookup, MissReason.RECOMPUTE_FASTER)
                continue
            op_id = self.tiers.begin(partial(self._end_lookup, client, lookup, unknown, answered is None))
            if client.submit_lookup(op_id, unknown, before=() if answered is None else None):
                lookup.pending[client] = op_id
            else:
                self.tiers.withdraw(op_id)
                lookup.loose[client].update(dict.fromkeys(unknown, False))
        return lookup

    def _skip(self, client: TierClient, lookup: TierLookup, reason: MissReason) -> None:
        """Do not ask a tier, but probe it, if that is due."""
        lookup.silent[client] = reason
        self.tiers.metrics.add("skipped_lookups", label=client.name)
        client.probe(lookup.keys, self.tiers.clock(), before=())

    def _end_lookup(
        self,
        client: TierClient,
        lookup: TierLookup,
        keys: Sequence[BlockKey],
        in_a_row: bool,
        done: LookupDone,
        now: float,
    ) -> None:
        contents = self.tiers.contents[client]
        is_open = lookup.pending.pop(client, None) is not None
        has_answered = done.ok and (done.seconds > 0 or not in_a_row)
        if not in_a_row:
            lookup.loose[client].update(zip(keys, done.each, strict=True))
            contents.found.add([*compress(keys, done.each)], now)
        elif has_answered:
            contents.note_found(keys, done.in_a_row, now)
        if in_a_row and is_open:
            lookup.hits[client] = done.in_a_row
        if not has_answered and (is_open or not in_a_row):
            lookup.silent[client] = MissReason.TIER_DOWN

    def answers(self, lookup: TierLookup | None, now: float, unknown: bool = False) -> list[Has]:
        """Answers of each tier, in the user's order; those of a shared one are in `lookup`. Reads memory only.

        `unknown`: the answer for loose blocks of which a shared tier was not asked.
        """
        return [self._has(client, lookup, now, unknown) for client in self.tiers.clients]

    def _has(self, client: TierClient, lookup: TierLookup | None, now: float, unknown: bool) -> Has:
        contents = self.tiers.contents[client]
        if not client.health.may_read or (client.shared and (lookup is None or client not in lookup.hits)):
            return NOTHING
        if client.shared and lookup is not None:
            count = partial(_found, client, lookup.hits[client])
            return Has(
                partial(contents.without_refuted, count, now), known_by(lookup.loose.get(client, {}).get, unknown)
            )
        each = excepting(partial(client.has, now=now), contents.refuted)
        return Has(partial(contents.without_refuted, partial(client.held, now=now), now), each)

    def rows_found(self, by_tier: Sequence[int], resident: int, earlier: Rows) -> Rows:
        """Where a prompt's rows were found: `resident` in memory, unless `earlier` a tier had them, others below."""
        found = [(min(end, resident), tier) for end, tier in earlier] + [(resident, MEMORY)]
        found += [(blocks, client.name) for client, blocks in zip(self.tiers.clients, by_tier, strict=True)]
        return tuple(found)

    # Costs

    def lacking(self, missing: Missing, by_tier: Sequence[int], lookup: TierLookup | None) -> Lacking:
        """Price the reads of missing blocks, each from the first tier in the user's order that can supply it."""
        answers = self.answers(lookup, self.tiers.clock()) if missing.loose else [NOTHING] * len(by_tier)
        clients = self.tiers.clients
        supplies = tuple(
            Supply(end if client.health.may_read else 0, has.each)
            for client, end, has in zip(clients, by_tier, answers, strict=True)
        )
        seconds: float | None = 0.0
        read = set[TierClient]()
        for run in missing.runs:
            for number, part in run.split(supplies):
                read.add(clients[number])
                needed = clients[number].costs.seconds_for(len(part.keys) * self._bytes_of(part))
                seconds = None if needed is None or seconds is None else seconds + needed
        return Lacking(missing, supplies, seconds, frozenset(read))

    def tiers_of(self, runs: Sequence[Run], supplies: Sequence[Supply]) -> dict[BlockKey, str]:
        """The names of the tiers from which blocks are read, by key."""
        parts = [part for run in runs for part in run.split(supplies)]
        return {key: self.tiers.clients[number].name for number, part in parts for key in part.keys}

    def _bytes_of(self, run: Run) -> int:
        return self.tiers.arena.class_bytes[run.slot_class]

    def is_overdue(self, start: int, by_tier: Sequence[int]) -> bool:
        """True if a tier that can supply blocks from `start` on is overdue: it may keep its slots for long."""
        return any(
            end > start and client.health.has_overdue for client, end in zip(self.tiers.clients, by_tier, strict=True)
        )

    def note_declined(self, keys: Sequence[BlockKey], lacking: Lacking) -> None:
        """The engine computes the blocks `lacking` of `keys`, as that is sooner than to read them.

        The tiers that would be read are probed, if that is due.
        """
        now = self.tiers.clock()
        for client, supply in zip(self.tiers.clients, lacking.by_tier, strict=True):
            if client in lacking.clients:
                client.note_too_slow(GetDone, lacking.seconds or 0.0, now)
                client.probe(keys[: supply.end], now, before=())

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

    def fetch(self, run: Run, supplies: Sequence[Supply], share: Callable[[int], int]) -> int:
        """Begin to read a run of which memory knows nothing; returns the number of its blocks that are on their way.

        Each comes from the first of the tiers' `supplies` that has it. Those are fewer than the run's if there is no
        room, of which `share` says how much a chain's rows may take.
        """
        begun = 0
        for number, part in run.split(supplies):
            rest = part
            while rest.keys:
                count = self._fetch_from(self.tiers.clients[number], rest, share)
                begun += count
                if not count:
                    return begun
                rest = rest.part(count, len(rest.keys))
        return begun

    def _fetch_from(self, client: TierClient, run: Run, share: Callable[[int], int]) -> int:
        """Begin one read from a tier, as large as one may be; returns the number of its blocks."""
        wanted = run.fits(client.room, len(run.keys))
        if not wanted:
            return 0
        room = min(wanted, run.share(share, self.memory.room_for(run, wanted, self._may_yield)))
        piece = run.part(0, run.fits(room, max(1, READ_BYTES // self._bytes_of(run))))
        reservation = self.memory.reserve(piece) if piece.keys else None
        if reservation is None:
            return 0
        self.tiers.metrics.add("evicted_blocks", reservation.evicted, MEMORY)
        numbers = [*map(self.index.space.number, reservation.slots)]
        sizes = self.tiers.arena.bytes_of(numbers)
        op = PrefetchOp(tuple(piece.keys), reservation.slots, sizes, self.index.pin(piece.keys[-1]))
        op_id = self.tiers.begin(partial(self._end_read, client, op))
        views = [*map(self.tiers.arena.slot_views, numbers)]
        if not client.submit_get(op_id, op.keys, views, before=piece.before):
            self.tiers.withdraw(op_id)
            self.index.abandon(op.slots)
            self.index.unpin(op.pin)
            return 0
        self._filling.update(op.slots)
        return len(piece.keys)

    def _end_read(self, client: TierClient, op: PrefetchOp, done: GetDone, now: float) -> None:
        self._filling.difference_update(op.slots)
        became_held = self.index.end_writes(op.slots, done.each)
        lost = [key for key, here in zip(op.keys, done.each, strict=True) if not here]
        self.index.unpin(op.pin)
        self.writes.note_became_held(became_held, op.keys)
        contents = self.tiers.contents[client]
        contents.found.discard(lost)
        if done.seconds and len(self.tiers.clients) > 1:
            contents.refuted.add(lost, now)
        self.tiers.count_read(client, sum(done.each), sum(compress(op.sizes, done.each)))

    def _may_yield(self, plan: PactPlan) -> bool:
        """True if the end of a plan for which blocks are read leaves room: all have arrived."""
        return not any(isinstance(pin, Pin) and self.is_arriving(pin.key) for pin in plan.leases)

    def is_arriving(self, key: BlockKey) -> bool:
        """True if `key` is being read from a tier."""
        return bool(self._filling) and key in self.index and self.index.slot(key) in self._filling

    def check(self) -> None:
        """Verify that reads under way have their slots; raises PactViolation."""
        for slot in self._filling:
            if self.index.state(slot) not in (SlotState.RESERVED, SlotState.CANCELLED):
                raise PactViolation(f"slot {slot} is being filled from a tier and {self.index.state(slot).name}")


def _found(client: TierClient, hits: int, keys: Sequence[BlockKey]) -> int:
    """The number of the first of `keys` that a tier can supply which was found to have `hits` of the request's."""
    return client.readable(keys, min(hits, len(keys)))
