"""The arena: bytes shared between processes, sizes refused with one message, nothing left behind after a kill."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import msgspec
import pytest

from kvpact.errors import ConfigError, KvpactError, PactViolation
from kvpact.memory import arena as arena_module
from kvpact.memory import limits
from kvpact.memory.arena import Arena, ArenaSegment, SegmentAddress
from kvpact.memory.layout import SlotLayout

MIB = 1 << 20
PIECE = 2 * 4096


def test_a_layout_puts_layers_one_behind_the_other_and_ends_on_a_page() -> None:
    layout = SlotLayout((3000, 500, 1000))
    assert layout.layer_offsets == (0, 3000, 3500)
    assert layout.rank_slot_bytes == 8192


def test_slots_are_page_aligned_disjoint_and_zero_at_first() -> None:
    segment = ArenaSegment.create(4, PIECE)
    for slot in range(4):
        view = segment.slot_view(slot)
        assert bytes(view) == bytes(PIECE)
        view[:] = bytes([slot + 1]) * PIECE
    assert [segment.slot_view(slot)[0] for slot in range(4)] == [1, 2, 3, 4]
    for slot in (-1, 4):
        with pytest.raises(PactViolation, match="outside the arena"):
            segment.slot_view(slot)
    segment.close()


def test_an_arena_shows_one_piece_per_rank_in_rank_order() -> None:
    ranks = [ArenaSegment.create(count, PIECE) for count in (5, 4)]
    arena = Arena(ranks)
    assert (arena.num_slots, arena.slot_bytes) == (4, 2 * PIECE)
    ranks[0].slot_view(3)[:2] = b"r0"
    ranks[1].slot_view(3)[:2] = b"r1"
    assert [bytes(view[:2]) for view in arena.slot_views(3)] == [b"r0", b"r1"]
    arena.close()
    with pytest.raises(PactViolation, match="at least one rank"):
        Arena([])


def test_slots_go_to_a_file_and_back_without_a_copy(tmp_path: Path) -> None:
    arena = Arena([ArenaSegment.create(2, PIECE) for _ in range(2)])
    for rank, view in enumerate(arena.slot_views(0)):
        view[:] = bytes([rank + 1]) * PIECE
    descriptor = os.open(tmp_path / "slab", os.O_RDWR | os.O_CREAT)
    assert os.pwritev(descriptor, arena.slot_views(0), 0) == 2 * PIECE
    assert os.preadv(descriptor, arena.slot_views(1), 0) == 2 * PIECE
    assert [view[0] for view in arena.slot_views(1)] == [1, 2]
    os.close(descriptor)
    arena.close()


def _answer_in_another_process(address: bytes, done: str) -> None:
    segment = ArenaSegment.attach(msgspec.msgpack.decode(address, type=SegmentAddress))
    assert bytes(segment.slot_view(1)[:5]) == b"hello"
    segment.slot_view(2)[:5] = b"world"
    segment.close()
    Path(done).write_text("yes")


def test_two_processes_share_bytes_through_an_address_of_plain_values(tmp_path: Path) -> None:
    segment = ArenaSegment.create(3, PIECE)
    segment.slot_view(1)[:5] = b"hello"
    address = msgspec.msgpack.encode(segment.address())
    other = multiprocessing.get_context("spawn").Process(
        target=_answer_in_another_process, args=(address, str(tmp_path / "done"))
    )
    other.start()
    other.join(30)
    assert (tmp_path / "done").exists()
    assert bytes(segment.slot_view(2)[:5]) == b"world"
    segment.close()


def test_a_process_can_attach_to_its_own_segment() -> None:
    segment = ArenaSegment.create(2, PIECE)
    again = ArenaSegment.attach(segment.address())
    again.slot_view(0)[0] = 7
    assert segment.slot_view(0)[0] == 7
    segment.close()
    assert again.slot_view(0)[0] == 7, "the memory went with the first of two mappings"
    again.close()


def test_attaching_to_what_is_gone_or_elsewhere_says_so() -> None:
    segment = ArenaSegment.create(2, PIECE)
    address = segment.address()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for wrong, message in (
        ({"pid": gone.pid}, "must be alive"),
        ({"descriptor": 9999}, "must be alive"),
        ({"inode": address.inode + 1}, "is not behind"),
        ({"num_slots": 3}, "is not behind"),
        ({"boot_id": "another host"}, "another host"),
        ({"pid_namespace": "pid:[1]"}, "another pid namespace"),
    ):
        with pytest.raises(KvpactError, match=message):
            ArenaSegment.attach(dataclasses.replace(address, **wrong))
    segment.close()
    with pytest.raises(KvpactError, match=r"must be alive|is not behind"):
        ArenaSegment.attach(address)


def test_closing_twice_and_under_exported_views_is_harmless() -> None:
    segment = ArenaSegment.create(2, PIECE)
    view = segment.slot_view(1)
    segment.close()
    segment.close()
    view[0] = 1
    assert view[0] == 1
    view.release()


def test_prefault_takes_every_page_and_closing_ends_it_at_once() -> None:
    segment = ArenaSegment.create(3, 4 * MIB)
    before = os.fstat(segment.address().descriptor).st_blocks
    segment.pages.start()
    segment.pages.start()
    deadline = time.monotonic() + 20
    while (blocks := os.fstat(segment.address().descriptor).st_blocks) * 512 < 12 * MIB and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (before, blocks * 512) == (0, 12 * MIB)
    segment.close()

    huge = ArenaSegment.create(256, 4 * MIB)
    huge.pages.start()
    began = time.monotonic()
    huge.close()
    assert time.monotonic() - began < 1
    assert not [thread for thread in threading.enumerate() if thread.name == "kvpact-prefault"]


def test_prefault_keeps_what_is_there() -> None:
    segment = ArenaSegment.create(2, PIECE)
    segment.slot_view(1)[:4] = b"kept"
    segment.pages.take_all()
    assert bytes(segment.slot_view(1)[:4]) == b"kept"
    segment.close()


def test_more_than_the_machine_has_is_refused_with_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"wants 64PiB .* available; set `memory` below"):
        ArenaSegment.create(1 << 34, 4 * MIB)
    monkeypatch.setattr(limits, "available_memory_bytes", lambda: 10 * MIB)
    monkeypatch.setattr(limits, "promised_elsewhere", lambda *_, **__: (0, 0))
    with pytest.raises(ConfigError, match=r"wants 12MiB \(3 x 1 blocks of 4MiB\).*has 10MiB available"):
        ArenaSegment.create(1, 4 * MIB, ranks_on_host=3)
    ArenaSegment.create(1, 4 * MIB, ranks_on_host=2).close()


def test_what_arenas_of_other_engines_may_still_take_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "MEMFD", "kvpact-arena-of-this-test")
    monkeypatch.setattr(limits, "available_memory_bytes", lambda: 20 * MIB)
    first = ArenaSegment.create(3, 4 * MIB)
    with pytest.raises(
        ConfigError, match=r"wants 12MiB \(1 x 3 blocks .*\), other engines here \(1 arenas\) may take 1[2-9].*MiB more"
    ):
        ArenaSegment.create(3, 4 * MIB)
    ArenaSegment.create(1, 4 * MIB).close()
    first.close()
    ArenaSegment.create(3, 4 * MIB).close()


OTHER_ENGINE = textwrap.dedent(
    """
    import sys
    from kvpact.memory import arena
    arena.MEMFD = "kvpact-arena-of-two"
    segment = arena.ArenaSegment.create(int(sys.argv[1]), 4 << 20)
    print("made", flush=True)
    sys.stdin.read()
    """
)


def test_a_second_process_that_wants_more_than_the_first_leaves_is_told_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each wants two thirds of what this machine has; neither takes a page of it."""
    monkeypatch.setattr(arena_module, "MEMFD", "kvpact-arena-of-two")
    slots = limits.available_memory_bytes() * 2 // 3 // (4 * MIB)
    command = [sys.executable, "-c", OTHER_ENGINE, str(slots)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout
        assert first.stdout.readline() == b"made\n"
        with pytest.raises(
            ConfigError,
            match=rf"wants \d\S+ \(1 x {slots} blocks of 4MiB\), other engines here \(1 arenas\) may take \d\S+ more, "
            r"this machine or its container has \d\S+ available; set `memory` below that, for each engine",
        ):
            ArenaSegment.create(slots, 4 * MIB)
        first.kill()
    ArenaSegment.create(slots, 4 * MIB).close()


def test_a_python_without_memfd_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ConfigError, match="memfd_create"):
        ArenaSegment.create(2, PIECE)


def test_a_tiny_dev_shm_does_not_matter() -> None:
    use = (
        "from kvpact.memory.arena import ArenaSegment as A; "
        "a = A.create(4, 4 << 20); a.pages.take_all(); a.slot_view(3)[-1] = 1"
    )
    tiny = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && df -k --output=size /dev/shm && {sys.executable} -c '{use}'"
    if os.geteuid() == 0:
        done = subprocess.run(["unshare", "-m", "sh", "-c", tiny], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout.split()[-1]) == (0, "1024"), done.stderr
    segment = ArenaSegment.create(2, PIECE)
    link = os.readlink(f"/proc/self/fd/{segment.address().descriptor}")
    assert link == "/memfd:kvpact-arena (deleted)", "the memory has a name in some file system"
    segment.close()


TREE = textwrap.dedent(
    """
    import os
    from kvpact.memory.arena import ArenaSegment
    created = ArenaSegment.create(64, 4 << 20)
    created.pages.start()
    print(created.address().device, created.address().inode, flush=True)
    if os.fork():
        segment = created
    else:
        segment = ArenaSegment.attach(created.address())
    while True:
        for slot in range(64):
            segment.slot_view(slot)[:] = os.urandom(4096) * 1024
    """
)


def test_a_process_tree_killed_at_any_moment_leaves_nothing_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    for _ in range(8):
        tree = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, start_new_session=True)
        assert tree.stdout
        try:
            device, inode = map(int, tree.stdout.readline().split())
            time.sleep(random.uniform(0, 0.15))
            assert _holders(device, inode), "the search would not find a living holder"
        finally:
            os.killpg(tree.pid, signal.SIGKILL)
            tree.wait()
            tree.stdout.close()
        deadline = time.monotonic() + 10
        while _holders(device, inode) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not _holders(device, inode), "somebody still holds the memory of a killed process"
    # The test kit's random plays, which may run beside this, keep their folders there.
    left = {name for name in os.listdir("/dev/shm") if not name.startswith("kvpact-play")} - before
    assert not [name for name in left if "kvpact" in name]


def _holders(device: int, inode: int) -> list[int]:
    """Processes with a descriptor for the file, or a mapping of it: while there are none, the kernel has freed it."""
    found = []
    tag = f"{os.major(device):02x}:{os.minor(device):02x} {inode} "
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            if tag in Path(f"/proc/{process}/maps").read_text():
                found.append(int(process))
                continue
            for descriptor in os.listdir(f"/proc/{process}/fd"):
                status = os.stat(f"/proc/{process}/fd/{descriptor}")
                if (status.st_dev, status.st_ino) == (device, inode):
                    found.append(int(process))
        except OSError:
            continue  # it ended while we looked
    return found


def test_an_arena_has_as_many_usable_slots_as_each_of_its_ranks() -> None:
    ranks = [ArenaSegment.create(6, PIECE), ArenaSegment.create(6, PIECE)]
    for rank in ranks:
        assert rank.usable_slots == 6
        rank.usable_slots = 0
    views = [ArenaSegment.attach(rank.address()) for rank in ranks]
    arena = Arena(views)
    assert arena.usable_slots == 0
    for first, second, usable in ((4, 2, 2), (4, 6, 4), (6, 6, 6)):
        ranks[0].usable_slots, ranks[1].usable_slots = first, second
        assert arena.usable_slots == usable
    assert not any(views[0].notice), "nothing else of the page is written"
    arena.close()
    for rank in ranks:
        rank.close()
