"""States and drafts on the embedded engine: every slot that is read holds what the oracle says, and what is wrong is
found."""

from __future__ import annotations

from typing import Any

import pytest

from kvpact_testkit.cache.random_plays import STATES_AND_DRAFTS, random_play
from kvpact_testkit.cache.soak import report, soak
from kvpact_testkit.cache.subjects import CacheFactory, reference_cache
from kvpact_testkit.engine import Request
from kvpact_testkit.engine.kv_cache import KVCacheManager
from kvpact_testkit.engine.runner import ModelRunner

SHORT_STEPS, LONG_STEPS = 4_000, 1_000_000
RARE = (
    "drafts accepted",
    "states offered inside accepted drafts",
    "loads",
    "loads that failed",
    "preemptions",
    "resets",
    "crashes",
)


@pytest.mark.parametrize(
    ("steps", "first_seed"),
    [
        pytest.param(SHORT_STEPS, 3_000_000, marks=pytest.mark.proof),
        pytest.param(LONG_STEPS, 4_000_000, marks=pytest.mark.soak),
    ],
)
def test_states_with_drafts_break_nothing(steps: int, first_seed: int) -> None:
    figures = soak(steps, first_seed=first_seed, sizes=STATES_AND_DRAFTS)
    print(report(figures, 0.0))
    assert figures.steps >= steps
    assert figures.counts["drafts accepted"] < figures.counts["drafts"]
    assert not [what for what in RARE if not figures.counts[what]], figures.counts


settles = ModelRunner.settle_states
offers = KVCacheManager.offered


Offered = list[tuple[int, int, int]]


def _leaves_boundaries(self: ModelRunner, rows: Any, known: Any, right: Any, ends: Any) -> None:
    """The state at a boundary inside accepted drafts stays in its scratch block."""
    for group, size in enumerate(self._sizes):
        self._states_in[group, rows] = (ends - 1) // size + right - known


def _counts_rejected_drafts(self: ModelRunner, rows: Any, known: Any, right: Any, ends: Any) -> None:
    """The state behind all drafts is taken for that behind the accepted ones."""
    settles(self, rows, known, ends, ends)


def _offers_one_boundary_off(self: KVCacheManager, request: Request, num_tokens: int) -> Offered:
    tables = request.block_ids
    return [(group, block, tables[group][block + 1]) for group, block, _ in offers(self, request, num_tokens)]


def _offers_before_verified(self: KVCacheManager, request: Request, num_tokens: int) -> Offered:
    request.num_accepted_drafts = self._drafts
    return offers(self, request, num_tokens + self._drafts)


@pytest.fixture
def unshrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A play that breaks something is found as it was drawn: nobody reads its calls here."""
    monkeypatch.setattr("kvpact_testkit.cache.random_plays.SHRINK_TRIES", 0)


def found_in(factory: CacheFactory) -> bool:
    """True if one of some plays is broken in which a right engine with a right cache breaks none (the soak's)."""
    plays = (random_play(factory, seed, 120, plays=6, sizes=STATES_AND_DRAFTS) for seed in range(8))
    return any(broken is not None for broken in plays)


@pytest.mark.usefixtures("unshrunk")
@pytest.mark.parametrize(
    ("owner", "method", "wrong"),
    [
        (ModelRunner, "settle_states", _leaves_boundaries),
        (ModelRunner, "settle_states", _counts_rejected_drafts),
        (KVCacheManager, "offered", _offers_one_boundary_off),
        (KVCacheManager, "offered", _offers_before_verified),
    ],
    ids=["boundary", "rejected", "off by one", "before verified"],
)
def test_an_engine_that_mistakes_one_state_for_another_is_found(
    owner: type, method: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, wrong)
    assert found_in(reference_cache)


@pytest.mark.usefixtures("unshrunk")
@pytest.mark.parametrize("cache", ["NamesTheNextBoundary", "KeepsStatesOfDrafts", "JoinsTails", "PromisesAStateAlone"])
def test_a_cache_that_mistakes_one_state_for_another_is_found(cache: str) -> None:
    pytest.importorskip("vllm", reason="broken_states needs an engine")
    import broken_states
    from broken_caches import made_of

    assert found_in(made_of(getattr(broken_states, cache)))
