"""Reads of blocks from other engines' memory into own slots, for an engine whose ranks cannot copy from there.

Owns the tier that reads, from the first other engine on: until one is met, a step costs what it costs without. What is
read is staged like the blocks of any tier, before a promise, and is then in this engine's own memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpact.cache.memory import Reader
from kvpact.cache.prefetch import Lacking
from kvpact.cache.records import RequestRecord
from kvpact.cache.tier_set import TierSet
from kvpact.pool.neighbour_tier import NeighbourTier
from kvpact.pool.neighbours import Neighbours, OtherEngine
from kvpact.tiers.client import TierClient


@dataclass(eq=False)
class NeighbourReads:
    """Reads from the engines that `neighbours` has now, by threads that `reader` starts, beside all of `tiers`."""

    neighbours: Neighbours
    tiers: TierSet
    reader: Reader
    tier: NeighbourTier = field(default_factory=NeighbourTier, init=False)
    _client: TierClient | None = field(default=None, init=False)
    _met: tuple[OtherEngine, ...] = field(default=(), init=False)

    def look(self) -> None:
        """Look for engines that came or went."""
        met = self.neighbours.current()
        if met is self._met:
            return
        self._met = met
        self.tier.use(met)
        if self._client is None:
            self._client = self.tiers.open_beside(self.reader(self.tier))

    def note_read(self, lacking: Lacking, record: RequestRecord) -> None:
        """Note for a request the engines that have blocks which it lacks, and which are being read now."""
        if self._client in lacking.clients:
            for name in filter(None, (self.tier.holder(run.keys) for run in lacking.missing.runs if run.keys)):
                record.note_neighbour(name)
