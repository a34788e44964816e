"""What threads cost is told by name and exactly: living ones, ended ones, of this process and of another."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time

import pytest

from kvpact.memory.prefault import THREAD
from kvpact.threads import start_background
from kvpact_testkit.demo.cpu_time import ENDED, Look, computed, look_at, spent_by_kvpact, spent_on_pages

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="this kernel counts no CPU time")

TICK_S = 0.02
"""What the kernel has not yet counted of a thread that runs, at most, and some work around it."""


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_threads_of_kvpact_are_told_from_the_engines_and_ended_ones_are_counted() -> None:
    go, rest, over = threading.Event(), threading.Event(), threading.Event()

    def background() -> None:
        go.wait()
        burn(0.15)
        memory = mmap.mmap(-1, 8 << 20)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1
        rest.set()
        over.wait()

    def take_pages() -> None:
        go.wait()
        burn(0.1)
        over.wait()

    living = start_background("kvpact-disk-0", background)
    pages = start_background(THREAD, take_pages)
    before = {1: Look.at(os.getpid(), "VLLM::Worker")}
    go.set()
    rest.wait()
    start_background("kvpact-disk-lane", lambda: burn(0.1)).join()
    burn(0.2)
    time.sleep(TICK_S)
    after = {1: Look.at(os.getpid(), "VLLM::Worker")}
    use = after[1].since(before[1])
    over.set()
    living.join()
    pages.join()
    assert spent_on_pages(before, after) == pytest.approx(0.1, abs=2 * TICK_S)
    assert use.cpu_seconds["kvpact-disk-0"] == pytest.approx(0.15, abs=2 * TICK_S)
    assert use.cpu_seconds[ENDED] == pytest.approx(0.1, abs=2 * TICK_S)
    assert use.minor_faults["kvpact-disk-0"] >= 1000
    assert computed(before, after) == pytest.approx(0.2, abs=3 * TICK_S)
    assert spent_by_kvpact(before, after) == pytest.approx(0.35, abs=3 * TICK_S)


def test_only_processes_that_compute_or_schedule_are_looked_at_and_workers_compute_if_there_are_any() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        names = {child.pid: "VLLM::EngineCore", os.getpid(): "python -m kvpact_testkit.demo.host"}
        before = look_at(names)
        time.sleep(0.5)
        after = look_at(names)
    finally:
        child.kill()
        child.wait()
    assert list(before) == [child.pid]
    assert after[child.pid].since(before[child.pid]).of_engine() > 0
    assert computed(before, after) > 0, "an engine without workers computes in its core"
    idle = Look("VLLM::Worker", {}, 0.0)
    assert computed({**before, 0: idle}, {**after, 0: idle}) == 0
    assert spent_by_kvpact(before, after) < TICK_S
