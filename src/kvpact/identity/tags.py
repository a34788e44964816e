"""What filled each of the engine's blocks: the epoch, and the adapter by its content.

Owns one number for each block of the engine's pool. A block whose tag is not its request's own was computed by other
weights or another adapter, or nobody knows what it holds; neither it nor what was computed behind it may be stored
(H38, H47, H48).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import Final, TypeAlias

Tag: TypeAlias = int

NO_TAG: Final[Tag] = 0
"""Of a block that holds garbage, or something that has no name."""

MAX_ADAPTERS: Final = 4096
"""Adapters whose tags are remembered within a generation; beyond them all begin anew, and older blocks go unsaved."""


def first_among(block_ids: Collection[int], held: Iterable[tuple[str, int, Sequence[int]]]) -> dict[str, int]:
    """By request, the first of its blocks that is one of `block_ids`, if any is.

    `held` has pieces of requests' block tables: the request, the number of the piece's first block, and the piece.
    """
    first_of: dict[str, int] = {}
    for request_id, start, piece in held:
        first = next((place for place, block_id in enumerate(piece, start) if block_id in block_ids), None)
        if first is not None:
            first_of[request_id] = min(first, first_of.get(request_id, first))
    return first_of


class BlockTags:
    """The tags of one engine's blocks, by block id. A block that was never filled has none."""

    def __init__(self) -> None:
        self._of_block = array("q")
        self._known: dict[str, Tag] = {}
        self._generation = 0
        self._last: Tag = NO_TAG

    def tag_of(self, generation: int, adapter: str) -> Tag:
        """What blocks are tagged with that are filled in this generation, which never falls, with this adapter."""
        if generation != self._generation or len(self._known) >= MAX_ADAPTERS:
            self._generation = generation
            self._known.clear()
        tag = self._known.get(adapter)
        if tag is None:
            self._last += 1
            tag = self._known[adapter] = self._last
        return tag

    def withdraw(self, adapter: str) -> Tag:
        """No block has this adapter's tag any more, whatever it says; the tag that it was. `NO_TAG` if unknown."""
        return self._known.pop(adapter, NO_TAG)

    def blocks_with(self, tag: Tag) -> list[int]:
        """All blocks that have this tag; looks at each block of the engine."""
        return [block_id for block_id, found in enumerate(self._of_block) if found == tag]

    def fill(self, block_ids: Iterable[int], tag: Tag) -> None:
        """These blocks have been filled, or are about to be."""
        for block_id in block_ids:
            if block_id >= len(self._of_block):
                self._of_block.extend([NO_TAG] * max(1024, block_id + 1 - len(self._of_block)))
            self._of_block[block_id] = tag

    def same_prefix(self, block_ids: Sequence[int], start: int, tag: Tag) -> int:
        """Up to where `block_ids` have this tag in a row, of which those before `start` are known to."""
        if tag == NO_TAG:
            return 0
        tags, end = self._of_block, len(block_ids)
        for place in range(start, end):
            block_id = block_ids[place]
            if block_id >= len(tags) or tags[block_id] != tag:
                return place
        return end
