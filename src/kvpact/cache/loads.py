"""How loads begin and end: blocks that arrive are used; the others are computed, and not promised again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpact.cache.invalidation import Invalidation
from kvpact.cache.jobs import LoadState, PactPlan, PlanSlots, TransferJobs
from kvpact.cache.ledger import Ledger
from kvpact.cache.load_budget import LoadBudget
from kvpact.cache.overdue import OverdueLoads
from kvpact.cache.request import Requests, RequestState
from kvpact.cache.sides import Sides
from kvpact.cache.writeback import WriteBack
from kvpact.config import KvpactConfig
from kvpact.contract import ExternalKVMatch, LoadSettlement, num_blocks_for
from kvpact.identity.tags import NO_TAG, BlockTags
from kvpact.index.block_index import BlockIndex, Pin
from kvpact.metrics import EndReason, Metrics
from kvpact.ranges import BlockRange, RangeSet


@dataclass(eq=False, slots=True)
class Loads:
    """Orders and settles the loads of one engine's requests."""

    config: KvpactConfig
    requests: Requests
    ledger: Ledger[Pin, PlanSlots]
    index: BlockIndex
    jobs: TransferJobs
    overdue: OverdueLoads
    load_budget: LoadBudget
    invalidation: Invalidation
    writeback: WriteBack
    tags: BlockTags
    metrics: Metrics
    block_size: int
    sides: Sides | None = None
    """The side groups; None if the model has none."""

    def begin(
        self, plan: PactPlan, match: ExternalKVMatch, num_tokens: int, block_ids: Sequence[int], now: float
    ) -> int:
        """The engine takes the first `num_tokens` of a plan into `block_ids`; returns the number of blocks loaded.

        Its step waits for the load if `match`, which is what the engine was told of the plan, says so. 0: the cache
        declines, because it may have promised more than is left of the side groups for fewer tokens.
        """
        synchronous = not match.load_kv_async
        blocks = BlockRange(plan.blocks.start, num_blocks_for(num_tokens, self.block_size))
        state = self.requests.live[plan.request_id]
        cut: Sequence[Pin] = ()
        if self.sides is not None and num_tokens < plan.promised_tokens:
            pins = self._cut(self.sides, plan, state, num_tokens)
            if pins is None:
                self.ledger.abort(plan, EndReason.REFUSED)
                return 0
            cut = pins
        chain = 0 if self.sides is None else self.sides.groups.chain
        sides = self.sides.placed(plan.request_id, plan.slots.sides) if self.sides is not None else []
        if chain is None and not sides:
            self.ledger.abort(plan, EndReason.REFUSED)
            return 0
        if self.sides is not None and chain is not None and self.sides.context is not None:
            block_ids = self.sides.context.get_block_ids(plan.request_id)[chain]
        state.commit(num_tokens)
        loaded = blocks.count + sum(len(ids) for _, ids in sides)
        if synchronous:
            self.load_budget.spend(loaded)
        keys = state.keys.keys if state.keys is not None else []
        if chain is not None:
            self.writeback.note_used(keys, blocks.end)
            self.tags.fill(block_ids[blocks.start : blocks.end], state.tag)
            if blocks.start <= state.sound < blocks.end and self.sides is None:
                state.sound = blocks.end
        if self.sides is not None:
            self.tags.fill(self.sides.filled(plan.request_id, blocks), NO_TAG)
            state.loaded_rows = blocks.end
        for _, ids in sides:
            self.tags.fill(ids, state.tag)
        # If a failed load has dropped the entry, only the plan's own pin keeps its slots: all or none.
        last = keys[blocks.end - 1]
        dropped = self.index.key_at(plan.slots.chain[blocks.count - 1]) is None
        whole = blocks == plan.blocks or dropped or self.sides is not None
        keep = [*plan.leases, *cut] if whole else [self.index.pin(last)]
        self.ledger.commit(plan, num_tokens, now=now, keep=keep, deadline=now + self.config.load_deadline)
        self.overdue.begin(
            self.jobs.order_load(plan, blocks, keys, block_ids, now, synchronous=synchronous, sides=sides, chain=chain)
        )
        return loaded

    def _cut(self, sides: Sides, plan: PactPlan, state: RequestState, num_tokens: int) -> Sequence[Pin] | None:
        """The engine takes less than was promised: pins on what that needs; None if memory does not have it."""
        rows = plan.blocks.start + num_blocks_for(num_tokens, self.block_size)
        end = plan.blocks.start * self.block_size + num_tokens
        if sides.reads_all:
            plan.slots = PlanSlots(plan.slots.chain, sides.first_of(plan.slots.sides, end))
            return ()
        found = sides.longest(state, rows, plan.blocks.start, self.index.is_held)
        if found != rows or end % self.block_size or not sides.may_end_at(end):
            return None
        runs, pins = sides.lease(state, rows, plan.blocks.start)
        plan.slots = PlanSlots(plan.slots.chain, runs)
        return pins

    def note_resumed(self, request_id: str) -> None:
        """The engine computes the request: it uses what an asynchronous load brought, up to the first hole."""
        plan = self.ledger.find_settled(request_id)
        if plan is not None:
            arrived = RangeSet.of(plan.committed_blocks).difference(plan.failed)
            blocks = arrived.prefix_from(plan.blocks.start)
            self.ledger.use(plan, min(blocks * self.block_size, plan.loaded_tokens))

    def end_late(self, load: LoadState) -> LoadSettlement:
        """The engine continues without a load that ranks may still carry out; what is stored is not at fault."""
        job, blocks = load.job, load.plan.committed_blocks
        self.metrics.add("overdue_loads")
        self.requests.not_again(job.request_id, blocks.start)
        if (state := self.requests.live.get(job.request_id)) is not None:
            state.sound = min(state.sound, blocks.start)
        if job.synchronous:
            self.jobs.invalidate(job.request_id, load.keys[blocks.start], blocks.start)
        else:
            self.tags.fill(load.block_ids, NO_TAG)
        return LoadSettlement(job.request_id, RangeSet(), RangeSet.of(blocks), not job.synchronous, late=True)

    def end(self, load: LoadState) -> LoadSettlement | None:
        """Settle a load that no rank can write to any more; None if the engine was told before."""
        job, plan, size = load.job, load.plan, self.block_size
        self.jobs.end(load)
        self.overdue.end(load)
        if load.told:
            self.ledger.settle(plan, loaded=RangeSet(), failed=RangeSet.of(plan.committed_blocks), used_tokens=0)
            self._drop_if_gone(job.request_id)
            return None
        outcome = load.outcome()
        failed, late = outcome.failed.hull(), False
        used = min(outcome.done.prefix_from(plan.blocks.start) * size, plan.committed_tokens)
        self.ledger.settle(
            plan, loaded=outcome.done, failed=outcome.failed, used_tokens=used if job.synchronous else None
        )
        if failed is not None:
            self.requests.not_again(job.request_id, failed.start)
            state = self.requests.live.get(job.request_id)
            if state is not None:
                state.go_back(failed.start, size)
            spoilt = load.block_ids if load.sides else job.block_ids[failed.start - job.start_block :]
            self.tags.fill(spoilt, NO_TAG)
        if load.recalled:
            pass  # the outcome says nothing about what is stored
        elif failed is not None and (late := load.given_up and not outcome.done.ranges):
            self.metrics.add("overdue_loads")
        elif failed is not None:
            self.invalidation.load_failed(load)
        self._drop_if_gone(job.request_id)
        return LoadSettlement(job.request_id, outcome.done, outcome.failed, not job.synchronous, late)

    def _drop_if_gone(self, request_id: str) -> None:
        if request_id not in self.requests.live:
            self.ledger.finish_request(request_id)
