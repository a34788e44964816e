"""Lines of code without comments and docstrings: python scripts/count_lines.py, by folder; `make lint` prints them.

The product is the distribution kvpact, the kit the distribution kvpact-testkit.
"""

from __future__ import annotations

import ast
import tokenize
from collections import Counter
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


def main() -> None:
    """Print one line for each of `DISTRIBUTIONS`."""
    for name, folder in DISTRIBUTIONS.items():
        counts = by_folder(ROOT / folder)
        folders = ", ".join(f"{folder} {lines:,}" for folder, lines in counts.most_common())
        print(f"{name}: {counts.total():,} lines of code ({folders})")


if __name__ == "__main__":
    main()
