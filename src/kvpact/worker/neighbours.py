"""Memory of other engines of this host, as one rank has it mapped while loads may come from it.

Owns the mappings. The scheduler's half says which engines these are; copies from their slots are `TransferEngine`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from kvpact.errors import DataError
from kvpact.memory.arena import ArenaSegment
from kvpact.memory.neighbour_slots import NeighbourMemory, NeighbourSlots
from kvpact.tiers.log_once import LogOnce

logger = logging.getLogger(__name__)


class MappedNeighbours:
    """Segments of other engines, by the engines' numbers."""

    def __init__(self, rank: int, segment: ArenaSegment) -> None:
        """For a rank whose own slots are in `segment`."""
        self._rank = rank
        self._classes = segment.classes
        self._mapped: dict[int, NeighbourSlots] = {}
        self._told = LogOnce(logger)

    def use(self, addresses: Iterable[NeighbourMemory]) -> Mapping[int, NeighbourSlots]:
        """Map the memory of these engines and no others; without those that cannot be mapped, whose loads fail."""
        mapped: dict[int, NeighbourSlots] = {}
        for address in addresses:
            known = self._mapped.get(address.number)
            try:
                mapped[address.number] = known or NeighbourSlots.attach(address, self._rank, self._classes)
            except (DataError, OSError, IndexError) as error:
                text = "rank %d: the memory of another engine cannot be mapped, so nothing is loaded from it: %s"
                self._told.log("neighbour", logging.WARNING, text, self._rank, error)
        self._mapped = mapped
        return mapped
