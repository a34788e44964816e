"""How a prepare is answered: from finding a request's blocks, through reads from the tiers, to the promise.

`lookup.py` decides; this module collects the facts and carries the answer out. Owns how fast the engine was seen to
compute; a request's state is in its `RequestState`, its plan in the ledger. Touches memory only and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import NamedTuple

from kvpact.cache.groups import RequestGroups
from kvpact.cache.jobs import PactLedger, PactPlan, TransferJobs
from kvpact.cache.ledger import State
from kvpact.cache.load_budget import LoadBudget
from kvpact.cache.lookup import Availability, Limits, Lookup, Miss, Phase, Stage, Wait, decide
from kvpact.cache.prefetch import Prefetcher
from kvpact.cache.request import RequestState
from kvpact.cache.tier_set import TierSet
from kvpact.cache.waiting import Event, Facts, Queue, Told
from kvpact.config import KvpactConfig
from kvpact.contract import EngineRequest, ExternalKVMatch
from kvpact.identity.epochs import Epochs
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import BlockIndex
from kvpact.metrics import EndReason, MissReason
from kvpact.ranges import BlockRange
from kvpact.tiers.costs import PrefillRate

NO_MATCH = ExternalKVMatch(0)

KEY_PIECE_TOKENS = 8192
"""Tokens whose blocks are named at once: about 0.2 ms of the scheduler's thread, in blocks of 16."""

MORE_ROUNDS = 3
"""How often a request asks shared tiers for blocks of side groups: for the longest match, and for shorter ones."""

MAX_LOADS_WITHOUT_PROGRESS = 3
"""Loads without progress, each ended by a preemption, after which the engine computes the request's prompt.

Two requests that load at once can hold so many of the engine's blocks that neither gets another one to run. Each is
preempted, loads again and keeps the other from running, for ever (P11).
"""


class _Probe(NamedTuple):
    """A prepare at `now` of a request's blocks, named `keys`, from block `start` on."""

    request_id: str
    state: RequestState
    keys: Sequence[BlockKey]
    start: int
    plan: PactPlan | None
    """The request's plan, if blocks are being read for it."""
    now: float


@dataclass(eq=False)
class Planner:
    """Answers prepares of requests of the current epoch of `epochs`, and opens and stages their plans."""

    config: KvpactConfig
    ledger: PactLedger
    groups: RequestGroups
    reads: Prefetcher
    jobs: TransferJobs
    load_budget: LoadBudget
    epochs: Epochs
    prefill: PrefillRate = field(init=False)
    """How fast the engine computes; a step tells it."""
    queue: Queue = field(init=False)
    index: BlockIndex = field(init=False)
    tiers: TierSet = field(init=False)

    def __post_init__(self) -> None:
        self.prefill = PrefillRate(2 * self.groups.block_size)
        self.index, self.tiers = self.reads.index, self.reads.tiers
        self.queue = Queue(lambda: self.index.usable_slots, self.groups.block_size)

    # Prepare

    def still_waits(self, request_id: str, state: RequestState | None, computed_tokens: int) -> bool:
        """Whether a request was told "ask again later" and nothing has changed; if so, its plan is renewed."""
        if state is None or (facts := state.waiting.facts) is None or facts.computed_tokens != computed_tokens:
            return False
        plan, now, behind = self.ledger.find(request_id), self.tiers.clock(), False
        if plan is not facts.plan or now >= self._deadline(state):
            return False
        if state.waiting.told is Told.NO_ROOM:
            behind = self.queue.lacks > 0
            if not behind and (facts.room != self.index.available_slots or self.tiers.hangs):
                return False
        if not behind and (self.tiers.has_completions or facts.completions != self.tiers.completions):
            return False
        if plan is not None:
            self.ledger.renew(plan, now)
        self.queue.note(state.waiting)
        return True

    def may_wait(self, state: RequestState | None) -> bool:
        """Whether the request's deadline runs."""
        return state is not None and state.waiting.until is not None and self.tiers.clock() < self._deadline(state)

    def begin_waiting(self, state: RequestState) -> None:
        """The request was told "ask again later" before it was asked for: its deadline runs."""
        state.waiting.note(Event.AHEAD, self.tiers.clock() + self.config.prepare_deadline)

    def prepare(self, request: EngineRequest, state: RequestState, computed_tokens: int) -> ExternalKVMatch | None:
        """See `ExternalCache`: a match, or None for "ask again later"."""
        waiting = state.waiting
        if waiting.told in (Told.LATER, Told.NO_ROOM):
            waiting.note(Event.CHANGED)
        waiting.claim = None
        answer = self._prepare(request, state, computed_tokens)
        if isinstance(answer, Wait) or not answer.num_tokens:
            self.load_budget.release(request.request_id)
        if isinstance(answer, ExternalKVMatch):
            waiting.note(Event.ANSWERED)
            return answer
        plan, until = self.ledger.find(request.request_id), self.tiers.clock() + self.config.prepare_deadline
        facts = Facts(computed_tokens, self.tiers.completions, plan, self.index.available_slots)
        if answer.put_off:
            waiting.note(Event.PUT_OFF, until)
        else:
            waiting.note(Event.NO_ROOM if answer.no_room else Event.LATER, until, facts)
        self.queue.note(waiting)
        return None

    def decline(self, request: EngineRequest, state: RequestState, computed_tokens: int) -> None:
        """Called instead of `prepare` in a step without time for it: the request is a miss."""
        state.waiting.note(Event.DECLINED)
        self.load_budget.release(request.request_id)
        start = computed_tokens // self.groups.block_size
        if 0 < self.loadable_blocks(request) <= start:
            self._spare(request.request_id, state, start)
        else:
            self._miss(request.request_id, state, start, Miss(MissReason.DEADLINE))

    def _prepare(self, request: EngineRequest, state: RequestState, computed_tokens: int) -> ExternalKVMatch | Wait:
        name, start = request.request_id, computed_tokens // self.groups.block_size
        loadable = self.loadable_blocks(request)
        if 0 < loadable <= start:
            return self._spare(name, state, start)
        refused = self._why_not(request, state, computed_tokens)
        if refused is not None:
            return self._miss(name, state, start, Miss(refused))
        plan, now = self.ledger.find(name), self.tiers.clock()
        if plan is not None and plan.state is State.LOADING:
            return NO_MATCH  # preempted before the workers reported: they may still write its blocks
        if plan is not None and plan.postponed is not None and self.groups.lost_any(plan.slots):
            self.ledger.end(name, EndReason.SUPERSEDED)
            plan = None  # its slots are kept, but what was dropped since is not to be promised anew
        if plan is not None:
            self.ledger.renew(plan, now)
        usable = _usable_blocks(loadable, state)
        if plan is not None and (plan.blocks.start != start or plan.blocks.end > usable):
            plan = None
        if plan is not None and plan.state is State.PLANNED:
            return self._match(plan)
        keys = self._keys_to(request, state, start, usable)
        if keys is None:
            return Wait(put_off=True)
        if plan is None and len(keys) - start < self.config.min_match_blocks:
            return self._miss(name, state, start, Miss(_why_so_few(state, len(keys))))
        return self._look_up(_Probe(name, state, keys, start, plan, now))

    def _why_not(self, request: EngineRequest, state: RequestState, computed_tokens: int) -> MissReason | None:
        """Why nothing is looked up for a request, be it early, in a prepare or when its step begins; None if it is."""
        if state.keys is None:
            return MissReason.UNKNOWN_IDENTITY
        if not (request.may_load and self.groups.shows_all) or computed_tokens % self.groups.groups.alignment:
            return MissReason.DISABLED
        if state.loads_without_progress >= MAX_LOADS_WITHOUT_PROGRESS:
            return MissReason.CROWDED
        return MissReason.OVERDUE if self.jobs.is_stuck else None

    def _look_up(self, probe: _Probe) -> ExternalKVMatch | Wait:
        """Collect the facts once, decide, and carry that out."""
        state, plan, record = probe.state, probe.plan, probe.state.record
        completions, asked = self.tiers.completions, state.tier_lookup
        deadline = self._deadline(state)
        if plan is not None or (asked is not None and not asked.done and probe.now < deadline):
            self.tiers.poll()
        keys = probe.keys if plan is None or not self.groups.groups.sides else probe.keys[: plan.blocks.end]
        available = self._find(state, keys, probe.now, probe.start)
        if plan is None:
            record.found = available
        if plan is None and probe.now < deadline and self.asks_shared:
            self._ask(state, probe.keys, available)
            self._ask_more(state, probe.keys, max(available.resident, _chain_of(state)), probe.start)
        if plan is not None:
            phase, end, has_news = Phase.READING, plan.blocks.end, self.tiers.completions > completions
        else:
            asked = state.tier_lookup
            phase = Phase.FREE if asked is None or asked.done else Phase.ASKING
            end, has_news = len(probe.keys), state.last_lookup < 0 and asked is not None
        limits = self._limits(state, available, probe, has_news=has_news)
        decision = decide(available, Lookup(phase, probe.start, end, deadline), limits, probe.now)
        if isinstance(decision, Wait):
            if plan is None:
                self.ledger.end(probe.request_id, EndReason.SUPERSEDED)
            return decision
        if isinstance(decision, Stage):
            if self._stage(probe, decision.end, available):
                return Wait()
            if self._waits_for_room(probe, decision.end, available):
                return Wait(no_room=True)
            decision = decision.otherwise
        if decision.reason is MissReason.RECOMPUTE_FASTER and state.last_lookup != probe.start:
            self.reads.note_declined(probe.keys, probe.start, available)
        if decision.tiers_done:
            self._let_tiers_go(probe)
        if isinstance(decision, Miss):
            return self._miss(probe.request_id, state, probe.start, decision)
        return self._match(self._promise(probe, BlockRange(probe.start, decision.end - probe.start)))

    # Where blocks are

    @property
    def asks_shared(self) -> bool:
        """Whether a prepare asks shared tiers."""
        return self._may_be_shared and self.config.match_at == "schedule" and self.config.prepare_deadline > 0

    @property
    def looks_up_at_step(self) -> bool:
        """Whether workers look in shared tiers at a step's beginning."""
        return self.config.match_at == "step" and self._may_be_shared

    @property
    def _may_be_shared(self) -> bool:
        """Whether shared tiers may hold blocks of this epoch."""
        return bool(self.tiers.shared) and self.tiers.may_share(self.epochs.current)

    def _keys_to(self, request: EngineRequest, state: RequestState, start: int, end: int) -> Sequence[BlockKey] | None:
        """The keys of the blocks from `start` to `end`, the usable ones, as far as some place may hold them.

        Those are not the last token's block (P6), and none that failed before (H09). Keys are made piece by piece, and
        no more once nobody holds the last one. None: the step has used its budget, and the next one makes more; each
        call makes some. A request whose deadline has passed gets those that there are.
        """
        if state.keys is None:
            return ()
        names = state.keys
        piece, made, deadline = max(1, KEY_PIECE_TOKENS // self.groups.block_size), False, self._deadline(state)
        while (known := len(names.keys)) < end and not names.ended:
            if known > start and not self._may_go_on(names.keys):
                break
            if known > start and self.tiers.clock() >= deadline > -inf:
                break
            if made and deadline > -inf and self.tiers.budget.exhausted:
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
        now = self.tiers.clock()
        return any(client.held(keys, now) == len(keys) for client in self.tiers.clients if not client.shared)

    def loadable_blocks(self, request: EngineRequest) -> int:
        """Whole blocks before the request's last token."""
        return (len(request.token_ids) - 1) // self.groups.block_size

    def _deadline(self, state: RequestState) -> float:
        """Time until which a request may wait for tiers."""
        waiting, patience = state.waiting, self.config.prepare_deadline
        if patience <= 0 or waiting.until is None:
            return inf if patience > 0 else -inf
        return self.queue.deadline(waiting.until, waiting.ahead, self.prefill, patience)

    def _find(self, state: RequestState, keys: Sequence[BlockKey], now: float, start: int = 0) -> Availability:
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

    def find_elsewhere(self, request: EngineRequest, state: RequestState, blocks: BlockRange) -> Sequence[BlockKey]:
        """Keys up to the end of `blocks` that workers may look for in shared tiers; none if fewer than a match."""
        computed_tokens = blocks.start * self.groups.block_size
        if not self.looks_up_at_step or state.keys is None or self._why_not(request, state, computed_tokens):
            return ()
        end = min(blocks.end, _usable_blocks(self.loadable_blocks(request), state))
        keys: Sequence[BlockKey] = state.keys.extend(request.token_ids, end)[:end]
        keys = keys[: self.tiers.readable_elsewhere(keys)]
        return keys if len(keys) - blocks.start >= self.config.min_match_blocks else ()

    def _ask(self, state: RequestState, keys: Sequence[BlockKey], available: Availability) -> None:
        """Ask the shared tiers, once per request, if what they might hold is worth the question."""
        if state.tier_lookup is not None:
            return
        missing = len(keys) - max(available.resident, available.stored)
        if missing:
            state.begin_lookup(self.reads.ask(keys, partial(self._computes_faster, missing)))

    def _ask_more(self, state: RequestState, keys: Sequence[BlockKey], rows: int, start: int) -> None:
        """Ask the shared tiers that have `rows` blocks of the chain what they hold of the side groups, if that is not
        known yet and would make a match longer."""
        lookup, groups = state.tier_lookup, self.groups
        if not groups.groups.sides or lookup is None or lookup.pending or not lookup.hits:
            return
        if lookup.rounds >= MORE_ROUNDS:
            return
        rows = len(keys) if groups.groups.chain is None else rows
        now = self.tiers.clock()
        has, may_have = (self.reads.supplied(lookup, now, unknown=unknown) for unknown in (False, True))
        lacks = groups.worth_asking(state, rows, start, has, may_have)
        if lacks:
            self.reads.ask_more(lookup, lacks)

    def ask_early(self, request: EngineRequest, state: RequestState) -> None:
        """Ask the shared tiers for a request that the engine has no room for yet, if that is worth it.

        A step that has used its budget leaves this, or what is left of it, to the first prepare.
        """
        if self.asks_shared and not self.tiers.budget.exhausted and self._why_not(request, state, 0) is None:
            keys = self._keys_to(request, state, 0, _usable_blocks(self.loadable_blocks(request), state))
            if keys is not None:
                self._ask(state, keys, self._find(state, keys, self.tiers.clock()))

    def _limits(self, state: RequestState, available: Availability, probe: _Probe, *, has_news: bool) -> Limits:
        """The limits of a prepare; `has_news`: tiers have answered something for it."""
        first, faster = max(available.resident, probe.start), False
        if self.config.recompute_if_faster and available.by_tier and available.stored > first:
            seconds = self.reads.seconds_to_load(first, available.stored, available.by_tier)
            faster = self._computes_faster(available.stored - first, seconds)
        not_found = MissReason.ASKED_AT_STEP if self.looks_up_at_step else MissReason.NOT_STORED
        if available.by_tier and available.resident < len(probe.keys):
            not_found = self.reads.probe_silent(probe.keys, state) or not_found
        return Limits(
            self.config.min_match_blocks,
            has_news and state.waiting.told is not Told.PUT_OFF and self.tiers.budget.exhausted,
            faster,
            MissReason.NO_ROOM if state.waiting.ahead is not None else not_found,
        )

    def _computes_faster(self, blocks: int, seconds: float | None) -> bool:
        """Whether the engine should compute `blocks` blocks in less than `seconds`, if those are known."""
        return self.config.recompute_if_faster and self.prefill.is_faster(blocks * self.groups.block_size, seconds)

    # What was decided

    def _stage(self, probe: _Probe, end: int, available: Availability) -> bool:
        """Read blocks up to `end` into memory, under a plan that promises nothing yet; whether there is room."""
        reach = self._fetch(probe, end, available)
        if reach <= (first := max(probe.start, available.resident)):
            return False
        probe.state.waiting.claim = self.reads.claim(first, end, available.by_tier, reach)
        if probe.state.waiting.ahead is not None:
            self.queue.moved_at = probe.now
        keys, held = probe.keys[:reach], self.index.held_prefix(probe.keys, reach)
        if not any(map(self.reads.is_arriving, [*keys[held : held + 1], *probe.state.staged])):
            return False
        earlier = probe.plan.sources if probe.plan is not None else ()
        plan = self._open(probe, BlockRange(probe.start, reach - probe.start), promised=False)
        plan.sources = self.reads.sources(available.by_tier, available.resident, earlier)
        return True

    def _waits_for_room(self, probe: _Probe, end: int, available: Availability) -> bool:
        """Whether the request waits until others leave room for its blocks up to `end`; if none has any, none comes."""
        first, held = max(probe.start, available.resident), 0 if probe.plan is None else len(probe.plan.leases)
        if self.index.pinned_count <= held or self.reads.hang(first, available.by_tier):
            return False
        claim = self.reads.claim(first, end, available.by_tier, min(end, self.index.known_prefix(probe.keys)))
        prefill = self.prefill if self.config.recompute_if_faster else None
        if not self.queue.wait(probe.state.waiting, claim, first - probe.start, prefill):
            return False
        if probe.plan is None:
            self.ledger.end(probe.request_id, EndReason.SUPERSEDED)
        return True

    def _fetch(self, probe: _Probe, end: int, available: Availability) -> int:
        """Begin to read what a match up to block `end`, or a shorter one, needs of all groups; returns up to which
        block all of it is there or on its way, 0 if that is none.

        Room is not made from what memory has of this match, nor from what it has of the shorter one that is promised if
        there is no room.
        """
        state, keys, start, groups = probe.state, probe.keys, probe.start, self.groups
        wanted = (*groups.hanging(state, end, start), *groups.hanging(state, available.resident, start))
        present = dict.fromkeys(needed.key for needed in wanted if needed.key in self.index)
        pins = self.index.pin_each([*present])
        try:
            if groups.groups.chain is None:
                reach = groups.know_rows(keys[:end])
            else:
                reach = self.reads.fetch(keys, end, available.by_tier, self.queue.room_to_read)
            if reach < end:
                reach = groups.whole(reach) if groups.reads_all else 0
            if not reach:
                return 0
            pins.append(self.index.pin(keys[reach - 1]))
            needed = [each for each in groups.hanging(state, reach, start) if not self.index.is_held(each.key)]
            missing = [each for each in needed if each.key not in self.index]
            if (missing and self.queue.lacks) or not self.reads.fetch_hanging(missing, state.tier_lookup):
                return 0
        finally:
            for pin in pins:
                self.index.unpin(pin)
        state.staged = tuple(each.key for each in needed)
        return reach

    def _let_tiers_go(self, probe: _Probe) -> None:
        """The request stops waiting for tiers: a blocked request does not ask them in every step (H02)."""
        if probe.plan is not None:
            probe.state.waiting.note(Event.OVER, probe.now)
        if probe.state.tier_lookup is not None:
            probe.state.tier_lookup.give_up(late=True)

    def _promise(self, probe: _Probe, blocks: BlockRange) -> PactPlan:
        """Promise blocks that memory holds, under the plan that they were read for if that covers them."""
        plan = probe.plan
        if plan is None or blocks.end > plan.blocks.end:
            opened = self._open(probe, blocks, promised=True)
            opened.sources = plan.sources if plan is not None else ()
            return opened
        plan.slots, leases = self.groups.lease(probe.state, probe.keys, blocks)
        self.ledger.ready(
            plan, promised_tokens=blocks.count * self.groups.block_size, leases=leases, now=probe.now, blocks=blocks
        )
        self._count_lookup(probe.state, blocks.start, True)
        return plan

    def _open(self, probe: _Probe, blocks: BlockRange, *, promised: bool) -> PactPlan:
        state, keys, now = probe.state, probe.keys, probe.now
        self._count_lookup(state, blocks.start, True if promised else None)
        self.index.touch(keys[blocks.end - 1])
        if promised:
            slots, leases = self.groups.lease(state, keys, blocks)
        else:
            slots, leases = [], [self.index.pin(keys[blocks.end - 1])]
        return self.ledger.open_plan(
            probe.request_id,
            blocks,
            block_size=self.groups.block_size,
            slots=slots,
            now=now,
            leases=leases,
            promised_tokens=blocks.count * self.groups.block_size if promised else 0,
        )

    def _match(self, plan: PactPlan) -> ExternalKVMatch:
        """What a plan promises now. How it is loaded depends on what the running step waits for already."""
        waits = self.load_budget.hold(plan.request_id, sum(len(run.slots) for run in plan.slots))
        return ExternalKVMatch(plan.promised_tokens, not waits, plan)

    def _spare(self, request_id: str, state: RequestState, start: int) -> ExternalKVMatch:
        """The engine has all that could be loaded: counts as neither a lookup nor a miss."""
        self.ledger.end(request_id, EndReason.SUPERSEDED)
        if state.spared_at != start:
            self.tiers.metrics.add("spared_lookups")
        state.spared_at = start
        return NO_MATCH

    def _miss(self, request_id: str, state: RequestState, start: int, miss: Miss) -> ExternalKVMatch:
        self.ledger.end(request_id, miss.ends)
        self._count_lookup(state, start, False, miss.reason)
        return NO_MATCH

    def _count_lookup(
        self, state: RequestState, start: int, found: bool | None, reason: MissReason = MissReason.NOT_STORED
    ) -> None:
        """Count once what a lookup from block `start` on found; a repeated lookup is not counted (H02).

        One with another result is: a blocked request may miss first, and find later what others have saved.
        """
        if state.last_lookup != start or (found is not None and state.found is not None and found != state.found):
            self.tiers.metrics.add("lookups")
            state.found = None
        record = state.record
        state.last_lookup = record.looked_up_from = start
        if found is not None:
            record.miss = None if found else reason
        if found is not None and state.found is None:
            state.found = found
            if found:
                self.tiers.metrics.add("hits")
            else:
                self.tiers.metrics.add("misses", label=reason)


def _usable_blocks(loadable: int, state: RequestState) -> int:
    """How many of a request's loadable blocks may be promised, if they all have keys."""
    return loadable if state.invalid_from is None else min(loadable, state.invalid_from)


def _chain_of(state: RequestState) -> int:
    """How many of a request's blocks the shared tiers hold of the chain."""
    return max(state.tier_lookup.hits.values(), default=0) if state.tier_lookup is not None else 0


def _why_so_few(state: RequestState, keys: int) -> MissReason:
    """Why at most `keys` blocks of a request may be promised."""
    if state.invalid_from == keys:
        return MissReason.FAILED_BEFORE
    ended = state.keys is not None and state.keys.ended
    return MissReason.UNKNOWN_IDENTITY if ended else MissReason.TOO_SHORT
