"""The table of keys against a dictionary: collisions, keys that come and go, and nothing that is left behind."""

from __future__ import annotations

import random
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvpact.index.key_table import NONE, KeyTable

ROWS = 60


def digest(number: int) -> bytes:
    return np.random.default_rng(number).bytes(32)


def alike(number: int) -> bytes:
    """Keys of one hash: all of them are in one list."""
    return b"12345678" + number.to_bytes(16, "big") + b"12345678"


def one_word(number: int) -> bytes:
    """Keys of one first word, but different hashes."""
    return b"12345678" + number.to_bytes(24, "big")


KINDS = {"digests": digest, "alike": alike, "one word": one_word}
KEYS = {kind: [make(number) for number in range(2 * ROWS)] for kind, make in KINDS.items()}


def agrees(table: KeyTable, expected: dict[bytes, int], all_keys: list[bytes]) -> None:
    assert len(table) == len(expected)
    assert sorted(table.lists()) == sorted(expected.values())
    wanted = [expected.get(key, NONE) for key in all_keys]
    assert [table.find(key) for key in all_keys] == wanted
    assert table.find_each(table.names(all_keys)).tolist() == wanted
    assert table.find_either(table.names(all_keys)).tolist() == wanted
    rows = list(expected.values())
    assert table.keys(np.array(rows, np.int64)) == list(expected) == [table.key(row) for row in rows]


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_table_is_a_dictionary(kind: str, data: st.DataObject) -> None:
    keys = KEYS[kind]
    table, expected, free = KeyTable(ROWS + 1), dict[bytes, int](), list(range(ROWS))
    for _ in range(data.draw(st.integers(1, 8))):
        count = data.draw(st.integers(0, 60))
        chance = random.Random(data.draw(st.integers(0, 1 << 30)))
        if chance.random() < 0.5:
            new = [key for key in chance.sample(keys, len(keys)) if key not in expected][: min(count, len(free))]
            chance.shuffle(free)
            rows = [free.pop() for _ in new]
            if chance.random() < 0.5 and new:
                table.add_names(table.names(new), np.array(rows, np.int64))
            else:
                for key, row in zip(new, rows, strict=True):
                    table.add(key, row)
            expected |= dict(zip(new, rows, strict=True))
        else:
            rows = [expected.pop(key) for key in chance.sample(list(expected), min(count, len(expected)))]
            free += rows
            if chance.random() < 0.5:
                table.remove_each(rows)
            else:
                for row in rows:
                    table.remove(row)
        agrees(table, expected, keys)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_full_table_is_no_longer_to_search_after_many_cycles(kind: str) -> None:
    """Nothing is left behind by keys that are gone: all lists together have exactly the rows that have keys."""
    table, width = KeyTable(ROWS + 1), 20
    table.add_names(first := table.names([KINDS[kind](number) for number in range(ROWS)]), slice(0, ROWS))
    for cycle in range(200):
        start = cycle * width % ROWS
        rows = range(start, start + width)
        table.remove_each(rows)
        new = [KINDS[kind](ROWS + cycle * width + number) for number in range(width)]
        table.add_names(table.names(new), slice(start, start + width))
        assert len(list(table.lists())) == len(table) == ROWS
    assert table.find_each(table.names(new)).tolist() == list(rows)
    assert (table.find_each(first) == NONE).all()


@pytest.mark.parametrize("kind", ["digests", "alike", "one word"])
def test_hidden_keys_are_found_by_those_who_ask_for_them_only(kind: str) -> None:
    table = KeyTable(101)
    keys = [KINDS[kind](number) for number in range(100)]
    names, rows = table.names(keys), np.arange(100)
    table.add_hidden(names, rows)
    assert (len(table), (table.find_each(names) == NONE).all(), table.find(keys[3])) == (0, True, NONE)
    assert table.find_either(names).tolist() == rows.tolist()
    table.show(rows[:50])
    assert (len(table), table.find_each(names).tolist()) == (50, [*range(50), *[NONE] * 50])
    assert table.find_either(names).tolist() == rows.tolist()
    table.hide(rows[:10])
    assert (len(table), table.find(keys[3]), table.find(keys[13])) == (40, NONE, 13)


def test_more_rows_than_a_link_can_name_are_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        KeyTable((1 << 30) + 1)


class Counted(bytes):
    """A key that counts what it is compared with."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return bytes.__eq__(self, other)

    __hash__ = bytes.__hash__


def of_words(first: int, last: int, number: int) -> bytes:
    """A key with this first and last word."""
    return first.to_bytes(8, "little") + number.to_bytes(16, "big") + last.to_bytes(8, "little")


def tried_out(fixed: int) -> Callable[[int], bytes]:
    """Keys of which the XOR of first and last word has these bits 0: somebody tried 2^40 for each."""

    def make(number: int) -> bytes:
        chance = random.Random(number)
        first = chance.getrandbits(64)
        return of_words(first, first ^ (chance.getrandbits(64) & ~fixed), number)

    return make


CHOSEN = {
    "first and last four bytes": lambda number: b"1234" + random.Random(number).randbytes(24) + b"1234",
    "low bits": tried_out((1 << 40) - 1),
    "high bits": tried_out((1 << 64) - (1 << 24)),
    "bits in the middle": tried_out(((1 << 40) - 1) << 12),
}


@pytest.mark.parametrize("chosen", list(CHOSEN))
def test_h110_whichever_keys_a_client_chooses_a_lookup_compares_few(chosen: str) -> None:
    """Of 2,000 keys, half of them stored: 1.2 comparisons each on average, at most some by chance."""
    table = KeyTable(1001)
    keys = [CHOSEN[chosen](number) for number in range(2000)]
    table.add_names(table.names(keys[:1000]), slice(0, 1000))
    Counted.comparisons = 0
    assert [table.find(Counted(key)) for key in keys] == [*range(1000), *[NONE] * 1000]
    assert Counted.comparisons < 2 * len(keys)
    assert table.find_each(table.names(keys)).tolist() == [*range(1000), *[NONE] * 1000]
    assert sorted(table.lists()) == list(range(1000))


def test_h110_each_table_draws_a_secret_of_its_own() -> None:
    keys = [digest(number) for number in range(100)]
    orders = set()
    for _ in range(2):
        table = KeyTable(101)
        table.add_names(table.names(keys), slice(0, 100))
        orders.add(tuple(table.lists()))
    assert len(orders) == 2
