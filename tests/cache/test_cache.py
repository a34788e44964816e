"""The cache keeps the pact: matches from memory and disk, promises that hold, exact failures, nothing left held."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from hook_time import LONG, LONG_BLOCKS, HookTime, assert_ends_within, assert_no_step_is_slow
from kvpact.cache.prepare import MAX_LOADS_WITHOUT_PROGRESS
from kvpact.contract import ExternalKVMatch, JobOutcome, StepWork, WorkerReport
from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey, MediaSpan, RequestIdentity
from kvpact.index.block_index import SlotState
from kvpact.metrics import MEMORY, EndReason, MissReason, explain_misses, series
from kvpact.tiers.base import BlockBuffer, Entry, Progress
from kvpact.tiers.disk.tier import DiskTier
from polling import until
from scenes import BLOCK_SIZE, PAGE, Scene, SceneRequest, done, failed, open_disk, tokens


@pytest.fixture
def scene() -> Scene:
    """Memory only, 16 slots, one rank."""
    return Scene()


def value(scene: Scene, name: str, label: str = "") -> float:
    """One count as it is now."""
    return scene.cache.observe()[series(name, label)]


def test_a_prompt_computed_once_is_loaded_the_next_time(scene: Scene) -> None:
    scene.run_cold(SceneRequest("a", tokens(17)))
    request = SceneRequest("b", tokens(17))
    match = scene.prepare(request)
    assert match.num_tokens == 16
    (settlement,) = scene.load(request, match)
    assert list(settlement.loaded.blocks()) == [0, 1, 2, 3]
    assert scene.holds_content(request, range(4))
    scene.cache.request_finished("b")
    assert (value(scene, "promised_tokens"), value(scene, "used_tokens"), value(scene, "leases_held")) == (16, 16, 0)
    assert not scene.blocks.held


def test_a_match_follows_what_the_engine_has_and_never_covers_the_last_token(scene: Scene) -> None:
    scene.run_cold(SceneRequest("a", tokens(16)))
    assert scene.prepare(SceneRequest("b", tokens(16)), computed=4).num_tokens == 8
    assert scene.prepare(SceneRequest("c", tokens(17)), computed=16).num_tokens == 0


def test_a_longer_request_saves_only_what_is_new(scene: Scene) -> None:
    scene.run_cold(SceneRequest("a", tokens(8)))
    longer = SceneRequest("b", tokens(24))
    (save,) = scene.step_computing(longer, 24).saves
    assert (save.start_block, len(save.slots)) == (2, 4)
    assert set(scene.blocks.held) == set(save.block_ids)
    scene.cache.apply_report(WorkerReport({0: {save.job_id: done(save)}}))
    assert not scene.blocks.held


def test_blocks_of_outputs_are_saved_as_the_request_grows(scene: Scene) -> None:
    request = SceneRequest("a", tokens(6))
    assert scene.report(scene.step_computing(request, 6)) == []
    request.token_ids += [7, 8, 9]
    scene.report(scene.step_computing(request, 9))
    assert value(scene, "saved_blocks") == 2


def test_two_ranks_must_both_save_before_a_block_is_served() -> None:
    scene = Scene(ranks=2)
    request = SceneRequest("a", tokens(8))
    work = scene.step_computing(request, 8)
    scene.cache.apply_report(WorkerReport({0: scene.execute(work, 0)}))
    assert scene.prepare(SceneRequest("b", tokens(9))).num_tokens == 0
    scene.cache.apply_report(WorkerReport({1: scene.execute(work, 1)}))
    again = SceneRequest("c", tokens(9))
    scene.load(again, scene.prepare(again))
    assert scene.holds_content(again, range(2))


def test_reset_forgets_everything_and_saves_anew(tmp_path: Path) -> None:
    scene = Scene(tiers=[open_disk(tmp_path)])
    scene.run_cold(SceneRequest("a", tokens(16)))
    scene.settle_tiers()
    scene.cache.reset()
    assert scene.prepare(SceneRequest("b", tokens(17))).num_tokens == 0
    scene.run_cold(SceneRequest("c", tokens(16)))
    assert scene.prepare(SceneRequest("d", tokens(17))).num_tokens == 16


def test_after_a_restart_the_disk_supplies_what_was_computed(tmp_path: Path) -> None:
    first = Scene(tiers=[open_disk(tmp_path)])
    first.run_cold(SceneRequest("a", tokens(33)))
    first.settle_tiers()
    first.close()
    second = Scene(tiers=[open_disk(tmp_path)])
    request = SceneRequest("b", tokens(33))
    assert second.cache.prepare_external_match(request, 0) is None
    match = second.prepare(request)
    assert match.num_tokens == 32
    second.load(request, match)
    assert second.holds_content(request, range(8))
    second.cache.request_finished("b")
    assert value(second, "read_blocks", "disk") == 8
    second.close()


def test_one_read_a_block_however_many_requests_wait_for_it(tmp_path: Path) -> None:
    scene = Scene(tiers=[open_disk(tmp_path)])
    on_disk_alone(scene)
    waiting = [SceneRequest(f"w{n}", tokens(33)) for n in range(5)]
    answers = [scene.cache.prepare_external_match(request, 0) for request in waiting]
    assert answers[0] is None
    for request in waiting:
        assert scene.prepare(request).num_tokens == 32
    assert value(scene, "read_blocks", "disk") == 8


def test_memory_smaller_than_the_prompt_serves_the_prefix_that_fits(tmp_path: Path) -> None:
    scene = Scene(slots=4, tiers=[open_disk(tmp_path)])
    scene.run_cold(SceneRequest("a", tokens(64)))
    scene.settle_tiers()
    request = SceneRequest("b", tokens(65))
    scene.assert_loads(request, 16)


# What separates one request's blocks from another's


@pytest.mark.parametrize(
    "other",
    [
        RequestIdentity(adapter="b1946ac92492"),
        RequestIdentity(salt="tenant-2"),
        RequestIdentity(media=(MediaSpan(2, 4, "image:5d41402a"),)),
        RequestIdentity(embeddings={0: b"digest"}),
    ],
    ids=["adapter", "salt", "media", "embeddings"],
)
def test_requests_that_differ_in_more_than_tokens_share_nothing(scene: Scene, other: RequestIdentity) -> None:
    scene.run_cold(SceneRequest("a", tokens(16)))
    assert scene.prepare(SceneRequest("b", tokens(17), identity=other)).num_tokens == 0
    assert scene.prepare(SceneRequest("c", tokens(17))).num_tokens == 16


def test_a_request_that_carries_something_unknown_is_neither_stored_nor_served(scene: Scene) -> None:
    scene.run_cold(SceneRequest("a", tokens(16), identity=None))
    assert len(scene.cache.index) == 0
    assert scene.prepare(SceneRequest("b", tokens(17), identity=None)).num_tokens == 0
    assert value(scene, "misses", MissReason.UNKNOWN_IDENTITY) == 1


def test_a_request_that_must_compute_its_prompt_is_stored_and_not_served(scene: Scene) -> None:
    scene.run_cold(SceneRequest("a", tokens(16), may_load=False))
    assert scene.prepare(SceneRequest("b", tokens(17), may_load=False)).num_tokens == 0
    assert scene.prepare(SceneRequest("c", tokens(17))).num_tokens == 16


# Promises and reservations


def test_h01_a_lookup_that_is_never_committed_leaves_nothing_pinned(scene: Scene) -> None:
    scene.run_cold(SceneRequest("a", tokens(40)))
    request = SceneRequest("b", tokens(40))
    for _ in range(976):
        assert scene.prepare(request).num_tokens == 36
        scene.cache.end_step()
        assert value(scene, "leases_held") == 1
    scene.cache.request_finished("b")
    assert (value(scene, "leases_held"), scene.room()) == (0, 16)


def test_h01_a_plan_that_nobody_renews_expires(scene: Scene) -> None:
    scene.run_cold(SceneRequest("a", tokens(16)))
    scene.prepare(SceneRequest("b", tokens(17)))
    for _ in range(4):
        scene.now += 20.0
        scene.cache.end_step()
    assert value(scene, "leases_held") == 0
    assert value(scene, "plans_ended", EndReason.NOT_RENEWED) == 1


def test_h02_a_blocked_request_is_looked_up_once(scene: Scene) -> None:
    scene.run_cold(SceneRequest("a", tokens(16)))
    blocked, absent = SceneRequest("b", tokens(17)), SceneRequest("c", tokens(17, seed=9))
    for _ in range(100):
        scene.prepare(blocked)
        scene.prepare(absent)
        scene.cache.end_step()
    assert value(scene, "lookups") == 2
    assert value(scene, "plans_opened") == 1


class CountedTokens(list[int]):
    """Token ids that count how many of them were read in slices."""

    read = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        if isinstance(place, slice):
            self.read += len(found)
        return found


def test_h02_keys_are_computed_once(scene: Scene) -> None:
    read = CountedTokens(tokens(41))
    scene.run_cold(SceneRequest("a", tokens(41)))
    for number in range(50):
        promised = scene.prepare(SceneRequest("b", read))
        assert (promised.num_tokens, number, read.read) == (40, number, 40)


def test_h03_a_changed_local_hit_replaces_the_plan(scene: Scene) -> None:
    scene.run_cold(SceneRequest("a", tokens(40)))
    request = SceneRequest("b", tokens(40))
    assert scene.prepare(request, computed=12).num_tokens == 24
    match = scene.prepare(request, computed=28)
    assert match.num_tokens == 8
    assert value(scene, "leases_held") == 1
    scene.load(request, match)
    assert scene.holds_content(request, range(7, 9))
    assert not scene.holds_content(request, range(3, 7))


def test_h03_a_stale_match_cannot_be_committed(scene: Scene) -> None:
    scene.run_cold(SceneRequest("a", tokens(40)))
    request = SceneRequest("b", tokens(40))
    stale = scene.prepare(request, computed=12)
    scene.prepare(request, computed=28)
    with pytest.raises(PactViolation, match="not its open plan"):
        scene.load(request, stale)


@pytest.mark.parametrize("taken", [0, 4, 12, 10])
def test_h04_a_commit_of_less_releases_the_rest_at_once(scene: Scene, taken: int) -> None:
    scene.run_cold(SceneRequest("a", tokens(40)))
    request = SceneRequest("b", tokens(40))
    match = scene.prepare(request)
    table = scene.allocate(request)
    scene.cache.commit_external_match(request, match, taken, table)
    blocks = -(-taken // BLOCK_SIZE)
    assert value(scene, "leases_held") == bool(taken)
    assert scene.room() == 16 - blocks
    scene.report(scene.cache.end_step())
    assert scene.holds_content(request, range(blocks))
    scene.cache.request_finished("b")
    totals = scene.cache.observe()
    assert totals["promised_tokens"] == 36
    assert totals["committed_tokens"] == totals["loaded_tokens"] == totals["used_tokens"] == taken
    assert totals["leases_held"] == 0


def test_h05_the_smallest_match_is_decided_in_prepare_and_then_kept() -> None:
    scene = Scene(min_match_blocks=3)
    scene.run_cold(SceneRequest("a", tokens(40)))
    assert scene.prepare(SceneRequest("b", tokens(40)), computed=28).num_tokens == 0
    request = SceneRequest("c", tokens(40))
    match = scene.prepare(request)
    (settlement,) = scene.load(request, match, tokens=4)  # the engine may take less; it is loaded all the same
    assert list(settlement.loaded.blocks()) == [0]
    assert scene.holds_content(request, range(1))


@pytest.mark.parametrize("length", [4, 8, 16, 17, 20, 40])
def test_h06_a_match_leaves_a_token_to_compute(scene: Scene, length: int) -> None:
    scene.run_cold(SceneRequest("a", tokens(40)))
    match = scene.prepare(SceneRequest("b", tokens(length)))
    assert match.num_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE < length


def test_h07_a_request_cancelled_while_its_load_runs_keeps_its_slots_until_the_report() -> None:
    scene = Scene(slots=4, sync_load_budget=0)
    scene.run_cold(SceneRequest("a", tokens(16)))
    request = SceneRequest("b", tokens(17))
    match = scene.prepare(request)
    assert match.load_kv_async
    scene.cache.commit_external_match(request, match, 16, scene.allocate(request))
    work = scene.cache.end_step()
    scene.cache.request_finished("b")
    other = SceneRequest("c", tokens(16, seed=5))
    assert scene.step_computing(other, 16).saves == ()  # no room: all four slots are being read
    scene.report(work)
    assert value(scene, "leases_held") == 0
    assert value(scene, "used_tokens") == 0
    assert scene.cache.has_pending_work is False


def test_h08_a_report_said_twice_settles_once(scene: Scene) -> None:
    scene.run_cold(SceneRequest("a", tokens(16)))
    request = SceneRequest("b", tokens(17))
    scene.cache.commit_external_match(request, scene.prepare(request), 16, scene.allocate(request))
    report = WorkerReport({0: scene.execute(scene.cache.end_step(), 0)})
    assert len(scene.cache.apply_report(report)) == 1
    assert scene.cache.apply_report(report) == []
    assert scene.cache.apply_report(report.aggregate(report)) == []


def test_h09_what_failed_once_is_not_promised_again() -> None:
    scene = Scene(sync_load_budget=0)
    scene.run_cold(SceneRequest("a", tokens(16)))
    request = SceneRequest("b", tokens(17))
    match = scene.prepare(request)
    scene.cache.commit_external_match(request, match, 16, scene.allocate(request))
    (job,) = scene.cache.end_step().loads
    (settlement,) = scene.cache.apply_report(WorkerReport({0: {job.job_id: failed(job, first=2)}}))
    assert (list(settlement.loaded.blocks()), list(settlement.failed.blocks())) == ([0, 1], [2, 3])
    scene.run_cold(SceneRequest("c", tokens(16)))  # somebody stores the lost blocks again
    assert scene.prepare(request, computed=0).num_tokens == 8
    assert scene.prepare(request, computed=8).num_tokens == 0
    assert scene.prepare(SceneRequest("d", tokens(17))).num_tokens == 16


@pytest.mark.parametrize("sync_load_budget", [0, 1 << 30], ids=["asynchronous", "synchronous"])
def test_h09_what_a_reset_made_fail_is_not_promised_again_in_the_new_epoch(sync_load_budget: int) -> None:
    scene = Scene(sync_load_budget=sync_load_budget)
    scene.run_cold(SceneRequest("a", tokens(16)))
    request = SceneRequest("b", tokens(17))
    match = scene.prepare(request)
    scene.cache.commit_external_match(request, match, 16, scene.allocate(request))
    (job,) = scene.cache.end_step().loads
    scene.cache.reset()
    scene.cache.apply_report(WorkerReport({0: {job.job_id: failed(job, first=1)}}))
    scene.run_cold(SceneRequest("c", tokens(16)))
    assert scene.prepare(request).num_tokens == 4
    assert scene.prepare(SceneRequest("d", tokens(17))).num_tokens == 16


class SlowTier(DiskTier):
    """A disk whose reads wait for a signal, and its writes for another."""

    gate: threading.Event
    writes_go: threading.Event
    reads: threading.Semaphore
    """Released by each read that begins; `writes` by each write."""
    writes: threading.Semaphore

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None = None
    ) -> list[bool]:
        self.reads.release()
        self.gate.wait(20)
        return super().get(keys, buffers, on_progress)

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        self.writes.release()
        self.writes_go.wait(20)
        return super().put(entries)


def slow_disk(path: Path, slots: int = 64) -> tuple[SlowTier, threading.Event]:
    """A slow disk and the signal that lets its reads go on; its writes go on until they are told not to."""
    open_disk(path, slots).close()
    from scenes import NAMESPACE

    tier = SlowTier.open(path, NAMESPACE, PAGE, 4096 * 4 + slots * (PAGE + 512))
    assert isinstance(tier, SlowTier)
    tier.gate, tier.writes_go = threading.Event(), threading.Event()
    tier.reads, tier.writes = threading.Semaphore(0), threading.Semaphore(0)
    tier.writes_go.set()
    return tier, tier.gate


def on_disk_alone(scene: Scene) -> None:
    """The 8 blocks of a prompt are on disk, and nothing is in memory."""
    scene.run_cold(SceneRequest("a", tokens(33)))
    scene.settle_tiers()
    scene.forget_memory()


def test_h10_a_tier_that_hangs_costs_a_request_its_deadline_and_no_more(tmp_path: Path) -> None:
    tier, gate = slow_disk(tmp_path)
    scene = Scene(tiers=[tier], prepare_deadline="2s")
    on_disk_alone(scene)
    request = SceneRequest("b", tokens(33))
    answers: list[ExternalKVMatch | None] = []
    for computed in (0, 0, 4, 8, 0):  # a changing local hit does not prolong the wait
        answers.append(scene.cache.prepare_external_match(request, computed))
        scene.cache.end_step()
        scene.now += 0.5
    assert answers == [None, None, None, None, ExternalKVMatch(0)]
    assert value(scene, "leases_held") == 0
    gate.set()
    scene.settle_tiers()
    assert scene.prepare(request).num_tokens == 32  # what came late is there for whoever asks next


def test_p11_what_a_request_has_waited_before_it_was_asked_for_counts(tmp_path: Path) -> None:
    tier, gate = slow_disk(tmp_path)
    scene = Scene(tiers=[tier], prepare_deadline="2s")
    on_disk_alone(scene)
    request = SceneRequest("b", tokens(33))
    scene.cache.put_off_external_match(request)
    scene.now += 1.5
    assert scene.cache.prepare_external_match(request, 0) is None
    scene.cache.put_off_external_match(request)
    scene.now += 0.5
    assert scene.cache.prepare_external_match(request, 0) == ExternalKVMatch(0)
    gate.set()
    scene.settle_tiers()


def test_h10_a_deadline_keeps_what_has_arrived(tmp_path: Path) -> None:
    tier, gate = slow_disk(tmp_path)
    scene = Scene(tiers=[tier], prepare_deadline="2s")
    scene.run_cold(SceneRequest("a", tokens(33)))
    scene.settle_tiers()
    scene.cache.index.drop(_chain(33)[3])
    request = SceneRequest("b", tokens(33))
    assert scene.cache.prepare_external_match(request, 0) is None
    scene.now += 3.0
    match = scene.cache.prepare_external_match(request, 0)
    assert match is not None
    assert match.num_tokens == 12
    scene.load(request, match)
    assert scene.holds_content(request, range(3))
    gate.set()
    scene.settle_tiers()


def _chain(length: int) -> list[BlockKey]:
    from kvpact.identity.keys import BlockKeys
    from scenes import NAMESPACE

    return BlockKeys(NAMESPACE.digest, BLOCK_SIZE, RequestIdentity()).extend(tokens(length))


# Values


def test_h20_only_the_unbroken_prefix_counts(tmp_path: Path) -> None:
    scene = Scene(tiers=[open_disk(tmp_path)])
    on_disk_alone(scene)
    scene.queues[0].tier.delete([_chain(33)[2]])
    request = SceneRequest("b", tokens(33))
    scene.assert_loads(request, 8)


def test_h21_slots_of_a_late_read_are_not_reused_before_it_ended(tmp_path: Path) -> None:
    tier, gate = slow_disk(tmp_path)
    scene = Scene(slots=8, tiers=[tier], prepare_deadline="1s")
    on_disk_alone(scene)
    late = SceneRequest("b", tokens(33))
    assert scene.cache.prepare_external_match(late, 0) is None
    reading = {slot for slot in range(8) if scene.cache.index.state(slot) == SlotState.RESERVED}
    assert len(reading) == 4
    scene.now += 2.0
    assert scene.prepare(late).num_tokens == 0
    scene.cache.request_finished("b")
    other = SceneRequest("c", tokens(33, seed=3))
    (save,) = scene.step_computing(other, 33).saves
    assert len(save.slots) == 4, "half of the slots may be lent to one tier"
    assert not reading & {*save.slots}, "the read may still write to a slot that is given away"
    scene.report(StepWork(saves=(save,)))
    scene.cache.request_finished("c")
    gate.set()
    scene.settle_tiers()
    scene.run_cold(SceneRequest("d", tokens(33, seed=4)))
    again = SceneRequest("e", tokens(33, seed=4))
    scene.load(again, scene.prepare(again))
    assert scene.holds_content(again, range(8))


def test_h26_a_failed_save_is_never_visible(scene: Scene, tmp_path: Path) -> None:
    request = SceneRequest("a", tokens(32))
    (job,) = scene.step_computing(request, 32).saves
    scene.cache.apply_report(WorkerReport({0: {job.job_id: failed(job, first=5)}}))
    assert scene.prepare(SceneRequest("b", tokens(33))).num_tokens == 20
    assert value(scene, "dropped_blocks") == 3
    assert not scene.blocks.held


def test_h27_blocks_under_copy_are_held_though_their_request_is_gone(scene: Scene) -> None:
    request = SceneRequest("a", tokens(16))
    work = scene.step_computing(request, 16)
    scene.cache.request_finished("a")
    assert set(scene.blocks.held) == set(work.saves[0].block_ids)
    scene.now += 3600.0  # the process was stopped for an hour: the copy is still waited for
    has_pending_work = scene.cache.has_pending_work
    assert has_pending_work
    scene.report(work)
    assert not scene.blocks.held
    assert not scene.cache.has_pending_work
    assert scene.prepare(SceneRequest("b", tokens(17))).num_tokens == 16


def test_h28_what_a_request_saved_behind_a_failed_load_is_not_trusted(scene: Scene) -> None:
    scene.run_cold(SceneRequest("a", tokens(16)))
    request = SceneRequest("b", tokens(32))
    match = scene.prepare(request)
    scene.cache.commit_external_match(request, match, 16, scene.allocate(request))
    scene.cache.note_computed(request, 32, lambda: scene.tables["b"])
    work = scene.cache.end_step()
    outcomes = scene.execute(work, 0)
    (load,) = work.loads
    outcomes[load.job_id] = failed(load, first=1)
    scene.cache.apply_report(WorkerReport({0: outcomes}))
    assert scene.prepare(SceneRequest("c", tokens(33))).num_tokens == 4
    assert not scene.blocks.held


def test_h29_tokens_in_flight_are_not_served_to_others(scene: Scene) -> None:
    request = SceneRequest("a", tokens(16))
    work = scene.step_computing(request, 16)
    assert scene.prepare(SceneRequest("b", tokens(17))).num_tokens == 0
    scene.report(work)
    assert scene.prepare(SceneRequest("c", tokens(17))).num_tokens == 16


def test_h29_a_load_in_flight_is_neither_counted_nor_served_nor_saved() -> None:
    scene = Scene(ranks=2, sync_load_budget=0)
    scene.run_cold(SceneRequest("a", tokens(16)))
    request, other = SceneRequest("b", tokens(25)), SceneRequest("c", tokens(25))
    match = scene.prepare(request)
    assert (match.num_tokens, match.load_kv_async) == (16, True)
    scene.cache.commit_external_match(request, match, 16, scene.allocate(request))
    work = scene.cache.end_step()
    for ranks in ((), (0,), ()):  # no rank has reported, then one of two
        report = WorkerReport({rank: scene.execute(work, rank) for rank in ranks})
        assert scene.cache.apply_report(report) == []
        assert (value(scene, "loaded_tokens"), value(scene, "used_tokens")) == (0, 0)
        assert scene.prepare(request).num_tokens == 0, "what its blocks are to get is not promised once more"
        assert scene.prepare(other).num_tokens == 16, "what is stored is, and nothing of the 24 tokens' blocks"
        assert scene.cache.end_step().saves == ()
    (settlement,) = scene.cache.apply_report(WorkerReport({1: scene.execute(work, 1)}))
    assert len(settlement.loaded) == 4
    assert (value(scene, "loaded_tokens"), value(scene, "used_tokens")) == (16, 0), (
        "it has arrived; nobody computes yet"
    )
    scene.compute(request, 4)
    scene.cache.note_computed(request, 24, lambda: scene.tables["b"])
    assert value(scene, "used_tokens") == 16
    scene.report(scene.cache.end_step())
    again = SceneRequest("d", tokens(25))
    assert scene.prepare(again).num_tokens == 24


def test_h29_what_a_tier_is_still_reading_is_promised_to_nobody(tmp_path: Path) -> None:
    tier, gate = slow_disk(tmp_path)
    scene = Scene(tiers=[tier], prepare_deadline="2s")
    on_disk_alone(scene)
    first, second = SceneRequest("b", tokens(33)), SceneRequest("c", tokens(33))
    for _ in range(3):
        for request in (first, second):
            assert scene.cache.prepare_external_match(request, 0) is None
        scene.cache.end_step()
        scene.now += 0.5
    assert (value(scene, "promised_tokens"), value(scene, "held_blocks", MEMORY)) == (0, 0)
    scene.now += 1.0
    assert scene.cache.prepare_external_match(first, 0) == ExternalKVMatch(0), "its blocks are still being read"
    gate.set()
    scene.settle_tiers()
    again = SceneRequest("d", tokens(33))
    scene.assert_loads(again, 32)


def test_h31_a_job_that_nobody_reports_is_not_loaded(scene: Scene) -> None:
    scene.run_cold(SceneRequest("a", tokens(16)))
    request = SceneRequest("b", tokens(17))
    scene.cache.commit_external_match(request, scene.prepare(request), 16, scene.allocate(request))
    (job,) = scene.cache.end_step().loads
    assert scene.cache.apply_report(WorkerReport({0: {}})) == []
    assert scene.cache.apply_report(WorkerReport({0: {job.job_id: JobOutcome()}})) == []
    assert value(scene, "loaded_tokens") == 0
    assert scene.cache.has_pending_work


def test_h10_a_report_that_was_lost_is_asked_for(scene: Scene) -> None:
    scene.run_cold(SceneRequest("a", tokens(16)))
    request = SceneRequest("b", tokens(17))
    scene.cache.commit_external_match(request, scene.prepare(request), 16, scene.allocate(request))
    lost = scene.execute(scene.cache.end_step(), 0)
    assert scene.cache.end_step().inquiries == ()
    scene.now += scene.config.load_deadline / 2
    (inquiry,) = scene.cache.end_step().inquiries
    assert lost.keys() == {inquiry.job_id}
    assert scene.cache.end_step().inquiries == ()  # once, not every step
    (settlement,) = scene.cache.apply_report(WorkerReport({0: lost}))
    assert len(settlement.loaded) == 4


# Bounds


def test_p11_a_request_that_is_loaded_and_preempted_again_and_again_computes_its_prompt() -> None:
    """Two such requests could keep each other from running for ever; random plays found it."""
    scene = Scene(sync_load_budget=0)
    scene.run_cold(SceneRequest("a", tokens(16)))
    request = SceneRequest("b", tokens(19))
    for _ in range(MAX_LOADS_WITHOUT_PROGRESS):
        scene.load(request, scene.prepare(request))
    assert scene.prepare(request).num_tokens == 0
    scene.cache.note_computed(request, 19, lambda: scene.tables["b"])
    assert scene.prepare(request).num_tokens == 16


def test_h51_nothing_grows_with_the_number_of_requests(scene: Scene) -> None:
    for number in range(300):
        scene.run_cold(SceneRequest(f"r{number}", tokens(16, seed=number)))
        request = SceneRequest(f"s{number}", tokens(17, seed=number))
        scene.load(request, scene.prepare(request))
        scene.cache.request_finished(request.request_id)
    cache = scene.cache
    assert not cache.live_requests
    assert not cache.under_way["loads"] + cache.under_way["saves"]
    assert len(cache.index) <= 16
    assert len(cache.ledger.history) <= 256


def test_h52_a_write_that_finds_the_queue_full_holds_nothing(tmp_path: Path) -> None:
    scene = Scene(tiers=[open_disk(tmp_path)], write_queue=PAGE)
    for number in range(10):
        scene.run_cold(SceneRequest(f"r{number}", tokens(32, seed=number)))
    scene.settle_tiers()
    assert value(scene, "dropped_writes", "disk") > 0
    assert scene.room() == 16


def test_h53_with_every_slot_in_use_nothing_is_lost() -> None:
    scene = Scene(slots=4)
    scene.run_cold(SceneRequest("a", tokens(16)))
    holder = SceneRequest("b", tokens(17))
    match = scene.prepare(holder)
    scene.run_cold(SceneRequest("c", tokens(16, seed=2)))
    assert value(scene, "dropped_blocks") == 4
    scene.load(holder, match)
    assert scene.holds_content(holder, range(4))


def test_h54_a_full_cache_gives_up_tails_before_heads() -> None:
    scene = Scene(slots=8)
    scene.run_cold(SceneRequest("a", tokens(32)))
    scene.run_cold(SceneRequest("b", tokens(12, seed=2)))
    assert scene.prepare(SceneRequest("c", tokens(33))).num_tokens == 20


@pytest.mark.parametrize("stuck", ["a read", "a write"])
def test_h56_shutdown_ends_in_time_whatever_hangs(tmp_path: Path, stuck: str) -> None:
    """In the time that it may take for all tiers together."""

    def play() -> float:
        directory = Path(mkdtemp(dir=tmp_path))
        disks = [slow_disk(directory / name) for name in ("one", "two")]
        scene = Scene(tiers=[tier for tier, _ in disks], shutdown_timeout="300ms")
        if stuck == "a read":
            scene.run_cold(SceneRequest("a", tokens(33)))
            scene.settle_tiers()
            scene.forget_memory()
            assert scene.cache.prepare_external_match(SceneRequest("b", tokens(33)), 0) is None
            scene.cache.end_step()
            assert disks[0][0].reads.acquire(timeout=10)
        else:
            for tier, _ in disks:
                tier.writes_go.clear()
            scene.run_cold(SceneRequest("a", tokens(33)))
            scene.cache.end_step()
            assert all(tier.writes.acquire(timeout=10) for tier, _ in disks)
        began = time.monotonic()
        scene.cache.shutdown()
        seconds = time.monotonic() - began
        assert value(scene, "leases_held") == 0
        for tier, gate in disks:
            gate.set()
            tier.writes_go.set()
        return seconds

    assert_ends_within(play, 0.14, 0.45)


def test_h58_no_step_does_a_disks_work_or_waits_for_it(tmp_path: Path) -> None:
    def play() -> HookTime:
        tier, gate = slow_disk(Path(mkdtemp(dir=tmp_path)), slots=4 * LONG_BLOCKS)
        scene = Scene(3 * LONG_BLOCKS, engine_blocks=1024, tiers=[tier])
        scene.run_cold(SceneRequest("there", tokens(LONG)))
        scene.settle_tiers()
        scene.forget_memory()
        hooks, request, own = HookTime(scene.cache), SceneRequest("b", tokens(LONG)), SceneRequest("c", tokens(LONG, 1))
        tier.writes_go.clear()
        scene.compute(own)
        for _ in range(3):
            assert scene.cache.prepare_external_match(request, 0) is None
            scene.cache.end_step()
        scene.run_cold(own)
        scene.cache.end_step()
        gate.set()
        until(lambda: scene.queues[0].under_way == 1)  # the write
        scene.cache.end_step()
        match = scene.cache.prepare_external_match(request, 0)
        assert match is not None
        assert match.num_tokens == LONG - 1
        scene.load(request, match)
        tier.writes_go.set()
        until(lambda: scene.queues[0].under_way == 0)
        scene.cache.end_step()
        assert not scene.cache.tiers.pending
        assert value(scene, "written_blocks", "disk") == 2 * LONG_BLOCKS
        scene.close()
        return hooks

    assert_no_step_is_slow(play)


# Accounts


def test_h70_a_hit_counts_when_it_is_used_and_once(scene: Scene) -> None:
    scene.run_cold(SceneRequest("a", tokens(16)))
    request = SceneRequest("b", tokens(17))
    match = scene.prepare(request)
    assert value(scene, "used_tokens") == 0
    scene.load(request, match)
    assert value(scene, "used_tokens") == 16
    match = scene.prepare(request)  # preempted: it loads again
    scene.load(request, match)
    assert (value(scene, "used_tokens"), value(scene, "used_again_tokens")) == (16, 16)


def test_h72_a_cache_that_never_hits_says_why(scene: Scene) -> None:
    scene.prepare(SceneRequest("a", tokens(3)))
    assert "no whole block" in explain_misses(scene.cache.observe())


def test_h72_a_prompt_that_the_engine_has_itself_is_neither_a_lookup_nor_a_miss(scene: Scene) -> None:
    """Sixteen short prompts over HTTP, each asked fifteen times: vLLM's own prefix cache covers all but the last."""
    for prompt in range(16):
        for again in range(15):
            request = SceneRequest(f"{prompt}, {again}", tokens(14, seed=prompt))
            for _ in range(5):  # it is blocked meanwhile (H02)
                assert scene.prepare(request, 12 if again else 0).num_tokens == 0
            scene.cache.request_finished(request.request_id)
    assert value(scene, "lookups") == value(scene, "misses", MissReason.NOT_STORED) == 16
    assert value(scene, "spared_lookups") == 224
    assert value(scene, "misses", MissReason.TOO_SHORT) == 0
    line = explain_misses(scene.cache.observe())
    assert line.startswith("0 of 16 lookups hit (224 more prompts needed none: the engine itself had every block")


def test_h72_an_engine_that_always_has_all_itself_was_asked(scene: Scene) -> None:
    scene.prepare(SceneRequest("a", tokens(17)), 16)
    assert explain_misses(scene.cache.observe()).startswith("0 of 0 lookups hit (1 more prompts needed none")


def load_fails(scene: Scene, request: SceneRequest, first: int) -> None:
    """What the request is promised fails to load from block `first` on."""
    scene.run_cold(SceneRequest("stores it", request.token_ids))
    match = scene.prepare(request)
    scene.cache.commit_external_match(request, match, match.num_tokens, scene.allocate(request))
    (job,) = scene.cache.end_step().loads
    scene.cache.apply_report(WorkerReport({0: {job.job_id: failed(job, first)}}))


@pytest.mark.parametrize("request_is", ["declined", "of unknown identity", "failed before", "not to load", "served"])
def test_no_reason_makes_a_miss_of_what_the_engine_has_itself(scene: Scene, request_is: str) -> None:
    identity = None if request_is == "of unknown identity" else RequestIdentity()
    request = SceneRequest("a", tokens(17), identity, may_load=request_is != "not to load")
    if request_is == "failed before":
        load_fails(scene, request, first=2)
    before = value(scene, "lookups")
    if request_is == "declined":
        scene.cache.decline_external_match(request, 16)
    else:
        assert scene.prepare(request, 16).num_tokens == 0
    assert (value(scene, "lookups") - before, value(scene, "spared_lookups")) == (0, 1)


def test_h72_a_prompt_without_a_whole_block_or_with_too_few_left_is_too_short() -> None:
    scene = Scene(min_match_blocks=2)
    assert scene.prepare(SceneRequest("no block before the last token", tokens(4))).num_tokens == 0
    assert scene.prepare(SceneRequest("one of two blocks left", tokens(9)), 4).num_tokens == 0
    assert value(scene, "lookups") == value(scene, "misses", MissReason.TOO_SHORT) == 2
    assert value(scene, "spared_lookups") == 0


def test_a_blocked_request_that_finds_what_it_missed_first_is_a_hit_too(scene: Scene) -> None:
    blocked = SceneRequest("b", tokens(17))
    for _ in range(5):
        assert scene.prepare(blocked).num_tokens == 0
    scene.run_cold(SceneRequest("a", tokens(16)))
    for _ in range(5):
        assert scene.prepare(blocked).num_tokens == 16
    shot = scene.cache.observe()
    hits = shot["lookups"] - sum(shot[series("misses", reason)] for reason in MissReason)
    assert hits == shot["plans_opened"] == 1


def test_what_a_request_began_to_wait_for_and_the_engine_has_by_then_is_not_loaded(scene: Scene) -> None:
    scene.run_cold(SceneRequest("a", tokens(17)))
    request = SceneRequest("b", tokens(17))
    assert scene.prepare(request).num_tokens == 16
    assert scene.prepare(request, 16).num_tokens == 0
    assert value(scene, "leases_held") == 0
    assert value(scene, "plans_ended", EndReason.SUPERSEDED) == 1
    assert (value(scene, "lookups"), value(scene, "spared_lookups")) == (1, 1)


def test_only_slots_that_a_device_has_pinned_take_part_in_copies_and_more_with_the_next_step() -> None:
    scene = Scene(slots=8, ranks=2, usable=3)
    request = SceneRequest("a", tokens(20))
    work = scene.step_computing(request, 20)
    assert [save.slots for save in work.saves] == [(0, 1, 2)]
    scene.report(work)
    for segment, usable in zip(scene.segments, (8, 5), strict=True):
        segment.usable_slots = usable
    scene.cache.end_step()
    longer = SceneRequest("b", tokens(24))
    assert [save.slots for save in scene.step_computing(longer, 24).saves] == [(3, 4)], (
        "of the rank that has pinned fewer"
    )
