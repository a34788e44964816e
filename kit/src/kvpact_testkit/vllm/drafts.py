"""The drafts of a played model: guesses of its next tokens, of which all, some or none are right.

Owns the guesses, which depend on a request's tokens alone: equal on all ranks, and equal when played again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpact_testkit.engine.oracle import word
from kvpact_testkit.vllm.oracle import VOCABULARY, TokenChain

WRONG = VOCABULARY + 1
"""A token that is never sampled."""
UNKNOWN = -1
"""vLLM's placeholder for a draft that only the workers know."""


@dataclass(frozen=True, slots=True)
class Drafter:
    """Makes `tokens` guesses behind a request's tokens, each right in `accepted` percent of all cases.

    With `fewer` it makes fewer than that as often, like n-gram drafts.
    """

    tokens: int
    accepted: int = 0
    fewer: bool = False

    def guess(self, chain: TokenChain) -> list[int]:
        """The drafts behind these tokens."""
        if not self.tokens:
            return []
        ahead = TokenChain(chain.identity, list(chain.tokens))
        count = self.tokens
        if self.fewer:
            count = word("count", ahead.tokens[-1], len(ahead.tokens)) % (self.tokens + 1)
        guesses = []
        for _ in range(count):
            token = ahead.next_token()
            right = word("draft", token, len(ahead.tokens)) % 100 < self.accepted
            guesses.append(token if right else WRONG + word("wrong", token) % VOCABULARY)
            ahead.tokens.append(guesses[-1])
            if not right:
                guesses += [WRONG] * (count - len(guesses))
                break
        return guesses


def known(scheduled: Sequence[int], own: Sequence[int]) -> list[int]:
    """The drafts that a step verifies: the scheduler's, or the worker's own where that one has placeholders."""
    padded = [*own, *[UNKNOWN] * len(scheduled)]
    return [ours if given == UNKNOWN else given for given, ours in zip(scheduled, padded, strict=False)]
