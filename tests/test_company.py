"""docs/company.md: every row names tests or scenarios that are there, and all of the tests in company are named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from documents import ROOT

PAGE = ROOT / "docs" / "company.md"
COMPANY = ROOT / "tests" / "under_vllm" / "test_engine_company.py"
SCENARIOS = ROOT / "kit" / "src" / "kvpact_testkit" / "vllm"

BESIDE = (
    "LoRA",
    "Images",
    "Prompt embeddings",
    "n-grams",
    "EAGLE",
    "Structured output",
    "`n` > 1",
    "Priority",
    "Async",
    "Chunked prefill off",
    "Prefix caching off",
    "`MultiConnector`",
    "Sleep",
    "Streaming sessions",
)


def rows() -> list[list[str]]:
    """Cells of the table, without its head."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def functions(*paths: Path) -> set[str]:
    return {
        node.name
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }


def test_every_row_names_what_is_there() -> None:
    tests = functions(*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "kit" / "tests").rglob("test_*.py"))
    scenarios = functions(*SCENARIOS.glob("scenarios*.py"))
    for beside, shown, engines, names in rows():
        named = re.findall(r"`(\w+)`", names)
        unknown = {name for name in named if name not in (tests if name.startswith("test_") else scenarios)}
        assert named, beside
        assert shown, beside
        assert unknown == set(), beside
        assert ("schedulers" in engines) == any(name in scenarios for name in named), beside
        assert re.fullmatch(r"real engine(, schedulers|, scheduler of 0\.32)?", engines), beside


def test_nothing_is_left_out() -> None:
    found = rows()
    assert len(found) == len(BESIDE)
    for row, word in zip(found, BESIDE, strict=True):
        assert word in row[0]
    named = {name for row in found for name in re.findall(r"`(test_\w+)`", row[3])}
    assert {name for name in functions(COMPANY) if name.startswith("test_")} <= named
