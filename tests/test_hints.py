"""Clients' hints as they arrive: whatever is wrong with one is its outcome, and costs neither time nor another hint."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.hints.schema import KEY, MOST_CHARS, MOST_NAMES, MOST_SECONDS, OUTCOMES, HintResult, Store, parse_hints

DEEP: Any = []
for _ in range(1_000):
    DEEP = [DEEP]

SCALARS = [
    None,
    True,
    False,
    0,
    1,
    2,
    -1,
    10**400,
    math.nan,
    math.inf,
    1.0,
    "",
    "none ",
    "NONE",
    "x" * (2 << 20),
    b"none",
]
WRONG = [*SCALARS, DEEP, {"none": DEEP}, ["none"], {}]
VERSIONS = [value for value in WRONG if type(value) is not int or value != 1]
NO_OBJECTS = [value for value in WRONG if value is not None and not isinstance(value, dict)]


def results(params: object) -> dict[str, HintResult]:
    hints = parse_hints(params)
    return {name: outcome.result for name, outcome in hints.outcomes.items()} if hints is not None else {}


@pytest.mark.parametrize("store", ["none", "prompt"])
def test_a_right_hint_is_accepted(store: str) -> None:
    hints = parse_hints({KEY: {"version": 1, "store": store}, "do_remote_decode": True})
    assert hints is not None
    assert hints.store == Store(store)
    assert hints.answer() == {KEY: {"version": 1, OUTCOMES: {"store": "accepted"}}}
    assert results({KEY: {"store": store}}) == {"store": HintResult.ACCEPTED}, "the version may be left out"


@pytest.mark.parametrize("params", [None, {}, "kvpact", 5, [KEY], {"other": {}}, {KEY: None}, DEEP])
def test_a_request_without_hints_has_none(params: object) -> None:
    assert parse_hints(params) is None


def test_outcomes_that_a_proxy_sends_back_are_no_hints() -> None:
    hints = parse_hints({KEY: {"store": "none", "colour": "red"}})
    assert hints is not None
    assert parse_hints(json.loads(json.dumps(hints.answer()))) is None


@pytest.mark.parametrize("value", WRONG, ids=range(len(WRONG)))
def test_a_wrong_value_is_rejected_by_name_and_costs_no_other_hint(value: object) -> None:
    hints = parse_hints({KEY: {"version": 1, "store": value, "colour": value}})
    assert hints is not None
    assert hints.store is Store.ALL
    assert results({KEY: {"version": 1, "store": value}}) == {"store": HintResult.WRONG_VALUE}
    assert results({KEY: {"store": "prompt", "colour": value}}) == {
        "store": HintResult.ACCEPTED,
        "colour": HintResult.UNKNOWN_NAME,
    }


@pytest.mark.parametrize("version", VERSIONS, ids=range(len(VERSIONS)))
def test_hints_of_another_version_are_all_rejected(version: object) -> None:
    hints = parse_hints({KEY: {"version": version, "store": "none"}})
    assert hints is not None
    assert (hints.store, [*hints.outcomes]) == (Store.ALL, ["version"])
    assert hints.outcomes["version"].result is HintResult.WRONG_VERSION


@pytest.mark.parametrize("value", NO_OBJECTS, ids=range(len(NO_OBJECTS)))
def test_what_is_no_object_is_rejected_as_a_whole(value: object) -> None:
    assert results({KEY: value}) == {KEY: HintResult.WRONG_VALUE}


def test_what_is_kept_of_a_payload_is_bounded_whatever_its_size() -> None:
    many = {f"name {number}": DEEP for number in range(100_000)}
    begun = time.process_time()
    assert results({KEY: many}) == {KEY: HintResult.WRONG_VALUE}
    assert time.process_time() - begun < 0.02, "it is read name by name"
    names = {chr(0x202E) * (1 << 20) + str(number): "x" * (2 << 20) for number in range(MOST_NAMES)}
    hints = parse_hints({KEY: names})
    assert hints is not None
    assert len(json.dumps(hints.answer())) < 16 << 10
    assert all(len(name) <= MOST_CHARS * len("\\u202e") and name.isprintable() for name in hints.outcomes)


def retain(value: object) -> tuple[HintResult, float]:
    hints = parse_hints({KEY: {"retain": value}})
    assert hints is not None
    return hints.outcomes["retain"].result, hints.retain_seconds


@pytest.mark.parametrize(("value", "seconds"), [("5m", 300.0), (90, 90.0), (0.5, 0.5), ("1h", MOST_SECONDS)])
def test_a_time_is_accepted(value: object, seconds: float) -> None:
    assert retain(value) == (HintResult.ACCEPTED, seconds)


@pytest.mark.parametrize("value", ["2h", "9" * 60 + "d", 1e300, 3601])
def test_a_longer_time_is_clipped(value: object) -> None:
    assert retain(value) == (HintResult.CLIPPED, MOST_SECONDS)


NO_TIMES = [
    *(value for value in WRONG if value not in (1, 2)),
    True,
    "5M " * 40_000,
    "0s",
    -0.0,
    "-5m",
    "5 weeks",
    [300],
]


@pytest.mark.parametrize("value", NO_TIMES, ids=range(len(NO_TIMES)))
def test_what_is_no_time_is_rejected(value: object) -> None:
    assert retain(value) == (HintResult.WRONG_VALUE, 0.0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["none", "prompt", "5m"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
NAMES = st.sampled_from(["version", "store", "retain", "session", OUTCOMES]) | st.text()


@given(JSON | st.fixed_dictionaries({KEY: JSON | st.dictionaries(NAMES, JSON | st.just(1))}))
def test_no_payload_raises_and_what_is_accepted_is_right(params: Any) -> None:
    hints = parse_hints(params)
    if hints is None:
        return
    accepted = {name for name, outcome in hints.outcomes.items() if outcome.result is HintResult.ACCEPTED}
    assert hints.store == (params[KEY]["store"] if "store" in accepted else Store.ALL)
    assert hints.outcomes.keys() >= accepted
    json.dumps(hints.answer())
    assert 0 <= hints.retain_seconds <= MOST_SECONDS
    hints.refuse_all("no cache")
    assert not hints.retain_seconds
    assert hints.store is Store.ALL
    assert not any(str(outcome) == "accepted" for outcome in hints.outcomes.values())
