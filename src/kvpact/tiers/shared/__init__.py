"""What all shared tiers do alike, over a store of named records."""

from kvpact._moved import moved_names

_TIER_NAMES = ("SharedTier", "GROUP_BYTES")
_STORE_NAMES = (
    "RecordStore",
    "StoredRecord",
    "StoreError",
    "StoreUsage",
    "NAMESPACE_RECORD",
    "group_name",
    "key_of",
    "record_name",
)

_of_tier = moved_names(__name__, "kvpact.tiers.shared.tier", *_TIER_NAMES)
_of_store = moved_names(__name__, "kvpact.tiers.shared.store", *_STORE_NAMES)


def __getattr__(name: str) -> object:
    return (_of_tier if name in _TIER_NAMES else _of_store)(name)
