"""Records in a directory that many hosts mount."""

from kvpact.tiers.backend import DIRECTORY_OPTIONS, Backend, UrlRules

BACKEND = Backend(
    "directory",
    "kvpact.tiers.directory.store:open_directory",
    {"dir": UrlRules("dir:///mnt/shared/kvpact?capacity=1TiB", DIRECTORY_OPTIONS, directory=True)},
)
