"""What dead writers leave in a shared directory is counted once and removed by the next open, though it dies (H65)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpact.tiers.directory.evictor_lock import host
from kvpact.tiers.directory.quota import CONTROL, CONTROL_BYTES
from kvpact.tiers.directory.store import DirectoryStore, open_directory
from kvpact.tiers.urls import parse_tier_url

WRITERS = 100
RECORD = [bytes(700)]
TAKEN = 4096
"""What a record takes of the file system."""
CAPACITY = 64 << 20
GROUP = "0" * 16


def open_store(path: Path, capacity: int = CAPACITY) -> DirectoryStore:
    return open_directory(parse_tier_url(f"dir://{path}?capacity={capacity}"))


def control(path: Path) -> Path:
    """Where a directory has its ledger."""
    return path / "kvpact" / CONTROL


def name(number: int) -> str:
    return f"{GROUP}/{number:064x}"


def write_and_die(path: Path, first: int, writers: int) -> None:
    """So many writers, of one process that is then killed; the last one dies in the middle of a record."""
    stores = [open_store(path) for _ in range(writers)]
    for number, store in enumerate(stores, first):
        store.write([name(number)], [RECORD])
    (control(path) / "new" / f"{stores[-1].quota.writer}.7").write_bytes(b"half a record")
    os.kill(os.getpid(), signal.SIGKILL)


def open_and_die(path: Path, moment: str) -> None:
    """A process that is killed while it counts what the dead have left."""
    rename, unlink, removed = os.rename, Path.unlink, []

    def renames(*paths: Path) -> None:
        if moment == "before it is written down":
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*paths)
        if moment == "when it is written down":
            os.kill(os.getpid(), signal.SIGKILL)

    def unlinks(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "writers":
            removed.append(path)
            if len(removed) == WRITERS // 2:
                os.kill(os.getpid(), signal.SIGKILL)
        unlink(path, missing_ok=missing_ok)

    os.rename, Path.unlink = renames, unlinks  # type: ignore[assignment,method-assign]
    open_store(path)


def open_with_others(path: Path, go: int, opened: int, end: int) -> None:
    """One of several processes that open the directory at the same moment, told by pipes; it stays until the end."""
    os.read(go, 1)
    store = open_store(path)
    store.write([name(10_000 + os.getpid())], [RECORD])
    os.write(opened, b"o")
    os.read(end, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def dies(act: Callable[..., None], *arguments: object) -> None:
    """One of the functions above, in a process of its own, which is killed."""
    if (pid := os.fork()) == 0:
        try:
            act(*arguments)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def counters(path: Path) -> list[str]:
    return os.listdir(control(path) / "writers")


_opened: list[str] | None = None


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if _opened is not None and event == "open":
        _opened.append(os.fsdecode(arguments[0]) if isinstance(arguments[0], (str, bytes, Path)) else "")


sys.addaudithook(_note)


@contextmanager
def files_opened() -> Iterator[list[str]]:
    """The files that this process opens meanwhile."""
    global _opened
    noted: list[str] = []
    _opened = noted
    try:
        yield noted
    finally:
        _opened = None


def test_h65_a_write_does_not_cost_more_after_a_hundred_writers_died(tmp_path: Path) -> None:
    dies(write_and_die, tmp_path, 0, WRITERS)
    assert len(counters(tmp_path)) == WRITERS
    store = open_store(tmp_path)
    with files_opened() as opened:
        store.write([name(WRITERS)], [RECORD])
    assert 0 < len([path for path in opened if "/writers/" in path]) < 8
    assert len(opened) < 16
    assert counters(tmp_path) == [store.quota.writer]
    assert not os.listdir(control(tmp_path) / "new")
    assert store.usage().used_bytes == CONTROL_BYTES + (WRITERS + 1) * TAKEN
    assert sum(store.exists([name(number) for number in range(WRITERS + 1)])) == WRITERS + 1
    store.close()


def test_h65_restarts_that_are_killed_leave_one_counter(tmp_path: Path) -> None:
    for number in range(6):
        dies(write_and_die, tmp_path, number, 1)
        assert len(counters(tmp_path)) == 1
    store = open_store(tmp_path)
    assert store.usage().used_bytes == CONTROL_BYTES + 6 * TAKEN


@pytest.mark.parametrize(
    "moment", ["before it is written down", "when it is written down", "when half of them are removed"]
)
def test_h65_a_kill_while_the_dead_are_counted_counts_no_byte_twice_and_none_less(moment: str, tmp_path: Path) -> None:
    dies(write_and_die, tmp_path, 0, WRITERS)
    for _ in range(2):
        dies(open_and_die, tmp_path, moment)
        if moment == "when half of them are removed":
            break
    store = open_store(tmp_path)
    assert store.usage().used_bytes == CONTROL_BYTES + WRITERS * TAKEN
    assert not counters(tmp_path)
    store.write([name(WRITERS)], [RECORD])
    assert store.usage().used_bytes == CONTROL_BYTES + (WRITERS + 1) * TAKEN


def test_h65_processes_that_open_at_once_count_the_dead_once(tmp_path: Path) -> None:
    others = 4
    for round_ in range(3):
        dies(write_and_die, tmp_path, round_ * 100, 100)
        (go, let_go), (opened, told), (end, let_end) = (os.pipe() for _ in range(3))
        with ThreadPoolExecutor(others) as pool:
            ended = [pool.submit(dies, open_with_others, tmp_path, go, told, end) for _ in range(others)]
            os.write(let_go, b"g" * others)
            assert b"".join(os.read(opened, 1) for _ in range(others)) == b"o" * others
            store = open_store(tmp_path)
            assert len(counters(tmp_path)) <= others
            written = (round_ + 1) * (100 + others)
            assert store.usage().used_bytes == CONTROL_BYTES + written * TAKEN
            os.write(let_end, b"e" * others)
            for one in ended:
                one.result(60)


def test_h65_what_a_writer_says_while_the_dead_are_counted_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer has read the counters, or the stocktaking, when another one folds the dead: it sees no less than all."""
    for read in ("counted", "snapshot"):
        path = tmp_path / read
        path.mkdir()
        writer = open_store(path)
        dies(write_and_die, path, 0, 50)
        original = getattr(writer.quota, read)

        def behind(original=original, path=path, writer=writer, read=read):  # type: ignore[no-untyped-def]
            found = original()
            monkeypatch.setattr(writer.quota, read, original)
            open_store(path)
            return found

        monkeypatch.setattr(writer.quota, read, behind)
        assert writer.quota.used_bytes() == CONTROL_BYTES + 50 * TAKEN


def test_h65_what_is_counted_outlasts_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot and its name are on disk before the first counter goes."""
    dies(write_and_die, tmp_path, 0, 20)
    done: list[str] = []
    fsync, rename, unlink = os.fsync, os.rename, Path.unlink

    def synced(descriptor: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name.partition('+')[0]}")
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        done.append(f"rename {target.name}")
        rename(source, target)

    def unlinked(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "writers":
            done.append("remove")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(Path, "unlink", unlinked)
    open_store(tmp_path)
    name_of_host = host().partition("+")[0]
    assert done == [f"sync {name_of_host}", "rename stocktaking", f"sync {CONTROL}", *["remove"] * 20, "sync writers"]


def test_h63_files_of_the_ledger_are_read_no_further_than_they_could_be_long(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.write([name(0)], [RECORD])
    ledger = control(tmp_path)
    for planted in (ledger / "writers" / "giant", ledger / "stocktaking"):
        with planted.open("ab") as file:
            file.truncate(1 << 40)
    store.write([name(1)], [RECORD])
    assert store.usage().used_bytes < CAPACITY
    with (ledger / "collector").open("ab") as file:
        file.truncate(1 << 40)
    assert not store.quota.lock.acquire()
    assert store.exists([name(0), name(1)]) == [True, True]
