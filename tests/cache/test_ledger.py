"""The ledger by example: the whole table, the hazards of the lifecycle, and the counts that must agree."""

from __future__ import annotations

import runpy
from collections import Counter
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpact.cache.ledger import HISTORY_LENGTH, Ledger
from kvpact.cache.plan import ENDINGS, TRANSITIONS, Plan, PlanEvent, PlanState
from kvpact.contract import POSTPONED_STEPS
from kvpact.errors import PactViolation
from kvpact.metrics import EndReason, Metrics
from kvpact.ranges import BlockRange, RangeSet

BLOCK_SIZE = 16
REPOSITORY = Path(__file__).parents[2]
lifecycle = SimpleNamespace(**runpy.run_path(str(REPOSITORY / "scripts" / "draw_lifecycle.py")))


class Scene:
    """A ledger over a counted store: every hold is acquired and released here, as a cache would do it."""

    def __init__(self, **lifetimes: float) -> None:
        self.held: Counter[str] = Counter()
        self.acquired = 0
        self.now = 0.0
        self.ledger = Ledger[str, str](self.release, plan_lifetime_seconds=lifetimes.get("seconds", 5.0))

    def acquire(self, *names: str) -> list[str]:
        self.held.update(names)
        self.acquired += len(names)
        return list(names)

    def release(self, name: str) -> None:
        assert self.held[name] > 0, f"{name} is released and not held"
        self.held[name] -= 1

    def plan(self, request_id: str = "r", start: int = 0, count: int = 10, *, ready: bool = True) -> Plan[str, str]:
        return self.ledger.open_plan(
            request_id,
            BlockRange(start, count),
            block_size=BLOCK_SIZE,
            slots="",
            now=self.now,
            leases=self.acquire(*(f"{request_id}:{block}" for block in range(start, start + count))),
            promised_tokens=count * BLOCK_SIZE if ready else 0,
        )

    def loading(self, request_id: str = "r", count: int = 10) -> Plan[str, str]:
        plan = self.plan(request_id, count=count)
        self.ledger.commit(plan, count * BLOCK_SIZE, now=self.now)
        return plan

    def settled(self, request_id: str = "r", count: int = 10, *, failed: RangeSet | None = None) -> Plan[str, str]:
        plan = self.loading(request_id, count)
        failed = failed or RangeSet()
        self.ledger.settle(plan, loaded=RangeSet.span(0, count).difference(failed), failed=failed)
        return plan

    @property
    def number_held(self) -> int:
        self.ledger.check()
        assert self.held.total() == self.ledger.totals.leases_held
        return self.held.total()


def drive(scene: Scene, plan: Plan[str, str], event: PlanEvent) -> None:
    """Send `event` through the public method that it belongs to."""
    ledger, whole = scene.ledger, RangeSet.of(plan.committed_blocks)
    if event in (PlanEvent.PREPARE_READY, PlanEvent.PREPARE_LATER):
        ledger.ready(plan, promised_tokens=plan.blocks.count * BLOCK_SIZE, leases=plan.leases, now=0)
    elif event is PlanEvent.RENEW:
        ledger.renew(plan, 1)
    elif event is PlanEvent.COMMIT:
        ledger.commit(plan, 16, now=1)
    elif event is PlanEvent.ABORT:
        ledger.abort(plan, EndReason.DEADLINE)
    elif event is PlanEvent.ARRIVED:
        ledger.settle(plan, loaded=whole, failed=RangeSet())
    else:
        ledger.settle(plan, loaded=RangeSet(), failed=whole or RangeSet.span(0, 1))


def in_state(scene: Scene, state: PlanState) -> Plan[str, str]:
    """A plan that was brought to `state` by events alone."""
    if state is PlanState.PENDING:
        return scene.plan(ready=False)
    if state is PlanState.LOADING:
        return scene.loading()
    if state is PlanState.LOADED:
        return scene.settled()
    if state is PlanState.SHORT:
        return scene.settled(failed=RangeSet.span(3, 4))
    plan = scene.plan()
    if state is PlanState.ABORTED:
        scene.ledger.abort(plan, EndReason.DECLINED)
    return plan


@pytest.mark.parametrize("event", PlanEvent)
@pytest.mark.parametrize("state", [state for state in PlanState if state is not PlanState.NONE])
def test_every_event_in_every_state_does_what_the_table_says(state: PlanState, event: PlanEvent) -> None:
    scene = Scene()
    plan = in_state(scene, state)
    assert plan.state is state
    if event is PlanEvent.PREPARE_LATER:  # Opens plans only; on an open one it is a renewal.
        assert (state, event) not in TRANSITIONS
        return
    expected = TRANSITIONS.get((state, event))
    if expected is None:
        before = scene.number_held
        with pytest.raises(PactViolation) as error:
            drive(scene, plan, event)
        for named in ("request r", event.name, f"state {state}"):
            assert named in str(error.value)
        allowed = [known.name for origin, known in TRANSITIONS if origin is state]
        assert str(error.value).endswith(", ".join(allowed) if allowed else "nothing, the plan has ended")
        assert plan.state is state
        assert scene.number_held == before
    else:
        drive(scene, plan, event)
        assert plan.state is expected
        assert bool(scene.number_held) == (expected not in ENDINGS)


@pytest.mark.parametrize("event", PlanEvent)
def test_only_a_prepare_begins_a_plan(event: PlanEvent) -> None:
    opens = {PlanEvent.PREPARE_LATER: PlanState.PENDING, PlanEvent.PREPARE_READY: PlanState.PLANNED}
    assert TRANSITIONS.get((PlanState.NONE, event)) == opens.get(event)
    if event in opens:
        assert Scene().plan(ready=event is PlanEvent.PREPARE_READY).state is opens[event]


def test_every_state_can_be_reached_and_left_unless_it_is_an_ending() -> None:
    assert set(TRANSITIONS.values()) == set(PlanState) - {PlanState.NONE}
    assert {state for state, _ in TRANSITIONS} == set(PlanState) - ENDINGS


def test_the_picture_in_the_documentation_is_drawn_from_the_table() -> None:
    text = (REPOSITORY / "docs/lifecycle.md").read_text(encoding="utf-8")
    assert lifecycle.redraw(text) == text
    assert f"{lifecycle.BEGIN}\n{lifecycle.diagram()}\n{lifecycle.END}" in text


def test_the_picture_shows_every_transition() -> None:
    assert lifecycle.diagram().count("-->") == len(TRANSITIONS) + len(ENDINGS)
    with pytest.raises(ValueError, match="lifecycle:begin"):
        lifecycle.redraw("no place")


def test_h01_976_probes_without_a_commit_hold_one_set_of_leases_and_leave_none() -> None:
    scene = Scene()
    for number in range(40):
        plan = scene.plan(f"r{number}")
        for _ in range(24):
            probed = scene.ledger.find(f"r{number}")
            assert probed is plan
            scene.ledger.renew(plan, scene.now)
            scene.ledger.expire(scene.now)
            scene.now += 1
            assert scene.number_held == 10
        assert scene.ledger.finish_request(f"r{number}") is plan
        assert plan.state is PlanState.ABORTED
        assert scene.number_held == 0
    assert scene.acquired == 400
    assert scene.ledger.totals.promised_tokens == 40 * 160
    assert not scene.ledger.open_plans()


def test_a_plan_that_is_not_asked_for_any_more_expires_only_after_time_and_steps() -> None:
    scene = Scene(seconds=5)
    silent, asked, loading = scene.plan("silent"), scene.plan("asked"), scene.loading("loading")
    assert scene.ledger.expire(now=100) == []  # One very long step.
    scene.ledger.renew(asked, 100)
    assert scene.ledger.expire(now=100) == []
    assert scene.ledger.expire(now=100) == [silent]
    assert (silent.state, silent.reason) == (PlanState.ABORTED, EndReason.NOT_RENEWED)
    for _ in range(9):
        assert scene.ledger.expire(now=105) == []  # Many very short steps.
    assert scene.ledger.expire(now=105.1) == [asked]
    assert loading.state is PlanState.LOADING
    assert scene.number_held == 10


def test_a_postponed_plan_keeps_its_state_and_ends_with_the_last_reason_after_some_steps() -> None:
    scene = Scene()
    plan = scene.plan()
    for step in range(3 * POSTPONED_STEPS):  # asked for in each step: it never ends
        scene.ledger.renew(plan, scene.now)
        scene.ledger.postpone(plan, EndReason.NO_BLOCKS)
        assert scene.ledger.expire(scene.now) == [], step
    for reason in [EndReason.NOT_REACHED] * (POSTPONED_STEPS - 1):
        scene.ledger.postpone(plan, reason)
        assert scene.ledger.expire(scene.now) == []
    assert (plan.state, scene.number_held) == (PlanState.PLANNED, 10)
    scene.ledger.postpone(plan, EndReason.LORA_LIMIT)
    assert scene.ledger.expire(scene.now) == [plan]
    assert (plan.state, plan.reason, scene.number_held) == (PlanState.ABORTED, EndReason.LORA_LIMIT, 0)
    assert scene.ledger.totals.ended == {EndReason.LORA_LIMIT: 1}


def test_a_prepare_takes_the_postponement_back() -> None:
    scene = Scene()
    plan = scene.plan()
    scene.ledger.postpone(plan, EndReason.NO_BLOCKS)
    scene.ledger.renew(plan, scene.now)
    for _ in range(3 * POSTPONED_STEPS):  # the engine says nothing more: seconds and steps decide
        assert scene.ledger.expire(scene.now) == []
    scene.now += 6
    assert scene.ledger.expire(scene.now) == [plan]
    assert plan.reason is EndReason.NOT_RENEWED


@pytest.mark.parametrize("state", [PlanState.LOADING, *sorted(ENDINGS)])
def test_a_plan_that_was_taken_or_has_ended_cannot_be_postponed(state: PlanState) -> None:
    scene = Scene()
    plan = in_state(scene, state)
    with pytest.raises(PactViolation, match=f"request r: ABORT in state {state}"):
        scene.ledger.postpone(plan, EndReason.BUDGET)
    assert plan.postponed is None


def test_postponed_promises_that_were_not_asked_for_again_may_end_for_others_those_of_long_ago_first() -> None:
    scene = Scene()
    plans = {name: scene.plan(name, count=1) for name in ("long ago", "first", "second", "loading", "silent", "head")}
    reading = scene.plan("reading", ready=False)
    scene.ledger.expire(scene.now)
    for name in ("first", "second", "loading", "silent", "head"):
        scene.now += 1
        scene.ledger.renew(plans[name], scene.now)
    for plan in (*plans.values(), reading):
        if plan is not plans["silent"]:
            scene.ledger.postpone(plan, EndReason.NOT_REACHED)
    scene.ledger.commit(plans["loading"], 16, now=scene.now)
    scene.ledger.expire(scene.now)
    scene.ledger.renew(plans["head"], scene.now)
    scene.ledger.postpone(plans["head"], EndReason.NO_BLOCKS)
    assert scene.ledger.yielding_plans(lambda plan: False) == [plans[name] for name in ("long ago", "second", "first")]
    assert scene.ledger.yielding_plans(lambda plan: plan is reading)[:2] == [plans["long ago"], reading]


def test_h03_a_changed_range_supersedes_the_plan_and_shared_leases_move_over() -> None:
    scene = Scene()
    old = scene.plan(start=3, count=9)  # 48 tokens are held by the engine itself, 144 are offered.
    kept = [lease for lease in old.leases if int(lease.split(":")[1]) >= 7]
    new = scene.ledger.open_plan(
        "r", BlockRange(7, 5), block_size=BLOCK_SIZE, slots="", now=1, leases=kept, promised_tokens=80
    )  # 112 and 80.
    assert (old.state, old.reason, old.leases) == (PlanState.ABORTED, EndReason.SUPERSEDED, [])
    assert scene.ledger.find("r") is new
    assert scene.number_held == 5
    assert scene.acquired == 9
    with pytest.raises(PactViolation):
        scene.ledger.commit(old, 80, now=1)
    scene.ledger.commit(new, 80, now=1)
    assert new.committed_blocks == BlockRange(7, 5)


def test_a_plan_that_is_loading_cannot_be_superseded() -> None:
    scene = Scene()
    scene.loading()
    with pytest.raises(PactViolation, match="ARRIVED, FELL_SHORT"):
        scene.ledger.open_plan("r", BlockRange(0, 1), block_size=BLOCK_SIZE, slots="", now=0, promised_tokens=16)
    assert scene.number_held == 10


@pytest.mark.parametrize(("tokens", "kept"), [(0, 0), (1, 1), (100, 7), (112, 7), (160, 10)])
def test_h04_a_smaller_commit_releases_the_leases_on_the_rest_at_once(tokens: int, kept: int) -> None:
    scene = Scene()
    plan = scene.plan()
    scene.ledger.commit(plan, tokens, now=0, keep=plan.leases[:kept])
    assert scene.number_held == kept
    assert scene.ledger.totals.withdrawn_tokens == 160 - tokens
    if tokens == 0:
        assert (plan.state, plan.reason) == (PlanState.ABORTED, EndReason.DECLINED)
    else:
        assert plan.committed_blocks == BlockRange(0, kept)
        scene.ledger.settle(plan, loaded=RangeSet.span(0, kept), failed=RangeSet())
        assert plan.loaded_tokens == tokens
        assert scene.number_held == 0


def test_a_commit_may_swap_one_hold_for_another() -> None:
    """One pin on the last block holds a whole chain, so a shorter match needs another pin before the first one goes."""
    scene = Scene()
    plan = scene.ledger.open_plan(
        "r", BlockRange(0, 10), block_size=16, slots="", now=0, leases=scene.acquire("tail 9"), promised_tokens=160
    )
    scene.ledger.commit(plan, 64, now=0, keep=scene.acquire("tail 3"))
    assert plan.leases == ["tail 3"]
    assert (scene.held["tail 9"], scene.number_held) == (0, 1)


@pytest.mark.parametrize("tokens", [161, 176, -1])
def test_more_than_was_promised_cannot_be_committed(tokens: int) -> None:
    scene = Scene()
    plan = scene.plan()
    with pytest.raises(PactViolation, match=f"{tokens} tokens committed, 160 promised"):
        scene.ledger.commit(plan, tokens, now=0)
    assert plan.state is PlanState.PLANNED


@pytest.mark.parametrize("tokens", [-16, 144, 161])
def test_a_promise_ends_in_the_last_block_of_its_match(tokens: int) -> None:
    with pytest.raises(PactViolation, match=f"{tokens} tokens promised in 10 blocks of 16"):
        Scene().ledger.open_plan("r", BlockRange(0, 10), block_size=16, slots="", now=0, promised_tokens=tokens)


def test_a_plan_that_waits_only_for_the_engine_has_no_deadline() -> None:
    scene = Scene()
    ready = scene.ledger.open_plan("r", BlockRange(0, 1), block_size=16, slots="", now=0, promised_tokens=16)
    staged = scene.ledger.open_plan("s", BlockRange(0, 1), block_size=16, slots="", now=0)
    scene.ledger.ready(staged, promised_tokens=16, leases=[], now=0)
    assert {ready.deadline, staged.deadline} == {inf}
    assert {ready.state, staged.state} == {PlanState.PLANNED}


def test_staging_may_end_with_less_than_was_asked_for() -> None:
    scene = Scene()
    plan = scene.plan(ready=False)
    assert scene.ledger.totals.promised_tokens == 0
    scene.ledger.ready(plan, promised_tokens=48, leases=plan.leases[:3], now=2, blocks=BlockRange(0, 3))
    assert (plan.state, plan.blocks, plan.promised_tokens) == (PlanState.PLANNED, BlockRange(0, 3), 48)
    assert scene.number_held == 3


@pytest.mark.parametrize(
    ("loaded", "failed"),
    [
        (RangeSet.span(0, 9), RangeSet()),
        (RangeSet.span(0, 9), RangeSet.span(8, 10)),
        (RangeSet.span(0, 11), RangeSet()),
        (RangeSet(), RangeSet.span(0, 9)),
    ],
)
def test_reports_that_do_not_make_up_the_commit_are_refused(loaded: RangeSet, failed: RangeSet) -> None:
    scene = Scene()
    plan = scene.loading()
    with pytest.raises(PactViolation, match="exactly one of the two"):
        scene.ledger.settle(plan, loaded=loaded, failed=failed)
    assert plan.state is PlanState.LOADING
    assert scene.number_held == 10


def test_a_load_that_ends_inside_a_block_is_counted_to_the_token() -> None:
    scene = Scene()
    plan = scene.plan()
    scene.ledger.commit(plan, 100, now=0, keep=plan.leases[:7])
    scene.ledger.settle(plan, loaded=RangeSet.span(0, 2), failed=RangeSet.span(2, 7), used_tokens=32)
    assert (scene.ledger.totals.loaded_tokens, scene.ledger.totals.failed_tokens) == (32, 68)
    plan = scene.plan("s")
    scene.ledger.commit(plan, 100, now=0, keep=plan.leases[:7])
    scene.ledger.settle(plan, loaded=RangeSet.span(4, 7), failed=RangeSet.span(0, 4))
    assert plan.loaded_tokens == 36
    assert scene.number_held == 0


def test_h70_a_hit_is_counted_when_it_is_used_and_not_when_it_is_promised() -> None:
    scene = Scene()
    totals = scene.ledger.totals
    dropped, cancelled = scene.plan("dropped"), scene.loading("cancelled")
    assert totals.used_tokens == 0
    scene.ledger.finish_request("dropped")
    assert scene.ledger.finish_request("cancelled") is cancelled
    scene.ledger.settle(cancelled, loaded=RangeSet.span(0, 10), failed=RangeSet())
    assert (totals.promised_tokens, totals.loaded_tokens, totals.used_tokens) == (320, 160, 0)
    settled = scene.settled("settled")
    assert totals.used_tokens == 0
    scene.ledger.use(settled, 160)
    assert totals.used_tokens == 160
    with pytest.raises(PactViolation, match="said once"):
        scene.ledger.use(settled, 160)
    assert dropped.used_tokens == 0
    assert scene.number_held == 0


def test_h70_a_preempted_request_does_not_use_the_same_tokens_twice() -> None:
    scene = Scene()
    scene.ledger.use(scene.settled(count=8), 128)
    scene.ledger.use(scene.settled(count=10), 160)
    totals = scene.ledger.totals
    assert (totals.used_tokens, totals.used_again_tokens) == (160, 128)
    scene.ledger.finish_request("r")
    scene.ledger.use(scene.settled(count=8), 128)  # Another request of the same name.
    assert (totals.used_tokens, totals.used_again_tokens) == (288, 128)
    scene.ledger.check()


def test_h70_a_request_preempted_between_its_load_and_its_run_used_nothing() -> None:
    scene = Scene()
    first = scene.settled()
    second = scene.settled()
    assert scene.ledger.find_settled("r") is second
    assert [(record.loaded_tokens, record.used_tokens) for record in scene.ledger.history] == [(160, 0)]
    with pytest.raises(PactViolation, match="said once"):
        scene.ledger.use(first, 160)
    scene.ledger.use(second, 160)
    assert scene.ledger.totals.used_again_tokens == 0


def test_a_request_that_finishes_in_the_step_of_its_load_still_counts_as_using_it() -> None:
    """vLLM says that a request has finished before it hands over the same step's worker report."""
    scene = Scene()
    plan = scene.loading()
    assert scene.ledger.finish_request("r") is plan
    scene.ledger.settle(plan, loaded=RangeSet.span(0, 10), failed=RangeSet(), used_tokens=160)
    assert scene.ledger.totals.used_tokens == 160
    assert scene.ledger.find_settled("r") is None


def test_nothing_is_kept_of_a_request_that_was_cancelled_during_its_second_load() -> None:
    scene = Scene()
    scene.ledger.use(scene.settled(), 160)
    again = scene.loading()
    scene.ledger.finish_request("r")
    scene.ledger.settle(again, loaded=RangeSet.span(0, 10), failed=RangeSet())
    assert not scene.ledger.known_requests


def test_more_than_was_loaded_cannot_be_used() -> None:
    scene = Scene()
    plan = scene.settled(failed=RangeSet.span(4, 10))
    with pytest.raises(PactViolation, match="65 tokens used; it can be 0 to the 64 loaded"):
        scene.ledger.use(plan, 65)
    scene.ledger.use(plan, 64)


def test_a_release_that_raises_does_not_keep_the_other_leases() -> None:
    released: list[int] = []

    def release(lease: int) -> None:
        released.append(lease)
        if lease == 2:
            raise OSError("gone")

    ledger = Ledger[int, None](release, plan_lifetime_seconds=1)
    plan = ledger.open_plan("r", BlockRange(0, 4), block_size=1, slots=None, now=0, leases=range(4), promised_tokens=4)
    with pytest.raises(OSError, match="gone"):
        ledger.abort(plan, EndReason.SHUTDOWN)
    assert sorted(released) == [0, 1, 2, 3]
    assert (plan.state, ledger.totals.leases_held) == (PlanState.ABORTED, 0)
    ledger.check()


def test_h51_ended_plans_leave_a_bounded_history_and_nothing_else() -> None:
    scene = Scene()
    for number in range(HISTORY_LENGTH + 50):
        scene.ledger.use(scene.settled(f"r{number}"), 160)
        scene.ledger.finish_request(f"r{number}")
    assert len(scene.ledger.history) == HISTORY_LENGTH
    assert scene.ledger.explain("r0") == []
    [record] = scene.ledger.explain(f"r{HISTORY_LENGTH}")
    assert (record.state, record.reason, record.used_tokens) == (PlanState.LOADED, EndReason.LOADED, 160)
    assert not scene.ledger.known_requests


def test_explain_shows_what_became_of_each_plan_of_a_request() -> None:
    scene = Scene()
    scene.plan()
    scene.plan(start=2, count=8)
    states = [(record.state, record.reason) for record in scene.ledger.explain("r")]
    assert states == [(PlanState.ABORTED, EndReason.SUPERSEDED), (PlanState.PLANNED, None)]


def test_totals_go_to_the_metrics_under_the_same_names() -> None:
    scene, metrics = Scene(), Metrics()
    scene.ledger.use(scene.settled(), 160)
    scene.ledger.commit(scene.plan("s"), 0, now=0)
    for name, total, label in scene.ledger.totals.counts():
        metrics.raise_to(name, total, label)
    metrics.check()
    shot = metrics.snapshot()
    assert (shot["promised_tokens"], shot["used_tokens"], shot["withdrawn_tokens"]) == (320, 160, 160)
    assert (shot['plans_ended{reason="loaded"}'], shot['plans_ended{reason="declined"}']) == (1, 1)


@pytest.mark.parametrize(
    "name", ["promised_tokens", "committed_tokens", "loaded_tokens", "used_tokens", "plans_opened", "leases_taken"]
)
def test_check_finds_a_total_that_does_not_add_up(name: str) -> None:
    scene = Scene()
    scene.settled()
    scene.plan("s")
    scene.ledger.check()
    setattr(scene.ledger.totals, name, getattr(scene.ledger.totals, name) + 1000)
    with pytest.raises(PactViolation):
        scene.ledger.check()


def test_check_finds_a_plan_whose_state_was_changed_by_somebody_else() -> None:
    scene = Scene()
    scene.plan().state = PlanState.LOADING
    with pytest.raises(PactViolation, match="in disorder"):
        scene.ledger.check()


def test_a_match_found_at_the_step_is_told_afterwards_and_disturbs_no_plan() -> None:
    scene = Scene()
    planned = scene.plan(start=0, count=4)
    positions = BlockRange(4 * BLOCK_SIZE + 3, 2 * BLOCK_SIZE - 4)

    def found(**changes: object) -> None:
        told = {"block_size": BLOCK_SIZE, "slots": "", "now": 1.0, "request_finished": False, **changes}
        scene.ledger.note_step_match("r", BlockRange(4, 2), positions, **told)  # type: ignore[arg-type]

    found()
    found()
    assert scene.ledger.find("r") is planned
    totals = scene.ledger.totals
    assert (totals.used_tokens, totals.used_again_tokens) == (positions.count, positions.count)
    assert totals.promised_tokens == 8 * BLOCK_SIZE
    assert totals.committed_tokens == totals.loaded_tokens == 4 * BLOCK_SIZE
    assert totals.ended == {EndReason.LOADED: 2}
    assert scene.number_held == 4
    with pytest.raises(PactViolation, match="tokens used"):
        scene.ledger.note_step_match(
            "r", BlockRange(0, 1), BlockRange(0, 17), block_size=16, slots="", now=1, request_finished=False
        )
    scene.ledger.finish_request("r")
    found(request_finished=True)
    assert not scene.ledger.known_requests, "nothing is kept of a request that is gone"
