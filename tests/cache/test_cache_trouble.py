"""What random plays once found in the cache, each as the few calls that it takes."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import pytest

from kvpact.cache.idle_steps import LONGEST_STEP_SECONDS, VAIN_SECONDS
from kvpact.cache.needs.runs import Run, linked
from kvpact.cache.writeback import MAX_UNWRITTEN
from kvpact.contract import WorkerReport
from kvpact.metrics import MissReason, series
from kvpact_testkit.faults import Fault, Faults, FaultyTier, Operation
from kvpact_testkit.tier.stepped_executor import SteppedExecutor
from scenes import BLOCK_SIZE, Scene, SceneRequest, failed, open_disk, tokens


class SteppedScene(Scene):
    """A scene above a disk tier that works only when told to, and fails when told to."""

    def __init__(self, path: Path, slots: int = 16, **settings: Any) -> None:
        self.faults = Faults()
        self.queue = SteppedExecutor(FaultyTier(open_disk(path), self.faults), 1 << 30)
        super().__init__(slots, tiers=[self.queue], **settings)

    def only_on_disk(self, request: SceneRequest) -> None:
        """Compute and save the request, then lose it from memory alone."""
        self.run_cold(request)
        self.queue.advance()
        self.cache.end_step()
        self.forget_memory()


def request(blocks: int, name: str = "r") -> SceneRequest:
    return SceneRequest(name, tokens(blocks * BLOCK_SIZE + 1))


def test_a_job_is_not_asked_about_in_the_step_that_orders_it() -> None:
    scene = Scene(load_deadline=3.0)
    first = request(3, "first")
    scene.run_cold(first)
    again = request(3, "again")
    match = scene.prepare(again)
    scene.cache.commit_external_match(again, match, match.num_tokens, scene.allocate(again))
    scene.now += 10.0  # a long step, or an engine that commits late
    work = scene.cache.end_step()
    assert work.loads
    assert not work.inquiries
    scene.now += 2.0
    assert [inquiry.job_id for inquiry in scene.cache.end_step().inquiries] == [work.loads[0].job_id]
    scene.report(work)
    scene.cache.request_finished("again")


def test_h02_a_tier_that_failed_a_request_is_not_read_again_for_it_every_step(tmp_path: Path) -> None:
    scene = SteppedScene(tmp_path)
    scene.only_on_disk(request(3, "first"))
    blocked = request(3, "blocked")
    scene.faults.arm(Operation.GET, Fault.ERROR, times=100)
    assert scene.cache.prepare_external_match(blocked, 0) is None
    scene.queue.advance()
    answers = [scene.cache.prepare_external_match(blocked, 0) for _ in range(20)]
    assert [answer.num_tokens for answer in answers if answer is not None] == [0] * 20
    assert scene.queue.reads == 1
    shot = scene.cache.observe()
    assert shot[series("misses", MissReason.NOT_DELIVERED)] == 1, "the disk said that it holds them"
    scene.cache.request_finished("blocked")


def test_a_lookup_that_found_no_room_and_then_a_failing_tier_is_one_miss(tmp_path: Path) -> None:
    scene = SteppedScene(tmp_path, slots=3)
    scene.only_on_disk(request(3, "first"))
    other = SceneRequest("other", tokens(3 * BLOCK_SIZE + 1, seed=5))
    work = scene.step_computing(other)  # all slots are being written to
    blocked = request(3, "blocked")
    assert scene.cache.prepare_external_match(blocked, 0) is None
    scene.report(work)
    scene.queue.advance()
    scene.faults.arm(Operation.GET, Fault.ERROR)
    scene.cache.end_step()
    assert scene.cache.prepare_external_match(blocked, 0) is None
    scene.queue.advance()
    assert scene.prepare(blocked).num_tokens == 0
    scene.cache.request_finished("blocked")
    scene.cache.request_finished("other")
    scene.close()  # checks that no more lookups missed than were made


@pytest.mark.parametrize("cleared", [False, True])
def test_p9_what_is_being_deleted_from_a_slow_tier_is_not_promised_meanwhile(tmp_path: Path, cleared: bool) -> None:
    scene = SteppedScene(tmp_path, load_deadline=3.0)
    first = request(4, "first")
    scene.run_cold(first)
    scene.queue.advance()
    failing = request(4, "failing")
    match = scene.prepare(failing)
    scene.cache.commit_external_match(failing, match, match.num_tokens, scene.allocate(failing))
    (job,) = scene.cache.end_step().loads
    scene.cache.apply_report(WorkerReport({0: {job.job_id: failed(job, 1)}}))
    if cleared:
        scene.cache.reset()
    other = request(4, "other")
    assert scene.prepare(other).num_tokens == (0 if cleared else BLOCK_SIZE)
    scene.queue.advance()
    for name in ("failing", "other"):
        scene.cache.request_finished(name)


def test_a_late_step_does_one_of_what_can_wait_and_the_next_one_the_other(tmp_path: Path) -> None:
    scene = SteppedScene(tmp_path)
    scene.cache.budget.limit = 0.0
    scene.run_cold(request(3, "first"))
    has_pending_work = scene.cache.has_pending_work
    assert has_pending_work
    for _ in range(2):
        scene.cache.end_step()
    assert scene.cache.tiers.pending, "in two late steps nothing was offered to the tier"
    scene.queue.advance()
    for _ in range(2):
        scene.cache.end_step()
    assert not scene.cache.has_pending_work, "in two late steps it was not heard that the tier is done"
    scene.close()
    assert scene.cache.metrics.snapshot()[series("written_blocks", "disk")] == 3


def test_h13_chains_that_no_step_offers_to_tiers_do_not_keep_the_engine_stepping_for_ever(tmp_path: Path) -> None:
    scene = SteppedScene(tmp_path)
    scene.cache.budget.limit = 0.0
    scene.run_cold(request(3, "first"))
    assert scene.cache.writeback.waiting
    for _ in range(1 + round(VAIN_SECONDS / LONGEST_STEP_SECONDS)):  # in each of which `end_step` fails
        assert scene.cache.has_pending_work
        scene.now += LONGEST_STEP_SECONDS
    assert not scene.cache.has_pending_work
    scene.close()
    assert scene.cache.metrics.snapshot()[series("written_blocks", "disk")] == 3


def test_a_late_step_offers_tiers_one_chain_only(tmp_path: Path) -> None:
    scene = SteppedScene(tmp_path)
    scene.cache.budget.limit = 0.0
    for _ in range(3):
        scene.cache.writeback.note_saved(linked(()))
    scene.cache.end_step()
    scene.cache.end_step()
    assert scene.cache.writeback.waiting == 2
    for _ in range(4 * MAX_UNWRITTEN):
        scene.cache.writeback.note_saved(linked(()))
    scene.cache.end_step()
    scene.cache.end_step()
    assert scene.cache.writeback.waiting == MAX_UNWRITTEN, "however late steps are, only so many wait (P12)"
    scene.cache.budget.limit = inf
    scene.cache.end_step()
    assert not scene.cache.writeback.waiting


def test_h13_a_chain_that_cannot_be_offered_is_not_offered_in_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(run: Run) -> None:
        raise RuntimeError("a tier's client is broken")

    writeback = SteppedScene(tmp_path).cache.writeback
    monkeypatch.setattr(writeback, "offer", fails)
    writeback.note_saved(linked(()))
    with pytest.raises(RuntimeError):
        writeback.offer_some()
    assert not writeback.waiting


def test_a_write_put_off_is_not_made_of_blocks_that_memory_has_dropped(tmp_path: Path) -> None:
    scene = SteppedScene(tmp_path)
    scene.cache.budget.limit = 0.0
    scene.run_cold(request(3, "first"))
    scene.forget_memory()
    for _ in range(2):
        scene.cache.end_step()
    assert not scene.cache.has_pending_work
    assert scene.cache.metrics.snapshot()[series("dropped_writes", "disk")] == 3
    scene.run_cold(request(3, "second"))
    scene.cache.reset()
    assert not scene.cache.has_pending_work
    scene.close()
    assert scene.cache.metrics.snapshot()[series("written_blocks", "disk")] == 0


def test_blocks_that_memory_drops_before_they_are_offered_are_counted_once_where_they_lack(tmp_path: Path) -> None:
    """Two blocks are on disk. The prompt comes again with two more, and then with a fifth; memory loses all."""
    scene = Scene(tiers=[open_disk(tmp_path)])
    blocks = tokens(5 * BLOCK_SIZE)
    scene.run_cold(SceneRequest("two", blocks[: 2 * BLOCK_SIZE]))
    scene.settle_tiers()
    scene.forget_memory()
    steps = [scene.step_computing(SceneRequest(str(count), blocks[: count * BLOCK_SIZE])) for count in (4, 5)]
    scene.cache.budget.limit = 0.0
    for step in steps:
        scene.report(step)
    scene.forget_memory()
    scene.cache.budget.limit = inf
    scene.cache.end_step()
    counts = scene.cache.metrics.snapshot()
    assert (counts[series("written_blocks", "disk")], counts[series("dropped_writes", "disk")]) == (2, 3)
    scene.close()


def test_a_write_put_off_is_made_at_shutdown(tmp_path: Path) -> None:
    scene = Scene(tiers=[open_disk(tmp_path)])
    scene.cache.budget.limit = 0.0
    scene.run_cold(request(3, "first"))
    scene.close()
    again = open_disk(tmp_path)
    assert again.capacity().blocks == 3
    again.close()
