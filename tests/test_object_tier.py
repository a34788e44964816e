"""Blocks in an object store, on a real S3 API server and in a directory: packs of blocks, ranges of them, and every way
in which a store of objects fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from kvpact.blocks import BlockKey, Namespace
from kvpact.testkit.faults import Faults
from kvpact.testkit.sample_blocks import document
from kvpact.testkit.tier import Damage, Place, TierConformance
from kvpact.tier_urls import parse_tier_url
from kvpact.tiers.base import Tier
from kvpact.tiers.object import ObjectStore, open_objects
from kvpact.tiers.object_bucket import Bucket
from kvpact.tiers.object_packs import decode_pack, encode_pack
from kvpact.tiers.shared import SharedTier, StoreError, group_name, key_of, record_name
from object_server import CREDENTIALS, Traffic, object_server

SLOT = 4096
NAMESPACE = Namespace({"model": "kvpact-tests", "dtype": "bytes", "block_size": "16"})
DOCUMENT = document("document", 8)
BRANCH = DOCUMENT.branch("branch", 3, 6)
ENDPOINT = "KVPACT_TEST_S3_ENDPOINT"
"""Environment variable that tells processes which a check starts where the server is."""

Returned = TypeVar("Returned")


@pytest.fixture(scope="module")
def s3() -> Iterator[Traffic]:
    with object_server() as traffic, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, text in (CREDENTIALS | {ENDPOINT: traffic.endpoint}).items():
            patch.setenv(name, text)
        yield traffic


def s3_store(prefix: str, *, timeout: str = "20s", bucket: str = "bucket", more: str = "") -> ObjectStore:
    return open_objects(
        parse_tier_url(
            f"s3://{bucket}/{prefix}?endpoint={os.environ[ENDPOINT]}&allow_http=true&timeout={timeout}{more}"
        )
    )


def overwrite(store: ObjectStore, name: str, data: bytes) -> None:
    """What another program does to an object."""
    store.bucket._api.put(store.bucket._store, name, data)


def pack_with(store: ObjectStore, name: str) -> tuple[str, dict[str, bytes]]:
    """The object that holds a record, and all that it holds."""
    for page in store.bucket.pages(name.partition("/")[0]):
        for pack in page:
            records = records_in(store, pack)
            if name in records:
                return pack, records
    raise AssertionError(f"no object holds {name}")


def records_in(store: ObjectStore, pack: str) -> dict[str, bytes]:
    whole = store.bucket.get(pack)
    assert whole is not None
    table = decode_pack(pack, whole.data, len(whole.data), whole.version)
    return {name: bytes(whole.data[at : at + length]) for name, (at, length) in table.records.items()}


class ObjectSuite(TierConformance):
    """What the tiers of this kind have in common."""

    reopens = True
    bounded = False
    several_writers = True
    gives_up_after = 0.2

    def open_store(self, place: Place) -> ObjectStore:
        raise NotImplementedError

    def open_tier(self, place: Place) -> Tier:
        return SharedTier(self.open_store(place), place.namespace, place.slot_bytes, seal=place.seal)

    @contextmanager
    def store_calls(self, faults: Faults) -> Iterator[None]:
        def announced(call: Callable[..., Returned], before: Callable[[], None]) -> Callable[..., Returned]:
            def made(bucket: Bucket, *arguments: object, **more: object) -> Returned:
                try:
                    before()
                except OSError as error:
                    raise StoreError(f"{bucket.place}: {error.strerror}") from error
                return call(bucket, *arguments, **more)

            return made

        with pytest.MonkeyPatch.context() as patch:
            for name in ("get", "next_page"):
                patch.setattr(Bucket, name, announced(getattr(Bucket, name), faults.before_read))
            for name in ("put", "delete"):
                patch.setattr(Bucket, name, announced(getattr(Bucket, name), faults.before_write))
            yield

    def damage(self, place: Place, key: BlockKey, how: Damage) -> bool:
        store = self.open_store(place)
        name = record_name(group_name(place.namespace, place.seal), key)
        pack, records = pack_with(store, name)
        record = records.pop(name) if how is Damage.GONE else records[name]
        others = [other for other in records if key_of(other) and other != name]
        if how is not Damage.GONE:
            records[name] = how.of(record, records[others[0]] if others else record)
        if records:
            overwrite(store, pack, encode_pack({name: [record] for name, record in records.items()}))
        else:
            store.bucket.delete(pack)
        store.close()
        return True


@pytest.mark.usefixtures("s3")
class TestS3Tier(ObjectSuite):
    machine_examples = 2
    machine_steps = 8

    def open_store(self, place: Place) -> ObjectStore:
        return s3_store(place.name)


class TestDirectoryOfObjects(ObjectSuite):
    def open_store(self, place: Place) -> ObjectStore:
        return open_objects(parse_tier_url(f"file://{place.directory}?timeout=20s"))
