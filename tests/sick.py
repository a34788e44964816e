"""A real tier that falls ill: it hangs, slows down, lies, refuses, answers with numbers out of all measure, or raises.

What an ill store does to its client is tested with the stores; here the client itself is ill, as a plug-in may be.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import partial
from typing import TypeVar

from kvpact.errors import TierError
from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import (
    BlockBuffer,
    Entry,
    Progress,
    SupportsLocate,
    SupportsPrefix,
    SupportsScan,
    Tier,
    TierCapacity,
    TierCounts,
    TierHealth,
)

SLOW_SECONDS = 0.05
BEYOND_MEASURE = 10**12
HUGE = [True] * 1_000_000

T = TypeVar("T")


class Sickness(StrEnum):
    """What it has."""

    HANG = "hang"
    """Every operation waits until the tier is cured."""
    SLOW = "slow"
    LIE = "lie"
    """It holds everything that anybody asks for, and nothing of it arrives; what it is given it throws away."""
    REFUSE = "refuse"
    """Every operation raises TierError, and it says that it is not well."""
    HUGE = "huge"
    """It names more blocks than it was asked for, in every answer."""
    RAISE = "raise"
    """Every method raises what nobody expects."""


class SickTier(Tier):
    """The tier below, but for what its `sickness` makes of each operation; None while it is well."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.name, self.exclusive = tier.name, tier.exclusive
        self.sickness: Sickness | None = None
        self.is_empty = False
        """It holds nothing and takes nothing: so that what a test stores is in the other tiers only."""
        self._cured = threading.Event()
        if isinstance(tier, SupportsPrefix):
            self.leading = partial(self._leading, tier)
            self.put_start = partial(self._put_start, tier)
        if isinstance(tier, SupportsLocate):
            self.locate = tier.locate
        if isinstance(tier, SupportsScan):
            self.scan = tier.scan

    def fall_ill(self, sickness: Sickness) -> None:
        """From the next operation on."""
        self._cured.clear()
        self.sickness = sickness

    def cure(self) -> None:
        """Whatever hangs goes on."""
        self.sickness = None
        self._cured.set()

    def _do(self, work: Callable[[], T], *, lie: T, huge: T) -> T:
        match self.sickness:
            case Sickness.HANG:
                self._cured.wait()
            case Sickness.SLOW:
                time.sleep(SLOW_SECONDS)
            case Sickness.LIE:
                return lie
            case Sickness.HUGE:
                return huge
            case Sickness.REFUSE:
                raise TierError("the store refuses")
            case Sickness.RAISE:
                raise ZeroDivisionError("a defect of the plug-in")
        return work()

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._ask(lambda: self.tier.lookup(keys), nothing=[False] * len(keys), lie=[True] * len(keys), huge=HUGE)

    def _leading(self, tier: SupportsPrefix, keys: Sequence[BlockKey]) -> int:
        return self._ask(lambda: tier.leading(keys), nothing=0, lie=len(keys), huge=BEYOND_MEASURE)

    def _put_start(self, tier: SupportsPrefix, keys: Sequence[BlockKey]) -> int:
        return self._ask(lambda: tier.put_start(keys), nothing=0, lie=len(keys), huge=BEYOND_MEASURE)

    def _ask(self, work: Callable[[], T], *, nothing: T, lie: T, huge: T) -> T:
        if self.is_empty:
            work = lambda: nothing  # noqa: E731
        if self.exclusive and self.sickness in (Sickness.HANG, Sickness.SLOW):
            return work()  # from memory, on the scheduler's thread: what hangs is the disk
        return self._do(work, lie=lie, huge=huge)

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None = None
    ) -> list[bool]:
        nothing = [False] * len(keys)
        return self._do(
            lambda: nothing if self.is_empty else self.tier.get(keys, buffers, on_progress), lie=nothing, huge=HUGE
        )

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        nothing, everything = [False] * len(entries), [True] * len(entries)
        return self._do(lambda: nothing if self.is_empty else self.tier.put(entries), lie=everything, huge=HUGE)

    def delete(self, keys: Iterable[BlockKey]) -> int:
        return self._do(lambda: self.tier.delete(keys), lie=BEYOND_MEASURE, huge=BEYOND_MEASURE)

    def clear(self) -> None:
        self._do(self.tier.clear, lie=None, huge=None)

    def capacity(self) -> TierCapacity:
        huge = TierCapacity(BEYOND_MEASURE, 1, BEYOND_MEASURE)
        return self._told(self.tier.capacity, huge)

    def counts(self) -> TierCounts:
        return self._told(self.tier.counts, TierCounts(*[BEYOND_MEASURE] * 4))

    def health(self) -> TierHealth:
        if self.sickness is Sickness.REFUSE:
            return TierHealth(ok=False, reason="the store refuses")
        return self._told(self.tier.health, TierHealth(ok=True, reason="x" * 1_000_000))

    def _told(self, work: Callable[[], T], huge: T) -> T:
        """Of what is asked on the scheduler's thread, which no tier may hold up: it answers or raises."""
        if self.sickness is Sickness.RAISE:
            raise ZeroDivisionError("a defect of the plug-in")
        return huge if self.sickness in (Sickness.LIE, Sickness.HUGE) else work()

    def close(self) -> None:
        self.cure()
        self.tier.close()
