"""Paths that run once a request stay clean when every operation on files fails: no descriptor, no thread, no line for
each (H99)."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpact.cache import stats_file
from kvpact.cache.stats_file import StatsFile
from kvpact.cache.status import EngineStatus
from kvpact.tiers.base import Tier, chained
from kvpact.tiers.disk.slab import Slab, SlabReader
from kvpact.tiers.registry import TierContext, open_tier
from kvpact.tiers.urls import parse_tier_url
from slab_scenes import NAMESPACE, SLOT, chain, filled, memory

REQUESTS = 10_000
AT_MOST_LINES = 10
CALLS = (
    "open", "pread", "preadv", "pwrite", "pwritev", "read", "write", "fsync", "ftruncate", "posix_fallocate", "stat",
    "fstat", "lstat", "rename", "replace", "unlink", "remove", "mkdir", "listdir", "scandir", "utime", "chmod", "lseek",
)  # fmt: skip
"""What a program does with files, by its names in `os`."""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def every_operation_fails(code: int) -> Iterator[None]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, fail)
        patch.setattr(fcntl, "flock", fail)
        patch.setattr(SlabReader, "preadv", staticmethod(fail))
        patch.setattr(Slab, "pwritev", staticmethod(fail))
        yield


@pytest.mark.parametrize("kind", ["disk", "dir"])
def test_h99_requests_of_a_tier_whose_files_all_fail_leave_nothing_behind(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(parse_tier_url(f"{kind}://{tmp_path}?capacity=16MiB"), TierContext(NAMESPACE, SLOT))
    keys, buffers, into = chain("one", 2), filled(chain("one", 2)), memory(2)
    assert tier.put(chained(keys, buffers)) == [True, True]
    other = chain("other", 1)
    calls: tuple[Callable[[Tier], object], ...] = (
        lambda tier: tier.lookup(keys),
        lambda tier: tier.get(keys, into),
        lambda tier: tier.put(chained(other, buffers[:1])),
        lambda tier: (tier.health(), tier.counts(), tier.capacity()),
    )
    before = descriptors(), threading.active_count()
    with every_operation_fails(errno.EIO):
        for number in range(REQUESTS):
            calls[number % len(calls)](tier)
    assert (descriptors(), threading.active_count()) <= before
    assert len(caplog.records) <= AT_MOST_LINES
    tier.close()


@pytest.mark.parametrize(
    ("code", "where"),
    [
        (errno.ENOLCK, "fcntl.flock"),
        (errno.EAGAIN, "fcntl.flock"),
        (errno.ENOENT, "kvpact.own_files.Access.open"),
        (errno.ENOSPC, "kvpact.cache.stats_file.replace_own"),
    ],
    ids=["no locks", "all locked", "missing folder", "full disk"],
)
def test_h99_a_stats_file_that_cannot_be_written_says_so_once(
    code: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = iter(range(200))
    enough = threading.Event()

    def fail(*_: object, **__: object) -> None:
        if next(calls, None) is None:
            enough.set()
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(where, fail)

    def counted(lookups: int) -> EngineStatus:
        return EngineStatus(pid=1, model="m", block_size=16, metrics={"lookups": lookups})

    monkeypatch.setattr(stats_file, "TRIES", 1)
    monkeypatch.setattr(stats_file, "RETRY_SECONDS", 0.0)
    file, number = StatsFile(tmp_path / "stats.json"), 0
    file.offer(counted(0))
    before = descriptors(), threading.active_count()
    while not enough.wait(0.0002):
        file.offer(counted(number := number + 1))
    after = descriptors(), threading.active_count()
    file.close(counted(-1))
    assert after <= (before[0] + 2, before[1]), "one lock file may be open at this moment"
    assert len(caplog.records) == 1
    assert len(list(tmp_path.iterdir())) <= stats_file.MOST_ENGINES
