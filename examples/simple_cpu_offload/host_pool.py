"""Blocks of host memory behind the interface that the engine's blocks have: `get_block`, `touch`, `free_blocks` and
`iter_free_blocks`.

Owns which host blocks are held, which are published under which name, and the order in which they are reused. Copies
nothing. The misuse rules, and the queue itself, are those of kvpact's embedded engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from kvpact import BlockHolder, KVCacheBlockView
from kvpact.block_refs import BlockRefs
from kvpact_testkit.engine.block_pool import NULL_BLOCK, BlockPool


class Pool(BlockHolder, Protocol):
    """What both pools offer: the engine's, which is a `SchedulerContext`, and the host's."""

    def iter_free_blocks(self, after_block: int | None = None) -> Iterator[KVCacheBlockView]:
        """The blocks that nobody holds, in the order in which they will be reused."""


class HostPool:
    """A `Pool` of host blocks. Block 0 is the null block, as in the engine's pool.

    A block bears the name of the engine's block from which it was copied.
    """

    def __init__(self, blocks: BlockPool) -> None:
        self._blocks = blocks
        self._refs = BlockRefs(NULL_BLOCK)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, published ones included."""
        return self._blocks.num_free

    @property
    def held(self) -> int:
        """References to blocks."""
        return self._refs.total

    # The interface of both pools

    def get_block(self, block_id: int) -> KVCacheBlockView:
        """See `BlockHolder`."""
        return replace(self._blocks.view(block_id), block_hash=self._blocks.block_hash[block_id])

    def touch(self, block_ids: Sequence[int]) -> None:
        """See `BlockHolder`."""
        for block_id in block_ids:
            self._blocks.require(block_id)
        self._refs.take(block_ids)
        for block_id in block_ids:
            self._blocks.touch(block_id)

    def free_blocks(self, block_ids: Sequence[int], *, evict_first: bool = False) -> None:
        """See `BlockHolder`."""
        self._refs.give_back(block_ids)
        self._blocks.free(block_ids, evict_first=evict_first)

    def iter_free_blocks(self, after_block: int | None = None) -> Iterator[KVCacheBlockView]:
        """See `Pool`."""
        return (self.get_block(view.block_id) for view in self._blocks.iter_free(after_block))

    # What only the owner of the blocks does

    def take(self, group_ids: Iterable[int]) -> list[int]:
        """Hold a block for each of these groups, from the head of the queue; what was in them is forgotten."""
        taken = [block for group_id in group_ids for block in self._blocks.allocate(1, group_id)]
        self._refs.take(taken)
        return taken

    def publish(self, block_id: int, name: bytes) -> None:
        """Let a held block be found by its name, unless another one is found by it already."""
        self._blocks.publish(block_id, name)

    def find(self, name: bytes, group_id: int) -> int | None:
        """The block of this name."""
        return self._blocks.find(name, group_id)

    def unpublish(self, block_ids: Iterable[int]) -> None:
        """Let nobody find these blocks any more."""
        for block_id in block_ids:
            self._blocks.unpublish(block_id)

    def unpublish_all(self) -> None:
        """Let nobody find any block any more."""
        self._blocks.unpublish_all()

    def check(self) -> None:
        """Raise PactViolation if references, free queue and names do not agree."""
        self._blocks.check(dict(self._refs.counts))
