"""Reads from tiers into memory for a request, under a plan that promises nothing until they have arrived.

Owns which requests wait for room, and which blocks are read for them (`RequestState.staged`). Decides nothing: see
`lookup.py`. Touches memory only and waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvpact.cache.finder import Finder
from kvpact.cache.jobs import PactLedger, PactPlan
from kvpact.cache.lookup import Availability
from kvpact.cache.memory import Memory
from kvpact.cache.needs.engine_groups import EngineGroups
from kvpact.cache.needs.match import Needs
from kvpact.cache.prefetch import Lacking, Prefetcher
from kvpact.cache.request import RequestState
from kvpact.cache.tier_set import TierSet
from kvpact.cache.totals import NO_SOURCES, Sources
from kvpact.cache.waiting import Claim, Queue, WaitEvent
from kvpact.config import KvpactConfig
from kvpact.index.block_index import BlockIndex
from kvpact.metrics import EndReason, MissReason
from kvpact.ranges import BlockRange


class Probe(NamedTuple):
    """A prepare at `now` of a request's blocks, from block `start` on."""

    request_id: str
    state: RequestState
    needs: Needs
    start: int
    plan: PactPlan | None
    """The request's plan, if blocks are being read for it."""
    now: float


@dataclass(eq=False)
class Staging:
    """Brings blocks that tiers have into memory, for one request after the other."""

    config: KvpactConfig
    ledger: PactLedger
    groups: EngineGroups
    finder: Finder
    queue: Queue
    reads: Prefetcher = field(init=False)
    memory: Memory = field(init=False)
    index: BlockIndex = field(init=False)
    tiers: TierSet = field(init=False)

    def __post_init__(self) -> None:
        self.reads = self.finder.reads
        self.memory = self.reads.memory
        self.index = self.reads.index
        self.tiers = self.reads.tiers

    def _claim(self, probe: Probe, lacking: Lacking, available: Availability, reach: int) -> Claim:
        """Claim of a request for which `lacking` is read; rows before `reach` have room."""
        end = lacking.missing.end
        first = max(probe.start, available.resident)
        return Claim(end - first, lacking.seconds or 0.0, end - max(first, reach))

    def begin(self, probe: Probe, lacking: Lacking, available: Availability) -> bool:
        """Read lacking blocks into memory, under a plan that promises nothing yet; False if there is no room."""
        reach = self._fetch(probe, lacking, available)
        if reach <= max(probe.start, available.resident):
            return False
        state = probe.state
        state.waiting.claim = self._claim(probe, lacking, available, reach)
        if state.waiting.ahead is not None:
            self.queue.moved_at = probe.now
        held = self.index.held_prefix(probe.needs.keys, reach)
        if not any(map(self.reads.is_arriving, [*probe.needs.keys[held : min(held + 1, reach)], *state.staged])):
            return False
        earlier = probe.plan.sources if probe.plan is not None else NO_SOURCES
        if self.finder.others.reads is not None:
            self.finder.others.reads.note_read(lacking, state.record)
        state.lookups.note(probe.start, None, None, self.tiers.metrics, state.record)
        plan = self.ledger.open_plan(
            probe.request_id,
            BlockRange(probe.start, reach - probe.start),
            block_size=self.groups.block_size,
            slots=[],
            now=probe.now,
            leases=[self.index.lease(probe.needs.keys[reach - 1], 0)[0]],
        )
        plan.sources = Sources(self.reads.rows_found(available.by_tier, lacking.missing.first, earlier.rows))
        return True

    def waits_for_room(self, probe: Probe, lacking: Lacking, available: Availability) -> bool:
        """True if the request waits until others leave room for what it lacks; if none has any, none comes."""
        first = max(probe.start, available.resident)
        held = 0 if probe.plan is None else len(probe.plan.leases)
        if self.index.pinned_count <= held or self.reads.is_overdue(first, available.by_tier):
            return False
        reach = min(lacking.missing.end, self.index.known_prefix(probe.needs.keys))
        claim = self._claim(probe, lacking, available, reach)
        prefill = self.finder.prefill if self.config.recompute_if_faster else None
        if not self.queue.wait(probe.state.waiting, claim, first - probe.start, prefill):
            return False
        if probe.plan is None:
            self.ledger.end(probe.request_id, EndReason.SUPERSEDED)
        return True

    def give_up(self, probe: Probe) -> None:
        """The request stops waiting for tiers: a blocked request does not ask them in every step (H02)."""
        if probe.plan is not None:
            probe.state.waiting.note(WaitEvent.OVER, probe.now)
        if probe.state.tier_lookup is not None:
            probe.state.tier_lookup.give_up(late=True)

    def why_not(self, probe: Probe, available: Availability) -> MissReason:
        """Reason why blocks in the tiers were not read for a request."""
        if self.reads.is_overdue(max(probe.start, available.resident), available.by_tier):
            return MissReason.TIER_DOWN
        reason = self.finder.why_unknown()
        return reason if reason is MissReason.TIER_DOWN else MissReason.NO_ROOM

    def _fetch(self, probe: Probe, lacking: Lacking, available: Availability) -> int:
        """Begin to read blocks that a match, or a shorter one, lacks of all groups; returns its end: all rows
        before it are in memory or on their way; 0 if there is no such match.

        Room is not made from what memory has of this match, nor from what it has of the shorter one that is promised if
        there is no room.
        """
        state = probe.state
        needs = probe.needs
        missing = lacking.missing
        by_tier = lacking.by_tier
        present = [key for key in needs.loose_keys(missing.end, available.resident) if key in self.index]
        pins = self.index.pin_each(present)
        try:
            reach = self.memory.know(needs.keys[: missing.end])
            reach += self.reads.fetch(needs.linked(reach, missing.end), by_tier, self.queue.room_to_read)
            if reach < missing.end:
                reach = self.groups.part_of_match(reach)
                missing = needs.missing(reach, self.memory.has)
            if not reach:
                return 0
            pins.append(self.index.pin(needs.keys[reach - 1]))
            for run in missing.loose:
                rest = run.unknown(0, self.index.__contains__)
                is_read = not self.queue.lacks and self.reads.fetch(rest, by_tier, self.queue.room_to_read)
                if is_read < len(rest.keys):
                    return 0
        finally:
            for pin in pins:
                self.index.unpin(pin)
        earlier = state.staged if probe.plan is not None else {}
        state.staged = {**earlier, **self.reads.tiers_of(missing.loose, by_tier)}
        return reach
