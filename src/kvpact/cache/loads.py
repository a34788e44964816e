"""Begin and end of loads, and removal of invalid blocks.

Blocks that arrive are used; the others are computed, and not promised again. Blocks that failed to load, or that were
computed from garbage, are dropped by every part that has or gets them, by one method. Owns nothing but the log of
failures.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvpact.cache.jobs import LoadState, PactLedger, PactPlan, PlanLease, TransferJobs
from kvpact.cache.load_budget import LoadBudget
from kvpact.cache.memory import Memory
from kvpact.cache.needs.engine_groups import EngineGroups
from kvpact.cache.needs.match import Needs
from kvpact.cache.needs.runs import Failure
from kvpact.cache.neighbour_blocks import NeighbourBlocks
from kvpact.cache.request import Requests, RequestState
from kvpact.cache.saves import Saves
from kvpact.cache.tier_set import TierSet
from kvpact.contract import ExternalKVMatch, LoadSettlement
from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey
from kvpact.identity.tags import NO_TAG, first_among
from kvpact.index.block_index import BlockIndex
from kvpact.memory.arena import Standing
from kvpact.metrics import EndReason
from kvpact.ranges import BlockRange, RangeSet, num_blocks_for
from kvpact.tiers.log_once import LogOnce

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Loads:
    """Orders and settles the loads of one engine's requests."""

    requests: Requests
    ledger: PactLedger
    saves: Saves
    load_budget: LoadBudget
    load_deadline: float
    """Seconds from a load's commit to its deadline."""
    others: NeighbourBlocks
    groups: EngineGroups = field(init=False)
    memory: Memory = field(init=False)
    jobs: TransferJobs = field(init=False)
    index: BlockIndex = field(init=False)
    tiers: TierSet = field(init=False)
    _told: LogOnce = field(default_factory=lambda: LogOnce(logger), init=False)

    def __post_init__(self) -> None:
        saves = self.saves
        self.groups = saves.groups
        self.memory = saves.memory
        self.jobs = saves.jobs
        self.index = saves.memory.index
        self.tiers = saves.tiers

    def begin(self, request_id: str, match: ExternalKVMatch, num_tokens: int, block_ids: Sequence[int]) -> int:
        """The engine takes the first `num_tokens` of a match into `block_ids`; returns the number of blocks loaded.

        Its step waits for the load if `match` says so. 0: the engine declines, or the cache, because it may have
        promised more than is left of the side groups for fewer tokens.
        """
        plan = self._taken(request_id, match, num_tokens, len(block_ids))
        if plan is None:
            return 0
        now = self.tiers.clock()
        synchronous = not match.load_kv_async
        groups = self.groups
        blocks = BlockRange(plan.blocks.start, -(-num_tokens // groups.block_size))
        state = self.requests.live[plan.request_id]
        leases = plan.leases
        keep = self._cut(plan, state, num_tokens) if num_tokens < plan.promised_tokens else leases
        for run in plan.slots:
            if run.holder is not None and run.holder.is_refused and keep is leases:
                keep = None
        runs, loaded, beside = groups.placed(plan.slots, groups.tables(plan.request_id, lambda: block_ids), blocks)
        if keep is None or not runs:
            self.ledger.abort(plan, EndReason.REFUSED)
            for lease in keep if keep is not None and keep is not leases else ():
                self.others.release(lease)
            return 0
        state.commit(num_tokens, blocks)
        if synchronous:
            self.load_budget.spend(loaded)
        if beside:
            self.requests.tags.fill(beside, NO_TAG)
        for run in runs:
            self.requests.tags.fill(run.block_ids, state.tag)
            if run.holder is None:
                self.saves.writeback.note_used(run)
            else:
                self.others.has_news = True  # these ranks may not have heard of the engine
                state.record.note_neighbour(run.holder.name)
        self.ledger.commit(plan, num_tokens, now=now, keep=keep, deadline=now + self.load_deadline)
        self.jobs.order_load(plan, runs, now, synchronous=synchronous)
        return loaded

    def _taken(self, request_id: str, match: ExternalKVMatch, num_tokens: int, num_block_ids: int) -> PactPlan | None:
        """Plan whose first `num_tokens` the engine takes into its blocks; None if it declines.

        Raises PactViolation if the match is not the request's open plan, or promises fewer tokens.
        """
        plan = self.ledger.find(request_id)
        if plan is None or plan is not match.query_result:
            raise PactViolation(f"request {request_id} commits a match that is not its open plan")
        self.load_budget.release(request_id)
        if num_tokens == 0:
            self.ledger.abort(plan, EndReason.DECLINED)
            return None
        end = plan.blocks.start + -(-num_tokens // self.groups.block_size)
        is_named = self.groups.names_first  # `block_ids` are the first group's
        if num_tokens > plan.promised_tokens or (is_named and end > num_block_ids):
            raise PactViolation(
                f"request {request_id} commits {num_tokens} tokens into {num_block_ids} blocks; "
                f"{plan.promised_tokens} were promised, from block {plan.blocks.start} on"
            )
        return plan

    def _cut(self, plan: PactPlan, state: RequestState, num_tokens: int) -> Sequence[PlanLease] | None:
        """The engine takes less than was promised: leases on what that needs; None if it is not there."""
        rows = plan.blocks.start + num_blocks_for(num_tokens, self.groups.block_size)
        end = plan.blocks.start * self.groups.block_size + num_tokens
        if self.groups.reads_all:
            plan.slots = self.groups.first_of(plan.slots, end)
            # only the plan's own pins keep the slots of blocks that were dropped: all or none
            return plan.leases if self.memory.lost_any(plan.slots) else self.others.hold_part(plan.slots)
        keys = state.keys.keys if state.keys is not None else []
        needs = Needs(self.groups, keys, plan.blocks.start, state.loose_keys)
        if any(run.holder is not None for run in plan.slots):
            return self._hold_elsewhere(plan, needs, rows) if self.groups.may_end_at(end) else None
        if needs.longest(self.memory.has, rows) != rows or not self.groups.may_end_at(end):
            return None
        plan.slots = needs.runs(rows)
        return self.memory.lease(plan.slots)

    def _hold_elsewhere(self, plan: PactPlan, needs: Needs, rows: int) -> Sequence[PlanLease] | None:
        """Leases on a match up to row `rows`, in memory and other engines; None if they do not have it."""
        needs.available(self.memory.has, ())
        holding = self.others.hold(needs, rows, rows)
        if holding is None:
            return None
        plan.slots = holding.runs
        return holding.leases

    def note_resumed(self, plan: PactPlan) -> None:
        """The engine computes the request: it uses what an asynchronous load brought, up to the first hole."""
        arrived = RangeSet.of(plan.committed_blocks).difference(plan.failed)
        blocks = arrived.prefix_from(plan.blocks.start)
        self.ledger.use(plan, min(blocks * self.groups.block_size, plan.loaded_tokens))

    def end_late(self, load: LoadState) -> LoadSettlement:
        """The engine continues without a load that ranks may still carry out; what is stored is not at fault."""
        job = load.job
        blocks = load.plan.committed_blocks
        self.tiers.metrics.add("overdue_loads")
        self.requests.not_again(job.request_id, blocks.start)
        if (state := self.requests.live.get(job.request_id)) is not None:
            state.note_sound(min(state.sound, blocks.start))
        if job.synchronous:
            self.jobs.invalidate(job.request_id, load.parts[0].run.chain[blocks.start], blocks.start)
        else:
            self.requests.tags.fill(load.block_ids, NO_TAG)
        return LoadSettlement(job.request_id, RangeSet(), RangeSet.of(blocks), not job.synchronous, late=True)

    def end(self, load: LoadState) -> LoadSettlement | None:
        """Settle a load that no rank can write to any more; None if it was settled as late before."""
        job = load.job
        plan = load.plan
        size = self.groups.block_size
        self.jobs.end(load)
        self.tiers.metrics.observe("load_seconds", self.tiers.clock() - plan.renewed_at)
        if load.settled_late:
            self.ledger.settle(plan, loaded=RangeSet(), failed=RangeSet.of(plan.committed_blocks), used_tokens=0)
            if job.request_id not in self.requests.live:
                self.ledger.finish_request(job.request_id)
            return None
        outcome = load.outcome()
        failed = outcome.failed.hull() if outcome.failed.ranges else None
        late = False
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
                self.requests.tags.fill(part.run.spoilt(failed.start), NO_TAG)
        if load.recalled:
            pass  # the outcome says nothing about what is stored
        elif failed is not None and (late := load.given_up and not outcome.done.ranges):
            self.tiers.metrics.add("overdue_loads")
        elif failed is not None and self.tiers.arena.standing is not Standing.OPEN:  # else the check may have failed
            self._load_failed(load)
        if job.request_id not in self.requests.live:
            self.ledger.finish_request(job.request_id)
        return LoadSettlement(job.request_id, outcome.done, outcome.failed, not job.synchronous, late)

    # What is no longer trusted

    def _invalidate_from(self, request_id: str, keys: Sequence[BlockKey], block: int) -> None:
        """Neither serve nor store the chain `keys` from `block` on."""
        gone = keys[block:]
        self._invalidate(request_id, keys, Failure(gone, gone[:1], block))

    def _invalidate(self, request_id: str, chain: Sequence[BlockKey], failure: Failure) -> None:
        """Drop failed blocks everywhere, and store none computed from them: the one place that informs all parts."""
        self.jobs.invalidate(request_id, chain[failure.row], failure.row)
        for key in failure.tops:
            self.index.drop(key)
        self.tiers.delete(failure.keys)
        if self.saves.lazy is not None:
            self.saves.lazy.forget(chain[failure.row :])

    def _load_failed(self, load: LoadState) -> None:
        """Blocks failed to load: drop them, and all of the chain after them, everywhere."""
        name = load.job.request_id
        for failure, holder in load.failures():
            text = "kvpact: %d blocks of request %s failed to load, from block %d on; dropped (later ones are counted)"
            self._told.log("failed", logging.WARNING, text, len(failure.keys), name, failure.row)
            chain = load.parts[0].run.chain
            if holder is None:
                self._invalidate(name, chain, failure)
            else:
                holder.refute(failure.keys)
                self.jobs.invalidate(name, chain[failure.row], failure.row)
            state = self.requests.live.get(name)
            if self.saves.lazy is not None and state is not None and state.keys is not None:
                self.saves.lazy.forget(state.keys.keys[failure.row :])

    def distrust_blocks(self, block_ids: Collection[int], tables: Mapping[str, Sequence[int]]) -> None:
        """Trust these blocks of the engine no more: neither they nor blocks computed after them are stored (H48).

        `tables` has the block table of each request that may have some of them. What is stored of these requests from
        the first such block on is dropped everywhere.
        """
        self.requests.tags.fill(block_ids, NO_TAG)
        saving = first_among(block_ids, self.jobs.blocks_to_save())
        computed = first_among(block_ids, ((request_id, 0, table) for request_id, table in tables.items()))
        for request_id, first in computed.items():
            self.requests.tags.fill(tables[request_id][first:], NO_TAG)
        for request_id in saving.keys() | computed.keys():
            self._distrust_from(request_id, min(each[request_id] for each in (saving, computed) if request_id in each))

    def _distrust_from(self, request_id: str, first: int) -> None:
        """The content of a request's blocks from `first` on is unknown. The request may have finished."""
        self.jobs.cut_put_off(request_id, first)
        chains: list[Sequence[BlockKey]] = [
            save.run.chain for save in self.jobs.saves.values() if save.job.request_id == request_id
        ]
        state = self.requests.live.get(request_id)
        if state is not None and state.keys is not None:
            state.go_back(first, self.groups.block_size)
            chains.append(state.keys.keys)
        for keys in chains:
            if len(keys) > first:
                self._invalidate_from(request_id, keys, first)

    def distrust_adapter(self, adapter: str) -> None:
        """Save no more blocks that the engine computed under `adapter`, as identities name it: they may be another's.

        Blocks that were reported as saved before are valid.
        """
        tag = self.requests.tags.withdraw(adapter)
        for save in self.jobs.saves.values():
            save.trusted &= tag != NO_TAG and not self.requests.tags.same_prefix(save.job.block_ids, 0, tag)
        for waiting in self.jobs.not_ordered():
            waiting.trusted &= waiting.tag != tag
        if self.saves.lazy is not None:
            if tag == NO_TAG:
                self.saves.lazy.clear()
            else:
                self.saves.lazy.invalidate_blocks(self.requests.tags.blocks_with(tag))
        for state in self.requests.live.values():
            if state.identity is not None and state.identity.adapter == adapter:
                state.retag(self.requests.tags.tag_of(self.requests.epochs.generation, adapter))
