"""What a conformance run says: one check a scenario, each with its verdict and the script that shows it.

Owns the result types and nothing else, so that every engine's driver speaks the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec


class Verdict(StrEnum):
    """How a scenario ended."""

    KEPT = "kept"
    BROKEN = "broken"
    NOT_OBSERVABLE = "not observable"
    """The connector never came into the situation, or does not let it be seen."""


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
    """Why nothing was to be seen, or figures worth knowing."""
    script: tuple[str, ...] = ()
    """What was done, step by step, up to the first violation."""


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
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)

    def to_json(self) -> bytes:
        """The report as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> ConformanceReport:
        """The report of `to_json`. Raises msgspec.DecodeError if it is none."""
        return msgspec.json.decode(data, type=cls)


def as_text(report: ConformanceReport, *, scripts: bool = True) -> str:
    """The report for a terminal: one line a check, and under each broken one what was seen and what was done."""
    lines = [f"{report.subject} on {report.engine}"]
    for check in report.checks:
        lines.append(f"{check.verdict:>14}  {check.name} ({', '.join(check.protects)}){_note(check.note)}")
        if check.verdict is Verdict.BROKEN:
            lines += [f"{'':>14}    {violation}" for violation in check.violations]
            if scripts:
                lines += [f"{'':>14}    | {line}" for line in check.script]
    counts = [f"{sum(check.verdict is verdict for check in report.checks)} {verdict}" for verdict in Verdict]
    return "\n".join([*lines, ", ".join(counts)])


def _note(note: str) -> str:
    return f": {note}" if note else ""


def shortened(lines: Sequence[str], limit: int = 60) -> tuple[str, ...]:
    """A script with runs of equal lines folded, and its middle left out if it is longer than `limit` lines."""
    folded: list[tuple[str, int]] = []
    for line in lines:
        if folded and folded[-1][0] == line:
            folded[-1] = (line, folded[-1][1] + 1)
        else:
            folded.append((line, 1))
    script = [line if times == 1 else f"{line} ({times} times)" for line, times in folded]
    if len(script) > limit:
        left_out = len(script) - limit + 1
        script = [*script[: limit // 2], f"... {left_out} lines ...", *script[left_out + limit // 2 :]]
    return tuple(script)
