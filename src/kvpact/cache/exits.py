"""How plans end without a load, or are postponed: by the engine's word, a miss, a reset or the end of the cache.

Decides which promises end so that others get room. Owns no state: the ledger owns plans, the index slots. A plan that
is loading is left alone here; its settlement ends it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpact.cache.jobs import PactLedger, PactPlan
from kvpact.cache.ledger import State
from kvpact.cache.load_budget import LoadBudget
from kvpact.cache.request import Requests
from kvpact.cache.waiting import Event
from kvpact.contract import ExternalKVMatch, ExternalMatchExit
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import BlockIndex
from kvpact.metrics import EndReason


@dataclass(eq=False, slots=True)
class Exits:
    """The ways out for the plans of one ledger, and so the room that they leave in one index."""

    ledger: PactLedger
    index: BlockIndex
    requests: Requests
    load_budget: LoadBudget

    def abort(self, request_id: str, match: ExternalKVMatch | None, reason: str) -> None:
        """See `ExternalCache`; a `reason` that is none of `EndReason` counts as an error."""
        plan = self.ledger.find(request_id)
        if plan is None or plan.state is State.LOADING or (match is not None and match.query_result is not plan):
            return
        self.load_budget.release(request_id)
        self.ledger.abort(plan, EndReason(reason) if reason in EndReason.__members__.values() else EndReason.ERROR)

    def postpone(self, request_id: str, reason: ExternalMatchExit) -> None:
        """See `ExternalCache`."""
        plan = self.ledger.find(request_id)
        if plan is not None and plan.state is not State.LOADING:
            self.load_budget.release(request_id)
            self.ledger.postpone(plan, EndReason(reason))

    def reservable(self, parent: BlockKey, wanted: int, slot_class: int | None = None) -> int:
        """See `BlockIndex.reservable`. If that is fewer than `wanted`, postponed plans end, one by one, until it
        is not.

        A plan that was prepared in this step does not end. Engines ask for their queue's head first, so the head gets
        room from the requests queued after it and never the other way round: two requests do not evict each other in
        turn.
        """
        room = self.index.reservable(parent, wanted, slot_class)
        for plan, reason in self.ledger.postponed_plans() if room < wanted else ():
            self.ledger.abort(plan, reason)
            self._may_wait_anew(plan)
            room = self.index.reservable(parent, wanted, slot_class)
            if room >= wanted:
                break
        return room

    def expire(self, now: float) -> None:
        """The step is over: end the plans whose lifetime is."""
        for plan in self.ledger.expire(now):
            if plan.postponed is not None:
                self._may_wait_anew(plan)

    def _may_wait_anew(self, plan: PactPlan) -> None:
        """The plan's request may wait for tiers once more: it was the engine that kept it waiting (P11)."""
        state = self.requests.live.get(plan.request_id)
        if state is not None:
            state.waiting.note(Event.ANEW)

    def end_plan(self, request_id: str, reason: EndReason) -> None:
        """End the request's plan, if it has one that is not loading."""
        plan = self.ledger.find(request_id)
        if plan is not None and plan.state is not State.LOADING:
            self.ledger.abort(plan, reason)

    def end_renamed(self, request_id: str, block: int) -> None:
        """A request's blocks from `block` on have other keys: end a plan that has some of them."""
        plan = self.ledger.find(request_id)
        if plan is not None and plan.blocks.end > block:
            self.end_plan(request_id, EndReason.SUPERSEDED)

    def end_all(self, reason: EndReason) -> None:
        """End every plan that is not loading."""
        for plan in self.ledger.open_plans():
            if plan.state is not State.LOADING:
                self.ledger.abort(plan, reason)
