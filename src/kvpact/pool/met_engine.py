"""Another engine of this host as one cache knows it: what it seems to hold, and what is not asked of it again.

Owns the blocks that failed to load from it. Leases nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvpact.identity.keys import BlockKey
from kvpact.memory.neighbour_slots import NeighbourMemory
from kvpact.pool.neighbours import OtherEngine
from kvpact.tiers.known_keys import LRUKeySet

MOST_REFUTED: Final = 4096
"""Blocks of one engine that failed to load and are not asked of it again."""


@dataclass(eq=False, slots=True)
class MetEngine:
    """Another engine, under the number by which this engine's ranks know it; 0 if none of them copies from it."""

    engine: OtherEngine
    number: int = 0
    refuted: LRUKeySet = field(default_factory=lambda: LRUKeySet(MOST_REFUTED))
    leases: int = 0

    @property
    def is_refused(self) -> bool:
        """True once nobody may use its blocks any more."""
        return self.engine.gone or self.engine.index.is_refused

    def has(self, key: BlockKey) -> bool:
        """True if it seems to hold a block."""
        return self.engine.index.has(key) and key not in self.refuted

    def count(self, keys: Sequence[BlockKey]) -> int:
        """Number of the first blocks of `keys` that it seems to hold."""
        count = self.engine.index.count(keys)
        return next((at for at in range(count) if keys[at] in self.refuted), count) if len(self.refuted) else count

    def memory(self) -> NeighbourMemory:
        """Address of the engine's memory, for ranks."""
        segments = self.engine.segments
        found = tuple((each.descriptor, each.device, each.inode, each.num_slots) for each in segments)
        return NeighbourMemory(self.number, segments[0].pid, self.engine.index.descriptor, found)
