"""What a ledger has counted since its start, and the sums that must agree.

Owns the counts; the ledger adds to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import TypeAlias

from kvpact.errors import PactViolation
from kvpact.metrics import MEMORY, EndReason
from kvpact.ranges import BlockRange, RangeSet

Sources: TypeAlias = tuple[tuple[int, str], ...]
"""Where a prompt's blocks were found: tiers, each with the end of the blocks that it has and none before it has."""


def found_in(positions: BlockRange, sources: Sources, block_size: int) -> Iterator[tuple[str, int]]:
    """The tiers that had these tokens of a prompt, in its order, each with their number; memory where nothing is said.

    `positions` counts tokens, not blocks.
    """
    at = positions.start
    for end, tier in (*sources, (positions.end, MEMORY)):
        if (upto := min(positions.end, end * block_size)) > at:
            yield tier, upto - at
            at = upto


@dataclass(slots=True)
class Totals:
    """What a ledger has counted since its start; no number falls.

    Tokens: `promised = committed + withdrawn + still planned`, `committed = loaded + failed + still loading`,
    `loaded >= used + used_again`. `used` counts each position of a request once; positions that the same request
    skips again after a preemption are `used_again`. Leases held are `leases_taken - leases_released`.
    """

    promised_tokens: int = 0
    committed_tokens: int = 0
    withdrawn_tokens: int = 0
    loaded_tokens: int = 0
    failed_tokens: int = 0
    used_tokens: int = 0
    used_again_tokens: int = 0
    plans_opened: int = 0
    leases_taken: int = 0
    leases_released: int = 0
    ended: Counter[EndReason] = field(default_factory=Counter)
    used_from: dict[str, int] = field(default_factory=lambda: {MEMORY: 0})
    """Used tokens by the tier in which their blocks were found. Of fixed size: other threads iterate over it."""

    def enter_tiers(self, tiers: Iterable[str]) -> None:
        """Count used tokens of these tiers from now on, too."""
        self.used_from = dict.fromkeys((*self.used_from, *tiers), 0) | self.used_from

    def split_used(self, positions: RangeSet, sources: Sources, block_size: int) -> None:
        """Count tokens that were used. What `sources` say nothing of was found in memory."""
        for part in positions.ranges:
            for tier, tokens in found_in(part, sources, block_size):
                if tier not in self.used_from:
                    self.enter_tiers((tier,))
                self.used_from[tier] += tokens

    def counts(self) -> Iterator[tuple[str, int, str]]:
        """Arguments for `Metrics.raise_to`: name, total, label."""
        for name in _COUNTED:
            yield name, getattr(self, name), ""
        for reason in EndReason:
            yield "plans_ended", self.ended[reason], reason
        for tier, tokens in self.used_from.items():
            yield "used_tokens_from", tokens, tier

    @property
    def leases_held(self) -> int:
        """Leases taken and not released yet."""
        return self.leases_taken - self.leases_released

    def check(self, *, planned: int, loading: int, plans: int, leases: int) -> None:
        """Verify the sums; raises PactViolation naming the first that is wrong.

        `planned` tokens are promised and `loading` ones committed by `plans` open plans, which hold `leases` leases.
        """
        for name, counted, parts in (
            ("promised_tokens", self.promised_tokens, self.committed_tokens + self.withdrawn_tokens + planned),
            ("committed_tokens", self.committed_tokens, self.loaded_tokens + self.failed_tokens + loading),
            ("plans_opened", self.plans_opened, self.ended.total() + plans),
            ("leases_held", self.leases_held, leases),
        ):
            if counted != parts:
                raise PactViolation(f"{name} is {counted}, and what it is made of sums up to {parts}")
        if self.loaded_tokens < self.used_tokens + self.used_again_tokens:
            raise PactViolation(f"more tokens used than loaded: {self}")


_COUNTED = tuple(item.name for item in fields(Totals) if item.name.endswith("_tokens") or item.name == "plans_opened")
