"""Blocks without a parent, through a client: each is looked up, read and stored for itself, whatever others are."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from dictionary_tier import DictionaryTier
from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import BlockBuffer, Entry
from kvpact.tiers.client import LentSlots, TierClient
from kvpact.tiers.executor import Done, GetDone, Job, LookupDone, PutDone, TierExecutor
from kvpact_testkit.sample_blocks import content, empty_buffers, filled_buffers, separate
from kvpact_testkit.tier.harness import NAMESPACE
from kvpact_testkit.tier.stepped_executor import SteppedExecutor

SLOT = 8192
KEYS = separate("block", 5).keys


def filled(keys: Sequence[BlockKey]) -> list[BlockBuffer]:
    return filled_buffers(keys, SLOT, 2)


def store(tier: DictionaryTier, keys: Sequence[BlockKey]) -> None:
    assert all(tier.put([Entry(*each) for each in zip(keys, filled(keys), strict=True)]))


@pytest.fixture
def dictionary() -> DictionaryTier:
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


def test_the_results_say_which_blocks_are_there_and_how_many_in_a_row(client: TierClient) -> None:
    stored = [KEYS[0], KEYS[1], KEYS[3]]
    assert client.submit_put("write", stored, filled(stored), 3 * SLOT)
    assert done_of(client) == PutDone("write", (True,) * 3)
    now = time.monotonic()
    assert [client.has(key, now) for key in KEYS] == [True, True, False, True, False]
    assert client.submit_lookup("ask", KEYS)
    done = done_of(client)
    assert done == LookupDone("ask", (True, True, False, True, False))
    assert isinstance(done, LookupDone)
    assert done.in_a_row == 2
    buffers = empty_buffers(3, SLOT)
    assert client.submit_get("read", KEYS[2:], buffers)
    assert done_of(client) == GetDone("read", (False, True, False))
    assert b"".join(buffers[1]) == content(KEYS[3], SLOT)
    assert client.lent == 0
    assert not client.health.is_paused


def test_a_read_of_which_only_a_later_block_arrives_is_no_broken_word(
    dictionary: DictionaryTier, client: TierClient
) -> None:
    store(dictionary, KEYS[1:])
    for number in range(6):
        assert client.submit_get(number, KEYS, empty_buffers(5, SLOT))
        assert done_of(client) == GetDone(number, (False, True, True, True, True))
    assert not client.health.is_paused
    for number in range(6):
        client.submit_get(number, [b"?" * 32], empty_buffers(1, SLOT))
        if not client.health.is_paused:
            done_of(client)
    assert client.health.is_paused, "nothing arrives of what it said it has"


def test_blocks_that_wait_for_deletion_are_not_held(dictionary: DictionaryTier, client: TierClient) -> None:
    store(dictionary, KEYS)
    client.delete([KEYS[2]])
    now = time.monotonic()
    assert [client.has(key, now) for key in KEYS] == [True, True, False, True, True]
    assert [client.readable([key], 1) for key in KEYS] == [1, 1, 0, 1, 1]


def test_a_cancelled_operation_says_of_each_block_that_it_is_not_there(dictionary: DictionaryTier) -> None:
    executor = SteppedExecutor(dictionary, 1 << 30)
    executor.submit(Job("read", KEYS[1:], empty_buffers(4, SLOT)))
    executor.submit(Job("ask", KEYS, kind=LookupDone))
    executor.submit(Job("write", KEYS[:2], filled(KEYS[:2]), write_bytes=2 * SLOT, kind=PutDone))
    assert all(executor.cancel(op_id) for op_id in ("read", "ask", "write"))
    assert [*executor.poll()] == [
        GetDone("read", (False,) * 4),
        LookupDone("ask", (False,) * 5),
        PutDone("write", (False,) * 2),
    ]
    executor.close(5.0)


def test_an_impossible_answer_is_a_failure(
    dictionary: DictionaryTier, client: TierClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dictionary, "lookup", lambda keys: [True] * (len(keys) + 1))
    client.submit_lookup("ask", KEYS)
    done = done_of(client)
    assert isinstance(done, LookupDone)
    assert (done.in_a_row, done.ok, done.each) == (0, False, (False,) * 5)


def test_the_numbers_in_their_prompts_reach_the_tier(
    dictionary: DictionaryTier, client: TierClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries: list[Entry] = []

    def put(given: Sequence[Entry]) -> list[bool]:
        entries.extend(given)
        return [True] * len(given)

    monkeypatch.setattr(dictionary, "put", put)
    unknown: list[int] = []
    for depths in (unknown, [7, 3]):
        assert client.submit_put("write", KEYS[:2], filled(KEYS[:2]), 2 * SLOT, depths=depths)
        assert done_of(client) == PutDone("write", (True, True))
    assert [(entry.depth, entry.parent) for entry in entries] == [(0, b""), (0, b""), (7, b""), (3, b"")]
