"""Records in Redis or Valkey."""

from collections.abc import Mapping
from functools import partial
from typing import Final

from kvpact.tiers.backend import (
    STORE_OPTIONS,
    Backend,
    UrlRules,
    size_between,
    some_file,
    some_text,
    some_time,
    yes_or_no,
)

MIN_PART: Final = 4 << 10
MAX_PART: Final = 512 << 20
"""The largest value of a server."""

_TLS_FILES = {"ca_file": some_file, "cert_file": some_file, "key_file": some_file}
_OPTIONS = {
    **STORE_OPTIONS, "expiry": some_time, "password_file": some_file, "part": size_between(MIN_PART, MAX_PART),
    **_TLS_FILES,
}  # fmt: skip
_OF_SENTINELS = {
    **_OPTIONS, "sentinel_user": some_text, "sentinel_password": some_text, "sentinel_password_file": some_file,
    "sentinel_tls": yes_or_no,
}  # fmt: skip


def _without_tls(options: Mapping[str, str]) -> None:
    if options.get("sentinel_tls") != "true":
        for name in _TLS_FILES.keys() & options.keys():
            raise ValueError(f"{name} is for TLS; write rediss instead of redis")


_OneServer = partial(
    UrlRules,
    options=_OPTIONS,
    port=6379,
    one="one server, or redis+cluster, or redis+sentinel",
    path=(r"(/\d*)?/?", "the path must be a database's number"),
    default_path="/0",
)
_Cluster = partial(
    UrlRules,
    options=_OPTIONS,
    port=6379,
    path=("(/0?)?/?", "a cluster has one database only, number 0; leave the path out"),
    default_path="/0",
)
_Sentinels = partial(
    UrlRules,
    options=_OF_SENTINELS,
    port=26379,
    path=(r"/[^/]+(/\d+)?/?", "the path must be a master's name and a database's number"),
)

BACKEND = Backend(
    "redis",
    "kvpact.tiers.redis.opening:open_redis",
    {
        "redis": _OneServer("redis://cache:6379/0", together=_without_tls),
        "rediss": _OneServer("rediss://user@cache:6380/0?password_file=/run/secrets/redis"),
        "redis+cluster": _Cluster("redis+cluster://cache-1:6379,cache-2:6379", together=_without_tls),
        "rediss+cluster": _Cluster("rediss+cluster://cache-1:6379,cache-2:6379"),
        "redis+sentinel": _Sentinels("redis+sentinel://guard-1:26379,guard-2:26379/mymaster/0", together=_without_tls),
        "rediss+sentinel": _Sentinels("rediss+sentinel://guard-1:26379,guard-2:26379/mymaster/0"),
    },
)
