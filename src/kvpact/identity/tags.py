"""Tags of the engine's blocks: the epoch, and the adapter by its content, that filled each.

Owns one number for each block of the engine's pool. A block whose tag is not its request's own was computed by other
weights or another adapter, or its content is unknown; neither it nor blocks computed after it may be stored (H38, H47,
H48).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np

Tag: TypeAlias = int

FEW: Final = 8
"""Most blocks that are compared one by one: for so few numpy is slower."""

MIN_GROWTH: Final = 1024
"""Least number of blocks by which the table of tags grows."""

NO_TAG: Final[Tag] = 0
"""Tag of a block with garbage, or content without a name."""

MAX_ADAPTERS: Final = 4096
"""Most adapters with tags in a generation; after that all get new tags, and older blocks are not saved."""


def first_among(block_ids: Collection[int], held: Iterable[tuple[str, int, Sequence[int]]]) -> dict[str, int]:
    """Request -> its first block that is one of `block_ids`, if any is.

    `held` has pieces of requests' block tables: the request, the number of the piece's first block, and the piece.
    """
    first_of: dict[str, int] = {}
    for request_id, start, piece in held:
        first = next((place for place, block_id in enumerate(piece, start) if block_id in block_ids), None)
        if first is not None:
            first_of[request_id] = min(first, first_of.get(request_id, first))
    return first_of


class BlockTags:
    """Tags of one engine's blocks, by block id. A block that was never filled has none."""

    def __init__(self) -> None:
        self._of_block = np.zeros(0, np.int64)
        self._known: dict[str, Tag] = {}
        self._generation = 0
        self._last: Tag = NO_TAG

    def tag_of(self, generation: int, adapter: str) -> Tag:
        """Tag of blocks that are filled in this generation with this adapter. `generation` never falls."""
        if generation != self._generation or len(self._known) >= MAX_ADAPTERS:
            self._generation = generation
            self._known.clear()
        tag = self._known.get(adapter)
        if tag is None:
            self._last += 1
            tag = self._known[adapter] = self._last
        return tag

    def withdraw(self, adapter: str) -> Tag:
        """Count no block as filled with this adapter from now on. Returns its former tag, `NO_TAG` if it had none."""
        return self._known.pop(adapter, NO_TAG)

    def blocks_with(self, tag: Tag) -> list[int]:
        """Ids of all blocks with this tag. O(blocks of the engine)."""
        found: list[int] = np.flatnonzero(self._of_block == tag).tolist()
        return found

    def fill(self, block_ids: Collection[int], tag: Tag) -> None:
        """Tag blocks that have been filled, or are about to be."""
        if len(block_ids) <= FEW:
            for block_id in block_ids:
                self._know(block_id)
                self._of_block[block_id] = tag
        else:
            places = np.frombuffer(array("q", block_ids), np.int64)
            self._know(int(places.max()))
            self._of_block[places] = tag

    def _know(self, block_id: int) -> None:
        """Grow the table to have a tag for each block up to `block_id`."""
        if block_id >= len(self._of_block):
            more = max(MIN_GROWTH, block_id + 1 - len(self._of_block))
            self._of_block = np.concatenate((self._of_block, np.full(more, NO_TAG, np.int64)))

    def has(self, block_id: int, tag: Tag) -> bool:
        """True if the block has this tag, which is not `NO_TAG`."""
        return tag != NO_TAG and block_id < len(self._of_block) and bool(self._of_block[block_id] == tag)

    def same_prefix(self, block_ids: Sequence[int], start: int, tag: Tag, end: int | None = None) -> int:
        """Number of leading `block_ids[:end]` with this tag; those before `start` are known to have it."""
        end = len(block_ids) if end is None else end
        if tag == NO_TAG:
            return 0
        if start >= end:
            return end
        if end - start <= FEW:
            others = (place for place in range(start, end) if not self.has(block_ids[place], tag))
            return next(others, end)
        places = np.frombuffer(array("q", block_ids[start:end]), np.int64)
        known = len(self._of_block)
        differ = (places >= known) | (self._of_block[np.minimum(places, known - 1)] != tag) if known else places >= 0
        first = int(differ.argmax())
        return start + first if differ[first] else end
