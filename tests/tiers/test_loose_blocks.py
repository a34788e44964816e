"""Loose blocks, which form no chain: each is looked up, read and stored for itself, whatever lies before it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from dictionary_tier import DictionaryTier
from kvpact.identity.keys import BlockKey
from kvpact.testkit.sample_blocks import content, document, empty_buffers, filled_buffers
from kvpact.testkit.tier.harness import NAMESPACE
from kvpact.testkit.tier.stepped_executor import SteppedExecutor
from kvpact.tiers.base import BlockBuffer
from kvpact.tiers.client import LentSlots, TierClient
from kvpact.tiers.executor import Done, GetDone, LookupDone, PutDone, TierExecutor

SLOT = 8192
LOOSE = tuple(document(f"loose {number}", 1).keys[0] for number in range(5))


def filled(keys: Sequence[BlockKey], nbytes: int = SLOT) -> list[BlockBuffer]:
    return filled_buffers(keys, nbytes, 2)


@pytest.fixture
def dictionary() -> DictionaryTier:
    """A tier whose author knows nothing of loose blocks."""
    return DictionaryTier(NAMESPACE, SLOT, 64)


@pytest.fixture
def client(dictionary: DictionaryTier) -> Iterator[TierClient]:
    executor = TierExecutor(dictionary, 1, 1 << 30)
    yield TierClient(executor, LentSlots(64), timeout=5.0, clock=time.monotonic)
    executor.close(5.0)


def done_of(client: TierClient) -> Done:
    while True:
        for done in client.poll():
            assert isinstance(done, LookupDone | GetDone | PutDone)
            return done
        time.sleep(0.001)


def test_a_tier_of_chains_alone_holds_loose_blocks_too(dictionary: DictionaryTier) -> None:
    assert dictionary.put_each(LOOSE[:2], filled(LOOSE[:2])) == [True, True]
    assert dictionary.put_each(LOOSE[3:4], filled(LOOSE[3:4])) == [True]
    assert dictionary.lookup_each(LOOSE) == [True, True, False, True, False]
    buffers, told = empty_buffers(5, SLOT, 2), list[int]()
    assert dictionary.get_each(LOOSE, buffers, lambda count: told.append(count) is None) == [
        True,
        True,
        False,
        True,
        False,
    ]
    assert told == [1, 2, 2, 2, 2], "in a row from the first, and told even where nothing more has arrived"
    assert [b"".join(buffers[index]) for index in (0, 1, 3)] == [content(LOOSE[index], SLOT) for index in (0, 1, 3)]
    assert dictionary.get_each(LOOSE, empty_buffers(5, SLOT), lambda count: False) == [True, False, False, False, False]
    assert dictionary.delete([LOOSE[0]]) == 1
    assert dictionary.lookup_each(LOOSE) == [False, True, False, True, False]


def test_the_results_count_what_is_there_in_a_row_and_say_which_blocks_are(client: TierClient) -> None:
    stored = [LOOSE[0], LOOSE[1], LOOSE[3]]
    assert client.submit_put("write", stored, 0, filled(stored), 3 * SLOT, loose=True)
    assert done_of(client) == PutDone("write", 3, each=(True,) * 3)
    assert client.held(LOOSE, time.monotonic(), loose=True) == 2
    assert client.held(LOOSE[3:], time.monotonic(), loose=True) == 1, "nothing before it is asked for"
    assert client.submit_lookup("ask", LOOSE, time.monotonic(), loose=True)
    assert done_of(client) == LookupDone("ask", 2, each=(True, True, False, True, False))
    buffers = empty_buffers(3, SLOT)
    assert client.submit_get("read", LOOSE, 2, buffers, time.monotonic(), loose=True)
    assert done_of(client) == GetDone("read", 0, each=(False, True, False))
    assert b"".join(buffers[1]) == content(LOOSE[3], SLOT)
    assert client.lent == 0
    assert not client.is_open


def test_a_loose_read_of_which_only_a_later_block_arrives_is_no_broken_word(client: TierClient) -> None:
    client.tier.put_each(LOOSE[1:], filled(LOOSE[1:]))
    for number in range(6):
        assert client.submit_get(number, LOOSE, 0, empty_buffers(5, SLOT), time.monotonic(), loose=True)
        assert done_of(client) == GetDone(number, 0, each=(False, True, True, True, True))
    assert not client.is_open
    for number in range(6):
        client.submit_get(number, [b"?" * 32], 0, empty_buffers(1, SLOT), time.monotonic(), loose=True)
        if not client.is_open:
            done_of(client)
    assert client.is_open, "nothing arrives of what it said it has"


def test_loose_blocks_that_wait_for_deletion_are_not_held(client: TierClient) -> None:
    client.tier.put_each(LOOSE, filled(LOOSE))
    client.delete([LOOSE[2]])
    assert client.held(LOOSE, time.monotonic(), loose=True) == 2
    assert [client.readable([key], 1, time.monotonic()) for key in LOOSE] == [1, 1, 0, 1, 1]


def test_a_cancelled_loose_operation_says_of_each_block_that_it_is_not_there(dictionary: DictionaryTier) -> None:
    executor = SteppedExecutor(dictionary, 1 << 30)
    executor.submit_get("read", LOOSE, 1, empty_buffers(4, SLOT), loose=True)
    executor.submit_lookup("ask", LOOSE, loose=True)
    executor.submit_put("write", LOOSE, 0, filled(LOOSE[:2]), 2 * SLOT, loose=True)
    assert all(executor.cancel(op_id) for op_id in ("read", "ask", "write"))
    assert [*executor.poll()] == [
        GetDone("read", 0, each=(False,) * 4),
        LookupDone("ask", 0, each=(False,) * 5),
        PutDone("write", 0, each=(False,) * 2),
    ]
    executor.close(5.0)


def test_an_impossible_answer_about_loose_blocks_is_a_failure(
    dictionary: DictionaryTier, client: TierClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dictionary, "lookup_each", lambda keys: [True] * (len(keys) + 1))
    client.submit_lookup("ask", LOOSE, time.monotonic(), loose=True)
    done = done_of(client)
    assert isinstance(done, LookupDone)
    assert (done.held, done.ok, done.each) == (0, False, (False,) * 5)
