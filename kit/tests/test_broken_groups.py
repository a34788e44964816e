"""Caches that mistake one KV cache group for another, or a part of a match for all of it: a check names each."""

from __future__ import annotations

import pytest

from broken_caches import BROKEN_GROUPS, made_of
from kvpact_testkit.cache.conformance import run_conformance
from kvpact_testkit.cache.engine_harness import HarnessSettings
from kvpact_testkit.cache.operations import Call, Figures, perform
from kvpact_testkit.cache.random_plays import random_play
from kvpact_testkit.cache.subjects import reference_cache
from kvpact_testkit.engine import GroupKind, KVCacheGroup, ReferenceCache
from kvpact_testkit.results import Verdict


@pytest.mark.parametrize("kind", BROKEN_GROUPS, ids=lambda kind: kind.__name__)
def test_a_mistake_with_groups_is_found_by_its_check(kind: type[ReferenceCache]) -> None:
    check = BROKEN_GROUPS[kind]
    for factory, verdict in ((made_of(kind), Verdict.BROKEN), (reference_cache, Verdict.KEPT)):
        (found,) = run_conformance(factory, only=f"^{check}$", modes=("native", "vllm-0.32")).checks
        assert found.verdict is verdict, found


def test_a_state_is_saved_though_its_last_token_is_named_a_step_later() -> None:
    """An engine that schedules ahead computes a token before it knows it: the save of the next step is right."""

    class SavesLater(ReferenceCache):
        """A state is saved in the step after the one that ends at its boundary, too."""

        def _full(self, group: KVCacheGroup, computed: int) -> range:
            return (
                super()._full(group, computed - 1) if group.kind is GroupKind.STATE else super()._full(group, computed)
            )

    groups = (KVCacheGroup(GroupKind.FULL, 4), KVCacheGroup(GroupKind.STATE, 4))
    settings = HarnessSettings("vllm-0.32", groups=groups, num_slots=48)
    calls = [Call.of("arrive", shared=5, tail=1, outputs=9), Call.of("step", times=14)]
    figures = Figures()
    assert perform(made_of(SavesLater), settings, calls, figures=figures) is None
    assert figures.counts["finished"] >= 1


@pytest.mark.proof
@pytest.mark.parametrize("kind", BROKEN_GROUPS, ids=lambda kind: kind.__name__)
def test_random_plays_find_each_mistake_with_groups(
    kind: type[ReferenceCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpact_testkit.cache.random_plays.SHRINK_TRIES", 0)
    figures = Figures()
    for seed in range(40):
        broken = random_play(made_of(kind), seed, 400, plays=4, figures=figures)
        if broken is not None:
            print(f"{kind.__name__}: seed {seed}, after {figures.steps} steps: {broken.explanation}")
            return
    pytest.fail(f"{kind.__name__} survives {figures.steps} steps")
