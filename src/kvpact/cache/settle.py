"""How loads end: what arrived is used, what did not is computed, and nothing that failed is promised again."""

from __future__ import annotations

from dataclasses import dataclass

from kvpact.cache.invalidation import Invalidation
from kvpact.cache.jobs import LoadState, Slots, TransferJobs
from kvpact.cache.ledger import Ledger
from kvpact.cache.overdue import OverdueLoads
from kvpact.cache.request import Requests
from kvpact.contract import LoadSettlement
from kvpact.identity.tags import NO_TAG, BlockTags
from kvpact.index.block_index import Pin
from kvpact.ranges import RangeSet


@dataclass(eq=False, slots=True)
class Settlements:
    """Settles the loads of one engine's requests."""

    requests: Requests
    ledger: Ledger[Pin, Slots]
    jobs: TransferJobs
    overdue: OverdueLoads
    invalidation: Invalidation
    tags: BlockTags
    block_size: int

    def note_resumed(self, request_id: str) -> None:
        """The engine computes the request: what an asynchronous load brought, up to its first hole, is used now."""
        plan = self.ledger.find_settled(request_id)
        if plan is not None:
            arrived = RangeSet.of(plan.committed_blocks).difference(plan.failed)
            blocks = arrived.prefix_from(plan.blocks.start)
            self.ledger.use(plan, min(blocks * self.block_size, plan.loaded_tokens))

    def end_late(self, load: LoadState) -> LoadSettlement:
        """The engine goes on without a load that ranks may still carry out; nothing of what is stored is at fault."""
        job = load.job
        self.overdue.failed()
        self.requests.not_again(job.request_id, job.start_block)
        if job.synchronous:
            self.jobs.invalidate(job.request_id, load.keys[job.start_block], job.start_block)
        else:
            self.tags.fill(job.block_ids, NO_TAG)
        return LoadSettlement(job.request_id, RangeSet(), RangeSet.of(job.blocks), not job.synchronous, late=True)

    def end(self, load: LoadState) -> LoadSettlement | None:
        """No rank can write the load's blocks any more; None if the engine was told before."""
        job, plan, size = load.job, load.plan, self.block_size
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
            state = self.requests.get(job.request_id)
            if state is not None:
                state.go_back(failed.start, size)
            self.tags.fill(job.block_ids[failed.start - job.start_block :], NO_TAG)
        if load.recalled:
            pass  # whether it failed or not says nothing of what is stored
        elif failed is not None and (late := load.given_up and not outcome.done.ranges):
            self.overdue.failed()
        elif failed is not None:
            self.invalidation.load_failed(load, failed.start)
        self._drop_if_gone(job.request_id)
        return LoadSettlement(job.request_id, outcome.done, outcome.failed, not job.synchronous, late)

    def _drop_if_gone(self, request_id: str) -> None:
        if request_id not in self.requests:
            self.ledger.finish_request(request_id)
