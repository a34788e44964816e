"""From a URL to a `DiskTier`."""

from __future__ import annotations

from kvpact.own_files import Access
from kvpact.tiers.disk.tier import DiskTier
from kvpact.tiers.registry import TierContext
from kvpact.tiers.urls import TierURL


def open_disk(url: TierURL, place: TierContext) -> DiskTier:
    """The tier at a `disk://` URL. Raises TierError."""
    access = Access.of(url.options.get("group"))
    return DiskTier.open(url.path, place.namespace, place.slot_bytes, url.capacity, access=access)
