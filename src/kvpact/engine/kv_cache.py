"""Block tables of requests: local prefix hits, allocation over KV cache groups, publication, sliding windows.

Owns the blocks of each request and when they are published. Never decides which request is scheduled, and publishes at
most what the scheduler calls valid.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b

from kvpact.contract import num_blocks_for
from kvpact.engine.block_pool import NULL_BLOCK, BlockPool
from kvpact.engine.config import EngineConfig, KVCacheGroup
from kvpact.engine.oracle import position_extras
from kvpact.engine.request import Request


@dataclass(frozen=True, slots=True)
class LocalHit:
    """What the engine's own prefix cache holds of a request: `num_tokens`, and the blocks of each group."""

    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]


class KVCacheManager:
    """The block tables of one engine over one pool."""

    def __init__(self, config: EngineConfig) -> None:
        self.pool = BlockPool(config.num_blocks, len(config.groups))
        self.block_size = config.block_size
        self.groups = config.groups
        self.has_windows = any(group.sliding_window is not None for group in config.groups)
        self._prefix_caching = config.prefix_caching
        self._hash_seed = config.hash_seed
        self._no_hit = LocalHit(0, tuple(() for _ in config.groups))
        self.publishers: dict[int, tuple[Request, int]] = {}
        """Published block id -> request and block index: from these the oracle knows what the block must hold."""

    # Names

    def extend_hashes(self, request: Request) -> list[bytes]:
        """The engine's own hashes of the request's full blocks; opaque, and different for every `hash_seed`."""
        size, hashes, tokens = self.block_size, request.block_hashes, request.token_ids
        for block in range(len(hashes), len(tokens) // size):
            if hashes:
                digest = blake2b(hashes[-1], digest_size=16)
            else:
                digest = blake2b(repr(self._root(request)).encode(), key=self._hash_seed, digest_size=16)
            start, end = block * size, (block + 1) * size
            digest.update(array("q", tokens[start:end]).tobytes())
            if request.identity is not None and (request.identity.media or request.identity.embeddings):
                digest.update(position_extras(request.identity, end, size)[start:].tobytes())
            hashes.append(digest.digest())
        return hashes

    def _root(self, request: Request) -> tuple[str, ...]:
        if request.identity is None:
            return ("unknown", request.request_id)
        return ("known", request.identity.adapter, request.identity.salt)

    # Hits

    def find_hit(self, request: Request) -> LocalHit:
        """The longest prefix that all groups have, without the last token. Takes no references."""
        if not self._prefix_caching:
            return self._no_hit
        hashes = self.extend_hashes(request)
        limit = (len(request.token_ids) - 1) // self.block_size
        while limit > 0:
            shorter = min(self._longest(hashes, g, group, limit) for g, group in enumerate(self.groups))
            if shorter == limit:
                break
            limit = shorter
        if limit <= 0:
            return self._no_hit
        blocks = []
        for group_id, group in enumerate(self.groups):
            first = group.first_live_token(limit * self.block_size) // self.block_size
            found = (self.pool.find(hashes[block], group_id) for block in range(first, limit))
            blocks.append((NULL_BLOCK,) * first + tuple(block for block in found if block is not None))
        return LocalHit(limit * self.block_size, tuple(blocks))

    def _longest(self, hashes: list[bytes], group_id: int, group: KVCacheGroup, limit: int) -> int:
        """The group's longest hit of at most `limit` blocks: `limit` if it has all blocks that it reads there."""
        needed = range(group.first_live_token(limit * self.block_size) // self.block_size, limit)
        order = needed if group.sliding_window is None else reversed(needed)
        return next((block for block in order if self.pool.find(hashes[block], group_id) is None), limit)

    # Allocation

    def admit(self, request: Request, hit: LocalHit, num_tokens: int, live_position: int, keep_free: int = 0) -> bool:
        """Give the request the hit's blocks and new ones up to `num_tokens`; without room returns False, changing
        nothing.

        Sliding-window groups get only blocks that the query at `live_position` or a later one reads. At least
        `keep_free` blocks stay in the pool.
        """
        size = self.block_size
        first_live = [group.first_live_token(live_position) // size for group in self.groups]
        total = num_blocks_for(num_tokens, size)
        adopted = [
            [NULL_BLOCK if index < first else block for index, block in enumerate(blocks)]
            for blocks, first in zip(hit.blocks, first_live, strict=True)
        ]
        new = [max(0, total - max(len(blocks), first)) for blocks, first in zip(adopted, first_live, strict=True)]
        revived = sum(self.pool.is_free(block) for blocks in adopted for block in blocks)
        if sum(new) + revived + keep_free > self.pool.num_free:
            return False
        for blocks in adopted:
            for block in blocks:
                self.pool.touch(block)
        for group_id, blocks in enumerate(adopted):
            blocks.extend([NULL_BLOCK] * (total - len(blocks) - new[group_id]))
            blocks.extend(self.pool.allocate(new[group_id], group_id))
        request.block_ids = adopted
        request.num_own_tokens = hit.num_tokens
        request.capacity = total * size
        request.num_published_blocks = hit.num_tokens // size
        request.publish_at = hit.num_tokens + size
        return True

    def grow(self, request: Request, num_tokens: int, keep_free: int = 0) -> bool:
        """Add blocks up to `num_tokens`; without room returns False, changing nothing. Frees blocks out of the
        window first."""
        if self.has_windows:
            self.free_out_of_window(request, request.num_computed_tokens)
        missing = -(-(num_tokens - request.capacity) // self.block_size)
        if missing > 0:
            if missing * len(self.groups) + keep_free > self.pool.num_free:
                return False
            for group_id, blocks in enumerate(request.block_ids):
                blocks.extend(self.pool.allocate(missing, group_id))
            request.capacity += missing * self.block_size
        return True

    def free_out_of_window(self, request: Request, position: int) -> None:
        """Free blocks that no query at `position` or later reads."""
        for group, blocks in zip(self.groups, request.block_ids, strict=True):
            dead = []
            for index in range(group.first_live_token(position) // self.block_size - 1, -1, -1):
                if blocks[index] == NULL_BLOCK:
                    break
                dead.append(blocks[index])
                blocks[index] = NULL_BLOCK
            if dead:
                self.pool.free(dead)

    def free(self, request: Request) -> None:
        """Free all of the request's blocks, the last one first: it is evicted first."""
        for blocks in request.block_ids:
            self.pool.free(blocks[::-1])
        request.block_ids = []
        request.capacity = 0
        request.num_published_blocks = 0

    # Publication

    def publish(self, request: Request, num_tokens: int) -> None:
        """Publish the request's full blocks up to `num_tokens`; the caller knows that they are valid on all ranks."""
        if self._prefix_caching:
            hashes = self.extend_hashes(request)
            end = min(num_tokens // self.block_size, len(hashes))
            for block in range(request.num_published_blocks, end):
                for blocks in request.block_ids:
                    block_id = blocks[block]
                    if block_id != NULL_BLOCK and self.pool.publish(block_id, hashes[block]):
                        self.publishers[block_id] = (request, block)
            request.num_published_blocks = max(request.num_published_blocks, end)
        request.publish_at = (num_tokens // self.block_size + 1) * self.block_size

    def unpublish_from(self, request: Request, block: int) -> None:
        """Unpublish the request's blocks from `block` on."""
        for blocks in request.block_ids:
            for block_id in blocks[block:]:
                self.pool.unpublish(block_id)
        request.num_published_blocks = min(request.num_published_blocks, block)
        request.publish_at = (request.num_published_blocks + 1) * self.block_size
