"""The host threads: every ticket ends once, on the scheduler's thread, and every buffer is given back only then."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from hook_time import assert_ends_within
from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import BlockBuffer, Entry, Progress, Tier, TierCapacity, TierHealth
from kvpact.tiers.executor import ControlDone, Done, GetDone, Job, LookupDone, PutDone, TierExecutor
from slab_scenes import SLOT, bytes_of, chain, content, filled, memory, open_tier, served

KEYS = chain("document", 8)
WAIT_SECONDS = 20.0
WHAT = ("write", "read", "lookup")


class SlowTier(Tier):
    """Reads and writes wait until they are let go; what was asked is written down."""

    name = "slow"
    exclusive = True

    def __init__(self) -> None:
        self.reads_go, self.writes_go = threading.Event(), threading.Event()
        self.log: list[str] = []
        self.began = threading.Semaphore(0)
        self.error: Exception | None = None

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [True] * len(keys)

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None = None
    ) -> list[bool]:
        self.log.append(f"get {KEYS.index(keys[0])}")
        self.began.release()
        assert self.reads_go.wait(WAIT_SECONDS)
        if self.error:
            raise self.error
        for count, buffer in enumerate(buffers, 1):
            buffer[0][0] = 7  # the late read of H21
            if on_progress is not None and not on_progress(count):
                return [index < count for index in range(len(keys))]
        return [True] * len(keys)

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        self.log.append(f"put {KEYS.index(entries[0].key)}")
        self.began.release()
        assert self.writes_go.wait(WAIT_SECONDS)
        if self.error:
            raise self.error
        return [True] * len(entries)

    def delete(self, keys: Iterable[BlockKey]) -> int:
        return 0

    def clear(self) -> None:
        pass

    def capacity(self) -> TierCapacity:
        return TierCapacity(0, 0, 0)

    def health(self) -> TierHealth:
        return TierHealth(True)

    def close(self) -> None:
        pass


@pytest.fixture
def slow() -> Iterator[SlowTier]:
    tier = SlowTier()
    yield tier
    tier.reads_go.set()
    tier.writes_go.set()


def drain(queue: TierExecutor, count: int) -> list[Done]:
    """The next `count` completions."""
    done: list[Done] = []
    deadline = time.monotonic() + WAIT_SECONDS
    while len(done) < count:
        assert time.monotonic() < deadline, f"only {done} of {count} completions came"
        done += queue.poll()
        time.sleep(0.001)
    return done


def done(row: int, blocks: int | None = None) -> tuple[bool, ...]:
    """What is said of `blocks`, by default `row`, of which so many from the first on are done."""
    return tuple(block < row for block in range(row if blocks is None else blocks))


def put(queue: TierExecutor, op_id: str, start: int = 0, blocks: int = 1) -> bool:
    return queue.submit(Job(op_id, KEYS[start : start + blocks], memory(blocks), KEYS[:start], blocks * SLOT, PutDone))


def test_what_is_written_is_read_back_through_the_disk_tier(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    queue = TierExecutor(tier, threads=2, max_write_bytes=1 << 20)
    assert queue.submit(Job("head", KEYS[:3], filled(KEYS[:3]), (), 3 * SLOT, PutDone))
    assert queue.submit(Job("tail", KEYS[3:], filled(KEYS[3:]), KEYS[:3], 5 * SLOT, PutDone))
    assert drain(queue, 2) == [PutDone("head", done(3)), PutDone("tail", done(5))], "a tail never overtakes its head"
    buffers = memory(8)
    queue.submit(Job("read", KEYS, buffers, before=()))
    assert drain(queue, 1) == [GetDone("read", done(8))]
    assert [bytes_of(buffer) for buffer in buffers] == [content(key) for key in KEYS]
    assert queue.pending_write_bytes == 0 == queue.under_way
    assert queue.close(WAIT_SECONDS)
    tier.close()


def wait_until_threads_wait() -> None:
    """Until the queue's threads have been found asleep three times in a row, with the interpreter free for them."""
    found, deadline = 0, time.monotonic() + WAIT_SECONDS
    while found < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("kvpact-slow")]
        stats = [Path(f"/proc/self/task/{thread.native_id}/stat").read_text() for thread in threads]
        asleep = stats and all(stat.rpartition(")")[2].split()[0] == "S" for stat in stats)
        found = found + 1 if asleep else 0


def test_threads_that_their_owner_wakes_begin_nothing_before_that(slow: SlowTier) -> None:
    """A thread that wakes up may have the core of who woke it, so the scheduler does it when its step is over."""
    slow.reads_go.set()
    slow.writes_go.set()
    queue = TierExecutor(slow, threads=2, max_write_bytes=1 << 20, woken_by_owner=True)
    for round_number in range(3):
        wait_until_threads_wait()  # one that still looks for work may find what comes now
        put(queue, f"write {round_number}")
        queue.submit(Job(f"read {round_number}", KEYS[1:2], memory(1)))
        queue.submit(Job(f"lookup {round_number}", KEYS, kind=LookupDone))
        assert not slow.began.acquire(timeout=0.05)
        assert queue.under_way == 3
        queue.flush()
        assert {done.op_id for done in drain(queue, 3)} == {f"{what} {round_number}" for what in WHAT}
        while slow.began.acquire(blocking=False):
            pass
    called = threading.Event()
    queue.submit_control("control", lambda tier: called.set())
    assert called.wait(WAIT_SECONDS), "after a control operation no step may follow that would wake anybody"
    put(queue, "not announced")
    assert queue.close(WAIT_SECONDS), "closing wakes them in any case"
    assert drain(queue, 2) == [ControlDone("control", True), PutDone("not announced", (True,))]


def test_reads_go_before_writes_that_came_earlier(slow: SlowTier) -> None:
    queue = TierExecutor(slow, threads=1, max_write_bytes=1 << 20)
    put(queue, "first")
    assert slow.began.acquire(timeout=WAIT_SECONDS)
    put(queue, "second", 1)
    queue.submit(Job("read", KEYS[2:3], memory(1)))
    slow.reads_go.set()
    slow.writes_go.set()
    drain(queue, 3)
    assert slow.log == ["put 0", "get 2", "put 1"]
    assert queue.close(WAIT_SECONDS)


def test_a_stuck_write_does_not_stop_reads(slow: SlowTier) -> None:
    queue = TierExecutor(slow, threads=2, max_write_bytes=1 << 20)
    put(queue, "stuck")
    put(queue, "waiting", 1)
    slow.reads_go.set()
    for number in range(5):
        queue.submit(Job(number, KEYS[:2], memory(2)))
    assert {item.op_id for item in drain(queue, 5)} == set(range(5))
    slow.writes_go.set()
    assert drain(queue, 2) == [PutDone("stuck", (True,)), PutDone("waiting", (True,))]
    assert queue.close(WAIT_SECONDS)


def test_h52_a_write_that_does_not_fit_is_refused_at_once_and_holds_nothing(slow: SlowTier) -> None:
    queue = TierExecutor(slow, threads=1, max_write_bytes=3 * SLOT)
    accepted = [put(queue, f"write {number}", number) for number in range(152)]
    assert accepted == [True] * 3 + [False] * 149
    assert queue.pending_write_bytes == 3 * SLOT
    assert queue.under_way == 3, "a refused write leaves no trace: its caller releases it"
    slow.writes_go.set()
    assert len(drain(queue, 3)) == 3
    assert queue.pending_write_bytes == 0
    assert put(queue, "again")
    assert drain(queue, 1) == [PutDone("again", (True,))]
    assert queue.close(WAIT_SECONDS)


def test_h21_a_cancelled_read_keeps_its_buffers_until_it_has_really_ended(slow: SlowTier) -> None:
    queue = TierExecutor(slow, threads=1, max_write_bytes=0)
    buffers = memory(4)
    queue.submit(Job("late", KEYS[:4], buffers))
    assert slow.began.acquire(timeout=WAIT_SECONDS)
    queue.cancel("late")
    time.sleep(0.02)
    assert [*queue.poll()] == [], "still being written to: not the caller's yet"
    assert queue.under_way == 1
    slow.reads_go.set()
    assert drain(queue, 1) == [GetDone("late", (True, False, False, False))], "it ended at the next block"
    assert [buffer[0][0] for buffer in buffers] == [7, 0, 0, 0]
    assert queue.close(WAIT_SECONDS)


def test_a_read_cancelled_before_it_began_is_skipped_and_still_reported(slow: SlowTier) -> None:
    queue = TierExecutor(slow, threads=1, max_write_bytes=0)
    queue.submit(Job("running", KEYS[:1], memory(1)))
    assert slow.began.acquire(timeout=WAIT_SECONDS)
    queue.submit(Job("waiting", KEYS[1:2], memory(1)))
    queue.cancel("waiting")
    queue.cancel("waiting")
    queue.cancel("unknown")
    assert [*queue.poll()] == [GetDone("waiting", (False,))]
    slow.reads_go.set()
    assert drain(queue, 1) == [GetDone("running", (True,))]
    assert slow.log == ["get 0"]
    assert queue.close(WAIT_SECONDS)


def test_progress_tells_what_may_be_used_when_a_deadline_passes(slow: SlowTier) -> None:
    class Halting(SlowTier):
        def get(
            self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None = None
        ) -> list[bool]:
            assert on_progress is not None
            on_progress(3)
            self.began.release()
            assert self.reads_go.wait(WAIT_SECONDS)
            return [True] * 5 + [False] * 3 if on_progress(5) else [True] * 3 + [False] * 5

    tier = Halting()
    queue = TierExecutor(tier, threads=1, max_write_bytes=0)
    queue.submit(Job("read", KEYS, memory(8)))
    assert tier.began.acquire(timeout=WAIT_SECONDS)
    assert queue.progress("read") == 3
    assert queue.progress("unknown") == 0
    tier.reads_go.set()
    assert drain(queue, 1) == [GetDone("read", (True,) * 5 + (False,) * 3)]
    assert queue.close(WAIT_SECONDS)


def test_a_tier_that_raises_costs_its_ticket_and_one_log_line_a_kind(
    slow: SlowTier, caplog: pytest.LogCaptureFixture
) -> None:
    queue = TierExecutor(slow, threads=2, max_write_bytes=1 << 20)
    slow.error = RuntimeError("a defect")
    slow.reads_go.set()
    slow.writes_go.set()
    for number in range(5):
        queue.submit(Job(f"get {number}", KEYS[:1], memory(1)))
        put(queue, f"put {number}")
    done = drain(queue, 10)
    assert Counter(item.op_id for item in done) == Counter(f"{kind} {n}" for kind in ("get", "put") for n in range(5))
    ended = [item for item in done if isinstance(item, GetDone | PutDone)]
    assert [item.each for item in ended] == [(False,)] * 10
    assert len([record for record in caplog.records if "Traceback" in record.getMessage()]) == 2
    slow.error = None
    put(queue, "well again")
    assert drain(queue, 1) == [PutDone("well again", (True,))]
    assert queue.close(WAIT_SECONDS)


def test_a_ticket_names_one_thing_at_a_time(slow: SlowTier) -> None:
    queue = TierExecutor(slow, threads=1, max_write_bytes=0)
    queue.submit(Job("same", KEYS[:1], memory(1)))
    with pytest.raises(PactViolation, match="operation 'same' is already running"):
        queue.submit(Job("same", KEYS[:1], memory(1)))
    slow.reads_go.set()
    drain(queue, 1)
    queue.submit(Job("same", KEYS[:1], memory(1)))
    drain(queue, 1)
    assert queue.close(WAIT_SECONDS)


def test_h56_closing_finishes_writes_and_drops_reads(slow: SlowTier) -> None:
    queue = TierExecutor(slow, threads=1, max_write_bytes=1 << 20)
    for number in range(3):
        put(queue, f"write {number}", number)
    assert slow.began.acquire(timeout=WAIT_SECONDS)
    queue.submit(Job("read", KEYS[:1], memory(1)))
    threading.Timer(0.05, slow.writes_go.set).start()
    assert queue.close(WAIT_SECONDS)
    assert sorted(queue.poll(), key=lambda item: str(item.op_id)) == [
        GetDone("read", (False,)),
        *(PutDone(f"write {number}", (True,)) for number in range(3)),
    ]
    assert put(queue, "too late")
    assert [*queue.poll()] == [PutDone("too late", (False,))]
    assert queue.close(0)


@pytest.mark.parametrize("threads", [1, 4])
def test_h56_closing_gives_up_on_stuck_operations_in_time(threads: int) -> None:
    """However many threads are stuck, in writes and in reads."""

    def play() -> float:
        slow = SlowTier()
        queue = TierExecutor(slow, threads=threads, max_write_bytes=1 << 20)
        put(queue, "stuck")
        assert slow.began.acquire(timeout=WAIT_SECONDS)
        put(queue, "waiting", 1)
        for number in range(1, threads):
            queue.submit(Job(f"stuck {number}", KEYS[:1], memory(1)))
            assert slow.began.acquire(timeout=WAIT_SECONDS)
        began = time.monotonic()
        assert not queue.close(0.2)
        seconds = time.monotonic() - began
        assert [*queue.poll()] == [PutDone("waiting", (False,))]
        assert queue.under_way == threads, "the buffers of what is stuck are still not the caller's"
        slow.writes_go.set()
        slow.reads_go.set()
        assert queue.close(WAIT_SECONDS)
        assert {item.op_id for item in queue.poll()} == {"stuck", *(f"stuck {number}" for number in range(1, threads))}
        return seconds

    assert_ends_within(play, 0.19, 0.3)


def test_h20_the_queue_reports_of_each_block_what_the_tier_found(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    queue = TierExecutor(tier, threads=1, max_write_bytes=1 << 20)
    queue.submit(Job("tail", KEYS[4:], filled(KEYS[4:]), KEYS[:4], 4 * SLOT, PutDone))
    assert drain(queue, 1) == [PutDone("tail", done(0, 4))], "blocks 0 to 3 are missing"
    queue.submit(Job("head", KEYS[:2], filled(KEYS[:2]), (), 2 * SLOT, PutDone))
    drain(queue, 1)
    queue.submit(Job("read", KEYS, memory(8), before=()))
    queue.submit(Job("ask", KEYS, before=(), kind=LookupDone))
    queue.submit(Job("ask of each", KEYS[::-1], kind=LookupDone))
    ended = drain(queue, 3)
    assert ended[:2] == [GetDone("read", done(2, 8)), LookupDone("ask", done(2, 8))]
    assert ended[2] == LookupDone("ask of each", done(2, 8)[::-1])
    assert served(tier, KEYS) == 2
    assert queue.close(WAIT_SECONDS)
    tier.close()


class CheckingTier(SlowTier):
    """Never slow; notes the writes' order and whether two ever ran at once."""

    def __init__(self) -> None:
        super().__init__()
        self.writing = 0
        self.two_at_once = False
        self.written: list[int] = []

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None = None
    ) -> list[bool]:
        time.sleep(0)  # others may run
        return [True] * len(keys)

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        self.writing += 1
        self.two_at_once |= self.writing > 1
        (piece,) = entries[0].buffer
        self.written.append(piece[0] + 256 * piece[1])
        time.sleep(0)
        self.writing -= 1
        return [True] * len(entries)


@pytest.mark.parametrize("seed", range(4))
def test_under_a_storm_every_ticket_ends_once_and_writes_run_one_by_one_in_their_order(seed: int) -> None:
    choose, tier = random.Random(seed), CheckingTier()
    queue = TierExecutor(tier, threads=4, max_write_bytes=64 * SLOT)
    ended: Counter[object] = Counter()
    reads, writes, most = [], [], 0
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for op_id in range(3000):
            if choose.random() < 0.5:
                buffer = bytearray(SLOT)
                buffer[:2] = op_id.to_bytes(2, "little")
                if queue.submit(Job(op_id, KEYS[:1], [[memoryview(buffer)]], None, SLOT, PutDone)):
                    writes.append(op_id)
            else:
                queue.submit(Job(op_id, KEYS[:1], memory(1)))
                reads.append(op_id)
                if choose.random() < 0.3:
                    queue.cancel(op_id)
            most = max(most, queue.pending_write_bytes)
            ended.update(done.op_id for done in queue.poll())
        assert queue.close(WAIT_SECONDS)
    finally:
        sys.setswitchinterval(interval)
    ended.update(done.op_id for done in queue.poll())
    assert ended == Counter([*reads, *writes])
    assert tier.written == writes
    assert not tier.two_at_once
    assert most <= 64 * SLOT
    assert (queue.pending_write_bytes, queue.under_way) == (0, 0)
