"""Division of memory for slots of several sizes: extents of equal size, each with slots of one size at a time.

Owns the size of an extent: large enough to lose little at its end, small enough to move memory between classes of slots
in many steps. Takes no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvpact.errors import ConfigError
from kvpact.index.classed_slots import MIN_ROWS
from kvpact.units import format_size

MAX_LOSS: Final = 0.02
"""Largest share of an extent lost at its end, for slots of any class; reached wherever memory has room for it."""

EVEN_PLACES: Final = 64
"""Slots of the largest class in an extent, so that no class of any size loses more than 1/64 of it."""

MIN_BYTES: Final = 2 << 20
"""Least bytes of an extent, where memory has room for `MANY_EXTENTS` of these: a huge page.

A move drops all blocks of an extent at once, in a scheduler's step: 128 of 16 KiB.
"""

MANY_EXTENTS: Final = 64

MIN_EXTENTS: Final = 2
"""Extents of each class, on average, where memory has room for as many of one slot."""


@dataclass(frozen=True, slots=True)
class Extents:
    """Memory of one rank: `count` extents of `num_bytes`, for slots of each of `class_bytes`; 0 without payload."""

    count: int
    num_bytes: int
    class_bytes: tuple[int, ...]

    @property
    def places(self) -> tuple[int, ...]:
        """Slots in an extent, per class; 0 without payload."""
        return tuple(self.num_bytes // one if one else 0 for one in self.class_bytes)

    @property
    def enough(self) -> bool:
        """True if each class can have `MIN_ROWS` slots."""
        return self.count >= sum(-(-MIN_ROWS // places) for places in self.places if places)

    @property
    def loss(self) -> float:
        """Largest share of an extent that a class cannot use."""
        return max(self.num_bytes % one for one in self.class_bytes if one) / self.num_bytes


def slot_classes(sizes: Sequence[int], *, ranks_differ: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Class of the slots per KV cache group, and bytes of a slot on this rank per class.

    `sizes` are the bytes of the groups' slots on this rank.

    One class for each size. Where `ranks_differ`, as pipeline stages do, sizes equal on one rank are not on another, so
    each group has a class of its own, and all ranks agree on its number.
    """
    if ranks_differ:
        return tuple(range(len(sizes))), tuple(sizes)
    classes = sorted(set(sizes))
    return tuple(map(classes.index, sizes)), tuple(classes)


def extents_for(memory_bytes: int, class_bytes: Sequence[int], world_size: int, *, ranks_differ: bool) -> Extents:
    """Extents of one rank's share of `memory_bytes`, the sum over all ranks, for these slots (0: without payload).

    The smallest extents with which no class loses more than `MAX_LOSS`. Ranks whose sizes are equal get equal extents.
    With `ranks_differ` (pipeline stages) an extent has `EVEN_PLACES` slots of the rank's largest class, or fewer if
    memory is small, so that the ranks' extents are alike: a class has as many slots in one as each rank has room for.
    Raises ConfigError if memory has no room for `MIN_ROWS` slots of each class.
    """
    share = memory_bytes // world_size
    largest = max(class_bytes)
    most = max(1, share // (largest * len(class_bytes) * MIN_EXTENTS))
    least = max(1, -(-min(MIN_BYTES, share // MANY_EXTENTS) // largest))
    wanted = [min(EVEN_PLACES, most)] if ranks_differ else list(range(least, min(most, max(least, EVEN_PLACES)) + 1))
    best: Extents | None = None
    for places in (*wanted, *(most >> shift for shift in range(most.bit_length()))):
        found = Extents(share // (places * largest), places * largest, tuple(class_bytes))
        if found.enough and (best is None or found.loss < best.loss):
            best = found
        if best is not None and (ranks_differ or best.loss <= MAX_LOSS):
            break
    if best is None:
        sizes = ", ".join(format_size(one * world_size) for one in class_bytes if one)
        enough = sum(-(-MIN_ROWS // (largest // one)) for one in class_bytes if one)  # of extents of one largest slot
        raise ConfigError(
            f"memory: {format_size(memory_bytes)} has no room for {MIN_ROWS} blocks of each of the sizes {sizes} (all "
            f"layers of a KV cache group, {world_size} ranks); set at least "
            f"{format_size(world_size * largest * enough)}; a useful cache has room for the blocks of several "
            "prompts"
        )
    return best


def slots_for(memory_bytes: int, rank_slot_bytes: int, world_size: int) -> int:
    """Number of slots in `memory_bytes`, the sum over all ranks. Raises ConfigError below `MIN_ROWS`."""
    slot_bytes = rank_slot_bytes * world_size
    slots = memory_bytes // slot_bytes
    if slots < MIN_ROWS:
        raise ConfigError(
            f"memory: {format_size(memory_bytes)} holds {slots} blocks of {format_size(slot_bytes)} each (all layers, "
            f"{world_size} ranks); set at least {format_size(MIN_ROWS * slot_bytes)}; a useful cache has room for the "
            "blocks of several prompts"
        )
    return slots
