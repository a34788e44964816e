"""Announcements of an index: each block once until it is gone, parents first, never one that cannot be served."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import sha256

import numpy as np
import pytest

from kvpact.identity.keys import BlockKey
from kvpact.index.announced import Prompt
from kvpact.index.block_index import BlockIndex
from kvpact.index.key_table import Names


class Named:
    """A prompt whose blocks are named by their keys: by the last word, or by all."""

    def __init__(self, keys: Sequence[BlockKey], words: int = 1) -> None:
        self.keys = keys
        self.words = words

    def names(self, first: int, end: int) -> Names:
        keys = self.keys[first:end]
        return np.frombuffer(b"".join(keys), np.uint64).reshape(len(keys), -1)[:, -self.words :]


class Router:
    """A subscriber that takes at most `most` blocks at once, and keeps what it was told."""

    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self.most = 1 << 30
        self.told = 0

    def stored(self, prompt: Prompt, first: int, names: Names) -> int:
        if first:
            assert prompt.names(first - 1, first)[0].tobytes() in self.known, "its parent is unknown"
        taken = [name.tobytes() for name in names[: self.most]]
        assert self.known.isdisjoint(taken), "stored twice"
        self.known.update(taken)
        self.told += len(taken)
        return len(taken)

    def gone(self, names: Names) -> None:
        lost = {name.tobytes() for name in names}
        assert len(lost) == len(names)
        assert lost <= self.known
        self.known -= lost


def chain(seed: int, blocks: int, stem: Sequence[BlockKey] = ()) -> list[BlockKey]:
    return [*stem, *(sha256(f"{seed} {number}".encode()).digest() for number in range(len(stem), blocks))]


def store(index: BlockIndex, keys: Sequence[BlockKey]) -> bool:
    reservation = index.reserve(keys, index.known_prefix(keys), len(keys))
    if reservation is not None:
        index.complete(reservation.slots)
    return reservation is not None


def started(slots: int) -> tuple[BlockIndex, Router]:
    index = BlockIndex(slots)
    router = Router()
    index.announce_to(router)
    return index, router


@pytest.mark.parametrize("words", [1, 4])
def test_h133_random_plays_never_tell_a_router_of_a_block_that_is_not_there(words: int) -> None:
    told = 0
    for seed in range(40):
        rng = random.Random(seed)
        index, router = started(rng.choice([12, 40, 150]))
        stem = chain(seed, rng.randrange(12))
        chains = [chain(100 * seed + number, len(stem) + rng.randrange(1, 14), stem) for number in range(12)]
        for _ in range(150):
            keys = rng.choice(chains)
            router.most = rng.choice([2, 1 << 30])
            match rng.randrange(9):
                case 0 | 1 | 2:
                    store(index, keys)
                case 3 | 4 | 5:
                    index.announce(keys, rng.randrange(1, len(keys) + 1), Named(keys, words))
                case 6:
                    index.drop(rng.choice(keys))
                case 7:
                    index.withdraw([rng.choice(keys)])
                case _ if not rng.randrange(6):
                    index.withdraw()
                case _ if not rng.randrange(6):
                    index.forget_announced()
                    router.known.clear()
            held = {Named([key], words).names(0, 1).tobytes() for each in chains for key in each if index.is_held(key)}
            assert router.known <= held
            assert len(router.known) == index.announced_count
        for keys in chains:
            index.announce(keys, len(keys), Named(keys, words))
        if router.most > 2:
            assert len(router.known) == index.held_count
        index.clear()
        assert router.known == set()
        told += router.told
    assert told > 2_000


def test_blocks_that_are_not_held_are_not_announced() -> None:
    index, router = started(8)
    keys = chain(1, 6)
    first = index.reserve(keys, 0, 3)
    rest = index.reserve(keys, 3, 6)
    assert first is not None
    assert rest is not None
    index.complete(rest.slots)
    index.announce(keys, 6, Named(keys))
    assert router.known == set()
    index.complete(first.slots)
    index.announce(keys, 6, Named(keys))
    assert len(router.known) == 6


def test_names_that_the_engine_has_not_made_yet_come_later() -> None:
    index, router = started(8)
    keys = chain(1, 6)
    store(index, keys)
    index.announce(keys, 6, Named(keys[:4]))
    assert len(router.known) == index.announced_count == 4
    index.announce(keys, 6, Named(keys))
    assert len(router.known) == index.announced_count == 6
