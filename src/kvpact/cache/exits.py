"""How plans end without a load, or are postponed: by the engine's word, a miss, a reset or the end of the cache.

Owns no state: the ledger does. A plan that is loading is left alone here; its settlement ends it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpact.cache.jobs import PactPlan, PlanSlots
from kvpact.cache.ledger import Ledger, State
from kvpact.cache.load_budget import LoadBudget
from kvpact.cache.request import Requests
from kvpact.contract import ExternalKVMatch, ExternalMatchExit
from kvpact.index.block_index import Pin
from kvpact.metrics import EndReason


@dataclass(eq=False, slots=True)
class Exits:
    """The ways out for the plans of one ledger."""

    ledger: Ledger[Pin, PlanSlots]
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

    def give_up(self, plan: PactPlan, reason: EndReason) -> None:
        """End a postponed plan, for others' room."""
        self.ledger.abort(plan, reason)
        self._may_wait_anew(plan)

    def expire(self, now: float) -> None:
        """The step is over: end the plans whose lifetime is."""
        for plan in self.ledger.expire(now):
            if plan.postponed is not None:
                self._may_wait_anew(plan)

    def _may_wait_anew(self, plan: PactPlan) -> None:
        """The plan's request may wait for tiers once more: it was the engine that kept it waiting (P11)."""
        state = self.requests.live.get(plan.request_id)
        if state is not None:
            state.waits_until = None

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
