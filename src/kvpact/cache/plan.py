"""The plans of live requests: from a prepare, through reads from the tiers, to the promise that a commit takes.

Owns no state: a request's is in its `RequestState`, its plan in the ledger. `lookup.py` decides the answer of a
prepare; this module collects the facts and carries the answer out. Touches memory only and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvpact.cache.finder import Finder
from kvpact.cache.groups import RequestGroups
from kvpact.cache.jobs import PactLedger, PactPlan, TransferJobs
from kvpact.cache.ledger import State
from kvpact.cache.load_budget import LoadBudget
from kvpact.cache.lookup import Availability, Lookup, Miss, Phase, Stage, Wait, decide
from kvpact.cache.prefetch import Prefetcher
from kvpact.cache.request import RequestState
from kvpact.cache.tier_set import TierSet
from kvpact.cache.waiting import Event, Facts, Told
from kvpact.config import KvpactConfig
from kvpact.contract import EngineRequest, ExternalKVMatch, num_blocks_for
from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import BlockIndex
from kvpact.metrics import EndReason, Metrics, MissReason
from kvpact.ranges import BlockRange

NO_MATCH = ExternalKVMatch(0)

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


@dataclass(eq=False, slots=True)
class Planner:
    """Answers prepares with what `finder` finds, and opens and stages their plans."""

    config: KvpactConfig
    ledger: PactLedger
    index: BlockIndex
    tiers: TierSet
    prefetcher: Prefetcher
    finder: Finder
    metrics: Metrics
    jobs: TransferJobs
    load_budget: LoadBudget
    groups: RequestGroups
    clock: Callable[[], float]

    # Prepare

    def still_waits(self, request_id: str, state: RequestState | None, computed_tokens: int) -> bool:
        """Whether a request was told "ask again later" and nothing has changed; if so, its plan is renewed."""
        if state is None or state.waiting.told is not Told.LATER or self.tiers.has_completions:
            return False
        plan, now = self.ledger.find(request_id), self.clock()
        facts = Facts(computed_tokens, self.tiers.completions, plan)
        if state.waiting.facts != facts or not state.waiting.may_wait(now):
            return False
        if plan is not None:
            self.ledger.renew(plan, now)
        return True

    def begin_waiting(self, state: RequestState) -> None:
        """The request was told "ask again later" before it was asked for: its deadline runs."""
        state.waiting.note(Event.AHEAD, self.clock() + self.config.prepare_deadline)

    def prepare(self, request: EngineRequest, state: RequestState, computed_tokens: int) -> ExternalKVMatch | None:
        """See `ExternalCache`: a match, or None for "ask again later"."""
        waiting = state.waiting
        if waiting.told is Told.LATER:
            waiting.note(Event.CHANGED)
        self.load_budget.release(request.request_id)
        answer = self._prepare(request, state, computed_tokens)
        if isinstance(answer, ExternalKVMatch):
            waiting.note(Event.ANSWERED)
            return answer
        facts = Facts(computed_tokens, self.tiers.completions, self.ledger.find(request.request_id))
        until = self.clock() + self.config.prepare_deadline
        waiting.note(Event.PUT_OFF if answer.put_off else Event.LATER, until, None if answer.put_off else facts)
        return None

    def decline(self, request: EngineRequest, state: RequestState, computed_tokens: int) -> None:
        """Called instead of `prepare` in a step without time for it: the request is a miss."""
        state.waiting.note(Event.DECLINED)
        self.load_budget.release(request.request_id)
        start = computed_tokens // self.groups.block_size
        if 0 < self.finder.loadable_blocks(request) <= start:
            self._spare(request.request_id, state, start)
        else:
            self._miss(request.request_id, state, start, Miss(MissReason.DEADLINE))

    def _prepare(self, request: EngineRequest, state: RequestState, computed_tokens: int) -> ExternalKVMatch | Wait:
        name, start = request.request_id, computed_tokens // self.groups.block_size
        loadable = self.finder.loadable_blocks(request)
        if 0 < loadable <= start:
            return self._spare(name, state, start)
        refused = self._why_not(request, state, computed_tokens)
        if refused is not None:
            return self._miss(name, state, start, Miss(refused))
        plan, now = self.ledger.find(name), self.clock()
        if plan is not None and plan.state is State.LOADING:
            return NO_MATCH  # preempted before the workers reported: they may still write its blocks
        if plan is not None and plan.postponed is not None and self.groups.lost_any(plan.slots):
            self.ledger.end(name, EndReason.SUPERSEDED)
            plan = None  # its slots are kept, but what was dropped since is not to be promised anew
        if plan is not None:
            self.ledger.renew(plan, now)
        usable = self.finder.usable_blocks(loadable, state)
        if plan is not None and (plan.blocks.start != start or plan.blocks.end > usable):
            plan = None
        if plan is not None and plan.state is State.PLANNED:
            return self._match(plan)
        keys = self.finder.keys_to(request, state, start, usable)
        if keys is None:
            return Wait(put_off=True)
        if plan is None and len(keys) - start < self.config.min_match_blocks:
            return self._miss(name, state, start, Miss(_why_so_few(state, len(keys))))
        return self._look_up(_Probe(name, state, keys, start, plan, now))

    def _why_not(self, request: EngineRequest, state: RequestState, computed_tokens: int) -> MissReason | None:
        """Why nothing is looked up for a request; None if it is."""
        if state.keys is None:
            return MissReason.UNKNOWN_IDENTITY
        if not (request.may_load and self.groups.shows_all) or computed_tokens % self.groups.groups.alignment:
            return MissReason.DISABLED
        if state.loads_without_progress >= MAX_LOADS_WITHOUT_PROGRESS:
            return MissReason.CROWDED
        return MissReason.OVERDUE if self.jobs.is_stuck else None

    def _look_up(self, probe: _Probe) -> ExternalKVMatch | Wait:
        """Collect the facts once, decide, and carry that out."""
        state, plan = probe.state, probe.plan
        completions, asked = self.tiers.completions, state.tier_lookup
        deadline = self.finder.deadline(state)
        if plan is not None or (asked is not None and not asked.done and probe.now < deadline):
            self.tiers.poll()
        keys = probe.keys if plan is None or not self.groups.groups.sides else probe.keys[: plan.blocks.end]
        available = self.finder.find(state, keys, probe.now, probe.start)
        if plan is None and probe.now < deadline and self.finder.asks_shared:
            self.finder.ask(state, probe.keys, available)
            self.finder.ask_more(state, probe.keys, max(available.resident, self._chain_of(state)), probe.start)
        if plan is not None:
            phase, end, has_news = Phase.READING, plan.blocks.end, self.tiers.completions > completions
        else:
            asked = state.tier_lookup
            phase = Phase.FREE if asked is None or asked.done else Phase.ASKING
            end, has_news = len(probe.keys), state.last_lookup < 0 and asked is not None
        limits = self.finder.limits(state, available, probe.start, has_news=has_news)
        decision = decide(available, Lookup(phase, probe.start, end, deadline), limits, probe.now)
        if isinstance(decision, Wait):
            if plan is None:
                self.ledger.end(probe.request_id, EndReason.SUPERSEDED)
            return decision
        if isinstance(decision, Stage):
            if self._stage(probe, decision.end, available):
                return Wait()
            decision = decision.otherwise
        if decision.reason is MissReason.RECOMPUTE_FASTER and state.last_lookup != probe.start:
            self.metrics.add("declined_blocks", available.stored - max(available.resident, probe.start))
        if decision.tiers_done:
            self._let_tiers_go(probe)
        if isinstance(decision, Miss):
            return self._miss(probe.request_id, state, probe.start, decision)
        return self._match(self._promise(probe, BlockRange(probe.start, decision.end - probe.start)))

    @staticmethod
    def _chain_of(state: RequestState) -> int:
        """How many of a request's blocks the shared tiers hold of the chain."""
        return max(state.tier_lookup.hits.values(), default=0) if state.tier_lookup is not None else 0

    # What was decided

    def _stage(self, probe: _Probe, end: int, available: Availability) -> bool:
        """Read blocks up to `end` into memory, under a plan that promises nothing yet; whether there is room."""
        reach = self._fetch(probe, end, available)
        if reach <= max(probe.start, available.resident):
            return False
        keys, held = probe.keys[:reach], self.index.held_prefix(probe.keys, reach)
        if not any(map(self.prefetcher.is_arriving, [*keys[held : held + 1], *probe.state.staged])):
            return False
        self._open(probe, BlockRange(probe.start, reach - probe.start), promised=False)
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
                reach = self.prefetcher.fetch(keys, end, available.by_tier)
            if reach < end:
                reach = groups.whole(reach) if groups.reads_all else 0
            if not reach:
                return 0
            pins.append(self.index.pin(keys[reach - 1]))
            needed = [each for each in groups.hanging(state, reach, start) if not self.index.is_held(each.key)]
            missing = [each for each in needed if each.key not in self.index]
            if not self.prefetcher.fetch_hanging(missing, state.tier_lookup):
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
            return self._open(probe, blocks, promised=True)
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
            self.metrics.add("spared_lookups")
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
            self.metrics.add("lookups")
            state.found = None
        state.last_lookup = start
        if found is not None and state.found is None:
            state.found = found
            if not found:
                self.metrics.add("misses", label=reason)

    # Commit

    def take(self, request_id: str, match: ExternalKVMatch, num_tokens: int, num_block_ids: int) -> PactPlan | None:
        """The plan of which the engine takes `num_tokens` into its blocks; None if it declines.

        Raises PactViolation if the match is not the request's open plan, or promises fewer tokens.
        """
        plan = self.ledger.find(request_id)
        if plan is None or plan is not match.query_result:
            raise PactViolation(f"request {request_id} commits a match that is not its open plan")
        self.load_budget.release(request_id)
        if num_tokens == 0:
            self.ledger.abort(plan, EndReason.DECLINED)
            return None
        end = plan.blocks.start + num_blocks_for(num_tokens, self.groups.block_size)
        named = self.groups.groups.chain == 0  # `block_ids` are the first group's
        if num_tokens > plan.promised_tokens or (named and end > num_block_ids):
            raise PactViolation(
                f"request {request_id} commits {num_tokens} tokens into {num_block_ids} blocks; "
                f"{plan.promised_tokens} were promised, from block {plan.blocks.start} on"
            )
        return plan


def _why_so_few(state: RequestState, keys: int) -> MissReason:
    """Why at most `keys` blocks of a request may be promised."""
    if state.invalid_from == keys:
        return MissReason.FAILED_BEFORE
    ended = state.keys is not None and state.keys.ended
    return MissReason.UNKNOWN_IDENTITY if ended else MissReason.TOO_SHORT
