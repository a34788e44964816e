"""Write `docs/internals/hazards.md`: every property and hazard of the catalogue.

`python scripts/write_hazards.py` rewrites the page; tests/test_generated.py fails while the page is out of date.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from kvpact_testkit.catalogue import TITLES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "internals" / "hazards.md"
TESTS = ("tests", "kit/tests", "kit/src/kvpact_testkit")
"""Folders with tests, checks and scenarios."""
PROTECTS = ("protects", "kept_in_every_mode", "scenario", "scenario.on_engine")
"""Decorators whose arguments are the ids that a check or scenario of the kit protects."""

HEAD = """\
# Properties and hazards

Written by `python scripts/write_hazards.py` from [hazards.toml](../../kit/src/kvpact_testkit/hazards.toml). P: what the
contract promises. T: what a tier promises besides. H: how caches of this kind fail; each was seen in a public system or
in kvpact itself. A test is named after its hazard: `pytest -k h07` runs those of H07; each entry has one. A check of
the [test kit](../write-a-connector.md) names its ids in `@protects` or `@scenario`.
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


def tested() -> set[str]:
    """Every id that a test, check or scenario names. It may be one that the catalogue lacks."""
    paths = [path for folder in TESTS for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return set().union(*map(ids_of, functions))


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    for letter, heading in PARTS.items():
        lines += [f"## {heading}\n", "| id | what it is |", "|---|---|"]
        lines += [f"| {name} | {title} |" for name, title in TITLES.items() if name.startswith(letter)]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
