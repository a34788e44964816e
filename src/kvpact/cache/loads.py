"""How loads begin and end: blocks that arrive are used; the others are computed, and not promised again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpact.cache.groups import RequestGroups
from kvpact.cache.invalidation import Invalidation
from kvpact.cache.jobs import LoadState, PactLedger, PactPlan, TransferJobs
from kvpact.cache.load_budget import LoadBudget
from kvpact.cache.request import Requests, RequestState
from kvpact.cache.writeback import Offer, WriteBack
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
    ledger: PactLedger
    index: BlockIndex
    jobs: TransferJobs
    load_budget: LoadBudget
    invalidation: Invalidation
    writeback: WriteBack
    tags: BlockTags
    metrics: Metrics
    groups: RequestGroups

    def begin(
        self, plan: PactPlan, match: ExternalKVMatch, num_tokens: int, block_ids: Sequence[int], now: float
    ) -> int:
        """The engine takes the first `num_tokens` of a plan into `block_ids`; returns the number of blocks loaded.

        Its step waits for the load if `match`, which is what the engine was told of the plan, says so. 0: the cache
        declines, because it may have promised more than is left of the side groups for fewer tokens.
        """
        synchronous, groups = not match.load_kv_async, self.groups
        blocks = BlockRange(plan.blocks.start, num_blocks_for(num_tokens, self.groups.block_size))
        state = self.requests.live[plan.request_id]
        leases = plan.leases
        keep = self._cut(plan, state, num_tokens) if num_tokens < plan.promised_tokens else leases
        tables = groups.tables(plan.request_id, lambda: block_ids)
        placed = groups.placed(plan.slots, tables)
        if keep is None or not placed:
            self.ledger.abort(plan, EndReason.REFUSED)
            for pin in keep if keep is not None and keep is not leases else ():
                self.index.unpin(pin)
            return 0
        state.commit(num_tokens)
        loaded = sum(len(ids) for _, ids in placed)
        if synchronous:
            self.load_budget.spend(loaded)
        keys = state.keys.keys if state.keys is not None else []
        self.tags.fill(groups.hanging_of(tables, blocks), NO_TAG)
        for run, ids in placed:
            self.tags.fill(ids, state.tag)
            if run.group == groups.groups.chain:
                self.writeback.note_used(Offer(keys, blocks.end))
            else:
                self.writeback.note_used(Offer(run.keys, follow=False))
        if blocks.start <= state.sound < blocks.end:
            state.sound = blocks.end
        state.loaded_rows = blocks.end
        self.ledger.commit(plan, num_tokens, now=now, keep=keep, deadline=now + self.config.load_deadline)
        self.jobs.order_load(plan, placed, keys[: blocks.end], now, synchronous=synchronous)
        return loaded

    def _cut(self, plan: PactPlan, state: RequestState, num_tokens: int) -> Sequence[Pin] | None:
        """The engine takes less than was promised: pins on what that needs; None if memory does not have it."""
        groups, index = self.groups, self.index
        blocks = BlockRange(plan.blocks.start, num_blocks_for(num_tokens, self.groups.block_size))
        end = plan.blocks.start * self.groups.block_size + num_tokens
        keys = state.keys.keys if state.keys is not None else []
        if groups.reads_all:
            plan.slots = groups.first_of(plan.slots, end)
            if groups.lost_any(plan.slots):  # only the plan's own pins keep the slots: all or none
                return plan.leases
            hanging = [key for run in plan.slots if run.group != groups.groups.chain for key in run.keys]
            return [index.pin(keys[blocks.end - 1]), *index.pin_each(hanging)]
        found = groups.longest(state, blocks.end, blocks.start, index.is_held)
        if found != blocks.end or end % self.groups.block_size or not groups.may_end_at(end):
            return None
        plan.slots, pins = groups.lease(state, keys, blocks)
        return pins

    def note_resumed(self, request_id: str) -> None:
        """The engine computes the request: it uses what an asynchronous load brought, up to the first hole."""
        plan = self.ledger.find_settled(request_id)
        if plan is not None:
            arrived = RangeSet.of(plan.committed_blocks).difference(plan.failed)
            blocks = arrived.prefix_from(plan.blocks.start)
            self.ledger.use(plan, min(blocks * self.groups.block_size, plan.loaded_tokens))

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
        job, plan, size = load.job, load.plan, self.groups.block_size
        self.jobs.end(load)
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
            for part in load.parts:
                spoilt = part.job.block_ids[failed.start - part.job.start_block if part.is_chain else 0 :]
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
