"""The whole cache is killed with -9 at random moments, in two processes; the next life goes on as if nothing was."""

from __future__ import annotations

import json
import mmap
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from crash_child import BLOCK_SIZE, DOCUMENTS, NAMESPACE, SLOT_BYTES, STEM, TAIL, label, open_disk, payload, token_ids

from kvpact.identity.keys import BlockKeys, RequestIdentity
from kvpact.tiers.disk.inspection import verify_slab
from kvpact.tiers.disk.superblock import Superblock
from kvpact_testkit.demo.engine import session_members
from leftovers import named_shared_memory, orphaned_shared_memory, shared_memory, slabs_still_locked
from polling import until

TESTS = Path(__file__).parents[1]
SLOTS = 80
"""Fewer than the 144 blocks that the processes work with: the slab is full and evicts all the time."""
LONGEST_LIFE = 0.4
"""Seconds of saves and loads before the kill: about a hundred steps."""
PATIENCE = 10.0
HASH_SEEDS = 4


@dataclass(frozen=True)
class Life:
    """What one life said before it ended: blocks found on disk, blocks reused and compared, blocks read from disk."""

    found: int = 0
    reused: int = 0
    from_disk: int = 0


class Child:
    """A process that `parent` forks, and how it ended."""

    def __init__(self, parent: subprocess.Popen[bytes], directory: Path, log: Path, seed: int) -> None:
        assert parent.stdin is not None
        assert parent.stdout is not None
        log.write_bytes(b"")
        parent.stdin.write(json.dumps([str(directory), SLOTS, seed, str(log)]).encode() + b"\n")
        self._said = parent.stdout
        self.pid = int(self._said.readline())
        self._code: int | None = None
        with suppress(ProcessLookupError):  # it has ended by itself
            while os.getsid(self.pid) != self.pid:
                time.sleep(0.001)

    def poll(self) -> int | None:
        """Its exit code, None if it lives."""
        return self.wait() if self._code is not None or select.select([self._said], [], [], 0.0)[0] else None

    def wait(self) -> int:
        """Its exit code when it has ended."""
        if self._code is None:
            self._code = int(self._said.readline())
        return self._code


@contextmanager
def parents() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that have loaded what lives run, each with a hash seed of its own (H25)."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    with ExitStack() as started:
        yield [
            started.enter_context(
                subprocess.Popen(
                    [sys.executable, Path(__file__).with_name("crash_child.py")],
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(seed)},
                )
            )
            for seed in range(HASH_SEEDS)
        ]


def kill(child: Child, whom: str) -> None:
    """SIGKILL to the scheduler, the worker or both; the one that is left notices and ends by itself."""
    worker = [pid for pid in session_members(child.pid) if pid != child.pid]
    for pid in {"both": [child.pid, *worker], "scheduler": [child.pid], "worker": worker or [child.pid]}[whom]:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while session_members(child.pid) and time.monotonic() < deadline:
        child.poll()
        time.sleep(0.005)
    assert not session_members(child.pid), f"a process outlived the kill of {whom} by {PATIENCE:g} s"
    assert child.wait() in (-signal.SIGKILL, 0)


def live_and_die(parent: subprocess.Popen[bytes], directory: Path, log: Path, seed: int) -> Life:
    """One life and its death at a random moment; what is left behind is looked at from outside."""
    choose = random.Random(seed)
    before = shared_memory()
    child = Child(parent, directory, log, seed)
    try:
        if choose.random() < 0.1:
            time.sleep(choose.uniform(0.0, 0.2))  # somewhere in its start
        else:
            until(lambda: b"ready" in log.read_bytes() or child.poll() is not None, PATIENCE)
            time.sleep(choose.uniform(0.0, LONGEST_LIFE))
        assert child.poll() is None, f"the process ended by itself:\n{log.read_text()}"
        assert not named_shared_memory(session_members(child.pid)), "memory without a name cannot be left behind"
        kill(child, choose.choice(["both", "scheduler", "worker"]))
    finally:
        for pid in session_members(child.pid):
            os.kill(pid, signal.SIGKILL)
        child.wait()
    assert not orphaned_shared_memory(before), "nothing is left in /dev/shm"
    assert not slabs_still_locked(directory), "no lock is left"
    return judge(directory, log)


def judge(directory: Path, log: Path) -> Life:
    """What the life said is well, and no record on disk is damaged."""
    words = [line.split() for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    assert {line[0] for line in words} <= {"ready", "reused"}, log.read_text()
    slabs = list(directory.glob("kvpact/*.slab"))
    for slab in slabs:
        assert not verify_slab(slab).damaged, "a kill leaves no record whose payload is not there in full"
        assert slab.stat().st_size <= _superblock(slab).claim_bytes, "the capacity is kept"
    if not words:
        return Life()
    _, found, read = words[0]
    assert int(read) <= _superblock(slabs[0]).table_bytes, "H59: no payload is read on a restart"
    return Life(int(found), *map(int, words[-1][1:])) if len(words) > 1 else Life(int(found))


def _superblock(slab: Path) -> Superblock:
    return Superblock.decode(slab.read_bytes()[:4096], slab)


def read_everything(directory: Path) -> int:
    """Open the slab as the next life would, read all that it holds, compare; the number of blocks."""
    tier = open_disk(directory, SLOTS, timeout=0.0)
    longest = STEM + TAIL
    memory = memoryview(mmap.mmap(-1, longest * SLOT_BYTES))
    buffers = [[memory[block * SLOT_BYTES : (block + 1) * SLOT_BYTES]] for block in range(longest)]
    distinct: set[str] = set()
    for document in DOCUMENTS:
        keys = BlockKeys(NAMESPACE.digest, BLOCK_SIZE, RequestIdentity()).extend(token_ids(document, longest))
        held = tier.leading(keys)
        assert all(tier.get(keys[:held], buffers[:held])), "what the index promises is there"
        for block in range(held):
            assert buffers[block][0] == payload(label(document, block)), f"{label(document, block)} is not identical"
            distinct.add(label(document, block))
    assert tier.counts().damaged == 0
    assert len(distinct) == tier.capacity().blocks
    tier.check()
    tier.close()
    return len(distinct)


def live_and_die_often(directory: Path, log: Path, seeds: range) -> list[Life]:
    with parents() as loaded:
        lives = [live_and_die(loaded[seed % HASH_SEEDS], directory, log, seed) for seed in seeds]
    assert read_everything(directory) > SLOTS // 2
    left = sorted(path.suffix for path in (directory / "kvpact").iterdir())
    assert left == ["", ".slab"], "nothing else is left in the directory"
    return lives


def test_h22_h25_h59_kills_of_a_cache_that_saves_and_loads(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    directory.mkdir()
    lives = live_and_die_often(directory, tmp_path / "child.log", range(15))
    # The test is worth something only if the lives found, read from disk and compared a good deal.
    assert sum(life.found > SLOTS // 2 for life in lives) > 9
    assert sum(life.from_disk > 0 for life in lives) > 6
    assert sum(life.reused for life in lives) > 500


@pytest.mark.parametrize(
    "kills", [pytest.param(50, marks=[pytest.mark.proof]), pytest.param(1000, marks=[pytest.mark.soak])]
)
def test_h22_h59_more_kills_of_a_cache_that_saves_and_loads(tmp_path: Path, kills: int) -> None:
    directory = tmp_path / "cache"
    directory.mkdir()
    live_and_die_often(directory, tmp_path / "child.log", range(1000, 1000 + kills))
