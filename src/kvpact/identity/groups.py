"""Blocks of each KV cache group that a match needs, and the longest match for which all groups have theirs.

A model's layers form groups that keep different parts of a prefix: all of it, its last tokens, or one state at its end.
Owns the rules of each kind, the names of their blocks, and the search over all groups. Knows no slots and no engine.

The blocks of one group, the *chain group*, are the *rows* of a request's chain. Each block of the others, the *side
groups*, is attached to the row in which it ends. A model of one group with full attention has a chain and no side
groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import lcm
from typing import Protocol, runtime_checkable

from blake3 import blake3

from kvpact.errors import ConfigError
from kvpact.identity.keys import KEY_BYTES, BlockKey
from kvpact.ranges import BlockRange

FirstMissing = Callable[[int, BlockRange], int | None]
"""(number of a group, blocks in the group's numbering) -> first of the blocks that is not resident, if any."""


LooseBlock = tuple[int, int, int]
"""KV cache group, number of the group's block, the engine's block."""


@runtime_checkable
class OffersStates(Protocol):
    """A scheduler context whose block tables do not say which block has which state: it offers states by name.

    Of an engine without it a group's block has the state at its end after a step that ends just there.
    """

    def offered_states(self, request_id: str) -> Sequence[LooseBlock]:
        """States of a request that are in their blocks once the running step has ended, each offered once; a group's
        block has the state at its end."""


class GroupKind(StrEnum):
    """Earlier tokens that the layers of a group read to compute a token."""

    FULL = "full attention"
    """All of them."""
    WINDOW = "sliding window"
    """The last `span` tokens, the computed one included."""
    CHUNK = "chunked local attention"
    """Tokens of the computed token's chunk; chunks are `span` tokens long, from the prompt's first token on."""
    STATE = "state space"
    """One state for all of them: a group's block holds the state at its end."""

    @property
    def has_span(self) -> bool:
        """True if a number of tokens limits how far back the layers read."""
        return self in (GroupKind.WINDOW, GroupKind.CHUNK)


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers whose blocks are kept and served together. Sizes are tokens; `span` is 0 where the kind has none."""

    kind: GroupKind
    block_size: int
    span: int = 0
    drops_last: bool = False
    """True if a block's content for its last token depends on the token after it.

    So for the layers of an EAGLE or MTP draft model. An engine that names a block by its own tokens drops the last
    block of a match for this. Here the name covers the next token too, and no block is dropped.
    """
    digest: bytes = bytes(KEY_BYTES)
    """Digest of 32 bytes that distinguishes the group: over its layers and the content of one block."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"a block of a KV cache group has at least 1 token, not {self.block_size}")
        if (self.span < 1) == self.kind.has_span or self.span < 0:
            raise ConfigError(f"a group of {self.kind} cannot have a span of {self.span} tokens")

    def first_read(self, num_tokens: int) -> int:
        """First token that the layers read to compute the tokens from `num_tokens` on; never falls as they grow."""
        match self.kind:
            case GroupKind.FULL:
                return 0
            case GroupKind.WINDOW:
                return max(0, min(num_tokens, num_tokens + 1 - self.span))
            case GroupKind.CHUNK:
                return num_tokens - num_tokens % self.span
            case GroupKind.STATE:
                return max(0, num_tokens - 1)

    def needed(self, num_tokens: int) -> BlockRange:
        """Blocks that a match of `num_tokens` tokens loads; whole blocks, the last one may reach beyond them."""
        first = self.first_read(num_tokens)
        end = -(-num_tokens // self.block_size)
        start = end if first == num_tokens else first // self.block_size
        return BlockRange(start, end - start)


@dataclass(frozen=True)
class GroupSet:
    """All groups of a model, as the engine numbers them.

    `alignment`: number of tokens of which each match is a multiple, whole blocks of each group. Raises ConfigError if
    the sizes of the groups' blocks do not divide one another.
    """

    groups: tuple[KVCacheGroup, ...]
    alignment: int = 1
    chain: int | None = field(init=False, default=None)
    """Number of the chain group: of those with full attention the one with the smallest blocks. None without any: then
    the rows of the chain have keys and no bytes, and all groups are side groups."""
    block_size: int = field(init=False, default=0)
    """Tokens of a row."""
    sides: tuple[int, ...] = field(init=False, default=())
    """Numbers of the side groups."""

    def __post_init__(self) -> None:
        if not self.groups:
            raise ConfigError("a model has at least one KV cache group")
        sizes = {number: group.block_size for number, group in enumerate(self.groups)}
        full = [number for number, group in enumerate(self.groups) if group.kind is GroupKind.FULL]
        chain = min(full, key=sizes.__getitem__, default=None)
        block_size = min(sizes.values()) if chain is None else sizes[chain]
        for size in sizes.values():
            if max(size, block_size) % min(size, block_size):
                raise ConfigError(
                    f"KV cache groups have blocks of {sorted(set(sizes.values()))} tokens; each must divide, or be a "
                    f"multiple of, those of the chain, {block_size}"
                )
        whole = lcm(*sizes.values())
        sides = tuple(number for number in sizes if number != chain)
        object.__setattr__(self, "alignment", lcm(whole, self.alignment))
        object.__setattr__(self, "chain", chain)
        object.__setattr__(self, "block_size", block_size)
        object.__setattr__(self, "sides", sides)

    @property
    def chain_digest(self) -> bytes:
        """Digest in the root of the chain's keys: zeros for a model of one group, whatever its digest."""
        if len(self.groups) == 1 and self.chain is not None:
            return bytes(KEY_BYTES)
        return blake3(b"".join(group.digest for group in self.groups)).digest()

    @property
    def tokens_ahead(self) -> int:
        """Number of tokens after a row that its key covers, so that a key covers every token its blocks depend on."""
        return int(any(group.drops_last for group in self.groups))

    @property
    def ends_at_states(self) -> bool:
        """True if a match needs of the side groups the states at its end, and nothing else."""
        return bool(self.sides) and all(self.groups[number].kind is GroupKind.STATE for number in self.sides)

    def row_of(self, number: int, block: int) -> int:
        """Row of the chain in which a group's block ends."""
        return ((block + 1) * self.groups[number].block_size - 1) // self.block_size

    def side_key(self, row_key: BlockKey, number: int, block: int) -> BlockKey:
        """Key of a side group's block that ends in the row `row_key`."""
        size = self.groups[number].block_size
        part = block % max(1, self.block_size // size)
        return blake3(row_key + self.groups[number].digest + part.to_bytes(8, "little")).digest()

    def worth_saving(self, number: int, new: range, known: int, branches: Sequence[int]) -> Sequence[int]:
        """New blocks of a side group that a later request may need; so many of its tokens are `known`.

        All of a group with full attention; no states, which the engine offers one by one; and the windows from which
        a request will go on: at the end of a prompt, of its answer, and where two prompts part, after the numbers
        of rows in `branches`. The others would be most of the stored blocks, and no request asks for them
        (research/hybrid_trace.py).
        """
        group = self.groups[number]
        if group.kind is GroupKind.FULL:
            return new
        if group.kind is GroupKind.STATE:
            return ()
        ends = [known - 1, *(rows * self.block_size for rows in branches)]
        whole = [end - end % self.alignment for end in ends if end > 0]
        last = range(max(new.start, group.needed(whole[0]).start if whole else 0), new.stop)
        tails = [range(max(new.start, tail.start), min(new.stop, tail.end)) for tail in map(group.needed, whole[1:])]
        return sorted({*last, *(block for tail in tails for block in tail)})

    def longest_match(self, max_tokens: int, first_missing: FirstMissing) -> int:
        """Tokens of the longest prefix, at most `max_tokens`, for which every group has all blocks that it needs.

        Asks about each block at most once. Linear: no group needs a block of a shorter match that a longer one reaches
        and does not need, so a missing block ends all matches that reach it.
        """
        tokens = max_tokens - max_tokens % self.alignment
        resident_from = [-(-tokens // group.block_size) + 1 for group in self.groups]
        """First block per group from which all up to the end of the current candidate are resident."""
        agreed = 0
        number = 0
        while tokens and agreed < len(self.groups):
            group = self.groups[number]
            wanted = group.needed(tokens)
            unknown = BlockRange(wanted.start, max(0, min(wanted.end, resident_from[number]) - wanted.start))
            missing = first_missing(number, unknown) if unknown.count else None
            resident_from[number] = min(resident_from[number], wanted.start)
            if missing is None:
                agreed += 1
                number = (number + 1) % len(self.groups)
            else:
                reached = missing * group.block_size
                tokens = reached - reached % self.alignment
                agreed = 0
        return tokens


def one_group(block_size: int) -> GroupSet:
    """Groups of a model whose layers all have full attention, in one group."""
    return GroupSet((KVCacheGroup(GroupKind.FULL, block_size),))
