"""Used tokens are counted by the tier that had their blocks when they were looked up, and as seconds of prefill."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpact.metrics import MEMORY, series, tiers_in
from kvpact.tiers.shared.tier import SharedTier
from kvpact_testkit.tier.dictionary_store import DictionaryStore
from scenes import BLOCK_SIZE, NAMESPACE, PAGE, Scene, SceneRequest, open_disk, tokens


def asked(name: str, blocks: int = 8) -> SceneRequest:
    """A request for the document, or for its first blocks."""
    return SceneRequest(name, tokens(blocks * BLOCK_SIZE + 1))


def used(scene: Scene) -> dict[str, float]:
    """Used blocks by tier, of those that have any."""
    shot = scene.cache.observe()
    found = {tier: shot[series("used_tokens_from", tier)] / BLOCK_SIZE for tier in tiers_in(shot)}
    assert sum(found.values()) * BLOCK_SIZE == shot["used_tokens"]
    return {tier: blocks for tier, blocks in found.items() if blocks}


def serve(scene: Scene, request: SceneRequest, computed: int = 0) -> None:
    """Load what is promised, compute the rest, end."""
    match = scene.prepare(request, computed)
    assert match.num_tokens
    scene.load(request, match)
    scene.cache.note_computed(request, len(request.token_ids), lambda: scene.tables[request.request_id])
    scene.report(scene.cache.end_step())
    scene.cache.request_finished(request.request_id)
    scene.settle_tiers()


def test_each_part_of_a_prompt_counts_for_the_first_tier_that_has_it(tmp_path: Path) -> None:
    """The disk has 2 blocks, one store 5 and the other one all 8: then memory has them all."""
    near, far = DictionaryStore(), DictionaryStore()
    (tmp_path / "disk").mkdir()
    for blocks, tier in ((2, open_disk(tmp_path / "disk")), (5, None), (8, None)):
        store = near if blocks == 5 else far
        writer = Scene(tiers=[tier or SharedTier(store, NAMESPACE, PAGE)], recompute_if_faster=False)
        writer.run_cold(asked("there", blocks))
        writer.settle_tiers()
        writer.close()
    tiers = [open_disk(tmp_path / "disk"), *(SharedTier(store, NAMESPACE, PAGE) for store in (near, far))]
    scene = Scene(tiers=tiers, recompute_if_faster=False)
    serve(scene, asked("first"))
    assert used(scene) == {"disk": 2, "dictionary": 3, "dictionary-2": 3}
    serve(scene, asked("second"))
    assert used(scene) == {"disk": 2, "dictionary": 3, "dictionary-2": 3, MEMORY: 8}
    serve(scene, asked("third"), 3 * BLOCK_SIZE)
    assert used(scene)[MEMORY] == 13, "3 blocks are the engine's own"
    scene.forget_memory()
    serve(scene, asked("fourth"), 3 * BLOCK_SIZE)
    shares = used(scene)
    assert sum(shares.values()) == 26
    assert shares[MEMORY] == 13, "memory was empty"


def test_blocks_that_memory_has_already_count_for_it(tmp_path: Path) -> None:
    scene = Scene(tiers=[open_disk(tmp_path)], recompute_if_faster=False)
    scene.run_cold(asked("whole"))
    scene.settle_tiers()
    scene.forget_memory()
    serve(scene, asked("beginning", 3))
    assert used(scene) == {"disk": 3}
    serve(scene, asked("whole again"))
    assert used(scene) == {"disk": 8, MEMORY: 3}
    shot = scene.cache.observe()
    assert (shot["lookups"], shot["hits"]) == (2, 2)
    assert shot["load_seconds_count"] == 2
    assert shot["save_seconds_count"] == 1


def test_spared_seconds_are_used_tokens_at_the_speed_that_was_seen() -> None:
    scene = Scene()
    scene.run_cold(asked("cold"))
    serve(scene, asked("before a speed is known"))
    assert scene.cache.observe()["spared_prefill_seconds"] == 0
    scene.now += 0.5
    scene.run_cold(SceneRequest("another", tokens(8 * BLOCK_SIZE + 1, seed=1)))
    scene.now += 0.25
    scene.cache.end_step()
    shot = scene.cache.observe()
    assert shot["prefill_speed"] > 0
    seconds = 8 * BLOCK_SIZE / shot["prefill_speed"]
    assert shot["spared_prefill_seconds"] == pytest.approx(seconds)
    assert scene.cache.observe()["spared_prefill_seconds"] == pytest.approx(seconds), "each token once"
