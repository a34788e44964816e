"""Blocks in an object store, on a real S3 API server and in a directory: packs of blocks, ranges of them, and every way
in which a store of objects fails."""

from __future__ import annotations

import itertools
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar
from urllib.parse import unquote

import obstore
import pytest
from xxhash import xxh3_64_intdigest

from chain_calls import get_chain, put_document, served_of_document
from hook_time import assert_ends_within
from kvpact.errors import NoSuchTier, TierError
from kvpact.identity.keys import BlockKey, Namespace
from kvpact.tiers.awaited import open_tiers
from kvpact.tiers.base import HEADER_BYTES, Entry, RecordMac, Tier, TierHealth
from kvpact.tiers.objects.bucket import Bucket
from kvpact.tiers.objects.packs import HEAD_BYTES, Pack, PackMemory, decode_pack, encode_pack
from kvpact.tiers.objects.store import ObjectStore, open_objects
from kvpact.tiers.registry import TierContext
from kvpact.tiers.shared.store import RecordPieces, StoreError, group_name, key_of, record_name
from kvpact.tiers.shared.tier import SharedTier
from kvpact.tiers.urls import parse_tier_url
from kvpact_testkit.faults import Faults
from kvpact_testkit.sample_blocks import CANARY, Document, content, document, empty_buffers, filled_buffers
from kvpact_testkit.tier.conformance import Damage, StoreContext, TierConformance
from polling import until
from servers.object_server import ACCESS_KEY, CREDENTIALS, SECRET_KEY, Request, Spoiled, Traffic, object_server

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
        for name, text in (CREDENTIALS | {ENDPOINT: traffic.server}).items():
            patch.setenv(name, text)
        yield traffic


def s3_store(endpoint: str, place: str, timeout: str = "20s") -> ObjectStore:
    return open_objects(parse_tier_url(f"s3://{place}?endpoint={endpoint}&allow_http=true&timeout={timeout}"))


def overwrite(store: ObjectStore, name: str, data: bytes) -> None:
    """What another program does to an object."""
    obstore.put(store.bucket.client, name, data)


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

    def open_store(self, place: StoreContext) -> ObjectStore:
        raise NotImplementedError

    def open_tier(self, place: StoreContext) -> Tier:
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

    def damage(self, place: StoreContext, key: BlockKey, how: Damage) -> bool:
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

    def open_store(self, place: StoreContext) -> ObjectStore:
        return s3_store(os.environ[ENDPOINT], f"bucket/{place.name}")


class TestDirectoryOfObjects(ObjectSuite):
    machine_examples = 12

    def open_store(self, place: StoreContext) -> ObjectStore:
        return open_objects(parse_tier_url(f"file://{place.directory}?timeout=20s"))


_places = itertools.count()


class Scene:
    """One prefix of the bucket, and tiers that reach it through the proxy."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.place = f"bucket/scene-{next(_places)}"
        self.store = s3_store(traffic.server, self.place)
        self.group = group_name(NAMESPACE, RecordMac())

    def tier(self, timeout: str = "20s") -> SharedTier:
        """An engine that has just started."""
        return SharedTier(s3_store(self.traffic.endpoint, self.place, timeout), NAMESPACE, SLOT)

    def name(self, block: int, wanted: Document = DOCUMENT) -> str:
        return record_name(self.group, wanted.keys[block])

    def packs(self) -> dict[str, list[str]]:
        """Each object of blocks, and the names of the records in it."""
        objects = [name for page in self.store.bucket.pages(self.group) for name in page if key_of(name)]
        return {name: list(records_in(self.store, name)) for name in objects}

    def object(self, block: int) -> bytes:
        whole = self.store.bucket.get(self.name(block))
        assert whole is not None
        return bytes(whole.data)


@pytest.fixture
def scene(s3: Traffic) -> Iterator[Scene]:
    built = Scene(s3)
    yield built
    built.store.close()


def stored(tier: SharedTier, wanted: Document = DOCUMENT, start: int = 0, end: int = 8) -> int:
    return put_document(tier, wanted, SLOT, start, end)


def served(tier: SharedTier, wanted: Document = DOCUMENT, start: int = 0, end: int = 8) -> int:
    return served_of_document(tier, wanted, SLOT, start, end)


def test_blocks_written_together_are_one_object_and_one_of_them_is_a_range(scene: Scene) -> None:
    tier = scene.tier()
    with scene.traffic.counted() as writing:
        assert stored(tier) == 8
    puts = [request for request in writing if request.method == "PUT" and "/namespace" not in request.path]
    assert len(puts) == 1
    assert scene.packs() == {scene.name(0): [scene.name(block) for block in range(8)]}

    with scene.traffic.counted() as reading:
        assert served(tier, start=5, end=6) == 1
    assert [request.method for request in reading] == ["GET"]
    first, last = map(int, reading[0].range.removeprefix("bytes=").split("-"))
    assert last + 1 - first == HEADER_BYTES + SLOT

    with scene.traffic.counted() as reading:
        assert served(tier, start=2, end=7) == 5
    assert len(reading) == 1


def test_all_blocks_of_an_object_are_read_as_the_whole_object(scene: Scene) -> None:
    """A server may have to copy a range."""
    tier = scene.tier()
    stored(tier)
    with scene.traffic.counted() as reading:
        assert (served(tier), served(tier, end=7)) == (8, 7)
    assert [bool(request.range) for request in reading] == [False, True]


def test_what_stands_behind_the_last_block_of_an_object_is_not_asked_for(scene: Scene) -> None:
    stored(scene.tier())
    overwrite(scene.store, scene.name(0), scene.object(0) + bytes(1 << 20))
    with scene.traffic.counted() as reading:
        assert served(scene.tier()) == 8
    assert all(request.range for request in reading)


def test_an_engine_that_has_just_started_finds_a_block_in_the_middle_of_an_object(scene: Scene) -> None:
    stored(scene.tier())
    tier = scene.tier()
    with scene.traffic.counted() as requests:
        assert served(tier, start=3, end=5) == 2
    assert len(requests) == 3, "for the table, the blocks, and whether their writer has found them to be wrong"


def test_a_long_prompt_is_looked_up_in_few_rounds(scene: Scene) -> None:
    wanted = document("long", 64)
    writer = scene.tier()
    for start in range(0, 64, 4):
        assert stored(writer, wanted, start, start + 4) == 4
    assert len(scene.packs()) == 16
    tier = scene.tier()
    with scene.traffic.counted() as requests:
        assert tier.leading(wanted.keys) == 64
    assert len(requests) == 16
    with scene.traffic.counted() as requests:
        assert tier.leading(document("never stored", 64).keys) == 0
    assert len(requests) == 1


def test_requests_for_a_prompt_and_for_blocks_that_stand_for_themselves(scene: Scene) -> None:
    """What is missing costs no request more than it takes to find that out."""
    tier, alone = scene.tier(), document("alone", 4).keys

    def requests(call: Callable[[SharedTier], object], user: SharedTier = tier) -> tuple[object, int]:
        with scene.traffic.counted() as made:
            answer = call(user)
        return answer, len(made)

    assert requests(lambda tier: stored(tier, end=4)) == (4, 3), "a look, the namespace's description, an object"
    assert requests(lambda tier: stored(tier, start=4)) == (4, 3), "the object before, a look, an object"
    assert requests(lambda tier: stored(tier, start=4)) == (4, 2)
    assert requests(lambda tier: served(tier, start=2)) == (6, 2)
    longer = DOCUMENT.branch("longer", 8, 12)
    assert requests(lambda tier: tier.leading(longer.keys)) == (8, 3)
    assert requests(lambda tier: served(tier, longer, end=12), scene.tier()) == (8, 6), "and whose blocks are wrong"
    assert requests(lambda tier: served(tier, document("never stored", 64), end=64)) == (0, 1)

    blocks = filled_buffers(alone, SLOT, 2)
    entries = [Entry(key, block) for key, block in zip(alone[:2], blocks[:2], strict=True)]
    assert requests(lambda tier: tier.put(entries)) == ([True] * 2, 4)
    assert requests(lambda tier: tier.lookup(alone)) == ([True, True, False, False], 4)
    assert requests(lambda tier: tier.get(alone, empty_buffers(4, SLOT, 2))) == ([True, True, False, False], 4)


def test_blocks_that_stand_for_themselves_are_found_by_any_engine_in_any_order(scene: Scene) -> None:
    alone = document("alone", 4).keys
    blocks = zip(alone, filled_buffers(alone, SLOT, 2), strict=True)
    assert all(scene.tier().put([Entry(key, block) for key, block in blocks]))
    tier, buffers = scene.tier(), empty_buffers(2, SLOT, 2)
    assert tier.lookup([alone[3], DOCUMENT.keys[0], alone[1]]) == [True, False, True]
    assert tier.get([alone[2], alone[0]], buffers) == [True, True]
    assert [b"".join(buffer) for buffer in buffers] == [content(key, SLOT) for key in (alone[2], alone[0])]


def test_prompts_that_begin_alike_share_a_head(scene: Scene) -> None:
    first, second = scene.tier(), scene.tier()
    stored(first)
    assert stored(second, BRANCH, end=6) == 6
    assert scene.packs() == {
        scene.name(0): [scene.name(block) for block in range(8)],
        scene.name(3, BRANCH): [scene.name(block, BRANCH) for block in range(3, 6)],
    }
    for tier in (first, second, scene.tier()):
        assert (served(tier), served(tier, BRANCH)) == (8, 6)


def test_two_that_write_prompts_that_begin_alike_at_once_lose_nothing(scene: Scene) -> None:
    """The second one has looked before the first one wrote: its object is refused, and only what differs is stored."""
    first, second = scene.tier(), scene.tier()
    assert isinstance(second.store, ObjectStore)
    names = [scene.name(block, BRANCH) for block in range(6)]
    stored(first)
    records: list[RecordPieces] = [[bytes([block]) * 10] for block in range(6)]
    second.store.write_pack(names, records)
    assert list(scene.packs()[scene.name(3, BRANCH)]) == names[3:]
    assert served(second) == 8
    assert second.store.leading(names) == 6


def test_a_removed_block_is_gone_and_its_neighbours_in_the_object_stay(scene: Scene) -> None:
    tier = scene.tier()
    stored(tier)
    assert scene.tier().delete([DOCUMENT.keys[0], DOCUMENT.keys[4]]) == 2
    assert scene.packs() == {scene.name(0): [scene.name(block) for block in (1, 2, 3, 5, 6, 7)]}
    assert served(tier) == 0
    assert stored(tier, end=1) == 1
    assert served(scene.tier()) == 4
    assert stored(scene.tier()) == 8
    assert served(tier) == 8
    tier.clear()
    assert scene.packs() == {}


def test_one_who_knew_the_object_before_somebody_changed_it_is_served(scene: Scene) -> None:
    """From an object's middle, where it is found by the name of its first block alone."""
    tier = scene.tier()
    stored(tier)
    scene.tier().delete([DOCUMENT.keys[2]])
    with scene.traffic.counted() as requests:
        assert served(tier, start=4, end=6) == 2
    assert len(requests) == 3, "what was known is of another version; its table; the blocks"
    assert tier.counts().damaged == 0


@pytest.mark.parametrize(("status", "code"), [(500, "InternalError"), (503, "SlowDown")])
def test_a_server_that_is_ill_for_a_moment_is_asked_again(scene: Scene, status: int, code: str) -> None:
    stored(scene.tier())
    tier = scene.tier()
    refusals = iter(range(3))

    def spoil(request: Request) -> Spoiled | None:
        return Spoiled(status, code) if next(refusals, None) is not None else None

    with scene.traffic.spoiled(spoil):
        assert served(tier) == 8
    assert tier.health().ok


@pytest.mark.parametrize(("status", "code"), [(500, "InternalError"), (503, "SlowDown")])
def test_h10_a_server_that_stays_ill_is_a_miss_in_time(scene: Scene, status: int, code: str) -> None:
    stored(scene.tier())
    tier = scene.tier("600ms")
    calls: dict[Callable[[], int], float] = {
        lambda: tier.leading(DOCUMENT.keys): 0.9,
        lambda: served(tier): 0.9,
        lambda: stored(tier): 1.5,  # it looks what is there first, and then writes
    }
    with scene.traffic.spoiled(lambda request: Spoiled(status, code)):
        for call, most in calls.items():
            assert_ends_within(partial(seconds_of_a_miss, call), 0.0, most)
        assert f"HTTP {status} ({code})" in tier.health().reason or "within 0.6 s" in tier.health().reason
    assert tier.counts().failed_reads > 0
    assert (served(tier), stored(tier), tier.health().ok) == (8, 8, True)


def seconds_of_a_miss(call: Callable[[], int]) -> float:
    began = time.monotonic()
    assert call() == 0
    return time.monotonic() - began


def test_h10_a_delayed_answer_is_waited_for_no_longer_than_the_timeout(scene: Scene) -> None:
    stored(scene.tier())
    tier = scene.tier("500ms")
    assert tier.leading(DOCUMENT.keys) == 8
    buffers = empty_buffers(8, SLOT, 2)
    with scene.traffic.spoiled(lambda request: Spoiled(delay_s=5.0)):
        assert_ends_within(lambda: seconds_of_a_miss(lambda: get_chain(tier, DOCUMENT.keys, buffers)), 0.45, 0.75)
    assert all(not any(piece) or bytes(piece) == bytes([CANARY]) * len(piece) for buffer in buffers for piece in buffer)
    assert "0.5 s" in tier.health().reason
    assert served(tier) == 8


def test_h31_a_body_that_is_cut_is_a_miss(scene: Scene) -> None:
    stored(scene.tier())
    tier = scene.tier("1s")
    assert tier.leading(DOCUMENT.keys) == 8
    with scene.traffic.spoiled(lambda request: Spoiled(part=0.5)):
        assert served(tier) == 0
    assert tier.counts().damaged == 0
    assert served(tier) == 8


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("spoil", "left"),
    [
        (lambda pack: flipped(pack, len(pack) - 3 * (HEADER_BYTES + SLOT) - 5), 4),
        (lambda pack: flipped(pack, HEAD_BYTES + 20), 0),
        (lambda pack: flipped(pack, 3), 0),
        (lambda pack: pack[: len(pack) - 2 * (HEADER_BYTES + SLOT) - 5], 5),
        (lambda pack: pack[: HEAD_BYTES + 5], 0),
        (lambda pack: pack[:10], 0),
        (lambda pack: b"", 0),
        (lambda pack: pack + b"more", 8),
    ],
    ids=[
        "a payload",
        "the table",
        "the head",
        "cut in a payload",
        "cut in the table",
        "cut in the head",
        "empty",
        "more",
    ],
)
@pytest.mark.parametrize("knows", [True, False], ids=["to one who knew it", "to one who did not"])
def test_h22_a_damaged_object_is_a_miss_and_the_next_write_mends_it(
    scene: Scene, spoil: Callable[[bytes], bytes], left: int, knows: bool
) -> None:
    writer = scene.tier()
    stored(writer)
    tier = writer if knows else scene.tier()
    overwrite(scene.store, scene.name(0), spoil(scene.object(0)))
    assert served(tier) == left
    assert stored(tier) == 8
    assert (served(tier), served(scene.tier())) == (8, 8)


@pytest.mark.parametrize("entry", [b"\xff\xff", struct.pack("<HQ", 9, 5) + b"\xff" * 9, struct.pack("<HQ", 64, 2**60)])
def test_h80_a_forged_table_is_a_miss(scene: Scene, entry: bytes) -> None:
    """A table's checksum is for damage: somebody who may write to the bucket can make one."""
    head = struct.pack("<8sIIQ", b"kvpactPK", 1, 1, len(entry))
    checksum = struct.pack("<Q", xxh3_64_intdigest(head + entry))
    overwrite(scene.store, scene.name(0), head + checksum + entry)
    tier = scene.tier()
    assert (tier.leading(DOCUMENT.keys), served(tier), list(tier.scan())) == (0, 0, [])
    assert (stored(tier), served(scene.tier())) == (8, 8)


@pytest.mark.parametrize("forged", ["another block's record", "a record of another length"])
def test_h80_a_forged_place_of_a_record_is_never_served(scene: Scene, forged: str) -> None:
    tier = scene.tier()
    stored(tier)
    pack: dict[str, RecordPieces] = {name: [record] for name, record in records_in(scene.store, scene.name(0)).items()}
    pack[scene.name(1)] = pack[scene.name(2)] if "block" in forged else [b"short"]
    overwrite(scene.store, scene.name(0), encode_pack(pack))
    assert served(tier) == 1
    assert tier.counts().damaged == 1
    assert (stored(tier), served(tier)) == (8, 8)


def test_an_object_that_expired_is_a_miss(scene: Scene) -> None:
    tier = scene.tier()
    stored(tier)
    scene.store.bucket.delete(scene.name(0))
    assert (served(tier), tier.counts().damaged, tier.health().ok) == (0, 0, True)
    assert (stored(tier), served(tier)) == (8, 8)


def test_a_missing_bucket_is_said_when_the_tier_is_opened(s3: Traffic) -> None:
    with pytest.raises(TierError, match=r"s3://nobody/x: there is no such bucket"):
        s3_store(s3.endpoint, "nobody/x")


@pytest.mark.parametrize("code", ["SignatureDoesNotMatch", "InvalidAccessKeyId", "AccessDenied"])
def test_wrong_credentials_are_said_and_never_shown(s3: Traffic, code: str) -> None:
    with s3.spoiled(lambda request: Spoiled(403, code)), pytest.raises(TierError) as refused:
        s3_store(s3.endpoint, "bucket/x")
    assert f"HTTP 403 ({code})" in str(refused.value)
    assert ACCESS_KEY not in str(refused.value)
    assert SECRET_KEY not in str(refused.value)


@pytest.mark.parametrize(("status", "code"), [(403, "QuotaExceeded"), (400, "XMinioAdminBucketQuotaExceeded")])
def test_h95_h104_a_bucket_that_is_full_is_no_matter_of_credentials(scene: Scene, status: int, code: str) -> None:
    tier = scene.tier("600ms")
    with scene.traffic.spoiled(lambda request: Spoiled(status, code) if request.method == "PUT" else None):
        assert stored(tier) == 0
    right = f"is full: HTTP {status} ({code}); raise its quota, or have a lifecycle rule remove objects"
    assert right in tier.health().reason
    assert stored(tier) == 8
    assert tier.health() == TierHealth(ok=True)


@pytest.mark.parametrize(
    ("name", "url"),
    [("AWS_ENDPOINT_URL", "s3://bucket/x"), ("AZURE_ENDPOINT", "az://bucket/x"), ("GOOGLE_BASE_URL", "gs://bucket/x")],
)
def test_h104_an_endpoint_of_the_environment_that_is_not_encrypted_is_named(
    s3: Traffic, monkeypatch: pytest.MonkeyPatch, name: str, url: str
) -> None:
    monkeypatch.setenv(name, s3.server)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "tests")
    with pytest.raises(TierError) as refused:
        open_objects(parse_tier_url(f"{url}?anonymous=true"))
    assert str(refused.value) == (
        f"{url}: its endpoint, which the environment names (like AWS_ENDPOINT_URL), is not encrypted; use https, or "
        'add "allow_http=true"'
    )


def test_credentials_that_end_later_are_a_miss_and_never_shown(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    stored(scene.tier())
    tier = scene.tier()
    with scene.traffic.spoiled(lambda request: Spoiled(403, "ExpiredToken")):
        assert (tier.leading(DOCUMENT.keys), served(tier), stored(tier)) == (0, 0, 0)
        said = tier.health().reason + caplog.text
    assert "HTTP 403 (ExpiredToken)" in said
    assert ACCESS_KEY not in said
    assert SECRET_KEY not in said
    assert served(tier) == 8


def test_a_server_that_is_away_does_not_keep_the_engine_from_starting(s3: Traffic) -> None:
    tier = SharedTier(s3_store("http://127.0.0.1:1", "bucket/x", "300ms"), NAMESPACE, SLOT)
    assert tier.leading(DOCUMENT.keys) == 0
    assert not tier.health().ok


def test_h97_a_bucket_that_refuses_at_the_start_is_used_when_it_no_longer_does(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    url = parse_tier_url(f"s3://bucket/late?endpoint={scene.traffic.endpoint}&allow_http=true&timeout=20s")
    with scene.traffic.spoiled(lambda request: Spoiled(403, "AccessDenied")):
        (tier,) = open_tiers([url], TierContext(NAMESPACE, SLOT), 20.0)
        assert "HTTP 403 (AccessDenied)" in tier.health().reason
    until(lambda: tier.there is not None)
    assert isinstance(tier.there, SharedTier)
    assert stored(tier.there) == 8
    assert SECRET_KEY not in caplog.text
    tier.close()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket/x?endpoint=http://127.0.0.1:9", 'add "allow_http=true"'),
        ("s3://me:hidden@bucket/x", "leave them out of the URL"),
        ("s3://bucket/x?endpoint=nonsense", "is no address"),
        ("s3://bucket/x?endpoint=https://me:hidden@store", "is no address"),
        ("az://container/x", "obstore does not take these options"),
    ],
)
def test_what_somebody_must_mend_is_said_when_the_tier_is_opened(url: str, said: str) -> None:
    with pytest.raises((TierError, ValueError)) as refused:
        open_objects(parse_tier_url(url))
    assert said in str(refused.value)
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "given", "said"),
    [
        ("s3://b", {"AWS_ACCESS_KEY_ID": ""}, "AWS_ACCESS_KEY_ID is empty in the environment; set it"),
        ("s3://b", {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "AWS_ACCESS_KEY_ID is empty"),
        ("s3://b", {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": ""}, "AWS_SECRET_ACCESS_KEY is empty"),
        ("s3://b", {"AWS_SECRET_ACCESS_KEY": "hidden"}, "AWS_SECRET_ACCESS_KEY is set in the environment and AWS_ACC"),
        ("gs://b", {"GOOGLE_SERVICE_ACCOUNT": ""}, "GOOGLE_SERVICE_ACCOUNT is empty in the environment"),
        ("az://b", {"AZURE_STORAGE_ACCOUNT_KEY": ""}, "AZURE_STORAGE_ACCOUNT_KEY is empty in the environment"),
    ],
)
def test_a_variable_with_credentials_that_cannot_be_right_is_named(
    monkeypatch: pytest.MonkeyPatch, url: str, given: dict[str, str], said: str
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(NoSuchTier) as told:
        open_objects(parse_tier_url(f"{url}/x?timeout=1s"))
    assert said in str(told.value)
    assert "hidden" not in str(told.value)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_every_kind_of_object_store_opens(scheme: str, s3: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint speaks S3 alone: here it is shown which requests the other kinds make there."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    url = f"{scheme}://bucket/scheme?endpoint={s3.endpoint}&allow_http=true&anonymous=true&timeout=20s"
    with s3.counted() as requests:
        store = open_objects(parse_tier_url(url))
        assert store.exists(["group/name"]) == [False]
    assert store.kind == "object"
    assert unquote(requests[-1].path) == "/bucket/scheme/group/name"
    store.close()


def test_a_client_that_panics_is_a_store_that_refuses(scene: Scene) -> None:
    """A panic in Rust is no Exception: it would end the engine."""

    class PanicException(BaseException):
        __module__ = "pyo3_runtime"

    def panics(name: str) -> None:
        raise PanicException(SECRET_KEY)

    with pytest.raises(StoreError, match="broke down") as refused:
        scene.store.bucket.each(panics, ["name"])
    assert SECRET_KEY not in str(refused.value)


def test_without_obstore_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(TierError, match=r"pip install 'kvpact\[s3\]'"):
        open_objects(parse_tier_url("s3://bucket/x"))


def test_h51_what_is_remembered_of_objects_is_bounded() -> None:
    memory = PackMemory(limit=100)
    for number in range(50):
        memory.learn(Pack(f"g/{number}", {f"g/{number}-{block}": (block, 1) for block in range(10)}))
        memory.check()
        assert len(memory) <= 100
    assert memory.holders("g/0-0") == ()
    assert memory.holders("g/49-9") == ("g/49",)
    memory.learn(Pack("g/48", {"g/49-9": (0, 1), "g/48-0": (1, 1)}))
    memory.forget("g/49")
    memory.check()
    assert memory.holders("g/49-9") == ("g/48",)
    assert memory.locate(["g/49-8", "g/48-1"]) == {}
