"""Print how many commits have passed since each commit at which the README's figures were measured.

`python scripts/figures_age.py [MOST]` exits with 1 where they are more than MOST, or the commit is not in this clone.
`draw_chart.py`, which draws the README's figures, prints the same; `scripts/release` refuses a tag beyond 200.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def ages() -> dict[str, int | None]:
    """Commits since each "commit X" of the README; None where this clone does not have it."""
    return {
        commit: age(commit) for commit in re.findall(r"\bcommit ([0-9a-f]{7,})\b", (ROOT / "README.md").read_text())
    }


def age(commit: str) -> int | None:
    """Commits from this one to HEAD; None where this clone does not have it."""
    counted = subprocess.run(
        ["git", "rev-list", "--count", f"{commit}..HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    return int(counted.stdout) if counted.returncode == 0 else None


def told(what: str, commits: int | None) -> str:
    """The line for figures of this age."""
    since = "is not in this clone: fetch all commits" if commits is None else f"are {commits} commits old"
    return f"{what} {since}"


def main(most: int | None = None) -> int:
    """Print a line for each; 1 if one is beyond `most`."""
    found = ages()
    for commit, commits in found.items():
        print(told(f"README's figures of {commit}", commits))
    return int(most is not None and any(commits is None or commits > most for commits in found.values()))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
