"""Memory of other engines of this host, as one rank has it mapped while loads may come from it.

Owns the mappings. The scheduler's half says which engines these are; copies from their slots are `TransferEngine`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from kvpact.errors import DataError, is_passing, reason_of
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
        self._addresses: Iterable[NeighbourMemory] = ()
        self._told = LogOnce(logger)
        self.lacks_some = False
        """True if `use_again` may map what could not be mapped for want of a descriptor or memory."""

    def use(self, addresses: Iterable[NeighbourMemory]) -> Mapping[int, NeighbourSlots]:
        """Map the memory of these engines and no others; without those that cannot be mapped, whose loads fail."""
        self._addresses = addresses
        return self.use_again()

    def use_again(self) -> Mapping[int, NeighbourSlots]:
        """Map the memory of the same engines, as far as it is not mapped."""
        mapped: dict[int, NeighbourSlots] = {}
        self.lacks_some = False
        for address in self._addresses:
            known = self._mapped.get(address.number)
            try:
                mapped[address.number] = known or NeighbourSlots.attach(address, self._rank, self._classes)
            except (DataError, OSError, IndexError) as error:
                passes = is_passing(error)
                self.lacks_some |= passes
                text = "rank %d: the memory of another engine cannot be mapped, so nothing is loaded from it%s: %s"
                until = " until it can" if passes else ""
                self._told.log(f"neighbour{until}", logging.WARNING, text, self._rank, until, reason_of(error))
        self._mapped = mapped
        return mapped
