"""Writes fit in the tiers' queue, however small it is (H124), and what waits for room there is not passed (H121)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpact.cache.late_tiers import LateTiers
from kvpact.config import load_config
from kvpact.errors import ConfigError
from kvpact.identity.base_weights import BaseWeights
from kvpact.identity.keys import Namespace
from kvpact.metrics import series
from kvpact.tiers.record import UNSEALED
from kvpact.tiers.shared.tier import SharedTier
from kvpact_testkit.faults import Faults
from kvpact_testkit.tier.dictionary_store import DictionaryStore
from kvpact_testkit.tier.stepped_executor import SteppedExecutor
from scenes import BLOCK_SIZE, NAMESPACE, PAGE, Scene, SceneRequest, open_disk, tokens


def prompt(blocks: int, seed: int = 0) -> SceneRequest:
    return SceneRequest(f"r{seed}", tokens(blocks * BLOCK_SIZE, seed))


def queue_of(store: DictionaryStore, blocks: int) -> SteppedExecutor:
    """A shared tier whose queue takes so many blocks, and which writes when a scene steps."""
    return SteppedExecutor(SharedTier(store, NAMESPACE, PAGE), blocks * PAGE)


def step(scene: Scene, *queues: SteppedExecutor) -> None:
    for queue in queues:
        queue.advance()
    scene.report(scene.cache.end_step())
    scene.now += 0.1


def stored(store: DictionaryStore) -> int:
    """Blocks, without the namespace's own record."""
    return len(store.records) - 1


def dropped(scene: Scene) -> float:
    """By all tiers."""
    return sum(value for name, value in scene.cache.observe().items() if name.startswith("dropped_writes"))


@settings(max_examples=30)
@given(queue_blocks=st.integers(1, 40), prompt_blocks=st.integers(1, 30))
def test_h124_a_queue_of_one_block_or_more_stores_what_fits_in_it(queue_blocks: int, prompt_blocks: int) -> None:
    """Of a prompt that finds the queue empty; the rest is dropped, and counted."""
    store = DictionaryStore(faults=Faults())
    queue = queue_of(store, queue_blocks)
    scene = Scene(64, tiers=[queue])
    scene.run_cold(prompt(prompt_blocks))
    step(scene, queue)
    step(scene, queue)
    most_lost = max(1, queue_blocks // 2) - 1
    assert min(prompt_blocks, queue_blocks) - most_lost <= stored(store) <= prompt_blocks
    assert stored(store) + dropped(scene) == prompt_blocks
    scene.close()


@settings(max_examples=30)
@given(queue_blocks=st.integers(1, 40), prompts=st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_h121_what_memory_holds_is_written_to_a_late_tier_however_small_its_queue_is(
    queue_blocks: int, prompts: list[int]
) -> None:
    store = DictionaryStore(faults=Faults())
    scene, queue = Scene(256), queue_of(store, queue_blocks)
    for seed, blocks in enumerate(prompts):
        scene.run_cold(prompt(blocks, seed))
    scene.cache.open_tiers([queue])
    for _ in range(4 * sum(prompts) + 10):
        step(scene, queue)
    assert stored(store) == sum(prompts)
    assert dropped(scene) == 0
    scene.close()


def test_h121_a_late_tier_that_hangs_keeps_its_place_and_holds_up_no_other() -> None:
    """What memory holds is written to the sound one meanwhile, and to the other once it works again."""
    sick, sound = DictionaryStore(faults=Faults()), DictionaryStore(faults=Faults())
    scene, queues = Scene(256), [queue_of(sick, 8), queue_of(sound, 8)]
    scene.run_cold(prompt(30))
    scene.cache.open_tiers(queues)
    queues[0].stalled_steps = 60
    for _ in range(60):
        step(scene, *queues)
    assert (len(sick.records), stored(sound)) == (0, 30)
    for _ in range(60):
        step(scene, *queues)
    assert stored(sick) == 30
    assert dropped(scene) == 0


@pytest.mark.parametrize("queue", ["1KiB", "4095"])
def test_h124_a_queue_below_one_block_is_refused_by_name(queue: str, tmp_path: Path) -> None:
    config = load_config({"tiers": [f"disk://{tmp_path}?capacity=1MiB"], "write_queue": queue}, {})
    late = LateTiers(config, UNSEALED, Namespace({"model": "tiny"}), PAGE, BaseWeights(("files:0",)))
    with pytest.raises(ConfigError, match=r'^"write_queue": .* less than one block .*\(4KiB\).* set "1MiB" or more$'):
        late.open()
    assert not [*tmp_path.iterdir()]


def test_h124_without_tiers_any_queue_will_do() -> None:
    late = LateTiers(
        load_config({"write_queue": 1}, {}), UNSEALED, Namespace({"model": "tiny"}), PAGE, BaseWeights(("files:0",))
    )
    opened = late.open()
    assert opened is not None
    assert not opened.queues


def test_h124_a_disk_with_a_queue_of_two_blocks_holds_a_prompt_of_sixteen(tmp_path: Path) -> None:
    """With threads of its own: what found no room is offered again when it is used again."""
    scene = Scene(64, tiers=[open_disk(tmp_path)], write_queue=2 * PAGE)
    scene.run_cold(prompt(16))
    scene.settle_tiers()
    assert scene.cache.observe()[series("written_blocks", "disk")] >= 2
