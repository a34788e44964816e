"""kvpact's own tiers as subjects of the same checks.

Owns how a tier's store is made to fail and how a stored block is damaged past it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import HEADER_BYTES, Tier
from kvpact.tiers.disk.slab import Slab
from kvpact.tiers.disk.superblock import PAGE_BYTES, Superblock
from kvpact.tiers.disk.tier import DiskTier
from kvpact_testkit.faults import Faults
from kvpact_testkit.tier.conformance import Damage, StoreContext, TierConformance


class DiskSuite(TierConformance):
    """kvpact's `disk://`, one engine's slab."""

    reopens = True
    gives_up_after = 0.2

    def open_tier(self, place: StoreContext) -> Tier:
        capacity = place.capacity_blocks * place.slot_bytes
        while _slots(place, capacity) < place.capacity_blocks:
            capacity += PAGE_BYTES
        return DiskTier.open(place.directory, place.namespace, place.slot_bytes, capacity, timeout=0.0)

    @contextmanager
    def store_calls(self, faults: Faults) -> Iterator[None]:
        def preadv(descriptor: int, views: list[memoryview], offset: int) -> int:
            faults.before_read()
            return os.preadv(descriptor, views, offset)

        def pwritev(descriptor: int, views: list[memoryview], offset: int) -> int:
            def torn(part: float) -> None:
                whole = b"".join(views)
                overwrite(Path(f"/proc/self/fd/{descriptor}"), offset, whole[: int(len(whole) * part)])

            faults.before_write(torn=torn)
            return os.pwritev(descriptor, views, offset)

        with (
            mock.patch.object(Slab, "preadv", staticmethod(preadv)),
            mock.patch.object(Slab, "pwritev", staticmethod(pwritev)),
        ):
            yield

    def bury(self, tier: Tier) -> None:
        assert isinstance(tier, DiskTier)
        tier.slab.close()

    def damage(self, place: StoreContext, key: BlockKey, how: Damage) -> bool:
        path = place.directory / "kvpact" / f"{place.namespace.name}.slab"
        raw = path.read_bytes()
        layout = Superblock.decode(raw[:PAGE_BYTES], path)
        # A header has its block's key behind magic, format, depth, slot, length, two times and namespace.
        headers = [raw[PAGE_BYTES + slot * HEADER_BYTES :][:HEADER_BYTES] for slot in range(layout.table_slots)]
        slot = next(slot for slot, header in enumerate(headers) if header[80:112] == key)
        payload_at = layout.file_bytes(slot)
        half = place.slot_bytes // 2
        if how is Damage.FLIPPED:
            overwrite(path, payload_at + 100, bytes([raw[payload_at + 100] ^ 1]))
        elif how is Damage.GARBAGE:
            overwrite(path, payload_at, b"?" * place.slot_bytes)
        elif how is Damage.TORN:
            overwrite(path, payload_at + half, bytes(half))
        elif how is Damage.HEADER:
            overwrite(path, PAGE_BYTES + slot * HEADER_BYTES + 120, bytes([headers[slot][120] ^ 1]))
        elif how is Damage.MISPLACED:
            other = next((other for other, header in enumerate(headers) if any(header) and other != slot), slot)
            overwrite(path, payload_at, raw[layout.file_bytes(other) :][: place.slot_bytes])
        else:
            return False
        return True


def _slots(place: StoreContext, capacity: int) -> int:
    return Superblock.for_capacity(place.namespace, place.slot_bytes, capacity).slots_in(capacity)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """What a bad disk does, past all locks."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(descriptor, data, offset)
    finally:
        os.close(descriptor)
