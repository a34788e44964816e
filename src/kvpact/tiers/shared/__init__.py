"""The tier over any store of named records that engines share."""

from kvpact._moved import moved_names

_IN_TIER = ("SharedTier", "GROUP_BYTES")
_IN_STORE = (
    "RecordStore",
    "StoredRecord",
    "StoreError",
    "StoreUsage",
    "NAMESPACE_RECORD",
    "group_name",
    "key_of",
    "record_name",
)


def __getattr__(name: str) -> object:
    module = "tier" if name in _IN_TIER else "store"
    return moved_names(__name__, f"{__name__}.{module}", *_IN_TIER, *_IN_STORE)(name)
