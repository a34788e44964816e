"""Which blocks of each KV cache group a match copies, and what names the content of one.

Owns the arithmetic between tokens, rows and the groups' blocks, for the monitor. Knows no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from kvpact.identity.groups import GroupKind, GroupSet
from kvpact.identity.keys import BlockKey
from kvpact.ranges import BlockRange

StoredBlock = tuple[BlockKey, int]
"""A block's content, and its KV cache group."""


def row_size(groups: GroupSet) -> int:
    """Tokens of a row: the smallest block of full attention, else of any kind."""
    full = [group.block_size for group in groups.groups if group.kind is GroupKind.FULL]
    return min(full or [group.block_size for group in groups.groups])


class GroupBlocks:
    """The groups of one engine, whose settlements count in rows of `row_size` tokens."""

    def __init__(self, groups: GroupSet, row_size: int) -> None:
        self.groups, self.row_size = groups.groups, row_size
        only = self.groups[0]
        self.keeps_everything = len(self.groups) == 1 and only.kind is GroupKind.FULL and not only.drops_last
        """Whether there is one group, of full attention."""
        self.key_tokens = gcd(row_size, *(group.block_size for group in self.groups))
        if any(group.drops_last for group in self.groups):
            self.key_tokens = 1
        """Tokens of one of the keys that name contents."""

    def content(self, keys: Sequence[BlockKey], group: int, block: int) -> StoredBlock | None:
        """What a group's full block holds, by the key of the last tokens that it depends on; None if the request is
        shorter."""
        last = (block + 1) * self.groups[group].block_size // self.key_tokens - 1 + self.groups[group].drops_last
        return (keys[last], group) if last < len(keys) else None

    def promised(self, group: int, start: int, end: int) -> BlockRange:
        """Blocks that must be stored for a match of the tokens from `start` to `end`, and that it copies into the
        engine."""
        return self._beyond(group, start, self.groups[group].needed(end))

    def within(self, group: int, start: int, end: int) -> BlockRange:
        """Blocks that such a match may copy at most."""
        return self._beyond(group, start, BlockRange(0, -(-end // self.groups[group].block_size)))

    def _beyond(self, group: int, start: int, blocks: BlockRange) -> BlockRange:
        first = max(blocks.start, start // self.groups[group].block_size)
        return BlockRange(first, max(0, blocks.end - first))

    def arrived(self, group: int, blocks: BlockRange, rows: set[int], loaded: set[int]) -> set[int]:
        """The blocks of a job whose committed `rows` are all `loaded`."""
        size, row = self.groups[group].block_size, self.row_size
        spans = {block: set(range(block * size // row, -(-(block + 1) * size // row))) & rows for block in blocks}
        return {block for block, span in spans.items() if span <= loaded}

    def full(self, group: int, table: Sequence[int], computed: int) -> tuple[list[int], list[int]]:
        """A request's blocks that hold what they should once `computed` tokens are, and those that do not yet.

        A state is where it should be only just then; another block of states keeps what it has.
        """
        kind = self.groups[group]
        end = computed // kind.block_size
        if kind.kind is not GroupKind.STATE:
            return [i for i in range(min(end, len(table))) if table[i]], list(range(end, len(table)))
        whole = computed % kind.block_size == 0
        return ([end - 1] if whole and end else [], list(range(end, len(table))))
