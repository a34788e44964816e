"""The tier in a shared directory: it passes the suite of tiers, many writers keep one bound together, and neither a
killed writer nor a killed evictor leaves anything behind that hurts."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from chain_calls import put_chain, put_document, served_of_document
from kvpact.errors import TierError
from kvpact.identity.keys import BlockKey, Namespace
from kvpact.own_files import OWN_FOLDER
from kvpact.tiers import use_clock
from kvpact.tiers.base import HEADER_BYTES, UNSEALED, Entry, RecordHeader, Tier
from kvpact.tiers.directory import evictor_lock, files, quota
from kvpact.tiers.directory.evictor_lock import host
from kvpact.tiers.directory.quota import CONTROL, CONTROL_BYTES
from kvpact.tiers.directory.store import DirectoryStore, open_directory
from kvpact.tiers.shared import tier as shared_tier
from kvpact.tiers.shared.store import StoreError, group_name, key_of, record_name
from kvpact.tiers.shared.tier import SharedTier
from kvpact.tiers.urls import parse_tier_url
from kvpact_testkit.faults import Faults
from kvpact_testkit.sample_blocks import content, document, filled_buffers
from kvpact_testkit.tier.conformance import Damage, StoreContext, TierConformance

NAMESPACE = Namespace({"model": "kvpact-tests", "dtype": "bytes", "block_size": "16"})
GROUP = group_name(NAMESPACE, UNSEALED)
SLOT = 64 << 10
DESCRIPTION_BYTES = 4096
"""What a namespace's description takes of the file system."""
PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])


def capacity_of(blocks: int, slot_bytes: int = SLOT) -> int:
    return blocks * -(-(HEADER_BYTES + slot_bytes) // 4096) * 4096 + CONTROL_BYTES + DESCRIPTION_BYTES


def open_store(path: Path, capacity: int) -> DirectoryStore:
    return open_directory(parse_tier_url(f"dir://{path}?capacity={capacity}"))


def open_tier(path: Path, blocks: int = 1000) -> SharedTier:
    return SharedTier(open_store(path, capacity_of(blocks)), NAMESPACE, SLOT)


def path_of(tier: SharedTier, key: BlockKey) -> Path:
    assert isinstance(tier.store, DirectoryStore)
    return tier.store.path_of(record_name(GROUP, key))


put = partial(put_document, slot_bytes=SLOT)
served = partial(served_of_document, slot_bytes=SLOT)


def used_bytes(path: Path) -> int:
    """What all files take at this moment, those being written and those of the ledger included."""
    total = 0
    for found, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(found, name)).st_size
    return total


def temporaries(path: Path) -> list[str]:
    return os.listdir(path / OWN_FOLDER / CONTROL / "new")


class TestDirectoryTier(TierConformance):
    reopens = True
    several_writers = True
    gives_up_after = 0.2

    def open_tier(self, place: StoreContext) -> Tier:
        capacity = capacity_of(place.capacity_blocks, place.slot_bytes)
        return SharedTier(open_store(place.directory, capacity), place.namespace, place.slot_bytes, seal=place.seal)

    @contextmanager
    def store_calls(self, faults: Faults) -> Iterator[None]:
        read, write = files.read_record, files.write_new
        publish, remove, status = files.publish, files.remove, files.status

        def watched_read(path: Path, buffer: list[memoryview]) -> bool:
            faults.before_read(path.name.encode())
            return read(path, buffer)

        def watched_write(path: Path, pieces: list[memoryview], used_ns: int) -> None:
            def torn(part: float) -> None:
                whole = b"".join(pieces)
                write(path, [whole[: int(len(whole) * part)]], used_ns)

            faults.before_write(torn=torn)
            write(path, pieces, used_ns)

        def watched_publish(temporary: Path, path: Path) -> None:
            faults.before_write()
            publish(temporary, path)

        def watched_remove(path: Path) -> bool:
            faults.before_write()
            return remove(path)

        def watched_status(path: Path) -> os.stat_result | None:
            faults.before_read()
            return status(path)

        with pytest.MonkeyPatch.context() as patch:
            for name, watched in (
                ("read_record", watched_read),
                ("write_new", watched_write),
                ("publish", watched_publish),
                ("remove", watched_remove),
                ("status", watched_status),
            ):
                patch.setattr(files, name, watched)
            yield

    def damage(self, place: StoreContext, key: BlockKey, how: Damage) -> bool:
        group = place.directory / OWN_FOLDER / group_name(place.namespace, place.seal)
        paths = {path.name: path for path in group.rglob("*") if key_of(f"/{path.name}")}
        path = paths.pop(key.hex())
        record = path.read_bytes()
        path.unlink()
        if how is not Damage.GONE:
            path.write_bytes(how.of(record, next(iter(paths.values())).read_bytes()))
        return True


def test_what_is_used_stays_and_tails_go_before_heads(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 12)
    old, used = document("old", 6), document("used", 6)
    put(tier, used)
    put(tier, old)
    long_ago = time.time_ns() - int(1e12)
    for number, key in enumerate((*used.keys, *old.keys)):  # `used` is the one written first
        path = path_of(tier, key)
        os.utime(path, ns=(long_ago - number % 6, long_ago - number % 6))
    assert tier.leading(used.keys) == 6
    assert put(tier, document("new", 3)) == 3
    assert (tier.leading(used.keys), served(tier, old)) == (6, 2)  # one more than needed, the evictor's slack
    assert tier.counts().evicted == 4


def test_a_record_that_is_looked_up_often_is_touched_once_a_minute(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    wanted = document("popular", 4)
    put(tier, wanted)
    paths = [path_of(tier, key) for key in wanted.keys]
    written = [path.stat().st_mtime_ns for path in paths]
    assert written == sorted(written, reverse=True)
    tier.leading(wanted.keys)
    assert [path.stat().st_mtime_ns for path in paths] == written
    for path, time_ns in zip(paths, written, strict=True):
        os.utime(path, ns=(time_ns - 61 * 10**9,) * 2)
    tier.leading(wanted.keys)
    touched = [path.stat().st_mtime_ns for path in paths]
    assert touched == sorted(touched, reverse=True)
    assert touched[-1] > written[0]


def test_a_tail_that_is_stored_late_makes_nothing_look_newer_than_its_head(tmp_path: Path) -> None:
    """A write asks for its parent, which counts as used; those before it were used long ago."""
    tier = open_tier(tmp_path)
    wanted = document("slow", 6)
    put_chain(tier, wanted.keys[:4], filled_buffers(wanted.keys[:4], SLOT, 2))
    paths = [path_of(tier, key) for key in wanted.keys]
    for path in paths[:4]:
        os.utime(path, ns=(path.stat().st_mtime_ns - 61 * 10**9,) * 2)
    assert put_chain(tier, wanted.keys[4:], filled_buffers(wanted.keys[4:], SLOT, 2), wanted.keys[:4]) == 2
    times = [path.stat().st_mtime_ns for path in paths]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 6


def test_of_blocks_without_a_parent_that_are_stored_at_once_the_deepest_is_the_oldest(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    keys = document("alone", 5).keys
    depths = [3, 0, 4, 1, 2]
    blocks = zip(keys, filled_buffers(keys, SLOT, 2), depths, strict=True)
    assert all(tier.put([Entry(key, block, depth=depth) for key, block, depth in blocks]))
    times = {depth: path_of(tier, key).stat().st_mtime_ns for key, depth in zip(keys, depths, strict=True)}
    assert sorted(depths, key=times.__getitem__) == [4, 3, 2, 1, 0]


def test_a_document_stored_in_parts_keeps_its_head(tmp_path: Path) -> None:
    """Also a document that needs more than the whole tier never evicts its own head."""
    tier = open_tier(tmp_path, 12)
    put(tier, document("another", 12))
    wanted = document("long", 25)
    for start in range(0, 25, 5):
        keys = wanted.keys[start : start + 5]
        put_chain(tier, keys, filled_buffers(keys, SLOT, 2), wanted.keys[:start])
    assert served(tier, wanted) == 12
    assert tier.counts().dropped_writes > 0
    assert "larger capacity" in tier.health().reason


def test_other_files_in_the_directory_are_never_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis" / "ch").mkdir(parents=True)
    for path in (tmp_path / "thesis" / "ch" / "chapter", tmp_path / "notes"):
        path.write_bytes(b"mine" * 1000)
        os.utime(path, (1, 1))
    tier = open_tier(tmp_path, 4)
    for number in range(8):
        put(tier, document(f"document {number}", 3))
    assert tier.counts().evicted > 0
    tier.clear()
    assert (tmp_path / "thesis" / "ch" / "chapter").stat().st_size == 4000
    assert (tmp_path / "notes").stat().st_size == 4000


def test_a_smaller_capacity_is_reached_with_the_next_write(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 20)
    put(tier, document("large", 20))
    tier.close()
    tier = open_tier(tmp_path, 8)
    assert put(tier, document("small", 2)) == 2
    assert used_bytes(tmp_path) <= capacity_of(8)


def test_a_record_of_another_length_is_not_read(tmp_path: Path) -> None:
    store = open_store(tmp_path, 1 << 20)
    name = record_name(GROUP, document("any", 1).keys[0])
    store.write([name], [[bytes(HEADER_BYTES), b"payload"]])
    for length in (6, 8):
        assert store.read([name], [[memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(length))]]) == [False]
    assert store.size(name) == HEADER_BYTES + 7


def test_of_two_writers_that_reserve_the_last_room_at_once_one_at_most_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one looks at the very moment when the first one has looked."""
    capacity = CONTROL_BYTES + 1000
    first, second = open_store(tmp_path, capacity), open_store(tmp_path, capacity)
    granted: list[int] = []
    estimate = first.quota.used_bytes

    def with_another_behind() -> int:
        found = estimate()
        granted.append(second.quota.try_reserve(700))
        return found

    monkeypatch.setattr(first.quota, "used_bytes", with_another_behind)
    granted.append(first.quota.try_reserve(700))
    assert sum(room >= 700 for room in granted) == 1


# Many processes


def write_until_killed(path: Path, seed: int, blocks: int) -> None:
    tier = open_tier(path, blocks)
    chance = random.Random(seed)
    while True:
        wanted = document(f"document {chance.randrange(30)}", chance.randrange(2, 7))
        put(tier, wanted)
        assert served(tier, document(f"document {chance.randrange(30)}", 6)) >= 0
        if chance.random() < 0.1:
            tier.delete(wanted.keys[1:2])


def start_writer(path: Path, seed: int, blocks: int) -> BaseProcess:
    process = PROCESSES.Process(target=write_until_killed, args=(path, seed, blocks), daemon=True)
    process.start()
    return process


def kill(process: BaseProcess) -> None:
    assert process.is_alive(), "the writer ended by itself"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


@contextmanager
def stopped(processes: list[BaseProcess]) -> Iterator[None]:
    """Nobody does anything meanwhile."""
    for process in processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.0005)
    yield
    for process in processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGCONT)


def verify(tier: SharedTier) -> int:
    """Read every record there is; how many. Fails for one that is not what it must be."""
    names = [record.name for record in tier.store.names(GROUP) if key_of(record.name)]
    for name in names:
        key = key_of(name)
        assert key is not None
        record = [memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(SLOT))]
        assert tier.store.read([name], [record]) == [True]
        assert RecordHeader.decode(record[0], namespace=NAMESPACE.digest, length=SLOT).key == key
        assert record[1] == content(key, SLOT)
    return len(names)


@pytest.mark.timeout(60)
def test_h22_writers_killed_at_any_moment_leave_only_sound_records(tmp_path: Path) -> None:
    """10 lives end with -9. Temporary files of the dead are removed, and their reserved bytes given back."""
    chance = random.Random(4)
    left = 0
    for seed in range(10):
        writer = start_writer(tmp_path, seed, 40)
        while not (tmp_path / OWN_FOLDER / CONTROL / "stocktaking").exists():
            time.sleep(0.01)
        time.sleep(chance.uniform(0.02, 0.3))
        deadline = time.monotonic() + 5.0
        while seed % 2 and not temporaries(tmp_path) and time.monotonic() < deadline:
            pass  # every other one dies in the middle of a record
        kill(writer)
        left += len(temporaries(tmp_path))
        tier = open_tier(tmp_path, 40)
        assert temporaries(tmp_path) == []
        verify(tier)
        assert tier.counts().damaged == 0
        assert used_bytes(tmp_path) <= capacity_of(40)
        tier.close()
    tier = open_tier(tmp_path, 40)
    assert put(tier, document("after all", 39)) == 39
    assert len(os.listdir(tmp_path / OWN_FOLDER / CONTROL / "writers")) == 1
    assert left > 0, "no writer was killed in the middle of a write: this test shows nothing"


@pytest.mark.timeout(60)
def test_h50_three_processes_that_write_at_once_keep_the_bound(tmp_path: Path) -> None:
    """At no moment do all files together, temporary ones included, take more than the capacity."""
    writers = [start_writer(tmp_path, seed, 24) for seed in range(3)]
    most = 0
    began = time.monotonic()
    while time.monotonic() < began + (2.0 if most > capacity_of(18) else 60.0):  # they may be slow to start
        with stopped(writers):  # what is added up file by file must not move
            most = max(most, used_bytes(tmp_path))
        time.sleep(0.01)
    for writer in writers:
        kill(writer)
    assert capacity_of(18) < most <= capacity_of(24)
    assert verify(open_tier(tmp_path, 24)) > 0


# An evictor that died


def lock_evictor(path: Path, writer: str) -> Path:
    lock = path / OWN_FOLDER / CONTROL / "collector"
    lock.write_text(writer)
    return lock


def test_the_lock_of_an_evictor_that_died_on_this_host_is_broken_at_once(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 4)
    put(tier, document("first", 4))
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    lock = lock_evictor(tmp_path, f"{host()}+{dead.pid}+01234567")
    assert put(tier, document("second", 2)) == 2
    assert not lock.exists()


def test_an_evictor_on_another_host_is_waited_for_until_its_lease_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile writes are dropped, in bounded time, and the bound holds; afterwards somebody else collects."""
    monkeypatch.setattr(quota, "EVICTOR_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(evictor_lock, "LEASE_SECONDS", 0.6)
    tier = open_tier(tmp_path, 4)
    put(tier, document("first", 4))
    lock = lock_evictor(tmp_path, "elsewhere+1+2+01234567")
    begun = time.monotonic()
    assert put(tier, document("second", 2)) == 0
    assert time.monotonic() - begun < 5.0
    assert tier.counts().dropped_writes == 2
    os.utime(lock)  # it moves: it is alive
    time.sleep(0.5)
    assert put(tier, document("second", 2)) == 0
    assert used_bytes(tmp_path) <= capacity_of(4) + len("elsewhere+1+2+01234567")
    time.sleep(0.7)
    assert put(tier, document("second", 2)) == 2
    assert not lock.exists()
    assert tier.health().ok


def test_what_a_writer_on_another_host_left_is_removed_after_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_tier(tmp_path).close()
    left = tmp_path / OWN_FOLDER / CONTROL / "new" / "elsewhere+1+2+01234567.0"
    left.write_bytes(b"half a rec")
    open_tier(tmp_path).close()
    assert left.exists()
    monkeypatch.setattr(use_clock, "ABANDONED_SECONDS", 0.0)
    time.sleep(0.05)
    open_tier(tmp_path).close()
    assert not left.exists()


# What users must mend


def test_a_directory_that_cannot_be_used_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TierError, match=r"dir tier: .*/missing does not exist; create it"):
        open_store(tmp_path / "missing" / "cache", 1 << 20)
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="is not a directory; give the path of one"):
        open_store(tmp_path / "file", 1 << 20)


DENIED = """
import os, sys
from kvpact.errors import TierError
from kvpact.tiers.urls import parse_tier_url
from kvpact.tiers.directory.store import open_directory
os.setuid(65534)
try:
    open_directory(parse_tier_url(f"dir://{sys.argv[1]}?capacity=1MiB"))
except TierError as error:
    print(error)
"""


def test_a_directory_without_the_right_to_write_is_refused(tmp_path: Path) -> None:
    place = Path("/tmp") / f"kvpact-denied-{os.getpid()}"  # where another user can look
    place.mkdir(mode=0o755)
    try:
        if os.geteuid():
            place.chmod(0o555)
            with pytest.raises(TierError, match="cannot be written by user"):
                open_store(place, 1 << 20)
        else:
            said = subprocess.run(
                [sys.executable, "-c", DENIED, str(place)], capture_output=True, text=True, check=True
            )
            assert said.stdout == f"dir tier: {place} cannot be written by user 65534; give this user the right to\n"
    finally:
        place.rmdir()


@pytest.mark.parametrize(
    ("number", "right"),
    [("ENOSPC", "make room there, or lower the capacity of"), ("EACCES", "the right to write there"), ("EIO", "")],
)
def test_what_the_file_system_refuses_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str, right: str
) -> None:
    store = open_store(tmp_path, 1 << 20)

    def refuse(*arguments: object) -> int:
        raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)))

    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(StoreError) as caught:
        store.write([f"{GROUP}/{'ab' * 32}"], [[bytes(HEADER_BYTES), b"payload"]])
    assert str(caught.value).startswith(f"cannot write in dir://{tmp_path}: ")
    assert right in str(caught.value)
    assert "\n" not in str(caught.value)
    assert temporaries(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for some 20 blocks."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={22 * SLOT}", "tmpfs", str(tmp_path)], check=False)
    if mounted.returncode:
        pytest.skip("mounting needs more rights than this user has")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_h95_on_a_file_system_smaller_than_the_capacity_the_least_recently_used_goes(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quota, "TOUCH_SECONDS", 0.0)
    tier = open_tier(small_disk)
    assert "a capacity of 66.41MiB is more than the 1.371MiB that" in caplog.text, "said at the start"
    used = document("used", 4)
    assert put(tier, used) == 4
    for number in range(20):
        wanted = document(f"document {number}", 4)
        assert put(tier, wanted) == 4 == served(tier, wanted), "the new one is stored, in the same call"
        assert tier.leading(used.keys) == 4, "what is used stays"
    assert served(tier, used) == 4
    assert served(tier, document("document 0", 4)) == 0
    assert tier.counts().dropped_writes == 0
    assert tier.counts().evicted > 60
    assert tier.health().ok
    assert "No space left on device" in tier.health().reason
    assert tier.health().reason.endswith("; the least recently used blocks are evicted")
    assert caplog.text.count("No space left on device") == 1
    assert temporaries(small_disk) == []
    other = open_tier(small_disk)
    for number in range(4):
        assert put(other, document(f"of a second engine {number}", 4)) == 4
    tier.delete([header.key for header in tier.scan()])
    monkeypatch.setattr(shared_tier, "FULL_SECONDS", 0.0)
    assert put(tier, document("fits", 2)) == 2
    assert tier.health().reason == ""
    tier.close()
    other.close()


def test_h95_after_a_restart_on_a_full_file_system_it_goes_on(small_disk: Path) -> None:
    tier = open_tier(small_disk)
    for number in range(4):
        assert put(tier, document(f"document {number}", 4)) == 4
    tier.close()
    subprocess.run(["dd", "if=/dev/zero", f"of={small_disk}/ballast"], capture_output=True, check=False)
    tier = open_tier(small_disk)
    assert put(tier, document("new", 2)) == 2
    assert served(tier, document("document 3", 4)) == 4
    assert served(tier, document("document 0", 4)) < 4
    tier.close()


def test_h95_what_no_eviction_makes_room_for_empties_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota elsewhere, or a snapshot that keeps what is removed: a write fails whatever goes."""
    tier = open_tier(tmp_path)
    assert put(tier, document("stored", 64)) == 64

    def refuse(*arguments: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(files, "write_new", refuse)
    for number in range(20):
        assert put(tier, document(f"document {number}", 1)) == 0
    assert not tier.health().ok
    assert "Disk quota exceeded" in tier.health().reason
    assert tier.counts().evicted < 24
    tier.close()


def test_h50_small_records_count_as_what_the_file_system_takes_for_them(tmp_path: Path) -> None:
    store = open_store(tmp_path, capacity=1 << 20)
    names = [f"{GROUP}/{number:064x}" for number in range(400)]
    for first in range(0, 400, 100):
        store.write(names[first : first + 100], [[bytes(300)]] * 100)
        taken = sum(512 * path.stat().st_blocks for path in tmp_path.rglob("*") if len(path.name) == 64)
        assert taken <= 1 << 20
    assert sum(store.exists(names)) > 200
    assert store.exists(names[-100:]) == [True] * 100
    store.close()


def set_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """From now on this host's wall clock is so far off; file systems and monotonic clocks are as they were."""
    right, right_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: right() + seconds)
    monkeypatch.setattr(time, "time_ns", lambda: right_ns() + int(seconds * 1e9))


def newest_readable(tier: SharedTier, label: str) -> int:
    """Of 20 documents of one block each, reported as stored, how many of the last 10 can be read."""
    wanted = [document(f"{label} {number}", 1) for number in range(20)]
    assert [put(tier, one) for one in wanted] == [1] * 20
    return sum(served(tier, one) for one in wanted[-10:])


@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
def test_h98_hosts_whose_clocks_differ_keep_what_was_used_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    right = open_tier(tmp_path, 14)
    assert newest_readable(right, "before") == 10
    with monkeypatch.context() as patch:
        set_clock(patch, seconds)
        wrong = open_tier(tmp_path, 14)
        assert newest_readable(wrong, "of the other host") == 10
    assert newest_readable(right, "after") == 10
    used = document("after 19", 1)
    assert served(wrong, used) == 1
    assert newest_readable(wrong, "of the other host again") == 10
    assert right.leading(document("of the other host 19", 1).keys) == 0
    right.close()
    wrong.close()


def test_h98_after_the_clock_was_set_back_new_blocks_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path, 14)
    assert newest_readable(tier, "before") == 10
    set_clock(monkeypatch, -3600.0)
    assert newest_readable(tier, "while it runs") == 10
    tier.close()
    tier = open_tier(tmp_path, 14)
    assert newest_readable(tier, "after a restart") == 10
    tier.close()


def test_h98_a_host_whose_clock_is_ahead_takes_nobody_for_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path, 14)
    written = tmp_path / OWN_FOLDER / CONTROL / "new" / "another+1+7+01234567.0"
    written.write_bytes(b"being written by another host")
    set_clock(monkeypatch, 86400.0)
    assert put(tier, document("many", 30)) > 0
    again = open_tier(tmp_path, 14)
    assert written.exists()
    tier.close()
    again.close()
