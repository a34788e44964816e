"""A step that computes very many blocks orders saves of some of them; later steps order the rest, in order."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kvpact.cache.put_off import CATCH_UP_STEPS
from kvpact.contract import JobOutcome, SaveJob, StepWork, WorkerReport
from kvpact.identity.keys import MediaSpan, RequestIdentity
from kvpact.index.block_index import BlockIndex
from kvpact.metrics import MEMORY, series
from kvpact.ranges import RangeSet
from scenes import BLOCK_SIZE, Scene, SceneRequest, tokens

PIECE = 4
LENGTH = 6 * PIECE * BLOCK_SIZE + 1
"""Tokens of a prompt of six pieces, and the one that is computed in any case."""


def in_pieces(slots: int = 64, **settings: Any) -> Scene:
    """A scene whose cache orders saves of four blocks a step."""
    scene = Scene(slots, **settings)
    scene.cache.saves.put_off.piece_blocks = PIECE
    scene.cache.end_step()
    return scene


@pytest.fixture
def scene() -> Scene:
    """Memory for 64 blocks."""
    return in_pieces()


def steps_until_rest(scene: Scene, work: StepWork) -> list[SaveJob]:
    """Report this step and go on while the cache has work; returns the saves in their order."""
    saves = [*work.saves]
    scene.report(work)
    while scene.cache.has_pending_work:
        work = scene.cache.end_step()
        saves += work.saves
        scene.report(work)
        scene.cache.check()
    return saves


def test_a_large_step_is_saved_piece_by_piece_and_the_request_may_end_meanwhile(scene: Scene) -> None:
    request = SceneRequest("a", tokens(LENGTH))
    work = scene.step_computing(request)
    assert [(save.start_block, len(save.slots)) for save in work.saves] == [(0, PIECE)]
    table = scene.tables["a"][:24]
    assert scene.blocks.held == dict.fromkeys(table, 1), "what is saved later is held from now on"
    assert scene.cache.under_way["saves"] == 2, "what is saved now, and the rest"
    scene.cache.request_finished("a")
    saves = steps_until_rest(scene, work)
    assert [(save.start_block, len(save.slots)) for save in saves] == [(at, PIECE) for at in range(0, 24, PIECE)]
    assert [block for save in saves for block in save.block_ids] == table
    assert not scene.blocks.held
    again = SceneRequest("b", tokens(LENGTH))
    match = scene.prepare(again)
    assert match.num_tokens == LENGTH - 1
    scene.load(again, match)
    assert scene.holds_content(again, range(24))


def test_blocks_are_given_back_in_the_sequences_in_which_they_were_taken(scene: Scene) -> None:
    work = scene.step_computing(SceneRequest("a", tokens(LENGTH)))
    steps_until_rest(scene, work)
    assert len(scene.blocks.taken) == 6
    assert not any(scene.blocks.taken.values()), "else `BlockRefs` counts each block, a quarter of a save's report"


def test_what_the_engine_computes_again_is_saved_when_it_has(scene: Scene) -> None:
    """An engine that drops a step's tokens goes back: blocks behind hold nothing until they are computed again."""
    request = SceneRequest("a", tokens(LENGTH))
    scene.report(scene.step_computing(request))
    scene.cache.note_computed(request, 10 * BLOCK_SIZE, lambda: scene.tables["a"])
    saves = steps_until_rest(scene, scene.cache.end_step())
    assert [(save.start_block, len(save.slots)) for save in saves] == [(4, PIECE), (8, 2)]
    scene.cache.note_computed(request, LENGTH, lambda: scene.tables["a"])
    saves = steps_until_rest(scene, scene.cache.end_step())
    assert [block for save in saves for block in save.block_ids] == scene.tables["a"][10:24]


def test_two_large_requests_of_one_step_wait_in_turn(scene: Scene) -> None:
    requests = [SceneRequest(name, tokens(2 * PIECE * BLOCK_SIZE + 1, seed)) for seed, name in enumerate("ab")]
    for request in requests:
        scene.compute(request)
        scene.cache.note_computed(
            request, len(request.token_ids), partial(scene.tables.__getitem__, request.request_id)
        )
    saves = steps_until_rest(scene, scene.cache.end_step())
    assert [(save.request_id, save.start_block) for save in saves] == [("a", 0), ("a", 4), ("b", 0), ("b", 4)]


def test_many_blocks_that_wait_are_caught_up_with_in_few_steps() -> None:
    scene = in_pieces(1024, engine_blocks=2048)
    work = scene.step_computing(SceneRequest("a", tokens(10 * CATCH_UP_STEPS * PIECE * BLOCK_SIZE + 1)))
    sizes = []
    while scene.cache.has_pending_work:
        sizes.append(sum(len(save.slots) for save in work.saves))
        scene.report(work)
        work = scene.cache.end_step()
    assert sizes[1] >= 9 * PIECE
    assert sorted(sizes[1:], reverse=True) == sizes[1:], "the fewer wait, the fewer a step orders"
    assert len(sizes) < 3 * CATCH_UP_STEPS + 10


def test_steps_that_save_nothing_make_room_and_those_that_save_find_it() -> None:
    scene = Scene(1024, engine_blocks=2048)

    def save(number: int, blocks: int) -> int:
        """Returns how many blocks were evicted until the step was over."""
        request, before = SceneRequest(f"{number}", tokens(blocks * BLOCK_SIZE + 1, number)), evicted()
        work = scene.step_computing(request)
        count = evicted() - before
        scene.report(work)
        scene.cache.request_finished(request.request_id)
        return count

    def evicted() -> int:
        return int(scene.cache.observe()[series("evicted_blocks", MEMORY)])

    assert sum(save(number, 256) for number in range(4)) == 0
    first = SceneRequest("again", tokens(256 * BLOCK_SIZE + 1))
    for _ in range(3):
        scene.cache.end_step()
    assert evicted() == 16, "one in 64, and no more in later steps"
    assert scene.prepare(first).num_tokens == (256 - 16) * BLOCK_SIZE, "the end of the least recently used chain"
    assert save(4, 8) == 0
    assert save(5, 64) == 64, "so many as it takes"
    scene.cache.check()


def test_blocks_that_another_request_has_saved_meanwhile_are_not_saved_again(scene: Scene) -> None:
    first = scene.step_computing(SceneRequest("a", tokens(LENGTH)))
    second = scene.step_computing(SceneRequest("b", tokens(LENGTH)))
    scene.report(first)
    saves = [*first.saves, *steps_until_rest(scene, second)]
    assert sorted(save.start_block for save in saves) == [*range(0, 24, PIECE)]
    assert not scene.blocks.held


def test_a_reset_drops_what_is_put_off(scene: Scene) -> None:
    work = scene.step_computing(SceneRequest("a", tokens(LENGTH)))
    scene.cache.reset()
    assert len(steps_until_rest(scene, work)) == 1
    assert not scene.blocks.held
    assert scene.prepare(SceneRequest("b", tokens(LENGTH))).num_tokens == 0


def test_h106_saves_that_are_given_up_hold_no_block_and_store_nothing(scene: Scene) -> None:
    work = scene.step_computing(SceneRequest("a", tokens(LENGTH)))
    assert scene.cache.under_way["saves"] == 2, "one is put off"
    scene.cache.give_up_saves()
    assert not scene.blocks.held
    assert scene.cache.under_way["saves"] == 1, "a worker may still write to the slots"
    assert len(steps_until_rest(scene, work)) == 1, "nothing that was put off is ordered"
    assert scene.cache.under_way["saves"] == 0
    assert scene.prepare(SceneRequest("b", tokens(LENGTH))).num_tokens == 0
    scene.cache.check()


def test_h116_ranks_judge_no_save_that_is_given_up_or_whose_blocks_are_computed_anew_and_all_later_ones(
    scene: Scene,
) -> None:
    (segment,) = scene.segments
    first = scene.step_computing(SceneRequest("a", tokens(LENGTH)))
    assert all(save.job_id >= segment.judged_from for save in first.saves)
    scene.cache.give_up_saves()
    assert all(save.job_id < segment.judged_from for save in first.saves)
    steps_until_rest(scene, first)
    second = scene.step_computing(SceneRequest("b", tokens(LENGTH)))
    assert all(save.job_id >= segment.judged_from for save in second.saves)
    scene.cache.distrust_blocks(second.saves[0].block_ids[:1], {"b": scene.tables["b"]})
    assert all(save.job_id < segment.judged_from for save in second.saves)
    assert all(save.job_id >= segment.judged_from for save in steps_until_rest(scene, second)[len(second.saves) :])


def test_h48_of_blocks_that_hold_garbage_and_those_after_them_nothing_is_saved(scene: Scene) -> None:
    request = SceneRequest("a", tokens(LENGTH))
    work = scene.step_computing(request)
    scene.cache.request_finished("a")
    scene.cache.distrust_blocks([scene.tables["a"][9]], {})
    saves = steps_until_rest(scene, work)
    assert [block for save in saves for block in range(save.start_block, save.blocks.end)] == [*range(9)]
    assert not scene.blocks.held
    assert scene.prepare(SceneRequest("b", tokens(LENGTH))).num_tokens == 9 * BLOCK_SIZE


def test_h26_a_load_that_fails_takes_what_was_computed_after_it_with_it(scene: Scene) -> None:
    """The engine computes on top of a load of the same step; the report of both says that the load failed."""
    scene.run_cold(SceneRequest("a", tokens(2 * BLOCK_SIZE + 1)))
    request = SceneRequest("b", tokens(LENGTH))
    match = scene.prepare(request)
    assert (match.num_tokens, match.load_kv_async) == (2 * BLOCK_SIZE, False)
    scene.compute(request)
    scene.cache.commit_external_match(request, match, match.num_tokens, scene.tables["b"])
    scene.cache.note_computed(request, LENGTH, lambda: scene.tables["b"])
    work = scene.cache.end_step()
    outcomes = scene.execute(work, 0)
    (load,) = work.loads
    outcomes[load.job_id] = JobOutcome(failed=RangeSet.of(load.blocks))
    scene.cache.apply_report(WorkerReport({0: outcomes}))
    assert not steps_until_rest(scene, scene.cache.end_step())
    assert not scene.blocks.held
    assert scene.prepare(SceneRequest("c", tokens(LENGTH))).num_tokens == 0


def test_h47_blocks_of_an_adapter_that_is_distrusted_are_not_saved(scene: Scene) -> None:
    request = SceneRequest("a", tokens(LENGTH), RequestIdentity(adapter="digest"))
    work = scene.step_computing(request)
    scene.cache.distrust_adapter("digest")
    assert len(steps_until_rest(scene, work)) == 1
    assert not scene.blocks.held


def test_a_request_whose_blocks_get_other_names_saves_none_under_the_old_ones(scene: Scene) -> None:
    """Its last blocks turn out to hold an image."""
    request = SceneRequest("a", tokens(LENGTH))
    work = scene.step_computing(request)
    request.identity = RequestIdentity(media=(MediaSpan(10 * BLOCK_SIZE, BLOCK_SIZE, "image"),))
    scene.cache.note_computed(request, LENGTH, lambda: scene.tables["a"])
    saves = steps_until_rest(scene, work)
    assert not scene.blocks.held
    plain, with_image = SceneRequest("b", tokens(LENGTH)), SceneRequest("c", tokens(LENGTH), request.identity)
    assert scene.prepare(plain).num_tokens == 10 * BLOCK_SIZE
    assert scene.prepare(with_image).num_tokens == 24 * BLOCK_SIZE
    assert sum(len(save.slots) for save in saves) == 24


def test_where_memory_is_full_the_rest_is_dropped_and_released() -> None:
    scene = in_pieces(slots=10)
    saves = steps_until_rest(scene, scene.step_computing(SceneRequest("a", tokens(LENGTH))))
    assert sum(len(save.slots) for save in saves) == 10
    assert not scene.blocks.held
    assert scene.cache.observe()[series("dropped_blocks", "")] >= 2


def test_an_error_in_the_middle_of_a_save_leaves_nothing_held(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    work = scene.step_computing(SceneRequest("a", tokens(LENGTH)))
    with monkeypatch.context() as patch:
        patch.setattr(BlockIndex, "reserve", None)
        with pytest.raises(TypeError):
            scene.cache.end_step()
    assert len(steps_until_rest(scene, work)) == 1
    assert not scene.blocks.held


@pytest.mark.parametrize("slots", [9, 10, 12])
def test_h121_what_was_put_off_and_finds_no_room_is_counted(slots: int) -> None:
    scene = in_pieces(slots)
    steps_until_rest(scene, scene.step_computing(SceneRequest("a", tokens(LENGTH))))
    assert scene.cache.observe()[series("dropped_blocks", "")] == 6 * PIECE - slots


def test_h121_what_was_put_off_and_holds_garbage_is_counted(scene: Scene) -> None:
    work = scene.step_computing(SceneRequest("a", tokens(LENGTH)))
    scene.cache.request_finished("a")
    scene.cache.distrust_blocks([scene.tables["a"][9]], {})
    steps_until_rest(scene, work)
    assert scene.cache.observe()[series("dropped_blocks", "")] == 6 * PIECE - 9
