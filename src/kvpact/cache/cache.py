"""The cache on the scheduler's side: keeps the contract with a ledger, an index, an arena and the tiers below it.

Owns the order of calls among its parts. Decides and accounts; workers (`transfer.py`) and the tiers' own threads move
the bytes, and no method here waits for either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import cast

from kvpact.cache.announcements import Announcements
from kvpact.cache.budget import StepBudget
from kvpact.cache.finder import Finder
from kvpact.cache.idle_steps import IdleSteps
from kvpact.cache.jobs import PactLedger, PlanLease, TransferJobs
from kvpact.cache.load_budget import LoadBudget
from kvpact.cache.loads import Loads
from kvpact.cache.memory import EngineKV, Memory, index_of, number_of
from kvpact.cache.needs.answers import AnswerEnds
from kvpact.cache.needs.engine_groups import EngineGroups
from kvpact.cache.neighbour_blocks import NeighbourBlocks
from kvpact.cache.observer import Observer
from kvpact.cache.offload import Offloader
from kvpact.cache.plan import PlanState
from kvpact.cache.prefetch import Prefetcher
from kvpact.cache.prepare import Planner
from kvpact.cache.records import Records
from kvpact.cache.request import ALL_ROWS, Requests, RequestState
from kvpact.cache.retaining import Retaining
from kvpact.cache.saves import Saves
from kvpact.cache.step_lookup import StepLookups
from kvpact.cache.tier_set import TierSet
from kvpact.cache.waiting import Queue
from kvpact.cache.writeback import WriteBack
from kvpact.config import KvpactConfig
from kvpact.contract import (
    BlockHolder,
    EngineRequest,
    ExternalCache,
    ExternalKVMatch,
    ExternalMatchExit,
    LoadSettlement,
    StepWork,
    WorkerReport,
)
from kvpact.errors import PactViolation
from kvpact.hints.schema import Hints
from kvpact.identity.epochs import Epoch, Epochs
from kvpact.identity.groups import one_group
from kvpact.identity.tags import BlockTags
from kvpact.memory.arena import Arena, Standing
from kvpact.metrics import MEMORY, EndReason, Metrics, Snapshot
from kvpact.pool.neighbours import Neighbours
from kvpact.tiers.executor import TierExecutor
from kvpact.tiers.known_keys import LRUKeySet

logger = logging.getLogger(__name__)


class PactCache(ExternalCache):
    """One engine's cache. `clock` gives seconds that never go back."""

    def __init__(
        self,
        config: KvpactConfig,
        engine: EngineKV,
        *,
        arena: Arena,
        tiers: Sequence[TierExecutor] = (),
        clock: Callable[[], float],
        metrics: Metrics | None = None,
        budget: StepBudget | None = None,
    ) -> None:
        """Without a `budget` no step is late. With several groups the engine must offer a whole `SchedulerContext`."""
        namespace, groups, classes, copies_per_block, events, neighbours, reader, tenants = engine
        self.neighbours = neighbours or Neighbours()
        self.metrics = metrics = metrics or Metrics()
        metrics.set("tier_up", 1, MEMORY)
        self.budget = budget = budget or StepBudget(inf)
        self.index = index = index_of(arena, engine)
        self._columns = index.columns
        self._config = config
        self._block_size = groups.block_size
        self._answers = AnswerEnds(groups) if groups.ends_at_states else None
        self._arena = arena
        self._clock = clock
        self._idle_steps = IdleSteps(clock)
        self._computing = 0
        """Tokens that the engine computes in the running step."""
        self._loading = 0
        """Blocks that the running step's commits load into."""
        epochs = self._epochs = Epochs(config.weights_version)
        tags = BlockTags()
        records = Records(clock)
        requests = self.requests = Requests(namespace, groups, epochs, tags, records, self._renamed, tenants)
        lifetime = config.plan_lifetime
        anew = requests.may_wait_anew
        ledger = self.ledger = PactLedger(
            cast("Callable[[PlanLease], None]", index.unpin), lifetime, kept_waiting=anew, note_ended=records.note_ended
        )
        load_budget = self._load_budget = LoadBudget(config.sync_load_budget, arena.rank_slot_bytes, copies_per_block)
        jobs = self._jobs = TransferJobs(arena.num_ranks, config.load_deadline / 3, number_of(index))
        timeout = config.prepare_deadline or config.load_deadline
        below = self.tiers = TierSet(arena, metrics, clock, budget, timeout, config.share_drawn_epochs)
        memory = Memory(index, ledger)
        engine_groups = EngineGroups(groups, classes, arena.class_bytes)
        queue = self._queue = Queue(lambda: index.usable_slots, groups.block_size)
        seen_once = LRUKeySet(below.most_known) if config.admit == "second-use" else None
        others = self.others = NeighbourBlocks.of(self.neighbours, reader, memory, below)
        self._is_proven = arena.standing is Standing.PROVEN
        is_plain = groups == one_group(groups.block_size)
        is_biased = is_plain and (config.hints != "off" or tenants is not None)
        self.announcements = Announcements(events, requests, index) if events is not None else None
        writes = self.writeback = WriteBack(below, memory, epochs, seen_once, self.announcements)
        reads = self._prefetcher = Prefetcher(below, memory, writes)
        finder = self._finder = Finder(config, engine_groups, reads, epochs, others)
        kept = self.retaining = Retaining(finder, requests, queue, clock, tenants) if is_biased else None
        self._observer = Observer(ledger, index, below, epochs, kept)
        saves = self._saves = Saves(memory, engine_groups, jobs, tags, writes, queue, self.announcements, kept)
        self.saves = Offloader(config, saves)
        self._steps = StepLookups(requests, ledger, below, arena.num_ranks)
        self._planner = Planner(config, ledger, engine_groups, finder, jobs, load_budget, queue)
        self._loads = Loads(requests, ledger, saves, load_budget, config.load_deadline, others)
        self._open(tiers)

    def _open(self, tiers: Sequence[TierExecutor]) -> None:
        self.tiers.open(tiers)
        if self.announcements is not None:
            self.announcements.open(self.tiers)
        self.ledger.totals.enter_tiers(client.name for client in self.tiers.clients)

    def open_tiers(self, tiers: Sequence[TierExecutor]) -> None:
        """Use tiers that were opened late. The blocks in memory are written to them piece by piece."""
        self._open(tiers)
        self._begin_backlog()

    def use_awaited_tiers(self) -> None:
        """Use those that are there since the last call, and none that is lost."""
        if self.tiers.use_what_is_there():
            self._begin_backlog()

    def _begin_backlog(self) -> None:
        # later than in the first epoch, other epochs' blocks are there too, not told apart
        if self._is_proven and self.tiers.written and self._epochs.generation == 1:
            self.writeback.begin_backlog()

    @property
    def under_way(self) -> Mapping[str, int]:
        """Operations that have not ended, by kind; all are 0 once the engine rests and all reports are in."""
        return {
            "loads": len(self._jobs.loads),
            "saves": len(self._jobs) - len(self._jobs.loads),
            "tier operations": self.tiers.pending,
        }

    @property
    def live_requests(self) -> int:
        """Number of requests that the cache knows."""
        return len(self.requests.live)

    supports_kv_cache_groups = True

    # Prepare

    @property
    def asks_shared(self) -> bool:
        """True if `prepare_external_match` asks shared tiers."""
        return self._finder.asks_shared

    def bind_scheduler_context(self, context: BlockHolder) -> None:
        """Hold blocks through `context` while ranks copy them; its free queue says when to save lazily."""
        self._jobs.bind(context)
        self.saves.bind(context)

    def on_new_request(self, request: EngineRequest) -> None:
        """See `ExternalCache`: asks the shared tiers before the engine has room for the request.

        A step that has used its budget leaves that to the first probe; the request's identity is read now in any case.
        """
        if self.retaining is not None:
            self.retaining.chains.end_expired(self._clock())
        self._planner.ask_early(request, self.requests.of(request))

    def note_hints(self, request: EngineRequest, hints: Hints) -> None:
        """See `SupportsHints`: the record of the request has the outcomes from now on."""
        state = self.requests.of(request)
        if self.retaining is not None:
            self.retaining.note_hints(state, hints)
        else:
            hints.refuse_all("not for models with several KV cache groups", but="store")
        state.note_hints(hints, self._block_size)

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        """See `ExternalCache`. Reads memory only; what a lower tier holds is fetched during "ask again later"."""
        state = self.requests.probed(request, num_computed_tokens)
        if state.waiting.facts and self._planner.still_waits(request.request_id, state, num_computed_tokens):
            return None
        if self._saves.lazy is not None:
            self._saves.lazy.note_probe(request.request_id, state)
        match = self._planner.prepare(request, state, num_computed_tokens)
        if self.announcements is not None and match is not None:
            self.announcements.asked(request)
        return match

    def decline_external_match(self, request: EngineRequest, num_computed_tokens: int) -> None:
        """See `ExternalCache`: the request is a miss."""
        state = self.requests.probed(request, num_computed_tokens)
        if self._saves.lazy is not None:
            self._saves.lazy.note_probe(request.request_id, state)
        self._planner.decline(request, state, num_computed_tokens)
        if self.announcements is not None:
            self.announcements.asked(request)

    def put_off_external_match(self, request: EngineRequest) -> None:
        """See `ExternalCache`: from now on tiers have `prepare_deadline` for the request."""
        self._planner.begin_waiting(self.requests.of(request))

    def still_waits(self, request_id: str, num_computed_tokens: int) -> bool:
        """See `ExternalCache`; if so, the request's plan is renewed."""
        return self._planner.still_waits(request_id, self.requests.live.get(request_id), num_computed_tokens)

    def may_wait(self, request_id: str) -> bool:
        """True while the request's deadline for tiers has not passed."""
        return self._planner.may_wait(self.requests.live.get(request_id))

    def step_end(self, request_id: str) -> int:
        """Wanted end of a step, in tokens of the prompt, to leave a state that was lacking there; 0: nowhere."""
        state = self.requests.live.get(request_id)
        return state.step_end if state is not None else 0

    # Commit and abort

    def commit_external_match(
        self, request: EngineRequest, match: ExternalKVMatch, num_tokens: int, block_ids: Sequence[int]
    ) -> int:
        """See `ExternalCache`; accepts `num_tokens`, or none of them where side groups have no match of that length."""
        loading = self._loads.begin(request.request_id, match, num_tokens, block_ids)
        self._loading += loading
        return num_tokens if loading else 0

    def abort_external_match(self, request_id: str, match: ExternalKVMatch | None, reason: str) -> None:
        """See `ExternalCache`. The plan ends with `reason`, or with "error" if that is a word of the engine's own."""
        plan = self.ledger.find(request_id)
        if plan is not None and (match is None or match.query_result is plan):
            self._load_budget.release(request_id)
            is_known = reason in EndReason.__members__.values()
            self.ledger.end(request_id, EndReason(reason) if is_known else EndReason.ERROR)

    def postpone_external_match(self, request_id: str, reason: ExternalMatchExit) -> None:
        """See `ExternalCache`: `Ledger.postpone` says how long the promise holds."""
        plan = self.ledger.find(request_id)
        if plan is not None and plan.state is not PlanState.LOADING:
            self._load_budget.release(request_id)
            self.ledger.postpone(plan, EndReason(reason))

    # Saves

    def note_computed(
        self, request: EngineRequest, num_computed_tokens: int, block_ids: Callable[[], Sequence[int]]
    ) -> None:
        """See `ExternalCache`: orders copies of full blocks that are not stored yet, while there is room."""
        has_plan = self.ledger.has_plan(request.request_id)
        if has_plan and (loaded := self.ledger.find_settled(request.request_id)) is not None:
            self._loads.note_resumed(loaded)
            has_plan = self.ledger.has_plan(request.request_id)
        self._load_budget.note_running((request.request_id,))
        state = self.requests.of(request)
        if not state.max_computed:
            self.requests.records.note_begun(state.record)
            if self._answers is not None and state.step_end and state.keys is not None:
                lost = self._answers.lost_tokens(state.keys.keys, state.step_end, state.computed)
                self.metrics.add("lost_answer_tokens", lost)
        self._computing += max(0, num_computed_tokens - state.computed)
        self.saves.note(request, state, num_computed_tokens, block_ids, has_plan)

    def note_running(
        self, request_ids: Sequence[str], computed: Sequence[int], step_tokens: Mapping[str, int]
    ) -> Sequence[str]:
        """See `ExternalCache`: a request within a block, as it was at its last note, costs nothing else."""
        self._load_budget.note_running(request_ids)
        others, tokens = self.requests.note_running(request_ids, computed, step_tokens)
        self._computing += tokens
        return others

    def look_up_at_step(self, request: EngineRequest, computed_tokens: int, max_tokens: int) -> None:
        """See `SupportsStepLookup`: looks in the shared tiers, but not for blocks that another request is saving."""
        save = self._jobs.save_ordered_now(request.request_id)
        if save is not None and save.job.start_block == computed_tokens // self._block_size:
            keys = self._planner.find_elsewhere(request, self.requests.of(request), save.job.blocks)
            if keys:
                self._steps.order(save.job, computed_tokens, max_tokens, keys)

    # Step and reports

    def end_step(self) -> StepWork:
        """See `ExternalCache`: takes in what tiers have done, expires plans, and returns the step's copies."""
        now = self._clock()
        was_proven = self._is_proven
        self._is_proven = self._arena.standing is Standing.PROVEN
        if self._is_proven and not was_proven:
            self._begin_backlog()
        if self.tiers.written or self.tiers.under_way:
            self.budget.do_in_turn(self.tiers.poll, self.writeback.offer_some)
            self.writeback.offer_backlog()
            self.tiers.end_step()
        if self.index.usable_slots < (usable := self._arena.usable_slots):
            self.index.use_slots(usable)
        self._finder.prefill.note_step(max(0, self._computing), now)
        if self.retaining is not None:
            self.retaining.end_step(now)
        self.saves.put_off.order(now)
        if self._saves.lazy is not None:
            self.saves.order_what_is_leaving(self._loading, max(0, self._computing), now)
        limits = self._load_budget.end_step(now, self._computing, copies=bool(self._jobs.loads or self._jobs.saves))
        self._computing = self._loading = 0
        self.ledger.expire(now)
        self._queue.end_step()
        if self.others.lends or (self._columns is not None and self._columns.claims is not None):
            self._columns = None  # a reset replaces it from now on
            self.others.end_step()
        work = self._jobs.end_step(now, self._steps.end_step(), limits)
        return replace(work, extra=self.others.for_ranks()) if self.others.has_news else work

    def abandon_step(self, num_ranks: int) -> None:
        """See `ExternalCache`. The step's orders count as failed on every rank."""
        self._steps.abandon_step()
        self._load_budget.end_step(self._clock())
        self._queue.end_step()
        self.others.has_news |= bool(self.others.engines)
        self.apply_report(self._jobs.abandon_step())

    def apply_report(self, report: WorkerReport) -> list[LoadSettlement]:
        """See `ExternalCache`. Includes matches that workers found at the step's beginning."""
        spared = self._steps.apply_report(report, self._clock())
        self._computing -= sum(settled.skipped_tokens for settled in spared) if spared else 0
        # Loads first: what a request saved after a failed load is not trusted.
        loads, saves = self._jobs.apply_report(report)
        settlements: list[LoadSettlement] = []
        for load in loads:
            settled = self._loads.end(load)
            if settled is not None:
                settlements.append(settled)
        settlements.extend(map(self._loads.end_late, self._jobs.give_up(self._clock())))
        for save in saves:
            self.requests.records.note_saved(save.job.request_id, self._saves.settle(save))
        if self.tiers.written and not self.budget.is_late:
            self.writeback.offer_some()
        if saves:
            self._steps.end_saves(self._jobs.saves.__contains__)
        return settlements + spared

    # Requests

    def _renamed(self, request_id: str, state: RequestState, block: int) -> None:
        """A request's blocks from `block` on have other keys: end their plan and lookup."""
        plan = self.ledger.find(request_id)
        if plan is not None and plan.blocks.end > block:
            self.ledger.end(request_id, EndReason.SUPERSEDED)
        self._jobs.cut_put_off(request_id, block)
        state.drop_lookup()

    def request_finished(self, request_id: str) -> None:
        """See `ExternalCache`. Copies under way keep their blocks until all ranks have reported."""
        self.ledger.finish_request(request_id)
        self._load_budget.request_finished(request_id)
        self.saves.request_finished(request_id)
        if self.announcements is not None:
            may_store = self.pending > 0 or self._saves.lazy is not None
            self.announcements.ended(request_id, may_store=may_store)
        state = self.requests.live.pop(request_id, None)
        if state is not None:
            state.drop_lookup()
            if self.retaining is not None:
                self.retaining.request_finished(state)
            if self._answers is not None and state.keys is not None and state.stored_end == ALL_ROWS:
                self._answers.note(state.keys.keys, state.record.prompt_tokens, state.computed)

    # Whole cache

    @property
    def has_pending_work(self) -> bool:
        """True if copies or writes are under way: the engine must step to take in the reports.

        Not for ever: a tier may hang, and a hook or a worker may fail in every step. The next request's steps then take
        in the rest.
        """
        return self._idle_steps.wait_for(self.pending, self._jobs.ordered)

    @property
    def pending(self) -> int:
        """Copies and writes that are under way, or wait."""
        return len(self._jobs) + self.writeback.waiting + self.tiers.pending + self.saves.dirty

    @property
    def epoch(self) -> Epoch:
        """The epoch of the blocks that are stored and served now."""
        return self._epochs.current

    def reset(self) -> None:
        """See `ExternalCache`. Blocks of other epochs stay until their slots are needed: no request can ask for them,
        so they become the least recently used ones."""
        self._epochs.reset()
        self.metrics.add("resets")
        self._begin_epoch()

    def set_weights_version(self, version: str) -> None:
        """See `ExternalCache`. Blocks of that version can be found again."""
        self._epochs.name(version)
        self._begin_epoch()

    def take_back_reset(self) -> bool:
        """See `ExternalCache`: not after a version was set. What was computed or stored since the reset is not used."""
        if taken_back := self._epochs.take_back_reset():
            self._begin_epoch()
        return taken_back

    def _begin_epoch(self) -> None:
        """The weights may have changed: everything under way belongs to the old ones."""
        self.ledger.end_all(EndReason.CACHE_RESET)
        self._jobs.recall()
        if self.retaining is not None:
            self.retaining.forget()
        self.saves.clear()
        self.writeback.clear()
        self.neighbours.reset()
        if self.announcements is not None:
            self.announcements.withdraw()

    def give_up_saves(self) -> None:
        """See `ExternalCache`. Slots stay taken until every rank has reported."""
        self._arena.judge_from(self._jobs.ordered + 1)
        self.saves.give_up()

    @property
    def has_overdue_loads(self) -> bool:
        """True if a load's deadline has passed and ranks may still write to its blocks."""
        return bool(self._jobs.given_up)

    def distrust_blocks(self, block_ids: Collection[int], tables: Mapping[str, Sequence[int]]) -> None:
        """See `ExternalCache`. The engine computes them anew where they are, while they are saved."""
        self._arena.judge_from(self._jobs.ordered + 1)
        self._steps.distrust_blocks(frozenset(block_ids))
        self._loads.distrust_blocks(block_ids, tables)

    def distrust_adapter(self, adapter: str) -> None:
        """See `ExternalCache`. No block computed under it is saved any more."""
        if self.announcements is not None:
            self.announcements.withdraw()
        self._loads.distrust_adapter(adapter)

    def observe(self) -> Snapshot:
        """All counts as they are now, with the ledger's and the tiers'."""
        return self._observer.observe(self._finder.prefill.tokens_per_second)

    def check(self) -> None:
        """Verify the invariants of all parts; raises PactViolation."""
        parts = (self.ledger, self.index, self._jobs, self._load_budget, self._prefetcher, self.saves)
        for part in (*parts, self.metrics):
            part.check()
        for state in self.requests.live.values():
            state.waiting.check()
        lazy = self._saves.lazy.known_requests if self._saves.lazy is not None else ()
        known = self.ledger.known_requests.union(lazy, self._jobs.unnamed)
        loading = {load.job.request_id for load in self._jobs.loads.values()}
        if gone := known - loading - self.requests.live.keys():
            raise PactViolation(f"something is kept of requests that have finished: {sorted(gone)}")

    def shutdown(self) -> None:
        """End all plans, flush the tiers for at most `shutdown_timeout` seconds, and close the arena."""
        self.ledger.end_all(EndReason.SHUTDOWN)
        if self.announcements is not None:
            self.announcements.withdraw()  # another cache may follow, over other memory
        self.writeback.close()
        if not self.tiers.close(self._config.shutdown_timeout):
            logger.warning("kvpact: some writes did not finish in time")
        self._arena.close()
