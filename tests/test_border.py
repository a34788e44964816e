"""What others send, in a file, an answer of a store or a message, becomes a value or one kind of error (H108)."""

from __future__ import annotations

import json
import logging
import socket
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvpact import wire
from kvpact.border import json_object
from kvpact.contract import WorkerReport
from kvpact.errors import DataError
from kvpact.identity.keys import Namespace
from kvpact.identity.loaded_adapters import LoadedAdapters
from kvpact.identity.notices import WORD_END, NoticeReader
from kvpact.own_files import OWN_FOLDER, CacheFile
from kvpact.threads import start_background
from kvpact.tiers.awaited import open_tiers
from kvpact.tiers.base import HEADER_BYTES, RecordHeader
from kvpact.tiers.disk.superblock import PAGE_BYTES, Superblock
from kvpact.tiers.mooncake.store import MooncakeStore
from kvpact.tiers.objects.packs import PACK_FORMAT, PACK_MAGIC, decode_pack
from kvpact.tiers.record import RECORD_FORMAT, RECORD_MAGIC
from kvpact.tiers.redis import MAX_PART
from kvpact.tiers.redis.batches import Batches
from kvpact.tiers.redis.connections import Connection
from kvpact.tiers.redis.parts import SPLIT_MAGIC, SplitHead
from kvpact.tiers.registry import TierContext
from kvpact.tiers.shared.store import StoreError, StoreUsage
from kvpact.tiers.urls import parse_tier_url
from kvpact.wire import LentSegment, StepMessage, WorkerHandshake
from slab_scenes import superblock_page

DEEP = b"[" * 3000
"""Text that Python's parser of JSON takes for an attack."""

NUMBERS = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**31, 2**32, 2**63, 2**64 - 1])
FLOATS = st.floats()
DIGESTS = st.binary(min_size=32, max_size=32)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
TEXTS = (
    st.binary(max_size=40)
    | st.sampled_from([DEEP, b'{"a":' * 1500, b'{"a": 1}', b'{"a": "\\ud800"}', b"[]", b"null", b"\xff{}", b"1e999"])
    | VALUES.map(lambda value: json.dumps(value).encode())
)


@given(TEXTS, NUMBERS, NUMBERS, DIGESTS, st.none() | st.integers(0, 2**32 - 1))
def test_h108_a_superblock_with_a_right_checksum_may_say_anything(
    text: bytes, slot_bytes: int, table_slots: int, digest: bytes, text_bytes: int | None
) -> None:
    with pytest.raises(DataError):
        Superblock.decode(superblock_page(text, slot_bytes, table_slots, digest, text_bytes), Path("slab"))


@given(TEXTS)
def test_h108_json_from_others_is_an_object_or_a_data_error(raw: bytes) -> None:
    for decode in (json_object, Namespace.parse, lambda raw: json_object(raw.decode(errors="replace"))):
        try:
            decode(raw)
        except DataError:
            continue
        assert isinstance(json.loads(raw), dict)


@given(st.tuples(*[NUMBERS] * 4), FLOATS, FLOATS, st.lists(DIGESTS, min_size=3, max_size=3), st.binary(max_size=120))
def test_h108_a_record_header_with_a_right_checksum_may_say_anything(
    numbers: tuple[int, ...], written: float, used: float, digests: list[bytes], rest: bytes
) -> None:
    depth, slot, length, _ = numbers
    head = struct.pack("<8sIIQQdd", RECORD_MAGIC, RECORD_FORMAT, depth % 2**32, slot, length, written, used)
    checked = (head + b"".join(digests) + rest).ljust(HEADER_BYTES - 8, b"\0")[: HEADER_BYTES - 8]
    raw = checked + xxhash.xxh3_64_intdigest(checked).to_bytes(8, "little")
    for its_length, its_slot in ((None, slot), (8192, 3)):
        try:
            header = RecordHeader.decode(raw, namespace=None, length=its_length, slot=its_slot, seal=None)
        except DataError:
            continue
        assert header.slot == slot


@given(st.binary(max_size=200), NUMBERS, NUMBERS, st.integers(0, 2**40))
def test_h108_a_pack_with_a_right_checksum_may_say_anything(
    table: bytes, count: int, table_bytes: int, size: int
) -> None:
    for entries, nbytes in ((count % 2**32, table_bytes), (count % 4, len(table))):
        head = struct.pack("<8sIIQ", PACK_MAGIC, PACK_FORMAT, entries, nbytes)
        object_start = head + xxhash.xxh3_64_intdigest(head + table).to_bytes(8, "little") + table
        try:
            pack = decode_pack("group/name", object_start, size, {})
        except DataError:
            continue
        assert all(offset + length <= size for offset, length in pack.records.values())


@given(st.binary(min_size=16, max_size=16), NUMBERS, NUMBERS)
def test_h108_the_head_of_a_large_record_names_few_parts_or_is_none(nonce: bytes, nbytes: int, part_bytes: int) -> None:
    raw = struct.pack("<8s16sQQ", SPLIT_MAGIC, nonce, nbytes, part_bytes).ljust(40 + HEADER_BYTES, b"\0")
    head = SplitHead.decode(raw)
    assert head is None or (head.nbytes <= head.part_bytes << 16 and head.part_bytes <= MAX_PART)


KINDS: tuple[Any, ...] = (StepMessage, WorkerHandshake, WorkerReport, LentSegment)


SMALL = st.integers(-(2**63), 2**64 - 1) | st.text("abc", max_size=3) | st.binary(max_size=40)
PACKED = st.recursive(
    SMALL, lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.integers(0, 9), inner), max_leaves=8
)
WHOLE = wire.encode(WorkerReport({1: {}}))
HEADER = WHOLE[: WHOLE.index(b"\n") + 1]


@given(st.sampled_from(KINDS), PACKED.map(msgspec.msgpack.encode) | st.just(b"\x91" * 5000) | st.binary(max_size=40))
def test_h108_a_peers_message_is_understood_or_a_data_error(kind: Any, body: bytes) -> None:
    with suppress(DataError):
        assert isinstance(wire.decode(HEADER + body, kind), kind)


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_h108_a_rank_may_write_anything_into_its_page(head: bytes, table: bytes) -> None:
    page = head.ljust(WORD_END, head[:1] or b"\0") + table.ljust(PAGE_BYTES - WORD_END, b"\0")
    reader, adapters = NoticeReader([memoryview(page)]), LoadedAdapters([memoryview(page)])
    reader.look()
    adapters.look()
    reader.close()


@given(TEXTS)
def test_h108_what_is_kept_for_the_user_counts_as_empty_if_it_is_damaged(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp() / "kept" / OWN_FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "digests.json").write_bytes(raw)
    (folder / "digests.json").chmod(0o600)
    assert isinstance(CacheFile(folder / "digests.json").read(), dict)


class _OnePipe:
    """Stands for a pool and for servers: the one connection has been answered already, and then ends."""

    def __init__(self, answers: bytes) -> None:
        self._ours, theirs = socket.socketpair()
        theirs.sendall(answers)
        theirs.close()

    def of(self, key: bytes, deadline: float) -> tuple[str, int]:
        return "server", 1

    def forget(self) -> None:
        pass

    @contextmanager
    def connection(self, address: object, deadline: float) -> Iterator[Connection]:
        connection = Connection(SimpleNamespace(_sock=self._ours, disconnect=self._ours.close))
        connection.stream.deadline = deadline
        connection.flush = lambda: None  # type: ignore[method-assign]
        yield connection

    def close(self) -> None:
        self._ours.close()


ANSWERS = st.lists(
    st.binary(max_size=12)
    | st.tuples(st.sampled_from(b"$:+*-"), st.integers() | st.text("0123456789-+_ ", max_size=6)).map(
        lambda pair: b"%c%b\r\n" % (pair[0], str(pair[1]).encode())
    ),
    max_size=6,
).map(b"".join)


@given(ANSWERS)
def test_h108_what_a_server_answers_is_a_reply_or_a_store_error(answers: bytes) -> None:
    pipe = _OnePipe(answers)
    batches = Batches(cast(Any, pipe), cast(Any, pipe), "redis://server", 0.5)
    with closing(pipe), suppress(StoreError), batches.call() as deadline:
        assert len(batches.replies([b"one", b"two"], b"GET", deadline=deadline)) == 2


@pytest.mark.parametrize("figure", ["nan", "inf", "-1e400", "many", ""])
def test_h108_a_masters_figures_may_be_anything(figure: str) -> None:
    class Master(MooncakeStore):
        def ask_master(self, path: str) -> str:
            return f"master_allocated_bytes {figure}\nmaster_total_capacity_bytes 1\n"

    assert Master(None, ("master", 1)).usage() == StoreUsage()


# Openers and threads


@pytest.mark.parametrize("error", [RecursionError("deep"), ValueError("text"), MemoryError()])
def test_h108_whatever_opening_a_tier_raises_costs_that_tier(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    place = TierContext(Namespace({"model": "tiny"}), 8192)
    monkeypatch.setattr("kvpact.tiers.disk.tier.open_disk", broken)
    with closing(open_tiers([parse_tier_url(f"disk://{tmp_path}?capacity=1MiB")], place, 10.0)[0]) as tier:
        assert tier.there is None
        assert type(error).__name__ in tier.reason


def test_h108_a_thread_that_ends_by_an_error_says_so_once_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise ValueError("what nobody expected")

    with caplog.at_level(logging.ERROR):
        start_background("kvpact-test", broken).join()
    (record,) = caplog.records
    assert record.name == "kvpact.threads"
    assert "the thread kvpact-test ended with an error" in record.getMessage()
    assert record.exc_info is not None
