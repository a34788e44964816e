"""The tokens of running requests, a row for each, with their digests and the drafts behind them.

Owns what the ranks know of a request's tokens; has no KV memory and no blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpact_testkit.engine import oracle
from kvpact_testkit.engine.oracle import Digests

VOCABULARY_BITS = 15
ACCEPTED_DRAFTS = 60
"""Percent of the drafts that are what the model samples."""
CHANCE = np.uint64(oracle.word("chance"))

Slots = npt.NDArray[np.int64]


class TokenRows:
    """`count` rows of at most `length` tokens."""

    def __init__(self, count: int, length: int) -> None:
        self.tokens = np.zeros((count, length), np.int64)
        self.extras = np.zeros((count, length), np.uint64)
        self.truth = np.zeros((count, length), np.uint64)
        """The digest of each token."""
        self.known = np.zeros(count, np.int64)
        """Tokens that are known, without drafts."""
        self.digested = np.zeros(count, np.int64)
        """Tokens that are digested."""
        self.sums = np.zeros(count, np.uint64)
        self.roots = np.zeros(count, np.uint64)

    def digest(self, rows: Slots, positions: Slots) -> None:
        """Digest the token that a request may have got since the last step."""
        fresh = self.digested[rows] == positions
        if not fresh.all():
            rows, positions = rows[fresh], positions[fresh]
        if len(rows):
            roots = self.roots[rows]
            tokens, extras = self.tokens[rows, positions], self.extras[rows, positions]
            sums = self.sums[rows] + oracle.contributions(tokens, extras, positions, roots)
            self.sums[rows] = sums
            self.truth[rows, positions] = oracle.mix(sums ^ roots)
            self.digested[rows] = positions + 1

    def digest_from(self, row: int, start: int) -> None:
        """Digest the row's tokens from `start` on again, with the row's root as the only state before them."""
        end = int(self.digested[row])
        truth, self.sums[row] = oracle.digests_of(
            self.tokens[row, start:end], self.extras[row, start:end], self.roots[row], start
        )
        self.truth[row, start:end] = truth

    def next_tokens(self, rows: Slots, positions: Slots) -> Slots:
        """The tokens that the model samples after those at `positions`."""
        tokens: Slots = (oracle.mix(self.truth[rows, positions]) >> np.uint64(64 - VOCABULARY_BITS)).view(np.int64)
        return tokens

    def guess(self, rows: Slots, known: Slots, ends: Slots) -> list[Digests]:
        """Put drafts behind the `known` tokens, up to `ends`, with their digests; returns the sums behind each."""
        sums = [self.sums[rows]]
        for place in range(int((ends - known).max())):
            drafts = ends - known > place
            these, positions = rows[drafts], known[drafts] + place
            tokens = self.next_tokens(these, positions - 1)
            chances = oracle.mix(self.truth[these, positions - 1] ^ CHANCE) % np.uint64(100)
            wrong = (chances >= np.uint64(ACCEPTED_DRAFTS)).astype(np.int64)
            self.tokens[these, positions] = (tokens + wrong) % (1 << VOCABULARY_BITS)
            self.digest(these, positions)
            sums.append(self.sums[rows])
        return sums

    def verify(self, rows: Slots, known: Slots, ends: Slots, sums: list[Digests], wrong: Sequence[int]) -> Slots:
        """Return up to where the drafts are what the model samples; none of a row that
        read what is `wrong`."""
        right = known.copy()
        spoilt = np.isin(rows, wrong)
        for place in range(len(sums) - 1):
            so_far = np.flatnonzero((right == known + place) & (known + place < ends) & ~spoilt)
            positions = known[so_far] + place
            equal = self.tokens[rows[so_far], positions] == self.next_tokens(rows[so_far], positions - 1)
            right[so_far[equal]] += 1
        drafted = np.flatnonzero(ends > known)
        if len(drafted):
            these, accepted = rows[drafted], (right - known)[drafted]
            self.sums[these] = np.array(sums)[accepted, drafted]
            self.digested[these] = self.known[these] = right[drafted]
        return right

    def drafts_of(self, rows: Slots, known: Slots, right: Slots, ends: Slots) -> dict[int, tuple[list[int], int]]:
        """For each request with drafts the accepted ones, and the number of others."""
        return {
            index: (self.tokens[rows[index], known[index] : right[index]].tolist(), int(ends[index] - right[index]))
            for index in np.flatnonzero(ends > known).tolist()
        }
