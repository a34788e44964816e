"""Answers that come again as part of a prompt, where the engine has kept no state at their end.

Owns the ends of the last answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kvpact.identity.groups import GroupSet
from kvpact.identity.keys import BlockKey

MOST: Final = 4096
"""Answers that are remembered, in about 200 bytes each."""


class AnswerEnds:
    """Keys of the last rows of answers at which a match may end."""

    def __init__(self, groups: GroupSet) -> None:
        self._row_tokens = groups.block_size
        self._alignment = groups.alignment
        self._prompts: OrderedDict[BlockKey, int] = OrderedDict()
        """Key -> tokens of the prompt at which a match may end."""

    def note(self, keys: Sequence[BlockKey], prompt: int, computed: int) -> None:
        """Note the end of a request with a prompt of so many tokens, of which so many with the answer are computed."""
        of_prompt = (prompt - 1) // self._alignment * self._alignment
        end = computed // self._alignment * self._alignment
        row = end // self._row_tokens - 1
        if end > of_prompt and row < len(keys):
            self._prompts[keys[row]] = of_prompt
            if len(self._prompts) > MOST:
                self._prompts.popitem(last=False)

    def lost_tokens(self, keys: Sequence[BlockKey], end: int, cached: int) -> int:
        """Tokens of an answer that a request computes, since the state at `end` is missing; 0 where no answer ends.

        So many of its tokens are `cached`. After a reset fewer of its rows than before may have `keys`.
        """
        row = end // self._row_tokens - 1
        of_prompt = self._prompts.get(keys[row]) if row < len(keys) else None
        return max(0, end - max(of_prompt, cached)) if of_prompt is not None else 0
