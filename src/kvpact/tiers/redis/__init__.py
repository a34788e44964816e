"""Records in Redis or Valkey."""

from functools import partial

from kvpact.tiers.backend import STORE_OPTIONS, Backend, UrlRules, some_file, some_size, some_text, some_time, yes_or_no

_OPTIONS = {
    **STORE_OPTIONS, "expiry": some_time, "password_file": some_file, "part": some_size,
    "ca_file": some_file, "cert_file": some_file, "key_file": some_file,
}  # fmt: skip
_OF_SENTINELS = {
    **_OPTIONS, "sentinel_user": some_text, "sentinel_password": some_text, "sentinel_password_file": some_file,
    "sentinel_tls": yes_or_no,
}  # fmt: skip
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
        "redis": _OneServer("redis://cache:6379/0"),
        "rediss": _OneServer("rediss://user@cache:6380/0?password_file=/run/secrets/redis"),
        "redis+cluster": _Cluster("redis+cluster://cache-1:6379,cache-2:6379"),
        "rediss+cluster": _Cluster("rediss+cluster://cache-1:6379,cache-2:6379"),
        "redis+sentinel": _Sentinels("redis+sentinel://guard-1:26379,guard-2:26379/mymaster/0"),
        "rediss+sentinel": _Sentinels("rediss+sentinel://guard-1:26379,guard-2:26379/mymaster/0"),
    },
)
