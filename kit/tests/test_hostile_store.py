"""kvpact above a store that is in trouble for a while: it says which, and uses it again soon after (A4, H120)."""

from __future__ import annotations

import re
from itertools import count

import pytest

from kvpact.cache.status import status_of
from kvpact.contract import WorkerReport
from kvpact.tiers.shared.tier import SharedTier
from kvpact_testkit.tier.hostile_store import AGAIN_SECONDS, TROUBLES, HostilePlace, HostileStore, Trouble
from kvpact_testkit.tier.stepped_executor import SteppedExecutor
from scenes import BLOCK_SIZE, NAMESPACE, PAGE, Scene, SceneRequest, failed, tokens

LENGTH = 8 * BLOCK_SIZE
SPEED = 1000.0
"""Tokens that the engine computes in a second."""
LASTS = 40
"""Seconds of a trouble."""
OLD = 0
"""The seed of the prompt that is stored before."""


class Play:
    """An engine of one prompt a second above one hostile store."""

    def __init__(self) -> None:
        store = HostileStore()
        self.place = HostilePlace(SteppedExecutor(SharedTier(store, NAMESPACE, PAGE), 1 << 30), store)
        self.scene = Scene(64, tiers=[self.place.queue])
        self._names = count()
        for _ in range(3):
            self.second(OLD)

    def second(self, seed: int) -> int:
        """A prompt's life: the blocks of it that come from the store; what is missing is computed and saved."""
        scene, request = self.scene, SceneRequest(f"r{next(self._names)}", tokens(LENGTH + 1, seed))
        while (match := scene.cache.prepare_external_match(request, 0)) is None:
            self.place.queue.advance()
            scene.cache.end_step()
        blocks = match.num_tokens // BLOCK_SIZE
        if blocks:
            scene.load(request, match)
            assert scene.holds_content(request, range(blocks))
        scene.compute(request, blocks)
        scene.cache.note_computed(request, LENGTH + 1, lambda: scene.tables[request.request_id])
        scene.report(scene.cache.end_step())
        scene.now += (LENGTH + 1) / SPEED
        scene.cache.request_finished(request.request_id)
        for _ in range(4):
            scene.cache.end_step()
            self.place.queue.advance()
        scene.cache.end_step()
        scene.forget_memory()
        scene.now += 1.0
        return blocks

    def fail_a_load(self, seed: int) -> None:
        """What could not be loaded is to go from the store."""
        scene, request = self.scene, SceneRequest(f"r{next(self._names)}", tokens(LENGTH + 1, seed))
        while (match := scene.cache.prepare_external_match(request, 0)) is None:
            self.place.queue.advance()
            scene.cache.end_step()
        scene.cache.commit_external_match(request, match, match.num_tokens, scene.allocate(request))
        (job,) = scene.cache.end_step().loads
        scene.cache.apply_report(WorkerReport({0: {job.job_id: failed(job, 1)}}))
        scene.cache.request_finished(request.request_id)

    def said(self) -> str:
        """All that people are told of the tier, and of the last miss."""
        found = status_of(self.scene.cache, self.scene.cache.metrics, "model", BLOCK_SIZE)
        return "\n".join([*(tier.trouble + tier.complaint for tier in found.tiers), found.records[-1].belief])


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.name)
def test_h120_a_store_is_used_again_within_thirty_seconds_of_its_trouble(trouble: Trouble) -> None:
    play = Play()
    assert play.second(OLD) == 8, "the store works"
    assert play.said().strip() == ""
    fresh = iter(range(100, 10_000))
    play.fail_a_load(OLD)
    play.place.begin(trouble)
    for second in range(LASTS):
        play.second(OLD if second % 2 else next(fresh))
        assert second < 10 or re.search(trouble.told, play.said()), f"after {second} s: {play.said()}"
    play.place.end()
    ended, seed = play.scene.now, next(fresh)
    while play.second(OLD) + play.second(seed) < 16:
        assert play.scene.now < ended + AGAIN_SECONDS, play.said()
    play.second(OLD)
    assert play.said().strip() == "", "what is over is not said any more"
    assert play.scene.cache.observe()["leases_held"] == 0
