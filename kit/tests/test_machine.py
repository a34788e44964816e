"""kvpact's own cache through 10,000 verified steps of random trouble, and a broken one that is found and shortened."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from broken_caches import ForgetsAborts, TrustsTheFirstRank, made_of
from kvpact.contract import ExternalCache
from kvpact.identity.groups import GroupKind, KVCacheGroup
from kvpact_testkit.cache import random_plays
from kvpact_testkit.cache.conformance import CacheContext, CacheUnderTest
from kvpact_testkit.cache.engine_harness import HarnessSettings
from kvpact_testkit.cache.machine import PactMachine
from kvpact_testkit.cache.operations import Call, perform
from kvpact_testkit.cache.random_plays import random_play
from kvpact_testkit.cache.soak import SUBJECTS, SoakFailure, report, soak
from kvpact_testkit.cache.subjects import lazy_pact_cache, pact_cache, pact_cache_with_disk
from kvpact_testkit.results import Broken

STEPS = 4_000
SHARED = ["shared", "disk and shared, second use"]
MEMORY = ["memory", "memory, asynchronous", "memory, pieces of one block"]
DISK = ["disk", "disk, asynchronous", "disk, pieces of two blocks"]
LAZY = ["lazy", "lazy, asynchronous, disk"]
REFERENCE = ["reference", "reference, synchronous"]
SHORT_RUN_STEPS, LONG_RUN_STEPS = 10_000, 2_000_000


class MemoryMachine(PactMachine):
    def make_cache(self, place: CacheContext) -> CacheUnderTest:
        return pact_cache(place, sync_load_budget=0)


class LazyMachine(PactMachine):
    def make_cache(self, place: CacheContext) -> CacheUnderTest:
        return lazy_pact_cache(place)  # with a small window, what is far from being evicted is never stored


class DiskMachine(PactMachine):
    def make_cache(self, place: CacheContext) -> CacheUnderTest:
        return pact_cache_with_disk(place)


@pytest.mark.parametrize(("machine", "steps"), [(MemoryMachine, 1_000), (DiskMachine, 1_000), (LazyMachine, 600)])
def test_hypothesis_breaks_nothing(machine: type[PactMachine], steps: int) -> None:
    """So many steps, and more, until everything that matters has happened several times.

    Each round plays others: where `CI` is set, hypothesis would repeat the same ones.
    """
    figures = machine.figures

    def rare() -> list[str]:
        wanted = ("loads", "preemptions", "lost reports", "silent ranks", "cancelled while waiting")
        return [what for what in wanted if figures.counts[what] <= 5]

    while figures.steps < steps or (rare() and figures.steps < 20 * steps):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=10,
                stateful_step_count=60,
                deadline=None,
                derandomize=False,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    assert not rare(), f"hardly any of {rare()} in {figures.steps} steps"


@pytest.mark.proof
def test_random_plays_break_nothing() -> None:
    figures = soak(STEPS, first_seed=100_000)
    assert figures.steps >= STEPS
    for what in ("loads", "loads that failed", "preemptions", "crashes", "lost reports", "stalled tiers"):
        assert figures.counts[what], f"no {what} in {STEPS} steps"
    assert f"{figures.steps:,} engine steps" in report(figures, 1.0)


@pytest.mark.parametrize(
    "steps",
    [pytest.param(SHORT_RUN_STEPS, marks=[pytest.mark.soak]), pytest.param(LONG_RUN_STEPS, marks=[pytest.mark.soak])],
)
def test_random_plays_of_other_seeds_break_nothing(steps: int) -> None:
    print(report(soak(steps, first_seed=1_000_000), 0.0))


class BrokenMachine(PactMachine):
    modes = ("vllm-0.32",)

    def make_cache(self, place: CacheContext) -> ExternalCache | CacheUnderTest:
        return made_of(TrustsTheFirstRank)(place)


def test_hypothesis_finds_a_broken_cache() -> None:
    with pytest.raises(Broken) as caught:
        run_state_machine_as_test(
            BrokenMachine,
            settings=settings(
                max_examples=1000,
                stateful_step_count=30,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
    assert {"P8", "P10", "P1"} & set(caught.value.protects)
    assert caught.value.script


def test_a_script_of_calls_that_breaks_something_can_be_played() -> None:
    factory = made_of(ForgetsAborts)
    settings_ = HarnessSettings("vllm-0.32", num_slots=8)
    calls = [
        Call.of("arrive", prefix=0, shared=24, tail=3),
        Call.of("step", times=4),
        Call.of("forget_local"),
        Call.of("squeeze", leave=0),
        Call.of("arrive", prefix=0, shared=24, tail=3),
        Call.of("step", times=8),
        Call.of("cancel", which=0),
        *(Call.of("arrive", prefix=number, shared=24, tail=2) for number in range(1, 3)),
    ]
    broken = perform(factory, settings_, calls)
    assert broken is not None
    assert "P1" in broken.protects
    assert "the rest of its room is held for nobody" in broken.explanation


@pytest.mark.proof
def test_what_a_random_play_breaks_is_shrunk_to_a_few_calls_that_break_it_again_in_the_same_way_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random_plays, "SHRINK_TRIES", 200)  # drawn epochs: a process may need more than another
    factory = made_of(TrustsTheFirstRank)
    first = second = None
    for number in (0, 20, 40):  # what is drawn differs from process to process
        first, second = (random_play(factory, number, 60, plays=20) for _ in range(2))
        if first is not None and len(first.calls) < 30:  # so few tries do not get as far from each of them
            break
    assert first is not None
    assert second is not None
    assert first.script == second.script
    assert 3 < len(first.script) < 60
    assert len(first.calls) < 30
    again = perform(factory, first.settings, first.calls)
    assert again is not None
    assert again.protects == first.protects


def test_a_soak_that_fails_names_the_seed_and_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_plays, "SHRINK_TRIES", 200)  # drawn epochs: a process may need more than another
    factory = made_of(TrustsTheFirstRank)
    with pytest.raises(SoakFailure, match=r"broken, seed \d+") as caught:
        soak(100_000, {"broken": factory})
    broken = caught.value.broken
    assert f"    {broken.calls[0]}" in str(caught.value)
    again = perform(factory, broken.settings, broken.calls)
    assert again is not None
    assert again.explanation == broken.explanation


def test_the_soak_goes_through_every_configuration() -> None:
    assert [*SUBJECTS] == [*MEMORY, *DISK, *SHARED, *LAZY, *REFERENCE]


def test_a_cache_of_several_full_groups_has_the_room_of_a_new_one() -> None:
    groups = (KVCacheGroup(GroupKind.FULL, 4),) * 3
    settings = HarnessSettings(num_slots=48, num_blocks=42, groups=groups)
    assert perform(pact_cache, settings, []) is None


@pytest.mark.parametrize("subject", [*MEMORY, *REFERENCE])
def test_h26_what_another_request_failed_to_load_is_not_promised_anew_to_one_that_was_postponed(subject: str) -> None:
    """Two requests are promised the same blocks; the first one's load fails while the second one has no room."""
    settings_ = HarnessSettings(num_blocks=24, num_slots=8, max_running=8, prefix_caching=False)
    calls = [
        Call.of("arrive", prefix=2, shared=22, tail=11, outputs=1, kind=0, priority=0),
        Call.of("step", times=1),
        Call.of("arrive", prefix=2, shared=44, tail=0, outputs=0, kind=0, priority=0),
        Call.of("arrive", prefix=2, shared=43, tail=12, outputs=0, kind=0, priority=0),
        Call.of("misbehave", rank=0, reports=0, fail_count=3, load=1),
        Call.of("step", times=1),
    ]
    assert perform(SUBJECTS[subject], settings_, calls) is None


@pytest.mark.parametrize("subject", [*MEMORY, *LAZY, *REFERENCE])
def test_h32_a_request_that_must_compute_its_prompt_is_given_no_blocks_of_other_weights(subject: str) -> None:
    """The engine does not ask about such a request: what it got from the engine's own cache would count as computed."""
    calls = [
        Call.of("arrive", prefix=2, shared=59, tail=6, outputs=6, kind=0, priority=0),
        Call.of("step", times=1),
        Call.of("arrive", prefix=0, shared=0, tail=0, outputs=0, kind=0, priority=0),
        Call.of("update_weights", to=1, clear=0),
        Call.of("step", times=6),
        Call.of("arrive", prefix=0, shared=41, tail=8, outputs=5, kind=5, priority=1),
        Call.of("arrive", prefix=2, shared=55, tail=11, outputs=3, kind=4, priority=1),
        Call.of("step", times=8),
        Call.of("arrive", prefix=2, shared=55, tail=11, outputs=0, kind=0, priority=0),
    ]
    assert perform(SUBJECTS[subject], HarnessSettings(num_blocks=47, num_slots=8, max_running=8), calls) is None
