"""How many calls of a store a shared tier needs for a run of blocks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from chain_calls import get_chain, put_chain
from kvpact.cache.prefetch import READ_BYTES
from kvpact.identity.keys import Namespace
from kvpact.tiers.base import Entry
from kvpact.tiers.shared import tier as shared
from kvpact.tiers.shared.store import RecordBuffer
from kvpact.tiers.shared.tier import GROUP_BYTES, SharedTier
from kvpact_testkit.sample_blocks import DOCUMENT, content, document, empty_buffers, filled_buffers
from kvpact_testkit.tier.dictionary_store import DictionaryStore

SLOT = 8 << 10


class CountingStore(DictionaryStore):
    """Notes how many records each read asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[int] = []

    def read(self, names: Sequence[str], buffers: Sequence[RecordBuffer]) -> list[bool]:
        self.reads.append(len(names))
        return super().read(names, buffers)


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.mark.parametrize(("blocks", "reads"), [(4, [4]), (5, [4, 1]), (8, [4, 4])])
def test_a_group_is_as_many_blocks_as_fit_without_their_headers(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch, blocks: int, reads: list[int]
) -> None:
    monkeypatch.setattr(shared, "GROUP_BYTES", 4 * SLOT)
    tier = SharedTier(store, Namespace({"test": "groups"}), SLOT)
    keys, buffers = DOCUMENT.keys[:blocks], empty_buffers(blocks, SLOT)
    assert put_chain(tier, keys, filled_buffers(keys, SLOT)) == blocks
    assert get_chain(tier, keys, buffers) == blocks
    assert [b"".join(buffer) for buffer in buffers] == [content(key, SLOT) for key in keys]
    assert store.reads == reads


def test_blocks_without_bytes_are_bounded_by_their_headers(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "GROUP_BYTES", 1024)
    tier = SharedTier(store, Namespace({"test": "groups"}), SLOT)
    keys = document("empty", 6).keys
    assert all(tier.put([Entry(key, [memoryview(b"")]) for key in keys]))
    assert all(tier.get(keys, [[memoryview(bytearray())]] * 6))
    assert store.reads == [4, 2]


def test_what_the_engine_reads_at_once_is_one_call() -> None:
    assert READ_BYTES <= GROUP_BYTES
