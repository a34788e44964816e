"""A slab that must take less of the disk keeps what is used, wherever it lies; the rest becomes holes of the file, in
pieces, and is filled again when there is room. Dead at any moment of that, nothing is lost or counted wrongly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from kvpact.tiers.disk import slab_directory, slab_opening, slab_size
from kvpact.tiers.disk import tier as disk_tier
from kvpact.tiers.disk.inspection import scan_directory, verify_slab
from kvpact.tiers.disk.slab import Slab
from kvpact.tiers.disk.slab_directory import SlabDirectory
from kvpact.tiers.disk.tier import DiskTier
from slab_scenes import (
    SLOT,
    capacity_for,
    chain,
    files_in,
    layout,
    on_disk,
    open_tier,
    refuse_holes,
    served,
    slab_path,
    store,
)

SLOTS = 160
CAPACITY = capacity_for(SLOTS)
UNUSED = [chain(f"stored once {number}", 20) for number in range(6)]
USED = [chain(f"used {number}", 10) for number in range(4)]
"""40 blocks, behind all others in the file."""


@pytest.fixture(autouse=True)
def _no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines look at each other when told to, not on a thread of their own."""
    monkeypatch.setattr(disk_tier, "start_background", lambda *_: None)


def opened_full(directory: Path) -> DiskTier:
    """A tier whose slab is full: 120 blocks that nobody has used since they were stored, then 40 that are used."""
    tier = open_tier(directory, SLOTS)
    for keys in [*UNUSED, *USED]:
        assert store(tier, keys) == len(keys)
    assert used_blocks(tier) == 40
    assert tier.capacity().blocks == SLOTS
    return tier


@pytest.fixture
def full(tmp_path: Path) -> DiskTier:
    return opened_full(tmp_path)


def used_blocks(tier: DiskTier) -> int:
    return sum(served(tier, keys) for keys in USED)


def settle(directory: Path, *tiers: DiskTier) -> None:
    """Let all see all, as after two seconds; meanwhile they keep to the capacity."""
    for _ in range(2):
        for tier in tiers:
            tier.tend()
            tier.check()
            assert files_in(directory) <= CAPACITY


def require_sound(directory: Path, *tiers: DiskTier) -> None:
    """No record is damaged on disk, and none was found so."""
    for path in directory.glob("kvpact/*.slab"):
        assert not verify_slab(path).damaged
    for tier in tiers:
        tier.check()
        assert tier.counts().damaged == tier.counts().failed_reads == 0
        assert tier.health().ok


# What is kept


def test_h96_another_engine_joins_and_what_is_used_stays(full: DiskTier, tmp_path: Path) -> None:
    size = full.slab.path.stat().st_size
    second = open_tier(tmp_path, SLOTS)
    settle(tmp_path, full, second)
    assert used_blocks(full) == 40
    assert 60 <= full.capacity().blocks <= SLOTS // 2
    assert full.slab.path.stat().st_size == size, "it keeps its length"
    assert on_disk(full.slab.path) <= CAPACITY // 2
    (mine,) = (item for item in scan_directory(tmp_path) if item.path == full.slab.path)
    assert (mine.slots, mine.file_bytes) == (full.capacity().blocks, layout(mine.path).file_bytes(mine.slots))
    settle(tmp_path, full, second)
    assert store(second, chain("mine", 60)) == 60 == served(second, chain("mine", 60))
    assert store(full, chain("new", 20)) == 20 == served(full, chain("new", 20)), "others go for it"
    assert used_blocks(full) == 40 == used_blocks(second)
    settle(tmp_path, full, second)
    require_sound(tmp_path, full, second)


def test_h96_a_restart_with_less_capacity_keeps_what_is_used(tmp_path: Path, full: DiskTier) -> None:
    full.close()
    smaller = capacity_for(SLOTS) - 90 * SLOT
    for _ in range(2):
        tier = open_tier(tmp_path, capacity=smaller)
        tier.tend()
        assert used_blocks(tier) == 40
        assert on_disk(slab_path(tmp_path)) <= smaller
        assert files_in(tmp_path) <= smaller
        assert 60 <= tier.capacity().blocks <= 70
        require_sound(tmp_path, tier)
        tier.close()


JOINS = """
import sys
from pathlib import Path
from slab_scenes import bare_tier, chain, store
tier = bare_tier(Path(sys.argv[1]), int(sys.argv[2]))
print("here", flush=True)
for line in sys.stdin:
    tier.tend()
    print(store(tier, chain("theirs", 60)), flush=True)
tier.close()
"""


def test_h96_another_process_joins_and_what_is_used_stays(full: DiskTier, tmp_path: Path) -> None:
    found = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", JOINS, str(tmp_path), str(SLOTS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=found) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
        settle(tmp_path, full)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "60\n"
        settle(tmp_path, full)
        assert used_blocks(full) == 40
        assert on_disk(full.slab.path) <= CAPACITY // 2
        require_sound(tmp_path, full)
        child.stdin.close()


# What it costs


def test_h96_a_turn_makes_few_holes_and_moves_no_payload(
    full: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_size, "LIMIT_STEP", 8)
    holes, moved = list[int](), list[int]()
    monkeypatch.setattr(Slab, "punch", noting(Slab.punch, lambda slab, first, count: holes.append(count)))
    for name in ("preadv", "pwritev"):
        call = noting(getattr(os, name), lambda _, views, at: moved.append(sum(view.nbytes for view in views)))
        monkeypatch.setattr(Slab, name, staticmethod(call))
    open_tier(tmp_path, SLOTS)
    turns, blocks = list[int](), [full.capacity().blocks]
    while len(turns) < 2 or turns[-1]:
        holes.clear()
        full.tend()
        turns.append(sum(holes))
        blocks.append(full.capacity().blocks)
    assert set(turns[:-2]) == {8}
    assert len(turns) > 10
    assert [before - after for before, after in pairwise(blocks)] == turns, "no block goes before its turn"
    assert on_disk(full.slab.path) <= CAPACITY // 2
    assert max(moved) < SLOT, "headers are cleared, payloads stay where they are"
    assert used_blocks(full) == 40


def noting(call: Callable[..., int | None], note: Callable[..., None]) -> Callable[..., int | None]:
    def noted(*arguments: object) -> int | None:
        note(*arguments)
        return call(*arguments)

    return noted


# Deaths


class Killed(BaseException):
    """The process died here."""


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("at", ["punch", "second punch", "claim"])
def test_h96_a_death_in_the_middle_costs_nothing(
    full: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, alone: bool
) -> None:
    """Between eviction and the first hole, between two of them, and before the slab claims less."""
    second = open_tier(tmp_path, SLOTS)
    left = 2 if at == "second punch" else 1
    name = at.rsplit(" ", maxsplit=1)[-1]
    real = getattr(Slab, name)

    def dies(*arguments: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Killed
        real(*arguments)

    store(full, USED[0][:1])
    full.delete(UNUSED[2])  # so that holes are not all side by side
    store(full, chain("between", 3))
    with monkeypatch.context() as patch:
        patch.setattr(Slab, name, dies)
        with pytest.raises(Killed):
            full.tend()
    full.slab.close()
    if alone:
        second.close()
        monkeypatch.setattr(slab_directory, "ABSENT_S", 0.0)
    again = open_tier(tmp_path, SLOTS)
    for _ in range(3):
        assert files_in(tmp_path) <= CAPACITY
        assert used_blocks(again) == 40
        require_sound(tmp_path, again)
        again.tend()
    if not alone:
        settle(tmp_path, again, second)
        assert on_disk(again.slab.path) <= CAPACITY // 2
        assert store(second, chain("mine", 50)) == 50
    for number in range(8):
        assert store(again, chain(f"later {number}", 10)) == 10 == served(again, chain(f"later {number}", 10))
        assert used_blocks(again) == 40
        assert files_in(tmp_path) <= CAPACITY
    require_sound(tmp_path, again)


def test_h96_a_slab_with_holes_asks_for_room_only_when_it_may_have_some(
    full: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = open_tier(tmp_path, SLOTS)
    settle(tmp_path, full, second)
    asked: list[DiskTier] = []
    monkeypatch.setattr(SlabDirectory, "grow", lambda *_: asked.append(full))
    for number in range(5):
        assert store(full, chain(f"new {number}", 7)) == 7
    assert asked == [], "the directory's lock is for everybody"
    settle(tmp_path, full, second)
    assert full.health().reason == ""


def test_h96_a_slab_with_holes_is_restarted_alone_and_takes_no_room_that_is_not_needed(
    full: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = open_tier(tmp_path, SLOTS)
    settle(tmp_path, full, second)
    store(second, chain("mine", 60))
    theirs = second.slab.path
    second.close()
    full.close()
    os.utime(theirs, (0, 0))
    monkeypatch.setattr(slab_directory, "ABSENT_S", 0.0)
    again = open_tier(tmp_path, SLOTS)
    settle(tmp_path, again)
    assert again.slab.path != theirs
    assert served(again, chain("mine", 60)) == 60
    assert store(again, chain("some", 50)) == 50
    assert not theirs.exists()
    settle(tmp_path, again)
    assert used_blocks(again) == 40
    require_sound(tmp_path, again)


def test_h96_a_slab_with_holes_is_restarted_beside_the_other_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows which of its free slots are holes: none is used before all are."""
    first = open_tier(tmp_path, SLOTS)
    for keys in [*USED, *UNUSED]:
        store(first, keys)
    assert used_blocks(first) == 40
    second = open_tier(tmp_path, SLOTS)
    settle(tmp_path, first, second)
    store(second, chain("mine", 69))
    kept, path = first.capacity().blocks, first.slab.path
    first.delete([USED[0][0], USED[2][0]])
    first.close()
    monkeypatch.setattr(slab_size, "LIMIT_STEP", 1)
    again = open_tier(tmp_path, SLOTS)
    assert (again.slab.path, again.capacity().blocks) == (path, kept - 20)
    for number in range(14):
        assert store(again, chain(f"new {number}", 3)) == 3
        assert slots_on_disk(path) <= layout(path).slots_in(layout(path).claim_bytes) <= kept
        again.tend()
    assert again.capacity().blocks == kept, "what was free before is used again"
    assert used_blocks(again) == 20
    settle(tmp_path, again, second)
    require_sound(tmp_path, again, second)


def slots_on_disk(path: Path) -> int:
    """Slots of a slab that are not holes, if its table is filled as far as the file has slots."""
    return (on_disk(path) - 4096 - 256 * SLOTS) // SLOT


# Growing back


def test_h96_when_the_other_engine_is_gone_holes_are_filled(
    full: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_size, "GROWTH_BYTES", 4 * SLOT)
    second = open_tier(tmp_path, SLOTS)
    settle(tmp_path, full, second)
    assert store(second, chain("mine", 60)) == 60
    theirs = second.slab.path
    second.close()
    monkeypatch.setattr(slab_directory, "ABSENT_S", 0.0)
    settle(tmp_path, full)
    assert theirs.exists(), "an idle slab is kept until its room is needed"
    kept = full.capacity().blocks
    assert store(full, chain("some", 40)) == 40
    assert kept + 40 == full.capacity().blocks
    assert layout(full.slab.path).claim_bytes >= full.slab.superblock.file_bytes(kept + 40)
    assert not theirs.exists()
    assert on_disk(full.slab.path) < CAPACITY * 3 // 4, "not all at once"
    for number in range(3):
        assert store(full, chain(f"more {number}", 20)) == 20
        assert used_blocks(full) == 40
        settle(tmp_path, full)
    assert full.capacity().blocks == SLOTS
    assert full.slab.path.stat().st_size <= layout(full.slab.path).claim_bytes, "it has no holes any more"
    assert used_blocks(full) == 40
    require_sound(tmp_path, full)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], check=False).returncode:
        pytest.skip("mounting needs more rights than this user has")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_h96_on_a_full_disk_holes_stay_holes_and_others_go(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = opened_full(small_disk)
    second = open_tier(small_disk, SLOTS)
    settle(small_disk, full, second)
    second.close()
    monkeypatch.setattr(slab_directory, "ABSENT_S", 0.0)
    settle(small_disk, full)
    subprocess.run(["dd", "if=/dev/zero", f"of={small_disk}/ballast"], capture_output=True, check=False)
    for number in range(5):
        assert store(full, chain(f"new {number}", 10)) == 10 == served(full, chain(f"new {number}", 10))
        assert used_blocks(full) == 40
        full.tend()
    assert "No space left on device; it keeps its present size" in full.health().reason
    assert full.counts().dropped_writes == 0
    (small_disk / "ballast").unlink()
    monkeypatch.setattr(slab_size, "GROWTH_RETRY_S", 0.0)
    full.tend()
    held = full.capacity().blocks
    assert store(full, chain("later", 10)) == 10
    assert full.capacity().blocks == held + 10, "it is tried again"
    assert full.health().reason == ""
    require_sound(small_disk, full)


# Where that is not so


def test_h96_where_files_have_no_holes_it_is_said_once_and_the_end_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Slab, "punch", refuse_holes)
    first = opened_full(tmp_path)
    second = open_tier(tmp_path, SLOTS)
    settle(tmp_path, first, second)
    settle(tmp_path, first, second)
    assert caplog.text.count("makes no holes in files, so the blocks at its end are evicted") == 1
    assert first.slab.path.stat().st_size <= CAPACITY // 2
    assert 60 <= first.capacity().blocks <= SLOTS // 2
    assert store(second, chain("mine", 60)) == 60
    first.close()
    again = open_tier(tmp_path, SLOTS)
    assert served(again, UNUSED[0]) == 20
    require_sound(tmp_path, again, second)


def test_h96_h51_a_slab_that_is_far_too_large_is_not_taken_over(
    full: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The index has a row for every slot of the file."""
    full.close()
    monkeypatch.setattr(slab_opening, "MOST_TIMES", 2)
    tier = open_tier(tmp_path, capacity=CAPACITY - 100 * SLOT)
    assert tier.capacity().blocks == 0
    assert "was made for another capacity; starting an empty one" in caplog.text


def test_h96_headers_that_cannot_be_cleared_keep_their_blocks(
    full: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header without its payload would be damage after a restart."""
    second = open_tier(tmp_path, SLOTS)
    with monkeypatch.context() as patch:
        patch.setattr(Slab, "pwritev", staticmethod(refuse_holes))
        full.tend()
        assert on_disk(full.slab.path) > CAPACITY // 2
        assert "headers" in full.health().reason
    settle(tmp_path, full, second)
    assert on_disk(full.slab.path) <= CAPACITY // 2
    assert used_blocks(full) == 40
    assert store(full, chain("new", 2)) == 2
    require_sound(tmp_path, full)
