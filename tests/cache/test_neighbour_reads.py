"""Prompts that another engine of the host has in its memory, on a device: read into own memory by a thread, then
promised and loaded from there."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from kvpact.cache.status import add_neighbours, status_of
from kvpact.contract import ExternalMatchExit, JobOutcome, WorkerReport
from kvpact.metrics import MissReason, series
from kvpact.pool import neighbour_tier
from kvpact.ranges import RangeSet
from kvpact.tiers.vectored import VectoredCall, completely
from neighbour_scenes import NeighbourScene, neighbour_scenes
from scenes import BLOCK_SIZE, SceneRequest, open_disk, tokens

BLOCKS = 12


def prompt(name: str, blocks: int = BLOCKS, seed: int = 1) -> SceneRequest:
    """A prompt with so many whole blocks that can be loaded."""
    return SceneRequest(name, tokens(blocks * BLOCK_SIZE + 1, seed))


def saved(scene: NeighbourScene, blocks: int = BLOCKS, seed: int = 1) -> None:
    """A prompt is computed and saved."""
    scene.run_cold(prompt(f"cold {seed}", blocks, seed))


def devices(count: int, slots: int = 64, **settings: object) -> list[NeighbourScene]:
    """So many engines on devices, each of which has met all others."""
    return neighbour_scenes(count, slots, device=True, **settings)


class Held:
    """Reads that go on only when a test lets them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.began = threading.Event()
        self.goes_on = threading.Event()
        patch.setattr(neighbour_tier, "completely", self._read)

    def _read(self, call: VectoredCall, descriptor: int, views: list[memoryview], offset: int) -> int:
        self.began.set()
        assert self.goes_on.wait(20)
        return completely(call, descriptor, views, offset)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prompt_that_one_engine_computed_is_read_once_and_loaded_from_own_memory(ranks: int) -> None:
    one, other = devices(2, ranks=ranks)
    saved(one)
    request = prompt("r")
    other.assert_loads(request, BLOCKS * BLOCK_SIZE)
    assert (other.loaded_elsewhere, other.read_elsewhere, other.held(request)) == (0, BLOCKS, BLOCKS)
    assert (one.is_at_rest(), other.is_at_rest()) == (True, True)
    work = other.step_computing(request)
    assert not work.saves, "what was read is in its memory"
    other.report(work)
    other.cache.request_finished("r")
    assert other.used_from() == {"memory": 0, "neighbours": BLOCKS * BLOCK_SIZE}
    other.assert_loads(prompt("again"), BLOCKS * BLOCK_SIZE)
    assert other.read_elsewhere == BLOCKS


def test_status_and_why_name_the_source_and_the_engine() -> None:
    one, other = devices(2)
    saved(one)
    request = prompt("r")
    other.assert_loads(request, BLOCKS * BLOCK_SIZE)
    other.report(other.step_computing(request))
    other.cache.request_finished("r")
    status = status_of(other.cache, other.cache.metrics, "model", BLOCK_SIZE)
    add_neighbours(status, other.cache)
    assert status.tokens_by_source() == {"engine": 0, "memory": 0, "neighbours": BLOCKS * BLOCK_SIZE}
    assert [(tier.name, tier.trouble) for tier in status.tiers] == [("neighbours", "")]
    assert status.blocks_leased_from == {"other": 0}
    assert status.records[-1].neighbours == ("other",)


def test_a_prompt_larger_than_what_may_be_leased_at_once_is_read_part_by_part() -> None:
    one, other = devices(2, 64)
    saved(one, 50)
    assert one.index.num_slots // 4 < 50
    other.assert_loads(prompt("r", 50), 50 * BLOCK_SIZE)
    assert one.is_at_rest()


def test_own_memory_comes_first_then_the_engine_with_most_then_the_disk(tmp_path: Any) -> None:
    one, two, other = devices(3, 128)
    disk = NeighbourScene(128, device=True, tiers=[open_disk(tmp_path)])
    saved(disk, BLOCKS)
    disk.settle_tiers()
    disk.forget_memory()
    saved(disk, 3)
    disk.settle_tiers()
    saved(one, 5)
    saved(two, 8)
    for each in (one, two):
        disk.meet(each, 2)
    request = prompt("r")
    disk.assert_loads(request, BLOCKS * BLOCK_SIZE)
    disk.report(disk.step_computing(request))
    disk.cache.request_finished("r")
    assert disk.used_from() == {
        "memory": 3 * BLOCK_SIZE,
        "neighbours": 5 * BLOCK_SIZE,
        "disk": (BLOCKS - 8) * BLOCK_SIZE,
    }
    assert [each.is_at_rest() for each in (one, two, other, disk)] == [True] * 4


def test_what_is_being_read_is_leased_until_the_read_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its request has been cancelled meanwhile; and the slots stay taken (H21)."""
    held = Held(monkeypatch)
    one, other = devices(2)
    saved(one)
    request = prompt("r")
    assert other.cache.prepare_external_match(request, 0) is None
    assert held.began.wait(20)
    assert one.leased_rows() == BLOCKS
    assert other.cache.others.leased_from() == {"other": BLOCKS}
    for seed in range(2, 8):  # the owner needs its whole memory meanwhile
        saved(one, 50, seed)
    assert one.held(request) == 0
    other.cache.abort_external_match("r", None, ExternalMatchExit.CANCELLED)
    other.cache.request_finished("r")
    room = other.room()
    other.cache.end_step()
    assert (one.leased_rows(), other.room()) == (BLOCKS, room)
    held.goes_on.set()
    other.settle_tiers()
    assert (one.is_at_rest(), other.is_at_rest()) == (True, True)
    assert other.held(prompt("s")) == 0, "its owner had given it up before the read ended"


def test_a_read_that_is_late_costs_its_request_the_hit_and_is_there_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held(monkeypatch)
    one, other = devices(2)
    saved(one)
    request = prompt("r")
    assert other.cache.prepare_external_match(request, 0) is None
    assert held.began.wait(20)
    other.now += 10
    match = other.prepare(request)
    assert match.num_tokens == 0
    assert other.cache.observe()[series("misses", MissReason.DEADLINE)] == 1
    other.cache.request_finished("r")
    held.goes_on.set()
    other.settle_tiers()
    other.assert_loads(prompt("s"), BLOCKS * BLOCK_SIZE)
    assert (one.is_at_rest(), other.is_at_rest()) == (True, True)


@pytest.mark.parametrize("event", ["reset", "refused", "dropped", "gone"])
def test_what_its_owner_gives_up_during_a_read_is_not_served(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    one, other = devices(2)
    saved(one)
    request = prompt("r")
    assert other.cache.prepare_external_match(request, 0) is None
    assert held.began.wait(20)
    columns = one.index.columns
    assert columns is not None
    if event == "reset":
        one.index.reset_columns()
    elif event == "refused":
        columns.refuse()
    elif event == "dropped":
        keys = one.cache.requests.of(prompt("k")).keys
        assert keys is not None
        one.index.drop(keys.extend(request.token_ids, BLOCKS)[5])
    else:
        other.leave(one)
    held.goes_on.set()
    expected = {"dropped": 5, "gone": BLOCKS}.get(event, 0)
    assert other.prepare(request).num_tokens == expected * BLOCK_SIZE, event
    other.cache.abort_external_match("r", None, ExternalMatchExit.CANCELLED)
    assert one.leased_rows() == 0


def test_a_file_that_cannot_be_read_costs_its_engine_these_blocks_and_no_other_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two, other = devices(3, 128)
    saved(one)
    sick = {segment.descriptor for segment in one.segments}

    def read(call: VectoredCall, descriptor: int, views: list[memoryview], offset: int) -> int:
        if descriptor in sick:
            raise OSError(5, "simulated")
        return completely(call, descriptor, views, offset)

    monkeypatch.setattr(neighbour_tier, "completely", read)
    request = prompt("r")
    assert other.prepare(request).num_tokens == 0
    assert other.cache.observe()[series("misses", MissReason.NOT_DELIVERED)] == 1
    other.cache.request_finished("r")
    assert other.cache.prepare_external_match(prompt("s"), 0) is not None, "it is not asked for them again"
    other.cache.request_finished("s")
    saved(two)
    other.assert_loads(prompt("t"), BLOCKS * BLOCK_SIZE)
    assert [each.is_at_rest() for each in (one, two, other)] == [True] * 3


def test_a_block_that_was_read_and_fails_to_load_is_not_read_again_and_costs_its_owner_nothing() -> None:
    one, other = devices(2)
    saved(one)
    request = prompt("r")
    match = other.prepare(request)
    other.cache.commit_external_match(request, match, match.num_tokens, other.allocate(request))
    work = other.cache.end_step()
    failed = {job.job_id: JobOutcome(failed=RangeSet.of(job.blocks)) for job in work.loads}
    other.cache.apply_report(WorkerReport({0: failed}))
    other.cache.request_finished("r")
    assert other.prepare(prompt("s")).num_tokens == 0
    assert one.held(request) == BLOCKS


def test_without_room_nothing_is_read_until_there_is_some() -> None:
    one, other = devices(2, 16)
    saved(one)
    saved(other, 15, 2)
    busy = prompt("busy", 15, 2)
    match = other.prepare(busy)
    assert match.num_tokens == 15 * BLOCK_SIZE
    other.cache.commit_external_match(busy, match, match.num_tokens, other.allocate(busy))
    work = other.cache.end_step()
    request = prompt("r")
    assert other.cache.prepare_external_match(request, 0) is None
    other.settle_tiers()
    assert other.read_elsewhere <= 1
    assert one.is_at_rest()
    other.report(work)
    other.cache.request_finished("busy")
    other.assert_loads(request, BLOCKS * BLOCK_SIZE)


def test_ranks_with_equal_bytes_have_one_segment_that_is_read_once() -> None:
    one, other = devices(2)
    met = other.met[one]
    met.segments *= 2
    saved(one)
    other.assert_loads(prompt("r"), BLOCKS * BLOCK_SIZE)
    assert other.read_elsewhere == BLOCKS


def test_an_engine_of_another_form_is_not_read() -> None:
    (one,) = neighbour_scenes(1, device=True)
    saved(one)
    two_ranks = NeighbourScene(device=True, ranks=2)
    two_ranks.meet(one)
    assert two_ranks.prepare(prompt("r")).num_tokens == 0
    assert one.is_at_rest()


def calls(step: Callable[[], object]) -> int:
    """Python functions that are called."""
    found: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return len(found)


def test_a_step_that_reads_nothing_costs_what_it_costs_where_ranks_copy() -> None:
    counts = []
    for device in (False, True):
        one, other = neighbour_scenes(2, device=device)
        saved(one)
        other.assert_loads(prompt("r"), BLOCKS * BLOCK_SIZE)
        for _ in range(3):
            other.report(other.cache.end_step())
        counts.append(calls(other.cache.end_step))
    assert counts[0] == counts[1]


def test_an_engine_that_has_met_nobody_opens_nothing() -> None:
    alone = NeighbourScene(device=True)
    saved(alone)
    threads = threading.active_count()
    assert alone.prepare(prompt("r", seed=2)).num_tokens == 0
    assert alone.cache.tiers.clients == []
    assert threading.active_count() == threads
