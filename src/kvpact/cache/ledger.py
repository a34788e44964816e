"""Every plan from prepare to settlement: the leases, and the four counts that must reconcile.

A plan's state changes in `Ledger._apply` and nowhere else, as `plan.py` allows. Owns no block and no bytes, reads no
clock, starts no thread: events and the time come in as arguments. Each lease is passed to `release` once, when its plan
no longer needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Generic

from kvpact.cache.plan import TRANSITIONS, Lease, Plan, PlanEvent, PlanRecord, PlanState, Slots
from kvpact.cache.totals import NO_SOURCES, Sources, Totals
from kvpact.contract import POSTPONED_STEPS
from kvpact.errors import PactViolation, kept_id
from kvpact.metrics import EndReason
from kvpact.ranges import NO_RANGES, BlockRange, RangeSet

HISTORY_LENGTH = 256
"""Number of ended plans kept to explain them; older ones are forgotten (H51)."""

PLAN_LIFETIME_STEPS = 2
"""Steps that a plan survives without a probe: an engine does not look at its queue in a step in which it preempts."""


@dataclass(eq=False)
class Ledger(Generic[Lease, Slots]):
    """All plans of one engine; at most one open plan per request.

    `release` is called once for each lease, after the plan has changed. A plan that was neither renewed nor committed
    expires after more than `plan_lifetime_seconds` and more than `plan_lifetime_steps` scheduler steps: neither one
    long step nor many short ones end a promise. One that the engine postponed expires after `postponed_steps` alone.
    """

    release: Callable[[Lease], object]
    plan_lifetime_seconds: float
    plan_lifetime_steps: int = PLAN_LIFETIME_STEPS
    postponed_steps: int = POSTPONED_STEPS
    kept_waiting: Callable[[str], object] | None = None
    """Told the request of each postponed plan that ends: it was the engine that kept it waiting."""
    note_ended: Callable[[Plan[Lease, Slots]], object] | None = None
    """Told each plan that has ended, once what the engine used of it is known."""
    totals: Totals = field(default_factory=Totals, init=False)
    history: deque[PlanRecord] = field(default_factory=partial(deque, maxlen=HISTORY_LENGTH), init=False)
    step: int = field(default=0, init=False)
    _open: dict[str, Plan[Lease, Slots]] = field(default_factory=dict, init=False)
    _awaiting_use: dict[str, Plan[Lease, Slots]] = field(default_factory=dict, init=False)
    """Settled plans whose used tokens the engine has not reported yet."""
    _used_positions: dict[str, RangeSet] = field(default_factory=dict, init=False)
    """Per live request the token positions (not blocks) that were counted as used."""

    # Prepare

    def open_plan(
        self,
        request_id: str,
        blocks: BlockRange,
        *,
        block_size: int,
        slots: Slots,
        now: float,
        leases: Iterable[Lease] = (),
        promised_tokens: int = 0,
    ) -> Plan[Lease, Slots]:
        """Open a plan: PLANNED if tokens are promised, PENDING (promising nothing yet) if `promised_tokens` is 0.

        An older plan of the request that is not loading yet is superseded: its leases that are also in `leases` move
        over (do not acquire them again), the others are released. PactViolation if the older plan is loading, or if
        the promise does not end in the last of `blocks`.
        """
        old = self._open.get(request_id)
        if old is not None:
            self._require(old, PlanEvent.ABORT)
        plan: Plan[Lease, Slots] = Plan(
            request_id=request_id,
            blocks=blocks,
            block_size=block_size,
            slots=slots,
            renewed_at=now,
            renewed_step=self.step,
        )
        if promised_tokens:
            _require_promise(plan, blocks, promised_tokens)
        unused = self._awaiting_use.get(request_id)
        if unused is not None:  # The request was preempted after its load and before it ran.
            self.use(unused, 0)
        if old is not None:
            plan.leases = old.leases
            old.leases = []
            self._abort(old, EndReason.SUPERSEDED)
        self._apply(plan, PlanEvent.PREPARE_READY if promised_tokens else PlanEvent.PREPARE_LATER)
        self._open[request_id] = plan
        self.totals.plans_opened += 1
        self._promise(plan, blocks, promised_tokens)
        self._hold(plan, leases)
        return plan

    def find(self, request_id: str) -> Plan[Lease, Slots] | None:
        """The request's open plan, if it has one."""
        return self._open.get(request_id)

    def find_settled(self, request_id: str) -> Plan[Lease, Slots] | None:
        """The request's settled plan that still awaits `use`, if there is one."""
        return self._awaiting_use.get(request_id)

    def has_plan(self, request_id: str) -> bool:
        """True if the request has an open plan, or a settled one that awaits `use`."""
        return request_id in self._open or request_id in self._awaiting_use

    def open_plans(self) -> list[Plan[Lease, Slots]]:
        """All open plans, oldest first."""
        return list(self._open.values())

    def renew(self, plan: Plan[Lease, Slots], now: float) -> None:
        """The engine asked again for the same match; acquires and counts nothing (P3)."""
        self._apply(plan, PlanEvent.RENEW)
        plan.renewed_at = now
        plan.renewed_step = self.step
        plan.postponed = None

    def ready(
        self,
        plan: Plan[Lease, Slots],
        *,
        promised_tokens: int,
        leases: Iterable[Lease],
        now: float,
        blocks: BlockRange | None = None,
    ) -> None:
        """A PENDING plan is staged: promise 1 or more tokens, in `blocks`, by default all that it was opened for.

        From now on the plan holds exactly `leases`; its other leases are released.
        """
        blocks = blocks if blocks is not None else plan.blocks
        self._require(plan, PlanEvent.PREPARE_READY)
        _require_promise(plan, blocks, promised_tokens)
        self._apply(plan, PlanEvent.PREPARE_READY)
        plan.renewed_at = now
        plan.renewed_step = self.step
        plan.postponed = None
        self._promise(plan, blocks, promised_tokens)
        self._hold(plan, leases)

    # Commit and settlement

    def commit(
        self,
        plan: Plan[Lease, Slots],
        tokens: int,
        *,
        now: float,
        keep: Iterable[Lease] | None = None,
        deadline: float = inf,
    ) -> None:
        """The engine takes the first `tokens` of the promise; 0 aborts the plan as declined (P4).

        From now on the plan holds exactly `keep`, by default all it held: its other leases are released. The caller has
        acquired new ones in `keep`. `deadline` is when the load must have ended. PactViolation if `tokens` are more
        than were promised.
        """
        if tokens == 0:
            self.abort(plan, EndReason.DECLINED)
            return
        self._require(plan, PlanEvent.COMMIT)
        if not 0 < tokens <= plan.promised_tokens:
            raise PactViolation(
                f"request {plan.request_id}: {tokens} tokens committed, {plan.promised_tokens} promised; "
                "a commit takes 0 to all promised tokens"
            )
        self._apply(plan, PlanEvent.COMMIT)
        plan.committed_tokens = tokens
        plan.renewed_at = now
        plan.renewed_step = self.step
        plan.deadline = deadline
        self.totals.committed_tokens += tokens
        self.totals.withdrawn_tokens += plan.promised_tokens - tokens
        if keep is not None:
            self._hold(plan, keep)

    def settle(
        self, plan: Plan[Lease, Slots], *, loaded: RangeSet, failed: RangeSet, used_tokens: int | None = None
    ) -> None:
        """All ranks reported: each committed block is in exactly one of the two sets (P7). Releases all leases.

        The plan ends LOADED, or SHORT if anything failed. Pass `used_tokens` if the engine's step already ran, as with
        a synchronous load; otherwise call `use` later. For a request that has finished, None means 0.
        """
        self._require(plan, PlanEvent.FELL_SHORT if failed.ranges else PlanEvent.ARRIVED)
        plan.require_all(loaded, failed)
        loaded_tokens = plan.committed_tokens_in(loaded) if failed.ranges else plan.committed_tokens
        if used_tokens is None and plan.request_finished:
            used_tokens = 0
        _require_used(plan, used_tokens or 0, loaded_tokens)
        self._end_load(plan, loaded_tokens, failed)
        del self._open[plan.request_id]
        self._awaiting_use[plan.request_id] = plan
        if used_tokens is not None:
            self.use(plan, used_tokens)
        self._hold(plan, ())

    def _end_load(self, plan: Plan[Lease, Slots], loaded_tokens: int, failed: RangeSet) -> None:
        self._apply(plan, PlanEvent.FELL_SHORT if failed.ranges else PlanEvent.ARRIVED)
        plan.reason = EndReason.SHORT if failed.ranges else EndReason.LOADED
        plan.loaded_tokens = loaded_tokens
        plan.failed = failed
        self.totals.loaded_tokens += loaded_tokens
        self.totals.failed_tokens += plan.committed_tokens - loaded_tokens
        self.totals.ended[plan.reason] += 1

    def use(self, plan: Plan[Lease, Slots], tokens: int) -> None:
        """The engine skipped the first `tokens` of the match, at most the loaded ones; called once per settled plan.

        A position that the same request skipped before, as after a preemption, counts as `used_again` (H70).
        """
        if self._awaiting_use.get(plan.request_id) is not plan:
            raise PactViolation(
                f"request {plan.request_id}: use of {tokens} tokens said of a plan in state {plan.state}; "
                "it is said once, after the plan is settled and before the request has finished"
            )
        _require_used(plan, tokens, plan.loaded_tokens)
        del self._awaiting_use[plan.request_id]
        self._count_used(plan, BlockRange(plan.blocks.start * plan.block_size, tokens))

    def _count_used(self, plan: Plan[Lease, Slots], positions: BlockRange) -> None:
        """Count these token positions as used; those that were counted before as used again."""
        before = self._used_positions.get(plan.request_id, NO_RANGES)
        after = new = RangeSet.of(positions)
        plan.used_tokens = positions.count
        if before.ranges:
            after = before.union(after)
            new = after.difference(before)
            plan.used_tokens = len(after) - len(before)
        plan.used_again_tokens = positions.count - plan.used_tokens
        self.totals.split_used(new, plan.sources, plan.block_size)
        if plan.request_finished:
            self._used_positions.pop(plan.request_id, None)
        elif after.ranges:
            self._used_positions[plan.request_id] = after
        self.totals.used_tokens += plan.used_tokens
        self.totals.used_again_tokens += plan.used_again_tokens
        self._remember(plan)

    def note_step_match(
        self,
        request_id: str,
        blocks: BlockRange,
        used_positions: BlockRange,
        *,
        block_size: int,
        slots: Slots,
        now: float,
        request_finished: bool,
        sources: Sources = NO_SOURCES,
    ) -> None:
        """Count a match that the workers found and loaded within one step, after that step.

        The request may have an open plan besides. `used_positions` are the tokens within `blocks` that the engine
        skipped. PactViolation if they are more than `blocks` hold.
        """
        tokens = blocks.count * block_size
        plan: Plan[Lease, Slots] = Plan(
            request_id=request_id,
            blocks=blocks,
            block_size=block_size,
            slots=slots,
            renewed_at=now,
            renewed_step=self.step,
            request_finished=request_finished,
            sources=sources,
        )
        _require_promise(plan, blocks, tokens)
        _require_used(plan, used_positions.count, tokens)
        self.totals.plans_opened += 1
        self._apply(plan, PlanEvent.PREPARE_READY)
        self._promise(plan, blocks, tokens)
        self.commit(plan, tokens, now=now)
        self._end_load(plan, tokens, NO_RANGES)
        self._count_used(plan, used_positions)

    # Postpone and abort

    def postpone(self, plan: Plan[Lease, Slots], reason: EndReason) -> None:
        """The engine did not take the match in this step and may prepare it again: state and leases stay as they are.

        The plan ends with the last such `reason`: after `postponed_steps` steps without a prepare, or when its slots
        are needed (`yielding_plans`). A plan that is loading was taken and cannot be postponed.
        """
        self._require(plan, PlanEvent.ABORT)
        plan.postponed = reason

    def yielding_plans(self, may_yield: Callable[[Plan[Lease, Slots]], bool]) -> list[Plan[Lease, Slots]]:
        """The plans that may end now for others: not prepared in this step and postponed, or chosen by `may_yield`.

        It chooses among those that promise nothing. Longest ago prepared come first, a step's last before its first.
        """
        not_asked = (plan for plan in self._open.values() if plan.renewed_step < self.step)
        found = [
            plan for plan in not_asked if (may_yield(plan) if plan.state is PlanState.PENDING else plan.is_postponed)
        ]
        return sorted(found, key=lambda plan: (plan.renewed_step, -plan.renewed_at))

    def make_room(
        self, room: Callable[[], int], wanted: int, may_yield: Callable[[Plan[Lease, Slots]], bool] = lambda plan: False
    ) -> int:
        """Number of slots by `room`. If that is less than `wanted`, `yielding_plans` end, one by one, until it is not.

        Engines ask for their queue's head first: it gets room from those after it, and two never evict each other.
        """
        found = room()
        for plan in self.yielding_plans(may_yield) if found < wanted else ():
            if found < wanted:
                self._end_unused(plan, EndReason.YIELDED)
                found = room()
        return found

    def _end_unused(self, plan: Plan[Lease, Slots], reason: EndReason) -> None:
        self.abort(plan, plan.postponed or reason)
        if plan.postponed is not None and self.kept_waiting is not None:
            self.kept_waiting(plan.request_id)

    def end(self, request_id: str, reason: EndReason) -> None:
        """End the request's plan, if it has one that is not loading."""
        plan = self._open.get(request_id)
        if plan is not None and plan.state is not PlanState.LOADING:
            self.abort(plan, reason)

    def end_all(self, reason: EndReason) -> None:
        """End every plan that is not loading."""
        for request_id in [*self._open]:
            self.end(request_id, reason)

    def abort(self, plan: Plan[Lease, Slots], reason: EndReason) -> None:
        """End a plan that is not loading yet and release its leases. A plan that is loading can only be settled."""
        self._abort(plan, reason)
        self._hold(plan, ())

    def expire(self, now: float) -> list[Plan[Lease, Slots]]:
        """Call once per scheduler step, at its end: abort and return the plans whose lifetime is over."""
        self.step += 1
        stale = [
            plan for plan in self._open.values() if plan.state is not PlanState.LOADING and self._is_stale(plan, now)
        ]
        for plan in stale:
            self._end_unused(plan, EndReason.NOT_RENEWED)
        return stale

    def _is_stale(self, plan: Plan[Lease, Slots], now: float) -> bool:
        steps = self.step - plan.renewed_step
        if plan.postponed is not None:
            return steps > self.postponed_steps
        return steps > self.plan_lifetime_steps and now - plan.renewed_at > self.plan_lifetime_seconds

    def finish_request(self, request_id: str) -> Plan[Lease, Slots] | None:
        """The request has finished. Returns its open plan, aborted, or unchanged if it is loading.

        Loaded tokens whose use was not reported count as not used. After the last settlement nothing is kept of the
        request but the bounded history.
        """
        settled = self._awaiting_use.get(request_id)
        if settled is not None:
            self.use(settled, 0)
        plan = self._open.get(request_id)
        if plan is not None:
            plan.request_finished = True
            if plan.state is PlanState.LOADING:
                return plan
            self.abort(plan, EndReason.REQUEST_FINISHED)
        self._used_positions.pop(request_id, None)
        return plan

    # Accounts

    @property
    def known_requests(self) -> set[str]:
        """Requests with state besides the history."""
        return {*self._open, *self._awaiting_use, *self._used_positions}

    def explain(self, request_id: str) -> list[PlanRecord]:
        """A request's plans as far as they are kept, oldest first."""
        past = [record for record in self.history if record.request_id == kept_id(request_id)]
        present = (self._awaiting_use.get(request_id), self._open.get(request_id))
        return past + [plan.record() for plan in present if plan is not None]

    def check(self) -> None:
        """Verify all invariants of the plans (P1, P7, P12); raises PactViolation naming the first broken one."""
        for request_id, plan in self._open.items():
            promised = (plan.promised_tokens > 0) == (plan.state is not PlanState.PENDING)
            committed = (plan.committed_tokens > 0) == (plan.state is PlanState.LOADING)
            if not (plan.is_open and promised and committed and plan.request_id == request_id):
                raise PactViolation(f"request {request_id}: kept as open and in disorder: {plan.record()}")
        for request_id, plan in self._awaiting_use.items():
            if plan.is_open or plan.leases or plan.request_finished or plan.request_id != request_id:
                raise PactViolation(f"request {request_id}: kept as settled and in disorder: {plan.record()}")
        for plan in (*self._open.values(), *self._awaiting_use.values()):
            used = plan.used_tokens + plan.used_again_tokens
            if not plan.promised_tokens >= plan.committed_tokens >= plan.loaded_tokens >= used >= 0:
                raise PactViolation(f"request {plan.request_id}: its counts do not fall: {plan.record()}")
        plans = self._open.values()
        self.totals.check(
            planned=sum(plan.promised_tokens for plan in plans if plan.state is PlanState.PLANNED),
            loading=sum(plan.committed_tokens for plan in plans if plan.state is PlanState.LOADING),
            plans=len(plans),
            leases=sum(len(plan.leases) for plan in plans),
        )

    # The one place where a state changes

    def _apply(self, plan: Plan[Lease, Slots], event: PlanEvent) -> None:
        plan.state = self._require(plan, event)

    def _require(self, plan: Plan[Lease, Slots], event: PlanEvent) -> PlanState:
        to = TRANSITIONS.get((plan.state, event))
        if to is None:
            raise plan.refusal(event)
        return to

    def _promise(self, plan: Plan[Lease, Slots], blocks: BlockRange, tokens: int) -> None:
        plan.blocks = blocks
        plan.promised_tokens = tokens
        self.totals.promised_tokens += tokens

    def _abort(self, plan: Plan[Lease, Slots], reason: EndReason) -> None:
        self._apply(plan, PlanEvent.ABORT)
        plan.reason = reason
        del self._open[plan.request_id]
        self.totals.withdrawn_tokens += plan.promised_tokens
        self.totals.ended[reason] += 1
        self._remember(plan)

    def _remember(self, plan: Plan[Lease, Slots]) -> None:
        self.history.append(plan.record())
        if self.note_ended is not None:
            self.note_ended(plan)

    def _hold(self, plan: Plan[Lease, Slots], leases: Iterable[Lease]) -> None:
        """Let the plan hold exactly `leases`; release its other ones."""
        before = plan.leases
        plan.leases = list(leases)
        taken = list(plan.leases)
        given_back = []
        for lease in before:
            if lease in taken:
                taken.remove(lease)
            else:
                given_back.append(lease)
        self.totals.leases_taken += len(taken)
        if given_back:
            self._give_back(given_back)

    def _give_back(self, leases: list[Lease]) -> None:
        try:
            while leases:
                lease = leases.pop()
                self.totals.leases_released += 1
                self.release(lease)
        finally:
            if leases:  # A release that raises does not prevent the others.
                self._give_back(leases)


def _require_promise(plan: Plan[Lease, Slots], blocks: BlockRange, tokens: int) -> None:
    most = blocks.count * plan.block_size
    if not max(0, most - plan.block_size) < tokens <= most:
        raise PactViolation(
            f"request {plan.request_id}: {tokens} tokens promised in {blocks.count} blocks of {plan.block_size}; "
            "a promise is at least 1 token and ends in the last block of its match"
        )


def _require_used(plan: Plan[Lease, Slots], tokens: int, loaded: int) -> None:
    if not 0 <= tokens <= loaded:
        raise PactViolation(f"request {plan.request_id}: {tokens} tokens used; it can be 0 to the {loaded} loaded")
