"""Finds a request's blocks in memory and in the tiers, and says whether looking or loading is worth its time.

Owns no state: a request's lookup is in its `RequestState`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from kvpact.cache.budget import StepBudget
from kvpact.cache.groups import RequestGroups
from kvpact.cache.lookup import Availability, Limits
from kvpact.cache.prefetch import Prefetcher
from kvpact.cache.request import RequestState
from kvpact.cache.tier_set import TierSet
from kvpact.cache.waiting import Told
from kvpact.config import KvpactConfig
from kvpact.contract import EngineRequest
from kvpact.identity.epochs import Epochs
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import BlockIndex
from kvpact.metrics import MissReason
from kvpact.ranges import BlockRange
from kvpact.tiers.costs import PrefillRate

KEY_PIECE_TOKENS = 8192
"""Tokens whose blocks are named at once: about 0.2 ms of the scheduler's thread, in blocks of 16."""

MORE_ROUNDS = 3
"""How often a request asks shared tiers for blocks of side groups: for the longest match, and for shorter ones."""


@dataclass(eq=False, slots=True)
class Finder:
    """Looks in one index and the tiers below it, for requests of the current epoch of `epochs`."""

    config: KvpactConfig
    index: BlockIndex
    tiers: TierSet
    prefetcher: Prefetcher
    epochs: Epochs
    prefill: PrefillRate
    groups: RequestGroups
    clock: Callable[[], float]
    budget: StepBudget

    @property
    def asks_shared(self) -> bool:
        """Whether a prepare asks shared tiers."""
        may_wait = self.config.match_at == "schedule" and self.config.prepare_deadline > 0
        return may_wait and bool(self.tiers.shared) and self._may_be_shared

    @property
    def looks_up_at_step(self) -> bool:
        """Whether workers look in shared tiers at a step's beginning."""
        return self.config.match_at == "step" and self._may_be_shared

    @property
    def _may_be_shared(self) -> bool:
        """Whether shared tiers may hold blocks of this epoch."""
        return bool(self.tiers.shared) and self.tiers.may_share(self.epochs.current)

    def keys_to(self, request: EngineRequest, state: RequestState, start: int, end: int) -> Sequence[BlockKey] | None:
        """The keys of the blocks from `start` to `end`, the usable ones, as far as some place may hold them.

        Those are not the last token's block (P6), and none that failed before (H09). Keys are made piece by piece, and
        no more once nobody holds the last one. None: the step has used its budget, and the next one makes more; each
        call makes some. A request whose deadline has passed gets those that there are.
        """
        if state.keys is None:
            return ()
        names = state.keys
        piece, made, deadline = max(1, KEY_PIECE_TOKENS // self.groups.block_size), False, self.deadline(state)
        while (known := len(names.keys)) < end and not names.ended:
            if known > start and not self._may_go_on(names.keys):
                break
            if known > start and self.clock() >= deadline > -inf:
                break
            if made and deadline > -inf and self.budget.exhausted:
                return None
            names.extend(request.token_ids, min(end, max(known, start) + piece))
            made = True
        return names.keys[:end]

    def _may_go_on(self, keys: Sequence[BlockKey]) -> bool:
        """Whether some place may hold blocks of a chain after `keys`, the first ones of it."""
        if self._may_be_shared or self.groups.groups.chain is None:
            return True
        if keys[-1] in self.index:
            return True
        now = self.clock()
        return any(client.held(keys, now) == len(keys) for client in self.tiers.clients if not client.shared)

    def loadable_blocks(self, request: EngineRequest) -> int:
        """Whole blocks before the request's last token."""
        return (len(request.token_ids) - 1) // self.groups.block_size

    @staticmethod
    def usable_blocks(loadable: int, state: RequestState) -> int:
        """How many of a request's loadable blocks may be promised, if they all have keys."""
        return loadable if state.invalid_from is None else min(loadable, state.invalid_from)

    def deadline(self, state: RequestState) -> float:
        """Time until which a request may wait for tiers."""
        if self.config.prepare_deadline <= 0:
            return -inf
        return state.waiting.until if state.waiting.until is not None else inf

    def find(self, state: RequestState, keys: Sequence[BlockKey], now: float, start: int = 0) -> Availability:
        """Where these blocks of a request are, of which the engine has those before `start`.

        Reads memory only and waits for nothing.
        """
        by_tier = self.prefetcher.readable(keys, state.tier_lookup, now)
        if self.groups.groups.chain is None:  # a chain whose blocks have no bytes is available everywhere
            held, arriving, by_tier = len(keys), False, tuple(len(keys) for _ in by_tier)
        else:
            held = self.index.held_prefix(keys)
            arriving = held < len(keys) and self.prefetcher.is_arriving(keys[held])
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
            supplied = self.prefetcher.supplied(state.tier_lookup, now)
            reach = self.groups.longest(state, stored, start, lambda key: self.index.is_held(key) or supplied(key))
        if reach <= chain.resident:  # the tiers are needed for side groups alone
            by_tier = tuple(reach for _ in chain.by_tier)
        else:
            by_tier = tuple(min(blocks, reach) for blocks in chain.by_tier)
        arriving = chain.arriving or any(map(self.prefetcher.is_arriving, state.staged))
        return Availability(resident, by_tier, arriving)

    def find_elsewhere(self, request: EngineRequest, state: RequestState, blocks: BlockRange) -> Sequence[BlockKey]:
        """Keys up to the end of `blocks` that workers may look for in shared tiers; none if fewer than a match."""
        if not self.looks_up_at_step or not request.may_load or state.keys is None:
            return ()
        end = min(blocks.end, self.usable_blocks(self.loadable_blocks(request), state))
        keys: Sequence[BlockKey] = state.keys.extend(request.token_ids, end)[:end]
        keys = keys[: self.tiers.readable_elsewhere(keys)]
        return keys if len(keys) - blocks.start >= self.config.min_match_blocks else ()

    def ask(self, state: RequestState, keys: Sequence[BlockKey], available: Availability) -> None:
        """Ask the shared tiers, once per request, if what they might hold is worth the question."""
        if state.tier_lookup is not None:
            return
        missing = len(keys) - max(available.resident, available.stored)
        if missing and not self._computes_faster(missing, self.prefetcher.lookup_seconds or None):
            state.tier_lookup = self.prefetcher.ask(keys)

    def ask_more(self, state: RequestState, keys: Sequence[BlockKey], rows: int, start: int) -> None:
        """Ask the shared tiers that have `rows` blocks of the chain what they hold of the side groups, if that is not
        known yet and would make a match longer."""
        lookup, groups = state.tier_lookup, self.groups
        if not groups.groups.sides or lookup is None or lookup.pending or not lookup.hits:
            return
        if lookup.rounds >= MORE_ROUNDS:
            return
        rows = len(keys) if groups.groups.chain is None else rows
        now = self.clock()
        has, may_have = (self.prefetcher.supplied(lookup, now, unknown=unknown) for unknown in (False, True))
        sure = groups.longest(state, rows, start, lambda key: self.index.is_held(key) or has(key))
        perhaps = groups.longest(state, rows, start, lambda key: self.index.is_held(key) or may_have(key))
        if perhaps > sure:
            keys = [needed.key for needed in groups.hanging(state, perhaps, start)]
            self.prefetcher.ask_more(lookup, [key for key in keys if not self.index.is_held(key) and not has(key)])

    def ask_early(self, request: EngineRequest, state: RequestState) -> None:
        """Ask the shared tiers for a request that the engine has no room for yet, if that is worth it.

        A step that has used its budget leaves this, or what is left of it, to the first prepare.
        """
        if state.keys is not None and request.may_load and self.asks_shared and not self.budget.exhausted:
            keys = self.keys_to(request, state, 0, self.usable_blocks(self.loadable_blocks(request), state))
            if keys is not None:
                self.ask(state, keys, self.find(state, keys, self.clock()))

    def limits(self, state: RequestState, available: Availability, start: int, *, has_news: bool) -> Limits:
        """The limits of a prepare from block `start` on; `has_news`: tiers have answered something for it."""
        first, faster = max(available.resident, start), False
        if self.config.recompute_if_faster and available.stored > first:
            seconds = self.prefetcher.seconds_to_load(first, available.stored, available.by_tier)
            faster = self._computes_faster(available.stored - first, seconds)
        return Limits(
            self.config.min_match_blocks,
            has_news and state.waiting.told is not Told.PUT_OFF and self.budget.exhausted,
            faster,
            MissReason.ASKED_AT_STEP if self.looks_up_at_step else MissReason.NOT_STORED,
        )

    def _computes_faster(self, blocks: int, seconds: float | None) -> bool:
        """Whether the engine should compute `blocks` blocks in less than `seconds`."""
        return self.config.recompute_if_faster and self.prefill.is_faster(blocks * self.groups.block_size, seconds)
