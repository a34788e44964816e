"""How loads begin and end: blocks that arrive are used; the others are computed, and not promised again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpact.cache.invalidation import Invalidation
from kvpact.cache.jobs import LoadState, PactPlan, Slots, TransferJobs
from kvpact.cache.ledger import Ledger
from kvpact.cache.load_budget import LoadBudget
from kvpact.cache.overdue import OverdueLoads
from kvpact.cache.request import Requests
from kvpact.cache.writeback import WriteBack
from kvpact.config import KvpactConfig
from kvpact.contract import ExternalKVMatch, LoadSettlement, num_blocks_for
from kvpact.identity.tags import NO_TAG, BlockTags
from kvpact.index.block_index import BlockIndex, Pin
from kvpact.metrics import Metrics
from kvpact.ranges import BlockRange, RangeSet


@dataclass(eq=False, slots=True)
class Loads:
    """Orders and settles the loads of one engine's requests."""

    config: KvpactConfig
    requests: Requests
    ledger: Ledger[Pin, Slots]
    index: BlockIndex
    jobs: TransferJobs
    overdue: OverdueLoads
    load_budget: LoadBudget
    invalidation: Invalidation
    writeback: WriteBack
    tags: BlockTags
    metrics: Metrics
    block_size: int

    def begin(
        self, plan: PactPlan, match: ExternalKVMatch, num_tokens: int, block_ids: Sequence[int], now: float
    ) -> int:
        """The engine takes the first `num_tokens` of a plan into `block_ids`; returns the number of blocks loaded.

        Its step waits for the load if `match`, which is what the engine was told of the plan, says so.
        """
        synchronous = not match.load_kv_async
        blocks = BlockRange(plan.blocks.start, num_blocks_for(num_tokens, self.block_size))
        state = self.requests.live[plan.request_id]
        state.commit(num_tokens)
        if synchronous:
            self.load_budget.spend(blocks.count)
        keys = state.keys.keys if state.keys is not None else []
        self.writeback.note_used(keys[: blocks.end])
        self.tags.fill(block_ids[blocks.start : blocks.end], state.tag)
        # If a failed load has dropped the entry, only the plan's own pin keeps its slots: all or none.
        last = keys[blocks.end - 1]
        dropped = last not in self.index or self.index.slot(last) != plan.slots[blocks.count - 1]
        keep = [*plan.leases] if blocks == plan.blocks or dropped else [self.index.pin(last)]
        self.ledger.commit(plan, num_tokens, now=now, keep=keep, deadline=now + self.config.load_deadline)
        self.overdue.begin(self.jobs.order_load(plan, blocks, keys, block_ids, now, synchronous=synchronous))
        return blocks.count

    def note_resumed(self, request_id: str) -> None:
        """The engine computes the request: it uses what an asynchronous load brought, up to the first hole."""
        plan = self.ledger.find_settled(request_id)
        if plan is not None:
            arrived = RangeSet.of(plan.committed_blocks).difference(plan.failed)
            blocks = arrived.prefix_from(plan.blocks.start)
            self.ledger.use(plan, min(blocks * self.block_size, plan.loaded_tokens))

    def end_late(self, load: LoadState) -> LoadSettlement:
        """The engine continues without a load that ranks may still carry out; what is stored is not at fault."""
        job = load.job
        self.metrics.add("overdue_loads")
        self.requests.not_again(job.request_id, job.start_block)
        if job.synchronous:
            self.jobs.invalidate(job.request_id, load.keys[job.start_block], job.start_block)
        else:
            self.tags.fill(job.block_ids, NO_TAG)
        return LoadSettlement(job.request_id, RangeSet(), RangeSet.of(job.blocks), not job.synchronous, late=True)

    def end(self, load: LoadState) -> LoadSettlement | None:
        """Settle a load that no rank can write to any more; None if the engine was told before."""
        job, plan, size = load.job, load.plan, self.block_size
        self.jobs.end(load)
        self.overdue.end(load)
        if load.told:
            self.ledger.settle(plan, loaded=RangeSet(), failed=RangeSet.of(job.blocks), used_tokens=0)
            self._drop_if_gone(job.request_id)
            return None
        outcome = load.tally.loaded()
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
            self.tags.fill(job.block_ids[failed.start - job.start_block :], NO_TAG)
        if load.recalled:
            pass  # the outcome says nothing about what is stored
        elif failed is not None and (late := load.given_up and not outcome.done.ranges):
            self.metrics.add("overdue_loads")
        elif failed is not None:
            self.invalidation.load_failed(load, failed.start)
        self._drop_if_gone(job.request_id)
        return LoadSettlement(job.request_id, outcome.done, outcome.failed, not job.synchronous, late)

    def _drop_if_gone(self, request_id: str) -> None:
        if request_id not in self.requests.live:
            self.ledger.finish_request(request_id)
