"""The disk tier: blocks in slab files."""

from kvpact.tiers.backend import DIRECTORY_OPTIONS, Backend, UrlRules

BACKEND = Backend(
    "disk",
    "kvpact.tiers.disk.tier:open_disk",
    {"disk": UrlRules("disk:///var/cache/kvpact?capacity=200GiB", DIRECTORY_OPTIONS, directory=True)},
    shared=False,
)
