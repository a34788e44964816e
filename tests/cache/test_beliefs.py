"""What is believed of a store that is not asked ends by a probe for which nobody waits, and is told as it is (H120)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpact.cache.status import status_of
from kvpact.contract import ExternalKVMatch
from kvpact.metrics import MissReason, series
from kvpact.tiers.base import Tier
from kvpact.tiers.executor import Done, GetDone, Job, LookupDone
from kvpact.tiers.shared.store import StoreError
from kvpact.tiers.shared.tier import SharedTier
from kvpact_testkit.tier.dictionary_store import DictionaryStore
from kvpact_testkit.tier.stepped_executor import SteppedExecutor
from scenes import BLOCK_SIZE, NAMESPACE, PAGE, Scene, SceneRequest, open_disk, tokens

BLOCKS = 50
LENGTH = BLOCKS * BLOCK_SIZE
SPEED = 20_000
"""Tokens of prompts that the engine computes in a second: 10 ms for each prompt here."""
QUICK, SLOW = 0.002, 1.5
PROBE_SECONDS = 10.0


class PacedExecutor(SteppedExecutor):
    """A tier whose look-ups and reads take as long as a test says, by its own account; and when which were asked."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier, 1 << 30)
        self.takes: dict[type[Any], float] = {LookupDone: QUICK, GetDone: QUICK}
        self.asked: list[type[Any]] = []

    def submit(self, job: Job) -> bool:
        self.asked.append(job.kind)
        return super().submit(job)

    def poll(self) -> Iterator[Done]:
        for done in super().poll():
            yield replace(done, seconds=self.takes.get(type(done), QUICK)) if done.seconds else done


class Shelf(DictionaryStore):
    """A store that can be gone."""

    is_gone = False

    def exists(self, names: Sequence[str]) -> list[bool]:
        if self.is_gone:
            raise StoreError("the shelf is gone")
        return super().exists(names)


class Below(Scene):
    """A fast engine above one tier that holds prompts which memory does not."""

    def __init__(self, tier: Tier, *prompts: int, **settings: Any) -> None:
        self.queue = PacedExecutor(tier)
        super().__init__(4 * BLOCKS, tiers=[self.queue], **settings)
        self._names = iter(range(10**9))
        for seed in (*prompts, *range(900, 903)):
            self.run_cold(SceneRequest(f"stored {seed}", tokens(LENGTH + 1, seed)))
            self.now += (LENGTH + 1) / SPEED
            self.rest()
            self.forget_memory()

    def rest(self) -> None:
        """Until nothing is under way."""
        for _ in range(4):
            self.queue.advance()
            self.cache.end_step()

    def ask(self, seed: int, pause: float = 1.0) -> tuple[int, bool]:
        """Tokens that a prompt gets, and whether it was told to wait; then the tier ends what it has begun."""
        asked, waited = SceneRequest(f"asks {next(self._names)}", tokens(LENGTH + 1, seed)), False
        while (match := self.cache.prepare_external_match(asked, 0)) is None:
            waited = True
            self.queue.advance()
            self.cache.end_step()
        self.cache.request_finished(asked.request_id)
        self.rest()
        self.forget_memory()
        self.now += pause
        return match.num_tokens, waited

    def count(self, name: str, label: str = "") -> float:
        return self.cache.observe()[series(name, label)]


HIT, NOT_ASKED = (LENGTH, True), (0, False)


def shared(*seeds: int, **settings: Any) -> Below:
    return Below(SharedTier(Shelf(), NAMESPACE, PAGE), *seeds, **settings)


def test_h120_one_slow_answer_costs_one_prompt_its_hit_and_not_the_tier() -> None:
    scene = shared(*range(3))
    assert [scene.ask(seed % 3) for seed in range(5)] == [HIT] * 5
    scene.queue.takes[LookupDone] = SLOW
    assert scene.ask(0) == HIT, "which was asked before anybody knew"
    scene.queue.takes[LookupDone] = QUICK
    assert [scene.ask(seed % 3) for seed in range(10)] == [NOT_ASKED] + [HIT] * 9


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 15.0), st.booleans()), max_size=40), st.sampled_from((LookupDone, GetDone)))
def test_h120_whatever_a_tier_takes_it_is_probed_for_prompts_once_in_ten_seconds_and_nobody_waits(
    turns: list[tuple[float, bool]], kind: type[Any]
) -> None:
    scene = shared(0)
    scene.ask(0)
    scene.queue.takes[kind] = SLOW
    scene.ask(0, pause=0.0)
    probed_at = -PROBE_SECONDS
    for pause, is_slow in turns:
        scene.now += pause
        scene.queue.takes[kind] = SLOW if is_slow else QUICK
        scene.queue.asked.clear()
        scene.rest()
        assert scene.queue.asked == [], "none while no prompt comes"
        seen = scene.ask(0, pause=0.0)
        if seen == HIT:
            continue
        assert seen == NOT_ASKED if kind is LookupDone else seen[0] == 0
        probes = scene.queue.asked.count(kind)
        assert probes == (scene.now >= probed_at + PROBE_SECONDS)
        probed_at = scene.now if probes else probed_at
    scene.queue.takes[kind] = QUICK
    assert HIT in [scene.ask(0, pause=5.0) for _ in range(4)], "20 seconds with prompts"
    scene.close()


@pytest.mark.parametrize("kind", ["shared", "disk"])
def test_h120_one_slow_read_costs_one_prompt_its_hit_and_not_the_tier(kind: str, tmp_path: Path) -> None:
    scene = shared(0, 1) if kind == "shared" else Below(open_disk(tmp_path, 10 * BLOCKS), 0, 1)
    assert [scene.ask(seed)[0] for seed in (0, 1)] == [LENGTH] * 2
    scene.queue.takes[GetDone] = SLOW
    assert scene.ask(0)[0] == LENGTH
    scene.queue.takes[GetDone] = QUICK
    assert [scene.ask(seed % 2)[0] for seed in range(4)] == [0] + [LENGTH] * 3
    assert scene.count("misses", MissReason.RECOMPUTE_FASTER) == 1
    assert scene.count("declined_blocks") == BLOCKS


def test_h120_a_tier_that_stays_slow_keeps_nobody_waiting_and_the_reason_is_told_everywhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    scene = shared(0)
    scene.queue.takes[LookupDone] = SLOW
    scene.ask(0)
    assert [scene.ask(0) for _ in range(60)] == [NOT_ASKED] * 60
    assert scene.queue.asked.count(LookupDone) == 1 + 6, "a probe every ten seconds"
    assert scene.count("misses", MissReason.RECOMPUTE_FASTER) == 60
    assert scene.count("misses", MissReason.NOT_STORED) == 0
    assert scene.count("slow_tiers", "dictionary") == 1
    assert scene.count("tier_up", "dictionary") == 1
    assert scene.count("skipped_lookups", "dictionary") == 60
    said = "a look-up takes 1,500 ms, and the engine computes such prompts sooner"
    found = status_of(scene.cache, scene.cache.metrics, "model", BLOCK_SIZE)
    (tier,) = found.tiers
    assert (tier.complaint, tier.trouble) == (said, "")
    assert tier.doubted_for == pytest.approx(60.0)
    assert found.records[-1].belief == f"dictionary: {said}"
    assert caplog.text.count(said) == 1


def test_h120_a_store_that_is_gone_is_probed_by_no_request_and_the_reason_is_its_own() -> None:
    scene = shared(*range(4), recompute_if_faster=False)
    assert scene.ask(0) == HIT
    tier = scene.queue.tier
    assert isinstance(tier, SharedTier)
    assert isinstance(tier.store, Shelf)
    tier.store.is_gone = True
    assert [scene.ask(0)[0] for _ in range(3)] == [0] * 3
    scene.queue.asked.clear()
    assert [scene.ask(0) for _ in range(30)] == [NOT_ASKED] * 30
    assert scene.queue.asked == [LookupDone] * 3, "each ten seconds one"
    assert scene.count("misses", MissReason.TIER_DOWN) == 33
    found = status_of(scene.cache, scene.cache.metrics, "model", BLOCK_SIZE)
    assert "the shelf is gone" in found.tiers[0].trouble
    assert "the shelf is gone" in found.records[-1].belief
    assert found.tiers[0].doubted_for == pytest.approx(30.0, abs=1.5)
    tier.store.is_gone = False
    seen = [scene.ask(0) for _ in range(12)]
    assert seen[-1] == HIT, "within ten seconds"
    assert {*seen} == {NOT_ASKED, HIT}
    assert scene.cache.prepare_external_match(SceneRequest("new", tokens(33, 77)), 0) is None
    assert status_of(scene.cache, scene.cache.metrics, "model", BLOCK_SIZE).tiers[0].doubted_for == 0


def test_h120_what_a_quick_tier_says_is_not_waited_for_longer_because_another_one_is_slow() -> None:
    """The price of a look-up is each tier's own."""
    scene = Scene(8 * BLOCKS, tiers=[PacedExecutor(SharedTier(Shelf(), NAMESPACE, PAGE)) for _ in range(2)])
    asked = [SceneRequest(f"asks {number}", tokens(LENGTH + 1, number)) for number in range(4)]
    for request in asked[:3]:
        scene.run_cold(request)
        scene.now += (LENGTH + 1) / SPEED
    scene.cache.end_step()
    quick, slow = scene.cache.tiers.clients
    quick.costs.note_lookup(QUICK)
    slow.costs.note_lookup(SLOW)
    assert scene.cache.prepare_external_match(asked[3], 0) is None
    (queue, _) = scene.queues
    assert isinstance(queue, PacedExecutor)
    queue.advance()
    scene.cache.end_step()
    assert scene.cache.prepare_external_match(asked[3], 0) == ExternalKVMatch(0), "the slow one has not answered"
