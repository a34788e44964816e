"""Retained chains: evicted after all others, the oldest retention first, at most a fifth of a place, and no lock."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b

import pytest

from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import BlockIndex, Pin
from kvpact.index.retained_chains import SHARE, RetainedChains
from kvpact.index.retention import EXPIRED_PER_CALL, Retention

Name = tuple[int, ...]
"""A block and all before it."""


def key(name: Name) -> BlockKey:
    return blake2b(repr(name).encode(), digest_size=32).digest()


def keys(name: Name) -> list[BlockKey]:
    return [key(name[: end + 1]) for end in range(len(name))]


@dataclass
class Model:
    """The rule, block by block: no queues, no runs, no counts."""

    slots: int
    used: dict[Name, int] = field(default_factory=dict)
    retained: dict[Name, float] = field(default_factory=dict)
    pinned: list[Name] = field(default_factory=list)
    now: int = 0

    def spared(self) -> set[Name]:
        return {end[: length + 1] for end in self.retained for length in range(len(end))}

    def use(self, name: Name) -> None:
        self.now += 1
        self.used[name] = self.now

    def leaves(self, spared: set[Name]) -> list[tuple[int, Name]]:
        inner = {name[:-1] for name in self.used}
        held = {pinned[: length + 1] for pinned in self.pinned for length in range(len(pinned))}
        return [(tick, name) for name, tick in self.used.items() if name not in inner | held | spared]

    def evict(self) -> bool:
        while not (leaves := self.leaves(self.spared())):
            if not self.retained:
                return False
            del self.retained[next(iter(self.retained))]
        tick, name = min(leaves)
        del self.used[name]
        if name[:-1]:
            self.used[name[:-1]] = max(self.used[name[:-1]], tick)
        return True

    def retain(self, name: Name, until: float) -> None:
        known = [name[: end + 1] for end in range(len(name)) if name[: end + 1] in self.used]
        end = known[: self.slots // SHARE][-1:]
        for one in end:
            self.retained[one] = max(until, self.retained.pop(one, 0.0))
        while len(self.spared()) > self.slots // SHARE:
            del self.retained[next(iter(self.retained))]

    def expire(self, now: float) -> None:
        self.retained = {name: until for name, until in self.retained.items() if until > now}


@dataclass
class Play:
    """One index with retained chains, and what it must be."""

    slots: int
    index: BlockIndex = field(init=False)
    chains: RetainedChains = field(init=False)
    model: Model = field(init=False)
    pins: list[tuple[Pin, Name]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.index = BlockIndex(self.slots)
        self.chains = self.index.retained_chains()
        self.model = Model(self.slots)

    def store(self, name: Name) -> None:
        """A request's chain is saved; the room that it needs is always there, unless pins have it."""
        chain = keys(name)
        known = self.index.known_prefix(chain)
        if known:
            self.index.touch(chain[known - 1])
            self.model.use(name[:known])
        before = self.index.pin(chain[known - 1]) if known else None
        held = [name[:known]] if known else []
        self.model.pinned += held
        room = self.index.reservable(chain[known - 1] if known else b"")
        movable = self.slots - len({pinned[: at + 1] for pinned in self.model.pinned for at in range(len(pinned))})
        assert room == movable, "a retained block counts as a lock"
        end = min(len(name), known + room)
        reserved = self.index.reserve(chain[:end], known, end)
        assert reserved is not None
        lacking = end - known - (self.slots - len(self.model.used))
        for _ in range(max(0, lacking)):
            assert self.model.evict()
        for at in range(known, end):
            self.model.use(name[: at + 1])
        self.index.complete(reserved.slots)
        if before is not None:
            self.index.unpin(before)
            self.model.pinned.remove(held[0])

    def compare(self) -> None:
        self.index.check()
        found = {name for name in self.model.used if self.index.is_held(key(name))}
        assert found == {*self.model.used}
        assert len(self.index) == len(found)
        assert self.chains.blocks == len(self.model.spared()) <= self.slots // SHARE


def names(rng: random.Random, longest: int) -> Iterator[Name]:
    while True:
        yield tuple(rng.randrange(3) for _ in range(rng.randrange(1, longest + 1)))


def play(seed: int, steps: int = 250) -> Play:
    """Random chains, uses, pins, drops, retentions and jumps of the clock, compared with the model at each step."""
    rng = random.Random(seed)
    slots = rng.choice([5, 12, 40, 90])
    played = Play(slots)
    made = names(rng, rng.choice([3, 8, min(30, slots)]))
    now = 0.0
    for _ in range(steps):
        what = rng.random()
        name = next(made)
        if what < 0.5:
            played.store(name)
        elif what < 0.75:
            until = now + rng.choice([1.0, 5.0, 50.0])
            kept = played.chains.retain(keys(name)[: played.index.known_prefix(keys(name))], until)
            played.model.retain(name, until)
            assert kept <= slots // SHARE
        elif what < 0.85:
            now = max(0.0, now + rng.choice([0.0, 1.0, 10.0, 1e9, -5.0]))
            played.chains.end_expired(now)
            played.model.expire(now)
        elif what < 0.9 and (known := played.index.known_prefix(keys(name))):
            played.pins.append((played.index.pin(key(name[:known])), name[:known]))
            played.model.pinned.append(name[:known])
        elif what < 0.96 and played.pins:
            pin, pinned = played.pins.pop(rng.randrange(len(played.pins)))
            played.index.unpin(pin)
            played.model.pinned.remove(pinned)
        elif not any(pinned[: len(name)] == name for pinned in played.model.pinned):
            played.index.drop(key(name))
            gone = {each for each in played.model.used if each[: len(name)] == name}
            played.model.used = {each: tick for each, tick in played.model.used.items() if each not in gone}
            for each in gone & played.model.retained.keys():
                del played.model.retained[each]
            if gone and name[:-1]:
                last = played.model.used[name[:-1]]
                played.model.used[name[:-1]] = last
        played.compare()
    return played


@pytest.mark.parametrize("seed", range(16))
def test_an_index_with_retained_chains_is_the_model(seed: int) -> None:
    play(seed)


def stored(slots: int, *chains: Name) -> Play:
    played = Play(slots)
    for name in chains:
        played.store(name)
    return played


def test_a_retained_chain_outlives_chains_that_were_used_later() -> None:
    played = stored(10, (0, 1), (1, 1), (2, 1), (3, 1), (4, 1))
    played.chains.retain(keys((0, 1)), 5.0)
    for first in range(5, 20):
        played.store((first, 1))
        assert played.index.is_held(key((0, 1)))
    played.chains.end_expired(5.0)
    played.store((20, 1))
    assert not played.index.is_held(key((0, 1)))


def test_a_request_that_needs_all_room_gets_it() -> None:
    played = stored(10, (0, 1), (1, 1))
    played.chains.retain(keys((0, 1)), 1e9)
    played.store(tuple(range(9, 19)))
    assert len(played.index) == 10
    assert played.chains.blocks == 0
    played.compare()


def test_the_oldest_retention_gives_way_and_a_longer_time_does_not_save_it() -> None:
    played = stored(10, (0,), (1,), (2,), (3,))
    for first, until in ((0, 1e9), (1, 5.0), (2, 5.0)):
        played.chains.retain(keys((first,)), until)
    assert played.chains.blocks == 2
    for first in range(10, 18):
        played.store((first,))
    assert [played.index.is_held(key((first,))) for first in range(4)] == [False, True, True, False]


def test_a_shared_prefix_stays_while_any_chain_through_it_does() -> None:
    played = stored(20, (0, 0, 1), (0, 0, 2))
    played.chains.retain(keys((0, 0, 1)), 5.0)
    played.chains.retain(keys((0, 0, 2)), 9.0)
    assert played.chains.blocks == 4
    played.chains.end_expired(5.0)
    assert played.chains.blocks == 3
    played.chains.end_expired(9.0)
    assert played.chains.blocks == 0
    played.index.check()


def test_of_many_that_expire_at_once_a_call_ends_some_and_memory_stays_bounded() -> None:
    played = stored(SHARE * 600, *((first,) for first in range(600)))
    for first in range(600):
        for until in range(1, 4):
            played.chains.retain(keys((first,)), until)
    played.chains.end_expired(3.0)
    assert played.chains.blocks == 600 - EXPIRED_PER_CALL
    played.chains.end_expired(3.0)
    played.chains.end_expired(3.0)
    assert played.chains.blocks == 0
    played.index.check()


def is_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retained block is a lock: nothing gives way."""
    monkeypatch.setattr(Retention, "end_oldest", lambda self, owner=0: None)


def acts_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expired hint acts."""
    monkeypatch.setattr(Retention, "end_expired", lambda self, now: [])


def newest_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest retention ends where the oldest should."""

    def end_newest(self: Retention, owner: int = 0) -> int | None:
        row = next(reversed(getattr(self, "_ends")[owner]), None)  # noqa: B009
        if row is not None:
            self.end(row)
        return row

    monkeypatch.setattr(Retention, "end_oldest", end_newest)


def changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention without an effect."""
    monkeypatch.setattr("kvpact.index.lru.LeastRecentlyUsed.spare", lambda self, retention: None)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("break_it", [is_lock, acts_after_its_time, newest_gives_way, changes_nothing])
def test_the_plays_catch_a_broken_index(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if break_it is is_lock:  # the share is kept all the same, or a test would wait for it
        monkeypatch.setattr("kvpact.index.retained_chains.RetainedChains.retain", retain_within_share)
    break_it(monkeypatch)
    caught = 0
    for seed in range(6):
        with suppress(AssertionError, PactViolation):
            play(seed)
            continue
        caught += 1
    assert caught >= 3


def retain_within_share(self: RetainedChains, chain: list[BlockKey], until: float) -> int:
    """Retain a chain only where no other is."""
    table, retention = getattr(self, "_table"), getattr(self, "_retention")  # noqa: B009
    most = min(len(chain), table.space.usable // SHARE) if not self.blocks else 0
    if most:
        retention.retain(table.keys.find(chain[most - 1]), until)
    return most
