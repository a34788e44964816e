"""Judges visits: wrong answers first, then the figures of each subject's row.

A function of what was seen alone. Never touches a server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any

from kvpact_testkit.compare.server import Answer
from kvpact_testkit.compare.visit import Visit

ENOUGH_FLIPS = 200
"""With fewer flipped bits that are asked for, no wrong answer says little."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles; of fewer than four readings, the least and the most."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None of no readings."""
        if not values:
            return None
        if len(values) < 4:
            return cls(median(values), min(values), max(values))
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high)


@dataclass(frozen=True, slots=True)
class Wrong:
    """Answers that were judged, and those with other tokens than the engine without a cache gave."""

    judged: int
    wrong: int


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one subject over all rounds; None where nothing was measured. Times in ms, shares from 0 to 1.

    `alone`: asked alone, before the load and after it. `differ`: answers of the load that differ from those of the
    engine without a cache in its own load, which it gave twice. `over_local`: after the load over a local hit, each
    less the time of an empty prompt. `flips_asked`: flipped blocks that were then asked for. `estimate`: `served` by
    kvpact's index alone, one request after the other.
    """

    key: str
    name: str
    rounds: int
    failure: str
    start_s: float | None
    alone: Wrong | None
    differ: Wrong | None
    new_ms: Spread | None
    first_ms: Spread | None
    first_p99_ms: float | None
    requests: int
    requests_per_s: float | None
    gap_ms: Spread | None
    gap_p99_ms: float | None
    gap_most_ms: float | None
    gaps: int
    served: float | None
    estimate: float | None
    sources: Mapping[str, float]
    again_ms: Spread | None
    over_local: float | None
    restart_ms: Spread | None
    restart_served: float | None
    restart_wrong: Wrong | None
    damaged_wrong: Wrong | None
    damaged_served: float | None
    flips: int
    no_time: bool
    """Bits of at least one round were not flipped, because that would have ended too late."""
    flips_asked: int
    disk_bytes: int | None
    disk_bound: int | None

    @property
    def above_bound(self) -> bool:
        """True if the store was seen above its bound."""
        return self.disk_bytes is not None and self.disk_bound is not None and self.disk_bytes > self.disk_bound

    @property
    def never_started(self) -> bool:
        """True if there is a last sentence and nothing else."""
        return bool(self.failure) and self.new_ms is None

    @property
    def wrong(self) -> int:
        """Wrong answers of all that were asked alone."""
        return sum(one.wrong for one in (self.alone, self.restart_wrong, self.damaged_wrong) if one is not None)

    def document(self) -> dict[str, Any]:
        """The row as JSON."""
        return {**asdict(self), "above_bound": self.above_bound}


@dataclass(slots=True)
class Reference:
    """Answers of the engine without a cache: alone, of which those that differ are left out, and in its load."""

    alone: list[tuple[int, ...]] = field(default_factory=list)
    stable: list[bool] = field(default_factory=list)
    load: list[tuple[int, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, seen: Visit) -> Reference:
        """From a visit that asked everything twice; an empty one of a visit that failed."""
        if len(seen.before) != len(seen.after) or not seen.after:
            return cls()
        pairs = zip(seen.before, seen.after, strict=True)
        return cls(
            [one.tokens for one in seen.before],
            [one.tokens == other.tokens for one, other in pairs],
            [one.tokens for one in seen.load],
        )

    @property
    def unstable(self) -> int:
        """Prompts that are left out."""
        return self.stable.count(False)

    def judge(self, answers: Iterable[Answer]) -> Wrong | None:
        """Answers to the prompts that were asked alone, in their order; None if there is nothing to judge."""
        pairs = zip(answers, self.alone, self.stable, strict=False)
        found = [answer.tokens != right for answer, right, stable in pairs if stable]
        return Wrong(len(found), sum(found)) if found else None

    def compare(self, answers: Sequence[Answer]) -> Wrong | None:
        """Answers of the load."""
        found = [one.tokens != right for one, right in zip(answers, self.load, strict=False)]
        return Wrong(len(found), sum(found)) if found else None


def row(
    key: str,
    name: str,
    visits: Sequence[Visit],
    reference: Reference,
    *,
    estimate: float | None = None,
    block_tokens: int = 0,
    judges: bool = False,
) -> Row:
    """All rounds of one subject; the one that `judges` is compared with its own second time."""
    loads = [answer for seen in visits for answer in seen.load]
    gaps = [gap * 1e3 for seen in visits for gap in seen.gaps]
    restarted = [answer for seen in visits for answer in seen.restarted]
    damaged = [answer for seen in visits for answer in seen.damaged]
    flips = sum(seen.flips for seen in visits)
    whole = [seen for seen in visits if seen.load_s]
    times = [answer.first_token_ms for answer in loads]
    ratios = [
        (after.first_token_ms - seen.empty_ms) / (local.first_token_ms - seen.empty_ms)
        for seen in visits
        if seen.empty_ms
        for after, local in zip(seen.after, seen.local, strict=False)
        if local.first_token_ms > seen.empty_ms
    ]
    return Row(
        key=key,
        name=name,
        rounds=len(visits),
        failure="; ".join(dict.fromkeys(seen.failure for seen in visits if seen.failure)),
        start_s=median(starts) if (starts := [seen.start_s for seen in visits if seen.start_s]) else None,
        alone=together(reference.judge(part) for seen in visits for part in (seen.before, seen.after)),
        differ=together(reference.compare(seen.second if judges else seen.load) for seen in visits),
        new_ms=Spread.of([answer.first_token_ms for seen in visits for answer in seen.before]),
        first_ms=Spread.of(times),
        first_p99_ms=percentile(times, 99),
        requests=len(loads),
        requests_per_s=sum(len(seen.load) for seen in whole) / sum(seen.load_s for seen in whole) if whole else None,
        gap_ms=Spread.of(gaps),
        gap_p99_ms=percentile(gaps, 99),
        gap_most_ms=max(gaps, default=None),
        gaps=len(gaps),
        served=share_served(loads),
        estimate=estimate,
        sources={name: sum(seen.sources.get(name, 0.0) for seen in visits) for seen in visits for name in seen.sources},
        again_ms=Spread.of([answer.first_token_ms for seen in visits for answer in seen.after]),
        over_local=median(ratios) if ratios else None,
        restart_ms=Spread.of([answer.first_token_ms for answer in restarted]),
        restart_served=share_served(restarted),
        restart_wrong=together(reference.judge(seen.restarted) for seen in visits),
        damaged_wrong=together(reference.judge(seen.damaged) for seen in visits),
        damaged_served=share_served(damaged),
        flips=flips,
        no_time=any(seen.no_time for seen in visits),
        flips_asked=min(flips, sum((one.prompt_tokens - 1) // max(1, block_tokens) for one in damaged)),
        disk_bytes=max((seen.disk for seen in visits if seen.disk is not None), default=None),
        disk_bound=next((seen.bound for seen in visits if seen.bound is not None), None),
    )


def together(parts: Iterable[Wrong | None]) -> Wrong | None:
    """The sums; None if nothing was judged."""
    found = [part for part in parts if part is not None]
    return Wrong(sum(part.judged for part in found), sum(part.wrong for part in found)) if found else None


def share_served(answers: Sequence[Answer]) -> float | None:
    """Share of prompt tokens that were not computed."""
    tokens = sum(answer.prompt_tokens for answer in answers)
    return sum(answer.cached_tokens for answer in answers) / tokens if tokens else None


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The percentile; one value is its own. None of no values."""
    if len(values) < 2:
        return values[0] if values else None
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Rows with times in the load, best first; rows without are left out.

    Those whose quartiles overlap, directly or through others, stay in the order of `rows`.
    """
    timed = [(one, one.first_ms) for one in rows if one.first_ms is not None]
    place = {one.key: at for at, (one, _) in enumerate(timed)}
    groups: list[tuple[float, list[Row]]] = []
    for one, spread in sorted(timed, key=lambda pair: pair[1].low):
        if groups and spread.low <= groups[-1][0]:
            highest, group = groups[-1]
            groups[-1] = (max(highest, spread.high), [*group, one])
        else:
            groups.append((spread.high, [one]))
    return [one for _, group in groups for one in sorted(group, key=lambda each: place[each.key])]
