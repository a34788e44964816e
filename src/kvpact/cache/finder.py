"""Where a request's blocks are: what memory and the tiers have of them, and what shared tiers are asked.

Owns how fast the engine was seen to compute, which says what is worth a question. Decides no answer: see `lookup.py`.
Touches memory only and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kvpact.cache.groups import RequestGroups
from kvpact.cache.lookup import Availability
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
"""How often a request asks shared tiers for blocks of side groups: for the longest match, and for shorter ones."""


@dataclass(eq=False)
class Finder:
    """Finds blocks of requests of the current epoch of `epochs`."""

    config: KvpactConfig
    groups: RequestGroups
    reads: Prefetcher
    epochs: Epochs
    prefill: PrefillRate = field(init=False)
    """How fast the engine computes; a step tells it."""
    index: BlockIndex = field(init=False)
    tiers: TierSet = field(init=False)

    def __post_init__(self) -> None:
        self.prefill = PrefillRate(2 * self.groups.block_size)
        self.index, self.tiers = self.reads.index, self.reads.tiers

    @property
    def asks_shared(self) -> bool:
        """Whether a prepare asks shared tiers."""
        return self.may_be_shared and self.config.match_at == "schedule" and self.config.prepare_deadline > 0

    @property
    def looks_up_at_step(self) -> bool:
        """Whether workers look in shared tiers at a step's beginning."""
        return self.config.match_at == "step" and self.may_be_shared

    @property
    def may_be_shared(self) -> bool:
        """Whether shared tiers may hold blocks of this epoch."""
        return bool(self.tiers.shared) and self.tiers.may_share(self.epochs.current)

    def find(self, state: RequestState, keys: Sequence[BlockKey], now: float, start: int = 0) -> Availability:
        """Where these blocks of a request are, of which the engine has those before `start`.

        Reads memory only and waits for nothing.
        """
        by_tier = self.reads.readable(keys, state.tier_lookup, now)
        if self.groups.groups.chain is None:  # a chain whose blocks have no bytes is available everywhere
            held, arriving, by_tier = len(keys), False, tuple(len(keys) for _ in by_tier)
        else:
            held = self.index.held_prefix(keys)
            arriving = held < len(keys) and self.reads.is_arriving(keys[held])
        if not self.groups.groups.sides:
            return Availability(held, by_tier, arriving)
        return self._with_all_groups(state, Availability(held, by_tier, arriving), start, now)

    def _with_all_groups(self, state: RequestState, chain: Availability, start: int, now: float) -> Availability:
        """Cut what is available of a chain to what a match can use: all groups must have what it needs."""
        resident = self.groups.longest(state, chain.resident, start, self.index.is_held)
        if not state.branches:
            state.branches = start, chain.resident
        reach, stored = resident, max(chain.resident, chain.stored)
        if self.tiers.clients and stored > resident:
            supplied = self.reads.supplied(state.tier_lookup, now)
            reach = self.groups.longest(state, stored, start, lambda key: self.index.is_held(key) or supplied(key))
        if reach <= chain.resident:  # the tiers are needed for side groups alone
            by_tier = tuple(reach for _ in chain.by_tier)
        else:
            by_tier = tuple(min(blocks, reach) for blocks in chain.by_tier)
        arriving = chain.arriving or any(map(self.reads.is_arriving, state.staged))
        return Availability(resident, by_tier, arriving)

    def may_go_on(self, keys: Sequence[BlockKey]) -> bool:
        """Whether some place may hold blocks of a chain after `keys`, the first ones of it."""
        if self.may_be_shared or self.groups.groups.chain is None:
            return True
        if keys[-1] in self.index:
            return True
        now = self.tiers.clock()
        return any(client.held(keys, now) == len(keys) for client in self.tiers.clients if not client.shared)

    def ask(self, state: RequestState, keys: Sequence[BlockKey], available: Availability) -> None:
        """Ask the shared tiers, once per request, if what they might hold is worth the question."""
        if state.tier_lookup is not None:
            return
        missing = len(keys) - max(available.resident, available.stored)
        if missing:
            state.begin_lookup(self.reads.ask(keys, partial(self.computes_faster, missing)))

    def ask_more(self, state: RequestState, keys: Sequence[BlockKey], rows: int, start: int) -> None:
        """Ask the shared tiers that have answered what they hold of the side groups, if that is not known yet and would
        make a match longer; memory has one of `rows` rows."""
        lookup, groups = state.tier_lookup, self.groups
        if not groups.groups.sides or lookup is None or lookup.pending or not lookup.hits:
            return
        if lookup.rounds >= MORE_ROUNDS:
            return
        rows = len(keys) if groups.groups.chain is None else max(rows, *lookup.hits.values())
        now = self.tiers.clock()
        has, may_have = (self.reads.supplied(lookup, now, unknown=unknown) for unknown in (False, True))
        lacks = groups.worth_asking(state, rows, start, has, may_have)
        if lacks:
            self.reads.ask_more(lookup, lacks)

    def why_unknown(self) -> MissReason:
        """Why blocks are known nowhere: a tier that would be asked for them cannot be, or none of all has them."""
        shared = self.may_be_shared
        is_down = any(client.health.is_paused for client in self.tiers.clients if shared or not client.shared)
        return MissReason.TIER_DOWN if is_down else MissReason.NOT_STORED

    def computes_faster(self, blocks: int, seconds: float | None) -> bool:
        """Whether the engine should compute `blocks` blocks in less than `seconds`, if those are known."""
        return self.config.recompute_if_faster and self.prefill.is_faster(blocks * self.groups.block_size, seconds)
