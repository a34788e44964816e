"""Records in a directory that many hosts mount."""

from kvpact.metrics import TierName
from kvpact.tiers.backend import Backend, UrlRules, some_text
from kvpact.units import parse_size

BACKEND = Backend(
    TierName.DIRECTORY,
    "kvpact.tiers.directory.store:open_directory",
    {
        "dir": UrlRules(
            "dir:///mnt/shared/kvpact?capacity=1TiB", {"capacity": parse_size, "group": some_text}, directory=True
        )
    },
)
