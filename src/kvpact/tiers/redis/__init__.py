"""Records in Redis or Valkey."""

from kvpact.tiers.backend import STORE_OPTIONS, Backend, UrlRules, some_text, yes_or_no
from kvpact.units import parse_duration, parse_size

_OPTIONS = {
    **STORE_OPTIONS, "expiry": parse_duration, "password_file": some_text, "part": parse_size,
    "ca_file": some_text, "cert_file": some_text, "key_file": some_text,
}  # fmt: skip
_OF_SENTINELS = {
    **_OPTIONS, "sentinel_user": some_text, "sentinel_password": some_text, "sentinel_password_file": some_text,
    "sentinel_tls": yes_or_no,
}  # fmt: skip

BACKEND = Backend(
    "redis",
    "kvpact.tiers.redis.opening:open_redis",
    {
        "redis": UrlRules("redis://cache:6379/0", _OPTIONS),
        "rediss": UrlRules("rediss://user@cache:6380/0?password_file=/run/secrets/redis", _OPTIONS),
        "redis+cluster": UrlRules("redis+cluster://cache-1:6379,cache-2:6379", _OPTIONS),
        "rediss+cluster": UrlRules("rediss+cluster://cache-1:6379,cache-2:6379", _OPTIONS),
        "redis+sentinel": UrlRules("redis+sentinel://guard-1:26379,guard-2:26379/mymaster/0", _OF_SENTINELS),
        "rediss+sentinel": UrlRules("rediss+sentinel://guard-1:26379,guard-2:26379/mymaster/0", _OF_SENTINELS),
    },
)
