"""The disk tier: what it keeps, what it evicts, what it never exceeds, and the one clear message for each mistake."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hook_time import assert_ends_within
from kvpact.errors import PactViolation, TierError
from kvpact.own_files import OWN_FOLDER
from kvpact.tiers import record
from kvpact.tiers.base import Entry, chained
from kvpact.tiers.disk import slab_size
from kvpact.tiers.disk.inspection import scan_directory, verify_slab
from kvpact.tiers.disk.slab import Slab, runs
from kvpact.tiers.disk.slab_directory import LOCK_FILE
from kvpact.tiers.disk.tier import DiskTier
from slab_scenes import (
    NAMESPACE,
    OTHER,
    SLOT,
    Told,
    bytes_of,
    capacity_for,
    chain,
    content,
    files_in,
    memory,
    on_disk,
    open_tier,
    opened,
    overwrite,
    payload_at,
    served,
    slab_path,
    slot_of,
    store,
)

KEYS = chain("document", 8)


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return open_tier(tmp_path)


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """The bytes of each `os.preadv` or `os.pwritev` of a slab, from now on."""
    moved: list[int] = []
    move = getattr(os, name)

    def count(descriptor: int, views: list[memoryview], offset: int) -> int:
        moved.append(move(descriptor, views, offset))
        return moved[-1]

    monkeypatch.setattr(Slab, name, staticmethod(count))
    return moved


def hanging(monkeypatch: pytest.MonkeyPatch, name: str, least: int = 0) -> tuple[threading.Event, threading.Event]:
    """From now on such moves of `least` bytes or more wait: the first event says that one does, the second ends it."""
    stuck, let_go = threading.Event(), threading.Event()
    move = getattr(os, name)

    def hang(descriptor: int, views: list[memoryview], offset: int) -> int:
        if sum(view.nbytes for view in views) >= least:
            stuck.set()
            let_go.wait(20)
        return int(move(descriptor, views, offset))

    monkeypatch.setattr(Slab, name, staticmethod(hang))
    return stuck, let_go


def test_blocks_come_back_over_all_ranks(tier: DiskTier) -> None:
    assert store(tier, KEYS) == 8
    assert tier.leading([*KEYS, b"?" * 32]) == 8
    assert served(tier, KEYS) == 8


def test_a_part_is_read_into_given_memory_and_the_rest_is_left_alone(tier: DiskTier) -> None:
    store(tier, KEYS)
    buffers = memory(4)
    assert tier.get([*KEYS[5:], b"?" * 32], buffers) == [True, True, True, False]
    assert [bytes_of(buffer) for buffer in buffers] == [*(content(key) for key in KEYS[5:]), bytes(SLOT)]


def test_a_chain_is_extended_and_what_is_there_is_not_written_again(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tier, KEYS[:5])
    written = counted(monkeypatch, "pwritev")
    assert store(tier, KEYS, 2) == 6
    assert sum(written) == 3 * (SLOT + 2 * 256), "three payloads, three headers cleared and three written"
    assert served(tier, KEYS) == 8


def test_a_chain_lies_side_by_side_and_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path)
    for name in "abcdefgh":
        store(tier, chain(name, 8))
    store(tier, chain("late", 16))  # into slots that were evicted
    reads = counted(monkeypatch, "preadv")
    assert served(tier, chain("late", 16)) == 16
    assert len(reads) <= 2


def test_runs_are_maximal_neighbouring_slots() -> None:
    assert list(runs([4, 5, 6, 2, 3, 9])) == [(0, 3), (3, 2), (5, 1)]
    assert list(runs([])) == []
    assert list(runs([4, 5, 6, 2, 3], {1, 2, 3}.__contains__)) == [(0, 2), (2, 1), (3, 1), (4, 1)]


def slow_preadv(descriptor: int, views: list[memoryview], offset: int) -> int:
    """So slow that both threads of a read get something to do."""
    time.sleep(0.005)
    return os.preadv(descriptor, views, offset)


def test_progress_is_told_as_blocks_arrive_and_may_end_the_read(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "GROUP_BYTES", 2 * SLOT)
    monkeypatch.setattr(Slab, "preadv", staticmethod(slow_preadv))
    store(tier, KEYS)
    told = Told()
    assert tier.get(KEYS, memory(8), told) == [True] * 8
    assert told == sorted(told)
    assert len(told) > 1
    assert told[-1] == 8


def test_a_read_that_is_wanted_no_more_ends_early(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = chain("long", 40)
    store(tier, keys)
    monkeypatch.setattr(record, "GROUP_BYTES", SLOT)
    monkeypatch.setattr(Slab, "preadv", staticmethod(slow_preadv))
    buffers = memory(40)
    arrived = tier.get(keys, buffers, lambda arrived: False)
    assert sum(arrived) < 20
    for there, key, buffer in zip(arrived, keys, buffers, strict=True):
        assert not there or bytes_of(buffer) == content(key)
    assert tier.leading(keys) == 40
    assert tier.counts().damaged == 0


def test_memory_that_is_not_aligned_works_as_well(tier: DiskTier) -> None:
    unaligned = [[memoryview(bytearray(b"x" + content(key)))[1:]] for key in KEYS]
    assert tier.put(chained(KEYS, unaligned)) == [True] * 8
    into = [[memoryview(bytearray(SLOT + 1))[1:]] for _ in KEYS]
    assert tier.get(KEYS, into) == [True] * 8
    assert [bytes_of(buffer) for buffer in into] == [content(key) for key in KEYS]


def test_a_buffer_larger_than_a_slot_is_the_callers_defect(tier: DiskTier) -> None:
    with pytest.raises(PactViolation, match=r"buffer has 16384 bytes; a slot of .* has 8192"):
        tier.put([Entry(KEYS[0], memory(1, slot_bytes=16384)[0])])


def test_deleting_a_block_deletes_what_needs_it(tier: DiskTier, tmp_path: Path) -> None:
    store(tier, KEYS)
    store(tier, chain("branch", 6, KEYS[:3]))
    assert tier.delete([KEYS[4]]) == 4
    assert tier.leading(KEYS) == 4
    assert served(tier, chain("branch", 6, KEYS[:3])) == 6
    assert tier.delete([KEYS[4], b"?" * 32]) == 0
    assert verify_slab(slab_path(tmp_path)).records == 7 == tier.capacity().blocks


def test_clearing_is_for_good(tier: DiskTier, tmp_path: Path) -> None:
    store(tier, KEYS)
    tier.clear()
    assert tier.leading(KEYS) == 0 == tier.capacity().blocks
    assert verify_slab(slab_path(tmp_path)).records == 0
    assert store(tier, KEYS) == 8 == served(tier, KEYS)


def test_h59_a_restart_finds_everything_and_reads_no_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path)
    store(tier, KEYS)
    store(tier, chain("other", 20))
    tier.close()
    read = counted(monkeypatch, "preadv")
    tier = open_tier(tmp_path)
    assert len(read) == 1
    assert sum(read) < payload_at(slab_path(tmp_path), 0)
    assert (tier.leading(KEYS), tier.leading(chain("other", 20))) == (8, 20)
    assert (served(tier, KEYS), served(tier, chain("other", 20))) == (8, 20)


def test_the_order_of_use_outlives_a_restart(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, slots=12)
    for name in ("old", "used", "young"):
        store(tier, chain(name, 4))
        time.sleep(0.002)
    assert served(tier, chain("old", 4)) == 4
    tier.close()
    tier = open_tier(tmp_path, slots=12)
    store(tier, chain("new", 4))
    assert [tier.leading(chain(name, 4)) for name in ("old", "used", "young", "new")] == [4, 0, 4, 4]


def test_h98_a_clock_that_is_set_back_makes_nothing_look_older_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path, slots=12)
    store(tier, chain("before", 6))
    tier.close()
    right, right_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: right() - 3600)
    monkeypatch.setattr(time, "time_ns", lambda: right_ns() - 3600 * 10**9)
    tier = open_tier(tmp_path, slots=12)
    store(tier, chain("after", 6))
    tier.close()
    tier = open_tier(tmp_path, slots=12)
    store(tier, chain("new", 6))
    assert [tier.leading(chain(name, 6)) for name in ("before", "after", "new")] == [0, 6, 6]


def test_h50_capacity_is_never_exceeded_however_much_is_stored(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, slots=10)
    capacity = capacity_for(10)
    for number in range(60):
        keys = chain(f"document {number}", 7)
        assert store(tier, keys) == 7 == served(tier, keys)
        assert files_in(tmp_path) <= capacity
        assert tier.capacity().blocks <= 10
        tier.check()
    assert tier.counts().evicted >= 410


def test_h50_a_write_larger_than_the_slab_keeps_its_head(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, slots=10)
    assert store(tier, chain("long", 25)) == 10 == served(tier, chain("long", 25))


def test_h50_h51_a_smaller_capacity_gives_up_what_is_beyond_it(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, slots=20)
    store(tier, chain("long", 20))
    tier.close()
    smaller = capacity_for(20) - 10 * SLOT
    tier = open_tier(tmp_path, capacity=smaller)
    tier.tend()
    assert on_disk(slab_path(tmp_path)) <= smaller
    assert 0 < served(tier, chain("long", 20)) <= 10
    assert not verify_slab(slab_path(tmp_path)).damaged


def test_a_larger_capacity_keeps_every_block(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, slots=8)
    store(tier, KEYS)
    tier.close()
    tier = open_tier(tmp_path, capacity=2 * capacity_for(8))
    assert served(tier, KEYS) == 8
    assert store(tier, chain("more", 8)) == 8
    assert served(tier, KEYS) == 8


def test_h50_idle_slabs_of_other_models_count_and_go_when_their_room_is_needed(tmp_path: Path) -> None:
    other = open_tier(tmp_path, 12, OTHER)  # leaves room for a table
    store(other, chain("theirs", 12))
    other.close()
    tier = open_tier(tmp_path, 16)
    assert slab_path(tmp_path, OTHER).exists(), "kept until its room is needed"
    store(tier, KEYS)
    assert not slab_path(tmp_path, OTHER).exists()
    assert files_in(tmp_path) <= capacity_for(16)


def test_h50_engines_of_two_models_have_equal_shares(tmp_path: Path) -> None:
    capacity = capacity_for(24)
    first = open_tier(tmp_path, 24, OTHER)
    store(first, chain("theirs", 24))
    with pytest.raises(TierError, match=rf"no room for one block.*capacity {capacity} bytes, \d+ claimed"):
        DiskTier.open(tmp_path, NAMESPACE, 16 * SLOT, capacity)
    assert first.leading(chain("theirs", 24)) == 24, "one that would get nothing takes nothing"
    second = open_tier(tmp_path, 24)
    for _ in range(2):
        first.tend()
        second.tend()
        assert files_in(tmp_path) <= capacity
    store(second, chain("mine", 24))
    store(first, chain("theirs", 24))
    assert 8 <= served(first, chain("theirs", 24)) <= 12
    assert 8 <= served(second, chain("mine", 24)) <= 12
    assert files_in(tmp_path) <= capacity


def test_h26_a_failed_write_is_not_visible_and_gives_its_slots_back(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store(tier, KEYS[:2])
    payloads = 0

    def broken(descriptor: int, views: list[memoryview], offset: int) -> int:
        nonlocal payloads
        payloads += sum(view.nbytes for view in views) >= SLOT
        if payloads:
            raise OSError(errno.EIO, "Input/output error")
        return os.pwritev(descriptor, views, offset)

    with monkeypatch.context() as patch:
        patch.setattr(Slab, "pwritev", staticmethod(broken))
        for _ in range(30):
            assert store(tier, KEYS, 2) == 0
            assert tier.leading(KEYS) == 2
        assert not tier.health().ok
        assert "Input/output error" in tier.health().reason
    assert caplog.text.count("cannot write") == 1
    assert tier.counts().dropped_writes == 30 * 6
    assert store(tier, KEYS) == 8 == served(tier, KEYS)
    assert tier.health().ok


def test_h22_a_read_error_is_a_miss_and_the_block_is_not_promised_again(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tier, KEYS)

    def broken(descriptor: int, views: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Slab, "preadv", staticmethod(broken))
        assert tier.get(KEYS[3:], memory(5)) == [False] * 5
        assert not tier.health().ok
        assert tier.counts().failed_reads == 1
        assert list(tier.scan()) == [], "a header table that cannot be read raises nothing either"
    assert tier.leading(KEYS) == 3 == served(tier, KEYS)
    assert tier.health().ok


def test_lookup_does_not_wait_for_the_disk(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    store(tier, KEYS)
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        stuck, let_go = hanging(patch, "pwritev")
        writing = pool.submit(store, tier, chain("slow", 4))
        assert stuck.wait(20)

        def looked() -> float:
            began = time.perf_counter()
            assert tier.leading(KEYS) == 8 == served(tier, KEYS)
            return time.perf_counter() - began

        assert_ends_within(looked, 0.0, 0.02)
        let_go.set()
        assert writing.result() == 4


def test_a_block_that_is_deleted_while_it_is_written_stays_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        stuck, let_go = hanging(patch, "pwritev", SLOT)
        writing = pool.submit(store, tier, KEYS)
        assert stuck.wait(20)
        assert tier.delete([KEYS[3]]) == 5
        let_go.set()
        assert writing.result() == 3
    tier.check()
    assert tier.leading(KEYS) == 3 == verify_slab(slab_path(tmp_path)).records
    tier.close()
    tier = open_tier(tmp_path)
    assert served(tier, KEYS) == 3


def test_h21_closing_waits_with_the_file_for_reads_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path)
    store(tier, KEYS)
    stuck, let_go = hanging(monkeypatch, "preadv")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(served, tier, KEYS)
        assert stuck.wait(20)
        tier.close()
        assert tier.leading(KEYS) == 0 == store(tier, KEYS)
        next_one = open_tier(tmp_path)
        with pytest.raises(TierError, match=r"the other engines of .* leave no room for a slab yet"):
            _ = next_one.slab
        let_go.set()
        assert reading.result() == 8
    next_one.tend()
    assert next_one.slab.path == tier.slab.path


def test_many_threads_store_read_and_delete_at_once(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, slots=20)

    def work(seed: int) -> None:
        for step in range(60):
            keys = chain(f"document {(seed + step) % 5}", 5 + (seed * step) % 9)
            store(tier, keys)
            served(tier, keys)
            if step % 7 == seed:
                tier.delete(keys[-3:])

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, seed) for seed in range(4)]:
            done.result()
    tier.check()
    assert tier.counts().damaged == 0
    report = verify_slab(slab_path(tmp_path))
    assert not report.damaged
    assert report.records == tier.capacity().blocks


# Bad input: one clear message each


def test_the_leaf_directory_is_made_and_a_missing_parent_is_not(tmp_path: Path) -> None:
    open_tier(tmp_path / "cache").close()
    with pytest.raises(TierError, match=rf"{tmp_path}/no does not exist; create it"):
        open_tier(tmp_path / "no" / "cache")


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("not a directory")
    with pytest.raises(TierError, match="cache is not a directory"):
        open_tier(tmp_path / "cache")


def test_a_directory_in_place_of_the_slab(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    slab_path(tmp_path).mkdir(parents=True)
    assert open_tier(tmp_path).slab.path != slab_path(tmp_path)
    assert "Is a directory" in caplog.text


def test_capacity_below_one_block_names_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(TierError, match=r"capacity 10000 bytes, 0 claimed by other slabs, 16384 needed .* of 8192"):
        DiskTier.open(tmp_path, NAMESPACE, SLOT, 10000)
    with pytest.raises(TierError, match="multiple of 4096 bytes, not 5000"):
        DiskTier.open(tmp_path, NAMESPACE, 5000, 1 << 20)
    assert [path.name for path in (tmp_path / OWN_FOLDER).iterdir()] == [LOCK_FILE]


def test_a_slab_of_another_format_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_tier(tmp_path).close()
    overwrite(slab_path(tmp_path), 8, (2).to_bytes(4, "little"))
    before = slab_path(tmp_path).read_bytes()
    assert open_tier(tmp_path).slab.path != slab_path(tmp_path)
    assert "slab of format 2; this release reads format 1. Delete the file" in caplog.text
    assert slab_path(tmp_path).read_bytes() == before


def test_a_foreign_file_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    slab_path(tmp_path).parent.mkdir()
    slab_path(tmp_path).write_bytes(b"somebody's thesis" * 1000)
    assert open_tier(tmp_path).slab.path != slab_path(tmp_path)
    assert "is not a kvpact slab" in caplog.text
    assert slab_path(tmp_path).read_bytes() == b"somebody's thesis" * 1000
    with pytest.raises(TierError, match="is not a kvpact slab"):
        verify_slab(slab_path(tmp_path))


def test_h23_a_slab_of_another_model_explains_field_by_field(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_tier(tmp_path, namespace=OTHER).close()
    slab_path(tmp_path, OTHER).rename(slab_path(tmp_path))
    assert open_tier(tmp_path).slab.path != slab_path(tmp_path)
    assert "belongs to another model (model: other here, tiny there)" in caplog.text


def test_h23_models_do_not_share_blocks(tmp_path: Path) -> None:
    mine = open_tier(tmp_path, capacity=1 << 20)
    store(mine, KEYS)
    other = open_tier(tmp_path, namespace=OTHER, capacity=3 << 20)
    assert other.leading(KEYS) == 0


def test_another_slot_size_under_the_same_namespace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_tier(tmp_path).close()
    tier = opened(DiskTier.open(tmp_path, NAMESPACE, 2 * SLOT, 1 << 20))
    assert tier.slab.path != slab_path(tmp_path)
    assert "has slots of 8192 bytes, the engine's blocks have 16384; delete the file" in caplog.text


def mount(*arguments: str) -> None:
    if subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode:
        pytest.skip("mounting needs more rights than this user has")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    where = tmp_path / "small"
    where.mkdir()
    mount("-t", "tmpfs", "-o", "size=256k", "tmpfs", str(where))
    yield where
    subprocess.run(["umount", "-l", where], check=True)


def test_h95_on_a_disk_smaller_than_the_capacity_the_least_recently_used_goes(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(96 << 10))
    tier = open_tier(small_disk, slots=64)
    assert "a capacity of 580KiB is more than the 160KiB that" in caplog.text, "said at the start"
    for number in range(20):
        assert store(tier, chain(f"document {number}", 4)) == 4, "the new one is stored, in the same call"
        assert served(tier, KEYS) == 8 if number > 1 else store(tier, KEYS) == 8, "what is used stays"
        tier.tend()
    tier.check()
    assert 12 <= tier.capacity().blocks < 20
    assert served(tier, chain("document 19", 4)) == 4
    assert served(tier, chain("document 0", 4)) == 0
    assert caplog.text.count("cannot grow") == 1
    assert tier.health().ok
    assert "No space left on device; it keeps its present size" in tier.health().reason
    assert tier.counts().dropped_writes == 0
    ballast.unlink()
    monkeypatch.setattr(slab_size, "GROWTH_RETRY_S", 0.0)
    tier.tend()
    held = tier.capacity().blocks
    assert store(tier, chain("later", 8)) == 8 == served(tier, chain("later", 8))
    assert tier.capacity().blocks == held + 8, "growth is tried again"
    assert tier.health().reason == ""
    tier.check()
    tier.close()
    assert not verify_slab(slab_path(small_disk)).damaged


def test_h95_after_a_restart_on_a_full_disk_it_goes_on(small_disk: Path) -> None:
    tier = open_tier(small_disk, slots=64)
    for number in range(10):
        assert store(tier, chain(f"document {number}", 4)) == 4
    tier.close()
    subprocess.run(["dd", "if=/dev/zero", f"of={small_disk}/ballast"], capture_output=True, check=False)
    tier = open_tier(small_disk, slots=64)
    assert served(tier, chain("document 9", 4)) == 4
    assert store(tier, KEYS) == 8 == served(tier, KEYS)
    assert tier.leading(chain("document 9", 4)) == 4


LIMITED = """
import resource, sys
from pathlib import Path
from slab_scenes import bare_tier, chain, served, store
place = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (128 << 10, 128 << 10))
tier = bare_tier(place, slots=64)
print([store(tier, chain(f"document {number}", 4)) for number in range(10)])
print(served(tier, chain("document 9", 4)), served(tier, chain("document 0", 4)), tier.health().ok)
print(tier.health().reason)
tier.close()
"""


def test_h95_a_limit_on_the_size_of_files_is_no_dead_end(tmp_path: Path) -> None:
    command, found = [sys.executable, "-c", LIMITED, str(tmp_path)], {"PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | found)
    stored, held, reason = said.stdout.splitlines()
    assert (stored, held) == (str([4] * 10), "4 0 True")
    assert "File too large; it keeps its present size" in reason


def test_a_disk_too_full_for_a_superblock(small_disk: Path) -> None:
    subprocess.run(["dd", "if=/dev/zero", f"of={small_disk}/ballast"], capture_output=True, check=False)
    with pytest.raises(TierError, match="No space left on device"):
        open_tier(small_disk, slots=24)
    assert {path.name for path in small_disk.rglob("*")} == {"ballast", OWN_FOLDER, LOCK_FILE}


def test_without_direct_io_everything_works_the_same(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refuses_direct(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuses_direct)
    tier = open_tier(small_disk, slots=16)
    assert not tier.slab.direct
    assert store(tier, KEYS) == 8 == served(tier, KEYS)
    tier.close()
    tier = open_tier(small_disk, slots=16)
    assert served(tier, KEYS) == 8


def test_a_read_only_file_system(tmp_path: Path) -> None:
    where = tmp_path / "fixed"
    where.mkdir()
    mount("-t", "tmpfs", "-o", "size=1m,ro", "tmpfs", str(where))
    try:
        with pytest.raises(TierError, match=r"fixed cannot be written by user \d+"):
            open_tier(where)
        with pytest.raises(TierError, match=r"cannot create .*fixed/cache: Read-only file system"):
            open_tier(where / "cache")
    finally:
        subprocess.run(["umount", "-l", where], check=True)


def test_an_unwritable_slab(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_tier(tmp_path).close()
    path = slab_path(tmp_path)
    if subprocess.run(["chattr", "+i", path], capture_output=True, check=False).returncode:
        pytest.skip("the file system has no immutable files")
    try:
        assert open_tier(tmp_path).slab.path != path
        assert "is skipped, another file is used: Operation not permitted" in caplog.text
    finally:
        subprocess.run(["chattr", "-i", path], check=True)


# For people


def test_a_directory_is_described_for_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier.open(tmp_path, NAMESPACE, SLOT, 1 << 20)
    store(tier, KEYS)
    (tmp_path / OWN_FOLDER / "broken.slab").write_bytes(b"no slab")
    later = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: later)
    broken, mine = sorted(scan_directory(tmp_path), key=lambda item: item.problem == "")
    assert "is not a kvpact slab" in broken.problem
    assert (mine.namespace, dict(mine.fields)) == (NAMESPACE.name, dict(NAMESPACE.fields))
    assert (mine.blocks, mine.payload_bytes, mine.in_use_by) == (8, 8 * SLOT, os.getpid())
    assert 55 < mine.newest_age <= mine.oldest_age < 120
    tier.close()
    assert [item.in_use_by for item in scan_directory(tmp_path)] == [None, None]
    with pytest.raises(TierError, match="No such file or directory; give the directory of a disk tier"):
        scan_directory(tmp_path / "missing")


def test_verify_counts_what_no_lookup_reaches(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, KEYS)
    slot = slot_of(tier, KEYS[2])
    tier.close()
    overwrite(slab_path(tmp_path), 4096 + 256 * slot, bytes(256))
    told: list[tuple[int, int]] = []
    report = verify_slab(slab_path(tmp_path), lambda done, total: told.append((done, total)))
    assert (report.records, report.sound, report.orphans, report.damaged) == (7, 7, 5, [])
    assert told == [(done, 7) for done in range(1, 8)]
    tier = open_tier(tmp_path)
    assert tier.leading(KEYS) == 2 == tier.capacity().blocks
    tier.close()
    assert verify_slab(slab_path(tmp_path)).records == 2


@pytest.mark.parametrize("name", ["!.slab", "!.new", "!.model", "!.newcomer", "!.refuted"])
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_h119_what_is_only_named_like_a_file_of_ours_costs_nothing_and_stays(
    tmp_path: Path, name: str, kind: str
) -> None:
    strange = tmp_path / OWN_FOLDER / name
    strange.parent.mkdir(mode=0o700)
    if kind == "folder":
        strange.mkdir()
    else:
        strange.symlink_to("nothing")
    store(open_tier(tmp_path), KEYS)
    assert [path for path in strange.parent.glob("*.slab") if path != strange]
    assert kind == "link" or strange.is_dir()
