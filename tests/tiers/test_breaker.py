"""When a store is left alone and when it is tried again, and when a match is not worth loading."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvpact.tiers.breaker import FAILURES_IN_A_ROW, JITTER, LONGEST_PAUSE_S, Breaker
from kvpact.tiers.costs import FORGET_SECONDS, PrefillRate, TierCosts

LONGEST = LONGEST_PAUSE_S * (1 + JITTER)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    said = [breaker.failed(now) for _ in range(FAILURES_IN_A_ROW)]
    assert said == [False] * (FAILURES_IN_A_ROW - 1) + [True], "opening is told once"
    return breaker


def test_single_failures_open_nothing() -> None:
    breaker = Breaker()
    for _ in range(20):
        breaker.failed(0.0)
        breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.allows(0.0)
    assert not breaker.is_open


def test_failures_in_a_row_open_it_and_one_at_a_time_tries_again() -> None:
    breaker = opened()
    assert breaker.is_open
    assert not breaker.allows(0.1)
    assert breaker.allows(LONGEST)
    assert not breaker.allows(LONGEST), "somebody is trying already"
    breaker.succeeded()
    assert breaker.allows(LONGEST)
    assert not breaker.is_open


def test_a_try_that_was_never_made_leaves_the_place_to_the_next() -> None:
    breaker = opened()
    assert breaker.allows(LONGEST)
    breaker.not_tried()
    assert breaker.allows(LONGEST)


@given(tries=st.integers(1, 40), seed=st.random_module())
def test_however_long_it_was_ill_the_next_try_is_never_far_away(tries: int, seed: object) -> None:
    breaker, now = Breaker(), 0.0
    for _ in range(FAILURES_IN_A_ROW):
        breaker.failed(now)
    for _ in range(tries):
        waited = 0.0
        while not breaker.allows(now):
            now, waited = now + 0.05, waited + 0.05
        assert 0.4 < waited <= LONGEST + 0.1
        breaker.failed(now)


def test_failures_of_what_was_under_way_do_not_put_the_next_try_off() -> None:
    breaker = opened()
    for now in (0.01, 0.02, 0.03):
        breaker.failed(now)
    assert breaker.allows(2 * 0.5 * (1 + JITTER))


def test_what_is_computed_sooner_than_it_arrives_is_not_worth_loading() -> None:
    costs, prefill = TierCosts(), PrefillRate(least_tokens=64)
    assert costs.seconds_for(1000, now=0.0) is None
    assert not prefill.is_faster(1000, costs.seconds_for(1000, now=0.0)), "without a measurement it is loaded"
    prefill.note_step(1000, now=0.0)
    prefill.note_step(1, now=0.1)
    assert prefill.tokens_per_second == 10_000
    costs.note_read(nbytes=1_000_000, seconds=1.0, now=0.1)
    slow = costs.seconds_for(2_000_000, now=0.2)
    assert slow == 2.0
    assert prefill.is_faster(1000, slow)
    assert not prefill.is_faster(30_000, slow)
    assert costs.seconds_for(2_000_000, now=1.0 + FORGET_SECONDS) is None, "a tier that was slow is tried again"


def test_small_steps_and_pauses_say_nothing_about_prefill() -> None:
    prefill = PrefillRate(least_tokens=64)
    for second in range(10):
        prefill.note_step(4, now=float(second))
    assert prefill.tokens_per_second == 0
    prefill.note_step(1000, now=20.0)
    prefill.note_step(1000, now=20.0 + 2 * PrefillRate.MAX_SECONDS)
    assert prefill.tokens_per_second == 0


def test_averages_follow_what_happens_now() -> None:
    costs = TierCosts()
    for _ in range(50):
        costs.note_read(1000, 1.0, now=0.0)
    for _ in range(20):
        costs.note_read(100_000, 1.0, now=0.0)
    assert costs.bytes_per_second > 90_000
    costs.note_lookup(0.25)
    assert costs.lookup_seconds == 0.25
