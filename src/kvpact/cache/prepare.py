"""Answers of prepares: from finding a request's blocks, through reads from the tiers, to the promise.

`finder.py` says where blocks are, `lookup.py` decides; this module puts the two together and carries the answer out. A
request's state is in its `RequestState`, its plan in the ledger. Touches memory only and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from kvpact.cache.finder import Finder
from kvpact.cache.jobs import PactLedger, PactPlan, TransferJobs
from kvpact.cache.load_budget import LoadBudget
from kvpact.cache.lookup import Availability, Limits, Lookup, Miss, Phase, Stage, Wait, decide
from kvpact.cache.memory import Memory
from kvpact.cache.needs.engine_groups import EngineGroups
from kvpact.cache.needs.match import Needs
from kvpact.cache.needs.runs import Run
from kvpact.cache.neighbour_blocks import Holding, sources_of
from kvpact.cache.plan import PlanState
from kvpact.cache.prefetch import Lacking, Prefetcher
from kvpact.cache.request import RequestState
from kvpact.cache.staging import Probe, Staging
from kvpact.cache.tier_set import TierSet
from kvpact.cache.waiting import Facts, Queue, Reply, WaitEvent
from kvpact.config import KvpactConfig
from kvpact.contract import EngineRequest, ExternalKVMatch
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import BlockIndex
from kvpact.metrics import EndReason, MissReason
from kvpact.ranges import BlockRange

NO_MATCH = ExternalKVMatch(0)

KEY_PIECE_TOKENS = 8192
"""Tokens whose blocks are named at once: about 0.2 ms of the scheduler's thread, in blocks of 16."""

MAX_LOADS_WITHOUT_PROGRESS = 3
"""Loads without progress, each ended by a preemption, after which the engine computes the request's prompt.

Two requests that load at once can hold so many of the engine's blocks that neither gets another one to run. Each is
preempted, loads again and keeps the other from running, for ever (P11).
"""


@dataclass(eq=False)
class Planner:
    """Answers prepares of requests, and opens and stages their plans."""

    config: KvpactConfig
    ledger: PactLedger
    groups: EngineGroups
    finder: Finder
    jobs: TransferJobs
    load_budget: LoadBudget
    queue: Queue
    reads: Prefetcher = field(init=False)
    staging: Staging = field(init=False)
    memory: Memory = field(init=False)
    index: BlockIndex = field(init=False)
    tiers: TierSet = field(init=False)

    def __post_init__(self) -> None:
        self.reads = self.finder.reads
        self.memory = self.reads.memory
        self.index = self.reads.index
        self.tiers = self.reads.tiers
        self.staging = Staging(self.config, self.ledger, self.groups, self.finder, self.queue)

    # Prepare

    def still_waits(self, request_id: str, state: RequestState | None, computed_tokens: int) -> bool:
        """True if a request was told "ask again later" and nothing has changed; if so, its plan is renewed."""
        if state is None or (facts := state.waiting.facts) is None or facts.computed_tokens != computed_tokens:
            return False
        plan = self.ledger.find(request_id)
        now = self.tiers.clock()
        behind = False
        if plan is not facts.plan or now >= self._deadline(state):
            return False
        if state.waiting.reply is Reply.NO_ROOM:
            behind = self.queue.lacks > 0
            if not behind and (facts.room != self.index.available_slots or self.tiers.has_overdue):
                return False
        if not behind and (self.tiers.has_completions or facts.completions != self.tiers.completions):
            return False
        if plan is not None:
            self.ledger.renew(plan, now)
        self.queue.note(state.waiting)
        return True

    def may_wait(self, state: RequestState | None) -> bool:
        """True if the request's deadline runs."""
        return state is not None and state.waiting.until is not None and self.tiers.clock() < self._deadline(state)

    def begin_waiting(self, state: RequestState) -> None:
        """The request was told "ask again later" before it was asked for: its deadline runs."""
        state.waiting.note(WaitEvent.AHEAD, self.tiers.clock() + self.config.prepare_deadline)

    def prepare(self, request: EngineRequest, state: RequestState, computed_tokens: int) -> ExternalKVMatch | None:
        """See `ExternalCache`: a match, or None for "ask again later"."""
        waiting = state.waiting
        if waiting.reply in (Reply.LATER, Reply.NO_ROOM):
            waiting.note(WaitEvent.CHANGED)
        waiting.claim = None
        answer = self._prepare(request, state, computed_tokens)
        if isinstance(answer, Wait) or not answer.num_tokens:
            self.load_budget.release(request.request_id)
        if isinstance(answer, ExternalKVMatch):
            waiting.note(WaitEvent.ANSWERED)
            return answer
        plan = self.ledger.find(request.request_id)
        until = self.tiers.clock() + self.config.prepare_deadline
        facts = Facts(computed_tokens, self.tiers.completions, plan, self.index.available_slots)
        if answer.put_off:
            waiting.note(WaitEvent.PUT_OFF, until)
        else:
            waiting.note(WaitEvent.NO_ROOM if answer.no_room else WaitEvent.LATER, until, facts)
        self.queue.note(waiting)
        return None

    def decline(self, request: EngineRequest, state: RequestState, computed_tokens: int) -> None:
        """Called instead of `prepare` in a step without time for it: the request is a miss."""
        state.waiting.note(WaitEvent.DECLINED)
        self.load_budget.release(request.request_id)
        start = computed_tokens // self.groups.block_size
        loadable = self.loadable_blocks(request)
        if 0 < loadable <= start:
            self._spare(request.request_id, state, start)
        else:
            late = MissReason.DEADLINE if loadable > 0 else MissReason.TOO_SHORT
            reason = self._why_not(request, state, computed_tokens) or late
            self._miss(request.request_id, state, start, Miss(reason, ends=EndReason.DEADLINE))

    def _prepare(self, request: EngineRequest, state: RequestState, computed_tokens: int) -> ExternalKVMatch | Wait:
        name = request.request_id
        start = computed_tokens // self.groups.block_size
        loadable = self.loadable_blocks(request)
        if 0 < loadable <= start:
            return self._spare(name, state, start)
        refused = self._why_not(request, state, computed_tokens)
        if refused is not None:
            return self._miss(name, state, start, Miss(refused))
        plan = self.ledger.find(name)
        now = self.tiers.clock()
        if plan is not None and plan.state is PlanState.LOADING:
            return NO_MATCH  # preempted before the workers reported: they may still write its blocks
        if plan is not None and plan.postponed is not None and self.memory.lost_any(plan.slots):
            self.ledger.end(name, EndReason.SUPERSEDED)
            plan = None  # its slots are kept, but what was dropped since is not to be promised anew
        if plan is not None:
            self.ledger.renew(plan, now)
        usable = _usable_blocks(loadable, state)
        if plan is not None and (plan.blocks.start != start or plan.blocks.end > usable):
            plan = None
        if plan is not None and plan.state is PlanState.PLANNED:
            return self._match(plan)
        keys = self._keys_to(request, state, start, usable)
        if keys is None:
            return Wait(put_off=True)
        if plan is None and len(keys) - start < self.config.min_match_blocks:
            return self._miss(name, state, start, Miss(self._why_so_few(state, start, len(keys), loadable)))
        needs = Needs(self.groups, keys, start, state.loose_keys, owner=state.owner)
        return self._look_up(Probe(name, state, needs, start, plan, now))

    def _why_not(self, request: EngineRequest, state: RequestState, computed_tokens: int) -> MissReason | None:
        """Why nothing is looked up for a request, be it early, in a prepare or when its step begins; None if it is."""
        if state.keys is None:
            return MissReason.UNKNOWN_IDENTITY
        if not self.groups.shows_all:
            return MissReason.DISABLED
        if not request.may_load:
            return MissReason.MUST_COMPUTE
        if computed_tokens % self.groups.alignment:
            return MissReason.UNALIGNED
        if state.loads_without_progress >= MAX_LOADS_WITHOUT_PROGRESS:
            return MissReason.CROWDED
        return MissReason.OVERDUE if self.jobs.given_up else None

    def _look_up(self, probe: Probe) -> ExternalKVMatch | Wait:
        """Collect the facts once, decide, and carry that out."""
        state = probe.state
        plan = probe.plan
        record = probe.state.record
        completions = self.tiers.completions
        asked = state.tier_lookup
        deadline = self._deadline(state)
        if plan is not None or (asked is not None and not asked.done and probe.now < deadline):
            self.tiers.poll()
        needs = probe.needs if plan is None else probe.needs.up_to(plan.blocks.end)
        available = self.finder.find(state, needs, probe.now)
        if plan is None:
            record.found = available
            state.step_end = needs.lacks_state_at * self.groups.block_size
        if plan is None and self.tiers.shared and probe.now < deadline and self.finder.asks_shared:
            self.finder.ask(state, needs, available)
        if plan is not None:
            phase = Phase.READING
            end = plan.blocks.end
            has_news = self.tiers.completions > completions
        else:
            asked = state.tier_lookup
            phase = Phase.FREE if asked is None or asked.done else Phase.ASKING
            end = len(needs.keys)
            has_news = state.lookups.start < 0 and asked is not None
        lacking = silent = None
        if available.by_tier and available.stored > available.resident:
            missing = needs.missing(available.stored, self.memory.has)
            lacking = self.reads.lacking(missing, available.by_tier, state.tier_lookup)
        if available.by_tier and available.resident < len(probe.needs.keys):
            silent = self.reads.probe_silent(probe.needs.keys, state)
        if plan is not None:
            probe = probe._replace(needs=needs)
        limits = self._limits(probe, available, lacking, silent, has_news=has_news)
        decision = decide(available, Lookup(phase, probe.start, end, deadline), limits, probe.now)
        if isinstance(decision, Wait):
            if plan is None:
                self.ledger.end(probe.request_id, EndReason.SUPERSEDED)
            return decision
        if isinstance(decision, Stage):
            if lacking is not None and self.staging.begin(probe, lacking, available):
                return Wait()
            if lacking is not None and self.staging.waits_for_room(probe, lacking, available):
                return Wait(no_room=True)
            decision = decision.otherwise
            if isinstance(decision, Miss):
                decision = decision._replace(reason=self.staging.why_not(probe, available))
        is_faster = lacking is not None and decision.reason is MissReason.RECOMPUTE_FASTER
        if lacking is not None and is_faster and state.lookups.start != probe.start:
            self.tiers.metrics.add("declined_blocks", lacking.missing.blocks_after(probe.start))
            self.reads.note_declined(probe.needs.keys, lacking)
        if decision.tiers_done:
            self.staging.give_up(probe)
        if isinstance(decision, Miss):
            return self._miss(probe.request_id, state, probe.start, decision)
        end = decision.end
        holding = None
        if end > available.resident - available.beside:
            holding = self.finder.others.hold(probe.needs, end, probe.start + self.config.min_match_blocks)
            end = holding.end if holding is not None else available.resident - available.beside
            if end - probe.start < self.config.min_match_blocks:
                return self._miss(probe.request_id, state, probe.start, Miss(MissReason.NOT_STORED))
        return self._match(self._promise(probe, BlockRange(probe.start, end - probe.start), holding))

    # What is looked up

    def _keys_to(self, request: EngineRequest, state: RequestState, start: int, end: int) -> Sequence[BlockKey] | None:
        """The keys of the blocks from `start` to `end`, the usable ones, as far as some place may hold them.

        Those are not the last token's block (P6), and none that failed before (H09). Keys are made piece by piece, and
        no more once nobody holds the last one. None: the step has used its budget, and the next one makes more; each
        call makes some. A request whose deadline has passed gets those that there are.
        """
        if state.keys is None:
            return ()
        names = state.keys
        piece = max(1, KEY_PIECE_TOKENS // self.groups.block_size)
        made = False
        deadline = self._deadline(state)
        while (known := len(names.keys)) < end and not names.ended:
            if known > start and not self.finder.may_go_on(names.keys):
                break
            if known > start and self.tiers.clock() >= deadline > -inf:
                break
            if made and deadline > -inf and self.tiers.budget.exhausted:
                return None
            names.extend(request.token_ids, min(end, max(known, start) + piece))
            made = True
        return names.keys[:end]

    def loadable_blocks(self, request: EngineRequest) -> int:
        """Blocks before the request's last token that a match may have: whole ones of every group."""
        rows = (len(request.token_ids) - 1) // self.groups.block_size
        return rows - rows % self.groups.match_rows

    def _deadline(self, state: RequestState) -> float:
        """End of the time in which a request may wait for tiers."""
        waiting = state.waiting
        patience = self.config.prepare_deadline
        if patience <= 0 or waiting.until is None:
            return inf if patience > 0 else -inf
        return self.queue.deadline(waiting.until, waiting.ahead, self.finder.prefill, patience)

    def find_elsewhere(self, request: EngineRequest, state: RequestState, blocks: BlockRange) -> Sequence[BlockKey]:
        """Keys up to the end of `blocks` that workers may look for in shared tiers; none if fewer than a match."""
        computed_tokens = blocks.start * self.groups.block_size
        if not self.finder.looks_up_at_step or state.keys is None or self._why_not(request, state, computed_tokens):
            return ()
        end = min(blocks.end, _usable_blocks(self.loadable_blocks(request), state))
        keys: Sequence[BlockKey] = state.keys.extend(request.token_ids, end)[:end]
        keys = keys[: self.tiers.readable_elsewhere(keys)]
        return keys if len(keys) - blocks.start >= self.config.min_match_blocks else ()

    def ask_early(self, request: EngineRequest, state: RequestState) -> None:
        """Ask the shared tiers for a request that the engine has no room for yet, if that is worth it.

        A step that has used its budget leaves this, or what is left of it, to the first prepare.
        """
        if self.finder.asks_shared and not self.tiers.budget.exhausted and self._why_not(request, state, 0) is None:
            keys = self._keys_to(request, state, 0, _usable_blocks(self.loadable_blocks(request), state))
            if keys is not None:
                needs = Needs(self.groups, keys, 0, state.loose_keys)
                self.finder.ask(state, needs, self.finder.find(state, needs, self.tiers.clock()))

    def _limits(
        self,
        probe: Probe,
        available: Availability,
        lacking: Lacking | None,
        silent: MissReason | None,
        *,
        has_news: bool,
    ) -> Limits:
        """The limits of a prepare; `silent`: why a tier says nothing; `has_news`: tiers have answered something."""
        state = probe.state
        first = max(available.resident, probe.start)
        faster = False
        if lacking is not None and self.config.recompute_if_faster and available.stored > first:
            faster = self.finder.computes_faster(available.stored - first, lacking.seconds)
        enough = available.resident - probe.start >= self.config.min_match_blocks
        return Limits(
            self.config.min_match_blocks,
            has_news and state.waiting.reply is not Reply.PUT_OFF and self.tiers.budget.exhausted,
            faster,
            MissReason.NOT_STORED if enough else self._why_not_found(probe, available, silent),
        )

    # Why not

    def _why_so_few(self, state: RequestState, start: int, named: int, loadable: int) -> MissReason:
        """Why no more than `named` of a request's blocks may be promised, too few for a match from `start` on."""
        if loadable - start < self.config.min_match_blocks:
            return MissReason.TOO_SHORT
        if named == _usable_blocks(loadable, state):
            return MissReason.FAILED_BEFORE
        if state.keys is None or state.keys.ended:
            return MissReason.UNKNOWN_IDENTITY
        return MissReason.DEADLINE if self.tiers.clock() >= self._deadline(state) else self.finder.why_unknown()

    def _why_not_found(self, probe: Probe, available: Availability, silent: MissReason | None) -> MissReason:
        """Why memory has too few for a match: they are not stored only if every place was asked and has no more."""
        found = max(available.resident, available.stored)
        if probe.state.waiting.ahead is not None:
            return MissReason.NO_ROOM
        if found - probe.start >= self.config.min_match_blocks:
            return MissReason.DEADLINE
        if not self.tiers.clients:
            return self._why_absent(probe, found)
        if self.finder.looks_up_at_step:
            return MissReason.ASKED_AT_STEP
        lookup = probe.state.tier_lookup
        if lookup is not None and lookup.late:
            return MissReason.DEADLINE
        if silent is not None:
            return silent
        if self.finder.may_be_shared and lookup is None:
            return MissReason.DEADLINE
        return self._why_absent(probe, found)

    def _why_absent(self, probe: Probe, found: int) -> MissReason:
        if probe.needs.lacks_state_at:
            return MissReason.STATE_MISSING
        return MissReason.TOO_SHORT if found > probe.start else MissReason.NOT_STORED

    # What was decided

    def _promise(self, probe: Probe, blocks: BlockRange, holding: Holding | None) -> PactPlan:
        """Promise blocks that are held, under the plan that they were read for if that covers them."""
        plan = read = probe.plan
        runs: Sequence[Run] = holding.runs if holding is not None else probe.needs.runs(blocks.start + blocks.count)
        leases = holding.leases if holding is not None else self.memory.lease(runs)
        if plan is None or blocks.end > plan.blocks.end:
            plan = self.ledger.open_plan(
                probe.request_id,
                blocks,
                block_size=self.groups.block_size,
                slots=runs,
                now=probe.now,
                leases=leases,
                promised_tokens=blocks.count * self.groups.block_size,
            )
        else:
            plan.slots = runs
            tokens = blocks.count * self.groups.block_size
            self.ledger.ready(plan, promised_tokens=tokens, leases=leases, now=probe.now, blocks=blocks)
        if read is not None or holding is not None:
            plan.sources = sources_of(runs, self.groups, read, probe.state.staged, blocks.count)
        probe.state.lookups.note(blocks.start, True, None, self.tiers.metrics, probe.state.record)
        return plan

    def _match(self, plan: PactPlan) -> ExternalKVMatch:
        """Match of a plan as it is promised now. Its way depends on the loads for which the step waits already."""
        waits = self.load_budget.hold(plan.request_id, self.groups.count(plan.slots))
        return ExternalKVMatch(plan.promised_tokens, not waits, plan)

    def _spare(self, request_id: str, state: RequestState, start: int) -> ExternalKVMatch:
        """The engine has all that could be loaded."""
        self.ledger.end(request_id, EndReason.SUPERSEDED)
        state.lookups.note_spared(start, self.tiers.metrics)
        return NO_MATCH

    def _miss(self, request_id: str, state: RequestState, start: int, miss: Miss) -> ExternalKVMatch:
        self.ledger.end(request_id, miss.ends)
        state.lookups.note(start, False, miss.reason, self.tiers.metrics, state.record)
        return NO_MATCH


def _usable_blocks(loadable: int, state: RequestState) -> int:
    """Number of a request's loadable blocks that may be promised, if they all have keys."""
    return loadable if state.invalid_from is None else min(loadable, state.invalid_from)
