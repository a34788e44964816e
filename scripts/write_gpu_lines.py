"""Write the README's section on GPUs from the last run in benchmarks/RESULTS.md: python scripts/write_gpu_lines.py

Its section "On a GPU" there begins with a date, a commit and a card, and has the table of first tokens; the gaps of
clients follow in one paragraph. The README says how many commits ago that was when this was run: `--check` compares
all but that number, and exits with 1 where the two differ.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from figures_age import age

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "RESULTS.md"

SECTION = re.compile(r"### On a GPU\n\n.*?(?=\n## )", re.S)
RUN = re.compile(r"(?P<date>\d{4}-\d\d-\d\d), (?P<commit>[0-9a-f]{7,}), one (?P<card>NVIDIA .+?) in ")
FIRST_TOKENS = re.compile(r"^\| ([\d,]+) \| ([\d.,]+) \([^|]*\| ([\d.,]+)[^|]*\| ([\d.,]+)[^|]*\| ([\d.]+) \|", re.M)
GAPS = re.compile(
    r"99th percentile, most: alone ([\d., ]+); beside four new\s+prompts of 2,048 tokens ([\d., ]+); beside the same "
    r"number loaded ([\d., ]+)\."
)
LITTLE = """\
1,008 gaps, one run, not compiled: too few to conclude from. `python -m benchmarks gpu_gaps` measures more; no GPU has
run it.
"""

AGE = re.compile(r"\d+ commits before")


def rounded(milliseconds: str) -> str:
    """Whole milliseconds."""
    return f"{float(milliseconds.replace(',', '')):,.0f}"


def row(*cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def section(results: str) -> str:
    """The README's section for the text of RESULTS.md. Raises ValueError where the run cannot be found there."""
    part = results.partition("## On a GPU (`make gpu`)")[2].partition("\n## ")[0]
    run, gaps = RUN.search(part), GAPS.search(part)
    tokens: Sequence[tuple[str, ...]] = FIRST_TOKENS.findall(part)
    if run is None or gaps is None or not tokens:
        raise ValueError(f"{RESULTS.name}: no run with a card, first tokens and gaps below '## On a GPU (`make gpu`)'")
    heads = (
        "time to first token, ms, of",
        "computed",
        "local prefix hit",
        "**kvpact, memory**",
        "share of computed",
    )
    shown = [
        row(f"{length} tokens", *map(rounded, (computed, local, loaded)), f"{float(share):.2f}")
        for length, computed, local, loaded, share in tokens
    ]
    who = ("alone", "beside four prompts of 2,048 tokens, computed", "beside four, loaded")
    ago = age(run["commit"])
    lines = [
        "### On a GPU\n",
        (
            f"One {run['card']} with the shape of Llama-3-8B, 128 KiB of KV a token (`python -m benchmarks "
            f"gpu_first_token`,\ncommit {run['commit']}, {run['date']}, {ago} commits before these lines were written, "
            "medians of 4):\n"
        ),
        row(*heads),
        "|---|---|---|---|---|",
        *shown,
        "",
        row("gaps between tokens of 16 clients who decode, ms", "median", "p99", "most"),
        "|---|---|---|---|",
        *(row(name, *found.split(", ")) for name, found in zip(who, gaps.groups(), strict=True)),
        "",
        LITTLE,
    ]
    return "\n".join(lines)


def written(readme: str, results: str) -> str:
    """The README with that section."""
    return SECTION.sub(lambda _: section(results), readme, count=1)


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    before = README.read_text(encoding="utf-8")
    after = written(before, RESULTS.read_text(encoding="utf-8"))
    if "--check" in arguments:
        return int(AGE.sub("", before) != AGE.sub("", after))
    README.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
