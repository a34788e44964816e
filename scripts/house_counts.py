"""Counts of the house rules in src, by folder: python scripts/house_counts.py; with -v each place.

Several values assigned at once, walrus operators, docstrings that begin with What, Which, Whether or How, and those
that only refer to another docstring. `tests/test_house.py` has the limits.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kvpact"

SEVERAL = ast.Tuple | ast.List
"""Values or targets side by side, in any brackets."""

QUESTION_WORDS = {"what", "which", "whether", "how"}

FIRST_WORDS = 4
"""Words of a docstring among which none of `QUESTION_WORDS` should be."""

REFERENCE_ALONE = re.compile(r"See `[^`]+`\.?")


def assignments_of_several(tree: ast.AST) -> Iterator[ast.AST]:
    """Assignments of several values to several targets, swaps and loops over a literal included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets, values = node.targets, node.value
        elif isinstance(node, ast.For | ast.comprehension):
            targets, values = [node.target], node.iter
        else:
            continue
        if isinstance(values, SEVERAL | ast.Set) and any(isinstance(target, SEVERAL) for target in targets):
            yield values


def walruses(tree: ast.AST) -> Iterator[ast.AST]:
    """Assignments within an expression."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.NamedExpr))


def texts(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """All docstrings, attributes' texts included."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(ast.Constant(str(text))):
                yield node, text.strip()


def questions(tree: ast.AST) -> Iterator[ast.AST]:
    """Docstrings with one of `QUESTION_WORDS` among the first four words."""
    for node, text in texts(tree):
        if not QUESTION_WORDS.isdisjoint(re.findall(r"[\w'-]+", text.lower())[:FIRST_WORDS]):
            yield node


def references_alone(tree: ast.AST) -> Iterator[ast.AST]:
    """Docstrings that say where another one is, and nothing more."""
    return (node for node, text in texts(tree) if REFERENCE_ALONE.fullmatch(text))


COUNTED: dict[str, Callable[[ast.AST], Iterator[ast.AST]]] = {
    "several values assigned at once": assignments_of_several,
    "walrus operators": walruses,
    "docstrings that begin with a question word": questions,
    "docstrings that only refer to another": references_alone,
}


def places(find: Callable[[ast.AST], Iterator[ast.AST]], source: Path = SOURCE) -> Iterator[tuple[str, int]]:
    """File below `source`, and line, of each."""
    for path in sorted(source.rglob("*.py")):
        for node in find(ast.parse(path.read_text())):
            yield path.relative_to(source).as_posix(), getattr(node, "lineno", 0)


def main() -> None:
    """Print one line for each of `COUNTED`."""
    for name, find in COUNTED.items():
        found = [*places(find)]
        folders = Counter(file.partition("/")[0] for file, _ in found)
        by_folder = ", ".join(f"{folder} {count}" for folder, count in folders.most_common())
        print(f"{name}: {len(found)} ({by_folder})")
        if "-v" in sys.argv:
            print(*(f"    src/kvpact/{file}:{line}" for file, line in found), sep="\n")


if __name__ == "__main__":
    main()
