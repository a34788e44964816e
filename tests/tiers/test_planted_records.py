"""A planted record costs no more than it could hold: what a store claims is checked before anything is asked, read or
allocated (H63)."""

from __future__ import annotations

import contextlib
import os
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import obstore
import pytest
from xxhash import xxh3_64_intdigest

from kvpact.tiers.base import HEADER_BYTES, UNSEALED, Tier, chained, leading
from kvpact.tiers.disk.superblock import Superblock
from kvpact.tiers.disk.tier import DiskTier
from kvpact.tiers.mooncake.store import MooncakeStore, open_mooncake
from kvpact.tiers.objects.packs import encode_pack
from kvpact.tiers.objects.store import ObjectStore, open_objects
from kvpact.tiers.redis.connections import Connection
from kvpact.tiers.redis.opening import open_redis
from kvpact.tiers.shared.store import group_name, record_name
from kvpact.tiers.shared.tier import SharedTier
from kvpact.tiers.urls import parse_tier_url
from kvpact_testkit.sample_blocks import document, empty_buffers, filled_buffers
from kvpact_testkit.tier.harness import NAMESPACE
from servers.mooncake_server import mooncake_pool
from servers.object_server import CREDENTIALS, Traffic, object_server
from servers.redis_server import RedisServer, redis_server

SLOT = 64 << 10
RECORD = HEADER_BYTES + SLOT
DOCUMENT = document("document", 6)
SICK = 2
"""The block of the document in whose place something is planted."""
GROUP = group_name(NAMESPACE, UNSEALED)
NAME = record_name(GROUP, DOCUMENT.keys[SICK])

MAX_MEMORY = 2 << 20
MAX_CPU_SECONDS = 0.1
"""Of the calling thread, tracing included; what was planted took 1.8 s without."""


def stored(tier: Tier) -> int:
    """Put the document; how many of its blocks are held then, in a row."""
    return leading(tier.put(chained(DOCUMENT.keys, filled_buffers(DOCUMENT.keys, SLOT, 2))))


def served(tier: Tier) -> int:
    """How many of its blocks arrive, in a row."""
    return leading(tier.get(DOCUMENT.keys, empty_buffers(len(DOCUMENT), SLOT, 2)))


def found(tier: Tier) -> int:
    """How many of its blocks are held, in a row."""
    return leading(tier.lookup(DOCUMENT.keys))


@dataclass
class Cost:
    """What a call took of the calling thread and of Python's memory."""

    seconds: float = 0.0
    memory: int = 0


@contextmanager
def costs() -> Iterator[Cost]:
    cost = Cost()
    tracemalloc.start()
    try:
        begun = time.thread_time()
        yield cost
        cost.seconds = time.thread_time() - begun
        cost.memory = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# Redis


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@dataclass
class Commands:
    """What is sent to servers."""

    keys: list[bytes] = field(default_factory=list)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    sent, send = Commands(), Connection.send

    def noted(connection: Connection, *words: bytes) -> None:
        sent.keys.append(words[1])
        send(connection, *words)

    monkeypatch.setattr(Connection, "send", noted)
    return sent


def planted_head(nbytes: int, part_bytes: int) -> bytes:
    """What stands under the name of a record that is kept in parts."""
    numbers = nbytes.to_bytes(8, "little") + part_bytes.to_bytes(8, "little")
    return b"kvpactSP" + bytes(16) + numbers + bytes(HEADER_BYTES)


CLAIMS = {
    "65,536 parts": planted_head(65_536 * 4096, 4096),
    "parts of a byte": planted_head(65_536, 1),
    "a record in parts of two bytes": planted_head(RECORD, 2),
    "a record in parts of 4 KiB": planted_head(RECORD, 4096),
    "2^63 bytes in one part": planted_head(2**63, 2**63),
    "2^45 bytes": planted_head(65_536 * (512 << 20), 512 << 20),
}
CALLS: dict[str, Callable[[SharedTier], object]] = {
    "lookup": lambda tier: tier.lookup(DOCUMENT.keys),
    "get": served,
    "put": stored,
    "delete": lambda tier: tier.delete([DOCUMENT.keys[SICK]]),
    "clear": lambda tier: tier.clear(),
    "scan": lambda tier: list(tier.scan()),
    "a tool's list": lambda tier: _without_length(tier, lambda: list(tier.store.names())),
    "a tool's removal": lambda tier: _without_length(tier, lambda: tier.store.remove([NAME])),
}


def _without_length(tier: SharedTier, call: Callable[[], object]) -> None:
    """What a tool does, that knows no engine."""
    tier.store.record_bytes = None
    call()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("claim", CLAIMS)
def test_h63_296_planted_bytes_cost_next_to_nothing(
    claim: str, call: str, redis: RedisServer, commands: Commands
) -> None:
    with redis.client() as client:
        client.flushall()
        tier = SharedTier(open_redis(parse_tier_url(f"redis://{redis.address}")), NAMESPACE, SLOT)
        assert stored(tier) == len(DOCUMENT)
        assert len(CLAIMS[claim]) == 296
        client.set(f"kvpact:{NAME}", CLAIMS[claim])
        commands.keys.clear()
        with costs() as cost:
            CALLS[call](tier)
        assert cost.memory < MAX_MEMORY
        assert cost.seconds < MAX_CPU_SECONDS
        assert len(commands.keys) < 12 * len(DOCUMENT)
        tier.store.record_bytes = RECORD
        assert served(tier) <= SICK or call == "put"
        assert stored(tier) == served(tier) == len(DOCUMENT), "a write does not mend it"
    tier.close()


@pytest.mark.parametrize("parts_there", [0, 1, 15, 16, 17, 79, 80])
def test_h63_a_record_of_many_parts_is_there_with_all_of_them_only(parts_there: int, redis: RedisServer) -> None:
    slot = 80 * 4096 - HEADER_BYTES
    with redis.client() as client:
        client.flushall()
        tier = SharedTier(open_redis(parse_tier_url(f"redis://{redis.address}?part=4KiB")), NAMESPACE, slot)
        assert tier.put(chained(DOCUMENT.keys[:2], filled_buffers(DOCUMENT.keys[:2], slot, 2))) == [True] * 2
        parts = sorted(client.keys("kvpact-part:*"), key=lambda key: int(key.rpartition(b":")[2]))
        assert len(parts) == 160
        for part in parts[2 * parts_there :]:
            client.delete(part)
        there = [parts_there == 80] * 2
        assert tier.lookup(DOCUMENT.keys[:2]) == there
        assert tier.get(DOCUMENT.keys[:2], empty_buffers(2, slot, 2)) == there
        assert tier.delete(DOCUMENT.keys[:2]) == 2
        assert not client.keys("kvpact-part:*")
    tier.close()


# Objects

HUGE = 32 << 20
MAX_READ = 3 << 20
"""Bytes, of tables and of the records of one honest object, that a call may read."""
FIRST = record_name(GROUP, DOCUMENT.keys[0])


@pytest.fixture(scope="module")
def s3() -> Iterator[Traffic]:
    with object_server() as traffic, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, text in CREDENTIALS.items():
            patch.setenv(name, text)
        yield traffic


def honest_pack(tier: SharedTier, spoilt: int = SICK) -> dict[str, bytes]:
    """The document's records, of which one is damaged in its payload."""
    assert isinstance(tier.store, ObjectStore)
    whole = tier.store.bucket.get(FIRST)
    assert whole is not None
    records = {}
    for key in DOCUMENT.keys:
        name = record_name(GROUP, key)
        at, length = tier.store.memory.locate([name])[name].records[name]
        records[name] = bytes(whole.data[at : at + length])
    name = record_name(GROUP, DOCUMENT.keys[spoilt])
    records[name] = records[name][:-1] + bytes([records[name][-1] ^ 1])
    return records


def with_a_giant_behind(tier: SharedTier) -> bytes:
    return encode_pack({name: [data] for name, data in honest_pack(tier).items()}) + bytes(HUGE)


def with_a_giant_inside(tier: SharedTier) -> bytes:
    giant = record_name(GROUP, document("giant", 1).keys[0])
    return encode_pack({**{name: [data] for name, data in honest_pack(tier).items()}, giant: [bytes(HUGE)]})


def with_the_sick_one_a_giant(tier: SharedTier) -> bytes:
    return encode_pack({**{name: [data] for name, data in honest_pack(tier).items()}, NAME: [bytes(HUGE)]})


def with_no_table(tier: SharedTier) -> bytes:
    return bytes(HUGE)


def with_a_table_of_trifles(tier: SharedTier) -> bytes:
    """4 MiB of entries, each a name of three letters and no bytes."""
    letters = [chr(one) for one in range(33, 127)]
    table = b"".join(struct.pack("<HQ", 3, 0) + (a + b + c).encode() for a in letters for b in letters for c in letters)
    table = table[: (4 << 20) // 13 * 13 - 13 * 4]
    head = struct.pack("<8sIIQ", b"kvpactPK", 1, len(table) // 13, len(table))
    return head + xxh3_64_intdigest(head + table).to_bytes(8, "little") + table


PLANTS = [
    with_a_giant_behind,
    with_a_giant_inside,
    with_the_sick_one_a_giant,
    with_no_table,
    with_a_table_of_trifles,
]


@contextmanager
def most_memory() -> Iterator[Cost]:
    """The most memory of this process at once, native code's too, beyond what it had."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    cost = Cost()
    yield cost
    cost.memory = _memory("VmHWM") - before


def _memory(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) << 10


def object_tier(place: str, s3: Traffic, directory: Path, *, counted: bool) -> SharedTier:
    url = f"file://{directory}/objects?timeout=20s"
    if place == "s3":
        endpoint = s3.endpoint if counted else s3.server
        url = f"s3://bucket/{directory.name}?endpoint={endpoint}&allow_http=true&timeout=20s"
    return SharedTier(open_objects(parse_tier_url(url)), NAMESPACE, SLOT)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize(
    ("call", "place"),
    [("get", "s3"), ("scan", "s3"), *((call, "file") for call in ("get", "delete", "scan", "a tool's removal"))],
)
def test_h63_nothing_larger_than_an_honest_object_is_read_to_judge_or_remove_a_planted_one(
    call: str, plant: Callable[[SharedTier], bytes], place: str, s3: Traffic, tmp_path: Path
) -> None:
    writer = object_tier(place, s3, tmp_path, counted=False)
    assert stored(writer) == len(DOCUMENT)
    assert isinstance(writer.store, ObjectStore)
    planted = plant(writer)
    obstore.put(writer.store.bucket.client, FIRST, planted)
    del planted
    writer.close()
    reader = object_tier(place, s3, tmp_path, counted=False)
    with most_memory() as most:
        CALLS[call](reader)
    assert most.memory < HUGE // 2
    with contextlib.closing(object_tier(place, s3, tmp_path, counted=True)) as counted:
        before = s3.answered_bytes
        with costs() as cost:
            assert served(counted) <= len(DOCUMENT)
            assert counted.delete([DOCUMENT.keys[SICK]]) <= 1
        assert s3.answered_bytes - before < MAX_READ
        assert cost.memory < 32 << 20
        assert served(counted) <= SICK
        assert stored(counted) == served(counted) == len(DOCUMENT), "a write does not mend it"
    reader.close()


# Mooncake


def test_h63_a_planted_object_of_mooncake_is_not_fetched(tmp_path: Path) -> None:
    with mooncake_pool(tmp_path, 128) as pool:
        tier = SharedTier(open_mooncake(parse_tier_url(pool.url(timeout="20s"))), NAMESPACE, SLOT)
        assert stored(tier) == len(DOCUMENT)
        assert isinstance(tier.store, MooncakeStore)
        fetched = tier.store.client = Fetched(tier.store.client)
        assert tier.store.remove([NAME]) == 1
        assert fetched.client.put(NAME, bytes(HUGE)) == 0
        assert found(tier) == len(DOCUMENT)
        assert served(tier) == SICK
        assert list(tier.scan()) is not None
        assert max(fetched.sizes) == RECORD
        assert found(tier) == SICK, "it was not removed"
        assert stored(tier) == served(tier) == len(DOCUMENT)
        tier.close()


class Fetched:
    """A client of Mooncake that notes how many bytes each object has that it fetches."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def get_buffer(self, key: str) -> Any:
        return self._noted([self.client.get_buffer(key)])[0]

    def batch_get_buffer(self, keys: list[str]) -> list[Any]:
        return self._noted(self.client.batch_get_buffer(keys))

    def _noted(self, found: list[Any]) -> list[Any]:
        self.sizes += [memoryview(one).nbytes for one in found if one is not None]
        return found


# Slabs


@pytest.mark.parametrize(("slot_bytes", "table_slots"), [(SLOT, 1 << 40), (SLOT, 1 << 20), (0, 4), (1, 1 << 55)])
def test_h63_a_slab_that_claims_a_table_larger_than_its_file_is_begun_anew(
    slot_bytes: int, table_slots: int, tmp_path: Path
) -> None:
    tier = DiskTier.open(tmp_path, NAMESPACE, SLOT, 16 << 20)
    assert stored(tier) == len(DOCUMENT)
    tier.close()
    (slab,) = tmp_path.rglob("*.slab")
    with slab.open("r+b") as file:
        file.write(Superblock(slot_bytes, table_slots, NAMESPACE).encode())
    with costs() as cost:
        tier = DiskTier.open(tmp_path, NAMESPACE, SLOT, 16 << 20)
    assert cost.memory < MAX_MEMORY
    assert stored(tier) == served(tier) == len(DOCUMENT)
    tier.close()
