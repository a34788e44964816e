"""What all shared tiers do alike, over a store of named records."""

from kvpact._moved import moved_names

_NAMES = (
    "RecordStore",
    "SharedTier",
    "StoredRecord",
    "StoreError",
    "StoreUsage",
    "GROUP_BYTES",
    "NAMESPACE_RECORD",
    "group_name",
    "key_of",
    "record_name",
)

__getattr__ = moved_names(__name__, "kvpact.tiers.shared.tier", *_NAMES)
