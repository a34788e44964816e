"""Whatever form a connector has, whatever rule it breaks: a request has one open match at most, and each ends once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpact.contract import DROPPED, POSTPONED_STEPS, ExternalKVMatch, ExternalMatchExit
from kvpact.errors import ConfigError
from kvpact.matches.forms import MatchForm, form_of
from kvpact.matches.tracker import MatchTracker, OpenMatch

CANCELLED, DECLINED, SUPERSEDED = ExternalMatchExit.CANCELLED, ExternalMatchExit.DECLINED, ExternalMatchExit.SUPERSEDED
WITHDRAWN, REFUSED, NOT_RENEWED = ExternalMatchExit.WITHDRAWN, ExternalMatchExit.REFUSED, ExternalMatchExit.NOT_RENEWED
NO_BLOCKS = ExternalMatchExit.NO_BLOCKS

NOTHING = object()
"""The engine's blocks of a request that has none."""


@dataclass
class Asked:
    """A request, as far as connectors look at it."""

    request_id: str = "r"
    num_tokens: int = 1000


class Tuples:
    """The tuple API; `answers` are those of the lookups to come, the last one for ever."""

    def __init__(self, *answers: Any) -> None:
        self.answers = [*answers]
        self.heard: list[tuple[Any, ...]] = []

    def answer(self) -> Any:
        self.heard.append(("ask",))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return self.answer()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.heard.append(("update", blocks, num_external_tokens))


class Planned(Tuples):
    """Speaks the pact."""

    def prepare_external_match(self, request: Any, num_computed_tokens: int) -> Any:
        return self.answer()

    def commit_external_match(self, request: Any, match: Any, num_tokens: int, blocks: Any) -> int:
        self.heard.append(("commit", match, num_tokens))
        return num_tokens

    def abort_external_match(self, request: Any, match: Any, reason: ExternalMatchExit) -> None:
        self.heard.append(("abort", match, reason))


class ByRequest(Tuples):
    def abort_external_match(self, request: Any, reason: str) -> None:
        self.heard.append(("abort", reason))


def form(connector: Any) -> MatchForm:
    found = form_of(connector, NOTHING)
    assert found is not None
    return found


def tracker_of(connector: Any) -> MatchTracker:
    return MatchTracker(form(connector))


def blocked(found: OpenMatch, asked: bool) -> ExternalMatchExit:
    return NO_BLOCKS


# Forms


@pytest.mark.parametrize(
    ("abort", "said"),
    [
        (lambda told: lambda request: told.append(()), ()),
        (lambda told: lambda request, reason: told.append(reason), CANCELLED),
        (lambda told: lambda request, why: told.append(why), CANCELLED),
        (lambda told: lambda request, reason=None: told.append(reason), CANCELLED),
        (lambda told: lambda request, match: told.append(match), "lease"),
        (lambda told: lambda request, match, reason: told.append((match, reason)), ("lease", CANCELLED)),
        (lambda told: lambda *all_of_it: told.append(all_of_it[1:]), ("lease", CANCELLED)),
        (lambda told: partial(lambda note, *rest: note(rest[1:]), told.append), ("lease", CANCELLED)),
    ],
)
def test_an_abort_is_told_as_much_as_it_takes(abort: Callable[[list[Any]], Any], said: Any) -> None:
    """The first proposal's `abort_external_match(request)` ended in a TypeError, and its leases never."""
    told: list[Any] = []
    connector: Any = Tuples((16, False, "lease"))
    connector.abort_external_match = abort(told)
    connector.update_state_after_alloc = lambda request, blocks, num_tokens, query_result: None
    tracker = tracker_of(connector)
    assert tracker.prepare(Asked(), 0) == (16, False)
    tracker.requests_finished(["r"])
    assert told == [said]


def test_the_query_result_needs_no_default() -> None:
    """As the page gives it: the first admitted request without a match ended the engine with a TypeError."""

    class WithResult(Tuples):
        def update_state_after_alloc(self, request: Any, blocks: Any, num_tokens: int, query_result: object) -> None:  # type: ignore[override]
            self.heard.append((blocks, num_tokens, query_result))

    connector = WithResult((0, False, None), (32, False, "a lease"))
    tracker = tracker_of(connector)
    for asked in ("none", "some"):
        tokens, _ = tracker.prepare(Asked(asked), 0)
        tracker.commit(Asked(asked), "blocks", tokens or 0)
    tracker.prepare(Asked("gone"), 0)
    tracker.requests_finished(["gone"])
    said = [call for call in connector.heard if call != ("ask",)]
    assert said == [("blocks", 0, None), ("blocks", 32, "a lease"), (NOTHING, 0, "a lease")]


def test_a_commit_without_a_number_is_called_for_all_tokens_only() -> None:
    class Literal(Planned):
        def commit_external_match(self, request: Any, blocks: Any, plan: Any) -> None:  # type: ignore[override]
            self.heard.append(("commit", plan, blocks))

    plans = [SimpleNamespace(num_tokens=48, load_kv_async=True) for _ in range(2)]
    connector = Literal(*plans)
    tracker = tracker_of(connector)
    tracker.prepare(Asked("all"), 0)
    assert tracker.commit(Asked("all"), "blocks", 48) == 48
    tracker.prepare(Asked("fewer"), 0)
    assert tracker.commit(Asked("fewer"), "blocks", 32) == 0
    assert [call for call in connector.heard if call != ("ask",)] == [
        ("commit", plans[0], "blocks"),
        ("abort", plans[1], DECLINED),
    ]
    assert [short.missing for short in tracker.shortfalls] == [32]
    waits = MatchTracker(form(Literal(SimpleNamespace(num_tokens=48, load_kv_async=False))))
    waits.prepare(Asked(), 0)
    assert not waits.confirm(waits.open["r"], 32), "said before blocks are allocated, where the step waits for the load"
    assert waits.ends == {REFUSED: 1}


def test_hooks_of_the_tuple_api_get_its_query_result() -> None:
    class Hooked(Tuples):
        def update_state_after_alloc(self, request: Any, blocks: Any, num: int, query_result: object = None) -> None:
            pass

        def postpone_external_match(self, request: Any, match: Any, reason: str) -> None:
            self.heard.append((match, reason))

        def confirm_external_match(self, request: Any, match: Any, num_tokens: int) -> int:
            self.heard.append((match, num_tokens))
            return num_tokens

    connector = Hooked((32, False, "a lease"))
    tracker = tracker_of(connector)
    tracker.prepare(Asked(), 0)
    assert tracker.confirm(tracker.open["r"], 32)
    tracker.end_step(blocked)
    assert connector.heard[1:] == [("a lease", 32), ("a lease", NO_BLOCKS)]


def test_a_connector_without_the_pact_has_no_form() -> None:
    assert form_of(Tuples((16, False)), NOTHING) is None


def test_a_proxy_of_a_plain_connector_is_called_as_before() -> None:
    class Proxy(Tuples):
        def update_state_after_alloc(self, *everything: Any) -> None:
            super().update_state_after_alloc(*everything)

    connector = Proxy((16, False))
    tracker = tracker_of(connector)
    for _ in range(2):
        assert tracker.prepare(Asked(), 0) == (16, False)
    tracker.commit(Asked(), "blocks", 16)
    tracker.requests_finished(["r"])
    assert connector.heard == [("ask",), ("ask",), ("update", "blocks", 16)]


@pytest.mark.parametrize("method", ["commit_external_match", "abort_external_match", "postpone_external_match"])
def test_what_can_be_called_in_no_form_is_refused_by_name(method: str) -> None:
    connector = Planned((16, False))
    setattr(connector, method, lambda: None)
    with pytest.raises(ConfigError, match=rf"Planned.{method}\(\) is not called with that; it takes \(request, "):
        form_of(connector, NOTHING)


def test_a_connector_that_promises_and_cannot_end_is_refused() -> None:
    connector: Any = Tuples((16, False))
    connector.prepare_external_match = lambda request, num_computed_tokens: None
    with pytest.raises(ConfigError, match="no commit_external_match and no abort_external_match"):
        form_of(connector, NOTHING)


class Answers(Tuples):
    """Answers with the dataclass, as the mission has it."""

    def __init__(self, *answers: Any) -> None:
        super().__init__(*answers)
        self.said = list[Any]()


def fourth(connector: Answers) -> Any:
    return lambda request, blocks, num_external_tokens, query_result: connector.said.append(
        (blocks, num_external_tokens, query_result)
    )


def fourth_match(connector: Answers) -> Any:
    return lambda request, blocks, num_external_tokens, match: connector.said.append(
        (blocks, num_external_tokens, match)
    )


def third(connector: Answers) -> Any:
    return lambda request, blocks, query_result: connector.said.append((blocks, query_result))


def third_match(connector: Answers) -> Any:
    def update(request: Any, blocks: Any, found: ExternalKVMatch | None) -> None:
        connector.said.append((blocks, found))

    return update


MATCH = ExternalKVMatch(64, True, "a lease")


@pytest.mark.parametrize(
    ("update", "heard"),
    [
        (fourth, [("blocks", 64, "a lease"), (NOTHING, 0, "a lease"), ("blocks", 0, None)]),
        (fourth_match, [("blocks", 64, MATCH), (NOTHING, 0, MATCH), ("blocks", 0, None)]),
        (third, [("blocks", "a lease"), (NOTHING, "a lease"), ("blocks", None)]),
        (third_match, [("blocks", MATCH), (NOTHING, MATCH), ("blocks", None)]),
    ],
)
def test_a_lookup_that_returns_the_dataclass_is_taken_as_the_tuple_is(update: Any, heard: Any) -> None:
    """It ended the engine: cannot unpack non-iterable ExternalKVMatch object."""
    connector: Any = Answers(MATCH, MATCH, ExternalKVMatch(0), ExternalKVMatch(None))  # type: ignore[arg-type]
    connector.update_state_after_alloc = update(connector)
    tracker = tracker_of(connector)
    assert tracker.prepare(Asked("taken"), 0) == (64, True)
    assert tracker.commit(Asked("taken"), "blocks", 64) == 64
    assert tracker.prepare(Asked("gone"), 0) == (64, True)
    tracker.requests_finished(["gone"])
    assert tracker.prepare(Asked("none"), 0) == (0, False)
    tracker.commit(Asked("none"), "blocks", 0)
    assert tracker.prepare(Asked("later"), 0) == (None, False)
    assert connector.said == heard


def test_a_result_without_a_number_is_given_back_for_all_tokens_only() -> None:
    connector: Any = Answers(MATCH, (64, True, "of a tuple"), (64, True), ExternalKVMatch(64, True))
    connector.update_state_after_alloc = third(connector)
    tracker = tracker_of(connector)
    for request, tokens in (("fewer", 32), ("all", 64)):
        tracker.prepare(Asked(request), 0)
        tracker.commit(Asked(request), "blocks", tokens)
    assert [(short.missing, short.accepted) for short in tracker.shortfalls] == [(32, 0)]
    assert connector.said == [(NOTHING, "a lease"), ("blocks", "of a tuple")]
    for request in ("no result", "no result either"):
        assert tracker.prepare(Asked(request), 0) == (0, False), "nothing could be loaded: it is given back as None"


def test_a_lookup_that_returns_a_match_which_nothing_ends_is_refused_by_name() -> None:
    class Promises(Tuples):
        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> ExternalKVMatch:
            raise NotImplementedError

    with pytest.raises(
        ConfigError, match=r"Promises.get_num_new_matched_tokens returns an ExternalKVMatch that nothing"
    ):
        form_of(Promises(), NOTHING)
    named: Any = Tuples()
    for update in (lambda request, blocks: None, lambda request, blocks, num, *, query_result=None: None):
        named.update_state_after_alloc = update
        with pytest.raises(ConfigError, match=r"Tuples.update_state_after_alloc\(.*\) is not called with that"):
            form_of(named, NOTHING)


# Who ends what


class NeverEqual:
    """A plan that cannot be compared, as with arrays in it."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("plans are told apart by `is`")

    __hash__ = None  # type: ignore[assignment]


def test_h114_a_match_that_the_next_lookup_replaces_or_withdraws_is_aborted_right_after() -> None:
    first, second = (ExternalKVMatch(tokens, query_result=NeverEqual()) for tokens in (160, 128))
    again = ExternalKVMatch(160, True, first.query_result)
    connector = Planned(first, again, second, ExternalKVMatch(0))
    tracker, request = tracker_of(connector), Asked()
    for _ in range(4):
        tracker.prepare(request, 0)
        tracker.end_step(blocked)
    told = [call for call in connector.heard if call[0] != "ask"]
    assert [(name, match.num_tokens, reason) for name, match, reason in told] == [
        ("abort", 160, SUPERSEDED),
        ("abort", 128, WITHDRAWN),
    ]
    assert [call[0] for call in connector.heard] == ["ask", "ask", "ask", "abort", "ask", "abort"]
    assert told[0][1] is again, "the last answer with that plan"


def test_h114_a_connector_that_asks_for_time_keeps_its_match_until_the_next_answer() -> None:
    plan = ExternalKVMatch(64, query_result=object())
    connector = Planned(plan, None, plan, None, ExternalKVMatch(0))
    tracker, request = tracker_of(connector), Asked()
    answers = []
    for _ in range(5):
        answers.append(tracker.prepare(request, 0)[0])
        tracker.end_step(blocked)
    assert answers == [64, None, 64, None, 0]
    assert tracker.ends == {WITHDRAWN: 1}
    assert tracker.postponed == {NO_BLOCKS: 2}, "not in the steps in which the connector itself wanted time"


def test_h114_time_is_not_asked_for_without_end() -> None:
    connector = Planned(ExternalKVMatch(64, query_result=object()), None)
    tracker = tracker_of(connector)
    steps = 0
    while not tracker.ends:
        tracker.prepare(Asked(), 0)
        tracker.end_step(blocked)
        steps += 1
    assert tracker.ends == {NOT_RENEWED: 1}
    assert steps == POSTPONED_STEPS + 1


def test_h114_who_aborts_by_request_is_asked_once_and_ended_before_it_is_asked_anew() -> None:
    connector = ByRequest((160, False))
    tracker, request = tracker_of(connector), Asked()
    for _ in range(POSTPONED_STEPS):
        assert tracker.prepare(request, 0) == (160, False)
        tracker.end_step(blocked)
    assert connector.heard == [("ask",)]
    tracker.prepare(request, 0)
    tracker.end_step(blocked)
    assert connector.heard == [("ask",), ("abort", SUPERSEDED), ("ask",)], (
        "after so many steps what was true may not be"
    )
    tracker.prepare(request, 32)
    assert connector.heard[3:] == [("abort", SUPERSEDED), ("ask",)], "another question"
    request.num_tokens += 1
    tracker.prepare(request, 32)
    assert connector.heard[5:] == [("abort", SUPERSEDED), ("ask",)]


def test_h11_a_lease_of_seconds_is_renewed_in_each_step() -> None:
    class Renews(ByRequest):
        asks_every_step = True

    connector = Renews((160, False), (160, False), (144, False), (0, False))
    tracker = tracker_of(connector)
    answers = []
    for _ in range(4):
        answers.append(tracker.prepare(Asked(), 0)[0])
        tracker.end_step(blocked)
    assert answers == [160, 160, 144, 0]
    assert [call for call in connector.heard if call != ("ask",)] == [("abort", WITHDRAWN)]


@pytest.mark.parametrize("number", ["80", 2.5, -16])
@pytest.mark.parametrize("kind", ["pact", "query result", "match"])
def test_h114_the_plan_of_an_answer_that_cannot_be_read_is_aborted(
    kind: str, number: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It stayed leased for ever, without a word if the number was negative."""
    plan, spoilt = object(), object()
    answers = [
        ExternalKVMatch(64, True, plan),
        *(ExternalKVMatch(number, True, each) for each in (plan, spoilt, spoilt)),
    ]
    connector: Any = Answers(*answers)
    if kind == "pact":
        connector = Planned(*answers)
    elif kind == "match":
        connector.update_state_after_alloc = fourth_match(connector)
    else:
        connector.answers = [(match.num_tokens, match.load_kv_async, match.query_result) for match in answers]
        connector.update_state_after_alloc = fourth(connector)
    tracker = tracker_of(connector)
    ended = []
    for expected in ((64, True), (0, False), (0, False), (0, False)):
        assert tracker.prepare(Asked(), 0) == expected
        ended.append(tracker.ends.total())
    assert ended == [0, 1, 2, 3], "the open match has the plan of the answer, and ends once"
    assert tracker.ends == {WITHDRAWN: 3}
    assert not tracker.open
    heard = [call[1:] for call in connector.heard if call[0] == "abort"] if kind == "pact" else connector.said
    assert [getattr(call[-2 if kind == "pact" else -1], "query_result", call[-1]) for call in heard] == [
        plan,
        spoilt,
        spoilt,
    ]
    assert len(caplog.records) == 1, "said once"


def test_a_match_never_covers_the_last_token() -> None:
    """P6, also of a connector that promises more than there is; vLLM would end with an assertion."""
    for asynchronous, most in ((False, 99), (True, 100)):
        tracker = tracker_of(Planned(ExternalKVMatch(5000, asynchronous, object())))
        assert tracker.prepare(Asked(num_tokens=148), 48) == (most, asynchronous)


def test_a_commit_that_comes_when_its_match_has_ended_loads_nothing() -> None:
    """vLLM 0.33 commits with the next output; a reset may come first."""
    connector = Planned(ExternalKVMatch(64, True, object()))
    tracker = tracker_of(connector)
    tracker.prepare(Asked(), 0)
    tracker.drop_all(ExternalMatchExit.RESET)
    assert tracker.commit(Asked(), "blocks", 64) == 0
    assert [(short.missing, short.accepted) for short in tracker.shortfalls] == [(64, 0)]
    assert "commit" not in [call[0] for call in connector.heard]


# Connectors that break every rule


@dataclass(eq=False)
class Plan:
    """What an unruly connector leases; how often it was ended."""

    ends: int = 0


ANSWERS = ("new", "same", "none", "nothing", "huge", "negative", "words", "raise", "unplanned")
COMMITS = ("all", "fewer", "none", "more", "negative", "words", "raise", "says nothing")


class Unruly:
    """Answers what `choose` says; `kind` is the form."""

    def __init__(self, choose: Callable[[tuple[str, ...]], str], kind: str) -> None:
        self.choose, self.plans, self.mistakes = choose, list[Plan](), list[str]()
        self.last: dict[str, Plan] = {}
        self.leased = Counter[str]()
        """Request -> leases that are told apart by it alone."""
        if kind == "pact":
            self.prepare_external_match = self._prepare
            self.commit_external_match = self._commit
            self.abort_external_match = self._abort
            self.postpone_external_match = self.confirm_external_match = self._anything
        elif kind == "by request":
            self.abort_external_match = self._abort_by_request  # type: ignore[assignment]
        elif kind == "query result":
            self.update_state_after_alloc = self._update_with_result  # type: ignore[assignment,method-assign]
        elif kind == "match":
            self.update_state_after_alloc = self._update_with_match  # type: ignore[assignment,method-assign]
        self.kind = kind

    def _prepare(self, request: Any, num_computed_tokens: int) -> Any:
        match self.choose(ANSWERS):
            case "raise":
                raise RuntimeError("broken")
            case "none":
                return None
            case "nothing":
                return ExternalKVMatch(0, query_result=Plan())
            case "words":
                return ExternalKVMatch("many", False, self._plan(request))  # type: ignore[arg-type]
            case "negative":
                return ExternalKVMatch(-16, True, self._plan(request))
            case "unplanned":
                return ExternalKVMatch(32, True)
            case "same" if (last := self.last.get(request.request_id)) is not None and not last.ends:
                return ExternalKVMatch(48, False, last)
            case "huge":
                return ExternalKVMatch(10**9, True, self._plan(request))
        return ExternalKVMatch(64, bool(len(self.plans) % 2), self._plan(request))

    def _plan(self, request: Any) -> Plan:
        plan = self.last[request.request_id] = Plan()
        self.plans.append(plan)
        return plan

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        found = self._prepare(request, num_computed_tokens)
        if found is None:
            return (None, False)
        if self.kind == "match":
            return found
        with_result = (found.num_tokens, found.load_kv_async, found.query_result)
        if self.kind == "query result":
            return with_result
        self.plans = [plan for plan in self.plans if plan is not found.query_result]
        self.leased[request.request_id] += isinstance(found.num_tokens, int) and found.num_tokens > 0
        return with_result[:2]

    def _commit(self, request: Any, match: Any, num_tokens: int, blocks: Any) -> Any:
        self._end(match.query_result)
        answer = self.choose(COMMITS)
        if answer == "raise":
            raise RuntimeError("broken")
        counts = {"all": num_tokens, "fewer": num_tokens // 2, "none": 0, "more": 2 * num_tokens, "negative": -5}
        return counts.get(answer, None if answer == "says nothing" else "many")

    def _abort(self, request: Any, match: Any, reason: ExternalMatchExit) -> None:
        if reason not in DROPPED:
            self.mistakes.append(f"aborted for {reason}")
        self._end(match.query_result)
        self._anything()

    def _abort_by_request(self, request: Any, reason: ExternalMatchExit) -> None:
        self.leased[request.request_id] -= 1
        self._abort(request, ExternalKVMatch(1), reason)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_tokens: int) -> None:
        self.leased[request.request_id] -= num_tokens > 0
        self._anything()

    def _update_with_result(self, request: Any, blocks: Any, num_tokens: int, query_result: Any) -> None:
        self._end(query_result)
        self._anything()

    def _update_with_match(self, request: Any, blocks: Any, match: Any) -> None:
        self._update_with_result(request, blocks, 0, match and match.query_result)

    def _anything(self, *everything: Any) -> Any:
        if self.choose(("well", "raise")) == "raise":
            raise RuntimeError("broken")

    def _end(self, plan: Any) -> None:
        if plan is not None:
            plan.ends += 1


@settings(max_examples=400, deadline=None)
@given(
    kind=st.sampled_from(["pact", "by request", "query result", "match"]),
    steps=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["ask", "take", "decline", "end"])), max_size=6),
        max_size=50,
    ),
    choices=st.data(),
)
def test_h114_whatever_a_connector_does_each_match_ends_once(kind: str, steps: Any, choices: st.DataObject) -> None:
    connector = Unruly(lambda several: choices.draw(st.sampled_from(several)), kind)
    tracker = tracker_of(connector)
    promised = Counter[str]()
    for step in steps:
        for number, action in step:
            request = Asked(f"r{number}")
            if action == "end":
                tracker.requests_finished([request.request_id])
                continue
            tokens, _ = tracker.prepare(request, 16 * (len(promised) % 2))
            promised[request.request_id] += bool(tokens)
            found = tracker.open.get(request.request_id)
            assert not tokens or tokens <= 1000
            if tokens and found is not None and action == "take" and tracker.confirm(found, tokens):
                assert 0 <= tracker.commit(request, "blocks", tokens) <= tokens
            elif tokens is not None and action == "decline":
                tracker.commit(request, "blocks", 0)
        tracker.end_step(blocked)
        tracker.shortfalls.clear()
        live = [plan for plan in connector.plans if not plan.ends]
        assert len(live) <= len(tracker.open) <= 3
        assert {*connector.leased.values()} <= {0, 1}, "one at most, and none is ended that is not there"
    tracker.drop_all(CANCELLED)
    assert not tracker.open
    assert not connector.mistakes
    assert not connector.leased.total()
    assert {plan.ends for plan in connector.plans} <= {1}, "each lease ends, and ends once"
