"""The Redis tier over real servers: every promise of a tier, and what servers, networks and neighbours do to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvpact.blocks import BlockKey
from kvpact.testkit.faults import Faults
from kvpact.testkit.tier import Damage, Place, TierConformance
from kvpact.tier_urls import parse_tier_url
from kvpact.tiers.base import HEADER_BYTES, RecordSeal, Tier
from kvpact.tiers.redis import RedisStore, open_redis
from kvpact.tiers.shared import (
    RecordBuffer,
    RecordPieces,
    RecordStore,
    SharedTier,
    StoredRecord,
    StoreError,
    StoreUsage,
    group_name,
    key_of,
    record_name,
)
from servers import RedisServer, redis_cluster, redis_server

URL_VARIABLE = "KVPACT_TESTS_REDIS"


class PlacedStore(RecordStore):
    """One place of many on one server: a `RedisStore` under names of its own, which announces its calls."""

    kind = "redis"

    def __init__(self, store: RedisStore, place: Place, faults: Faults) -> None:
        self.store = store
        self.prefix = f"{place.name}-"
        self.faults = faults

    def exists(self, names: Sequence[str]) -> list[bool]:
        return self.store.exists(self._read(names))

    def read(self, names: Sequence[str], buffers: Sequence[RecordBuffer]) -> list[bool]:
        return self.store.read(self._read(names), buffers)

    def write(self, names: Sequence[str], records: Sequence[RecordPieces]) -> None:
        for name, record in zip(names, records, strict=True):
            self.store.write(self._written([name]), [record])

    def remove(self, names: Sequence[str]) -> int:
        return self.store.remove(self._written(names))

    def heads(self, names: Sequence[str]) -> list[bytes | None]:
        return self.store.heads(self._read(names))

    def names(self, group: str = "") -> Iterator[StoredRecord]:
        self._read([""])
        for record in self.store.names(self.prefix + group):
            yield StoredRecord(record.name.removeprefix(self.prefix), record.nbytes)

    def size(self, name: str) -> int | None:
        return self.store.size(self._read([name])[0])

    def usage(self) -> StoreUsage:
        return self.store.usage()

    def close(self) -> None:
        self.store.close()

    @property
    def place(self) -> str:
        return self.store.place

    def _read(self, names: Sequence[str]) -> list[str]:
        return self._announced(names, self.faults.before_read)

    def _written(self, names: Sequence[str]) -> list[str]:
        return self._announced(names, self.faults.before_write)

    def _announced(self, names: Sequence[str], announce: Callable[[], None]) -> list[str]:
        try:
            for _ in names:
                announce()
        except OSError as error:
            raise StoreError(str(error)) from error
        return [self.prefix + name for name in names]


class RedisConformance(TierConformance):
    reopens = True
    bounded = False
    several_writers = True
    gives_up_after = 0.2
    machine_examples = 8
    faults = Faults()

    def open_tier(self, place: Place) -> Tier:
        store = PlacedStore(_open(os.environ[URL_VARIABLE]), place, self.faults)
        return SharedTier(store, place.namespace, place.slot_bytes, seal=place.seal)

    @contextmanager
    def store_calls(self, faults: Faults) -> Iterator[None]:
        self.faults = faults
        yield

    def damage(self, place: Place, key: BlockKey, how: Damage) -> bool:
        store = PlacedStore(_open(os.environ[URL_VARIABLE]), place, Faults())
        group = group_name(place.namespace, place.seal)
        name = record_name(group, key)
        others = [other.name for other in store.names(group) if key_of(other.name) and other.name != name]
        record, other = (_record(store, one, place) for one in (name, others[0]))
        if how is Damage.GONE:
            store.remove([name])
        else:
            store.write([name], [[how.of(record, other)]])
        store.close()
        return True


def _open(url: str) -> RedisStore:
    return open_redis(parse_tier_url(url))


def _record(store: RecordStore, name: str, place: Place) -> bytes:
    record = bytearray(HEADER_BYTES + place.slot_bytes)
    assert store.read([name], [[memoryview(record)]]) == [True]
    return bytes(record)


class TestOneServer(RedisConformance):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
        with redis_server(tmp_path_factory.mktemp("redis")) as server, pytest.MonkeyPatch.context() as patch:
            patch.setenv(URL_VARIABLE, f"redis://{server.address}/3?timeout=20")
            yield server


class TestSplitAndSealedRecords(RedisConformance):
    slot_bytes = 3 * 4096 + 5
    seal = RecordSeal.from_secret(b"the key of our engines")

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
        with redis_server(tmp_path_factory.mktemp("redis")) as server, pytest.MonkeyPatch.context() as patch:
            patch.setenv(URL_VARIABLE, f"redis://{server.address}?timeout=20&part=4KiB&expiry=1h")
            yield server


class TestCluster(RedisConformance):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def cluster(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
        with redis_cluster(tmp_path_factory.mktemp("cluster")) as nodes, pytest.MonkeyPatch.context() as patch:
            patch.setenv(URL_VARIABLE, f"redis+cluster://{nodes[0].address},{nodes[1].address}?timeout=20")
            yield nodes
