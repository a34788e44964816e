"""Addresses in the URLs of every kind of store: names, IPv4 and IPv6, with and without a port."""

from __future__ import annotations

import socket
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv6Address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.errors import NoSuchTier
from kvpact.tiers.backend import address_in
from kvpact.tiers.backends import SCHEMES as RULES
from kvpact.tiers.objects.store import open_objects
from kvpact.tiers.registry import open_store
from kvpact.tiers.urls import host_and_port, parse_tier_url
from servers.mooncake_server import mooncake_pool
from servers.object_server import CREDENTIALS
from servers.redis_server import RedisServer, free_ports

SCHEMES = ["redis", "rediss", "redis+cluster", "redis+sentinel", "rediss+sentinel", "mooncake"]
NAME = f"{'a' * 64}/{'b' * 64}"

hosts = st.one_of(
    st.sampled_from(["cache", "cache-1.cache.default.svc.cluster.local", "a.b"]),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.ip_addresses(v=6).map(lambda address: IPv6Address(address).exploded),
)
addresses = st.tuples(hosts, st.integers(1, 65535))


@pytest.fixture
def _has_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")


@given(
    scheme=st.sampled_from(SCHEMES),
    servers=st.lists(addresses, min_size=1, max_size=3),
    user=st.sampled_from(["", "user:p%40ss@", "user@"]),
)
def test_h100_every_address_is_understood_in_every_kind(scheme: str, servers: list[tuple[str, int]], user: str) -> None:
    if RULES[scheme].one:
        servers = servers[:1]
    path = "/mymaster" if "sentinel" in scheme else ""
    written = [host_and_port(*server) for server in servers]
    assert [address_in(text, 1) for text in written] == servers
    url = parse_tier_url(f"{scheme}://{user}{','.join(written)}{path}")
    assert url.addresses == servers
    assert parse_tier_url(url.url) == url
    without = host_and_port(*servers[0]).removesuffix(f":{servers[0][1]}")
    found = parse_tier_url(f"{scheme}://{user}{without}{path}").addresses
    assert found == [(servers[0][0], RULES[scheme].port)]


def test_h100_an_address_with_a_zone_is_understood() -> None:
    assert parse_tier_url("mooncake://[fe80::1%25eth0]:9").addresses == [("fe80::1%eth0", 9)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "place", ["::1:6379", "fe80::1", "cache:port", "cache:99999", "cache:0", ":6379", "a,,b", "user:x@:1"]
)
def test_h100_what_is_no_address_is_refused_with_what_would_be_right(scheme: str, place: str) -> None:
    with pytest.raises((NoSuchTier, ValueError)) as refused:
        open_store(parse_tier_url(f"{scheme}://{place}/mymaster/0"))
    assert "an IPv6 address in brackets" in str(refused.value) or "needs a host" in str(refused.value)


@pytest.mark.usefixtures("_has_ipv6")
def test_h100_redis_is_used_over_ipv6(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, free_ports(1)[0], host="::1")
    try:
        with closing(open_store(parse_tier_url(f"redis://[::1]:{server.port}/0"))) as store:
            store.write([NAME], [[b"record"]])
            assert store.size(NAME) == 6
            assert store.place == f"redis://[::1]:{server.port}/0"
    finally:
        server.stop()


@pytest.mark.usefixtures("_has_ipv6")
def test_h100_mooncake_is_used_over_ipv6(tmp_path: Path) -> None:
    with (
        mooncake_pool(tmp_path, 0, host="::1") as pool,
        closing(open_store(parse_tier_url(pool.url(segment="32MiB")))) as store,
    ):
        assert store.place == f"mooncake://[::1]:{pool.port}"
        store.write([NAME], [[b"record"]])
        assert store.size(NAME) == 6
        assert store.usage().used_bytes == 6, "the port for metrics"


@pytest.mark.usefixtures("_has_ipv6")
def test_h100_an_object_store_is_asked_over_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Host"])
            self.send_error(404)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            pass

    class OverIPv6(ThreadingHTTPServer):
        address_family = socket.AF_INET6

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with OverIPv6(("::1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        place = f"[::1]:{server.server_address[1]}"
        open_objects(parse_tier_url(f"s3://bucket/x?endpoint=http://{place}&allow_http=true&timeout=10s")).close()
        server.shutdown()
    assert asked == [place]


@pytest.mark.parametrize("endpoint", ["http://::1:9", "http://[::1", "http://a]b", "http://h:99999", "http://:9"])
def test_h100_an_endpoint_that_is_no_address_is_refused(endpoint: str) -> None:
    """Before it reaches the client, which panics on some."""
    with pytest.raises(ValueError, match="it is no address such as"):
        parse_tier_url(f"s3://bucket/x?endpoint={endpoint}&allow_http=true")
