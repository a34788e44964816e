"""Shares of owners: who is above its share loses its own blocks first, unused room is lent, and nothing is a lock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_retention import Name, key, keys

from kvpact.errors import PactViolation
from kvpact.index.block_index import BlockIndex, Pin, Reservation
from kvpact.index.retained_chains import SHARE, RetainedChains
from kvpact.index.retention import Retention
from kvpact.index.shares import OwnerShares

OWNERS = 3
"""The first number of a chain's name is its owner."""


@dataclass
class Model:
    """The rule, block by block: no queues, no runs, no counts."""

    slots: int
    parts: tuple[int, ...]
    used: dict[Name, int] = field(default_factory=dict)
    retained: dict[Name, float] = field(default_factory=dict)
    pinned: list[Name] = field(default_factory=list)
    now: int = 0

    def share(self, owner: int) -> int:
        shares = [self.slots * part // 10_000 for part in self.parts]
        return [self.slots - sum(shares), *shares][owner]

    def blocks(self, owner: int) -> int:
        return sum(name[0] == owner for name in self.used)

    def spared(self, *owners: int) -> set[Name]:
        ends = [end for end in self.retained if end[0] in owners]
        return {end[: length + 1] for end in ends for length in range(len(end))}

    def leaves(self, owners: list[int]) -> list[tuple[int, Name]]:
        held = {pinned[: length + 1] for pinned in self.pinned for length in range(len(pinned))}
        stays = {name[:-1] for name in self.used} | held | self.spared(*range(OWNERS))
        return [(tick, name) for name, tick in self.used.items() if name[0] in owners and name not in stays]

    def victim(self, coming_of: int, coming: int) -> Name | None:
        have = [self.blocks(owner) - self.share(owner) + coming * (owner == coming_of) for owner in range(OWNERS)]
        above = sorted((owner for owner in range(OWNERS) if have[owner] > 0), key=lambda one: (-have[one], -one))
        for owners in (above, [*range(OWNERS)]):
            if leaves := self.leaves(owners):
                return min(leaves)[1]
            for owner in owners:
                for end in [end for end in self.retained if end[0] == owner]:
                    del self.retained[end]
                    if leaves := self.leaves([owner]):
                        return min(leaves)[1]
        return None

    def store(self, name: Name, known: int, room: int) -> None:
        for at in range(known, known + room):
            while len(self.used) - (at - known) + room > self.slots:
                victim = self.victim(name[0], room)
                assert victim is not None
                tick = self.used.pop(victim)
                if victim[:-1]:
                    self.used[victim[:-1]] = max(self.used[victim[:-1]], tick)
            self.use(name[: at + 1])

    def use(self, name: Name) -> None:
        self.now += 1
        self.used[name] = self.now

    def retain(self, name: Name, known: int, until: float) -> int:
        room = self.share(name[0]) // SHARE
        kept = min(known, room)
        if kept:
            end = name[:kept]
            self.retained[end] = max(until, self.retained.pop(end, 0.0))
        while len(self.spared(name[0])) > room:
            del self.retained[next(end for end in self.retained if end[0] == name[0])]
        return kept


@dataclass
class Play:
    """One index with shares, and what it must be; each step is compared."""

    slots: int
    parts: tuple[int, ...]
    index: BlockIndex = field(init=False)
    chains: RetainedChains = field(init=False)
    shares: OwnerShares = field(init=False)
    model: Model = field(init=False)
    pins: list[tuple[Pin, Name]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.index = BlockIndex(self.slots)
        self.chains = self.index.retained_chains(self.parts)
        assert self.chains.shares is not None
        self.shares = self.chains.shares
        self.model = Model(self.slots, self.parts)

    def known(self, name: Name) -> int:
        return self.index.known_prefix(keys(name))

    def store(self, name: Name) -> None:
        """A request's chain is saved, as far as pins leave room."""
        chain = keys(name)
        known = self.known(name)
        if known:
            self.index.touch(chain[known - 1])
            self.model.use(name[:known])
            self.model.pinned.append(name[:known])
        pinned = {pinned[: at + 1] for pinned in self.model.pinned for at in range(len(pinned))}
        room = min(len(name) - known, self.slots - len(pinned))
        reserved = self.index.reserve(chain[: known + room], known, known + room, name[0])
        assert reserved is not None, "a request that needs the room gets it"
        self.model.store(name, known, room)
        self.index.complete(reserved.slots)
        if known:
            self.model.pinned.pop()

    def retain(self, name: Name, until: float) -> None:
        known = self.known(name)
        kept = self.chains.retain(keys(name)[:known], until)
        assert kept == self.model.retain(name, known, until)

    def expire(self, now: float) -> None:
        self.chains.end_expired(now)
        self.model.retained = {name: until for name, until in self.model.retained.items() if until > now}

    def pin(self, name: Name) -> None:
        if known := self.known(name):
            self.pins.append((self.index.pin(key(name[:known])), name[:known]))
            self.model.pinned.append(name[:known])

    def unpin(self) -> None:
        if self.pins:
            pin, name = self.pins.pop(0)
            self.index.unpin(pin)
            self.model.pinned.remove(name)

    def drop(self, name: Name) -> None:
        if any(pinned[: len(name)] == name for pinned in self.model.pinned):
            return
        self.index.drop(key(name))
        gone = {each: tick for each, tick in self.model.used.items() if each[: len(name)] == name}
        self.model.used = {each: tick for each, tick in self.model.used.items() if each not in gone}
        self.model.retained = {each: until for each, until in self.model.retained.items() if each not in gone}
        if gone and name[:-1]:
            self.model.used[name[:-1]] = max(self.model.used[name[:-1]], *gone.values())

    def compare(self) -> None:
        self.index.check()
        assert {name for name in self.model.used if self.index.is_held(key(name))} == {*self.model.used}
        assert len(self.index) == len(self.model.used)
        for owner in range(OWNERS):
            assert self.shares.blocks[owner] == self.model.blocks(owner)
            assert self.shares.shares[owner] == self.model.share(owner)
            assert self.chains.blocks_of(owner) == len(self.model.spared(owner)) <= self.model.share(owner) // SHARE


PARTS = st.sampled_from([(2_500, 2_500), (5_000, 5_000), (1_000, 6_000), (9_900, 1)])
NAMES = st.lists(st.integers(0, OWNERS - 1), min_size=1, max_size=14).map(tuple)
STEPS = st.lists(
    st.tuples(st.sampled_from(["store"] * 5 + ["retain"] * 2 + ["pin", "unpin", "drop", "expire"]), NAMES),
    max_size=40,
)


def play(slots: int, parts: tuple[int, ...], steps: list[tuple[str, Name]]) -> None:
    played = Play(slots, parts)
    for number, (step, name) in enumerate(steps):
        until = float(number + 10)
        given: dict[str, tuple[Any, ...]] = {"retain": (name, until), "expire": (float(number),), "unpin": ()}
        getattr(played, step)(*given.get(step, (name,)))
        played.compare()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([6, 15, 40, 90]), PARTS, STEPS)
def test_an_index_with_shares_is_the_model(slots: int, parts: tuple[int, ...], steps: list[tuple[str, Name]]) -> None:
    play(slots, parts, steps)


def chains(owner: int, first: int, count: int, length: int = 2) -> list[Name]:
    """So many chains of an owner, of which each has a block of its own after the first one, or more."""
    return [(owner, each, *range(length - 2)) for each in range(first, first + count)]


def played_flood() -> Play:
    """Owner 1 with half of 40 slots and nine chains, one retained; owner 2 floods, and retains all that it stores."""
    played = Play(40, (5_000, 2_500))
    for name in chains(1, 0, 9):
        played.store(name)
    played.retain((1, 0), 1e9)
    played.compare()
    for name in chains(2, 0, 40, 3):
        played.store(name)
        played.retain(name, 1e9)
        played.compare()
    return played


def test_a_flood_with_hints_takes_nothing_from_an_owner_within_its_share() -> None:
    played = played_flood()
    assert all(played.index.is_held(key(name)) for name in chains(1, 0, 9))
    assert (played.chains.blocks_of(1), played.chains.blocks_of(2)) == (2, 2)


def test_unused_room_is_lent_and_comes_back_block_by_block() -> None:
    played = played_flood()
    assert played.shares.blocks == [0, 10, 30], "owner 2 has 10 by its share"
    for name in chains(0, 0, 9):
        played.store(name)
        played.compare()
    assert played.shares.blocks == [10, 10, 20], "the share of others"
    for name in chains(1, 20, 10):
        played.store(name)
        played.compare()
    assert played.shares.blocks == [10, 20, 10]
    assert all(played.index.is_held(key(name)) for name in (*chains(0, 0, 9), *chains(1, 20, 10)))


def test_a_request_that_needs_all_room_gets_it_also_beyond_every_share() -> None:
    played = played_flood()
    played.store((0, *range(39)))
    played.compare()
    assert played.shares.blocks == [40, 0, 0]


def left_of_a_share(slots: int = 64 * 20) -> int:
    """Blocks that an owner lacks of its share after a flood of long chains of another; slots are kept free."""
    index = BlockIndex(slots)
    index.retained_chains((9_500, 500))
    assert index.shares is not None
    for owner, seeds in ((1, range(90)), (2, range(100))):
        for seed in seeds:
            length = 16 if owner == 1 else 16 + seed % 5 * 60
            chain = keys((owner, seed, *range(length - 2)))[: index.shares.most(owner)]
            reserved = index.reserve(chain, index.known_prefix(chain), len(chain), owner)
            assert reserved is not None
            index.complete(reserved.slots)
            index.evict_ahead(512)
    index.check()
    return index.shares.shares[1] - index.shares.blocks[1]


def test_room_that_is_made_ahead_takes_nothing_within_a_share() -> None:
    assert left_of_a_share() <= 0


def test_slots_that_are_kept_free_are_nobodys_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each is taken within a share, and lent to the flood for good."""
    monkeypatch.setattr("kvpact.index.shares.kept_free", lambda slots: 0)
    assert left_of_a_share() > 20


def ends_another_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant's hint ends another's retention."""

    def end_oldest(self: Retention, owner: int = 0) -> int | None:
        ends: dict[int, float] = next((of_owner for of_owner in getattr(self, "_ends") if of_owner), {})  # noqa: B009
        row: int | None = next(iter(ends), None)
        if row is not None:
            self.end(row)
        return row

    monkeypatch.setattr(Retention, "end_oldest", end_oldest)


def retains_beyond_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant's hint evicts another's blocks: what it retains goes last of all."""
    monkeypatch.setattr(RetainedChains, "most", lambda self, owner: 8)
    monkeypatch.setattr(OwnerShares, "_above", lambda self: {})


def is_hard_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unused room is not lent."""
    reserve = BlockIndex.reserve

    def within_share(self: BlockIndex, of: list[Any], start: int, end: int, owner: int = 0) -> Reservation | None:
        shares = getattr(self, "_table").shares  # noqa: B009
        return (
            reserve(self, of, start, end, owner) if shares.blocks[owner] + end - start <= shares.shares[owner] else None
        )

    monkeypatch.setattr(BlockIndex, "reserve", within_share)


def is_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of an owner within its share never go."""
    oldest: Callable[..., list[tuple[int, int]]] = getattr(OwnerShares, "_oldest")  # noqa: B009

    def of_others(self: OwnerShares, rows: Any, owners: Any) -> list[tuple[int, int]]:
        return oldest(self, rows, [owner for owner in owners if self.blocks[owner] > self.shares[owner]])

    monkeypatch.setattr(OwnerShares, "_oldest", of_others)


def is_least_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shares."""
    monkeypatch.setattr(OwnerShares, "_above", lambda self: {})


def counts_what_is_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks for which room is made count as nobody's: one long prompt takes others' blocks."""
    expect = OwnerShares.expect
    monkeypatch.setattr(OwnerShares, "expect", lambda self, owner, blocks: expect(self, owner, 0))


def scenes() -> None:
    """The scenes above, each step compared with the model."""
    played = played_flood()
    for name in chains(0, 0, 5):
        played.store(name)
        played.compare()
    for name in (*chains(1, 20, 3, 8), (1, 0)):
        played.store(name)
        played.retain(name, 1e9)
        played.compare()
    played.store((0, *range(39)))
    played.compare()


def test_the_scenes_pass() -> None:
    scenes()


@pytest.mark.parametrize(
    "break_it",
    [
        ends_another_owners,
        retains_beyond_its_share,
        is_hard_partition,
        is_lock,
        is_least_recently_used,
        counts_what_is_there_alone,
    ],
)
def test_the_scenes_catch_a_broken_index(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    with suppress(AssertionError, PactViolation):
        scenes()
        pytest.fail("nothing was wrong")
