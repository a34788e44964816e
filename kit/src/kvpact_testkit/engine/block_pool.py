"""The engine's KV blocks: references, blocks published for reuse, and the order of eviction.

Owns reference counts, the free queue in eviction order and the published hashes. Never reads tokens or
a block's content.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvpact.block_refs import cursor_lost, no_such_block, not_free
from kvpact.contract import KVCacheBlockView
from kvpact.errors import PactViolation

NULL_BLOCK = 0
"""The entry of a block table where no block is needed (out of a sliding window). Never written, read or allocated."""


class BlockPool:
    """`num_blocks` blocks, the null block included, shared by `num_groups` KV cache groups.

    A block with references is in use. Without references it is in the free queue, still published, until it is
    allocated again.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        self.num_blocks = num_blocks
        self.ref_cnt = [0] * num_blocks
        self.block_hash: list[bytes | None] = [None] * num_blocks
        self.group_of = [0] * num_blocks
        self.published: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self.ref_cnt[NULL_BLOCK] = 1
        # The free queue is a ring of block ids through a sentinel; `_entries` counts each block's entries into it.
        self._sentinel = num_blocks
        self._next = [*range(1, num_blocks), num_blocks, 1]
        self._previous = [0, num_blocks, *range(1, num_blocks)]
        self._entries = [1] * num_blocks
        self.num_free = num_blocks - 1
        self.evictions = 0

    # References

    def allocate(self, count: int, group_id: int) -> list[int]:
        """Take `count` blocks from the head of the free queue and unpublish them."""
        if count > self.num_free:
            raise PactViolation(f"{count} blocks wanted, {self.num_free} are free; ask for no more than `num_free`")
        taken = []
        for _ in range(count):
            block = self._next[self._sentinel]
            self._unlink(block)
            if self.block_hash[block] is not None:
                self.unpublish(block)
                self.evictions += 1
            self.group_of[block] = group_id
            self.ref_cnt[block] = 1
            taken.append(block)
        return taken

    def touch(self, block: int) -> None:
        """Add a reference; a free block leaves the free queue and keeps its content."""
        if block != NULL_BLOCK:
            if self.ref_cnt[block] == 0:
                self._unlink(block)
            self.ref_cnt[block] += 1

    def free(self, blocks: Sequence[int], *, evict_first: bool = False) -> None:
        """Drop a reference of each block. Blocks without references go to the queue's tail in the order given: the
        first is evicted first. With `evict_first` they go to its head, in the same order."""
        place = self._sentinel if evict_first else None
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self.ref_cnt[block] < 1:
                raise PactViolation(f"block {block} is freed but nobody holds it")
            self.ref_cnt[block] -= 1
            if self.ref_cnt[block] == 0:
                self._insert(block, self._previous[self._sentinel] if place is None else place)
                place = place if place is None else block

    # Reuse

    def find(self, block_hash: bytes, group_id: int) -> int | None:
        """The block published under this hash in this group."""
        return self.published[group_id].get(block_hash)

    def publish(self, block: int, block_hash: bytes) -> bool:
        """Offer a block in use for reuse. False if another block has the hash already: this one is not published."""
        owner = self.published[self.group_of[block]].setdefault(block_hash, block)
        if owner == block:
            if self.block_hash[block] not in (None, block_hash):
                raise PactViolation(f"block {block} is published twice under different hashes")
            self.block_hash[block] = block_hash
        return owner == block

    def unpublish(self, block: int) -> None:
        """Withdraw a block from reuse. Does nothing for a block that is not published."""
        block_hash = self.block_hash[block]
        if block_hash is not None:
            del self.published[self.group_of[block]][block_hash]
            self.block_hash[block] = None

    def unpublish_all(self) -> None:
        """Withdraw all blocks from reuse."""
        for published in self.published:
            for block in published.values():
                self.block_hash[block] = None
            published.clear()

    # The free queue

    def view(self, block: int) -> KVCacheBlockView:
        """The block as a connector may see it. Raises PactViolation for an unknown block id."""
        self.require(block)
        block_hash, group = self.block_hash[block], self.group_of[block]
        name = block_hash + group.to_bytes(4, "big") if block_hash is not None else None
        return KVCacheBlockView(block, self.ref_cnt[block], block == NULL_BLOCK, name, group)

    def require(self, block: int) -> None:
        """Raises PactViolation for an unknown block id."""
        if not 0 <= block < self.num_blocks:
            raise no_such_block(block, self.num_blocks)

    def is_free(self, block: int) -> bool:
        """Whether the block is in the free queue."""
        return block != NULL_BLOCK and self.ref_cnt[block] == 0

    def iter_free(self, after_block: int | None = None) -> Iterator[KVCacheBlockView]:
        """The free queue in eviction order, from its head or from the block after `after_block`.

        The queue may change while a caller iterates, except for the block returned last: it is the cursor. If that
        block left the queue, even if it is back at the tail, the next step raises PactViolation.
        """
        if after_block is None:
            cursor = self._sentinel
        elif self.view(after_block).is_null or not self.is_free(after_block):
            raise not_free(after_block)
        else:
            cursor = after_block
        return self._walk(cursor)

    def _walk(self, cursor: int) -> Iterator[KVCacheBlockView]:
        entry = 0 if cursor == self._sentinel else self._entries[cursor]
        while True:
            if cursor != self._sentinel and (not self.is_free(cursor) or self._entries[cursor] != entry):
                raise cursor_lost(cursor)
            cursor = self._next[cursor]
            if cursor == self._sentinel:
                return
            entry = self._entries[cursor]
            yield self.view(cursor)

    def _insert(self, block: int, before: int) -> None:
        """Insert the block into the queue after `before`."""
        after = self._next[before]
        self._next[before] = block
        self._previous[block] = before
        self._next[block] = after
        self._previous[after] = block
        self._entries[block] += 1
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self.num_free -= 1

    def check(self, references: dict[int, int]) -> None:
        """Verify the pool against `references`: block id -> references that its holders know of. Raises
        PactViolation."""
        walked = [view.block_id for view in self.iter_free()]
        if len(walked) != self.num_free or len(set(walked)) != len(walked):
            raise PactViolation(f"the free queue has {len(walked)} entries, {self.num_free} blocks are counted as free")
        free = set(walked)
        for block in range(1, self.num_blocks):
            if self.ref_cnt[block] != references.get(block, 0):
                raise PactViolation(
                    f"block {block} has {self.ref_cnt[block]} references, "
                    f"its holders account for {references.get(block, 0)}"
                )
            if (self.ref_cnt[block] == 0) != (block in free):
                raise PactViolation(
                    f"block {block} has {self.ref_cnt[block]} references; in the free queue: {block in free}"
                )
        for group_id, published in enumerate(self.published):
            for block_hash, block in published.items():
                if self.block_hash[block] != block_hash or self.group_of[block] != group_id:
                    raise PactViolation(
                        f"block {block} is published in group {group_id} under a hash that is not its own"
                    )
        if sum(len(published) for published in self.published) != sum(h is not None for h in self.block_hash):
            raise PactViolation("a block carries a hash under which it cannot be found")
        if self.ref_cnt[NULL_BLOCK] != 1 or self.block_hash[NULL_BLOCK] is not None:
            raise PactViolation("the null block was freed or published")
