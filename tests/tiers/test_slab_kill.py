"""A process is killed with -9 at random moments while it stores and reads; the next one goes on as if nothing was."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slab_churn import NAMES

from kvpact.tiers.disk.inspection import verify_slab
from kvpact.tiers.disk.slab import Slab
from kvpact.tiers.disk.slab_directory import SlabDirectory
from slab_scenes import bare_tier, capacity_for, chain, layout, on_disk, served, slab_path

TESTS = Path(__file__).parents[1]


def start(directory: Path, slots: int, seed: int) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("slab_churn.py"), directory, str(slots), str(seed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])},
    )
    assert child.stdout is not None
    if (line := child.stdout.readline()) != "ready\n":
        child.kill()
        pytest.fail(f"the process says {line!r} instead of being ready")
    return child


def kill_and_check(directory: Path, slots: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """One life and death; returns how many blocks the next process served."""
    child = start(directory, slots, seed)
    time.sleep(random.Random(seed).uniform(0.0, 0.15))
    assert child.poll() is None, f"the process ended by itself: {child.communicate()[0]}"
    os.kill(child.pid, signal.SIGKILL)
    output, _ = child.communicate()
    assert output == ""

    report = verify_slab(slab_path(directory))
    assert not report.damaged, "a kill leaves no record whose payload is not there in full"
    read: list[int] = []

    def counted(descriptor: int, views: list[memoryview], offset: int) -> int:
        read.append(os.preadv(descriptor, views, offset))
        return read[-1]

    with monkeypatch.context() as patch:
        patch.setattr(Slab, "preadv", staticmethod(counted))
        tier = bare_tier(directory, slots, timeout=2.0)
    assert sum(read) <= layout(slab_path(directory)).table_bytes, "H59: no payload is read on a restart"
    assert tier.counts().damaged == 0
    for _ in range(8):  # given less room than the life before, it keeps to that once it has looked around
        tier.tend()
    tier.check()
    blocks = 0
    for name in NAMES:
        keys = chain(name, 24)
        held = tier.leading(keys)
        assert served(tier, keys) == held, "what the index promises is there, identical"
        blocks += held
    allowed = layout(slab_path(directory)).slots_in(capacity_for(slots))
    assert tier.capacity().blocks == min(report.sound - report.orphans, allowed)
    assert on_disk(slab_path(directory)) <= capacity_for(slots)
    tier.close()
    return blocks


def test_h22_h59_kills_lose_nothing_and_serve_nothing_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = 60  # fewer than the 144 blocks that the process works with: it evicts all the time
    served_blocks = [kill_and_check(tmp_path, slots, seed, monkeypatch) for seed in range(12)]
    assert sum(count > 0 for count in served_blocks) > 8
    left = set((tmp_path / "kvpact").iterdir())
    assert left == {slab_path(tmp_path), tmp_path / "kvpact" / "lock"}, "nothing else is left in the directory"


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "kills", [pytest.param(30, marks=[pytest.mark.proof]), pytest.param(1000, marks=[pytest.mark.soak])]
)
def test_h22_h59_kills_with_slabs_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int) -> None:
    for seed in range(1000, 1000 + kills):
        kill_and_check(tmp_path, random.Random(seed).choice([20, 60, 200]), seed, monkeypatch)


def test_a_killed_process_leaves_its_lock_to_the_next_even_if_it_had_forked(tmp_path: Path) -> None:
    tier = bare_tier(tmp_path)
    pid = os.fork()
    if pid == 0:
        signal.pause()  # a worker that an engine forked outlives it for a while
        os._exit(0)
    try:
        tier.close()
        bare_tier(tmp_path, timeout=5.0).close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_process_that_is_forked_while_the_directory_is_locked_does_not_keep_it_locked(tmp_path: Path) -> None:
    bare_tier(tmp_path).close()
    directory = SlabDirectory(tmp_path)
    with directory.locked(1.0):
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
    try:
        with directory.locked(1.0):
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
