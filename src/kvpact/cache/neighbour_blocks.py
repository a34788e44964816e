"""Blocks that other engines of this host hold: found in their tables, and leased while plans promise or load them.

Owns the leases, and the numbers by which ranks know the engines. A look-up may find what is gone a moment later; a
lease cannot. Memory comes first, then the engine that has most of what is lacking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from kvpact.cache.jobs import PactPlan, PlanLease
from kvpact.cache.memory import Memory, Reader
from kvpact.cache.needs.engine_groups import EngineGroups
from kvpact.cache.needs.match import Needs
from kvpact.cache.needs.runs import Has, Run
from kvpact.cache.neighbour_reads import NeighbourReads
from kvpact.cache.tier_set import TierSet
from kvpact.cache.totals import Sources
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import Pin
from kvpact.index.neighbour import Lease
from kvpact.memory.neighbour_slots import encode_addresses
from kvpact.pool.met_engine import MetEngine
from kvpact.pool.neighbours import Neighbours, OtherEngine
from kvpact.tiers.backends import MEMORY, NEIGHBOURS

MOST_TRIES: Final = 4
"""Matches that are tried, each shorter than the last one, while engines give up what was found."""


class Holding(NamedTuple):
    """A match up to row `end` whose blocks cannot go, in parts that are each in one engine's memory."""

    end: int
    runs: list[Run]
    leases: list[PlanLease]


@dataclass(eq=False, slots=True)
class NeighbourLease:
    """Leased blocks of one run, in another engine's slots."""

    of: MetEngine
    lease: Lease

    @property
    def name(self) -> str:
        """Name of the engine, for people."""
        return self.of.engine.name

    @property
    def number(self) -> int:
        """Number of the engine, as ranks know it."""
        return self.of.number

    @property
    def is_refused(self) -> bool:
        """True once nobody may use the engine's blocks any more."""
        return self.of.is_refused

    def refute(self, keys: Sequence[BlockKey]) -> None:
        """Ask the engine for these blocks no more."""
        self.of.refuted.add(keys)


def sources_of(
    runs: Sequence[Run], groups: EngineGroups, read: PactPlan | None, staged: Mapping[BlockKey, str], count: int
) -> Sources:
    """Sources of a match of `count` rows with these runs; some may have been `read` for a plan, from `staged` tiers."""
    rows = list(read.sources.rows) if read is not None else []
    for run in runs:
        if run.is_linked and run.holder is not None:
            rows = [(min(end, run.start), tier) for end, tier in rows]
            rows += [(run.start, MEMORY), (run.start + len(run), NEIGHBOURS)]
    loose = groups.bytes_by_tier(runs, staged if read is not None else {}, MEMORY, NEIGHBOURS)
    return Sources(tuple(rows), groups.row_bytes, loose, count)


@dataclass(eq=False)
class NeighbourBlocks:
    """Blocks of the engines that `neighbours` has now, beside those of `memory`."""

    neighbours: Neighbours
    memory: Memory
    reads: NeighbourReads | None = None
    """Reads into own slots, where no rank copies from another engine's; `neighbours` has no engine then."""
    has_news: bool = field(default=False, init=False)
    """True if ranks are to hear from which engines loads may come."""
    lends: bool = field(default=False, init=False)
    """True once others may lease rows of `memory`."""
    _met: tuple[OtherEngine, ...] = field(default=(), init=False)
    engines: list[MetEngine] = field(default_factory=list, init=False)
    """Engines that were there at the last look."""
    _leased: dict[int, MetEngine] = field(default_factory=dict, init=False)
    """Engines with leased blocks, by number, whether or not they are gone."""
    _numbers: int = field(default=0, init=False)

    @staticmethod
    def of(neighbours: Neighbours, reader: Reader | None, memory: Memory, tiers: TierSet) -> NeighbourBlocks:
        """Blocks that ranks copy from others' slots, or, with a `reader`, those that it brings into own ones first."""
        if reader is None:
            return NeighbourBlocks(neighbours, memory)
        return NeighbourBlocks(Neighbours(), memory, NeighbourReads(neighbours, tiers, reader))

    def are_there(self) -> bool:
        """Look for engines that came or went; True if any is there."""
        met = self.neighbours.current()
        if met is not self._met:
            known = {each.engine: each for each in self.engines}
            self.engines = [known.get(engine) or self._enter(engine) for engine in met]
            self._met = met
            self.has_news = True
        return bool(met)

    def _enter(self, engine: OtherEngine) -> MetEngine:
        self.memory.ledger.release = self.release  # an engine alone needs no choice there
        self._numbers += 1
        return MetEngine(engine, self._numbers)

    # Finding

    def may_have(self, key: BlockKey) -> bool:
        """True if an engine seems to hold a block."""
        return any(each.has(key) for each in self.engines)

    def reach(self, needs: Needs) -> int:
        """Rows of the longest match that memory and the engines seem to have together."""
        return needs.longest_with(self._has(needs))

    def _has(self, needs: Needs) -> Has:
        first = max(needs.start, needs.in_a_row)
        return Has(partial(self._count, first), self._has_each)

    def _has_each(self, key: BlockKey) -> bool:
        return self.memory.has.each(key) or self.may_have(key)

    def _count(self, first: int, keys: Sequence[BlockKey]) -> int:
        """Rows of a chain of which memory has the `first`, or the computing engine itself."""
        at = first
        more = 1
        while more and at < len(keys):
            rest = keys[at:]
            more = max((each.count(rest) for each in self.engines if each.has(rest[0])), default=0)
            at += more
        return at

    # Keeping

    def hold(self, needs: Needs, end: int, least: int) -> Holding | None:
        """Lease all of a match up to row `end`, or of a shorter one where engines have given up some of it since.

        None if no match up to row `least` or later is there any more.
        """
        for _ in range(MOST_TRIES):
            if end < max(least, needs.start + 1):
                break
            self.memory.know(needs.keys[:end])
            runs = needs.runs(end)
            held = self._hold_each(runs)
            if sum(map(len, held.runs)) == sum(map(len, runs)):
                return Holding(end, held.runs, held.leases)
            shorter = needs.longest(self._has(needs), min(held.end, end - 1))
            if len(runs) == 1 and shorter == held.end >= max(least, needs.start + 1):
                return held
            for lease in held.leases:
                self.release(lease)
            end = shorter
        return None

    def _hold_each(self, runs: Sequence[Run]) -> Holding:
        """Lease runs, as far as all before is leased, too; `end` is that of the rows that are leased."""
        parts: list[Run] = []
        leases: list[PlanLease] = []
        end = 0
        for run in runs:
            at = 0
            while at < len(run):
                rest = run.part(at, len(run))
                own = rest.first_held(self.memory.has)
                part = rest.part(0, own) if own else self._lease(rest)
                if part is None:
                    return Holding(end or run.start + at, parts, leases)
                leases += self.memory.lease((part,)) if own else self._own_lease(part)
                parts.append(part)
                at += len(part)
            end = end or run.start + at
        return Holding(end, parts, leases)

    @staticmethod
    def _own_lease(part: Run) -> Sequence[NeighbourLease]:
        assert isinstance(part.holder, NeighbourLease)
        return (part.holder,)

    def _lease(self, run: Run) -> Run | None:
        """Lease the first blocks of a run from the engine that has most of them; None if none has the first one."""
        holders = [each for each in self.engines if each.has(run.keys[0])]
        if len(holders) > 1:
            holders.sort(key=lambda each: -each.count(run.keys))
        for each in holders:
            keys = run.keys[: each.count(run.keys)] if len(each.refuted) else run.keys
            lease = each.engine.index.lease(keys)
            if lease is not None:
                part = run.part(0, len(lease.slots))
                part.slots = lease.slots
                part.holder = self._entered(each, lease)
                return part
        return None

    def _entered(self, engine: MetEngine, lease: Lease) -> NeighbourLease:
        engine.leases += 1
        self._leased[engine.number] = engine
        return NeighbourLease(engine, lease)

    def hold_part(self, runs: Sequence[Run]) -> list[PlanLease]:
        """Leases for runs that are the first parts of leased ones: the rows after them can go with the old leases."""
        leases: list[PlanLease] = []
        for run in runs:
            held = run.holder
            if isinstance(held, NeighbourLease):
                again = held.of.engine.index.lease_again(held.lease, len(run))
                run.holder = self._entered(held.of, again)
                leases += self._own_lease(run)
            else:
                leases += self.memory.lease((run,))
        return leases

    def release(self, lease: PlanLease) -> None:
        """End a lease: no rank copies from its slots any more."""
        if isinstance(lease, Pin):
            self.memory.index.unpin(lease)
            return
        assert isinstance(lease, NeighbourLease)
        engine = lease.of
        engine.leases -= 1
        if not engine.leases:
            del self._leased[engine.number]
            self.has_news |= engine.engine.gone
        engine.engine.index.release(lease.lease)

    def end_step(self) -> None:
        """Take back rows of this engine that others lease no more, and let go of engines that are gone.

        From the first step on in which others may lease them.
        """
        self.lends = True
        if self.neighbours.owes_reset:
            self.neighbours.reset()
        self.memory.index.claim_again()
        if self.reads is not None:
            self.reads.look()
        else:
            self.are_there()

    # Ranks

    def for_ranks(self) -> bytes:
        """Message to ranks: the engines from which loads may come, or are under way."""
        self.has_news = False
        here = {each.number: each for each in self.engines} | self._leased
        return encode_addresses([each.memory() for each in here.values()])

    def leased_from(self) -> dict[str, int]:
        """Blocks leased in each engine, as often as each is, also in those that are gone; on any thread."""
        if self.reads is not None:
            return self.reads.tier.leased_from()
        each = dict.fromkeys((*self.engines, *self._leased.copy().values()))
        return {one.engine.name: one.engine.index.leased_rows for one in each}
