"""Layout of a block in one rank's piece of a slot: layer by layer, in whole memory pages."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

PAGE_BYTES = 4096
"""Alignment of every slot piece, in bytes: O_DIRECT and page mapping need it."""


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Layout of one rank's piece of a slot: layer by layer, in the order of registration, in bytes."""

    layer_page_bytes: tuple[int, ...]

    @property
    def rank_slot_bytes(self) -> int:
        """Bytes of one rank's piece, rounded up to whole memory pages."""
        return -(-sum(self.layer_page_bytes) // PAGE_BYTES) * PAGE_BYTES

    @property
    def layer_offsets(self) -> tuple[int, ...]:
        """Offset of each layer's page in the piece, in bytes."""
        return tuple(accumulate(self.layer_page_bytes, initial=0))[:-1]
