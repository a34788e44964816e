"""Loose blocks, which form no chain: each is looked up, read and stored for itself, whatever lies before it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dictionary_tier import DictionaryTier
from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import BlockBuffer, RecordHeader, RecordMac, Tier
from kvpact.tiers.client import LentSlots, TierClient
from kvpact.tiers.executor import Done, GetDone, LookupDone, PutDone, TierExecutor
from kvpact.tiers.registry import TierContext, open_tier
from kvpact.tiers.shared.store import record_name
from kvpact.tiers.shared.tier import SharedTier
from kvpact.tiers.urls import parse_tier_url
from kvpact_testkit.sample_blocks import content, document, empty_buffers, filled_buffers
from kvpact_testkit.tier.harness import NAMESPACE
from kvpact_testkit.tier.stepped_executor import SteppedExecutor
from slab_scenes import Told

SLOT = 8192
CHAIN = document("chain", 4).keys
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
    buffers, told = empty_buffers(5, SLOT, 2), Told()
    assert dictionary.get_each(LOOSE, buffers, told) == [True, True, False, True, False]
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


KINDS = ("disk", "dir", "file")


def opened(kind: str, directory: Path, seal: RecordMac | None = None, slot_bytes: int = SLOT) -> Tier:
    """A tier of a kind, whose store lasts in `directory`."""
    (directory / kind).mkdir(exist_ok=True)
    url = {
        "disk": f"disk://{directory}/disk?capacity=1MiB",
        "dir": f"dir://{directory}/dir?capacity=64MiB",
        "file": f"file://{directory}/file",
    }[kind]
    place = TierContext(NAMESPACE, slot_bytes)
    return open_tier(parse_tier_url(url), place if seal is None else TierContext(NAMESPACE, slot_bytes, seal))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def served(tier: Tier, keys: Sequence[BlockKey], nbytes: int = SLOT) -> list[bool]:
    """Which loose blocks are served; each is itself."""
    buffers = empty_buffers(len(keys), nbytes, 2)
    arrived = tier.get_each(keys, buffers)
    for there, key, buffer in zip(arrived, keys, buffers, strict=True):
        assert not there or b"".join(buffer) == content(key, nbytes)
    return arrived


def test_loose_blocks_behind_a_hole_are_found_by_the_next_process(kind: str, tmp_path: Path) -> None:
    tier = opened(kind, tmp_path)
    stored = [LOOSE[1], LOOSE[2], LOOSE[4]]
    assert tier.put_each(stored, filled(stored)) == [True] * 3
    assert served(tier, LOOSE) == [False, True, True, False, True]
    tier.close()
    tier = opened(kind, tmp_path)
    assert served(tier, LOOSE) == tier.lookup_each(LOOSE) == [False, True, True, False, True]
    assert tier.put_each(LOOSE, filled(LOOSE)) == [True] * 5
    assert served(tier, LOOSE) == [True] * 5
    assert tier.delete([LOOSE[2]]) == 1
    assert tier.lookup_each(LOOSE) == served(tier, LOOSE) == [True, True, False, True, True]
    assert [header.parent for header in tier.scan()] == [b""] * 4
    tier.clear()
    tier.close()
    assert opened(kind, tmp_path).lookup_each(LOOSE) == [False] * 5


SIZES = (0, 1, 512, SLOT - 1, SLOT)


def test_blocks_of_several_sizes_lie_in_one_tier_and_another_size_is_a_miss(kind: str, tmp_path: Path) -> None:
    tier = opened(kind, tmp_path)
    for key, nbytes in zip(LOOSE, SIZES, strict=True):
        assert tier.put_each([key], filled([key], nbytes)) == [True]
    tier.close()
    again = opened(kind, tmp_path)
    for key, nbytes in zip(LOOSE, SIZES, strict=True):
        for other in set(SIZES) - {nbytes}:
            assert served(again, [key], other) == [False]
        assert served(again, [key], nbytes) == [True], "another size took it away"
    mixed = [filled([key], nbytes)[0] for key, nbytes in zip(LOOSE, SIZES, strict=True)]
    assert again.get_each(LOOSE, mixed) == [True] * 5
    assert sorted(header.length for header in again.scan()) == sorted(SIZES)
    assert again.counts().damaged == 0
    assert again.health().ok


def test_a_chain_without_payload_is_held_like_any_other(kind: str, tmp_path: Path) -> None:
    tier = opened(kind, tmp_path)
    assert tier.put(CHAIN, 0, filled(CHAIN[:3], 0)) == 3
    tier.close()
    again = opened(kind, tmp_path)
    assert again.lookup(CHAIN) == again.get(CHAIN, 0, empty_buffers(4, 0)) == 3
    assert again.put(CHAIN, 3, filled(CHAIN[3:], 0)) == 1
    assert again.get(CHAIN, 2, empty_buffers(2, 0, 2)) == 2


SEALS = (RecordMac(), RecordMac.from_secret(b"the key of our engines"))


@pytest.mark.parametrize("seal", SEALS, ids=["unsealed", "sealed"])
def test_h20_a_planted_loose_record_is_no_part_of_a_chain_and_a_chains_block_is_not_loose(
    seal: RecordMac, tmp_path: Path
) -> None:
    """Somebody with the record key, or without one where there is none, writes the record of one under the other's."""
    tier = opened("dir", tmp_path, seal)
    assert isinstance(tier, SharedTier)
    assert tier.put(CHAIN, 0, filled(CHAIN)) == 4
    (group,) = {record.name.partition("/")[0] for record in tier.store.names()}

    def plant(key: BlockKey, parent: BlockKey, depth: int) -> None:
        payload = [memoryview(b"x" * SLOT)]
        digest = seal.payload_digest(payload)
        header = RecordHeader(NAMESPACE.digest, key, parent, depth, SLOT, digest, 1.0, 1.0)
        tier.store.write([record_name(group, key)], [[header.encode(seal), *payload]])

    plant(CHAIN[2], b"", 0)
    assert tier.get(CHAIN, 0, empty_buffers(4, SLOT)) == 2
    assert tier.counts().damaged == 1
    assert tier.lookup(CHAIN) == 2, "it is removed"
    plant(LOOSE[0], CHAIN[1], 2)
    assert served(tier, LOOSE[:1]) == [False]
    assert tier.counts().damaged == 2
    assert tier.put_each(LOOSE[:1], filled(LOOSE[:1])) == served(tier, LOOSE[:1]) == [True]
    plant(CHAIN[2], CHAIN[0], 1)
    assert tier.get(CHAIN, 0, empty_buffers(4, SLOT)) == 2


def test_h22_a_damaged_loose_block_costs_no_other_one(tmp_path: Path) -> None:
    tier = opened("dir", tmp_path)
    assert isinstance(tier, SharedTier)
    tier.put_each(LOOSE, filled(LOOSE))
    (name,) = [record.name for record in tier.store.names() if record.name.endswith(LOOSE[1].hex())]
    raw = [memoryview(bytearray(256)), memoryview(bytearray(SLOT))]
    assert tier.store.read([name], [raw]) == [True]
    raw[1][100] ^= 1
    tier.store.write([name], [raw])
    assert served(tier, LOOSE) == [True, False, True, True, True]
    assert tier.counts().damaged == 1
    assert tier.lookup_each(LOOSE) == [True, False, True, True, True], "it is removed"
