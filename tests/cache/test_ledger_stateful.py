"""The ledger under any order of events: nothing leaks, nothing is released twice, the counts agree after each step."""

from __future__ import annotations

from collections import Counter
from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpact.cache.ledger import Ledger
from kvpact.cache.plan import ENDINGS, Plan, PlanState
from kvpact.contract import ExternalMatchExit
from kvpact.metrics import EndReason
from kvpact.ranges import BlockRange, RangeSet

BLOCK_SIZE = 4
LIFETIME_SECONDS = 3.0
POSTPONED_STEPS = 4
REQUESTS = st.sampled_from(["a", "b", "c", "d"])
STARTS = st.integers(0, 3)
COUNTS = st.integers(1, 6)
LESS_TOKENS = st.integers(0, BLOCK_SIZE - 1)
EXITS = st.sampled_from([EndReason(reason) for reason in ExternalMatchExit if not reason.is_dropped])
REASONS = st.sampled_from([reason for reason in EndReason if reason not in (EndReason.LOADED, EndReason.SHORT)])


class LedgerMachine(RuleBasedStateMachine):
    """An engine that does anything the table allows, and a store that knows how often each of its blocks is held."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Counter[int] = Counter()
        self.now = 0.0
        self.seen: list[Plan[int, None]] = []
        self.used_by: dict[str, set[int]] = {}
        self.used = self.used_again = self.found = 0
        self.ledger = Ledger[int, None](
            self.release, plan_lifetime_seconds=LIFETIME_SECONDS, postponed_steps=POSTPONED_STEPS
        )

    def release(self, block: int) -> None:
        assert self.held[block] > 0, f"block {block} is released and not held"
        self.held[block] -= 1

    def acquire(self, blocks: BlockRange, already: list[int]) -> list[int]:
        """Hold `blocks`, taking over the holds in `already`."""
        self.held.update(set(blocks) - set(already))
        return list(blocks)

    def plans(self, *states: PlanState) -> list[Plan[int, None]]:
        return [plan for plan in self.ledger.open_plans() if plan.state in states]

    @rule(request=REQUESTS, start=STARTS, count=COUNTS, less=LESS_TOKENS, ready=st.booleans())
    def prepare(self, request: str, start: int, count: int, less: int, ready: bool) -> None:
        blocks, open_plan = BlockRange(start, count), self.ledger.find(request)
        if open_plan is not None and open_plan.state is PlanState.LOADING:
            return
        if open_plan is not None and open_plan.blocks == blocks:
            self.ledger.renew(open_plan, self.now)
            return
        plan = self.ledger.open_plan(
            request,
            blocks,
            block_size=BLOCK_SIZE,
            slots=None,
            now=self.now,
            leases=self.acquire(blocks, open_plan.leases if open_plan is not None else []),
            promised_tokens=count * BLOCK_SIZE - less if ready else 0,
        )
        self.seen.append(plan)
        assert plan.state is (PlanState.PLANNED if ready else PlanState.PENDING)
        assert open_plan is None or open_plan.reason is EndReason.SUPERSEDED

    @precondition(lambda self: self.plans(PlanState.PENDING))
    @rule(data=st.data(), less=LESS_TOKENS)
    def staged(self, data: st.DataObject, less: int) -> None:
        plan = data.draw(st.sampled_from(self.plans(PlanState.PENDING)))
        blocks = BlockRange(plan.blocks.start, data.draw(st.integers(1, plan.blocks.count)))
        tokens = blocks.count * BLOCK_SIZE - less
        self.ledger.ready(plan, promised_tokens=tokens, leases=list(blocks), now=self.now, blocks=blocks)

    @precondition(lambda self: self.plans(PlanState.PLANNED))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        plan = data.draw(st.sampled_from(self.plans(PlanState.PLANNED)))
        tokens = data.draw(st.integers(0, plan.promised_tokens))
        keep = plan.leases[: -(-tokens // BLOCK_SIZE)]
        self.ledger.commit(plan, tokens, now=self.now, keep=keep, deadline=self.now + 2)
        assert plan.state is (PlanState.LOADING if tokens else PlanState.ABORTED)
        assert plan.leases == keep

    @precondition(lambda self: self.plans(PlanState.LOADING))
    @rule(data=st.data(), ran=st.booleans())
    def report(self, data: st.DataObject, ran: bool) -> None:
        plan = data.draw(st.sampled_from(self.plans(PlanState.LOADING)))
        blocks = plan.committed_blocks
        lost = data.draw(st.lists(st.sampled_from(list(blocks)), max_size=2))
        failed = RangeSet.of(*(BlockRange(block, 1) for block in lost))
        loaded = RangeSet.of(blocks).difference(failed)
        positions = [
            position
            for block in loaded.blocks()
            for position in range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
            if position < blocks.start * BLOCK_SIZE + plan.committed_tokens
        ]
        used = data.draw(st.integers(0, len(positions))) if ran else None
        self.ledger.settle(plan, loaded=loaded, failed=failed, used_tokens=used)
        assert plan.state is (PlanState.SHORT if lost else PlanState.LOADED)
        assert plan.loaded_tokens == len(positions)
        if used is not None:
            self.count_used(plan, used)
        if plan.request_finished:
            self.used_by.pop(plan.request_id, None)

    @rule(request=REQUESTS, data=st.data())
    def run(self, request: str, data: st.DataObject) -> None:
        plan = self.ledger.find_settled(request)
        if plan is not None:
            used = data.draw(st.integers(0, plan.loaded_tokens))
            self.ledger.use(plan, used)
            self.count_used(plan, used)

    @rule(request=REQUESTS, start=st.integers(0, 6), count=st.integers(1, 4), skip=LESS_TOKENS, gone=st.booleans())
    def found_at_step(self, request: str, start: int, count: int, skip: int, gone: bool) -> None:
        blocks = BlockRange(start, count)
        used = BlockRange(start * BLOCK_SIZE + skip, count * BLOCK_SIZE - skip)
        gone = gone and self.ledger.find(request) is None and self.ledger.find_settled(request) is None
        self.ledger.note_step_match(
            request, blocks, used, block_size=BLOCK_SIZE, slots=None, now=self.now, request_finished=gone
        )
        self.found += 1
        self.count_positions(request, used)
        if gone:
            self.used_by.pop(request, None)

    def count_used(self, plan: Plan[int, None], tokens: int) -> None:
        self.count_positions(plan.request_id, BlockRange(plan.blocks.start * BLOCK_SIZE, tokens))

    def count_positions(self, request: str, positions: BlockRange) -> None:
        before, now = self.used_by.setdefault(request, set()), set(positions)
        again = before & now
        before.update(now)
        self.used += len(now) - len(again)
        self.used_again += len(again)

    @precondition(lambda self: self.plans(PlanState.PENDING, PlanState.PLANNED))
    @rule(data=st.data(), reason=REASONS)
    def abort(self, data: st.DataObject, reason: EndReason) -> None:
        plan = data.draw(st.sampled_from(self.plans(PlanState.PENDING, PlanState.PLANNED)))
        self.ledger.abort(plan, reason)
        assert (plan.state, plan.reason, plan.leases) == (PlanState.ABORTED, reason, [])

    @precondition(lambda self: self.plans(PlanState.PENDING, PlanState.PLANNED))
    @rule(data=st.data(), reason=EXITS)
    def postpone(self, data: st.DataObject, reason: EndReason) -> None:
        plan = data.draw(st.sampled_from(self.plans(PlanState.PENDING, PlanState.PLANNED)))
        before = plan.state, list(plan.leases)
        self.ledger.postpone(plan, reason)
        assert (plan.state, plan.leases, plan.postponed) == (*before, reason)

    @rule(wanted=st.integers(1, 3))
    def make_room(self, wanted: int) -> None:
        asked_now = [plan for plan in self.plans(PlanState.PLANNED) if plan.renewed_step == self.ledger.step]
        rooms = iter(range(wanted))
        chosen = self.ledger.yielding_plans(lambda plan: True)[: wanted - 1]
        assert all(plan.state is PlanState.PENDING or plan.postponed for plan in chosen)
        self.ledger.make_room(lambda: next(rooms, wanted), wanted - 1, lambda plan: True)
        assert not any(plan.is_open for plan in chosen)
        assert all(plan.is_open for plan in asked_now)

    @rule(request=REQUESTS)
    def finish(self, request: str) -> None:
        plan = self.ledger.finish_request(request)
        if plan is None or plan.state is not PlanState.LOADING:
            assert self.ledger.find(request) is None
            self.used_by.pop(request, None)
        assert self.ledger.find_settled(request) is None

    @rule(seconds=st.floats(0, 2))
    def step(self, seconds: float) -> None:
        self.now += seconds
        assert all(plan.deadline == inf for plan in self.ledger.open_plans() if plan.state is not PlanState.LOADING)
        for plan in self.ledger.expire(self.now):
            steps = self.ledger.step - plan.renewed_step
            assert plan.reason is (plan.postponed or EndReason.NOT_RENEWED)
            assert steps > POSTPONED_STEPS if plan.postponed else self.now - plan.renewed_at > LIFETIME_SECONDS
        for plan in self.plans(PlanState.PENDING, PlanState.PLANNED):
            assert plan.postponed is None or self.ledger.step - plan.renewed_step <= POSTPONED_STEPS

    @invariant()
    def accounts_agree(self) -> None:
        self.ledger.check()
        assert self.held.total() == self.ledger.totals.leases_held
        with_plans = {plan.request_id for plan in self.seen if plan is self.ledger.find_settled(plan.request_id)}
        with_plans |= {plan.request_id for plan in self.ledger.open_plans()}
        assert self.ledger.known_requests == with_plans | {name for name, used in self.used_by.items() if used}
        assert self.ledger.totals.used_tokens == self.used
        assert self.ledger.totals.used_again_tokens == self.used_again
        for plan in self.seen:
            assert plan.is_open == (self.ledger.find(plan.request_id) is plan)
            assert plan.is_open or (plan.state in ENDINGS and plan.reason is not None and not plan.leases)

    def teardown(self) -> None:
        for plan in self.plans(PlanState.PENDING, PlanState.PLANNED):
            self.ledger.abort(plan, EndReason.SHUTDOWN)
        for plan in self.plans(PlanState.LOADING):
            self.ledger.settle(plan, loaded=RangeSet(), failed=RangeSet.of(plan.committed_blocks))
        for request in "abcd":
            self.ledger.finish_request(request)
        self.ledger.check()
        assert self.held.total() == self.ledger.totals.leases_held == 0
        assert not self.ledger.known_requests
        assert self.ledger.totals.plans_opened == len(self.seen) + self.found == self.ledger.totals.ended.total()
        assert all(plan.state in ENDINGS for plan in self.seen)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
