"""Whether a match is worth loading: what loads and prefill have really cost lately, as decaying averages.

Owns the measurements and the one comparison. Knows neither tiers nor requests, only numbers; without a measurement it
says "load".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

DECAY: Final = 0.8
"""What remains of an average's weight after one more measurement: the last five count two thirds."""

FORGET_SECONDS: Final = 30.0
"""Without a read for so long, a tier that was too slow is tried again."""


@dataclass(slots=True)
class DecayingRate:
    """A decaying average of amounts over seconds."""

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """One more measurement."""
        self.amount = DECAY * self.amount + amount
        self.seconds = DECAY * self.seconds + seconds

    @property
    def per_second(self) -> float:
        """The average; 0 as long as there is none."""
        return self.amount / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class TierCosts:
    """What one tier costs; at first nothing is known."""

    latency: DecayingRate = field(default_factory=DecayingRate)
    bandwidth: DecayingRate = field(default_factory=DecayingRate)
    read_at: float = 0.0

    @property
    def lookup_seconds(self) -> float:
        """Seconds that a look-up takes; 0 as long as none was measured."""
        return 1 / self.latency.per_second if self.latency.per_second else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes that arrive, verified, in a second of reading; 0 as long as none was measured."""
        return self.bandwidth.per_second

    def note_lookup(self, seconds: float) -> None:
        """A look-up took so long."""
        self.latency.add(1, seconds)

    def note_read(self, nbytes: int, seconds: float, now: float) -> None:
        """So many bytes arrived in so much time of one thread."""
        self.bandwidth.add(nbytes, seconds)
        self.read_at = now

    def seconds_for(self, nbytes: int, now: float) -> float | None:
        """How long it should take to read `nbytes`, or None if nobody knows (any more)."""
        if not self.bytes_per_second or now > self.read_at + FORGET_SECONDS:
            return None
        return nbytes / self.bytes_per_second


class PrefillRate:
    """How fast the engine computes prompts, from the tokens of each step and the time until the next one."""

    MAX_SECONDS: Final = 60.0
    """A longer step was a pause."""

    def __init__(self, least_tokens: int) -> None:
        """Steps with fewer than `least_tokens` tokens say nothing about prompts."""
        self._least = least_tokens
        self._rate = DecayingRate()
        self._step: tuple[float, int] | None = None

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens that the engine computes in a second; 0 as long as none was measured."""
        return self._rate.per_second

    def note_step(self, tokens: int, now: float) -> None:
        """A step with so many tokens to compute begins."""
        if self._step is not None:
            began, computed = self._step
            if 0 < now - began < self.MAX_SECONDS:
                self._rate.add(computed, now - began)
        self._step = (now, tokens) if tokens >= self._least else None

    def is_faster(self, tokens: int, load_seconds: float | None) -> bool:
        """Whether `tokens` are computed sooner than they are loaded; False where one of both is not known."""
        if load_seconds is None or not self.tokens_per_second:
            return False
        return tokens / self.tokens_per_second < load_seconds
