"""The closing lines of several pytest runs, and their sum in the same form: python scripts/closing_line.py LOG...

A log without one is of a run that ended before pytest did, which counts as an error. Exit code 1 if anything failed.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

CLOSING = re.compile(r"(?:^|=+ )((?:\d+ [a-z]+(?:, )?)+|no tests ran) in ([\d.]+)s(?: \([\d:]+\))?(?: =+)?$")
"""Also "in 754.12s (0:12:34)", with or without the line drawn around it."""

COLOUR = re.compile(r"\x1b\[[\d;]*m")
"""Which FORCE_COLOR makes pytest print into a pipe, too."""


def closing_line(output: str) -> tuple[Counter[str], float] | None:
    """How many tests ended how ("passed", "failed", ...), and in how many seconds; None if pytest never said so."""
    plain = COLOUR.sub("", output)
    found = [match for line in plain.splitlines() if (match := CLOSING.search(line.rstrip()))]
    if not found:
        return None
    counts: Counter[str] = Counter()
    for number, outcome in re.findall(r"(\d+) ([a-z]+)", found[-1][1]):
        counts[{"errors": "error", "warnings": "warning"}.get(outcome, outcome)] += int(number)
    return counts, float(found[-1][2])


def shown(counts: Counter[str], seconds: float) -> str:
    """In pytest's form."""
    order = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warning", "error")
    told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in order if counts[outcome])
    return f"{told or 'no tests ran'} in {seconds:.2f}s"


def good(counts: Counter[str]) -> bool:
    """Whether something passed and nothing else went wrong."""
    return counts["passed"] > 0 and not counts["failed"] + counts["error"]


def main(logs: list[str]) -> int:
    """Print the closing line of each log and, last, that of all."""
    total, seconds, all_good = Counter[str](), 0.0, True
    for log in map(Path, logs):
        closing = closing_line(log.read_text(errors="replace"))
        print(f"{log.name}: {shown(*closing) if closing else 'ended before pytest did'}")
        counts, took = closing or (Counter({"error": 1}), 0.0)
        total, seconds, all_good = total + counts, seconds + took, all_good and good(counts)
    print(shown(total, seconds))
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
