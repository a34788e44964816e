"""Requests that wait for room to read into: whose turn it is, how long it is worth it, and what others keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpact.cache.waiting import Claim, Queue, Waiting
from kvpact.metrics import EndReason, MissReason, series
from kvpact.tiers.costs import PrefillRate
from kvpact_testkit.tier.stepped_executor import SteppedExecutor
from scenes import BLOCK_SIZE, Scene, SceneRequest, open_disk, tokens

BLOCKS = 4
"""Of each prompt."""


def prompt(name: str, seed: int, blocks: int = BLOCKS) -> SceneRequest:
    return SceneRequest(name, tokens(blocks * BLOCK_SIZE + 1, seed))


class Crowd(Scene):
    """A cache over a disk that has the prompts of so many seeds, and memory for `in_memory` of them, which is empty."""

    def __init__(self, place: Path, seeds: int, in_memory: int = 4, **more: Any) -> None:
        self.disk = SteppedExecutor(open_disk(place, 256), 1 << 30)
        super().__init__(in_memory * BLOCKS, tiers=[self.disk], **{"recompute_if_faster": False, **more})
        for seed in range(seeds):
            self.run_cold(prompt(f"cold {seed}", seed))
            self.turn()
            self.turn()
        self.forget_memory()
        self.read: list[str] = []

    def turn(self) -> None:
        """The step ends; the disk does what it was told."""
        self.report(self.cache.end_step())
        self.disk.advance()
        self.now += 0.01
        self.cache.check()

    def step(self, waiting: list[SceneRequest], running: int = 1) -> list[SceneRequest]:
        """Ask about all that wait, in order, and load what is promised to at most so many; returns those."""
        admitted: list[SceneRequest] = []
        for request in waiting:
            if len(admitted) == running:
                break
            match = self.cache.prepare_external_match(request, 0)
            if match is None:
                continue
            if match.num_tokens:
                self.read.append(request.request_id)
                self.cache.commit_external_match(request, match, match.num_tokens, self.allocate(request))
            admitted.append(request)
        self.turn()
        for request in admitted:
            self.cache.request_finished(request.request_id)
        return admitted

    def count(self, name: str, label: str = "") -> float:
        return self.cache.observe()[series(name, label)]


def test_all_that_wait_are_read_in_the_order_of_the_queue_however_little_memory_there_is(tmp_path: Path) -> None:
    scene = Crowd(tmp_path, 12, in_memory=2)
    crowd = [prompt(f"r{seed:02}", seed) for seed in range(12)]
    waiting = list(crowd)
    for _ in range(100):
        for request in scene.step(waiting):
            waiting.remove(request)
    assert scene.read == [request.request_id for request in crowd]
    assert scene.count("read_blocks", "disk") == 12 * BLOCKS, "something was read twice"
    assert (scene.count("leases_held"), scene.count("misses", MissReason.NO_ROOM)) == (0, 0)


def test_the_head_of_the_queue_gets_the_room_of_what_was_read_for_its_end(tmp_path: Path) -> None:
    scene = Crowd(tmp_path, 4, in_memory=4)
    head, behind = prompt("head", 9, 2 * BLOCKS), [prompt(f"behind {seed}", seed) for seed in range(4)]
    scene.run_cold(prompt("cold head", 9, 2 * BLOCKS))
    scene.turn()
    scene.turn()
    scene.forget_memory()
    for step in (behind[:2], behind[2:3], behind[3:]):
        for request in step:
            assert scene.cache.prepare_external_match(request, 0) is None
            scene.now += 0.001
        for _ in range(3):
            scene.turn()
    assert (scene.count("leases_held"), scene.room()) == (4, 0)
    assert scene.cache.prepare_external_match(head, 0) is None
    assert scene.count("plans_ended", EndReason.YIELDED) == 2
    assert all(scene.cache.prepare_external_match(request, 0) for request in behind[2:]), "who was asked last keeps its"
    waiting = [head, *behind]
    for _ in range(30):
        for request in scene.step(waiting):
            waiting.remove(request)
    assert sorted(scene.read) == sorted(["head", *(request.request_id for request in behind)])


def test_who_was_asked_about_in_this_step_keeps_its_room(tmp_path: Path) -> None:
    scene = Crowd(tmp_path, 3, in_memory=1)
    first, second = prompt("first", 0), prompt("second", 1)
    for _ in range(5):
        scene.cache.prepare_external_match(first, 0)
        assert scene.cache.prepare_external_match(second, 0) is None
        scene.turn()
    assert scene.count("plans_ended", EndReason.YIELDED) == 0


def test_nothing_is_read_twice_for_requests_that_share_a_stem(tmp_path: Path) -> None:
    scene = Crowd(tmp_path, 0, in_memory=3)
    scene.run_cold(prompt("long", 0, 8))
    scene.turn()
    scene.turn()
    scene.forget_memory()
    crowd = [prompt(f"r{number}", 0, 8 - number % 3) for number in range(6)]
    waiting = list(crowd)
    for _ in range(40):
        for request in scene.step(waiting, running=2):
            waiting.remove(request)
    assert sorted(scene.read) == sorted(request.request_id for request in crowd)
    assert scene.count("read_blocks", "disk") == 8


def test_p11_a_disk_that_hangs_costs_each_request_its_deadline_and_no_more_than_its_turn(tmp_path: Path) -> None:
    scene = Crowd(tmp_path, 6, in_memory=1, prepare_deadline="1s")
    busy = prompt("busy", 77, 250)
    scene.cache.note_computed(busy, 1000, list)
    scene.cache.end_step()
    scene.now += 1.0  # it computes 1,000 tokens a second
    scene.cache.end_step()
    crowd = [prompt(f"r{seed}", seed) for seed in range(6)]
    scene.disk.stalled_steps = 10_000
    began, answered = scene.now, dict[str, float]()
    while len(answered) < len(crowd) and scene.now < began + 60:
        for request in crowd:
            if request.request_id not in answered and scene.cache.prepare_external_match(request, 0) is not None:
                answered[request.request_id] = scene.now - began
        scene.turn()
    own = BLOCKS * BLOCK_SIZE / 1000
    for number, request in enumerate(crowd):
        assert answered[request.request_id] <= 1.0 + number * own + 0.05


def test_while_nobody_knows_how_fast_the_engine_computes_the_queue_waits_as_long_as_it_moves(tmp_path: Path) -> None:
    scene = Crowd(tmp_path, 8, in_memory=1, prepare_deadline="1s")
    crowd = [prompt(f"r{seed}", seed) for seed in range(8)]
    waiting = list(crowd)
    for _ in range(60):
        for request in scene.step(waiting):
            waiting.remove(request)
        scene.now += 0.3
    assert scene.read == [request.request_id for request in crowd]


def test_a_save_has_its_share_while_others_wait_for_room(tmp_path: Path) -> None:
    scene = Crowd(tmp_path, 6, in_memory=4)
    crowd = [prompt(f"r{seed}", seed) for seed in range(6)]
    for request in crowd:
        assert scene.cache.prepare_external_match(request, 0) is None
    running = prompt("running", 99)
    work = scene.step_computing(running)
    assert sum(len(job.slots) for job in work.saves) == BLOCKS
    assert scene.count("dropped_blocks") == 0


def test_reads_have_their_share_while_saves_take_all_they_can(tmp_path: Path) -> None:
    scene = Crowd(tmp_path, 1, in_memory=4)
    scene.report(scene.step_computing(prompt("a", 11)))  # the disk is slow to write it, so its slots are in use
    scene.report(scene.step_computing(prompt("b", 12)))
    scene.report(scene.step_computing(prompt("c", 13)))
    waits = prompt("waits", 0)
    work = scene.step_computing(prompt("d", 14))
    assert sum(len(job.slots) for job in work.saves) == BLOCKS
    assert scene.cache.prepare_external_match(waits, 0) is None
    scene.report(work)
    waiting = [waits]
    for number in range(20):
        if scene.step(waiting):
            break
        scene.report(scene.step_computing(prompt(f"more {number}", 20 + number)))
    assert scene.read == ["waits"]


def rate(tokens_per_second: float) -> PrefillRate:
    prefill = PrefillRate(1)
    prefill.note_step(1000, 1.0)
    prefill.note_step(0, 1.0 + 1000 / tokens_per_second)
    return prefill


@pytest.mark.parametrize(
    ("seconds", "resident", "waits"), [(0.4, 0, True), (0.8, 0, False), (0.4, 500, False), (0.1, 99, True)]
)
def test_a_request_waits_where_reading_beats_computing(seconds: float, resident: int, waits: bool) -> None:
    """100 blocks are ahead, which take half a second to read; the engine computes 200 blocks a second."""
    queue, ahead, mine = Queue(lambda: 100, 10), Waiting(), Waiting()
    ahead.claim = Claim(100, 0.5, 0)
    queue.note(ahead)
    assert queue.wait(mine, Claim(100, seconds, 100), resident, rate(2000)) is waits
    assert mine.ahead == (1000 if waits else None)
    assert queue.wait(mine, Claim(100, seconds, 100), resident, PrefillRate(1)), "while a speed is unknown it waits"


@settings(max_examples=200)
@given(
    usable=st.integers(1, 100),
    claims=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=8),
    available=st.integers(0, 100),
)
def test_p12_neither_reads_nor_saves_take_the_others_share(
    usable: int, claims: list[tuple[int, int]], available: int
) -> None:
    queue = Queue(lambda: usable, 16)
    for holds, lacks in claims:
        waiting = Waiting()
        waiting.claim = Claim(holds + lacks, 0.1, lacks)
        queue.note(waiting)
    read, saved = queue.room_to_read(available), queue.room_to_save(available)
    assert 0 <= read <= available
    assert 0 <= saved <= available
    if any(holds + lacks for holds, lacks in claims):
        assert available - read >= min(available, usable // 4)
    if any(lacks for _, lacks in claims):
        assert read == 0
        assert available - saved >= min(available, usable // 4 - sum(holds for holds, _ in claims))
    queue.end_step()
    assert queue.room_to_read(available) == queue.room_to_save(available) == available


def test_told_no_room_is_said_again_at_the_cost_of_a_comparison(tmp_path: Path) -> None:
    scene = Crowd(tmp_path, 6, in_memory=1)
    crowd = [prompt(f"r{seed}", seed) for seed in range(6)]
    for request in crowd:
        assert scene.cache.prepare_external_match(request, 0) is None
    scene.cache.end_step()
    assert all(scene.cache.still_waits(request.request_id, 0) for request in crowd)
    assert all(scene.cache.may_wait(request.request_id) for request in crowd)
    scene.now += 60
    assert not any(scene.cache.still_waits(request.request_id, 0) for request in crowd)
    assert not any(scene.cache.may_wait(request.request_id) for request in crowd)
