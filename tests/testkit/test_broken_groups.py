"""Caches that mistake one KV cache group for another, or a part of a match for all of it: a check names each."""

from __future__ import annotations

import pytest
from broken_caches import BROKEN_GROUPS, made_of

from kvpact.engine import ReferenceCache
from kvpact.testkit.cache.conformance import run_conformance
from kvpact.testkit.cache.operations import Figures
from kvpact.testkit.cache.random_plays import random_play
from kvpact.testkit.cache.subjects import reference_cache
from kvpact.testkit.results import Verdict


@pytest.mark.parametrize("kind", BROKEN_GROUPS, ids=lambda kind: kind.__name__)
def test_a_mistake_with_groups_is_found_by_its_check(kind: type[ReferenceCache]) -> None:
    check = BROKEN_GROUPS[kind]
    for factory, verdict in ((made_of(kind), Verdict.BROKEN), (reference_cache, Verdict.KEPT)):
        (found,) = run_conformance(factory, only=f"^{check}$", modes=("native", "vllm-0.32")).checks
        assert found.verdict is verdict, found


@pytest.mark.proof
@pytest.mark.parametrize("kind", BROKEN_GROUPS, ids=lambda kind: kind.__name__)
def test_random_plays_find_each_mistake_with_groups(
    kind: type[ReferenceCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpact.testkit.cache.random_plays.SHRINK_TRIES", 0)
    figures = Figures()
    for seed in range(40):
        broken = random_play(made_of(kind), seed, 400, plays=4, figures=figures)
        if broken is not None:
            print(f"{kind.__name__}: seed {seed}, after {figures.steps} steps: {broken.explanation}")
            return
    pytest.fail(f"{kind.__name__} survives {figures.steps} steps")
