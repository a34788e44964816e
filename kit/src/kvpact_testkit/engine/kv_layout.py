"""What a block of each KV cache group holds, and where: a word for each token, or one for the state at its end.

Owns the place of a group's words in a page, and the right words of a block. Knows no requests and no memory.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpact.identity.groups import GroupKind
from kvpact_testkit.engine.config import EngineConfig
from kvpact_testkit.engine.oracle import Digests, Tokens

Numbers = npt.NDArray[np.int64]

NEXT_TOKENS = np.int64(65_521)
"""Next tokens that a draft model's layers tell apart: what they write for a block's last token differs by this many
words."""


class KVLayout:
    """The words of all groups. They lie at the end of a page, whose beginning a group of small blocks leaves unused."""

    def __init__(self, config: EngineConfig) -> None:
        self.groups = config.groups
        self.page_words = config.page_words
        self.is_state = tuple(group.kind is GroupKind.STATE for group in config.groups)
        self.depends_on_next = tuple(
            group.drops_last and not state for group, state in zip(config.groups, self.is_state, strict=True)
        )
        words = [1 if state else g.block_size for g, state in zip(config.groups, self.is_state, strict=True)]
        self._offsets = tuple(config.page_words - count for count in words)
        self._words = tuple(words)

    def first_word(self, group: int, block_ids: Numbers) -> Numbers:
        """The first word of each of a group's blocks."""
        return block_ids * self.page_words + self._offsets[group]

    def span(self, group: int, block_id: int) -> slice:
        """The words of one block."""
        start = block_id * self.page_words + self._offsets[group]
        return slice(start, start + self._words[group])

    def first_token(self, group: int, block: int) -> int:
        """The token of the first word of a request's `block`; a state's is the last token that it stands for."""
        size = self.groups[group].block_size
        return (block + 1) * size - 1 if self.is_state[group] else block * size

    def expected(self, group: int, block: int, truth: Digests, tokens: Tokens) -> Digests:
        """The words of a full block of a sequence of `tokens`, without mask; `truth` has each token's digest."""
        start, end = self.first_token(group, block), (block + 1) * self.groups[group].block_size
        words = truth[start:end]
        if self.depends_on_next[group]:
            positions = np.arange(start, end, dtype=np.int64)
            words = words + self.next_tokens(group, positions, tokens[np.minimum(positions + 1, len(tokens) - 1)])
        return words

    def next_tokens(self, group: int, positions: Numbers, following: Tokens) -> Digests:
        """What is added to the digests at `positions` for the tokens that follow them: 0 but at a block's end."""
        at_end = (positions + 1) % self.groups[group].block_size == 0
        added: Digests = np.where(at_end, following % NEXT_TOKENS + 1, 0).astype(np.uint64)
        return added
