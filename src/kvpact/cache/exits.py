"""How plans end without a load, or are postponed: by the engine's word, a miss, a reset or the end of the cache.

Owns no state: the ledger does. A plan that is loading is left alone here; its settlement ends it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpact.cache.jobs import PlanSlots
from kvpact.cache.ledger import Ledger, State
from kvpact.cache.load_budget import LoadBudget
from kvpact.cache.request import RequestState
from kvpact.contract import Exit, ExternalKVMatch
from kvpact.index.block_index import Pin
from kvpact.metrics import EndReason


@dataclass(eq=False, slots=True)
class Exits:
    """The ways out for the plans of one ledger."""

    ledger: Ledger[Pin, PlanSlots]
    load_budget: LoadBudget

    def abort(self, request_id: str, match: ExternalKVMatch | None, reason: str) -> None:
        """See `ExternalCache`; a `reason` that is none of `EndReason` counts as an error."""
        plan = self.ledger.find(request_id)
        if plan is None or plan.state is State.LOADING or (match is not None and match.query_result is not plan):
            return
        self.load_budget.release(request_id)
        self.ledger.abort(plan, EndReason(reason) if reason in EndReason.__members__.values() else EndReason.ERROR)

    def postpone(self, request_id: str, state: RequestState | None, reason: Exit) -> None:
        """See `ExternalCache`. If the plan ends before the engine comes back, the request may wait for tiers anew.

        It has had its promise: the wait that ended with it has nothing to do with the next one (P11).
        """
        plan = self.ledger.find(request_id)
        if plan is None or plan.state is State.LOADING:
            return
        self.load_budget.release(request_id)
        self.ledger.postpone(plan, EndReason(reason))
        if state is not None and plan.state is State.PLANNED:
            state.waits_until = None

    def end_plan(self, request_id: str, reason: EndReason) -> None:
        """End the request's plan, if it has one that is not loading."""
        plan = self.ledger.find(request_id)
        if plan is not None and plan.state is not State.LOADING:
            self.ledger.abort(plan, reason)

    def end_all(self, reason: EndReason) -> None:
        """End every plan that is not loading."""
        for plan in self.ledger.open_plans():
            if plan.state is not State.LOADING:
                self.ledger.abort(plan, reason)
