"""kvpact's whole cache under random trouble, and a router that hears it: it never believes what cannot be loaded."""

from __future__ import annotations

from functools import partial

import pytest

from announced_cache import announced
from kvpact.cache.announcements import Announcements
from kvpact.cache.writeback import WriteBack
from kvpact_testkit.cache.engine_harness import HarnessSettings
from kvpact_testkit.cache.operations import Call, Figures, perform
from kvpact_testkit.cache.random_plays import random_play
from kvpact_testkit.cache.soak import report, soak
from kvpact_testkit.cache.subjects import (
    CacheFactory,
    lazy_pact_cache,
    pact_cache_with_all,
    pact_cache_with_disk,
    pact_cache_with_shared,
)
from kvpact_testkit.engine import GroupKind, KVCacheGroup

SUBJECTS: dict[str, CacheFactory] = {
    "memory": announced,
    "asynchronous": partial(announced, sync_load_budget=0),
    "pieces of one block": partial(announced, piece_blocks=1),
    "lazy": partial(announced, make=lazy_pact_cache),
    "disk": partial(announced, make=pact_cache_with_disk),
    "shared": partial(announced, make=pact_cache_with_shared),
    "disk and shared": partial(announced, make=pact_cache_with_all, sync_load_budget=0, admit="second-use"),
}
CALLS = 30


@pytest.mark.parametrize("name", SUBJECTS)
def test_h133_a_router_knows_what_a_cache_serves(name: str) -> None:
    figures = Figures()
    assert random_play(SUBJECTS[name], 0, CALLS, plays=2, figures=figures) is None
    assert figures.steps


@pytest.mark.parametrize("steps", [pytest.param(100_000, marks=pytest.mark.soak)])
def test_h133_a_router_knows_what_a_cache_serves_for_long(steps: int) -> None:
    print(report(soak(steps, SUBJECTS, first_seed=3_000_000), 0.0))


STATES = (KVCacheGroup(GroupKind.FULL, 4), KVCacheGroup(GroupKind.STATE, 8))
PARENT_COMES_LAST = [
    Call.of("misbehave", report_after=3),
    Call.of("arrive", shared=57, tail=3),
    Call.of("step", times=9),
]
OTHER_WEIGHTS = [Call.of("arrive", shared=40, tail=3), Call.of("step", times=8), Call.of("update_weights")]


def test_h133_blocks_whose_parents_come_last_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = HarnessSettings(groups=STATES, num_slots=16, num_blocks=96, max_running=8)
    assert perform(announced, settings, PARENT_COMES_LAST) is None
    monkeypatch.setattr(WriteBack, "note_became_held", lambda *_: None)
    broken = perform(announced, settings, PARENT_COMES_LAST)
    assert broken is not None
    assert "was not told of 1 blocks" in broken.explanation


def test_h133_blocks_of_other_weights_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [*OTHER_WEIGHTS, Call.of("step")]
    assert perform(announced, HarnessSettings(), calls) is None
    monkeypatch.setattr(Announcements, "withdraw", lambda announcements: None)
    broken = perform(announced, HarnessSettings(), calls)
    assert broken is not None
    assert "cannot be loaded" in broken.explanation
