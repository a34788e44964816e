"""When a store is left alone and when it is tried again, and when a match is not worth loading."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvpact.tiers.breaker import FAILURES_IN_A_ROW, FIRST_TRY_S, JITTER, Breaker
from kvpact.tiers.costs import PrefillRate, TierCosts
from kvpact.tiers.executor import LookupDone
from kvpact.tiers.probes import PROBE_SECONDS, Probes

LONGEST = FIRST_TRY_S * (1 + JITTER)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    said = [breaker.failed(now, "it hangs") for _ in range(FAILURES_IN_A_ROW)]
    assert said == [False] * (FAILURES_IN_A_ROW - 1) + [True], "opening is told once"
    return breaker


def test_single_failures_open_nothing() -> None:
    breaker = Breaker()
    for _ in range(20):
        breaker.failed(0.0, "an accident")
        breaker.failed(0.0, "an accident")
        breaker.succeeded()
    assert not breaker.is_open


def test_failures_in_a_row_open_it_until_a_try_works() -> None:
    breaker = opened(1.0)
    assert breaker.belief == (1.0, "it hangs")
    assert 1.0 + FIRST_TRY_S <= breaker.try_at <= 1.0 + LONGEST
    breaker.succeeded()
    assert not breaker.is_open


@given(asked=st.lists(st.floats(0.0, 30.0), max_size=60))
def test_h120_a_store_is_probed_when_a_prompt_comes_and_at_most_once_in_ten_seconds(asked: list[float]) -> None:
    probes, now, last = Probes(Breaker(), Breaker(), TierCosts()), 0.0, -PROBE_SECONDS
    for pause in asked:
        now += pause
        begins = probes.begin([b"key"], now, ()) is not None
        assert begins == (now >= last + PROBE_SECONDS)
        last = now if begins else last


def test_a_probe_that_asked_nobody_leaves_the_place_to_the_next() -> None:
    reads = opened(-2 * LONGEST)
    probes = Probes(Breaker(), reads, TierCosts())
    probes.note_read(16, in_a_row=True)
    for _ in range(2):
        look_up = probes.begin([b"key"], 0.0, ())
        assert look_up is not None
        assert probes.begin([b"key"], 0.0, ()) is None
        assert probes.end(LookupDone(look_up.op_id, (False,)), shared=False) is None


def test_failures_of_what_was_under_way_say_why_and_do_not_put_the_try_off() -> None:
    breaker = opened()
    try_at = breaker.try_at
    for now in (0.01, 0.02, 0.03):
        breaker.failed(now, "it is gone")
    assert breaker.try_at == try_at
    assert breaker.belief == (0.0, "it is gone")


def test_what_is_computed_sooner_than_it_arrives_is_not_worth_loading() -> None:
    costs, prefill = TierCosts(), PrefillRate(least_tokens=64)
    assert costs.seconds_for(1000) is None
    assert not prefill.is_faster(1000, costs.seconds_for(1000)), "without a measurement it is loaded"
    prefill.note_step(1000, now=0.0)
    prefill.note_step(1, now=0.1)
    assert prefill.tokens_per_second == 10_000
    costs.note_read(nbytes=1_000_000, seconds=1.0)
    slow = costs.seconds_for(2_000_000)
    assert slow == 2.0
    assert prefill.is_faster(1000, slow)
    assert not prefill.is_faster(30_000, slow)
    costs.forget_reads()
    costs.note_read(nbytes=1_000_000, seconds=0.001)
    assert costs.seconds_for(2_000_000) == 0.002, "one probe says what a tier costs that was too slow"


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
        costs.note_read(1000, 1.0)
    for _ in range(20):
        costs.note_read(100_000, 1.0)
    assert costs.bytes_per_second > 90_000
    costs.note_lookup(0.25)
    assert costs.lookup_seconds == 0.25
