"""The cache, scheduler side: the contract kept with a ledger, an index, an arena and the tiers below it.

Owns what is known of each live request and the copies that workers were told to make. Decides and accounts; bytes are
moved by workers (`transfer.py`) and by the tiers' own threads, and no method here waits for either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from kvpact.cache.finder import Finder
from kvpact.cache.idle_steps import IdleSteps
from kvpact.cache.jobs import LoadState, Slots, TransferJobs
from kvpact.cache.lazy_offload import MIN_WINDOW
from kvpact.cache.ledger import Ledger, State
from kvpact.cache.offload import Offloader
from kvpact.cache.overdue import OverdueLoads
from kvpact.cache.plan import Planner
from kvpact.cache.prefetch import Prefetcher
from kvpact.cache.request import RequestState
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
from kvpact.identity.keys import BlockKey, BlockKeys, RequestIdentity
from kvpact.identity.tags import NO_TAG, BlockTags, first_among
from kvpact.index.block_index import BlockIndex, Pin
from kvpact.memory.arena import Arena
from kvpact.metrics import EndReason, Metrics, Snapshot, TierName
from kvpact.ranges import BlockRange, RangeSet
from kvpact.tiers.costs import PrefillRate
from kvpact.tiers.executor import TierExecutor

logger = logging.getLogger(__name__)


class _Once:
    """Asks the engine for a request's blocks when they are needed, and once in a step."""

    __slots__ = ("_answer", "_ask")

    def __init__(self, ask: Callable[[], Sequence[int]]) -> None:
        self._ask = ask
        self._answer: Sequence[int] | None = None

    def __call__(self) -> Sequence[int]:
        if self._answer is None:
            self._answer = self._ask()
        return self._answer


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
        self.tiers = TierSet(
            arena,
            self.metrics,
            clock=clock,
            timeout=config.prepare_deadline or config.load_deadline,
            share_drawn_epochs=config.share_drawn_epochs,
        )
        self._epochs = Epochs(config.weights_version)
        self._prefetcher = Prefetcher(self.tiers, self.index, arena, self.metrics, clock)
        self.writeback = WriteBack(
            self.tiers,
            self.index,
            arena,
            self.metrics,
            self._epochs,
            clock=clock,
            is_late=lambda: self.is_late(),
            second_use=config.admit == "second-use",
        )
        self._tags = BlockTags()
        self._prefill = PrefillRate(2 * block_size)
        self._computing = 0
        self._loading = 0
        """Blocks that matches were committed into in this step."""
        self._config = config
        self._namespace = namespace
        self._block_size = block_size
        self._arena = arena
        self._clock = clock
        self._lazy_window = lazy_window
        self._requests: dict[str, RequestState] = {}
        self._copies = TransferJobs(
            len(arena.segments), config.load_deadline / 3
        )  # time to ask twice before the deadline
        self.saves = Offloader(self.index, self._copies, self.metrics)
        self._overdue = OverdueLoads(self._copies, self.metrics)
        self._steps = StepLookups(
            self.ledger, self.tiers, self.metrics, block_size=block_size, ranks=len(arena.segments)
        )
        self._finder = Finder(
            config,
            self.index,
            self.tiers,
            self._prefetcher,
            epochs=self._epochs,
            prefill=self._prefill,
            block_size=block_size,
            clock=clock,
            is_late=lambda: self.is_late(),
        )
        self._planner = Planner(
            config,
            self.ledger,
            self.index,
            self.tiers,
            self._prefetcher,
            self._finder,
            self.metrics,
            overdue=self._overdue,
            block_size=block_size,
            slot_bytes=arena.slot_bytes,
            clock=clock,
        )
        self._idle_steps = IdleSteps(clock)
        self.is_late = is_late
        """Whether the running step has cost enough, so that what can wait is left to the next one."""
        self._writes_first = False
        """Of what can wait, a late step does one thing: it takes in what tiers have done, or offers them a chain."""
        self.tiers.open(tiers)

    def open_tiers(self, tiers: Sequence[TierExecutor]) -> None:
        """The tiers, if they were not there from the beginning. What memory holds is written to them bit by bit."""
        self.tiers.open(tiers)
        if self._epochs.generation == 1:  # later, memory has blocks of other epochs as well, and does not say which
            self.writeback.begin_backlog()

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
        self._finder.ask_early(request, self._record(request))

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        """See `ExternalCache`. Touches memory only; what a lower tier holds is fetched behind "ask again later"."""
        record = self._record(request)
        if self._planner.still_waits(request.request_id, record, num_computed_tokens):
            return None
        self._begin_probe(request.request_id, record, num_computed_tokens)
        return self._planner.prepare(request, record, num_computed_tokens)

    def decline_external_match(self, request: EngineRequest, num_computed_tokens: int) -> None:
        """See `ExternalCache`: the request is a miss."""
        record = self._record(request)
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
        record = self._requests[request.request_id]
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
        self._overdue.begin(self._copies.order_load(plan, blocks, keys, block_ids, now))
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
        self._note_resumed(request.request_id)
        record, lazy = self._record(request), self.saves.lazy
        before, record.computed = record.computed, num_computed_tokens
        held = _Once(block_ids)
        self._tag_filled(record, before, num_computed_tokens, held)
        self._computing += max(0, num_computed_tokens - before)
        if num_computed_tokens > record.max_computed:
            record.max_computed, record.loads_without_progress = num_computed_tokens, 0
        full = min(num_computed_tokens, len(request.token_ids)) // self._block_size
        if record.keys is None:
            if lazy is not None and full > before // self._block_size:
                lazy.invalidate_blocks(held())
            return
        if full <= record.offloaded_blocks or self._config.save == "off":
            return
        first, record.offloaded_blocks = record.offloaded_blocks, full
        keys = record.keys.extend(request.token_ids)
        named = min(full, len(keys))
        known = self.index.known_prefix(keys[:named])
        if known and (known == named or lazy is not None):
            self.index.touch(keys[known - 1])
            self.writeback.note_used(keys[:named])
        if lazy is None and known == named:
            return
        sound = record.sound = self._tags.same_prefix(held()[:named], min(record.sound, named), record.tag)
        if lazy is not None:
            lazy.invalidate_blocks(held()[max(first, sound) : full])
            lazy.note(request.request_id, keys, first, max(first, sound), held())
        elif known < sound:
            self.saves.order(request.request_id, keys[:sound], known, held, self._clock())

    def _tag_filled(
        self, record: RequestState, before: int, computed: int, block_ids: Callable[[], Sequence[int]]
    ) -> None:
        """The step computes the request's tokens [before, computed): the blocks that it fills get the request's tag.

        A block that other weights, or another adapter, began gets none.
        """
        if self._config.save == "off":
            return
        first, full = before // self._block_size, computed // self._block_size
        if full > first:
            filled = block_ids()[first:full]
            self._tags.fill(filled, record.tag)
            if before % self._block_size and record.tail_tag != record.tag:
                self._tags.fill(filled[:1], NO_TAG)
                record.sound = min(record.sound, first)
        if full > first or not before % self._block_size:
            record.tail_tag = record.tag

    def look_up_at_step(self, request: EngineRequest, computed_tokens: int, max_tokens: int) -> None:
        """See `SupportsStepLookup`: in the shared tiers, and not for blocks that another request is saving already."""
        save = self._copies.save_ordered_now(request.request_id)
        start = computed_tokens // self._block_size
        if not self._finder.looks_up_at_step or not request.may_load or save is None or save.job.start_block != start:
            return
        keys = self._finder.usable_keys(request, self._record(request))[: save.job.blocks.end]
        keys = keys[: self.tiers.readable_elsewhere(keys)]
        if len(keys) - start >= self._config.min_match_blocks:
            self._steps.order(save.job, computed_tokens, max_tokens, keys)

    def _note_resumed(self, request_id: str) -> None:
        """The engine computes the request: what an asynchronous load brought, up to its first hole, is used now."""
        plan = self.ledger.find_settled(request_id)
        if plan is not None:
            arrived = RangeSet.of(plan.committed_blocks).difference(plan.failed)
            blocks = arrived.prefix_from(plan.blocks.start)
            self.ledger.use(plan, min(blocks * self._block_size, plan.loaded_tokens))

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
        return self._copies.end_step(now, self._steps.end_step())

    def abandon_step(self, num_ranks: int) -> None:
        """See `ExternalCache`."""
        self._steps.abandon_step()
        self.apply_report(self._copies.abandon_step())

    def apply_report(self, report: WorkerReport) -> list[LoadSettlement]:
        """See `ExternalCache`."""
        self._steps.note_reads(report.reads)
        spared = self._steps.apply_report(report, self._clock(), self._requests.__contains__)
        self._computing -= sum(settled.skipped_tokens for settled in spared)
        # Loads first: what a request saved from a failed load on is not to be trusted.
        settlements = [settled for load in self._copies.take_loads(report) if (settled := self._settle_load(load))]
        self._overdue.give_up(self._clock())
        settlements += [self._settle_late(load) for load in self._overdue.take_late()]
        for save in self._copies.take_saves():
            self.writeback.note_saved(save.keys[: self.saves.settle(save)])
        if not self.is_late():
            self.writeback.offer_some()
        self._steps.end_saves(self._copies.saves.__contains__)
        return settlements + spared

    def _settle_late(self, load: LoadState) -> LoadSettlement:
        """The engine goes on without a load that ranks may still carry out; nothing of what is stored is at fault."""
        job = load.job
        self._overdue.failed()
        self._not_again(job.request_id, job.start_block)
        if job.synchronous:
            self._copies.distrust(job.request_id, load.keys[job.start_block], job.start_block)
        else:
            self._tags.fill(job.block_ids, NO_TAG)
        return LoadSettlement(job.request_id, RangeSet(), RangeSet.of(job.blocks), not job.synchronous, late=True)

    def _settle_load(self, load: LoadState) -> LoadSettlement | None:
        """No rank can write the load's blocks any more; None if the engine was told before."""
        self._overdue.end(load)
        if load.told:
            self.ledger.settle(load.plan, loaded=RangeSet(), failed=RangeSet.of(load.job.blocks), used_tokens=0)
            self._drop_if_gone(load.job.request_id)
            return None
        outcome = load.tally.loaded()
        plan, failed = load.plan, outcome.failed.hull()
        used, late = None, False
        if load.job.synchronous:
            used = min(outcome.done.prefix_from(plan.blocks.start) * self._block_size, plan.committed_tokens)
        self.ledger.settle(plan, loaded=outcome.done, failed=outcome.failed, used_tokens=used)
        if failed is not None:
            self._not_again(load.job.request_id, failed.start)
            record = self._requests.get(load.job.request_id)
            if record is not None:
                record.go_back(failed.start, self._block_size)
            self._tags.fill(load.job.block_ids[failed.start - load.job.start_block :], NO_TAG)
        if load.recalled:
            pass  # whether it failed or not says nothing of what is stored
        elif failed is not None and (late := load.given_up and not outcome.done.ranges):
            self._overdue.failed()
        elif failed is not None:
            self._forget(load, failed.start)
        self._drop_if_gone(load.job.request_id)
        return LoadSettlement(load.job.request_id, outcome.done, outcome.failed, not load.job.synchronous, late)

    def _forget(self, load: LoadState, first: int) -> None:
        """A load failed from block `first` on: the entry and all behind it go everywhere."""
        logger.warning("kvpact: blocks from %d on of request %s failed to load; dropped", first, load.job.request_id)
        self._drop_stored(load.keys[first:])
        self._copies.distrust(load.job.request_id, load.keys[first], first)

    def _not_again(self, request_id: str, first: int) -> None:
        """A load failed the request from block `first` on, whatever the reason: it is not promised that again (H09).

        Nor in another epoch, where these blocks have other keys.
        """
        record = self._requests.get(request_id)
        if record is not None:
            record.invalid_from = min(first, record.invalid_from if record.invalid_from is not None else first)
            record.offloaded_blocks = min(record.offloaded_blocks, first)

    def _drop_stored(self, keys: Sequence[BlockKey]) -> None:
        """Blocks go everywhere, with all behind them."""
        self.index.drop(keys[0])
        self.tiers.delete(keys)
        if self.saves.lazy is not None:
            self.saves.lazy.forget(keys)

    # Requests

    def _record(self, request: EngineRequest) -> RequestState:
        record = self._requests.get(request.request_id)
        if record is None:
            record = self._requests[request.request_id] = RequestState()
        identity = request.identity
        if identity is not record.identity or record.generation != self._epochs.generation:
            self._identify(request.request_id, record, identity)
        return record

    def _identify(self, request_id: str, record: RequestState, identity: RequestIdentity | None) -> None:
        """The request is new, or has grown, or the epoch is another one: its blocks have other keys from some on."""
        epoch, before, kept = self._epochs, record.identity, 0
        same_epoch = record.generation == epoch.generation
        record.identity, record.generation = identity, epoch.generation
        record.tag = self._tags.tag_of(epoch.generation, identity.adapter) if identity is not None else NO_TAG
        if identity is None:
            record.keys = None
        elif same_epoch and record.keys is not None and before is not None and before.same_root(identity):
            kept = record.keys.renew(identity)
        else:
            record.keys = BlockKeys(self._namespace, self._block_size, identity, epoch.current)
        plan = self.ledger.find(request_id)
        if plan is not None and plan.state is not State.LOADING and plan.blocks.end > kept:
            self.ledger.abort(plan, EndReason.SUPERSEDED)
        record.offloaded_blocks, record.sound = min(record.offloaded_blocks, kept), min(record.sound, kept)
        record.waits_at = None
        if record.tier_lookup is not None:
            self._prefetcher.give_up(record.tier_lookup, late=False)
            record.tier_lookup = None

    def request_finished(self, request_id: str) -> None:
        """See `ExternalCache`. Copies under way keep what they need until all ranks have reported."""
        self.ledger.finish_request(request_id)
        if self.saves.lazy is not None:
            self.saves.lazy.request_finished(request_id)
        record = self._requests.pop(request_id, None)
        if record is not None and record.tier_lookup is not None:
            self._prefetcher.give_up(record.tier_lookup, late=False)

    def _drop_if_gone(self, request_id: str) -> None:
        if request_id not in self._requests:
            self.ledger.finish_request(request_id)

    # Whole cache

    @property
    def has_pending_work(self) -> bool:
        """Whether copies or writes are under way: the engine must step to take in the reports.

        Not for ever: a tier may hang, and a hook or a worker may fail in every step. What is left then is taken in with
        the next request's steps.
        """
        dirty = self.saves.lazy is not None and self.saves.lazy.dirty
        return self._idle_steps.wait_for(len(self._copies) + self.writeback.waiting + self.tiers.pending + dirty)

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
        self._copies.recall()
        if self.saves.lazy is not None:
            self.saves.lazy.clear()
        self.writeback.clear()

    @property
    def has_overdue_loads(self) -> bool:
        """Whether a load's deadline has passed and ranks may still write to its blocks."""
        return self._overdue.is_stuck

    def distrust_blocks(self, block_ids: Collection[int], tables: Mapping[str, Sequence[int]]) -> None:
        """See `ExternalCache`."""
        self._tags.fill(block_ids, NO_TAG)
        saves = (save.job for save in self._copies.saves.values())
        saving = first_among(block_ids, ((job.request_id, job.start_block, job.block_ids) for job in saves))
        computed = first_among(block_ids, ((request_id, 0, table) for request_id, table in tables.items()))
        for request_id, first in computed.items():
            self._tags.fill(tables[request_id][first:], NO_TAG)
        for request_id in saving.keys() | computed.keys():
            self._distrust_from(request_id, min(each[request_id] for each in (saving, computed) if request_id in each))

    def _distrust_from(self, request_id: str, first: int) -> None:
        """Nobody knows what a request's blocks from `first` on hold. It may have ended."""
        for save in self._copies.saves.values():
            if save.job.request_id == request_id:
                save.garbage_from = min(save.garbage_from, first)
                if len(save.keys) > first:
                    self._drop_stored(save.keys[first:])
        record = self._requests.get(request_id)
        if record is not None and record.keys is not None:
            record.go_back(first, self._block_size)
            if len(record.keys.keys) > first:
                self._drop_stored(record.keys.keys[first:])

    def distrust_adapter(self, adapter: str) -> None:
        """See `ExternalCache`."""
        tag = self._tags.withdraw(adapter)
        for save in self._copies.saves.values():
            save.trusted &= tag != NO_TAG and not self._tags.same_prefix(save.job.block_ids, 0, tag)
        if self.saves.lazy is not None:
            if tag == NO_TAG:
                self.saves.lazy.clear()
            else:
                self.saves.lazy.invalidate_blocks(self._tags.blocks_with(tag))
        for record in self._requests.values():
            if record.identity is not None and record.identity.adapter == adapter:
                record.tag, record.sound = self._tags.tag_of(self._epochs.generation, adapter), 0

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
