"""Makes a `RedisStore` from a URL, and checks the URL."""

from __future__ import annotations

from dataclasses import replace
from typing import Final
from urllib.parse import unquote

from kvpact.errors import NoSuchTier
from kvpact.tiers.redis.batches import Batches
from kvpact.tiers.redis.connections import Credentials, Pool
from kvpact.tiers.redis.servers import Cluster, OneServer, Sentinels, Servers
from kvpact.tiers.redis.store import RedisStore
from kvpact.tiers.urls import TierURL

TIMEOUT_SECONDS: Final = 2.0
"""Seconds until a call of the store ends, if the URL has no `timeout`."""

PART_BYTES: Final = 64 << 20
"""Larger records are split into parts of this size, if the URL has no `part`. A server runs one command at a time: a
value of 64 MiB delays all others by some 20 ms. Its largest value has 512 MiB. Parts need Redis 6.2 or Valkey."""


def open_redis(url: TierURL, *, for_tool: bool = False) -> RedisStore:
    """The store at `url`. Does not connect yet: a server that is down may work by the first call.

    With `for_tool` reads prolong no record's life, and do not count as use where the server allows that.

    Raises:
        NoSuchTier: redis-py is missing, or the URL is impossible.
        TierError: a file that it names is not there.
    """
    try:
        import redis  # noqa: F401
    except ImportError:
        raise NoSuchTier(f"a {url.scheme} tier needs redis-py: pip install 'kvpact[redis]'") from None
    base, _, kind = url.scheme.partition("+")
    addresses = url.addresses
    path = url.path.strip("/").split("/")
    service = path.pop(0) if kind == "sentinel" else ""
    database = "/".join(path) or "0"
    options = url.options
    tls = base == "rediss"
    sentinel_tls = options["sentinel_tls"] == "true" if "sentinel_tls" in options else tls
    expiry = url.seconds("expiry", 0.0) if "expiry" in options else None
    timeout = url.seconds("timeout", TIMEOUT_SECONDS)
    if for_tool:
        expiry = None
    user, _, password = url.host.rpartition("@")[0].partition(":")
    password_file = options.get("password_file", "")
    certificate = (options.get("cert_file"), options.get("key_file"))
    access = Credentials(
        unquote(user), unquote(password), password_file, tls, url.ca_file(), *certificate, int(database)
    )
    pool = Pool(replace(access, looks_only=for_tool))
    servers: Servers
    if kind == "cluster":
        servers = Cluster(pool, addresses)
    elif kind == "sentinel":
        user, password, file = (options.get(f"sentinel_{name}", "") for name in ("user", "password", "password_file"))
        theirs = replace(access, user=user, password=password, password_file=file, tls=sentinel_tls, database=0)
        servers = Sentinels(Pool(theirs, most_idle=0), addresses, service)
    else:
        servers = OneServer(addresses[0])
    place = f"{url.scheme}://{url.host.rpartition('@')[2]}{url.path}"
    return RedisStore(Batches(servers, pool, place, timeout), part_bytes=url.size("part", PART_BYTES), expiry=expiry)
