"""The kit finds 12 caches that take a reset for something else, each by the check of epochs that is about it."""

from __future__ import annotations

import pytest

from broken_caches import IgnoresResets, made_of
from broken_epochs import BROKEN_EPOCHS, StoreCache, store_cache
from kvpact_testkit.cache.checks_epochs import EpochChecks
from kvpact_testkit.cache.conformance import run_conformance
from kvpact_testkit.cache.engine_harness import HarnessSettings
from kvpact_testkit.cache.operations import Call, perform
from kvpact_testkit.engine import ReferenceCache
from kvpact_testkit.results import ConformanceReport, Verdict, concerned

CHECKS = [name for name in vars(EpochChecks) if name.startswith("test_")]
MODES = ("native", "vllm-0.32")


def run_epoch_checks(kind: type[ReferenceCache], only: str = "|".join(CHECKS)) -> ConformanceReport:
    factory = store_cache(kind) if issubclass(kind, StoreCache) else made_of(kind)
    return run_conformance(factory, only=f"^({only})$", modes=MODES)


def test_a_cache_above_a_store_that_takes_resets_and_words_as_they_are_meant_keeps_them_all() -> None:
    assert {check.verdict for check in run_epoch_checks(StoreCache).checks} == {Verdict.KEPT}


@pytest.mark.parametrize("kind", BROKEN_EPOCHS, ids=lambda kind: kind.__name__)
def test_a_cache_that_is_wrong_about_epochs_is_caught_by_the_check_about_it(kind: type[ReferenceCache]) -> None:
    name, check_name = BROKEN_EPOCHS[kind]
    (check,) = run_epoch_checks(kind, check_name).checks
    assert check.verdict is Verdict.BROKEN
    assert name in concerned(check)
    assert check.violations[0].what
    assert check.script


def test_most_are_caught_by_that_check_alone() -> None:
    alone = [
        kind for kind, (_, check) in BROKEN_EPOCHS.items() if [c.name for c in run_epoch_checks(kind).broken] == [check]
    ]
    assert len(alone) >= 6


def test_p13_a_cache_that_ignores_resets_is_caught_under_its_name() -> None:
    assert "P13" in {name for check in run_epoch_checks(IgnoresResets, CHECKS[0]).broken for name in concerned(check)}


def test_every_check_of_epochs_has_a_broken_cache() -> None:
    assert set(CHECKS) == {check for _, check in BROKEN_EPOCHS.values()} | {CHECKS[0]}


@pytest.mark.parametrize("kind", ["SavesWhatRunsOn", "KeepsWhatIsUnderWay"])
def test_a_play_with_a_reset_under_running_requests_finds_them_too(kind: str) -> None:
    broken = next(each for each in BROKEN_EPOCHS if each.__name__ == kind)
    calls = [
        Call.of("arrive", shared=40, outputs=6),
        Call.of("misbehave", copy_after=4),
        Call.of("step", times=3),
        Call.of("update_weights", to=1, clear=0),
        Call.of("step", times=30),
        Call.of("forget_local"),
        Call.of("arrive", shared=40, outputs=2),
        Call.of("step", times=30),
    ]
    found = perform(made_of(broken), HarnessSettings(), calls)
    assert found is not None
    assert perform(made_of(ReferenceCache), HarnessSettings(), calls) is None
