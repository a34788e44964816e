"""What engines in company answered, as plain data for the tests.

Loads neither vLLM nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Said:
    """An answer: each of its `n` parts has tokens, and for each token the most likely ones with log-probabilities."""

    cached_blocks: int
    parts: tuple[tuple[tuple[int, ...], tuple[tuple[tuple[int, float], ...], ...]], ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of the first part."""
        return self.parts[0][0]

    @property
    def logprobs(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Of its tokens, each with those as likely."""
        return self.parts[0][1]


@dataclass(frozen=True)
class Thrice:
    """One request asked three times: computed, from the engine's own prefix cache, and with that one dropped."""

    computed: Said
    local: Said
    loaded: Said
    loaded_blocks: int
    """By kvpact's own count, for the third."""

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Reused by each."""
        return self.computed.cached_blocks, self.local.cached_blocks, self.loaded.cached_blocks

    @property
    def is_right(self) -> bool:
        """Whether what was loaded gives the answer of the engine's own hit, bit by bit."""
        return self.loaded.parts == self.local.parts

    @property
    def is_as_computed(self) -> bool:
        """Whether it gives the tokens that were computed without any cache."""
        return [part[0] for part in self.loaded.parts] == [part[0] for part in self.computed.parts]
