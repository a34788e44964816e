"""The references of one connector to an engine's blocks: how many to each, and what counts as misuse.

Owns the rules that every engine's scheduler context has in common, so that misuse raises the same error everywhere.
Never touches a block itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

from kvpact.errors import PactViolation


class Block(Protocol):
    """The part of an engine's block that the rules need; vLLM's own blocks have it, and so have views."""

    @property
    def block_id(self) -> int:
        """Its number in the pool."""

    @property
    def is_null(self) -> bool:
        """Whether it is the placeholder for blocks that a request does not need."""


_is_null, _block_id, _ONE = attrgetter("is_null"), attrgetter("block_id"), {1}


class BlockRefs:
    """The references of one context."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        """Block id -> number of references; no zeros."""

    @property
    def total(self) -> int:
        """Number of references."""
        return sum(self.counts.values())

    def take(self, blocks: Sequence[Block]) -> None:
        """Add a reference to each block; to all or, on an error, to none. Raises PactViolation for the null block."""
        if True in map(_is_null, blocks):
            raise PactViolation("the null block was touched; it stands for blocks that a request does not need")
        count_more(self.counts, [*map(_block_id, blocks)])

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Drop a reference to each block; to all or, on an error, to none. Raises PactViolation for one without."""
        counts = self.counts
        freed = dict.fromkeys(block_ids, 1)
        if len(freed) == len(block_ids) and {*map(counts.get, block_ids)} <= _ONE:
            for block_id in block_ids:
                del counts[block_id]
            return
        freed.clear()
        count_more(freed, block_ids)
        for block_id, times in freed.items():
            if self.counts.get(block_id, 0) < times:
                raise PactViolation(
                    f"block {block_id} is freed {times} times, touched {self.counts.get(block_id, 0)} times through "
                    "this context; free only what was touched"
                )
        for block_id, times in freed.items():
            if self.counts[block_id] == times:
                del self.counts[block_id]
            else:
                self.counts[block_id] -= times


def count_more(counts: dict[int, int], block_ids: Sequence[int]) -> None:
    """Count each block once. Not a Counter: its first `update` costs the scheduler 0.7 ms, and every other one 5 us."""
    new = dict.fromkeys(block_ids, 1)
    if len(new) == len(block_ids) and counts.keys().isdisjoint(new):
        counts.update(new)
        return
    for block_id in block_ids:
        counts[block_id] = counts.get(block_id, 0) + 1


def no_such_block(block_id: int, num_blocks: int) -> PactViolation:
    """The error for a block id that the pool does not have."""
    return PactViolation(f"block {block_id} does not exist; the pool has blocks 0 to {num_blocks - 1}")


def not_free(block_id: int) -> PactViolation:
    """The error for a walk that is to begin after a block that is not in the free queue."""
    return PactViolation(f"block {block_id} is not in the free queue; start from its head or from a free block")


def cursor_lost(block_id: int) -> PactViolation:
    """The error for a walk whose last block left the free queue, even if it is back in it."""
    return PactViolation(f"the cursor, block {block_id}, left the free queue while it was walked; start again")


def no_such_request(request_id: str) -> PactViolation:
    """The error for the blocks of a request that is not alive."""
    return PactViolation(f"no request {request_id} is alive; ask before it is finished")
