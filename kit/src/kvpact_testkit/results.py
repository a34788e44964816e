"""A check's result: the `Broken` or `NotObservable` that it raises, and the `Check` of a report.

Owns the result types of all suites, and how they are shown. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from unittest import SkipTest

import msgspec

from kvpact.errors import PactViolation
from kvpact_testkit.catalogue import TITLES


class Broken(PactViolation):
    """A check found its property broken. `script` has the steps that led there, `protects` the ids concerned."""

    def __init__(self, explanation: str, script: Sequence[str] = (), protects: Sequence[str] = ()) -> None:
        self.explanation = explanation
        self.script = tuple(script)
        self.protects = tuple(protects)
        titles = [f"{name}: {TITLES[name]}" for name in protects]
        super().__init__("\n    ".join([*titles, explanation, *self.script]))


class NotObservable(SkipTest):
    """The property cannot be seen here, for the reason given; pytest and unittest count the check as skipped."""


def require(condition: object, explanation: str, protects: str = "") -> None:
    """Raise `Broken` with `explanation` unless `condition`; works under `python -O`, and without pytest.

    `protects` are the ids that are concerned, with spaces between them.
    """
    if not condition:
        raise Broken(explanation, protects=protects.split())


def observable_if(condition: object, reason: str) -> None:
    """Raise `NotObservable` with `reason` unless `condition`: without it the check has nothing to judge."""
    if not condition:
        raise NotObservable(reason)


class Verdict(StrEnum):
    """How a scenario ended."""

    KEPT = "kept"
    BROKEN = "broken"
    NOT_OBSERVABLE = "not observable"
    """The situation never arose, or the subject does not show what the check needs."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken property (P1 to P14, or a hazard's number where no property has the name) and how it was seen."""

    broken: str
    what: str

    def __str__(self) -> str:
        return f"{self.broken}: {self.what}"


@dataclass(frozen=True, slots=True)
class Check:
    """One scenario's result."""

    name: str
    protects: tuple[str, ...]
    """Properties and hazards that the scenario is about."""
    meaning: str
    """What the scenario shows, in one sentence."""
    verdict: Verdict
    violations: tuple[Violation, ...] = ()
    note: str = ""
    """Why nothing could be observed, or figures of interest."""
    script: tuple[str, ...] = ()
    """The steps up to the first violation."""


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """All checks of one subject (a connector, cache or tier) on one engine."""

    subject: str
    engine: str
    checks: tuple[Check, ...]

    @property
    def broken(self) -> list[Check]:
        """The checks that found something."""
        return [check for check in self.checks if check.verdict is Verdict.BROKEN]

    def check(self, name: str) -> Check:
        """The check of this name. Raises KeyError if there is none."""
        return {check.name: check for check in self.checks}[name]

    def to_json(self) -> bytes:
        """The report as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> ConformanceReport:
        """The report that `to_json` wrote. Raises msgspec.DecodeError for anything else."""
        return msgspec.json.decode(data, type=cls)


def as_text(report: ConformanceReport, *, scripts: bool = True) -> str:
    """The report for a terminal: one line per check, and below each broken one its violations and steps."""
    lines = [f"{report.subject} on {report.engine}"]
    for check in report.checks:
        note = f": {check.note}" if check.note else ""
        lines.append(f"{check.verdict:>14}  {check.name} ({', '.join(check.protects)}){note}")
        if check.verdict is Verdict.BROKEN:
            lines += [f"{'':>14}    {violation}" for violation in check.violations]
            if scripts:
                lines += [f"{'':>14}    | {line}" for line in check.script]
    counts = [f"{sum(check.verdict is verdict for check in report.checks)} {verdict}" for verdict in Verdict]
    return "\n".join([*lines, ", ".join(counts)])


def shortened(lines: Sequence[str], limit: int = 60) -> tuple[str, ...]:
    """A script with equal consecutive lines folded, and without its middle if it is longer than `limit` lines."""
    folded = [(line, len([*equal])) for line, equal in groupby(lines)]
    script = [line if times == 1 else f"{line} ({times} times)" for line, times in folded]
    if len(script) > limit:
        left_out = len(script) - limit + 1
        script = [*script[: limit // 2], f"... {left_out} lines ...", *script[left_out + limit // 2 :]]
    return tuple(script)


def concerned(check: Check) -> tuple[str, ...]:
    """The ids concerned by `check`: those of its violations, then those that it protects."""
    return tuple(dict.fromkeys([*(violation.broken for violation in check.violations), *check.protects]))


def verdicts(checks: Iterable[Check]) -> dict[str, Verdict]:
    """Id -> verdict, in the order of `TITLES`: broken if any check is, else kept if any is."""
    said: dict[str, set[Verdict]] = {}
    for check in checks:
        for name in concerned(check):
            said.setdefault(name, set()).add(check.verdict)
    order = (Verdict.BROKEN, Verdict.KEPT, Verdict.NOT_OBSERVABLE)
    return {name: next(verdict for verdict in order if verdict in said[name]) for name in TITLES if name in said}
