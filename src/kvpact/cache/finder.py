"""Where a request's blocks are: what memory and the tiers have of them, and what shared tiers are asked.

Owns how fast the engine was seen to compute, which says what is worth a question. Decides no answer: see `lookup.py`.
Touches memory only and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kvpact.cache.lookup import Availability
from kvpact.cache.needs.engine_groups import EngineGroups
from kvpact.cache.needs.match import Needs
from kvpact.cache.neighbour_blocks import NeighbourBlocks
from kvpact.cache.prefetch import Prefetcher
from kvpact.cache.request import RequestState
from kvpact.cache.tier_set import TierSet
from kvpact.config import KvpactConfig
from kvpact.identity.epochs import Epochs
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import BlockIndex
from kvpact.metrics import MissReason
from kvpact.tiers.costs import PrefillRate

MORE_ROUNDS = 3
"""Rounds of one request's questions to shared tiers for loose blocks: for the longest match, and for shorter ones."""


@dataclass(eq=False)
class Finder:
    """Finds blocks of requests of the current epoch of `epochs`."""

    config: KvpactConfig
    groups: EngineGroups
    reads: Prefetcher
    epochs: Epochs
    others: NeighbourBlocks
    prefill: PrefillRate = field(init=False)
    """Speed of the engine's prefill, measured by steps."""
    index: BlockIndex = field(init=False)
    tiers: TierSet = field(init=False)

    def __post_init__(self) -> None:
        self.prefill = PrefillRate(2 * self.groups.block_size)
        self.index = self.reads.index
        self.tiers = self.reads.tiers

    @property
    def asks_shared(self) -> bool:
        """True if a prepare asks shared tiers."""
        return self.may_be_shared and self.config.match_at == "schedule" and self.config.prepare_deadline > 0

    @property
    def looks_up_at_step(self) -> bool:
        """True if workers look in shared tiers at a step's beginning."""
        return self.config.match_at == "step" and self.may_be_shared

    @property
    def may_be_shared(self) -> bool:
        """True if shared tiers may hold blocks of this epoch."""
        return bool(self.tiers.shared) and self.tiers.may_share(self.epochs.current)

    def find(self, state: RequestState, needs: Needs, now: float) -> Availability:
        """Where the blocks are that a request's matches need: all groups must have what a match needs of them.

        Reads memory only and waits for nothing.
        """
        others = self.others
        if others.reads is not None:
            others.reads.look()
        answers = self.reads.answers(state.tier_lookup, now) if self.tiers.clients else ()
        resident, by_tier = needs.available(self.reads.memory.has, answers)
        beside = 0
        if resident < len(needs.keys) and others.reads is None and others.are_there():
            beside = max(0, others.reach(needs) - resident)
        if not state.branches:
            state.branches = needs.start, needs.in_a_row
        rows = needs.keys[needs.in_a_row : needs.in_a_row + 1]
        is_arriving = any(map(self.reads.is_arriving, [*rows, *state.staged]))
        return Availability(resident + beside, by_tier, is_arriving, beside)

    def may_go_on(self, keys: Sequence[BlockKey]) -> bool:
        """True if some place may hold blocks of a chain after `keys`, the first ones of it."""
        if self.may_be_shared or not self.groups.row_bytes or keys[-1] in self.index:
            return True
        if self.others.engines and self.others.may_have(keys[-1]):
            return True
        now = self.tiers.clock()
        return any(client.held(keys, now) == len(keys) for client in self.tiers.clients if not client.shared)

    def ask(self, state: RequestState, needs: Needs, available: Availability) -> None:
        """Ask the shared tiers, once per request, if what they might hold is worth the question.

        Those that have answered are asked for loose blocks, if nobody is known to have them and they would make a match
        longer.
        """
        lookup = state.tier_lookup
        if lookup is None:
            missing = len(needs.keys) - max(available.resident, available.stored)
            if missing:
                state.begin_lookup(self.reads.ask(needs.keys, partial(self.computes_faster, missing), None))
        elif lookup.hits and not lookup.pending and lookup.rounds < MORE_ROUNDS:
            answers = partial(self.reads.answers, lookup, self.tiers.clock())
            rows = max(available.resident, *lookup.hits.values())
            if lacks := needs.worth_asking(self.reads.memory.has, answers, rows):
                self.reads.ask(lacks, partial(self.computes_faster, 0), lookup)

    def why_unknown(self) -> MissReason:
        """Why blocks are known nowhere: a tier that would be asked for them cannot be, or none of all has them."""
        shared = self.may_be_shared
        is_down = any(client.health.is_paused for client in self.tiers.clients if shared or not client.shared)
        return MissReason.TIER_DOWN if is_down else MissReason.NOT_STORED

    def computes_faster(self, blocks: int, seconds: float | None) -> bool:
        """True if the engine should compute `blocks` blocks in less than `seconds`, if those are known."""
        return self.config.recompute_if_faster and self.prefill.is_faster(blocks * self.groups.block_size, seconds)
