"""What one connector holds of an engine's blocks: how often each, and what counts as misuse.

Owns the rules that every engine's scheduler context has in common, so that a mistake gets the same answer everywhere.
Never touches a block itself. Floor 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvpact.contract import KVCacheBlockView
from kvpact.errors import PactViolation


class Holds:
    """The holds of one context."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        """Block id -> how many times it is held; no zeros."""

    def take(self, views: Sequence[KVCacheBlockView]) -> None:
        """Each block is held once more; all of them or, on an error, none. The null block: PactViolation."""
        if any(view.is_null for view in views):
            raise PactViolation("the null block was touched; it stands for blocks that a request does not need")
        self.counts.update(view.block_id for view in views)

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Each block is held once less; all of them or, on an error, none. Not touched: PactViolation."""
        for block_id, times in Counter(block_ids).items():
            if self.counts[block_id] < times:
                raise PactViolation(
                    f"block {block_id} is freed {times} times, touched {self.counts[block_id]} times through this "
                    "context; free only what was touched"
                )
        for block_id in block_ids:
            self.counts[block_id] -= 1
            if not self.counts[block_id]:
                del self.counts[block_id]


def no_such_block(block_id: int, num_blocks: int) -> PactViolation:
    """The error for a block id that the pool does not have."""
    return PactViolation(f"block {block_id} does not exist; the pool has blocks 0 to {num_blocks - 1}")


def not_free(block_id: int) -> PactViolation:
    """The error for a walk that is to begin behind a block that is not in the free queue."""
    return PactViolation(f"block {block_id} is not in the free queue; start from its head or from a free block")


def cursor_lost(block_id: int) -> PactViolation:
    """The error for a walk whose last block left the free queue, even if it is back in it."""
    return PactViolation(f"the cursor, block {block_id}, left the free queue while it was walked; start again")


def no_such_request(request_id: str) -> PactViolation:
    """The error for the blocks of a request that is not alive."""
    return PactViolation(f"no request {request_id} is alive; ask before it is finished")
