"""How many calls of a store a shared tier needs for a run of blocks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from chain_calls import get_chain, put_chain
from kvpact.cache.prefetch import READ_BYTES
from kvpact.identity.keys import Namespace
from kvpact.tiers import record
from kvpact.tiers.base import Entry, chained
from kvpact.tiers.record import GROUP_BYTES
from kvpact.tiers.shared.store import RecordBuffer, RecordPieces
from kvpact.tiers.shared.tier import SharedTier
from kvpact_testkit.sample_blocks import DOCUMENT, content, document, empty_buffers, filled_buffers
from kvpact_testkit.tier.dictionary_store import DictionaryStore

SLOT = 8 << 10


class CountingStore(DictionaryStore):
    """Notes each call and the number of records that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def exists(self, names: Sequence[str]) -> list[bool]:
        self.calls.append(("exists", len(names)))
        return super().exists(names)

    def read(self, names: Sequence[str], buffers: Sequence[RecordBuffer]) -> list[bool]:
        self.calls.append(("read", len(names)))
        return super().read(names, buffers)

    def write(self, names: Sequence[str], records: Sequence[RecordPieces]) -> None:
        self.calls.append(("write", len(names)))
        super().write(names, records)

    def heads(self, names: Sequence[str]) -> list[bytes | None]:
        self.calls.append(("heads", len(names)))
        return super().heads(names)


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.mark.parametrize(("blocks", "reads"), [(4, [4]), (5, [4, 1]), (8, [4, 4])])
def test_a_group_is_as_many_blocks_as_fit_without_their_headers(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch, blocks: int, reads: list[int]
) -> None:
    monkeypatch.setattr(record, "GROUP_BYTES", 4 * SLOT)
    tier = SharedTier(store, Namespace({"test": "groups"}), SLOT)
    keys, buffers = DOCUMENT.keys[:blocks], empty_buffers(blocks, SLOT)
    assert put_chain(tier, keys, filled_buffers(keys, SLOT)) == blocks
    assert get_chain(tier, keys, buffers) == blocks
    assert [b"".join(buffer) for buffer in buffers] == [content(key, SLOT) for key in keys]
    assert [count for call, count in store.calls if call == "read"] == reads


def test_blocks_without_bytes_are_bounded_by_their_headers(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "GROUP_BYTES", 1024)
    tier = SharedTier(store, Namespace({"test": "groups"}), SLOT)
    keys = document("empty", 6).keys
    assert all(tier.put([Entry(key, [memoryview(b"")]) for key in keys]))
    assert all(tier.get(keys, [[memoryview(bytearray())]] * 6))
    assert [count for call, count in store.calls if call == "read"] == [4, 2]


def test_what_the_engine_reads_at_once_is_one_call() -> None:
    assert READ_BYTES <= GROUP_BYTES


def test_a_write_asks_once_for_its_blocks_and_their_parents_and_writes_once(store: CountingStore) -> None:
    tier = SharedTier(store, Namespace({"test": "groups"}), SLOT)
    first, second = document("first", 6).keys, document("second", 6).keys
    assert put_chain(tier, first[:4], filled_buffers(first[:4], SLOT)) == 4
    store.calls.clear()
    assert put_chain(tier, first[4:], filled_buffers(first[4:], SLOT), first[:4]) == 2
    assert store.calls == [("exists", 3), ("write", 2)]

    store.calls.clear()
    orphans = chained(second[1:3], filled_buffers(second[1:3], SLOT), second[:1])
    alone = [Entry(key, buffer) for key, buffer in zip(second[3:], filled_buffers(second[3:], SLOT), strict=True)]
    branch = document("first", 5).branch("branch", 5, 7).keys[5:]
    follow = chained(branch, filled_buffers(branch, SLOT), first[:5])
    assert tier.put([*orphans, *alone, *follow]) == [False, False, True, True, True, True, True]
    assert store.calls == [("exists", 3 + 3 + 3), ("write", 5)]


def test_blocks_are_stored_beside_a_parent_that_comes_before_them_in_the_same_write() -> None:
    tier = SharedTier(DictionaryStore(), Namespace({"test": "groups"}), SLOT)
    head = document("head", 2).keys
    branches = [document("head", 2).branch(name, 2, 4).keys[2:] for name in ("one", "another")]
    entries = chained(head, filled_buffers(head, SLOT))
    for branch in branches:
        entries += chained(branch, filled_buffers(branch, SLOT), head)
    assert tier.put(entries) == [True] * 6
    assert tier.leading([*head, *branches[1]]) == 4


def test_what_is_missing_is_looked_at_once_for_all_blocks_of_a_read(store: CountingStore) -> None:
    tier = SharedTier(store, Namespace({"test": "groups"}), SLOT)
    keys = DOCUMENT.keys[:6]
    put_chain(tier, keys[:3], filled_buffers(keys[:3], SLOT))
    store.calls.clear()
    assert get_chain(tier, keys, empty_buffers(6, SLOT)) == 3
    assert store.calls == [("read", 6), ("heads", 3)]
