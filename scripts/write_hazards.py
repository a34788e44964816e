"""Write `docs/internals/hazards.md`: every property and hazard of the catalogue, and the files that test it.

`python scripts/write_hazards.py` rewrites the page; tests/test_generated.py fails while the page is out of date.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from kvpact_testkit.catalogue import TITLES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "internals" / "hazards.md"
TESTS = {"tests": "", "kit/tests": "kit/tests/", "kit/src/kvpact_testkit": "kit/"}
"""Folder of tests -> what its files are called in the page."""
PROTECTS = ("protects", "kept_in_every_mode", "scenario", "scenario.on_engine")
"""Decorators whose arguments are the ids that a check or scenario of the kit protects."""

HEAD = """\
# Properties and hazards

Written by `python scripts/write_hazards.py` from [hazards.toml](../../kit/src/kvpact_testkit/hazards.toml). P: what the
contract promises. T: what a tier promises besides. H: how caches of this kind fail; each was seen in a public system or
in kvpact itself. A test is named after its hazard: `pytest -k h07` runs those of H07. A check of the
[test kit](../write-a-connector.md) names its ids in `@protects` or `@scenario`. `cache/test_jobs` is
tests/cache/test_jobs.py, `kit/suite` is kit/src/kvpact_testkit/suite.py.
"""

PARTS = {"P": "Properties of the contract", "T": "Promises of a tier", "H": "Hazards"}


def ids_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The ids in a test's name and in what decorates a check."""
    found: set[str] = set()
    if function.name.startswith("test_"):
        found |= {name.upper() for name in re.findall(r"(?<=_)[hpt]\d{1,3}(?=_)", function.name)}
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in PROTECTS:
            found |= {str(value.value) for value in decorator.args if isinstance(value, ast.Constant)}
    return found


def tested() -> Iterator[tuple[str, str]]:
    """(id, file) for every id and every file with a test of it, in the order of the paths."""
    for folder, prefix in TESTS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            functions = (
                node
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            )
            for name in sorted(set().union(*map(ids_of, functions))):
                yield name, prefix + path.relative_to(ROOT / folder).with_suffix("").as_posix()


def tests_of() -> dict[str, list[str]]:
    """Id -> the files with its tests. The id may be one that the catalogue lacks."""
    files: dict[str, list[str]] = {}
    for name, file in tested():
        files.setdefault(name, []).append(file)
    return files


def page() -> str:
    """The whole page."""
    files = tests_of()
    lines = [HEAD]
    for letter, heading in PARTS.items():
        lines += [f"## {heading}\n", "| id | what it is | tests |", "|---|---|---|"]
        for name, title in TITLES.items():
            if name.startswith(letter):
                tests = ", ".join(f"`{file}`" for file in files.get(name, ())) or "none"
                lines.append(f"| {name} | {title} | {tests} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
