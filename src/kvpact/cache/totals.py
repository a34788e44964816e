"""Counts of a ledger since its start, and the sums that must agree.

Owns the counts; the ledger adds to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Final, NamedTuple, TypeAlias

from kvpact.errors import PactViolation
from kvpact.metrics import MEMORY, EndReason
from kvpact.ranges import BlockRange, RangeSet

Rows: TypeAlias = tuple[tuple[int, str], ...]
"""Where a prompt's rows were found: tiers, each with the end of the rows that it has and none before it has."""


class Sources(NamedTuple):
    """Sources of a match, with the bytes that each supplied: rows of its chain, and blocks of side groups."""

    rows: Rows = ()
    """Memory has the rows of which nothing is said."""
    row_bytes: int = 1
    """Bytes of a row."""
    sides: tuple[tuple[str, int], ...] = ()
    """Tiers, each with its bytes of side groups' blocks."""
    num_rows: int = 1
    """Rows of the match, for all of which those blocks stand alike."""


NO_SOURCES: Final = Sources()
"""All was found in memory."""


def found_in(positions: BlockRange, sources: Sources, block_size: int) -> Iterator[tuple[str, int]]:
    """The tiers that had these tokens of a prompt, in its order, each with their number: as the bytes that each had.

    `positions` counts tokens, not blocks.
    """
    if sources is NO_SOURCES and positions.count:
        yield MEMORY, positions.count
        return
    at = positions.start
    tiers = list[str]()
    amounts = list[int]()
    for end, tier in (*sources.rows, (positions.end, MEMORY)):
        if (upto := min(positions.end, end * block_size)) > at:
            tiers.append(tier)
            amounts.append((upto - at) * sources.row_bytes * sources.num_rows)
            at = upto
    for tier, nbytes in sources.sides:
        tiers.append(tier)
        amounts.append(positions.count * nbytes)
    for tier, tokens in zip(tiers, shares_of(positions.count, amounts), strict=True):
        if tokens:
            yield tier, tokens


def shares_of(whole: int, amounts: Sequence[int]) -> list[int]:
    """Share `whole` things out as `amounts` are to one another; the last ones go to who lacks the largest part of one.

    The first gets all if every amount is 0.
    """
    total = sum(amounts)
    if not total:
        return [whole if not at else 0 for at in range(len(amounts))]
    shares = [whole * amount // total for amount in amounts]
    nearest = sorted(range(len(amounts)), key=lambda at: -(whole * amounts[at] % total))
    for at in nearest[: whole - sum(shares)]:
        shares[at] += 1
    return shares


@dataclass(slots=True)
class Totals:
    """Counts of a ledger since its start; no number falls.

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
