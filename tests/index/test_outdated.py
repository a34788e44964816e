"""Blocks that go before all others although they were used last: replaced ones, and a chain's end without any."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import pytest

from kvpact.index.block_index import BlockIndex

CHAIN = [sha256(bytes([at])).digest() for at in range(4)]
OTHER = [sha256(bytes([at, 1])).digest() for at in range(2)]
NEW = sha256(b"new").digest()


def side(key: bytes) -> bytes:
    return key[::-1]


def save(index: BlockIndex, keys: Sequence[bytes]) -> None:
    reservation = index.reserve(keys, index.known_prefix(keys), len(keys))
    assert reservation is not None
    index.complete(reservation.slots)


def attach(index: BlockIndex, key: bytes) -> None:
    reservation = index.reserve_sides([side(key)], [key])
    assert reservation is not None
    index.complete(reservation.slots)


def full_index(bare_ends_first: bool = True) -> BlockIndex:
    """An older chain with a block on its end, and a newer one with blocks on its second and its last one: no room."""
    index = BlockIndex(9, bare_ends_first=bare_ends_first)
    save(index, OTHER)
    attach(index, OTHER[-1])
    save(index, CHAIN)
    attach(index, CHAIN[1])
    attach(index, CHAIN[3])
    return index


def test_a_replaced_block_goes_before_older_ones() -> None:
    index = full_index()
    index.outdate(CHAIN[3], 3)
    save(index, [NEW])
    assert side(CHAIN[1]) not in index
    assert all(key in index for key in (*CHAIN, side(CHAIN[3]), *OTHER, side(OTHER[-1])))
    index.check()


def test_a_use_ends_that() -> None:
    index = full_index()
    index.outdate(CHAIN[3], 3)
    index.touch(side(CHAIN[1]))
    save(index, [NEW])
    assert side(CHAIN[1]) in index
    assert side(OTHER[-1]) not in index
    index.check()


@pytest.mark.parametrize("parts", ["a chain goes on elsewhere", "a match has ended there"])
def test_where_prompts_part_nothing_is_replaced(parts: str) -> None:
    index = full_index()
    if parts == "a match has ended there":
        for pin in index.pin_each([side(CHAIN[1])]):
            index.unpin(pin)
    else:
        save(index, [*CHAIN[:2], NEW])  # takes the place of the older chain's end
        save(index, OTHER)
    index.outdate(CHAIN[3], 3)
    for at in range(3):
        save(index, [sha256(bytes([at, 9])).digest()])
    assert side(CHAIN[1]) in index
    index.check()


@pytest.mark.parametrize("bare_ends_first", [True, False])
def test_what_is_left_of_a_chain_without_its_last_block_goes_first(bare_ends_first: bool) -> None:
    """Up to the row to which something is attached; where chains need nothing attached they stay."""
    index = full_index(bare_ends_first)
    index.drop(side(CHAIN[3]))
    save(index, [NEW])
    reservation = index.reserve([sha256(b"newer").digest(), sha256(b"newest").digest()], 0, 2)
    assert reservation is not None
    assert (CHAIN[2] in index, CHAIN[3] in index) == (not bare_ends_first, not bare_ends_first)
    assert (side(OTHER[-1]) in index) == bare_ends_first
    index.check()
