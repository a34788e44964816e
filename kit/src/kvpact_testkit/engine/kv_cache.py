"""Block tables of requests: local prefix hits, allocation over KV cache groups, publication, what is not read any more.

Owns the blocks of each request and when they are published. Never decides which request is scheduled, and publishes at
most what the scheduler calls valid.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b

from kvpact.identity.groups import GroupKind, GroupSet, KVCacheGroup, LooseBlock
from kvpact.ranges import BlockRange
from kvpact_testkit.engine.block_pool import NULL_BLOCK, BlockPool
from kvpact_testkit.engine.config import EngineConfig
from kvpact_testkit.engine.oracle import position_extras
from kvpact_testkit.engine.request import Request


@dataclass(frozen=True, slots=True)
class LocalHit:
    """What the engine's own prefix cache holds of a request: `num_tokens`, and the blocks of each group."""

    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]


class KVCacheManager:
    """The block tables of one engine over one pool."""

    def __init__(self, config: EngineConfig) -> None:
        self.pool = BlockPool(config.num_blocks, len(config.groups))
        self.groups = config.groups
        self.group_set = GroupSet(config.groups)
        self.reads_all = all(group.kind is GroupKind.FULL for group in config.groups)
        """Whether each group reads all tokens before a computed one, so that no block is ever freed early."""
        self.has_states = any(group.kind is GroupKind.STATE for group in config.groups)
        self._block_size, self._hash_tokens = config.block_size, config.hash_tokens
        self._drops_last = any(group.drops_last for group in config.groups)
        self._prefix_caching = config.prefix_caching
        self._drafts = config.draft_tokens
        self._hash_seed = config.hash_seed
        self._no_hit = LocalHit(0, tuple(() for _ in config.groups))
        self.publishers: dict[int, tuple[Request, int]] = {}
        """Published block id -> request and block index: from these the oracle knows what the block must hold."""

    # Names

    def extend_hashes(self, request: Request) -> list[bytes]:
        """The engine's own hashes, one for every `hash_tokens`; opaque, and different for every `hash_seed`."""
        size, hashes, tokens = self._hash_tokens, request.block_hashes, request.token_ids
        for number in range(len(hashes), len(tokens) // size):
            if hashes:
                digest = blake2b(hashes[-1], digest_size=16)
            else:
                digest = blake2b(repr(self._root(request)).encode(), key=self._hash_seed, digest_size=16)
            start, end = number * size, (number + 1) * size
            digest.update(array("q", tokens[start:end]).tobytes())
            if request.identity is not None and (request.identity.media or request.identity.embeddings):
                digest.update(position_extras(request.identity, end, self._block_size)[start:].tobytes())
            hashes.append(digest.digest())
        return hashes

    def _root(self, request: Request) -> tuple[str, ...]:
        if request.identity is None:
            return ("unknown", request.request_id)
        return ("known", request.identity.adapter, request.identity.salt)

    def _hash_of(self, group: KVCacheGroup, block: int, hashes: list[bytes]) -> bytes | None:
        """The hash that names all that a block holds: with `drops_last`, of the token after it too."""
        number = (block + 1) * group.block_size // self._hash_tokens - 1 + group.drops_last
        return hashes[number] if number < len(hashes) else None

    # Hits

    def find_hit(self, request: Request) -> LocalHit:
        """The longest prefix that all groups have, without the last token. Takes no references.

        A request that must compute its prompt has none.
        """
        if not (self._prefix_caching and request.may_load):
            return self._no_hit
        hashes = self.extend_hashes(request)

        def found(number: int, block: int) -> int | None:
            name = self._hash_of(self.groups[number], block, hashes)
            return None if name is None else self.pool.find(name, number)

        def first_missing(number: int, blocks: BlockRange) -> int | None:
            return next((block for block in blocks if found(number, block) is None), None)

        tokens = self.group_set.longest_match(len(request.token_ids) - 1, first_missing)
        if not tokens:
            return self._no_hit
        tables = []
        for number, group in enumerate(self.groups):
            needed = group.needed(tokens)
            ids = (found(number, block) for block in needed)
            tables.append((NULL_BLOCK,) * needed.start + tuple(block for block in ids if block is not None))
        return LocalHit(tokens, tuple(tables))

    # Allocation

    def aligned(self, start: int, tokens: int, known: int) -> int:
        """Return how many of `tokens` from `start` on one step computes so that states are kept where matches end.

        A step that computes several tokens ends at the last such place that it reaches; the place before it counts too
        where a group drops the last block of a match.
        """
        size, end = self.group_set.alignment, start + tokens
        last = known - known % size
        for place in (last - size, last) if self._drops_last else (last,):
            if start < place < end:
                return place - start
        down = end - end % size
        return down - start if start < down and end < last else tokens

    def admit(
        self, request: Request, hit: LocalHit, num_tokens: int, loaded: int = 0, keep_free: int = 0, *,
        follows_load: bool = False,
    ) -> list[int] | None:  # fmt: skip
        """Give the request the hit's blocks, and new ones for `loaded` tokens after it and for those up to `num_tokens`
        that are computed after those; returns the new ones. Without room returns None, changing nothing.

        A group has null blocks for what is neither read nor written. Blocks that are read after the hit, but not after
        the load, are given only without `follows_load`. At least `keep_free` blocks stay in the pool.
        """
        computed = hit.num_tokens + loaded
        tables = [list(blocks) for blocks in hit.blocks]
        wanted: list[list[int]] = []
        for group, blocks in zip(self.groups, tables, strict=True):
            needed = group.needed(computed)
            if follows_load:
                live = min(needed.start, len(blocks))
                blocks[:live] = [NULL_BLOCK] * live
            places = sorted({*needed, *self._written(group, computed, num_tokens)})
            wanted.append([place for place in places if place >= len(blocks)])
        revived = sum(self.pool.is_free(block) for blocks in tables for block in blocks)
        if sum(map(len, wanted)) + revived + keep_free > self.pool.num_free:
            return None
        for blocks in tables:
            for block in blocks:
                self.pool.touch(block)
        request.block_ids = tables
        request.num_own_tokens = hit.num_tokens
        request.num_published_blocks = [hit.num_tokens // group.block_size for group in self.groups]
        request.first_kept_blocks = [0] * len(self.groups)
        request.publish_at = hit.num_tokens + self._hash_tokens
        request.capacity = self._capacity(num_tokens)
        return self._fill(request, wanted, num_tokens)

    def _capacity(self, num_tokens: int) -> int:
        """Tokens for which blocks for `num_tokens` have room."""
        return min(-(-num_tokens // group.block_size) * group.block_size for group in self.groups)

    def note_rewound(self, request: Request, position: int) -> None:
        """The request goes on from `position`: other chunks than before may need blocks where it has null blocks."""
        if not self.reads_all:
            request.capacity = position

    def _fill(self, request: Request, wanted: list[list[int]], num_tokens: int) -> list[int]:
        """New blocks at the places `wanted` of each group, null blocks elsewhere where there are none up to
        `num_tokens`."""
        new: list[int] = []
        for number, (blocks, places) in enumerate(zip(request.block_ids, wanted, strict=True)):
            taken = self.pool.allocate(len(places), number)
            group = self.groups[number]
            columns = -(-num_tokens // group.block_size) + self._scratch(group)
            blocks.extend([NULL_BLOCK] * (columns - len(blocks)))
            for place, block in zip(places, taken, strict=True):
                blocks[place] = block
            new += taken
        return new

    def grow(self, request: Request, start: int, num_tokens: int, keep_free: int = 0) -> list[int] | None:
        """Add the blocks that computing the tokens from `start` up to `num_tokens` writes; returns the new ones.

        Without room returns None, adding none. Frees what is not read any more first.
        """
        if not self.reads_all:
            self.free_unread(request, request.num_computed_tokens)
        wanted = [
            [place for place in self._written(group, start, num_tokens) if place >= len(blocks) or not blocks[place]]
            for group, blocks in zip(self.groups, request.block_ids, strict=True)
        ]
        if any(wanted) and sum(map(len, wanted)) + keep_free > self.pool.num_free:
            return None
        request.capacity = max(request.capacity, self._capacity(num_tokens))
        return self._fill(request, wanted, num_tokens)

    def free_unread(self, request: Request, position: int) -> None:
        """Free blocks that no query at `position` or later reads."""
        kept = request.first_kept_blocks
        for number, (group, blocks) in enumerate(zip(self.groups, request.block_ids, strict=True)):
            first = min(group.first_read(position) // group.block_size, len(blocks))
            if self._scratch(group):
                first = max(0, first - 1)  # the last step's drafts may have passed the end of the block before
            dead = blocks[kept[number] : first]
            if dead:
                self.pool.free(dead[::-1])
                blocks[kept[number] : first] = [NULL_BLOCK] * len(dead)
                kept[number] = first

    def free(self, request: Request) -> None:
        """Free all of the request's blocks, the last one first: it is evicted first."""
        for blocks in request.block_ids:
            self.pool.free(blocks[::-1])
        request.block_ids = []
        request.capacity = 0
        request.num_published_blocks = []

    # Publication

    def publish(self, request: Request, num_tokens: int) -> None:
        """Publish what is full of the request's blocks at `num_tokens`, where a step or a load ends; the caller knows
        that they are valid on all ranks."""
        if self._prefix_caching:
            hashes = self.extend_hashes(request)
            request.num_published_blocks = request.num_published_blocks or [0] * len(self.groups)
            for number, group in enumerate(self.groups):
                blocks, done = request.block_ids[number], request.num_published_blocks[number]
                full = self._full(group, done, num_tokens, len(hashes), request.num_accepted_drafts)
                for block in full:
                    name = self._hash_of(group, block, hashes)
                    block_id = blocks[block]
                    if block_id != NULL_BLOCK and name is not None and self.pool.publish(block_id, name):
                        self.publishers[block_id] = (request, block)
                request.num_published_blocks[number] = max(done, full.stop)
        request.publish_at = (num_tokens // self._hash_tokens + 1) * self._hash_tokens

    def _full(self, group: KVCacheGroup, done: int, num_tokens: int, num_hashes: int, accepted: int) -> range:
        """The group's blocks from `done` on that are full at `num_tokens`; of states, that which is there just then, or
        was among the last `accepted` drafts."""
        if group.kind is GroupKind.STATE:
            end = num_tokens // group.block_size
            return range(max(done, end - 1), end) if num_tokens % group.block_size <= accepted else range(done, done)
        named = min(num_tokens // self._hash_tokens, num_hashes) - group.drops_last
        return range(done, max(0, named) * self._hash_tokens // group.block_size)

    def unpublish_from(self, request: Request, num_tokens: int) -> None:
        """Unpublish the request's blocks that hold a token from `num_tokens` on."""
        for number, (group, blocks) in enumerate(zip(self.groups, request.block_ids, strict=True)):
            first = num_tokens // group.block_size
            for block_id in blocks[first:]:
                self.pool.unpublish(block_id)
            request.num_published_blocks[number] = min(request.num_published_blocks[number], first)
        request.publish_at = (num_tokens // self._hash_tokens + 1) * self._hash_tokens

    # States

    def offered(self, request: Request, num_tokens: int) -> list[LooseBlock]:
        """The states of a request that are in their blocks once a step has run that computes its `num_tokens`."""
        found = list[LooseBlock]()
        for number, group in enumerate(self.groups):
            end, beyond = divmod(num_tokens, group.block_size)
            is_there = beyond <= request.num_accepted_drafts and num_tokens - beyond > request.num_offered_tokens
            if group.kind is GroupKind.STATE and is_there and request.block_ids[number][end - 1] != NULL_BLOCK:
                found.append((number, end - 1, request.block_ids[number][end - 1]))
        request.num_offered_tokens = num_tokens
        return found

    def _scratch(self, group: KVCacheGroup) -> int:
        """Blocks behind a request's last one that hold the states of drafts."""
        return self._drafts if group.kind is GroupKind.STATE else 0

    def _written(self, group: KVCacheGroup, start: int, end: int) -> range:
        """The group's blocks that computing the tokens from `start` to `end` writes: of states, only that at the end,
        and those of drafts behind it."""
        last = -(-end // group.block_size)
        if start >= end:
            return range(0)
        if group.kind is GroupKind.STATE:
            return range(last - 1, last + self._drafts)
        return range(start // group.block_size, last)
