"""Where a prompt came again and the state that it needs is missing, the cache says where a step should end."""

from __future__ import annotations

import pytest

from group_scenes import BLOCK, GroupScene, asked, full, states, window
from kvpact.cache.status import CHANGES, status_of
from kvpact.identity.groups import KVCacheGroup
from kvpact.metrics import MEMORY, Metrics, MissReason, series
from scenes import PAGE


def scene_of(*side: KVCacheGroup) -> GroupScene:
    """Of a model with full attention and these groups."""
    return GroupScene((full(), *side), (PAGE,) * (1 + len(side)))


def ask(scene: GroupScene, name: str, rows: int, held: int = 0) -> tuple[int, int]:
    """Rows promised to a request of which the engine has `held` rows, and rows after which a step should end."""
    match = scene.prepare(asked(name, rows), held * BLOCK)
    return match.num_tokens // BLOCK, scene.cache.step_end(name) // BLOCK


def test_a_prompt_that_comes_again_is_to_end_a_step_at_its_last_row_and_hits_the_next_time() -> None:
    scene = scene_of(states())
    assert ask(scene, "longer", 3) == (0, 0), "nobody knows the prompt"
    scene.finish(asked("longer", 3))
    assert ask(scene, "again", 2) == (0, 2)
    assert ask(scene, "again", 2) == (0, 2), "as often as the engine asks"
    assert scene.count(series("misses", MissReason.STATE_MISSING)) == 1
    scene.finish(asked("again", 2))
    assert scene.cache.step_end("again") == 0, "it has ended"
    assert ask(scene, "third", 2) == (2, 0)


def test_a_match_that_ends_before_a_missing_state_says_so_too() -> None:
    scene = scene_of(states())
    for rows in (1, 3):
        scene.finish(asked(f"to {rows}", rows))
    assert ask(scene, "between", 2) == (1, 2)
    assert ask(scene, "between", 2) == (1, 2), "also of the plan that is made already"


@pytest.mark.parametrize(("held", "end"), [(0, 4), (2, 4), (4, 0)])
def test_it_is_the_end_of_a_block_of_each_group_behind_what_the_engine_has(held: int, end: int) -> None:
    scene = scene_of(states(2 * BLOCK))
    scene.finish(asked("stored", 5))
    assert ask(scene, "goes on", 9, held) == (0, end)


def test_h32_a_reset_between_a_lookup_and_its_step_harms_no_step() -> None:
    """The keys of the epoch before are gone, by which the lookup found where a step is to end."""
    scene = scene_of(states())
    scene.finish(asked("longer", 3))
    assert ask(scene, "again", 2) == (0, 2)
    scene.cache.reset()
    scene.finish(asked("again", 2))
    assert ask(scene, "third", 2) == (2, 0)


def test_windows_need_no_step_to_end() -> None:
    scene = scene_of(window(3))
    scene.finish(asked("longer", 9))
    assert ask(scene, "shorter", 4) == (0, 0)
    assert scene.count(series("misses", MissReason.STATE_MISSING)) == 0


@pytest.mark.parametrize("remedy", ["add --block-size 384", ""])
def test_the_advice_is_the_remedy_that_the_start_knows(remedy: str) -> None:
    metrics = Metrics()
    metrics.add("lookups", 20)
    metrics.add("misses", 15, MissReason.STATE_MISSING)
    metrics.add("misses", 5, MissReason.NOT_STORED)
    status = status_of(None, metrics, "model", BLOCK)
    status.remedies = {series("misses", MissReason.STATE_MISSING): remedy} if remedy else {}
    assert status.to_change() == (remedy or CHANGES[MissReason.STATE_MISSING])


@pytest.mark.parametrize(("lost", "evicted", "is_advised"), [(100, 0, True), (99, 0, False), (100, 11, False)])
def test_states_of_answers_are_advised_where_they_were_lost_and_have_room(
    lost: int, evicted: int, is_advised: bool
) -> None:
    """Of 1,000 tokens of prompts, and 100 blocks that were saved."""
    metrics = Metrics()
    metrics.add("lookups", 20)
    metrics.add("lost_answer_tokens", lost)
    metrics.add("saved_blocks", 100)
    metrics.add("evicted_blocks", evicted, MEMORY)
    status = status_of(None, metrics, "model", BLOCK)
    status.prompts.tokens = 1000
    status.remedies = {"lost_answer_tokens": "add the option"}
    assert (status.to_change() == "add the option") == is_advised
