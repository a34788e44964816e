"""The suite as an author would write it for `DictionaryTier`, and for tiers derived from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from dictionary_tier import DictionaryTier, Records
from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import Tier
from kvpact_testkit.faults import Faults
from kvpact_testkit.tier.conformance import Damage, StoreContext, TierConformance


class DictionarySuite(TierConformance):
    reopens = True
    gives_up_after = 0.2
    tier: type[DictionaryTier] = DictionaryTier
    stores: ClassVar[dict[Path, Records]] = {}
    faults = Faults()

    def open_tier(self, place: StoreContext) -> Tier:
        records = self.stores.setdefault(place.directory, {})
        return self.tier(place.namespace, place.slot_bytes, place.capacity_blocks, records, self.faults)

    @contextmanager
    def store_calls(self, faults: Faults) -> Iterator[None]:
        self.faults = faults
        yield
        self.stores.clear()

    def damage(self, place: StoreContext, key: BlockKey, how: Damage) -> bool:
        records = self.stores[place.directory]
        name = (place.namespace.digest, key)
        payload = records[name].payload
        if how is Damage.FLIPPED:
            payload[100] ^= 1
        elif how is Damage.GARBAGE:
            payload[:] = b"?" * len(payload)
        elif how is Damage.TORN:
            payload[len(payload) // 2 :] = bytes(len(payload) - len(payload) // 2)
        elif how is Damage.SHORT:
            del payload[-1:]
        elif how is Damage.GONE:
            del records[name]
        else:
            return False
        return True


def suite_for(tier: type[DictionaryTier]) -> type[DictionarySuite]:
    """The same suite for a tier derived from `DictionaryTier`."""
    return type(f"Test{tier.__name__}", (DictionarySuite,), {"tier": tier})
