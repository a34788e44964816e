"""Prompts that another engine of the host has in its memory: promised under a lease, loaded from its slots by the
ranks, and saved here as if they had been computed."""

from __future__ import annotations

import gc
import time
import weakref

import pytest

from kvpact.contract import ExternalMatchExit, JobOutcome, StepWork, WorkerReport
from kvpact.index.claims import Claims
from kvpact.ranges import RangeSet
from neighbour_scenes import NeighbourScene, neighbour_scenes
from scenes import BLOCK_SIZE, SceneRequest, tokens

BLOCKS = 12


def prompt(name: str, blocks: int = BLOCKS, seed: int = 1) -> SceneRequest:
    """A prompt with so many whole blocks that can be loaded."""
    return SceneRequest(name, tokens(blocks * BLOCK_SIZE + 1, seed))


def saved(scene: NeighbourScene, blocks: int = BLOCKS, seed: int = 1) -> None:
    """A prompt is computed and saved."""
    scene.run_cold(prompt(f"cold {seed}", blocks, seed))


def ordered(scene: NeighbourScene, request: SceneRequest) -> StepWork:
    """The step that loads all that is promised of a prompt."""
    match = scene.prepare(request)
    scene.cache.commit_external_match(request, match, match.num_tokens, scene.allocate(request))
    return scene.cache.end_step()


def failed(work: StepWork, ranks: int = 1) -> WorkerReport:
    """All of a step's loads fail."""
    return WorkerReport(
        {rank: {job.job_id: JobOutcome(failed=RangeSet.of(job.blocks)) for job in work.loads} for rank in range(ranks)}
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prompt_that_one_engine_computed_is_loaded_by_the_other_at_once(ranks: int) -> None:
    one, other = neighbour_scenes(2, ranks=ranks)
    saved(one)
    request = prompt("r")
    other.assert_loads(request, BLOCKS * BLOCK_SIZE)
    assert other.loaded_elsewhere == BLOCKS
    assert (one.is_at_rest(), other.is_at_rest()) == (True, True)
    other.report(other.step_computing(request))
    other.cache.request_finished("r")
    assert other.used_from() == {"memory": 0, "neighbours": BLOCKS * BLOCK_SIZE}
    other.assert_loads(prompt("again"), BLOCKS * BLOCK_SIZE)
    assert other.loaded_elsewhere == BLOCKS, "what was loaded is in its own memory now"


def test_own_memory_comes_first_and_engines_go_on_where_others_end() -> None:
    one, two, other = neighbour_scenes(3, slots=128)
    saved(other, 3)
    saved(one, 7)
    saved(two, BLOCKS)
    request = prompt("r")
    work = ordered(other, request)
    assert [(job.start_block, len(job.slots), job.neighbour > 0) for job in work.loads] == [
        (0, 3, False),
        (3, BLOCKS - 3, True),
    ]
    other.report(work)
    assert other.holds_content(request, range(BLOCKS))
    other.cache.request_finished("r")
    assert [each.is_at_rest() for each in (one, two, other)] == [True] * 3


def test_what_is_promised_is_leased_and_ends_with_the_match() -> None:
    one, other = neighbour_scenes(2)
    saved(one)
    request = prompt("r")
    match = other.prepare(request)
    assert match.num_tokens == BLOCKS * BLOCK_SIZE
    assert not one.is_at_rest()
    for seed in range(2, 12):  # the owner needs its whole memory meanwhile
        saved(one, 15, seed)
    assert one.held(request) == 0
    other.load(request, match)
    assert other.holds_content(request, range(BLOCKS))
    assert one.is_at_rest()
    saved(one, 15, 1)
    match = other.prepare(prompt("s", 15))
    other.cache.abort_external_match("s", match, ExternalMatchExit.CANCELLED)
    assert one.is_at_rest()


def test_an_owner_that_refills_without_asking_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scene above with an owner that asks nobody: its neighbour loads other blocks."""
    monkeypatch.setattr(Claims, "granted", lambda self, rows: [rows])
    one, other = neighbour_scenes(2)
    saved(one)
    request = prompt("r")
    match = other.prepare(request)
    for seed in range(2, 12):
        saved(one, 15, seed)
    other.load(request, match)
    assert not other.holds_content(request, range(BLOCKS))


def test_fewer_tokens_taken_let_go_of_the_other_rows_at_once() -> None:
    one, other = neighbour_scenes(2)
    saved(one)
    request = prompt("r")
    match = other.prepare(request)
    other.cache.commit_external_match(request, match, 5 * BLOCK_SIZE, other.allocate(request))
    assert one.leased_rows() == 5
    other.report(other.cache.end_step())
    assert other.holds_content(request, range(5))
    assert one.is_at_rest()


def test_a_lease_ends_with_the_copy_and_not_with_the_request() -> None:
    one, other = neighbour_scenes(2, load_deadline="1s")
    saved(one)
    request = prompt("r")
    work = ordered(other, request)
    other.cache.request_finished("r")
    assert one.leased_rows() == BLOCKS, "ranks may still copy"
    other.now += 10
    for _ in range(5):
        other.cache.end_step()
        other.cache.apply_report(WorkerReport({0: {}}))
    assert one.leased_rows() == BLOCKS, "an overdue load keeps it, too"
    other.cache.apply_report(failed(work))
    assert (one.is_at_rest(), other.is_at_rest()) == (True, True)


def test_a_failed_load_is_not_promised_again_from_there_and_costs_the_owner_nothing() -> None:
    one, other = neighbour_scenes(2)
    saved(one)
    request = prompt("r")
    work = ordered(other, request)
    (settled,) = other.cache.apply_report(failed(work))
    assert len(settled.failed) == BLOCKS
    assert other.prepare(request).num_tokens == 0
    other.cache.request_finished("r")
    assert other.prepare(prompt("s")).num_tokens == 0, "that engine's block is suspect for all requests"
    one.assert_loads(prompt("t"), BLOCKS * BLOCK_SIZE)
    assert (one.is_at_rest(), other.is_at_rest()) == (True, True)


@pytest.mark.parametrize("how", ["gone", "reset"])
def test_an_engine_that_went_or_was_reset_serves_nothing_more(how: str) -> None:
    one, other = neighbour_scenes(2)
    saved(one)
    request = prompt("r")
    match = other.prepare(request)
    if how == "gone":
        other.leave(one)
    else:
        one.index.reset_columns()
    assert other.cache.commit_external_match(request, match, match.num_tokens, other.allocate(request)) == 0
    assert other.prepare(request).num_tokens == 0
    other.cache.request_finished("r")
    assert (one.is_at_rest(), other.is_at_rest()) == (True, True)


def test_h130_a_reset_that_found_no_descriptor_is_made_again_at_each_steps_end_until_it_succeeds() -> None:
    _, other = neighbour_scenes(2)
    answers = [True, True, False]
    asked: list[bool] = []

    def reset() -> None:
        asked.append(True)
        other.neighbours.owes_reset = answers[len(asked) - 1]

    other.neighbours.on_reset(reset)
    other.cache.reset()
    for _ in range(4):
        other.cache.end_step()
    assert len(asked) == 3


def test_a_reset_lets_go_of_the_table_that_others_have_read() -> None:
    one, _ = neighbour_scenes(2)
    saved(one)
    index = one.cache.index
    table = weakref.ref(index.columns)
    assert table() is not None
    index.reset_columns()
    gc.collect()
    assert table() is None, "its descriptors are closed"
    saved(one, seed=2)
    assert one.is_at_rest()


def test_a_load_from_an_engine_that_goes_meanwhile_ends_and_its_memory_is_let_go() -> None:
    one, other = neighbour_scenes(2)
    saved(one)
    request = prompt("r")
    work = ordered(other, request)
    engine = other.leave(one)
    assert one.leased_rows() == BLOCKS
    other.report(work)
    assert other.holds_content(request, range(BLOCKS))
    assert one.is_at_rest()
    other.report(other.cache.end_step())
    assert other.mapped == {}
    assert engine() is None, "nothing keeps the table of an engine that is gone"


def test_saves_without_room_are_dropped_while_neighbours_lease_what_was_evicted() -> None:
    one, other = neighbour_scenes(2, slots=32)
    saved(one, 8)
    request = prompt("r", 8)
    match = other.prepare(request)
    assert match.num_tokens == 8 * BLOCK_SIZE
    saved(one, 31, 2)
    one.cache.check()
    saved(one, 31, 3)
    one.cache.check()
    other.load(request, match)
    assert other.holds_content(request, range(8))
    one.cache.end_step()
    assert one.is_at_rest()
    assert one.room() == 32


def test_a_prompt_that_no_neighbour_holds_costs_little() -> None:
    """First keys decide: 32,768 tokens in blocks of 16; medians, beside the same look-up of an engine alone."""
    alone = NeighbourScene(2048)
    *others, one = neighbour_scenes(4, 2048)
    seconds = {}
    for name, scene in (("alone", alone), ("among", one)):
        taken = []
        for number in range(40):
            request = prompt(f"{name} {number}", 2048, 50 + number)
            state = scene.cache.requests.of(request)
            assert state.keys is not None
            state.keys.extend(request.token_ids, 2048)  # naming its blocks is no part of it
            began = time.perf_counter()
            scene.cache.prepare_external_match(request, 0)
            taken.append(time.perf_counter() - began)
            scene.cache.request_finished(request.request_id)
        seconds[name] = sorted(taken)[len(taken) // 2]
    assert seconds["among"] - seconds["alone"] < 2 * 0.1e-3  # twice: the machine is shared
    assert len(others) == 3
