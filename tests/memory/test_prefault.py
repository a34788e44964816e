"""Pages are taken a window ahead of their use, a larger one while the engine rests, in huge pages where the kernel
can."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpact.memory.arena import ArenaSegment
from kvpact.memory.prefault import (
    AHEAD_BYTES,
    FIRST_BYTES,
    MAX_AHEAD_BYTES,
    PIECE_BYTES,
    RATE_SECONDS,
    REST_SECONDS,
    RESTING_PAUSE_SECONDS,
    START_SECONDS,
    PageSchedule,
)
from kvpact.threads import LOW_PRIORITY
from polling import until

MIB = 1 << 20


class Schedules(RuleBasedStateMachine):
    """An engine steps, rests and fills its arena, while a thread takes what it may as soon as it may."""

    @initialize(size=st.one_of(st.integers(1, 1 << 30), st.integers(1 << 30, 4 << 30)))
    def start(self, size: int) -> None:
        self.now = 100.0
        self.schedule = PageSchedule((size,), self.now)
        self.used = 0
        self.computing = False
        self.taken_at_rest = 0
        self.rested_since = self.now
        self.rest_seconds = 0.0
        self.stepped = False
        self.cpu_seconds = 0.0

    @rule(share=st.floats(0, 1))
    def use(self, share: float) -> None:
        self.used = max(self.used, int(share * self.schedule.size))
        behind = self.schedule.taken < min(self.schedule.size, max(FIRST_BYTES, self.used + AHEAD_BYTES))
        assert self.schedule.use(int(share * self.schedule.size)) == behind

    @rule()
    def step_begins(self) -> None:
        self.schedule.step_began()
        self.computing = self.stepped = True

    @rule()
    def step_ends(self) -> None:
        self.schedule.step_ended(self.now)
        self.computing, self.rested_since = False, self.now

    @rule(seconds=st.floats(0, 10), piece_seconds=st.floats(0.0001, 0.1))
    def take_what_may_be_taken(self, seconds: float, piece_seconds: float) -> None:
        end = self.now + seconds
        for _ in range(1000):
            if self.now >= end:
                break
            if wait := self.schedule.wait(self.now):
                assert 0 < wait <= REST_SECONDS + 1e-9, "a thread that waits longer sees too late that it may go on"
                self.rest_seconds += min(wait, end - self.now)
                self.now = min(end, self.now + wait)
                continue
            needed = self.schedule.taken < min(self.schedule.size, max(FIRST_BYTES, self.used + AHEAD_BYTES))
            resting = not self.computing and self.now >= self.rested_since + REST_SECONDS
            assert needed or resting, "pages were taken that nobody needs soon, in the engine's way"
            before = self.schedule.taken
            start, length = self.schedule.take(self.now)
            assert (start, start + length) == (before, self.schedule.taken), "pages were left out or taken twice"
            assert 0 < length <= PIECE_BYTES
            self.schedule.took(piece_seconds)
            self.cpu_seconds += piece_seconds
            if abs(self.cpu_seconds - START_SECONDS) > 1e-9:
                assert self.schedule.starting == (not self.stepped and self.cpu_seconds < START_SECONDS)
            self.taken_at_rest += not needed

    @invariant()
    def no_more_than_the_window_and_what_rest_allows(self) -> None:
        ahead = max(0, self.schedule.taken - self.used)
        assert ahead <= FIRST_BYTES + PIECE_BYTES * (1 + self.taken_at_rest)
        assert ahead <= max(FIRST_BYTES, min(MAX_AHEAD_BYTES, self.used)) + PIECE_BYTES, "it was never used so fast"
        assert self.taken_at_rest <= 1 + self.rest_seconds / RESTING_PAUSE_SECONDS * 1.01
        self.schedule.check()

    def teardown(self) -> None:
        """Left alone, it takes a window that is as large as what came into use, and no more."""
        if hasattr(self, "schedule"):
            self.schedule.step_ended(self.now)
            for _ in range(3 * self.schedule.size // PIECE_BYTES + 10):
                self.now += self.schedule.wait(self.now)
                if not self.schedule.wait(self.now):
                    self.schedule.take(self.now)
            assert self.schedule.taken >= min(self.schedule.size, max(FIRST_BYTES, self.used + AHEAD_BYTES))
            most = min(self.schedule.size, self.used + max(FIRST_BYTES, min(MAX_AHEAD_BYTES, self.used)))
            assert self.schedule.taken <= most + PIECE_BYTES


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_each_slot_class_has_a_window_of_its_own() -> None:
    """A slot of the second class in use does not have all of the first class taken in the engine's way."""
    first, second = 1024 * MIB, 1536 * MIB
    schedule = PageSchedule((first, second), 0.0)
    schedule.step_began()

    def take_all_that_is_wanted() -> list[tuple[int, int]]:
        pieces = []
        while not schedule.wait(0.0):
            schedule.check()
            pieces.append(schedule.take(0.0))
        return pieces

    pieces = take_all_that_is_wanted()
    assert [start for start, _ in pieces] == [
        *range(0, FIRST_BYTES // 2, PIECE_BYTES),
        *range(first, first + FIRST_BYTES // 2, PIECE_BYTES),
    ]
    assert schedule.has_first
    assert schedule.use(first + FIRST_BYTES // 2 - AHEAD_BYTES + 16 * MIB)
    assert take_all_that_is_wanted() == [
        (first + FIRST_BYTES // 2, PIECE_BYTES),
        (first + FIRST_BYTES // 2 + PIECE_BYTES, PIECE_BYTES),
    ]
    assert not schedule.use(0)


def taken_at_rest(schedule: PageSchedule, now: float) -> int:
    """Bytes that are taken in five minutes without a step."""
    before, end = schedule.taken, now + 300
    while now < end:
        if seconds := schedule.wait(now):
            now += seconds
        else:
            schedule.take(now)
    return schedule.taken - before


def test_what_nobody_uses_is_not_taken_and_what_is_used_fast_is_taken_far_ahead() -> None:
    schedule = PageSchedule((64 << 30,), 0.0)
    assert taken_at_rest(schedule, 0.0) == FIRST_BYTES
    assert taken_at_rest(schedule, 600.0) == 0, "an engine without a request has been idle for ten minutes"
    schedule.step_began()
    schedule.use(600 * MIB)
    schedule.step_ended(1000.0)
    assert taken_at_rest(schedule, 1000.0) == 2 * 600 * MIB - FIRST_BYTES, "as much again as came into use"
    schedule.use(610 * MIB)
    schedule.step_ended(1000.0 + 2 * RATE_SECONDS)
    schedule.step_ended(1000.0 + 4 * RATE_SECONDS)
    assert taken_at_rest(schedule, 2000.0) == 0, "it has been slow since"
    schedule.use(8 << 30)
    schedule.step_ended(3000.0)
    taken_at_rest(schedule, 3000.0)
    assert schedule.taken == (8 << 30) + MAX_AHEAD_BYTES


def test_a_new_arena_takes_its_window_follows_its_use_and_takes_more_of_it_at_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rest_seconds, ahead = 0.3, 64 * MIB
    for name in ("AHEAD_BYTES", "FIRST_BYTES"):
        monkeypatch.setattr(f"kvpact.memory.prefault.{name}", ahead)
    monkeypatch.setattr("kvpact.memory.prefault.REST_SECONDS", rest_seconds)
    segment = ArenaSegment.create(500, MIB)
    segment.pages.step_began()
    assert not segment.pages.wait_for_first(0.01), "nothing is taken yet"
    segment.pages.start()
    assert segment.pages.wait_for_first(60.0)
    assert _taken(segment) >= ahead
    time.sleep(2 * rest_seconds)
    assert _taken(segment) == ahead, "more was taken than the window, while the engine computes"
    segment.use([3, 99])
    until(lambda: _taken(segment) >= ahead + 100 * MIB)
    assert _taken(segment) < ahead + 100 * MIB + PIECE_BYTES
    segment.pages.step_ended()
    until(lambda: _taken(segment) == 200 * MIB)
    time.sleep(0.5)
    assert _taken(segment) == 200 * MIB, "as much again as came into use, and no more"
    segment.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvpact-prefault"]


def test_the_thread_gives_way_to_others_when_the_start_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpact.memory.prefault.PIECE_BYTES", 4096)  # so that it is not done before we have looked
    monkeypatch.setattr("kvpact.memory.prefault.START_SECONDS", 600.0)
    segment = ArenaSegment.create(1024, MIB)
    segment.pages.start()
    assert _niceness() == os.getpriority(os.PRIO_PROCESS, 0), (
        "a busy machine would take the pages only after the first prompts"
    )
    segment.pages.step_began()
    until(lambda: _niceness() == LOW_PRIORITY)
    segment.close()


def test_pages_are_huge_in_both_processes_mappings_where_the_kernel_makes_them() -> None:
    if not _kernel_collapses():
        pytest.skip("this kernel makes no huge pages of shared memory on demand (Linux 6.1)")
    ballast = [ArenaSegment.create(1, 4096) for _ in range(3)]  # so that no mapping is aligned by luck
    segment = ArenaSegment.create(15, MIB)
    segment.pages.take_all()
    other = ArenaSegment.attach(segment.address())
    for each in (segment, other):
        for slot in range(14):
            each.slot_view(slot)[0] = slot
        assert _huge_bytes(each) == 14 * MIB
    assert other.slot_view(7)[0] == 7
    assert _taken(segment) == 15 * MIB, "the last, odd MiB is taken too"
    for each in (*ballast, other, segment):
        each.close()


def test_huge_pages_can_be_declined() -> None:
    segment = ArenaSegment.create(4, MIB)
    segment.place_pages(huge=False)
    segment.pages.take(0, 4 * MIB)
    assert _taken(segment) == 4 * MIB
    for slot in range(4):
        segment.slot_view(slot)[0] = slot
    assert _huge_bytes(segment) == 0
    segment.close()


def test_where_there_are_no_huge_pages_small_ones_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpact.memory.prefault.MADV_COLLAPSE", 9999)
    segment = ArenaSegment.create(20, MIB)
    segment.slot_view(5)[:4] = b"kept"
    segment.pages.take_all()
    assert _taken(segment) == 20 * MIB
    assert _huge_bytes(segment) == 0
    assert bytes(segment.slot_view(5)[:4]) == b"kept"
    segment.close()


def _taken(segment: ArenaSegment) -> int:
    """Bytes that the segment has of the machine."""
    address = segment.address()
    return os.stat(f"/proc/self/fd/{address.descriptor}").st_blocks * 512


def _niceness() -> int:
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "kvpact-prefault")
    assert thread.native_id is not None
    return os.getpriority(os.PRIO_PROCESS, thread.native_id)


def _huge_bytes(segment: ArenaSegment) -> int:
    """How much of the segment is mapped in huge pages here."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(segment.memory))
    here, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            here = low <= start < high
        elif here and first in ("ShmemPmdMapped:", "FilePmdMapped:"):
            found += int(line.split()[1]) * 1024
    return found


def _kernel_collapses() -> bool:
    major, minor = map(int, platform.release().split(".")[:2])
    return (major, minor) >= (6, 1) and Path("/sys/kernel/mm/transparent_hugepage").exists()
