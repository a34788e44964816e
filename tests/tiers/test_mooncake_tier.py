"""The Mooncake tier on a real master and real clients: it passes the suite of tiers, engines share what they store, and
no death or hang in the pool costs more than a miss and the timeout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from chain_calls import get_chain, put_document, served_of_document
from kvpact.errors import TierError
from kvpact.identity.keys import BlockKey, Namespace
from kvpact.metrics import series
from kvpact.tiers.awaited import open_tiers
from kvpact.tiers.base import HEADER_BYTES, UNSEALED, Tier
from kvpact.tiers.mooncake import store as mooncake
from kvpact.tiers.mooncake.store import MooncakeStore, open_mooncake
from kvpact.tiers.registry import TierContext
from kvpact.tiers.shared.store import StoreError, group_name, key_of, record_name
from kvpact.tiers.shared.tier import SharedTier
from kvpact.tiers.urls import parse_tier_url
from kvpact_testkit.faults import Crash, Faults
from kvpact_testkit.sample_blocks import CANARY, document, empty_buffers
from kvpact_testkit.tier.conformance import Damage, StoreContext, TierConformance
from polling import until
from scenes import NAMESPACE as SCENE_NAMESPACE
from scenes import PAGE, Scene, SceneRequest, tokens
from servers.mooncake_server import MooncakePool, free_port, mooncake_pool

NAMESPACE = Namespace({"model": "kvpact-tests", "dtype": "bytes", "block_size": "16"})
GROUP = group_name(NAMESPACE, UNSEALED)
SLOT = 1 << 20
TIMEOUT = 1.0
WAIT_SECONDS = 4 * TIMEOUT
"""Within which a call has ended that is given up after TIMEOUT, on a busy machine."""

OF_OTHER_PROCESSES = "KVPACT_TEST_MOONCAKE"
"""The environment variable in which the processes of a check find the pool."""


def open_store(url: str) -> MooncakeStore:
    return open_mooncake(parse_tier_url(f"{url}&timeout={TIMEOUT}"))


def open_tier(url: str) -> SharedTier:
    return SharedTier(open_store(url), NAMESPACE, SLOT)


put = partial(put_document, slot_bytes=SLOT)
served = partial(served_of_document, slot_bytes=SLOT)


def timed(call: Callable[[], Any]) -> Any:
    """What it returns; it must end in bounded time."""
    begun = time.monotonic()
    result = call()
    assert time.monotonic() - begun < WAIT_SECONDS
    return result


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[MooncakePool]:
    with mooncake_pool(tmp_path, 64) as its_pool:
        yield its_pool


class LastingClient:
    """One client for many tiers: to close one takes a second."""

    def __init__(self, store: MooncakeStore) -> None:
        self._client = store.client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def close(self) -> None:
        pass


class TestMooncakeTier(TierConformance):
    """Several tiers over one client of a pool, each with names of its own."""

    reopens = True
    bounded = False  # by whoever lends memory; the master evicts
    several_writers = True
    gives_up_after = 1.5 * TIMEOUT
    store: ClassVar[MooncakeStore | None] = None

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def started(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with mooncake_pool(tmp_path_factory.mktemp("mooncake"), 512) as its_pool:
            os.environ[OF_OTHER_PROCESSES] = its_pool.url()
            cls.store = open_store(its_pool.url())
            yield
            del os.environ[OF_OTHER_PROCESSES]
            cls.store.close()

    def open_tier(self, place: StoreContext) -> Tier:
        shared = self.store
        if shared is None:  # in another process
            shared = type(self).store = open_store(os.environ[OF_OTHER_PROCESSES])
        store = MooncakeStore(
            LastingClient(shared),
            shared.master,
            prefix=place.name,
            timeout=TIMEOUT,
            metrics_port=shared.metrics_port,
        )
        return SharedTier(store, place.namespace, place.slot_bytes, seal=place.seal)

    @contextmanager
    def store_calls(self, faults: Faults) -> Iterator[None]:
        call = MooncakeStore.call

        def watched(store: MooncakeStore, what: str, function: Callable[[], Any]) -> Any:
            crashes: list[Crash] = []

            def announced() -> Any:
                try:
                    (faults.before_read if what in ("look up", "read") else faults.before_write)()
                except Crash as crash:  # of the process, not of this thread
                    crashes.append(crash)
                    return None
                return function()

            result = call(store, what, announced)
            if crashes:
                raise crashes[0]
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MooncakeStore, "call", watched)
            yield

    def damage(self, place: StoreContext, key: BlockKey, how: Damage) -> bool:
        assert self.store is not None
        client = self.store.client
        group = f"{place.name}/{group_name(place.namespace, place.seal)}"
        name = f"{group}/{key.hex()}"
        listed = self.store.ask_master("/get_all_keys").splitlines()
        other = next(key for key in listed if key.startswith(group) and key != name and key_of(key.split("/", 1)[1]))
        record = how.of(client.get(name), client.get(other))
        assert client.remove(name, True) == 0
        if how is not Damage.GONE:
            assert client.put(name, record) == 0
        return True


def test_two_engines_share_what_they_store(pool: MooncakePool) -> None:
    """Another process stores and ends; what it stored lies in the pool."""
    theirs = (
        "import sys; from test_mooncake_tier import *; tier = open_tier(sys.argv[1]); "
        "assert put(tier, document('shared', 6)) == 6; tier.close()"
    )
    tier = open_tier(pool.url("team"))
    subprocess.run(
        [sys.executable, "-c", theirs, pool.url("team")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
    )
    wanted = document("shared", 6)
    assert tier.leading(wanted.keys) == 6
    assert served(tier, wanted) == 6
    assert {header.key for header in tier.scan()} == set(wanted.keys)
    other_team = open_tier(pool.url("others"))
    assert other_team.leading(wanted.keys) == 0
    other_team.clear()
    assert tier.leading(wanted.keys) == 6


def test_memory_that_an_engine_lends_is_a_place_for_blocks(tmp_path: Path) -> None:
    with mooncake_pool(tmp_path, 0) as pool:
        lender = open_tier(pool.url(segment="32MiB"))
        wanted = document("lent", 4)
        assert put(lender, wanted) == 4
        reader = open_tier(pool.url())
        assert served(reader, wanted) == 4
        assert put(reader, document("there", 2)) == 2
        assert reader.capacity().capacity_bytes == 32 << 20
        lender.close()
        assert timed(lambda: served(reader, wanted)) == 0


def test_a_pool_that_is_full_evicts_or_drops_and_serves_nothing_wrong(pool: MooncakePool) -> None:
    """Twice as much as there is room for: what is held is sound, what was not stored is counted."""
    tier = open_tier(pool.url())
    documents = [document(f"document {number}", 8) for number in range(16)]
    stored = [put(tier, wanted) for wanted in documents]
    held = [tier.leading(wanted.keys) for wanted in documents]
    assert 0 < sum(held) <= 64
    assert [served(tier, wanted) for wanted in documents] == held
    assert tier.counts().dropped_writes >= sum(8 - its for its in stored)
    assert tier.counts().damaged == 0


def test_a_record_larger_than_the_buffer_is_not_stored(pool: MooncakePool) -> None:
    store = open_store(pool.url(buffer="16MiB"))
    with pytest.raises(StoreError, match="larger than the client's buffer; give the URL a larger buffer"):
        store.write([f"{GROUP}/{'ab' * 32}"], [[bytes(HEADER_BYTES), bytes(20 << 20)]])
    assert store.exists([f"{GROUP}/{'ab' * 32}"]) == [False]


def test_what_is_not_there_is_no_failure(pool: MooncakePool) -> None:
    store = open_store(pool.url())
    names = [record_name(GROUP, key) for key in document("never stored", 2).keys]
    record = [memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(SLOT))]
    assert store.read(names, [record, record]) == [False, False]
    assert store.exists(names) == [False, False]
    assert store.heads(names) == [None, None]
    assert store.size(names[0]) is None
    assert store.remove(names) == 0


def test_h26_what_is_being_written_is_no_failure(pool: MooncakePool) -> None:
    """While records are written, a reader sees each of them as absent or whole; Mooncake names them otherwise than
    those that nobody wrote."""
    writer, reader = open_store(pool.url()), open_store(pool.url())
    records = [[memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(SLOT))] for _ in range(4)]
    for attempt in range(12):
        names = [record_name(GROUP, key) for key in document(f"written {attempt}", 4).keys]
        writing = threading.Thread(target=writer.write, args=(names, [[bytes(HEADER_BYTES), bytes(SLOT)]] * 4))
        writing.start()
        while writing.is_alive():
            reader.read(names, records)  # raises nothing
        assert reader.read(names, records) == [True] * 4
        reader.remove(names)


def test_h36_what_cannot_be_removed_while_it_is_written_is_refused(pool: MooncakePool) -> None:
    """It will be there soon: whoever removes it must come again, and is told so."""
    writer, remover = open_store(pool.url()), open_store(pool.url())
    refused = ""
    for attempt in range(30):
        names = [record_name(GROUP, key) for key in document(f"removed {attempt}", 4).keys]
        writing = threading.Thread(target=writer.write, args=(names, [[bytes(HEADER_BYTES), bytes(SLOT)]] * 4))
        writing.start()
        while writing.is_alive():
            try:
                remover.remove(names)
            except StoreError as error:
                refused = str(error)
        remover.remove(names)
    assert refused.endswith("a record is being written")


def test_what_is_stored_again_is_replaced(pool: MooncakePool) -> None:
    store = open_store(pool.url())
    name = record_name(GROUP, document("any", 1).keys[0])
    for value in (b"first", b"another"):
        store.write([name], [[bytes(HEADER_BYTES), value]])
        assert store.size(name) == HEADER_BYTES + len(value)
        record = [memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(len(value)))]
        assert store.read([name], [record]) == [True]
        assert record[1].tobytes() == value


def test_a_master_that_is_killed_costs_misses_and_comes_back(pool: MooncakePool) -> None:
    """Calls end in bounded time, nothing raises; a new master knows nothing, and is filled again."""
    tier = open_tier(pool.url())
    wanted = document("wanted", 4)
    assert put(tier, wanted) == 4
    pool.master.kill()
    pool.master.wait()
    assert timed(lambda: tier.leading(wanted.keys)) == 0
    assert timed(lambda: served(tier, wanted)) == 0
    assert timed(lambda: put(tier, document("another", 2))) == 0
    for call in (lambda: tier.delete(wanted.keys), tier.clear):
        with pytest.raises(TierError):
            timed(call)
    assert timed(lambda: list(tier.scan())) == []
    assert not tier.health().ok
    pool.restart_master()
    until(lambda: put(tier, wanted) == 4, every=0.05)
    assert served(tier, wanted) == 4
    assert tier.health().ok, tier.health().reason


def test_h21_a_master_that_hangs_costs_the_timeout_and_buffers_stay_untouched(pool: MooncakePool) -> None:
    """Reads that were given up end some time; the buffers are somebody else's by then. There are never too many."""
    others = threading.enumerate()
    tier = open_tier(pool.url())
    wanted = document("wanted", 4)
    assert put(tier, wanted) == 4
    os.kill(pool.master.pid, signal.SIGSTOP)
    buffers = empty_buffers(4, SLOT, 2)
    assert timed(lambda: get_chain(tier, wanted.keys, buffers)) == 0
    assert timed(lambda: tier.leading(wanted.keys)) == 0
    calls = [threading.Thread(target=tier.lookup, args=(wanted.keys,)) for _ in range(mooncake.GIVEN_UP_CALLS - 2)]
    for call in calls:
        call.start()
    for call in calls:
        call.join(WAIT_SECONDS)
    assert timed(lambda: put(tier, document("another", 2))) == 0
    assert "8 calls have not ended" in tier.health().reason
    mine = [thread for thread in threading.enumerate() if thread not in others]
    given_up = [thread for thread in mine if thread.name.startswith("kvpact-mooncake-call")]
    assert len(given_up) <= mooncake.GIVEN_UP_CALLS
    os.kill(pool.master.pid, signal.SIGCONT)
    until(lambda: served(tier, wanted) + put(tier, wanted) == 8, every=0.05)
    assert served(tier, wanted) == 4
    tier.close()
    for thread in given_up:
        thread.join(20.0)
        assert not thread.is_alive(), "a given-up call ends, and after the last of them its thread"
    for buffer in buffers:
        assert b"".join(buffer) == bytes([CANARY]) * SLOT


def test_a_lender_that_is_killed_costs_misses(pool: MooncakePool) -> None:
    """The master still names what is gone; a read of it ends in bounded time, and nothing is served."""
    tier = open_tier(pool.url())
    wanted = document("wanted", 4)
    assert put(tier, wanted) == 4
    pool.lenders[0].kill()
    pool.lenders[0].wait()
    assert timed(lambda: served(tier, wanted)) == 0
    assert tier.counts().failed_reads == 1


@pytest.mark.parametrize("lease", ["300ms", "60s"])
def test_h11_the_pools_lease_runs_out_between_look_up_and_read(tmp_path: Path, lease: str) -> None:
    """A look-up leases what it finds. After that the pool evicts it for others: a shorter match, and no damage."""
    with mooncake_pool(tmp_path, 32, default_kv_lease_ttl=lease) as pool:

        def scene() -> Scene:
            tier = SharedTier(open_store(pool.url()), SCENE_NAMESPACE, PAGE)
            return Scene(40, tiers=[tier], recompute_if_faster=False)

        first, second, request = scene(), scene(), SceneRequest("here", tokens(33))
        first.run_cold(SceneRequest("there", tokens(33)))
        first.settle_tiers(20.0)
        second.cache.on_new_request(request)
        second.cache.end_step()
        until(lambda: second.queues[0].under_way == 0)
        time.sleep(0.5)
        left = fill(pool, group_name(SCENE_NAMESPACE, UNSEALED))
        match = second.prepare(request, seconds=20.0)
        assert match.num_tokens <= 4 * left
        assert (match.num_tokens == 32) == (left == 8) == (lease == "60s"), f"{left} of 8 blocks were left"
        if match.num_tokens:
            second.load(request, match)
            assert second.holds_content(request, range(match.num_tokens // 4))
        counts = second.cache.observe()
        assert counts[series("damaged_records", "mooncake")] == counts["failed_tokens"] == 0
        second.cache.request_finished("here")
        for one in (first, second):  # before the pool
            one.close()


def fill(pool: MooncakePool, group: str) -> int:
    """Store twice what the pool has room for; how many records of `group` are left then."""
    other = open_tier(pool.url())
    for number in range(64):
        put(other, document(f"other {number}", 1))
    assert isinstance(other.store, MooncakeStore)
    left = sum(key_of(record.name) is not None for record in other.store.names(group))
    other.close()
    return left


def test_without_the_metrics_port_all_but_listing_works(pool: MooncakePool) -> None:
    nobody = free_port()
    tier = open_tier(pool.url(metrics=nobody))
    wanted = document("wanted", 2)
    assert put(tier, wanted) == 2
    assert tier.health().ok
    assert tier.capacity().capacity_bytes == 0
    with pytest.raises(StoreError, match=rf"metrics port 127.0.0.1:{nobody} does not answer .* \?metrics=PORT"):
        list(tier.store.names(GROUP))
    tier.clear()
    assert tier.leading(wanted.keys) == 0


def test_h97_a_master_that_comes_late_is_used(pool: MooncakePool) -> None:
    pool.master.kill()
    pool.master.wait()
    (tier,) = open_tiers([parse_tier_url(pool.url(segment="32MiB"))], TierContext(SCENE_NAMESPACE, PAGE), WAIT_SECONDS)
    assert "no master answers" in tier.health().reason
    pool.restart_master()
    until(lambda: tier.there is not None)
    assert tier.there is not None
    assert tier.there.health().ok
    tier.close()


def test_a_master_that_is_not_there_is_refused_at_once() -> None:
    port = free_port()
    with pytest.raises(TierError, match=f"no master answers at 127.0.0.1:{port} .*start mooncake_master there"):
        timed(lambda: open_store(f"mooncake://127.0.0.1:{port}?segment=0"))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mooncake://host:port", r"a host and port like cache:50051 is needed, an IPv6 address in brackets"),
        ("mooncake://::1:50051", r"a host and port like cache:50051 is needed, an IPv6 address in brackets"),
        ("mooncake://one,two", "a pool has one master"),
        ("mooncake://host/a*b", "the path begins names"),
    ],
)
def test_a_url_that_makes_no_sense_is_refused(url: str, message: str) -> None:
    with pytest.raises((TierError, ValueError), match=message):
        open_mooncake(parse_tier_url(url))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), r"pip install 'kvpact\[mooncake\]'"),
        (ImportError("libibverbs.so.1: cannot open shared object file"), "apt-get install libibverbs1"),
    ],
)
def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch, error: ImportError, message: str) -> None:
    def fail(name: str) -> SimpleNamespace:
        raise error

    monkeypatch.setattr(mooncake, "import_module", fail)
    with pytest.raises(TierError, match=message):
        open_mooncake(parse_tier_url("mooncake://127.0.0.1"))


def test_h73_a_tool_lends_the_pool_nothing(pool: MooncakePool) -> None:
    """What others stored in its memory would be gone when the command has ended."""
    url = parse_tier_url(pool.url(segment="32MiB"))
    tool = open_mooncake(url, for_tool=True)
    lent = tool.usage().capacity_bytes
    tool.close()
    engine = open_mooncake(url)
    assert engine.usage().capacity_bytes == lent + (32 << 20)
    engine.close()
