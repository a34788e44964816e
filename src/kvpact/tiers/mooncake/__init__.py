"""Records in a Mooncake store."""

from kvpact.tiers.backend import STORE_OPTIONS, Backend, UrlRules, some_port, some_size, some_text
from kvpact.units import parse_size

_OPTIONS = {
    **STORE_OPTIONS, "metadata_server": some_text, "protocol": some_text, "device": some_text, "hostname": some_text,
    "segment": parse_size, "buffer": some_size, "metrics": some_port,
}  # fmt: skip

BACKEND = Backend(
    "mooncake",
    "kvpact.tiers.mooncake.store:open_mooncake",
    {
        "mooncake": UrlRules(
            "mooncake://master:50051?metadata_server=P2PHANDSHAKE",
            _OPTIONS,
            port=50051,
            one="a pool has one master; name it alone",
            path=(r"((/[A-Za-z0-9_-]+)+|/)?/?", "the path begins names: use letters, digits, _, - and / between them"),
        )
    },
)
