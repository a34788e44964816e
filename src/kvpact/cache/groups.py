"""Which blocks of each KV cache group a match needs, and the longest match for which all groups have theirs.

A model's layers form groups that keep different parts of a prefix: all of it, the last tokens of it, or one state at
its end. Owns the rules of each kind, and the search over all groups. Knows no keys, slots or engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import lcm

from kvpact.errors import ConfigError
from kvpact.ranges import BlockRange

FirstMissing = Callable[[int, BlockRange], int | None]
"""(number of a group, blocks in the group's numbering) -> the first of the blocks that is not resident, if any."""


class GroupKind(StrEnum):
    """What the layers of a group read of the tokens before the one that they compute."""

    FULL = "full attention"
    """All of them."""
    WINDOW = "sliding window"
    """Those of the last `span` tokens, the computed one included."""
    CHUNK = "chunked local attention"
    """Those of its own chunk; chunks are `span` tokens long, from the prompt's first token on."""
    STATE = "state space"
    """One state, which stands for all of them: a group's block holds that at its end."""


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers whose blocks are kept and served together. Sizes are tokens; `span` is 0 where the kind has none."""

    kind: GroupKind
    block_size: int
    span: int = 0
    drops_last: bool = False
    """Whether a block may be served only if the one after it is resident too, and not as the last one of a match.

    So for the layers of an EAGLE or MTP draft model: what they keep of a block's last token depends on the next token,
    which is in the next block.
    """

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"a block of a KV cache group has at least 1 token, not {self.block_size}")
        has_span = self.kind in (GroupKind.WINDOW, GroupKind.CHUNK)
        if (self.span < 1) == has_span or self.span < 0:
            raise ConfigError(f"a group of {self.kind} cannot have a span of {self.span} tokens")

    def first_read(self, num_tokens: int) -> int:
        """The first token that is read when the tokens from `num_tokens` on are computed; never falls as they grow."""
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
        """The blocks that a match of `num_tokens` tokens loads; whole blocks, the last one may reach beyond them."""
        start, end = self.first_read(num_tokens) // self.block_size, -(-num_tokens // self.block_size)
        if self.first_read(num_tokens) == num_tokens:
            start = end
        return BlockRange(start, end - start)

    def required(self, num_tokens: int) -> BlockRange:
        """The blocks that must be resident for a match of `num_tokens` tokens: those that it loads, or one more."""
        needed = self.needed(num_tokens)
        return BlockRange(needed.start, needed.count + 1) if self.drops_last and num_tokens else needed


@dataclass(frozen=True, slots=True)
class GroupSet:
    """All groups of a model. `alignment`: a match is a multiple of so many tokens, which whole blocks of each group
    make up."""

    groups: tuple[KVCacheGroup, ...]
    alignment: int = 1

    def __post_init__(self) -> None:
        if not self.groups:
            raise ConfigError("a model has at least one KV cache group")
        whole = lcm(*(group.block_size for group in self.groups))
        object.__setattr__(self, "alignment", lcm(whole, self.alignment))

    def longest_match(self, max_tokens: int, first_missing: FirstMissing) -> int:
        """Tokens of the longest prefix, at most `max_tokens`, for which every group has all that it needs.

        Asks about each block at most once. Linear: no group needs a block of a shorter match that a longer one reaches
        and does not need, so that a missing block ends all matches which reach it.
        """
        tokens = max_tokens - max_tokens % self.alignment
        sound_from = [-(-tokens // group.block_size) + 1 for group in self.groups]
        """For each group: its blocks from there to the end of the current candidate are resident."""
        agreed, number = 0, 0
        while tokens and agreed < len(self.groups):
            group = self.groups[number]
            wanted = group.required(tokens)
            unknown = BlockRange(wanted.start, max(0, min(wanted.end, sound_from[number]) - wanted.start))
            missing = first_missing(number, unknown) if unknown.count else None
            sound_from[number] = min(sound_from[number], wanted.start)
            if missing is None:
                agreed, number = agreed + 1, (number + 1) % len(self.groups)
            else:
                reached = max(0, missing - group.drops_last) * group.block_size
                tokens, agreed = reached - reached % self.alignment, 0
        return tokens
