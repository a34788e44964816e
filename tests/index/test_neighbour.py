"""Blocks of another engine's table under a lease: nothing of them changes, whatever their owner does, and however both
end."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import select
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

import pool_engines
from kvpact.errors import DataError
from kvpact.index import neighbour as neighbour_module
from kvpact.index import row_locks
from kvpact.index.block_index import BlockIndex, SlotState
from kvpact.index.claims import Claims
from kvpact.index.classed_slots import ClassedSlots
from kvpact.index.column_file import ColumnFile
from kvpact.index.neighbour import Neighbour
from kvpact.index.row_locks import LockFile
from kvpact.index.slot_space import PlainSlots, SlotSpace
from kvpact.memory.arena import ArenaSegment
from kvpact.memory.neighbour_slots import NeighbourSlots

SOURCE = random.Random(130)


def chain(blocks: int) -> list[bytes]:
    return [SOURCE.randbytes(32) for _ in range(blocks)]


class Owner:
    """An index whose blocks neighbours can lease."""

    def __init__(self, space: SlotSpace, classes: int = 1) -> None:
        self.locks = LockFile()
        self.index = BlockIndex(
            space.num_rows, space=space, classes=classes, columns=ColumnFile(space, Claims(self.locks))
        )

    def save(self, keys: list[bytes]) -> bool:
        self.index.reservable(wanted=len(keys))
        reservation = self.index.reserve(keys, 0, len(keys))
        if reservation is not None:
            self.index.complete(reservation.slots)
        self.index.check()
        return reservation is not None

    @contextmanager
    def neighbour(self, neighbours: int = 1) -> Iterator[Neighbour]:
        assert self.index.columns is not None
        descriptor = os.dup(self.index.columns.descriptor)
        with closing(Neighbour(descriptor, self.locks.opened(), neighbours)) as found:
            yield found


def test_a_neighbour_leases_the_first_blocks_that_are_held() -> None:
    owner = Owner(PlainSlots(1000))
    keys = chain(200)
    owner.save(keys)
    with owner.neighbour() as neighbour:
        assert neighbour.lease(chain(50)) is None
        leased = neighbour.lease([*keys, *chain(3)])
        assert leased is not None
        assert leased.slots == [*range(200)]
        later = neighbour.lease(keys[150:])
        assert later is not None
        assert later.slots == [*range(150, 200)]
        assert neighbour.lease(keys) is None, "a quarter of 1,000 rows are leased"
        neighbour.release(leased)
        assert owner.locks.leased(range(1000)) == range(150, 200), "the other lease needs these rows still"
        neighbour.release(later)
        assert (owner.locks.leased(range(1000)), neighbour.leased_rows, neighbour.leased_runs) == (None, 0, 0)
    with owner.neighbour(neighbours=5) as neighbour:
        leased = neighbour.lease(keys)
        assert leased is not None
        assert len(leased.slots) == 50


def test_h130_what_is_given_up_between_the_look_and_the_lock_is_not_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner(PlainSlots(100))
    keys = chain(20)
    owner.save(keys)
    lock = row_locks.lease

    def locked_later(descriptor: int, rows: range) -> bool:
        owner.index.drop(keys[12])
        return lock(descriptor, rows)

    monkeypatch.setattr(neighbour_module, "lease", locked_later)
    with owner.neighbour() as neighbour:
        leased = neighbour.lease(keys)
        assert leased is not None
        assert leased.slots == [*range(12)]
        assert [row for row in range(100) if owner.locks.leased(range(row, row + 1))] == [*range(12)]
        assert (neighbour.leased_rows, neighbour.leased_runs) == (12, 1)


def test_h130_a_leased_slot_is_not_filled_again_before_the_lease_ends() -> None:
    owner = Owner(PlainSlots(100))
    keys = chain(20)
    owner.save(keys)
    with owner.neighbour() as neighbour:
        leased = neighbour.lease(keys[:10])
        assert leased is not None
        for _ in range(8):
            assert owner.save(chain(45))
        assert owner.index.held_prefix(keys) == 0
        assert owner.index.waiting_slots == 10
        assert {owner.index.state(slot) for slot in leased.slots} == {SlotState.DOOMED}
        assert not owner.save(chain(91)), "ten of a hundred slots are leased"
        assert owner.save(chain(90))
        owner.index.claim_again()
        assert owner.index.waiting_slots == 10
        neighbour.release(leased)
        owner.index.claim_again()
        assert owner.index.waiting_slots == 0
        assert owner.save(chain(100))


def test_calls_that_the_kernel_refuses_raise_nothing_and_are_made_again() -> None:
    """P14: without memory for a lock; here without the descriptor, for a while."""
    owner = Owner(PlainSlots(100))
    keys = chain(20)
    owner.save(keys)
    assert owner.index.columns is not None
    locks = owner.locks.opened()
    kept = [os.dup(descriptor) for descriptor in (locks, owner.locks.descriptor)]
    with closing(Neighbour(os.dup(owner.index.columns.descriptor), locks)) as neighbour:
        leased = neighbour.lease(keys[:5])
        assert leased is not None
        os.close(locks)
        assert neighbour.lease(keys[5:]) is None
        neighbour.release(leased)
        assert (neighbour.leased_rows, neighbour.leased_runs) == (0, 0)
        os.close(owner.locks.descriptor)
        assert owner.save(chain(80))
        assert not owner.save(chain(20)), "the kernel does not say that what was evicted is free"
        owner.index.check()
        os.dup2(kept[1], owner.locks.descriptor)
        os.dup2(kept[0], locks)
        assert owner.locks.leased(range(100)) == range(5)
        neighbour.release(neighbour.lease_again(leased, 0))
        assert owner.locks.leased(range(100)) is None
        for _ in range(3):
            owner.index.claim_again()
        assert owner.index.waiting_slots == 0
        owner.index.check()
    for descriptor in kept:
        os.close(descriptor)


def test_h130_no_lease_is_given_on_what_has_left_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is found, and is another block's, or nobody's, when it is locked."""
    owner = Owner(PlainSlots(8))
    keys = chain(3)
    owner.save(keys)
    locked = row_locks.lease

    def late(descriptor: int, rows: range) -> bool:
        owner.save(chain(8))
        return locked(descriptor, rows)

    with owner.neighbour() as neighbour:
        monkeypatch.setattr(neighbour_module, "lease", late)
        assert neighbour.lease(keys[:2]) is None
        assert owner.locks.leased(range(8)) is None
        assert (neighbour.leased_rows, neighbour.leased_runs) == (0, 0)


def test_blocks_that_are_not_in_neighbouring_rows_are_leased_all_the_same() -> None:
    owner = Owner(PlainSlots(1000))
    keys = chain(100)
    for end in range(20, 101, 20):
        reservation = owner.index.reserve(keys, end - 20, end)
        assert reservation is not None
        owner.index.complete(reservation.slots)
        owner.save(chain(3))
    with owner.neighbour() as neighbour:
        leased = neighbour.lease([*keys, *chain(7)])
        assert leased is not None
        assert leased.slots == owner.index.slots_to(owner.index.slot(keys[-1]), 100)
        assert len(leased.runs) == 5
        part = neighbour.lease_again(leased, 30)
        assert part.slots == leased.slots[:30]
        neighbour.release(leased)
        assert sum(owner.locks.leased(range(row, row + 1)) is not None for row in range(1000)) == 30
        neighbour.release(part)
        assert owner.locks.leased(range(1000)) is None


@pytest.mark.parametrize("refused", range(5))
@pytest.mark.parametrize("others", [0, 5], ids=["alone", "beside another lease"])
def test_of_scattered_runs_those_behind_one_that_is_not_granted_are_unlocked(
    refused: int, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of 10 rows, the first in the middle of the table: unlocking behind it leaves those before it locked."""
    owner = Owner(PlainSlots(1000))
    pieces = [chain(10) for _ in range(5)]
    at = {}
    for piece in (pieces[number] for number in (3, 1, 0, 4, 2)):
        owner.save(piece)
        at[id(piece)] = owner.index.slot(piece[0])
        owner.save(chain(3))
    keys = [key for piece in pieces for key in piece]
    lock = row_locks.lease

    def granted(descriptor: int, rows: range) -> bool:
        return rows.start != at[id(pieces[refused])] and lock(descriptor, rows)

    with owner.neighbour() as neighbour:
        other = neighbour.lease(pieces[1][:others]) if others else None
        monkeypatch.setattr(neighbour_module, "lease", granted)
        leased = neighbour.lease(keys)
        kept = {row for piece in pieces[:refused] for row in range(at[id(piece)], at[id(piece)] + 10)}
        beside = {*range(at[id(pieces[1])], at[id(pieces[1])] + others)}
        assert {row for row in range(1000) if owner.locks.leased(range(row, row + 1))} == kept | beside
        assert (neighbour.leased_rows, neighbour.leased_runs) == (len(kept) + others, refused + (others > 0))
        assert (leased is None) == (not kept)
        for lease in filter(None, (leased, other)):
            neighbour.release(lease)
        assert (owner.locks.leased(range(1000)), neighbour.leased_rows, neighbour.leased_runs) == (None, 0, 0)


def test_h130_an_extent_with_a_leased_row_stays_with_its_class() -> None:
    space = ClassedSlots([4, 4], 8)
    owner = Owner(space, 2)
    keys = chain(16)
    owner.save(keys)
    with owner.neighbour() as neighbour:
        leased = neighbour.lease(keys[:8])
        assert leased is not None
        assert leased.slots == [space.number(row) for run in leased.runs for row in run]
        rows = [row for run in leased.runs for row in run]
        before = [space.class_of(row) for row in rows]
        parent = chain(1)
        owner.save(parent)
        for _ in range(60):
            owner.index.reservable(parent[0], 8, 1)
            sides = owner.index.reserve_sides(chain(8), parent * 8, 1)
            if sides is not None:
                owner.index.complete(sides.slots)
            owner.index.check()
        assert space.moved > 0
        assert [space.class_of(row) for row in rows] == before
        assert owner.index.waiting_slots > 0, "an extent with leased rows was to move"
        neighbour.release(leased)


def test_h130_a_reset_owner_is_refused_and_waits_for_what_is_still_read() -> None:
    owner = Owner(PlainSlots(100))
    keys = chain(20)
    owner.save(keys)
    with owner.neighbour() as neighbour:
        leased = neighbour.lease(keys)
        assert leased is not None
        owner.index.reset_columns()
        assert neighbour.is_refused
        assert neighbour.lease(keys) is None
        for _ in range(4):
            owner.save(chain(40))
        assert owner.index.waiting_slots == 20
        with owner.neighbour() as again:
            fresh = chain(5)
            owner.save(fresh)
            assert again.lease(fresh) is not None
        neighbour.release(leased)
        owner.index.claim_again()
        assert owner.index.waiting_slots == 0


def test_a_neighbour_reads_nothing_that_is_no_index() -> None:
    space = PlainSlots(100)
    columns = ColumnFile(space)
    with pytest.raises(DataError, match="its head or size is another"):
        Neighbour(columns.descriptor, -1)
    plain = os.memfd_create("plain")
    os.ftruncate(plain, 3 * mmap.PAGESIZE)
    with pytest.raises(DataError, match="not sealed"):
        Neighbour(plain, -1)
    with pytest.raises(DataError, match="not sealed"):
        NeighbourSlots(plain, ArenaSegment.create(1, 4096).classes)
    os.close(plain)


def test_a_sealed_segment_is_written_by_who_has_mapped_it_and_nobody_else() -> None:
    with closing(ArenaSegment.create(4, 4096)) as segment:
        segment.seal()
        again = os.open(f"/proc/self/fd/{segment.descriptor}", os.O_RDWR)
        with pytest.raises(PermissionError):
            mmap.mmap(again, 4096)
        segment.slot_view(2)[:4] = b"mine"
        with closing(NeighbourSlots(again, segment.classes)) as theirs:
            view = theirs.slot_view(2)
            assert (bytes(view[:4]), view.readonly) == (b"mine", True)
            view.release()
        os.close(again)
        assert fcntl.fcntl(segment.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK


def test_h130_engines_that_are_killed_serve_no_wrong_byte() -> None:
    found = pool_engines.storm(5.0, 3)
    assert found["wrong"] == 0
    assert min(found["loaded"], found["kills"], found["met"]) > 0
    assert {name: found[name] for name in ("not_at_rest", "leases_left", "files", "descriptors_more")} == {
        "not_at_rest": 0,
        "leases_left": 0,
        "files": 0,
        "descriptors_more": 0,
    }


def test_h130_without_leases_the_storm_finds_wrong_bytes() -> None:
    assert pool_engines.storm(30.0, 3, kill=False, leased=False)["wrong"] > 0


@pytest.mark.parametrize("point", pool_engines.DEATHS)
def test_h131_a_death_at_a_point_leaves_no_lease_and_no_wrong_byte(point: str) -> None:
    found, died = pool_engines.die_at(point)
    assert died, f"{point} was not reached: {found}"
    assert (found["wrong"], found["leases_left"], found["rest"]) == (0, 0, 1)


def test_h131_a_forked_child_that_outlives_its_engine_keeps_no_lease() -> None:
    owner = Owner(PlainSlots(100))
    keys = chain(20)
    owner.save(keys)
    with owner.neighbour() as neighbour:
        assert neighbour.lease(keys) is not None
        ready, done = os.pipe()
        child = os.fork()
        if not child:
            select.select([ready], [], [], 10)
            os._exit(0)
    deadline = time.monotonic() + 3
    while owner.locks.leased(range(100)) is not None and time.monotonic() < deadline:  # until the child has run
        time.sleep(0.01)
    assert owner.locks.leased(range(100)) is None
    os.write(done, b".")
    os.waitpid(child, 0)
    os.close(ready)
    os.close(done)
