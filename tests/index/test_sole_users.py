"""Blocks of one user alone: a release gives up these and no other, before all other blocks, and locks nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from hashlib import blake2b

import pytest

from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import BlockIndex
from kvpact.index.sole_users import MOST_BRANCHES, SoleUsers

Name = tuple[int, ...]
"""A block and all before it."""


def keys(name: Name) -> list[BlockKey]:
    return [blake2b(repr(name[: end + 1]).encode(), digest_size=32).digest() for end in range(len(name))]


@dataclass
class Play:
    """An index, and the users of each of its blocks."""

    slots: int = 64
    index: BlockIndex = field(init=False)
    users: SoleUsers = field(init=False)
    used_by: dict[BlockKey, set[int]] = field(default_factory=dict)
    given_up: set[BlockKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.index = BlockIndex(self.slots)
        self.users = self.index.retained_chains().users

    def ask(self, name: Name, user: int) -> list[BlockKey]:
        """A request is served, saved and ends; returns the blocks that were evicted for it, in no order."""
        chain = keys(name)
        before = [key for key in self.used_by if key in self.index]
        known = self.index.known_prefix(chain)
        if known:
            self.index.touch(chain[known - 1])
        reserved = self.index.reserve(chain, known, len(chain))
        assert reserved is not None, "what is nobody else's is no lock"
        if reserved.slots:
            self.users.saved(reserved.slots, user)
            self.index.complete(reserved.slots)
        self.users.used(chain[-1], user)
        evicted = [key for key in before if key not in self.index]
        for key in evicted:
            del self.used_by[key]
        for key in chain:
            self.used_by.setdefault(key, set()).add(user)
        self.index.check()
        return evicted

    def own(self, user: int) -> set[BlockKey]:
        return {key for key, users in self.used_by.items() if users == {user}}

    def release(self, user: int) -> None:
        own = self.own(user) if user else set()
        assert self.users.give_up(user, ()) == len(own)
        self.index.check()
        for key in own:  # whoever uses them next is their second user
            self.used_by[key].add(0)


def play(seed: int, steps: int = 150) -> None:
    """Random chains of a few users, each block's users compared at each release."""
    rng = random.Random(seed)
    played = Play(rng.choice([16, 64, 200]))
    for _ in range(steps):
        name = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 13)))
        user = rng.randrange(4)
        played.ask(name, user)
        if rng.random() < 0.2:
            played.release(rng.randrange(1, 4))


@pytest.mark.parametrize("seed", range(8))
def test_a_release_gives_up_what_one_user_alone_has_used(seed: int) -> None:
    play(seed)


def test_what_is_given_up_goes_before_older_blocks_and_its_prefix_stays() -> None:
    """Long runs of neighbours, too: the shared beginning keeps the time of its last use."""
    played = Play(100)
    system = tuple(range(100, 120))
    played.ask((*system, 1), 1)
    old = (2, *range(30))
    played.ask(old, 0)
    played.ask((*system, *range(200, 230)), 2)
    played.ask((*system, *range(200, 210), 5), 2)
    own = played.own(2)
    assert len(own) == 31
    played.release(2)
    assert set(played.ask(tuple(range(300, 340)), 0)) < own
    assert set(played.ask(tuple(range(400, 410)), 0)) <= own | {*keys(old), keys((*system, 1))[-1]}
    assert played.index.is_held(keys(system)[-1]), "it was used after the other"


def test_a_live_request_keeps_its_part() -> None:
    played = Play()
    played.ask((1, 2, 3, 4), 1)
    played.ask((1, 2, 5, 6), 1)
    assert played.users.give_up(1, [keys((1, 2, 3)), keys((9,)), keys((1,))]) == 3
    evicted = played.ask(tuple(range(100, 158)), 0) + played.ask((7, 8, 9), 0)
    assert {*keys((1, 2, 3))} & {*evicted} == set()


def test_blocks_that_were_used_after_their_release_are_ordinary_again() -> None:
    played = Play(8)
    played.ask((1, 2), 1)
    played.release(1)
    played.ask((3, 4), 0)
    played.ask((1, 2), 0)
    assert played.ask((5, 6, 7, 8, 9, 10), 0) == keys((3, 4))


def test_a_pinned_block_that_is_given_up_stays_until_its_pin_ends() -> None:
    played = Play(8)
    played.ask((1, 2), 1)
    pin = played.index.pin(keys((1, 2))[-1])
    played.release(1)
    played.ask((3, 4, 5, 6, 7, 8), 0)
    assert played.ask((9,), 0) == [keys((3, 4, 5, 6, 7, 8))[-1]]
    played.index.unpin(pin)
    assert played.ask((10,), 0) == [keys((1, 2))[-1]]


def test_the_branches_of_one_release_are_bounded() -> None:
    played = Play(3 * MOST_BRANCHES)
    for first in range(2 * MOST_BRANCHES):
        played.ask((first,), 1)
    assert played.users.give_up(1, ()) == MOST_BRANCHES
    assert played.users.give_up(1, ()) == 0


def test_the_plays_catch_a_release_of_what_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SoleUsers, "used", lambda self, end, user: None)
    with pytest.raises(AssertionError):
        [*map(play, range(8))]
