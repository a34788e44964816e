"""Several engines on one directory: each writes a slab of its own, all read all, together they keep to the bound."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from test_slab_kill import start

from kvpact.errors import TierError
from kvpact.tiers.base import leading
from kvpact.tiers.client import LentSlots, TierClient
from kvpact.tiers.disk import foreign_records, foreign_slab, slab_directory, slab_size
from kvpact.tiers.disk import tier as disk_tier
from kvpact.tiers.disk.inspection import scan_directory, verify_slab
from kvpact.tiers.disk.slab import Slab, SlabReader
from kvpact.tiers.disk.slab_directory import NoRoomYet
from kvpact.tiers.disk.slab_opening import SlabOpener
from kvpact.tiers.disk.tier import DiskTier
from kvpact.tiers.executor import GetDone, TierExecutor
from kvpact.tiers.record import valid_in_slab
from slab_scenes import (
    SLOT,
    Told,
    capacity_for,
    chain,
    files_in,
    header_at,
    memory,
    on_disk,
    open_tier,
    overwrite,
    payload_at,
    refuse_holes,
    served,
    slab_path,
    slot_of,
    store,
)

KEYS = chain("document", 8)
SLOTS = 40
CAPACITY = capacity_for(SLOTS)


class Host:
    """The engines on one directory. They look at each other when told to, not on a thread of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tiers: list[DiskTier] = []

    def open(self) -> DiskTier:
        self.tiers.append(open_tier(self.directory, SLOTS))
        self.settle()
        return self.tiers[-1]

    def settle(self) -> None:
        """Let all see all, as after two seconds."""
        for _ in range(2):
            for tier in self.tiers:
                tier.tend()
                assert files_in(self.directory) <= CAPACITY

    def close(self, *tiers: DiskTier) -> None:
        for tier in tiers or tuple(self.tiers):
            tier.check()
            tier.close()
            self.tiers.remove(tier)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(disk_tier, "start_background", lambda *_: None)
    host = Host(tmp_path)
    yield host
    host.close()


def test_each_engine_stores_and_all_are_served_what_any_has_stored(host: Host) -> None:
    first, second = host.open(), host.open()
    assert first.slab.path != second.slab.path
    assert store(first, KEYS) == 8
    assert store(second, chain("other", 6)) == 6
    assert second.leading(KEYS) == 0, "nobody has looked yet"
    host.settle()
    for tier in (first, second):
        assert (tier.leading(KEYS), served(tier, KEYS)) == (8, 8)
        assert (tier.leading(chain("other", 6)), served(tier, chain("other", 6))) == (6, 6)
        assert tier.counts().damaged == tier.counts().failed_reads == 0
    assert (first.capacity().blocks, second.capacity().blocks) == (8, 6), "what is another's is counted there"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_h59_after_a_restart_in_any_order_both_find_what_both_had(host: Host, order: tuple[int, int]) -> None:
    pair = [host.open(), host.open()]
    store(pair[0], KEYS)
    store(pair[1], chain("other", 6))
    for number in order:
        host.close(pair[number])
    for _ in order:
        tier = host.open()
        assert (served(tier, KEYS), served(tier, chain("other", 6))) == (8, 6)
    assert len(list(host.directory.glob("kvpact/*.slab"))) == 2


def test_a_restarted_engine_takes_over_the_slab_that_was_used_last(host: Host) -> None:
    first, second = host.open(), host.open()
    store(first, KEYS)
    store(second, chain("other", 6))
    path = second.slab.path
    host.close(first, second)
    os.utime(path, (time.time() + 10, time.time() + 10))
    assert host.open().slab.path == path


def test_h50_a_full_directory_is_shared_out_when_another_engine_comes_and_given_back_when_it_goes(host: Host) -> None:
    first = host.open()
    store(first, chain("long", SLOTS))
    assert first.capacity().blocks == SLOTS
    second = open_tier(host.directory, SLOTS)
    host.tiers.append(second)
    with pytest.raises(TierError, match="leave no room for a slab yet"):
        _ = second.slab
    assert store(second, KEYS) == 0 == second.capacity().blocks
    host.settle()
    assert 15 <= first.capacity().blocks <= SLOTS // 2
    assert first.counts().evicted >= SLOTS // 2
    assert served(first, chain("long", SLOTS)) == first.capacity().blocks
    assert store(second, chain("mine", SLOTS)) >= 15
    host.settle()
    host.close(second)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slab_directory, "ABSENT_S", 0.0)
        host.settle()
        assert store(first, chain("again", SLOTS)) == SLOTS, "the room of the idle slab"
    assert [*host.directory.glob("kvpact/*.slab")] == [first.slab.path]
    host.settle()
    assert first.leading(chain("mine", SLOTS)) == 0


def test_what_follows_a_block_that_a_cut_file_loses_goes_with_it_on_disk_as_well(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slab, "punch", refuse_holes)
    first = host.open()
    store(first, chain("first", 20))
    store(first, KEYS)
    first.delete(chain("first", 20))
    store(first, chain("continued", 18, KEYS))  # into the slots of the deleted ones, which are kept
    host.open()
    assert first.leading(KEYS) == 0 == first.capacity().blocks
    assert verify_slab(first.slab.path).records == 0


@pytest.mark.parametrize("with_holes", [True, False])
def test_h21_slots_that_are_read_or_written_are_given_back_when_that_has_ended(
    host: Host, monkeypatch: pytest.MonkeyPatch, with_holes: bool
) -> None:
    if not with_holes:
        monkeypatch.setattr(Slab, "punch", refuse_holes)
    first = host.open()
    store(first, chain("long", SLOTS - 8))
    let_go = threading.Event()
    stuck = threading.Semaphore(0)

    def hangs(move: Callable[..., int]) -> Callable[[int, list[memoryview], int], int]:
        def call(descriptor: int, views: list[memoryview], offset: int) -> int:
            if sum(view.nbytes for view in views) >= SLOT:
                stuck.release()
                assert let_go.wait(20)
            return move(descriptor, views, offset)

        return call

    monkeypatch.setattr(Slab, "preadv", staticmethod(hangs(os.preadv)))
    monkeypatch.setattr(Slab, "pwritev", staticmethod(hangs(os.pwritev)))
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(served, first, chain("long", SLOTS - 8))
        writing = pool.submit(store, first, KEYS)
        assert stuck.acquire(timeout=20)
        assert stuck.acquire(timeout=20)
        size = on_disk(first.slab.path)
        second = host.open()
        assert on_disk(first.slab.path) == size
        let_go.set()
        assert reading.result() == SLOTS - 8
        assert writing.result() == (8 if with_holes else 0), "its slots are withdrawn where the file is cut"
    host.settle()
    assert on_disk(first.slab.path) <= CAPACITY // 2
    assert store(second, KEYS) == 8
    assert first.counts().damaged == 0
    assert not verify_slab(first.slab.path).damaged


def test_an_engine_that_restarts_finds_its_slab_although_the_others_had_use_for_its_room(host: Host) -> None:
    first, second = host.open(), host.open()
    store(second, KEYS)
    host.close(second)
    for number in range(6):
        store(first, chain(f"document {number}", SLOTS))
        host.settle()
    assert first.capacity().blocks <= SLOTS // 2
    assert served(host.open(), KEYS) == 8


def test_an_absent_engine_takes_nothing_from_one_that_restarts(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_size, "GROWTH_BYTES", SLOT)
    first, second = host.open(), host.open()
    store(second, KEYS[:2])
    host.close(second)
    with monkeypatch.context() as patch:
        patch.setattr(slab_directory, "ABSENT_S", 0.0)
        host.settle()
        assert store(first, chain("long", 30)) == 30
    host.close(first)
    again = host.open()
    assert served(again, chain("long", 30)) == 30
    assert served(again, KEYS) == 2
    assert store(again, chain("more", 35)) == 30, "it does not grow yet"


def left_behind(host: Host, seconds: float) -> None:
    """Three full slabs of engines that ended so long ago; a new engine takes over one of them."""
    host.open()
    for _ in range(2):
        host.open()
    for tier in host.tiers:
        store(tier, chain(tier.slab.path.name, SLOTS // 3))
    paths = [tier.slab.path for tier in host.tiers]
    host.close()
    then = time.time() - seconds
    for path in paths:
        os.utime(path, (then, then))


def test_slabs_whose_engines_ended_long_ago_take_nothing_from_a_new_engine(host: Host) -> None:
    """The new one has seen none of them run: it goes by the time of their files."""
    left_behind(host, 2 * slab_directory.ABSENT_S)
    tier = host.open()
    assert store(tier, chain("new", SLOTS)) == SLOTS
    assert tier.health().reason == ""


@pytest.mark.parametrize("seconds", [0.0, -1e6])
def test_a_share_that_absent_engines_leave_small_is_said_by_log_and_health(
    host: Host, seconds: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also by a clock that was set back since, for as long: then the whole share is there, and nothing is said."""
    left_behind(host, seconds)
    tier = host.open()
    assert store(tier, chain("new", SLOTS)) < SLOTS // 2
    host.settle()
    health = tier.health()
    assert health.ok
    assert "are kept for engines that ended less than 10 min ago" in health.reason
    assert "of its share of" in health.reason
    assert caplog.text.count("are kept for engines that ended") == 1
    monkeypatch.setattr(slab_directory, "ABSENT_S", 0.0)
    host.settle()
    assert tier.health().reason == ""


def test_an_engine_that_runs_and_stores_nothing_is_no_engine_that_ended_long_ago(host: Host) -> None:
    first, second = host.open(), host.open()
    long_ago = time.time() - 2 * slab_directory.ABSENT_S
    for tier in (first, second):
        os.utime(tier.slab.path, (long_ago, long_ago))
    host.settle()
    assert first.slab.path.stat().st_mtime > time.time() - slab_directory.ABSENT_S, "without a word from it"
    os.utime(second.slab.path, (long_ago, long_ago))
    path = second.slab.path
    host.close(second)
    assert path.stat().st_mtime > time.time() - slab_directory.ABSENT_S, "its end counts"


def test_an_engine_without_a_slab_is_served_what_the_others_have(host: Host) -> None:
    store(host.open(), KEYS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slab_directory.SlabDirectory, "make_room", refuse_room)
        second = open_tier(host.directory, SLOTS)
    second.tend()
    assert served(second, KEYS) == 8
    host.tiers.append(second)


def refuse_room(*_: object) -> None:
    raise slab_directory.NoRoomYet("no room")


def test_a_chain_that_another_engine_began_is_continued_in_full(host: Host) -> None:
    first, second = host.open(), host.open()
    store(first, KEYS[:5])
    host.settle()
    assert second.put_start(KEYS[:5]) == 5, "it need not be stored twice"
    assert second.put_start(KEYS) == 0, "what follows cannot be stored without it"
    assert store(second, KEYS) == 8
    assert second.put_start(KEYS) == 8
    host.close(first)
    slab_path(host.directory).unlink()
    host.settle()
    assert served(second, KEYS) == 8


def test_a_prompt_comes_from_two_slabs(host: Host) -> None:
    first, second, reader = host.open(), host.open(), host.open()
    store(first, KEYS)
    store(second, KEYS[:5])
    host.settle()
    first.delete([KEYS[2]])
    store(reader, KEYS[:1])
    host.settle()
    told = Told()
    buffers = memory(8)
    assert reader.leading(KEYS) == 5 == leading(reader.get(KEYS, buffers, told))
    assert told == sorted(told)
    assert told[-1] == 5


# What another engine evicts


def test_a_block_that_its_engine_evicts_while_it_is_read_is_a_miss_and_no_damage(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = host.open(), host.open()
    store(first, KEYS)
    host.settle()

    def late(descriptor: int, views: list[memoryview], offset: int) -> int:
        monkeypatch.undo()
        first.delete([KEYS[3]])
        store(first, chain("new", 5))
        return os.preadv(descriptor, views, offset)

    monkeypatch.setattr(SlabReader, "preadv", staticmethod(late))
    assert served(second, KEYS) == 3
    assert second.counts().damaged == 0
    assert second.health().ok
    assert second.leading(KEYS) == 3
    host.settle()
    assert served(second, chain("new", 5)) == 5
    store(first, KEYS)
    host.settle()
    assert second.leading(KEYS) == 8 == served(second, KEYS)


def test_h61_reads_of_blocks_that_others_have_evicted_are_no_failures(host: Host) -> None:
    first, second = host.open(), host.open()
    chains = [chain(f"document {number}", 2) for number in range(6)]
    for keys in chains:
        store(first, keys)
    host.settle()
    for keys in chains[:5]:
        first.delete(keys)
    client = TierClient(TierExecutor(second, 1, 1 << 20), LentSlots(100), timeout=5.0, clock=time.monotonic)
    for number, keys in enumerate(chains):
        assert client.held(keys, time.monotonic()) == 2
        assert client.submit_get(number, keys, memory(2))
        while not (done := list(client.poll())):
            time.sleep(0.001)
        assert [each.in_a_row if isinstance(each, GetDone) else each for each in done] == [2 if number == 5 else 0]
    assert not client.health.is_paused
    client.executor.close(1.0)


def test_h22_damage_in_anothers_slab_is_counted_and_not_read_again_until_it_is_stored_anew(host: Host) -> None:
    first, second = host.open(), host.open()
    store(first, KEYS)
    host.settle()
    path = first.slab.path
    overwrite(path, payload_at(path, slot_of(first, KEYS[3])) + 10, b"damage")
    assert served(second, KEYS) == 3
    assert second.counts().damaged == 1
    for _ in range(2):
        host.settle()
        assert second.leading(KEYS) == 3
    assert served(first, KEYS) == 3, "its own engine drops it"
    store(first, KEYS)
    host.settle()
    assert served(second, KEYS) == 8


def test_h22_a_header_that_is_torn_or_of_another_slot_is_no_block(host: Host) -> None:
    first, second = host.open(), host.open()
    store(first, KEYS)
    path = first.slab.path
    raw = path.read_bytes()
    overwrite(path, header_at(slot_of(first, KEYS[6])), raw[header_at(slot_of(first, KEYS[5])) :][:256])
    overwrite(path, header_at(slot_of(first, KEYS[4])) + 60, b"torn")
    host.settle()
    assert second.leading(KEYS) == 4 == served(second, KEYS)


def test_h36_what_is_deleted_is_not_served_from_anothers_slab_until_it_is_stored_again(host: Host) -> None:
    first, second = host.open(), host.open()
    branch = chain("branch", 6, KEYS[:3])
    store(first, KEYS)
    store(first, branch)
    host.settle()
    assert second.delete(KEYS[3:4]) == 5
    host.settle()
    assert (second.leading(KEYS), second.leading(branch), first.leading(KEYS)) == (3, 6, 8)
    second.delete(KEYS[:1])
    store(second, KEYS[:1])
    host.settle()
    assert (second.leading(KEYS), second.leading(branch)) == (1, 1), "with all that follows"
    store(first, chain("more", 4))
    second.clear()
    assert second.leading(chain("more", 4)) == 0
    first.delete(KEYS)
    store(first, KEYS)
    host.settle()
    assert second.leading(KEYS) == 8, "these are new ones"


def test_closing_the_other_engine_changes_no_block_and_brings_no_refused_one_back(host: Host) -> None:
    first, second = host.open(), host.open()
    store(first, KEYS)
    host.settle()
    served(first, KEYS[:6])
    second.delete(KEYS[5:])
    host.close(first)  # writes when block 5 was used
    host.settle()
    assert second.leading(KEYS) == 5 == served(second, KEYS)


# What it costs


def test_only_headers_that_have_changed_are_decoded(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = host.open(), host.open()
    for number in range(4):
        store(first, chain(f"document {number}", 4))
    decoded: list[int] = []

    def counted(headers: Any, namespace: bytes, max_length: int, slots: Any, refuted: Any) -> Any:
        decoded.extend(slots.tolist())
        return valid_in_slab(headers, namespace, max_length, slots, refuted)

    monkeypatch.setattr(foreign_records, "valid_in_slab", counted)
    second.tend()
    assert len(decoded) == 16
    store(first, KEYS[:3])
    second.tend()
    assert len(decoded) == 16 + 3
    reads: list[int] = []
    monkeypatch.setattr(foreign_slab, "AT_REST_S", -1.0)
    second.tend()

    def reading(descriptor: int, views: list[memoryview], offset: int) -> int:
        reads.append(1)
        return os.preadv(descriptor, views, offset)

    monkeypatch.setattr(SlabReader, "preadv", staticmethod(reading))
    second.tend()
    assert (len(decoded), reads) == (19, []), "a file that was not written is not read"


# Many at once


def test_many_threads_of_three_engines_store_read_and_shrink_at_once(host: Host) -> None:
    tiers = [host.open() for _ in range(3)]
    over: list[int] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        tier = tiers[seed % 3]
        for _ in range(60):
            keys = chain(f"document {choose.randrange(5)}", choose.randrange(1, 14))
            store(tier, keys)
            served(tier, keys)
            if choose.random() < 0.1:
                tier.delete(keys[-3:])

    def tend() -> None:
        extra = None
        for step in range(40):
            for tier in tiers:
                tier.tend()
            over.extend(size for size in [files_in(host.directory)] if size > CAPACITY)
            if step % 10 == 5:
                extra = open_tier(host.directory, SLOTS)
            if extra is not None and step % 10 == 9:
                extra.close()

    with ThreadPoolExecutor(7) as pool:
        for done in [pool.submit(tend), *(pool.submit(work, seed) for seed in range(6))]:
            done.result()
    assert over == []
    for tier in tiers:
        tier.check()
        assert tier.counts().damaged == tier.counts().failed_reads == 0
    for path in host.directory.glob("kvpact/*.slab"):
        assert not verify_slab(path).damaged


def test_h22_h50_h59_processes_that_are_killed_leave_a_sound_directory_to_the_others(tmp_path: Path) -> None:
    slots, seed = 60, 7
    capacity = capacity_for(slots)
    over: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            over.extend(size for size in [files_in(tmp_path)] if size > capacity)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        children = [start(tmp_path, slots, number) for number in range(2)]
        try:
            choose = random.Random(seed)
            for number in range(2, 8):
                time.sleep(choose.uniform(0.1, 0.4))
                dead = children.pop(choose.randrange(2))
                dead.send_signal(signal.SIGKILL)
                assert dead.communicate()[0] == ""
                children.append(start(tmp_path, slots, number))
            assert {item.in_use_by for item in scan_directory(tmp_path)} >= {child.pid for child in children}
        finally:
            for child in children:
                child.kill()
            outputs = [child.communicate()[0] for child in children]
            ended.set()
        watching.result()
    assert outputs == ["", ""]
    assert over == [], "H50"
    assert [path for path in tmp_path.glob("kvpact/*.slab") if verify_slab(path).damaged] == []
    tier = open_tier(tmp_path, slots, timeout=2.0)
    tier.tend()
    assert len(list(tmp_path.glob("kvpact/*.slab"))) == 2, "a new process takes over what a dead one has left"
    for number in range(6):
        keys = chain(f"document {number}", 24)
        assert served(tier, keys) == tier.leading(keys)


def test_a_newcomer_that_is_killed_is_not_waited_for(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, SLOTS)
    store(tier, chain("long", SLOTS))
    sign = tmp_path / "kvpact" / "1-00.newcomer"
    sign.write_bytes(b"")
    tier.tend()
    assert tier.capacity().blocks == SLOTS
    assert not sign.exists()


def test_tools_work_beside_engines_that_write(tmp_path: Path) -> None:
    child = start(tmp_path, 64, 1)
    try:
        assert [item.in_use_by for item in scan_directory(tmp_path)] == [child.pid]
        assert not verify_slab(slab_path(tmp_path)).damaged
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("how", ["delete", "clear", "many"])
def test_h36_what_was_deleted_stays_deleted_in_a_slab_that_is_taken_over(
    host: Host, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second engine has no slab yet. It deletes what it reads from the first one's, and then that is its own."""
    first = host.open()
    store(first, KEYS)
    with monkeypatch.context() as patch:
        patch.setattr(SlabOpener, "open", no_room)
        second = host.open()
        assert second.leading(KEYS) == len(KEYS)
        if how == "many":
            patch.setattr(disk_tier, "MAX_DOOMED", 2)
            second.delete([*chain("elsewhere", 3)])
        elif how == "clear":
            second.clear()
        else:
            assert second.delete([KEYS[5]]) == 3
    host.close(first)
    host.settle()
    assert second.slab.path == slab_path(host.directory)
    assert second.leading(KEYS) == served(second, KEYS) == (5 if how == "delete" else 0)
    assert store(second, KEYS, second.put_start(KEYS)) > 0
    assert served(second, KEYS) == len(KEYS), "it can be stored again"


def no_room(*_: object) -> Slab:
    raise NoRoomYet("others have all of it")
