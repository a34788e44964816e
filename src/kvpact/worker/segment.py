"""A rank's memory for slots: its own, or that of the first of the ranks that hold the same bytes in every block.

Owns its creation, and the one message by which the others of these ranks find it, for which each of them waits while
the engine starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import maxsize
from typing import TypeAlias

from kvpact.config import KvpactConfig
from kvpact.errors import ConfigError, KvpactError
from kvpact.memory.arena import ArenaSegment
from kvpact.memory.extents import extents_for, slot_classes, slots_for
from kvpact.memory.layout import SlotLayout
from kvpact.memory.shared_slots import SharedSlots
from kvpact.units import format_size
from kvpact.wire import LentSegment, decode, encode

logger = logging.getLogger(__name__)

TellOthers: TypeAlias = Callable[[bytes], bytes]
"""Called once by each of the ranks with the same bytes, at the same time; returns the argument of the first one."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Ranks that hold the same bytes in every block: `same_kv` neighbours, of which the first stores them for all."""

    rank: int
    world_size: int
    same_kv: int = 1
    tell_others: TellOthers | None = None
    """Not None if there are such ranks."""
    stages: int = 1
    """Pipeline stages: ranks of different ones have different layers."""

    @property
    def first(self) -> int:
        """Number of the first rank with this one's bytes."""
        return self.rank - self.rank % self.same_kv

    @property
    def stores(self) -> bool:
        """True for the rank that writes to slots; the others of `same_kv` only read them."""
        return self.rank == self.first

    @property
    def slots_of(self) -> int | None:
        """Rank that has this one's slots, if it is another; else None."""
        return None if self.stores else self.first

    @property
    def pieces(self) -> int:
        """Number of pieces of a slot, over all ranks."""
        return self.world_size // self.same_kv

    @property
    def piece(self) -> int:
        """Number of this rank's piece of a slot."""
        return self.rank // self.same_kv

    def classes_of(self, group_bytes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """`slot_classes` of groups whose blocks have so many bytes on this rank."""
        return slot_classes([SlotLayout((each,)).rank_slot_bytes for each in group_bytes], ranks_differ=self.stages > 1)

    def classes_in(self, segment: ArenaSegment, group_bytes: Sequence[int]) -> tuple[int, ...]:
        """Return per KV cache group the class of its slots in this segment."""
        return self.classes_of(group_bytes)[0] if segment.unit == "extent" else (0,) * len(group_bytes)

    def step_budget(self, config: KvpactConfig) -> int:
        """Most bytes that a step may load of blocks that it finds; unlimited where another rank reads."""
        return config.sync_load_budget if self.stores else maxsize


def open_segment(config: KvpactConfig, layouts: Sequence[SlotLayout], place: Sharing) -> ArenaSegment:
    """Open the memory with this rank's slots, for blocks of each of these KV cache groups.

    Caches of other authors know slots of one class only, which then has room for the largest block.
    Raises ConfigError if `memory` does not fit in this machine, or if the rank that has the slots cannot share them.
    """
    if place.tell_others is None:
        return _create(config, layouts, place)
    pages = tuple(size for layout in layouts for size in layout.layer_page_bytes)
    if not place.stores:
        return _borrow(pages, place, place.tell_others(b""))
    message = b""
    try:
        segment = _create(config, layouts, place)
        segment.sharers = place.same_kv
        message = encode(LentSegment(segment.address(), pages))
    finally:
        place.tell_others(message)
    logger.info(
        "kvpact: ranks %d to %d hold the same keys and values: stored once, by rank %d, %s a block",
        place.rank,
        place.rank + place.same_kv - 1,
        place.rank,
        format_size(max(layout.rank_slot_bytes for layout in layouts)),
    )
    return segment


def _create(config: KvpactConfig, layouts: Sequence[SlotLayout], place: Sharing) -> ArenaSegment:
    sizes = place.classes_of([sum(layout.layer_page_bytes) for layout in layouts])[1]
    if len(sizes) == 1 or config.cache is not None:
        return ArenaSegment.create(slots_for(config.memory, max(sizes), place.pieces), max(sizes), place.pieces)
    extents = extents_for(config.memory, sizes, place.pieces, ranks_differ=place.stages > 1)
    return ArenaSegment.create_extents(extents, place.pieces)


def _borrow(pages: tuple[int, ...], place: Sharing, message: bytes) -> ArenaSegment:
    if not message:
        raise ConfigError(f"rank {place.first} has no memory that rank {place.rank} could share: see its log")
    lent = decode(message, LentSegment)
    if lent.layer_page_bytes != pages:
        raise ConfigError(
            f"rank {place.rank} cannot share the memory of rank {place.first}, because their blocks differ: "
            f"{sum(pages)} bytes in {len(pages)} layers here, "
            f"{sum(lent.layer_page_bytes)} bytes in {len(lent.layer_page_bytes)} layers there"
        )
    try:
        segment = SharedSlots.attach(lent.segment)
    except KvpactError as error:
        raise ConfigError(f"rank {place.rank} cannot share the memory of rank {place.first}: {error}") from error
    segment.sharers = place.same_kv
    return segment
