"""Faults on purpose: the same seed gives the same faults, each fault does what it says, and all of them are told."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from dictionary_tier import DictionaryTier
from kvpact.contract import JobOutcome, LoadJob, WorkerReport
from kvpact.errors import TierError
from kvpact.identity.keys import BlockKey, Namespace
from kvpact.ranges import BlockRange, RangeSet
from kvpact.tiers.base import BlockBuffer, SupportsLocate, SupportsPrefix, SupportsScan, Tier, chained
from kvpact.tiers.executor import Done, GetDone, Job, TierExecutor
from kvpact_testkit.engine.simulated_worker import JobBehavior
from kvpact_testkit.faults import Chances, Crash, Fault, FaultPlan, Faults, FaultyTier, Operation
from kvpact_testkit.sample_blocks import CANARY, Document, content, document, empty_buffers, filled_buffers
from rank_faults import RankFaultPlan, RankFaults

SLOT = 256
DOCUMENT = document("document", 8)
EVERYTHING: Chances = {
    operation: {Fault.ERROR: 0.2, Fault.PARTIAL: 0.2, Fault.DAMAGE: 0.2} for operation in (Operation.GET, Operation.PUT)
}


def faulty(plan: FaultPlan | None = None) -> FaultyTier:
    tier = DictionaryTier(Namespace({"model": "faults"}), SLOT, 1000)
    return FaultyTier(tier, Faults(plan))


def put(tier: FaultyTier, wanted: Document = DOCUMENT, start: int = 0) -> int:
    keys = wanted.keys[start:]
    return sum(tier.put(chained(keys, filled_buffers(keys, SLOT), wanted.keys[:start])))


def served(tier: FaultyTier, wanted: Document = DOCUMENT) -> int:
    """Blocks served, all of which must be sound."""
    buffers = empty_buffers(len(wanted), SLOT)
    arrived = tier.get(wanted.keys, buffers)
    require_sound(wanted, arrived, buffers)
    return sum(arrived)


def require_sound(wanted: Document, arrived: list[bool], buffers: list[BlockBuffer]) -> None:
    for there, key, buffer in zip(arrived, wanted.keys, buffers, strict=True):
        assert not there or b"".join(buffer) == content(key, SLOT)


def run(seed: int, threads: int) -> tuple[list[str], list[int]]:
    """The faults that a fixed lot of operations meets, and what they returned."""
    tier = faulty(FaultPlan(seed=seed, chances=EVERYTHING))

    def work(number: int) -> int:
        wanted = document(f"document {number}", 6)
        try:
            return put(tier, wanted) * 100 + served(tier, wanted)
        except (OSError, TierError):
            return -1

    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(work, range(60)))
    return [str(injected.fault) for injected in tier.faults.history], results


def test_the_same_seed_gives_the_same_faults_whatever_threads_do() -> None:
    faults, results = run(7, threads=1)
    assert (faults, results) == run(7, threads=1)
    for _ in range(3):
        others, others_results = run(7, threads=4)
        assert Counter(others) == Counter(faults)
        assert others_results == results
    assert run(8, threads=1)[1] != results
    assert {"error", "partial", "damage"} <= set(faults)
    assert -1 in results
    assert 606 in results


def test_without_a_plan_nothing_happens_and_all_is_counted() -> None:
    tier = faulty()
    assert (put(tier), served(tier), tier.lookup(DOCUMENT.keys)) == (8, 8, [True] * 8)
    assert tier.faults.calls == {Operation.PUT: 1, Operation.GET: 1, Operation.LOOKUP: 1}
    assert not tier.faults.history


def test_what_is_armed_happens_when_it_was_told_to_and_is_written_down() -> None:
    tier = faulty()
    put(tier)
    tier.faults.arm(Operation.GET, Fault.ERROR, after=1, times=2)
    assert served(tier) == 8
    for _ in range(2):
        with pytest.raises((OSError, TierError)):
            served(tier)
    assert served(tier) == 8
    assert [str(injected) for injected in tier.faults.history] == ["get number 1: error", "get number 2: error"]
    tier.faults.arm(Operation.GET, Fault.ERROR)
    tier.faults.disarm()
    assert served(tier) == 8


def test_partial_operations_handle_fewer_blocks_and_stay_truthful() -> None:
    tier = faulty()
    tier.faults.arm(Operation.PUT, Fault.PARTIAL)
    stored = put(tier)
    assert stored < 8
    assert tier.tier.lookup(DOCUMENT.keys).count(True) == stored
    put(tier)
    tier.faults.arm(Operation.GET, Fault.PARTIAL)
    tier.faults.arm(Operation.LOOKUP, Fault.PARTIAL)
    assert served(tier) < 8
    assert tier.lookup(DOCUMENT.keys) != [True] * 8
    tier.faults.arm(Operation.LOOKUP, Fault.PARTIAL)
    assert tier.leading(DOCUMENT.keys) <= 8
    assert served(tier) == tier.leading(DOCUMENT.keys) == 8


def test_damage_leaves_garbage_and_drops_the_block() -> None:
    tier = faulty()
    put(tier)
    tier.faults.arm(Operation.GET, Fault.DAMAGE)
    buffers = empty_buffers(8, SLOT)
    arrived = tier.get(DOCUMENT.keys, buffers)
    require_sound(DOCUMENT, arrived, buffers)
    (damaged,) = [block for block in range(8) if not arrived[block]]
    assert b"".join(buffers[damaged]) not in (content(DOCUMENT.keys[damaged], SLOT), bytes([CANARY]) * SLOT)
    assert tier.leading(DOCUMENT.keys) == damaged == sum(tier.lookup(DOCUMENT.keys)), "those after it needed it"


@pytest.mark.parametrize("operation", [Operation.GET, Operation.PUT])
def test_silent_damage_is_what_a_check_must_see(operation: Operation) -> None:
    tier = faulty()
    if operation is Operation.GET:
        put(tier)
    tier.faults.arm(operation, Fault.SILENT_DAMAGE)
    given = filled_buffers(DOCUMENT.keys, SLOT)
    tier.put(chained(DOCUMENT.keys, given))
    assert [b"".join(buffer) for buffer in given] == [content(key, SLOT) for key in DOCUMENT.keys], "the caller's stays"
    buffers = empty_buffers(8, SLOT)
    assert tier.get(DOCUMENT.keys, buffers) == [True] * 8
    found = b"".join(b"".join(buffer) for buffer in buffers)
    right = b"".join(content(key, SLOT) for key in DOCUMENT.keys)
    assert (int.from_bytes(found) ^ int.from_bytes(right)).bit_count() == 1


def test_a_hanging_read_waits_until_it_is_released() -> None:
    tier = faulty()
    put(tier)
    tier.faults.arm(Operation.GET, Fault.HANG)
    queue = TierExecutor(tier, 1, 1 << 20)
    queue.submit(Job("read", DOCUMENT.keys, empty_buffers(8, SLOT)))
    assert tier.faults.until_waiting(1, 10)
    tier.faults.step(100)
    assert [*queue.poll()] == []
    tier.faults.release()
    done: list[Done] = []
    for _ in range(1000):
        done += queue.poll()
        if done:
            break
        time.sleep(0.01)
    assert done == [GetDone("read", (True,) * 8)]
    assert queue.close(10)
    assert tier.faults.waiting == 0


def test_a_delayed_write_waits_for_its_steps() -> None:
    tier = faulty(FaultPlan(delay_steps=3))
    tier.faults.arm(Operation.PUT, Fault.DELAY)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(put, tier)
        assert tier.faults.until_waiting(1, 10)
        tier.faults.step(2)
        assert not writing.done()
        tier.faults.step()
        assert writing.result(10) == 8


def test_a_hang_may_have_an_end_of_its_own() -> None:
    tier = faulty(FaultPlan(hang_seconds=0.01))
    tier.faults.arm(Operation.PUT, Fault.HANG)
    assert put(tier) == 8


def test_after_a_crash_nothing_answers_until_the_next_process() -> None:
    tier = faulty()
    put(tier, document("before", 3))
    tier.faults.arm(Operation.PUT, Fault.CRASH)
    with pytest.raises(Crash):
        put(tier)
    for call in (lambda: served(tier), lambda: put(tier), lambda: tier.lookup(DOCUMENT.keys), tier.clear):
        with pytest.raises(Crash):
            call()
    assert not isinstance(Crash(), Exception), "no handler of a store's errors may swallow it"
    tier.faults.revive()
    assert served(tier, document("before", 3)) == 3
    assert served(tier) == tier.leading(DOCUMENT.keys) < 8


def test_a_store_that_dies_at_a_write_tears_it_and_makes_none_after() -> None:
    faults = Faults()
    faults.arm(Operation.WRITE, Fault.CRASH, after=1)
    torn: list[float] = []
    faults.before_write(torn=torn.append)
    with pytest.raises(Crash):
        faults.before_write(torn=torn.append)
    with pytest.raises(Crash):
        faults.before_write(torn=torn.append)
    assert len(torn) == 1
    assert 0 <= torn[0] <= 1


def test_the_wrapper_passes_everything_else_on() -> None:
    tier = faulty()
    put(tier)
    assert (tier.name, tier.exclusive) == ("dictionary", True)
    assert tier.capacity().blocks == len(list(tier.scan())) == 8
    assert tier.delete([DOCUMENT.keys[5]]) == 3
    assert tier.health().ok
    assert tier.counts() == tier.tier.counts()
    tier.clear()
    assert tier.leading(DOCUMENT.keys) == tier.put_start(DOCUMENT.keys) == 0
    tier.faults.arm(Operation.CLEAR, Fault.ERROR)
    with pytest.raises((OSError, TierError)):
        tier.clear()
    tier.close()


def test_the_wrapper_can_do_what_its_tier_can() -> None:
    class Locates(DictionaryTier):
        leading = scan = None  # type: ignore[assignment]  # it can do neither

        def locate(self, keys: Sequence[BlockKey]) -> None:
            located.append(keys)

    def abilities(tier: Tier) -> list[bool]:
        return [isinstance(tier, kind) for kind in (SupportsPrefix, SupportsScan, SupportsLocate)]

    located: list[Sequence[BlockKey]] = []
    assert abilities(faulty()) == [True, True, False]
    other = FaultyTier(Locates(Namespace({}), SLOT, 8), Faults())
    assert abilities(other) == [False, False, True]
    other.locate(DOCUMENT.keys)
    assert located == [DOCUMENT.keys]


def test_a_reset_begins_anew() -> None:
    plan = FaultPlan(seed=3, chances=EVERYTHING)
    tier = faulty(plan)
    runs = []
    for _ in range(2):
        for number in range(20):
            with suppress(OSError, TierError):
                put(tier, document(f"document {number}", 4))
        runs.append([str(injected) for injected in tier.faults.history])
        tier.tier.clear()
        tier.faults.arm(Operation.PUT, Fault.CRASH)
        tier.faults.reset()
        assert not tier.faults.calls
    assert runs[0] == runs[1] != []


def test_the_history_is_bounded() -> None:
    faults = Faults(FaultPlan(chances={Operation.READ: {Fault.ERROR: 1.0}}))
    for _ in range(10_010):
        with pytest.raises(OSError, match="Input/output error"):
            faults.before_read()
    assert len(faults.history) == 10_000


# Ranks


def reports(jobs: int, ranks: int = 2) -> list[list[WorkerReport]]:
    """One job a step, four blocks each, all done on all ranks at once."""
    done = JobOutcome(RangeSet.span(0, 4))
    return [[WorkerReport({rank: {job: done}}) for rank in range(ranks)] for job in range(jobs)]


def delivered(plan: RankFaultPlan, jobs: int = 200) -> tuple[list[list[WorkerReport]], RankFaults]:
    faults = RankFaults(plan)
    steps = [faults.deliver(step) for step in reports(jobs)]
    return [*steps, faults.flush()], faults


def said(steps: list[list[WorkerReport]]) -> Counter[tuple[int, int]]:
    """How often each rank spoke of each job."""
    return Counter(
        (rank, job) for step in steps for report in step for rank, jobs in report.ranks.items() for job in jobs
    )


def test_faithful_ranks_are_passed_on_at_once() -> None:
    steps, faults = delivered(RankFaultPlan(), jobs=5)
    assert [{job for report in step for jobs in report.ranks.values() for job in jobs} for step in steps] == [
        {0}, {1}, {2}, {3}, {4}, set(),
    ]  # fmt: skip
    assert not faults.history


def test_a_lost_report_is_not_a_silent_rank_and_never_comes() -> None:
    steps, faults = delivered(RankFaultPlan(seed=1, lost=0.3))
    lost = {(fault.rank, fault.job_id) for fault in faults.history}
    assert 0 < len(lost) < 400
    assert set(said(steps)) == {(rank, job) for rank in range(2) for job in range(200)} - lost
    assert all({rank for report in step for rank in report.ranks} == {0, 1} for step in steps[:-1])
    assert str(faults.history[0]).endswith("never reports")


def test_reports_come_late_twice_in_pieces_and_out_of_order() -> None:
    steps, faults = delivered(RankFaultPlan(seed=2, late=0.4, repeated=0.3, in_pieces=0.2))
    count = said(steps)
    assert len(count) == 400
    assert max(count.values()) > 2
    order = [job for step in steps for report in step for job in report.ranks.get(0, {})]
    assert order != sorted(order)
    whole = WorkerReport({})
    for step in steps:
        for report in step:
            whole = whole.aggregate(report)
    assert all(len(outcome.done) == 4 for jobs in whole.ranks.values() for outcome in jobs.values())
    assert (steps, list(faults.history)) == (lambda again: (again[0], list(again[1].history)))(
        delivered(RankFaultPlan(seed=2, late=0.4, repeated=0.3, in_pieces=0.2))
    )


def test_blocks_fail_and_say_so() -> None:
    steps, faults = delivered(RankFaultPlan(seed=3, failed=0.5))
    failed = {(fault.rank, fault.job_id): fault.conduct.failed_blocks for fault in faults.history}
    for step in steps:
        for report in step:
            for rank, jobs in report.ranks.items():
                for job, outcome in jobs.items():
                    assert outcome.failed == failed.get((rank, job), RangeSet())
                    assert len(outcome.done) + len(outcome.failed) == 4
    assert {len(blocks) for blocks in failed.values()} == {1, 2, 3, 4}


def test_simulated_ranks_are_told_how_to_behave() -> None:
    job = LoadJob(5, "r", 10, (0, 1, 2), (4, 5, 6), synchronous=False)
    assert RankFaults(RankFaultPlan()).conduct(0, job) == JobBehavior()
    every = RankFaults(RankFaultPlan(late=1, repeated=1, in_pieces=1, failed=1))
    conduct = every.conduct(1, job)
    assert conduct == every.conduct(1, job)
    assert conduct.copy_after_steps > 0 < conduct.report_after_steps
    assert (conduct.times_reported, conduct.block_by_block) == (2, True)
    assert RangeSet.of(BlockRange(10, 3)).intersection(conduct.failed_blocks) == conduct.failed_blocks
    assert conduct.failed_blocks
    assert "rank 1, job 5: fails blocks" in str(every.history[0])


def test_waiting_threads_are_counted() -> None:
    faults = Faults()
    faults.arm(Operation.READ, Fault.HANG, times=3)
    threads = [threading.Thread(target=faults.before_read, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert faults.until_waiting(3, 10)
    assert not faults.until_waiting(4, 0.01)
    faults.release()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
