"""A rank's memory for slots: its own, or that of the first of the ranks that hold the same bytes in every block.

Owns who makes the memory, and how the others of these ranks find it: by one message, which each of them waits for while
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
"""Called once by each of the ranks with the same bytes, at the same time; returns what the first of them was given."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which ranks hold the same bytes in every block: `same_kv` neighbours, of which the first stores them for all."""

    rank: int
    world_size: int
    same_kv: int = 1
    tell_others: TellOthers | None = None
    """Not None if there are such ranks."""
    stages: int = 1
    """Pipeline stages: ranks of different ones have different layers."""

    @property
    def first(self) -> int:
        """The first of the ranks with this one's bytes."""
        return self.rank - self.rank % self.same_kv

    @property
    def stores(self) -> bool:
        """Whether this rank writes to slots; the others of `same_kv` only read them."""
        return self.rank == self.first

    @property
    def slots_of(self) -> int | None:
        """The rank that has this one's slots, if it is another."""
        return None if self.stores else self.first

    @property
    def pieces(self) -> int:
        """Pieces of a slot, over all ranks."""
        return self.world_size // self.same_kv

    @property
    def piece(self) -> int:
        """Which of them is this rank's."""
        return self.rank // self.same_kv

    def classes_of(self, group_bytes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `slot_classes`."""
        return slot_classes([SlotLayout((each,)).rank_slot_bytes for each in group_bytes], ranks_differ=self.stages > 1)

    def classes_in(self, segment: ArenaSegment, group_bytes: Sequence[int]) -> tuple[int, ...]:
        """Return per KV cache group the class of its slots in this segment."""
        return self.classes_of(group_bytes)[0] if segment.unit == "extent" else (0,) * len(group_bytes)

    def step_budget(self, config: KvpactConfig) -> int:
        """Bytes that a step may load of what it finds; where another rank reads, that one sees to it."""
        return config.sync_load_budget if self.stores else maxsize


def open_segment(config: KvpactConfig, layouts: Sequence[SlotLayout], place: Sharing) -> ArenaSegment:
    """The memory with this rank's slots, for blocks of each of these KV cache groups.

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


def _borrow(pages: tuple[int, ...], place: Sharing, told: bytes) -> ArenaSegment:
    if not told:
        raise ConfigError(f"rank {place.first} has no memory that rank {place.rank} could share: see its log")
    lent = decode(told, LentSegment)
    if lent.layer_page_bytes != pages:
        raise ConfigError(
            f"rank {place.rank} is to share the memory of rank {place.first}, and their blocks differ: "
            f"{sum(pages)} bytes in {len(pages)} layers here, "
            f"{sum(lent.layer_page_bytes)} bytes in {len(lent.layer_page_bytes)} layers there"
        )
    try:
        segment = SharedSlots.attach(lent.segment)
    except KvpactError as error:
        raise ConfigError(f"rank {place.rank} is to share the memory of rank {place.first}: {error}") from error
    segment.sharers = place.same_kv
    return segment


__all__ = ["Sharing", "TellOthers", "open_segment"]
