"""References of one connector to an engine's blocks: their counts, and the errors for misuse.

Owns the rules common to every engine's scheduler context, so that misuse raises the same error everywhere.
Never touches a block itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvpact.errors import PactViolation


class BlockRefs:
    """References of one context.

    Connectors mostly free blocks in the sequences in which they took them, so references are kept by sequence, and
    counted by block only when another sequence is freed.
    """

    __slots__ = ("_by_block", "_by_sequence", "_null_block")

    def __init__(self, null_block: int) -> None:
        """`null_block` is the placeholder for blocks that a request does not need; it has no references."""
        self._null_block = null_block
        self._by_sequence: dict[tuple[int, ...], int] = {}
        """Block ids -> number of times they were taken together; no zeros."""
        self._by_block: dict[int, int] = {}
        """Block id -> number of references that are not in `_by_sequence`; no zeros."""

    @property
    def counts(self) -> Mapping[int, int]:
        """Block id -> number of references; no zeros. O(references)."""
        self._count_by_block()
        return self._by_block

    @property
    def total(self) -> int:
        """Number of references."""
        taken = sum(len(block_ids) * times for block_ids, times in self._by_sequence.items())
        return taken + sum(self._by_block.values())

    def take(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block; to all or, on an error, to none. Raises PactViolation for the null block."""
        if self._null_block in block_ids:
            raise PactViolation("the null block was touched; it stands for blocks that a request does not need")
        taken = tuple(block_ids)
        self._by_sequence[taken] = self._by_sequence.get(taken, 0) + 1

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Drop a reference to each block; to all or, on an error, to none. Raises PactViolation for one without."""
        taken = tuple(block_ids)
        times = self._by_sequence.get(taken, 0)
        if times > 1:
            self._by_sequence[taken] = times - 1
        elif times:
            del self._by_sequence[taken]
        else:
            self._count_by_block()
            self._give_back_each(taken)

    def _count_by_block(self) -> None:
        counts = self._by_block
        for block_ids, times in self._by_sequence.items():
            for block_id in block_ids:
                counts[block_id] = counts.get(block_id, 0) + times
        self._by_sequence.clear()

    def _give_back_each(self, block_ids: tuple[int, ...]) -> None:
        counts = self._by_block
        freed = Counter(block_ids)
        for block_id, times in freed.items():
            if counts.get(block_id, 0) < times:
                raise PactViolation(
                    f"block {block_id} is freed {times} times, touched {counts.get(block_id, 0)} times through this "
                    "context; free only what was touched"
                )
        for block_id, times in freed.items():
            if counts[block_id] == times:
                del counts[block_id]
            else:
                counts[block_id] -= times


def no_such_block(block_id: int, num_blocks: int) -> PactViolation:
    """Error for a block id that the pool does not have."""
    return PactViolation(f"block {block_id} does not exist; the pool has blocks 0 to {num_blocks - 1}")


def not_free(block_id: int) -> PactViolation:
    """Error for a walk from a block that is not in the free queue."""
    return PactViolation(f"block {block_id} is not in the free queue; start from its head or from a free block")


def cursor_lost(block_id: int) -> PactViolation:
    """Error for a walk whose last block left the free queue, even if it is back in it."""
    return PactViolation(f"the cursor, block {block_id}, left the free queue while it was walked; start again")


def no_such_request(request_id: str) -> PactViolation:
    """Error for the blocks of a request that is not alive."""
    return PactViolation(f"no request {request_id} is alive; ask before it is finished")
