"""vLLM's block pool and queues as a `BlockHolder`: one seam between kvpact and the engine's own structures.

Owns nothing but the count of what was touched through it, so that misuse is named instead of corrupting the pool.
Floor 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvpact.contract import KVCacheBlockView
from kvpact.errors import PactViolation


class BlockPoolContext:
    """A facade over vLLM's `BlockPool` (0.26 to 0.33: `blocks`, `touch`, `free_blocks`, `evict_blocks`)."""

    def __init__(self, block_pool: Any) -> None:
        self._pool = block_pool
        self._touched: Counter[int] = Counter()

    def get_block(self, block_id: int) -> KVCacheBlockView:
        """See `BlockHolder`."""
        block = self._block(block_id)
        block_hash = block.block_hash
        return KVCacheBlockView(
            block_id=block_id,
            ref_count=block.ref_cnt,
            is_null=block.is_null,
            block_hash=bytes(block_hash) if block_hash is not None else None,
            group_id=0,
        )

    def touch(self, block_ids: Sequence[int]) -> None:
        """See `BlockHolder`."""
        self._pool.touch([self._block(block_id) for block_id in block_ids])
        self._touched.update(block_ids)

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """See `BlockHolder`."""
        for block_id, times in Counter(block_ids).items():
            if self._touched[block_id] < times:
                raise PactViolation(f"block {block_id} is freed but was not touched through this context")
        self._touched -= Counter(block_ids)
        self._pool.free_blocks([self._block(block_id) for block_id in block_ids])

    def evict_published(self, block_ids: Sequence[int]) -> None:
        """Take blocks out of the engine's prefix cache: their content is not what their hash says."""
        self._pool.evict_blocks(set(block_ids))

    @property
    def touched_blocks(self) -> int:
        """Blocks held through this context now."""
        return self._touched.total()

    def _block(self, block_id: int) -> Any:
        if not 0 <= block_id < len(self._pool.blocks):
            raise PactViolation(f"the pool has blocks 0 to {len(self._pool.blocks) - 1}, not {block_id}")
        return self._pool.blocks[block_id]
