"""Nothing of what is usually counted: no bytes in a chain, no token in a prompt, no bytes to share tokens out by."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from group_scenes import GroupScene, asked, full, states, window
from kvpact.cache.totals import shares_of
from kvpact.identity.groups import KVCacheGroup
from kvpact.metrics import MissReason, series
from kvpact.tiers.executor import TierExecutor
from kvpact.tiers.shared.tier import SharedTier
from kvpact_testkit.tier.dictionary_store import DictionaryStore
from polling import until
from scenes import NAMESPACE, PAGE, Scene, SceneRequest


@pytest.mark.parametrize(
    "groups", [(window(3),), (states(),), (full(), window(3)), (window(3), states())], ids=["w", "s", "f+w", "w+s"]
)
def test_a_tier_that_opens_late_gets_the_blocks_of_a_model_without_full_attention(
    groups: Sequence[KVCacheGroup],
) -> None:
    """The rows of such a model's chain are names: there is nothing of them to write."""
    scene = GroupScene(groups, [PAGE * (number + 1) for number in range(len(groups))])
    scene.run_cold(asked("there", 8))
    scene.cache.open_tiers([TierExecutor(SharedTier(DictionaryStore(), NAMESPACE, 4 * PAGE), 2, 1 << 30)])

    def is_offered() -> bool:
        scene.cache.end_step()
        return not scene.cache.writeback.waiting

    until(is_offered)
    scene.settle_tiers()
    assert scene.count(series("written_blocks", "dictionary")) == scene.count("saved_blocks")


def test_a_prompt_of_no_token_is_too_short() -> None:
    scene = Scene()
    assert scene.prepare(SceneRequest("empty", [])).num_tokens == 0
    assert scene.cache.observe()[series("misses", MissReason.TOO_SHORT)] == 1


def test_tokens_of_no_bytes_go_to_the_first_place_and_none_to_none() -> None:
    assert shares_of(7, [0, 0]) == [7, 0]
    assert shares_of(0, [0, 3]) == [0, 0]
    assert shares_of(0, []) == []
