"""The Redis tier over real servers: every promise of a tier, and what servers, networks and neighbours do to it."""

from __future__ import annotations

import binascii
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from random import Random
from urllib.parse import quote

import pytest
import redis

from chain_calls import get_chain, put_chain, put_document, served_of_document
from kvpact.errors import TierError
from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import HEADER_BYTES, UNSEALED, RecordMac, Tier
from kvpact.tiers.redis.connections import Connection, Words
from kvpact.tiers.redis.opening import open_redis
from kvpact.tiers.redis.parts import SPLIT_BYTES
from kvpact.tiers.redis.store import ORPHAN_SECONDS, RedisStore
from kvpact.tiers.shared.store import (
    RecordBuffer,
    RecordPieces,
    RecordStore,
    StoredRecord,
    StoreError,
    StoreUsage,
    group_name,
    key_of,
    record_name,
)
from kvpact.tiers.shared.tier import SharedTier
from kvpact.tiers.urls import parse_tier_url
from kvpact_testkit.faults import Faults
from kvpact_testkit.sample_blocks import Document, document, empty_buffers
from kvpact_testkit.tier.buffers import give_back, require_untouched
from kvpact_testkit.tier.conformance import Damage, StoreContext, TierConformance
from kvpact_testkit.tier.harness import NAMESPACE
from polling import until
from servers.redis_server import Authority, RedisServer, redis_cluster, redis_sentinel, redis_server

URL_VARIABLE = "KVPACT_TESTS_REDIS"


class PlacedStore(RecordStore):
    """One place of many on one server: a `RedisStore` under names of its own, which announces its calls."""

    kind = "redis"

    def __init__(self, store: RedisStore, place: StoreContext, faults: Faults) -> None:
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
    machine_examples = 4
    faults = Faults()
    valkey = False
    options = "/3?timeout=20"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
        with (
            redis_server(tmp_path_factory.mktemp("redis"), valkey=cls.valkey) as server,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setenv(URL_VARIABLE, f"redis://{server.address}{cls.options}")
            yield server

    def open_tier(self, place: StoreContext) -> Tier:
        store = PlacedStore(_open(os.environ[URL_VARIABLE]), place, self.faults)
        return SharedTier(store, place.namespace, place.slot_bytes, seal=place.seal)

    @contextmanager
    def store_calls(self, faults: Faults) -> Iterator[None]:
        self.faults = faults
        yield

    def damage(self, place: StoreContext, key: BlockKey, how: Damage) -> bool:
        store = PlacedStore(_open(os.environ[URL_VARIABLE]), place, Faults())
        group = group_name(place.namespace, place.seal)
        name = record_name(group, key)
        others = [other.name for other in store.names(group) if key_of(other.name) and other.name != name]
        record, other = (_record(store, one) for one in (name, others[0]))
        if how is Damage.GONE:
            store.remove([name])
        else:
            store.write([name], [[how.of(record, other)]])
        store.close()
        return True


def _open(url: str) -> RedisStore:
    return open_redis(parse_tier_url(url))


def _record(store: RecordStore, name: str) -> bytes:
    record = bytearray(store.size(name) or 0)
    assert store.read([name], [[memoryview(record)]]) == [True]
    return bytes(record)


class TestOneServer(RedisConformance):
    pass


class TestSplitAndSealedRecords(RedisConformance):
    slot_bytes = 3 * 4096 + 5
    seal = RecordMac.from_secret(b"the key of our engines")
    options = "?timeout=20&part=4KiB&expiry=1h"


class TestCluster(RedisConformance):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
        with redis_cluster(tmp_path_factory.mktemp("cluster")) as nodes, pytest.MonkeyPatch.context() as patch:
            patch.setenv(URL_VARIABLE, f"redis+cluster://{nodes[0].address},{nodes[1].address}?timeout=20")
            yield nodes


class TestValkey(RedisConformance):
    valkey = True


SLOT = 64 << 10
DOCUMENT = document("document", 12)
SECRET = "p%40ss: wörd/?#"


def opened(url: str, slot_bytes: int = SLOT) -> SharedTier:
    return SharedTier(_open(url), NAMESPACE, slot_bytes)


def stored(tier: SharedTier, wanted: Document = DOCUMENT) -> int:
    return put_document(tier, wanted, _slot(tier))


def served(tier: SharedTier, wanted: Document = DOCUMENT) -> int:
    return served_of_document(tier, wanted, _slot(tier))


def _slot(tier: SharedTier) -> int:
    assert tier.store.record_bytes is not None
    return tier.store.record_bytes - HEADER_BYTES


def seconds(call: Callable[[], object]) -> float:
    begin = time.monotonic()
    call()
    return time.monotonic() - begin


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """A server that is as good as new."""
    with shared_server.client() as client:
        client.flushall()
    return shared_server


def test_valkey_is_what_is_tested_under_this_name_and_its_clusters_too(tmp_path: Path) -> None:
    with redis_cluster(tmp_path, valkey=True) as nodes:
        for node in nodes:
            with node.client() as client:
                assert client.info("server")["server_name"] == "valkey"
        with closing(opened(f"redis+cluster://{nodes[0].address}")) as tier:
            assert (stored(tier), served(tier)) == (12, 12)
        with closing(opened(f"redis+cluster://{nodes[2].address}")) as other:
            assert (other.leading(DOCUMENT.keys), served(other)) == (12, 12)
            assert other.delete(DOCUMENT.keys[5:]) == 7
            assert served(other) == 5


# Who may, and over what


def test_a_rotated_password_is_taken_from_its_file_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "password"
    file.write_text("the first secret\n")
    with (
        redis_server(tmp_path / "redis", password="the first secret") as server,
        closing(opened(f"redis://{server.address}?password_file={file}")) as tier,
    ):
        assert (stored(tier), served(tier)) == (12, 12)
        with server.client() as client:
            client.config_set("requirepass", "the second secret")
            client.client_kill_filter(_type="normal", skipme=True)
        assert (served(tier), tier.leading(DOCUMENT.keys), stored(tier)) == (0, 0, 0)
        assert not tier.health().ok
        assert "refuses the user or the password" in tier.health().reason
        file.write_text("the second secret\n")
        assert (served(tier), stored(tier), tier.health().ok) == (12, 12, True)
        file.unlink()
        with server.client(password="the second secret") as client:
            client.client_kill_filter(_type="normal", skipme=True)
        assert served(tier) == 0
        assert f"cannot read the password file {file}" in tier.health().reason
        assert "secret" not in caplog.text + tier.health().reason


def all_it_says(thing: object) -> str:
    """The text of an object, and of all that it holds."""
    return repr(thing) + "".join(repr(held) + all_it_says(held) for held in getattr(thing, "__dict__", {}).values())


def test_a_user_and_a_password_of_any_characters_come_from_the_url(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with server.client() as client:
        client.acl_setuser("ki@ra", enabled=True, passwords=["+" + SECRET], keys=["kvpact*"], categories=["+@all"])
    account = f"{quote('ki@ra', safe='')}:{quote(SECRET, safe='')}"
    with closing(opened(f"redis://{account}@{server.address}/2")) as tier:
        assert (stored(tier), served(tier)) == (12, 12)
        assert tier.store.place == f"redis://{server.address}/2"
    with closing(opened(f"redis://{account}x@{server.address}/2")) as tier:
        assert isinstance(tier.store, RedisStore)
        assert served(tier) == 0
        told = tier.health().reason + caplog.text + all_it_says(tier.store)
        for secret in (SECRET, quote(SECRET, safe=""), "ki@ra", "ki%40ra"):
            assert secret not in told


def test_a_user_who_may_not_write_gets_no_error_but_no_block(server: RedisServer) -> None:
    with server.client() as client:
        client.acl_setuser("reader", enabled=True, nopass=True, keys=["*"], categories=["+@read", "+@connection"])
    with closing(opened(f"redis://reader:x@{server.address}")) as tier:
        assert (stored(tier), served(tier), tier.health().readable) == (0, 0, True)
        assert "NOPERM" in tier.health().reason


@pytest.mark.parametrize(("scheme", "path", "password"), [("rediss", "", "secret"), ("rediss+sentinel", "/m", "")])
def test_a_server_that_speaks_no_tls_is_said_to_speak_none(
    tmp_path: Path, scheme: str, path: str, password: str
) -> None:
    with (
        redis_server(tmp_path, password=password) as server,
        closing(_open(f"{scheme}://{server.address}{path}?timeout=3s")) as store,
    ):
        with pytest.raises(StoreError) as told:
            store.exists([f"{'0' * 16}/{'0' * 64}"])
        assert str(told.value).endswith(
            f"{server.address}: the server does not speak TLS; write redis instead of rediss"
        )


@pytest.mark.parametrize(("rule", "granted"), [("-scan", "+scan"), ("resetkeys", "~*")])
def test_what_a_user_of_redis_may_not_do_is_named_with_how_to_allow_it(tmp_path: Path, rule: str, granted: str) -> None:
    with redis_server(tmp_path) as server, closing(_open(f"redis://{server.address}")) as store:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "default", rule)
        with pytest.raises(StoreError, match="NOPERM") as told:
            [*store.names()] if granted == "+scan" else store.exists([f"{'0' * 16}/{'0' * 64}"])
        assert str(told.value).endswith(f"; allow it, like ACL SETUSER name {granted}")
        assert ("'scan' command" in str(told.value)) is (granted == "+scan")


def test_tls_is_verified_against_the_given_authority_and_no_other(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    with redis_server(tmp_path / "redis", tls=authority, password="secret") as server:
        url = f"rediss://:secret@{server.address}/0"
        with closing(opened(f"{url}?ca_file={authority.certificates}", 3 << 20)) as tier:
            assert (stored(tier), served(tier), served(tier)) == (12, 12, 12)
        with closing(opened(url)) as tier:
            assert served(tier) == 0
            assert "certificate verify failed" in tier.health().reason
        with closing(opened(f"{url}?ca_file={authority.certificates}".replace("127.0.0.1", "localhost"))) as tier:
            assert served(tier) == 0
            assert "localhost" in tier.health().reason


@pytest.mark.parametrize(
    ("url", "right"),
    [
        ("redis://cache/zero", "the path must be a database's number"),
        ("redis://one,two", "redis\\+cluster"),
        ("redis://cache:x", "a host and port like cache:6379 is needed"),
        ("redis://:hidden@:6379", "a host and port like cache:6379 is needed"),
        ("redis+cluster://cache/1", "one database only"),
        ("redis+sentinel://guard", 'like "redis\\+sentinel://'),
        ("rediss://cache?ca_file=/nowhere/ca", "there is no file /nowhere/ca"),
        ("redis://cache?cert_file=/nowhere/cert", "cert_file is for TLS; write rediss"),
        ("redis+sentinel://guard/mymaster?key_file=/nowhere/key", "key_file is for TLS; write rediss"),
        ("redis://cache?part=1GiB", "a size from 4KiB to 512MiB is needed"),
        ("redis://cache?expiry=0s", "a time must be more than 0"),
    ],
)
def test_a_url_that_cannot_work_is_refused_and_told_what_would_be_right(url: str, right: str) -> None:
    with pytest.raises((TierError, ValueError), match=right) as refused:
        _open(url)
    assert "hidden" not in str(refused.value)


def test_without_the_client_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(TierError, match=r"pip install 'kvpact\[redis\]'"):
        _open("redis://cache")


# What servers do


def test_what_the_server_evicts_is_a_miss_and_never_a_wrong_block(tmp_path: Path) -> None:
    options = ("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru", "--maxmemory-clients", "0")
    documents = [document(f"document {number}", 12) for number in range(24)]
    with redis_server(tmp_path, *options) as server:
        for url in (f"redis://{server.address}", f"redis://{server.address}?part=48KiB"):
            with closing(opened(url)) as tier:
                for wanted in documents:
                    stored(tier, wanted)
                found = [served(tier, wanted) for wanted in documents]
                assert sum(found) < 12 * len(documents)
                assert sum(found) > 0 or "part" in url, "of records in parts hardly any has kept them all"
                assert tier.counts().damaged == 0
                assert tier.capacity().capacity_bytes == 8 << 20
            with server.client() as client:
                assert client.info("stats")["evicted_keys"] > 0
                client.flushall()


def test_a_server_that_is_full_and_evicts_nothing_takes_what_fits(tmp_path: Path) -> None:
    documents = [document(f"document {number}", 12) for number in range(12)]
    with (
        redis_server(tmp_path, "--maxmemory", "6mb") as server,
        closing(opened(f"redis://{server.address}")) as tier,
    ):
        assert min(stored(tier, wanted) for wanted in documents) < 12
        assert (tier.health().ok, tier.counts().dropped_writes > 0) == (False, True)
        assert "OOM" in tier.health().reason
        assert tier.health().reason.endswith("; set its maxmemory-policy to allkeys-lru"), "H104: and what is right"
        for wanted in documents:
            assert served(tier, wanted) == tier.leading(wanted.keys)
        assert served(tier, documents[0]) == 12


def test_a_server_that_is_killed_and_restarted_is_used_again(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, closing(opened(f"redis://{server.address}")) as tier:
        assert (stored(tier), served(tier)) == (12, 12)
        server.kill()
        assert (served(tier), stored(tier), tier.leading(DOCUMENT.keys)) == (0, 0, 0)
        assert "Connection refused" in tier.health().reason
        server.start()
        assert (served(tier), stored(tier), served(tier)) == (0, 12, 12)
        assert tier.health().ok
        server.kill()
        server.start()
        assert (tier.leading(DOCUMENT.keys), tier.health().ok) == (0, True), "a connection of old times fails no call"


def test_h21_a_server_that_stops_costs_one_timeout_and_writes_into_no_buffer_later(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, closing(opened(f"redis://{server.address}?timeout=0.3")) as tier:
        assert stored(tier) == 12
        buffers = empty_buffers(12, SLOT)
        arrived: list[int] = []
        server.pause()
        for _ in range(2):  # a connection that is there, and a new one
            assert seconds(lambda: arrived.append(get_chain(tier, DOCUMENT.keys, buffers))) < 1.0
        assert seconds(lambda: arrived.append(tier.leading(DOCUMENT.keys))) < 1.0
        assert seconds(lambda: arrived.append(put_chain(tier, DOCUMENT.keys, buffers))) < 1.5
        assert arrived == [0, 0, 0, 0]
        assert "no answer within 0.3 s" in tier.health().reason or "Timeout" in tier.health().reason
        give_back(buffers)
        server.go_on()
        require_untouched(buffers, 0.3)
        assert (served(tier), stored(tier), tier.health().ok) == (12, 12, True)


def test_many_blocks_are_looked_up_in_one_round_trip(server: RedisServer) -> None:
    with closing(opened(f"redis://{server.address}")) as tier, server.client() as client:
        assert stored(tier, DOCUMENT) == 12
        longer = DOCUMENT.branch("longer", 12, 5000)
        before = client.info("stats")["total_reads_processed"]
        assert tier.leading(longer.keys) == 12
        reads = client.info("stats")["total_reads_processed"] - before
        assert reads < 100, "a server reads 5000 commands in pieces of 16 KiB, not one by one"


def test_what_was_flushed_is_a_miss(server: RedisServer) -> None:
    with closing(opened(f"redis://{server.address}")) as tier:
        assert stored(tier) == 12
        with server.client() as client:
            client.flushall()
        assert (tier.leading(DOCUMENT.keys), served(tier), tier.counts().damaged, tier.health().ok) == (0, 0, 0, True)
        assert (stored(tier), served(tier)) == (12, 12)


def test_a_neighbours_key_of_another_type_is_a_miss_until_the_block_is_stored_again(server: RedisServer) -> None:
    with closing(opened(f"redis://{server.address}")) as tier:
        assert stored(tier) == 12
        with server.client() as client:
            key = f"kvpact:{record_name(group_name(NAMESPACE, UNSEALED), DOCUMENT.keys[4])}"
            client.delete(key)
            client.lpush(key, "not ours")
        assert served(tier) == 4
        assert (stored(tier), served(tier)) == (12, 12)


# What networks do


class Proxy:
    """Between a client and a server. Of what the server says, `limit` bytes get through; each `pause` seconds a few."""

    def __init__(self, server: RedisServer) -> None:
        self.limit = sys.maxsize
        self.pause = 0.0
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", self._server.port))
                threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(64 if answers and self.pause else 4096):
                if answers:
                    time.sleep(self.pause)
                    data, self.limit = data[: self.limit], max(0, self.limit - len(data))
                    sink.sendall(data)
                    if not self.limit:
                        break
                else:
                    sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    proxy = Proxy(server)
    yield proxy
    proxy.close()


@pytest.mark.parametrize("part", ["64MiB", "16KiB"])
def test_h31_a_connection_that_is_cut_within_a_value_is_a_miss(proxy: Proxy, part: str) -> None:
    with closing(opened(f"redis://{proxy.address}?part={part}")) as tier:
        assert (stored(tier), served(tier)) == (12, 12)
        for limit in (3, 300, 5 * SLOT + 1000, 12 * SLOT + 100):
            proxy.limit = limit
            buffers = empty_buffers(12, SLOT)
            assert get_chain(tier, DOCUMENT.keys, buffers) == 0
            assert (tier.health().ok, tier.counts().damaged) == (False, 0)
            give_back(buffers)
            proxy.limit = sys.maxsize
            require_untouched(buffers, 0.02)
            assert (served(tier), tier.health().ok) == (12, True)


def test_h21_a_value_that_trickles_ends_with_its_call(proxy: Proxy) -> None:
    """Every read of the socket gets something in time; the call as a whole does not."""
    with closing(opened(f"redis://{proxy.address}?timeout=0.4")) as tier:
        assert stored(tier) == 12
        proxy.pause = 0.01
        buffers = empty_buffers(12, SLOT)
        assert seconds(lambda: get_chain(tier, DOCUMENT.keys, buffers)) < 1.0
        assert "no answer within 0.4 s" in tier.health().reason
        give_back(buffers)
        proxy.pause = 0.0
        require_untouched(buffers)
        assert served(tier) == 12


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n", b"*1\r\n", b"$-7\r\n", b":1\r\n", b"x" * 64])
def test_a_server_that_speaks_something_else_is_an_error_and_no_crash(answer: bytes) -> None:
    def speak(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                listener.accept()[0].sendall(answer * 5000)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=speak, args=(listener,), daemon=True).start()
        with closing(opened(f"redis://127.0.0.1:{listener.getsockname()[1]}?timeout=0.2")) as tier:
            tier.leading(DOCUMENT.keys), stored(tier)
            with pytest.raises(TierError):
                tier.delete(DOCUMENT.keys)
            assert (served(tier), list(tier.scan()), tier.health().ok) == (0, [], False)
        listener.shutdown(socket.SHUT_RDWR)


# Records in parts, and their time


def test_a_split_record_that_lost_a_part_is_not_there_and_the_next_write_mends_it(server: RedisServer) -> None:
    with closing(opened(f"redis://{server.address}?part=16KiB")) as tier, server.client() as client:
        assert stored(tier) == 12
        parts = client.keys("kvpact-part:*")
        assert len(parts) == 12 * 5  # header and block need a fifth
        for part in sorted(parts)[:: len(parts)]:
            client.delete(part)
        held = tier.leading(DOCUMENT.keys)
        assert held < 12
        assert (served(tier), tier.counts().damaged) == (held, 0)
        assert (stored(tier), served(tier)) == (12, 12)
        assert len(client.keys("kvpact-part:*")) == 12 * 5, "the parts of the record that was replaced are gone"
        assert set(map(client.ttl, client.keys("kvpact-part:*"))) == {-1}
        assert tier.delete(DOCUMENT.keys) == 12
        assert client.keys("kvpact-part:*") == []


def test_a_split_record_that_is_removed_while_it_is_looked_at_is_a_miss_and_not_damaged(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(opened(f"redis://{server.address}?part=16KiB")) as tier, server.client() as client:
        assert stored(tier) == 12
        client.delete(*client.keys(f"kvpact-part:*{DOCUMENT.keys[0].hex()}*")[:1])  # so that its length is asked for
        send, looks = Connection.send, 0

        def look_too_late(connection: Connection, *words: Words) -> None:
            nonlocal looks
            if words[0] == b"GETRANGE" and words[3] == b"%d" % SPLIT_BYTES:
                looks += 1
                if looks == 2:  # the first look found that it is there
                    client.delete(words[1])
            send(connection, *words)

        monkeypatch.setattr(Connection, "send", look_too_late)
        assert (served(tier), looks, tier.counts().damaged) == (0, 2, 0)


def test_the_parts_of_a_writer_that_died_are_never_seen_and_expire(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(BaseException):
        pass

    with closing(opened(f"redis://{server.address}?part=16KiB")) as tier, server.client() as client:
        assert stored(tier, document("another", 1)) == 1
        send = Connection.send

        def die_before_the_heads(connection: Connection, *words: Words) -> None:
            if words[0] == b"SET" and words[-1] == b"GET":
                raise Died
            send(connection, *words)

        monkeypatch.setattr(Connection, "send", die_before_the_heads)
        with pytest.raises(Died):
            stored(tier)
        assert tier.leading(DOCUMENT.keys) == 0
        left = client.keys("kvpact-part:*")
        assert sum(0 < client.ttl(part) <= ORPHAN_SECONDS for part in left) == 12 * 5


@pytest.mark.parametrize("part", ["64MiB", "16KiB"])
def test_an_expiry_counts_from_the_last_write_or_read(server: RedisServer, part: str) -> None:
    with closing(opened(f"redis://{server.address}?expiry=1h&part={part}")) as tier, server.client() as client:
        assert stored(tier) == 12
        keys = [key for key in client.keys("*") if b"/namespace" not in key]
        assert all(3500 < client.ttl(key) <= 3600 for key in keys)
        for key in keys:
            client.expire(key, 50)
        assert served(tier) == 12
        assert all(3500 < client.ttl(key) <= 3600 for key in keys)


# Many servers


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Its keys take a second."""
    return Authority.create(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


def test_a_cluster_holds_blocks_on_all_its_masters_and_lists_them_all(cluster: list[RedisServer]) -> None:
    wanted = document("longer", 60)
    with closing(opened(f"redis+cluster://{cluster[2].address}", 4096)) as tier:
        tier.clear()
        assert (stored(tier, wanted), served(tier, wanted)) == (60, 60)
        for node in cluster:
            with node.client() as client:
                assert client.dbsize() > 5
        assert {header.key for header in tier.scan()} == set(wanted.keys)
        assert {record.nbytes for record in tier.store.names() if key_of(record.name)} == {HEADER_BYTES + 4096}
        assert tier.store.usage().used_bytes > 3 << 20
        tier.clear()
        assert list(tier.store.names()) == []


def test_a_cluster_is_reached_over_tls_as_its_user(tmp_path: Path, authority: Authority) -> None:
    with redis_cluster(tmp_path, tls=authority, password="secret") as nodes:
        url = f"rediss+cluster://:secret@{nodes[0].address}?timeout=10&ca_file={authority.certificates}"
        with closing(opened(url)) as tier:
            assert (stored(tier), served(tier), len(list(tier.scan()))) == (12, 12, 12)


def test_blocks_are_found_when_their_slots_have_moved_to_another_master(cluster: list[RedisServer]) -> None:
    with closing(opened(f"redis+cluster://{cluster[0].address},{cluster[1].address}")) as tier:
        tier.clear()
        assert stored(tier) == 12
        key = f"kvpact:{record_name(group_name(NAMESPACE, UNSEALED), DOCUMENT.keys[5])}".encode()
        slot = binascii.crc_hqx(key, 0) % 16384
        before = next(number for number in range(3) if slot < 16384 * (number + 1) // 3)
        move_slot(cluster, slot, before, (before + 1) % 3, key)
        try:
            assert (served(tier), tier.health().ok) == (12, True)
            assert (tier.delete(DOCUMENT.keys), stored(tier), served(tier)) == (12, 12, 12)
        finally:
            move_slot(cluster, slot, (before + 1) % 3, before, key)
        assert tier.delete(DOCUMENT.keys) == 12


def move_slot(cluster: list[RedisServer], slot: int, source: int, target: int, key: bytes) -> None:
    """What `redis-cli --cluster reshard` does."""
    with ExitStack() as stack:
        clients = [stack.enter_context(node.client()) for node in cluster]
        names = [client.execute_command("CLUSTER", "MYID").decode() for client in clients]
        clients[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[source])
        clients[source].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[target])
        keys = clients[source].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100)
        assert key in keys
        host, port = cluster[target].address.split(":")
        clients[source].execute_command("MIGRATE", host, port, "", 0, 5000, "KEYS", *keys)
        for client in (clients[target], clients[source], *clients):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", names[target])


def test_a_seed_that_does_not_answer_does_not_keep_a_cluster_from_being_found(cluster: list[RedisServer]) -> None:
    silent = socket.create_server(("127.0.0.1", 0), backlog=0)
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    with silent, closing(opened(f"redis+cluster://{address},{cluster[1].address}?timeout=1")) as tier:
        assert (stored(tier), served(tier), tier.delete(DOCUMENT.keys)) == (12, 12, 12)


def test_a_master_of_a_cluster_that_is_killed_costs_bounded_time_until_it_is_back(cluster: list[RedisServer]) -> None:
    with closing(opened(f"redis+cluster://{cluster[0].address},{cluster[1].address}?timeout=1")) as tier:
        assert stored(tier) == 12
        cluster[0].kill()
        try:
            assert seconds(lambda: (tier.leading(DOCUMENT.keys), served(tier), stored(tier))) < 6
            assert not tier.health().ok
        finally:
            cluster[0].start()
        until(lambda: stored(tier) == 12, what="blocks are stored again")
        assert (served(tier), tier.counts().damaged, tier.delete(DOCUMENT.keys)) == (12, 0, 12)


def test_sentinels_say_which_server_is_the_master_also_after_a_failover(tmp_path: Path) -> None:
    with ExitStack() as stack:
        enter = stack.enter_context
        first = enter(redis_server(tmp_path / "first", "--repl-diskless-sync-delay", "0"))
        second = enter(redis_server(tmp_path / "second", "--replicaof", "127.0.0.1", str(first.port)))
        replica = enter(second.client())
        until(lambda: replica.info("replication")["master_link_status"] == "up", what="the replica follows")
        sentinel = enter(redis_sentinel(tmp_path / "sentinel", first))
        tier = enter(closing(opened(f"redis+sentinel://127.0.0.1:1,{sentinel.address}/mymaster/0?timeout=1")))
        assert (stored(tier), served(tier)) == (12, 12)
        until(lambda: fail_over(sentinel), what="the sentinel begins a failover")
        until(lambda: replica.info("replication")["role"] == "master", what="the replica is the master")
        first.kill()
        until(lambda: stored(tier) == 12, what="blocks are stored again")
        assert (stored(tier), served(tier), tier.health().ok) == (12, 12, True)
        assert replica.dbsize() >= 12


def test_h101_sentinels_have_a_password_of_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a common chart has it by default; read from its file at each connection."""
    file = tmp_path / "password"
    file.write_text("of the guards\n")
    with (
        redis_server(tmp_path / "master", password="of-the-store") as master,
        redis_sentinel(tmp_path / "sentinel", master, password="of the guards") as sentinel,
    ):
        url = f"redis+sentinel://:of-the-store@{sentinel.address}/mymaster/0?timeout=2"
        with closing(opened(f"{url}&sentinel_password_file={file}")) as tier:
            assert (stored(tier), served(tier)) == (12, 12)
            file.write_text("changed")
            tier.store.close()
            master.kill()  # so that they are asked again
            assert served(tier) == 0
            until(
                lambda: served(tier) or "refuses the user or the password" in tier.health().reason,
                what="it is read",
                every=0.05,
            )
            file.write_text("of the guards")
            master.start()
            until(lambda: stored(tier) == 12, what="blocks are stored again")
        with closing(opened(f"{url}&sentinel_password=of%20the%20guards&sentinel_user=default")) as tier:
            assert served(tier) == 12
        with closing(opened(url)) as tier:
            assert served(tier) == 0
            assert "a Sentinel says NOAUTH" in tier.health().reason
            assert "its password is sentinel_password_file's" in tier.health().reason
        with closing(opened(f"{url}&sentinel_password=wrong")) as tier:
            assert served(tier) == 0
            assert f"{sentinel.address} refuses the user or the password" in tier.health().reason
    for secret in ("of the guards", "of%20the%20guards", "of-the-store", "wrong"):
        assert secret not in caplog.text


@pytest.mark.parametrize(("scheme", "option"), [("rediss", ""), ("rediss", "false"), ("redis", "true")])
def test_h101_sentinels_and_their_master_are_reached_over_tls_or_one_of_them(
    tmp_path: Path, authority: Authority, scheme: str, option: str
) -> None:
    with (
        redis_server(tmp_path / "master", tls=authority if scheme == "rediss" else None) as master,
        redis_sentinel(tmp_path / "sentinel", master, tls=authority if option != "false" else None) as sentinel,
    ):
        url = f"{scheme}+sentinel://{sentinel.address}/mymaster/0?ca_file={authority.certificates}&timeout=10"
        with closing(opened(f"{url}&sentinel_tls={option}" if option else url)) as tier:
            assert (stored(tier), served(tier)) == (12, 12)


def test_h101_servers_that_ask_for_a_certificate_get_ours(tmp_path: Path, authority: Authority) -> None:
    """As Redis does by default over TLS."""
    certificate, key = authority.own_certificate
    with redis_server(tmp_path / "server", "--tls-auth-clients", "yes", tls=authority) as server:
        url = f"rediss://{server.address}?ca_file={authority.certificates}&timeout=5"
        with closing(opened(f"{url}&cert_file={certificate}&key_file={key}")) as tier:
            assert (stored(tier), served(tier)) == (12, 12)
        with closing(opened(url)) as tier:
            assert served(tier) == 0


def fail_over(sentinel: RedisServer) -> bool:
    with sentinel.client() as client:
        try:
            client.execute_command("SENTINEL", "FAILOVER", "mymaster")
        except redis.ResponseError:  # it does not know the replica yet
            return False
        return True


def write_for_a_while(url: str, seed: int) -> int:
    """Another engine: stores and reads documents that others store too, and says how many blocks it was served."""
    chance = Random(seed)
    with closing(opened(url)) as tier:
        found = 0
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            wanted = document(f"of both {chance.randrange(12)}", 8)
            if chance.random() < 0.1:
                tier.delete(wanted.keys[chance.randrange(8) :])
            stored(tier, wanted)
            found += served(tier, wanted)
        assert tier.health().ok, tier.health().reason
        return found


@pytest.mark.parametrize("part", ["64MiB", "16KiB"])
def test_two_engines_write_at_once_and_every_record_verifies(server: RedisServer, part: str) -> None:
    url = f"redis://{server.address}?part={part}&timeout=10"
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        working = [processes.submit(write_for_a_while, url, seed) for seed in range(2)]
        assert min(process.result(60) for process in working) > 0
    with closing(opened(url)) as tier:
        for number in range(12):
            wanted = document(f"of both {number}", 8)
            assert served(tier, wanted) == tier.leading(wanted.keys)
        assert tier.counts().damaged == 0
        assert all(record.nbytes == HEADER_BYTES + SLOT for record in tier.store.names() if key_of(record.name))
