"""Lines of code without comments and docstrings, and words of the pages: python scripts/count_lines.py

`make lint` and `make check` print them by folder, and fail where there are more than `[tool.kvpact.counts]` in
pyproject.toml allows. The product is the distribution kvpact, the kit the distribution kvpact-testkit.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]

DISTRIBUTIONS = {"product": "src/kvpact", "kit": "kit/src/kvpact_testkit", "tests": "tests", "kit's tests": "kit/tests"}
"""What is counted apart, and where it is."""

NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code(path: Path) -> int:
    """Lines on which a token stands that is neither a comment nor part of a docstring; an attribute's text counts."""
    with tokenize.open(path) as file:
        tokens = [token for token in tokenize.generate_tokens(file.readline) if token.type not in NO_CODE]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(ast.Constant(str())) as docstring, *_]:
                    lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def by_folder(root: Path) -> Counter[str]:
    """Lines of code of each folder of `root`; its own files count as "(root)"."""
    counts: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        folder, *below = path.relative_to(root).parts
        counts[folder if below else "(root)"] += lines_of_code(path)
    return counts


def words_by_folder(root: Path) -> Counter[str]:
    """Words of the pages that Git tracks, but figures (`RESULTS.md`) and changelogs, as `wc -w` counts them."""
    command = ["git", "ls-files", "-z", "--", "*.md"]
    tracked = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    counts: Counter[str] = Counter()
    for name in filter(None, tracked.split("\0")):
        path = root / name
        if path.name not in ("RESULTS.md", "CHANGELOG.md") and path.exists():
            folder, *below = Path(name).parts
            counts[folder if below else "(root)"] += len(path.read_text().split())
    return counts


def above_limits(counted: Mapping[str, int], limits: Mapping[str, int]) -> list[str]:
    """One line for each count that is above its limit."""
    return [
        f"{name}: {counted[name]:,}, {counted[name] - limit:,} more than `{name}` in [tool.kvpact.counts] of "
        f"pyproject.toml allows: shorten something, or raise it in the commit that needs more, and say there why"
        for name, limit in limits.items()
        if counted[name] > limit
    ]


def main() -> int:
    """Print one line for each of `DISTRIBUTIONS` and one for the pages; returns 1 if a count is above its limit."""
    counted: dict[str, int] = {}
    for name, folder in DISTRIBUTIONS.items():
        counts = by_folder(ROOT / folder)
        folders = ", ".join(f"{folder} {lines:,}" for folder, lines in counts.most_common())
        print(f"{name}: {counts.total():,} lines of code ({folders})")
        counted[name] = counts.total()
    words = words_by_folder(ROOT)
    folders = ", ".join(f"{folder} {count:,}" for folder, count in words.most_common())
    print(f"pages: {words.total():,} words ({folders})")
    counted["tests"] += counted.pop("kit's tests")
    counted["words"] = words.total()
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["kvpact"]["counts"]
    above = above_limits(counted, limits)
    print(*above, sep="\n", end="\n" if above else "")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
