"""Records in object stores."""

from kvpact.own_files import group_number
from kvpact.tiers.backend import STORE_OPTIONS, Backend, UrlRules, some_text, whole_number, yes_or_no

_OPTIONS = {
    **STORE_OPTIONS, "endpoint": some_text, "region": some_text, "allow_http": yes_or_no, "concurrency": whole_number,
    "anonymous": yes_or_no,
}  # fmt: skip

_OVER_TLS = {**_OPTIONS, "ca_file": some_text}

BACKEND = Backend(
    "object",
    "kvpact.tiers.objects.store:open_objects",
    {
        "s3": UrlRules("s3://bucket/prefix?region=eu-central-1", _OVER_TLS),
        "gs": UrlRules("gs://bucket/prefix", _OVER_TLS),
        "az": UrlRules("az://container/prefix", _OVER_TLS),
        "file": UrlRules("file:///mnt/objects/kvpact", {**_OPTIONS, "group": group_number}),
    },
)
