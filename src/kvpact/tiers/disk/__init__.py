"""The disk tier: blocks in slab files."""

from kvpact.metrics import TierName
from kvpact.tiers.backend import Backend, UrlRules, some_text
from kvpact.units import parse_size

BACKEND = Backend(
    TierName.DISK,
    "kvpact.tiers.disk.opening:open_disk",
    {
        "disk": UrlRules(
            "disk:///var/cache/kvpact?capacity=200GiB", {"capacity": parse_size, "group": some_text}, directory=True
        )
    },
    shared=False,
)
