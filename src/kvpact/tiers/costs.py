"""Recent costs of loads and prefill, as decaying averages, and the comparison by which a match is worth loading.

Owns the measurements and the one comparison. Knows numbers, not tiers or requests; without a measurement the answer is
"load".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

DECAY: Final = 0.8
"""Factor on the weight of earlier measurements at each new one: the last five make up two thirds."""


@dataclass(slots=True)
class DecayingRate:
    """A decaying average of amounts over seconds."""

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Add a measurement."""
        self.amount = DECAY * self.amount + amount
        self.seconds = DECAY * self.seconds + seconds

    @property
    def per_second(self) -> float:
        """The average; 0 until there is a measurement."""
        return self.amount / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class TierCosts:
    """Costs of one tier; unknown at first."""

    latency: DecayingRate = field(default_factory=DecayingRate)
    bandwidth: DecayingRate = field(default_factory=DecayingRate)

    @property
    def lookup_seconds(self) -> float:
        """Seconds per look-up; 0 until one is measured."""
        return 1 / self.latency.per_second if self.latency.per_second else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Verified bytes per second of reading; 0 until a read is measured."""
        return self.bandwidth.per_second

    def note_lookup(self, seconds: float) -> None:
        """Add the duration of a look-up."""
        self.latency.add(1, seconds)

    def note_read(self, nbytes: int, seconds: float) -> None:
        """Add a read: `nbytes` arrived in `seconds` of one thread."""
        self.bandwidth.add(nbytes, seconds)

    def forget_lookups(self) -> None:
        """Drop earlier measurements of look-ups, because of which the tier was not asked."""
        self.latency = DecayingRate()

    def forget_reads(self) -> None:
        """Drop earlier measurements of reads, because of which the tier was not read."""
        self.bandwidth = DecayingRate()

    def seconds_for(self, nbytes: int) -> float | None:
        """Expected seconds to read `nbytes`; None if nothing was read yet."""
        return nbytes / self.bytes_per_second if self.bytes_per_second else None


class PrefillRate:
    """Prefill rate of the engine, from each step's tokens and the time until the next step."""

    MAX_SECONDS: Final = 60.0
    """A longer step counts as a pause."""

    def __init__(self, least_tokens: int) -> None:
        """Steps with fewer than `least_tokens` tokens are ignored: they computed no prompt."""
        self._least = least_tokens
        self._rate = DecayingRate()
        self._step: tuple[float, int] | None = None

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens computed per second; 0 until a step is measured."""
        return self._rate.per_second

    def note_step(self, tokens: int, now: float) -> None:
        """Record that a step that computes `tokens` begins at `now`."""
        if self._step is not None:
            began, computed = self._step
            if 0 < now - began < self.MAX_SECONDS:
                self._rate.add(computed, now - began)
        self._step = (now, tokens) if tokens >= self._least else None

    def seconds_for(self, tokens: int) -> float:
        """Expected seconds to compute so many tokens; 0 if that is unknown."""
        return tokens / self.tokens_per_second if self.tokens_per_second else 0.0

    def is_faster(self, tokens: int, load_seconds: float | None) -> bool:
        """True if computing `tokens` is faster than loading them; False if either time is unknown, None or 0."""
        if not load_seconds or not self.tokens_per_second:
            return False
        return self.seconds_for(tokens) < load_seconds
