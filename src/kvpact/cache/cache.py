"""The cache, scheduler side: the contract kept with a ledger, an index, an arena and the tiers below it.

Owns what is known of each live request and the copies that workers were told to make. Decides and accounts; bytes are
moved by workers (`transfer.py`) and by the tiers' own threads, and no method here waits for either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from kvpact.cache.computed import ComputedBlocks
from kvpact.cache.finder import Finder
from kvpact.cache.idle_steps import IdleSteps
from kvpact.cache.invalidation import Invalidation
from kvpact.cache.jobs import Slots, TransferJobs
from kvpact.cache.lazy_offload import MIN_WINDOW
from kvpact.cache.ledger import Ledger, State
from kvpact.cache.offload import Offloader
from kvpact.cache.overdue import OverdueLoads
from kvpact.cache.plan import Planner
from kvpact.cache.prefetch import Prefetcher
from kvpact.cache.request import Requests, RequestState
from kvpact.cache.settle import Settlements
from kvpact.cache.step_lookup import StepLookups
from kvpact.cache.tier_set import TierSet
from kvpact.cache.writeback import WriteBack
from kvpact.config import KvpactConfig
from kvpact.contract import (
    BlockHolder,
    EngineRequest,
    ExternalCache,
    ExternalKVMatch,
    LoadSettlement,
    StepWork,
    WorkerReport,
    num_blocks_for,
)
from kvpact.identity.epochs import Epoch, Epochs
from kvpact.identity.tags import BlockTags
from kvpact.index.block_index import BlockIndex, Pin
from kvpact.memory.arena import Arena
from kvpact.metrics import EndReason, Metrics, Snapshot, TierName
from kvpact.ranges import BlockRange
from kvpact.tiers.costs import PrefillRate
from kvpact.tiers.executor import TierExecutor

logger = logging.getLogger(__name__)


class PactCache(ExternalCache):
    """One engine's cache. `namespace` is 32 bytes, `block_size` in tokens, `clock` gives seconds that never go back."""

    def __init__(
        self,
        config: KvpactConfig,
        *,
        namespace: bytes,
        block_size: int,
        arena: Arena,
        tiers: Sequence[TierExecutor] = (),
        clock: Callable[[], float],
        metrics: Metrics | None = None,
        lazy_window: int = MIN_WINDOW,
        is_late: Callable[[], bool] = lambda: False,
    ) -> None:
        """With `"save": "lazy"`, `lazy_window` blocks next to be evicted are always looked after."""
        self.metrics = metrics or Metrics()
        self.index = BlockIndex(arena.num_slots)
        self.ledger: Ledger[Pin, Slots] = Ledger(self.index.unpin, plan_lifetime_seconds=config.plan_lifetime)
        self.is_late = is_late
        """Whether the running step has cost enough, so that what can wait is left to the next one."""
        self._config = config
        self._block_size = block_size
        self._arena = arena
        self._clock = clock
        self._lazy_window = lazy_window
        self._epochs = Epochs(config.weights_version)
        self._tags = BlockTags()
        self._prefill = PrefillRate(2 * block_size)
        self._idle_steps = IdleSteps(clock)
        self._computing = 0
        self._loading = 0
        """Blocks that matches were committed into in this step."""
        self._writes_first = False
        """Of what can wait, a late step does one thing: it takes in what tiers have done, or offers them a chain."""
        self._requests = Requests(namespace, block_size, self._epochs, self._tags, self._renamed)
        ask_at = config.load_deadline / 3  # time to ask twice before the deadline
        self._jobs = TransferJobs(len(arena.segments), ask_at)
        self._overdue = OverdueLoads(self._jobs, self.metrics)
        self._wire(tiers)

    def _wire(self, tiers: Sequence[TierExecutor]) -> None:
        """Make the parts that need others."""
        config, index, metrics, clock, size = self._config, self.index, self.metrics, self._clock, self._block_size
        arena, ledger, epochs, tags, jobs = self._arena, self.ledger, self._epochs, self._tags, self._jobs
        requests, overdue, ranks = self._requests, self._overdue, len(arena.segments)
        timeout, second_use = config.prepare_deadline or config.load_deadline, config.admit == "second-use"
        shares = config.share_drawn_epochs
        below = self.tiers = TierSet(arena, metrics, clock=clock, timeout=timeout, share_drawn_epochs=shares)
        reads = self._prefetcher = Prefetcher(below, index, arena, metrics, clock)
        writes = self.writeback = WriteBack(
            below, index, arena, metrics, epochs, clock=clock, is_late=self._is_late_now, second_use=second_use
        )
        saves = self.saves = Offloader(index, jobs, metrics)
        self._steps = StepLookups(ledger, below, metrics, block_size=size, ranks=ranks)
        finder = Finder(config, index, below, reads, epochs, self._prefill, size, clock, self._is_late_now)
        self._finder = finder
        self._planner = Planner(
            config, ledger, index, below, reads, finder, metrics, overdue, size, arena.slot_bytes, clock
        )
        self._computed = ComputedBlocks(config, index, tags, saves, writes, size, clock)
        self._invalidation = Invalidation(requests, index, below, jobs, saves, tags, epochs, size)
        self._settlements = Settlements(requests, ledger, jobs, overdue, self._invalidation, tags, size)
        below.open(tiers)

    def _is_late_now(self) -> bool:
        return self.is_late()

    def open_tiers(self, tiers: Sequence[TierExecutor]) -> None:
        """The tiers, if they were not there from the beginning. What memory holds is written to them bit by bit."""
        self.tiers.open(tiers)
        if self._epochs.generation == 1:  # later, memory has blocks of other epochs as well, and does not say which
            self.writeback.begin_backlog()

    @property
    def under_way(self) -> Mapping[str, int]:
        """What has not ended, by kind; nothing once the engine rests and all reports are in."""
        return {
            "loads": len(self._jobs.loads),
            "saves": len(self._jobs.saves),
            "tier operations": self.tiers.pending,
        }

    @property
    def live_requests(self) -> int:
        """Requests of which anything is known."""
        return len(self._requests)

    # Prepare

    @property
    def asks_shared(self) -> bool:
        """Whether `prepare_external_match` asks tiers that only they themselves can answer for."""
        return self._finder.asks_shared

    def bind_scheduler_context(self, context: BlockHolder) -> None:
        """Blocks are held through `context` while ranks copy them; its free queue says when to save lazily."""
        self._overdue.bind(context)
        self.saves.bind(context, lazy_window=self._lazy_window if self._config.save == "lazy" else None)

    def on_new_request(self, request: EngineRequest) -> None:
        """See `ExternalCache`: the shared tiers are asked before the engine has room for the request.

        A step that has cost enough leaves that to the first probe; what the request is, is asked now in any case.
        """
        self._finder.ask_early(request, self._requests.of(request))

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        """See `ExternalCache`. Touches memory only; what a lower tier holds is fetched behind "ask again later"."""
        record = self._requests.of(request)
        if self._planner.still_waits(request.request_id, record, num_computed_tokens):
            return None
        self._begin_probe(request.request_id, record, num_computed_tokens)
        return self._planner.prepare(request, record, num_computed_tokens)

    def decline_external_match(self, request: EngineRequest, num_computed_tokens: int) -> None:
        """See `ExternalCache`: the request is a miss."""
        record = self._requests.of(request)
        self._begin_probe(request.request_id, record, num_computed_tokens)
        self._planner.decline(request, record, num_computed_tokens)

    def still_waits(self, request_id: str, num_computed_tokens: int) -> bool:
        """See `ExternalCache`; its plan is renewed then."""
        return self._planner.still_waits(request_id, self._requests.get(request_id), num_computed_tokens)

    def _begin_probe(self, request_id: str, record: RequestState, num_computed_tokens: int) -> None:
        record.computed = num_computed_tokens
        record.sound = 0
        if self.saves.lazy is not None and record.offloaded_blocks:  # it was preempted: it gets other blocks
            record.offloaded_blocks = 0
            self.saves.lazy.rewind(request_id)

    # Commit and abort

    def commit_external_match(
        self, request: EngineRequest, match: ExternalKVMatch, num_tokens: int, block_ids: Sequence[int]
    ) -> int:
        """See `ExternalCache`; always accepts `num_tokens`."""
        plan = self._planner.take(request.request_id, match, num_tokens, len(block_ids))
        if plan is None:
            return 0
        now, blocks = self._clock(), BlockRange(plan.blocks.start, num_blocks_for(num_tokens, self._block_size))
        record = self._requests.get(request.request_id)
        assert record is not None
        keys = record.keys.keys if record.keys is not None else []
        record.waits_until = None
        record.computed += num_tokens
        self._loading += blocks.count
        record.loads_without_progress += 1
        self.writeback.note_used(keys[: blocks.end])
        self._tags.fill(block_ids[blocks.start : blocks.end], record.tag)
        record.tail_tag = record.tag
        keep = self._planner.leases_on(plan, blocks, keys)
        self.ledger.commit(plan, num_tokens, now=now, keep=keep, deadline=now + self._config.load_deadline)
        self._overdue.begin(self._jobs.order_load(plan, blocks, keys, block_ids, now))
        return num_tokens

    def abort_external_match(self, request_id: str, match: ExternalKVMatch | None, reason: str) -> None:
        """See `ExternalCache`. `reason` is one of `EndReason`, anything else counts as an error."""
        plan = self.ledger.find(request_id)
        if plan is None or plan.state is State.LOADING or (match is not None and match.query_result is not plan):
            return
        known = reason in EndReason.__members__.values()
        self.ledger.abort(plan, EndReason(reason) if known else EndReason.ERROR)

    # Saves

    def note_computed(
        self, request: EngineRequest, num_computed_tokens: int, block_ids: Callable[[], Sequence[int]]
    ) -> None:
        """See `ExternalCache`: orders copies of full blocks that are not stored yet, as far as there is room."""
        self._settlements.note_resumed(request.request_id)
        record = self._requests.of(request)
        self._computing += max(0, num_computed_tokens - record.computed)
        self._computed.note(request, record, num_computed_tokens, block_ids)

    def look_up_at_step(self, request: EngineRequest, computed_tokens: int, max_tokens: int) -> None:
        """See `SupportsStepLookup`: in the shared tiers, and not for blocks that another request is saving already."""
        save = self._jobs.save_ordered_now(request.request_id)
        start = computed_tokens // self._block_size
        if not self._finder.looks_up_at_step or not request.may_load or save is None or save.job.start_block != start:
            return
        keys = self._finder.usable_keys(request, self._requests.of(request))[: save.job.blocks.end]
        keys = keys[: self.tiers.readable_elsewhere(keys)]
        if len(keys) - start >= self._config.min_match_blocks:
            self._steps.order(save.job, computed_tokens, max_tokens, keys)

    # Step and reports

    def end_step(self) -> StepWork:
        """See `ExternalCache`: takes in what the tiers did, lets plans expire, and hands out the step's copies."""
        now = self._clock()
        self._writes_first = not self._writes_first
        if not (self._writes_first and self.is_late()):
            self.tiers.poll()
        if self._writes_first or not self.is_late():
            self.writeback.offer_some()
        self.writeback.offer_backlog()
        self.tiers.end_step()
        self._prefill.note_step(max(0, self._computing), now)
        taken = self._loading + num_blocks_for(max(0, self._computing), self._block_size)
        self.saves.order_what_is_leaving(taken, now)
        self._computing = self._loading = 0
        self.ledger.expire(now)
        self._overdue.end_step(now)
        return self._jobs.end_step(now, self._steps.end_step())

    def abandon_step(self, num_ranks: int) -> None:
        """See `ExternalCache`."""
        self._steps.abandon_step()
        self.apply_report(self._jobs.abandon_step())

    def apply_report(self, report: WorkerReport) -> list[LoadSettlement]:
        """See `ExternalCache`."""
        self._steps.note_reads(report.reads)
        spared = self._steps.apply_report(report, self._clock(), self._requests.__contains__)
        self._computing -= sum(settled.skipped_tokens for settled in spared)
        # Loads first: what a request saved from a failed load on is not to be trusted.
        settlements = [settled for load in self._jobs.take_loads(report) if (settled := self._settlements.end(load))]
        self._overdue.give_up(self._clock())
        settlements += [self._settlements.end_late(load) for load in self._overdue.take_late()]
        for save in self._jobs.take_saves():
            self.writeback.note_saved(save.keys[: self.saves.settle(save)])
        if not self.is_late():
            self.writeback.offer_some()
        self._steps.end_saves(self._jobs.saves.__contains__)
        return settlements + spared

    # Requests

    def _renamed(self, request_id: str, record: RequestState, block: int) -> None:
        """A request's blocks from `block` on have other keys: what was looked for or planned for them is over."""
        plan = self.ledger.find(request_id)
        if plan is not None and plan.blocks.end > block:
            self._planner.end_plan(request_id, EndReason.SUPERSEDED)
        if record.tier_lookup is not None:
            self._prefetcher.give_up(record.tier_lookup, late=False)
            record.tier_lookup = None

    def request_finished(self, request_id: str) -> None:
        """See `ExternalCache`. Copies under way keep what they need until all ranks have reported."""
        self.ledger.finish_request(request_id)
        if self.saves.lazy is not None:
            self.saves.lazy.request_finished(request_id)
        record = self._requests.end(request_id)
        if record is not None and record.tier_lookup is not None:
            self._prefetcher.give_up(record.tier_lookup, late=False)

    # Whole cache

    @property
    def has_pending_work(self) -> bool:
        """Whether copies or writes are under way: the engine must step to take in the reports.

        Not for ever: a tier may hang, and a hook or a worker may fail in every step. What is left then is taken in with
        the next request's steps.
        """
        dirty = self.saves.lazy is not None and self.saves.lazy.dirty
        return self._idle_steps.wait_for(
            len(self._jobs) + self.writeback.waiting + self.tiers.pending + dirty, self._jobs.ordered
        )

    @property
    def epoch(self) -> Epoch:
        """Of which weights the blocks are that are stored and served now."""
        return self._epochs.current

    def reset(self) -> None:
        """See `ExternalCache`.

        Blocks of other epochs stay where they lie until their room is needed: nobody can ask for them, so they are the
        least recently used ones from now on.
        """
        self._epochs.reset()
        self.metrics.add("resets")
        self._begin_epoch()

    def set_weights_version(self, version: str) -> None:
        """See `ExternalCache`."""
        self._epochs.name(version)
        self._begin_epoch()

    def take_back_reset(self) -> bool:
        """See `ExternalCache`: not once a word was said. What was computed or stored since is not used any more."""
        taken_back = self._epochs.take_back_reset()
        if taken_back:
            self._begin_epoch()
        return taken_back

    def _begin_epoch(self) -> None:
        """The weights may be others than those before: whatever is under way belongs to the old ones."""
        self._planner.end_all(EndReason.CACHE_RESET)
        self._jobs.recall()
        if self.saves.lazy is not None:
            self.saves.lazy.clear()
        self.writeback.clear()

    @property
    def has_overdue_loads(self) -> bool:
        """Whether a load's deadline has passed and ranks may still write to its blocks."""
        return self._overdue.is_stuck

    def distrust_blocks(self, block_ids: Collection[int], tables: Mapping[str, Sequence[int]]) -> None:
        """See `ExternalCache`."""
        self._invalidation.distrust_blocks(block_ids, tables)

    def distrust_adapter(self, adapter: str) -> None:
        """See `ExternalCache`."""
        self._invalidation.distrust_adapter(adapter)

    def observe(self) -> Snapshot:
        """All counts as they are now, the ledger's and the tiers' included."""
        for name, total, label in self.ledger.totals.counts():
            self.metrics.raise_to(name, total, label)
        self.metrics.set("unnamed_weights", int(self.epoch.is_drawn))
        self.metrics.set("open_plans", len(self.ledger.open_plans()))
        self.metrics.set("leases_held", self.ledger.leases_held)
        self.metrics.set("prefill_speed", self._prefill.tokens_per_second)
        self.metrics.set("held_blocks", self.index.held_count, TierName.MEMORY)
        self.metrics.set("capacity_blocks", self.index.num_slots, TierName.MEMORY)
        self.tiers.observe()
        return self.metrics.snapshot()

    def check(self) -> None:
        """Verify the invariants of everything below; raises PactViolation."""
        self.ledger.check()
        self.index.check()
        if self.saves.lazy is not None:
            self.saves.lazy.check()
        self.metrics.check()

    def shutdown(self) -> None:
        """End all plans, flush the tiers for at most `shutdown_timeout` seconds, and close the arena."""
        self._planner.end_all(EndReason.SHUTDOWN)
        self.writeback.close()
        if not self.tiers.close(self._config.shutdown_timeout):
            logger.warning(
                "kvpact: some writes did not finish within %.0f s at shutdown", self._config.shutdown_timeout
            )
        self._arena.close()
