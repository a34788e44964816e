"""The guide for authors of caches is true: its first cache fails as it says, the minimal one keeps the pact."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvpact

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "write-a-connector.md").read_text()
FILES: dict[str, str] = dict(re.findall(r"<!-- (\w+\.py) -->\n```python\n(.*?)```", GUIDE, re.DOTALL))
EXAMPLES: list[str] = re.findall(r"(?<!-->\n)```python\n(.*?)```", GUIDE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder: Path, *command: str) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(kvpact.__file__).parents[1]),
        "COLUMNS": "200",
        "PYTEST_ADDOPTS": "",
    }
    ran = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return ran.stdout + ran.stderr


def conformance(folder: Path, target: str) -> str:
    return run(folder, "-c", "from kvpact.cli.app import main; main()", "conformance", target)


def test_the_guides_first_cache_breaks_what_the_guide_says(folder: Path) -> None:
    claimed = re.search(r"Of the (\d+) checks, (\d+) can be run on it and (\d+) of those find something", GUIDE)
    assert claimed is not None
    checks, can_run, broken = (int(number) for number in claimed.groups())
    output = conformance(folder, "first_cache:FirstCache")
    assert f"{checks} checks: {can_run - broken} kept, {broken} broken, {checks - can_run} not observable" in output
    for block in re.findall(r"```text\n(P.*?)```", GUIDE, re.DOTALL):
        assert block.splitlines()[0] in output
        for line in block.splitlines():
            assert line.strip() in output, f"the guide shows {line!r}, which the command does not say"
    steps = GUIDE[GUIDE.index("## To green") : GUIDE.index("lines, imports and blank lines apart")]
    for quoted in re.findall(r"(?:P|H)\d+: `(.*?)`", steps, re.DOTALL):
        assert " ".join(quoted.split()) in output, quoted
    assert f"{len(FILES['first_cache.py'].splitlines())} lines, and it works" in GUIDE


def test_the_guides_cache_keeps_the_pact_in_few_lines(folder: Path) -> None:
    text = (ROOT / "examples" / "minimal_cache.py").read_text()
    assert FILES["minimal_cache.py"] == text
    body = re.sub(r"^(from \S+ import \(.*?^\)|from [^\n]*|import [^\n]*)\n", "", text, flags=re.M | re.S)
    lines = [line for line in body.splitlines() if line.strip()]
    assert len(lines) <= 127
    assert f"That is {len(lines)} lines" in GUIDE
    output = conformance(folder, "minimal_cache:MinimalCache")
    claimed = re.search(r"nothing broken: (\d+) checks kept, and (\d+) not observable", GUIDE)
    assert claimed is not None
    assert f"{claimed[1]} kept, 0 broken, {claimed[2]} not observable" in output


def test_the_guides_examples_run(folder: Path) -> None:
    suite, report, random = EXAMPLES
    (folder / "test_suite.py").write_text(suite)
    tested = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_suite.py", "-k", "h04 or h20")
    assert "passed" in tested, tested
    assert "failed" not in tested, tested
    (folder / "report.py").write_text(report.replace("modes=", 'only="h04", modes='))
    assert "my cache on the embedded engine as native, vllm-0.33" in run(folder, "report.py")
    (folder / "random_plays.py").write_text(random.replace("20_000", "2_000"))
    assert "engine steps, each verified" in run(folder, "random_plays.py")


def test_the_guides_tables_name_what_exists() -> None:
    from dataclasses import fields

    from kvpact_testkit.cache.conformance import CacheConformance, CacheUnderTest
    from kvpact_testkit.catalogue import TITLES
    from kvpact_testkit.suite import checks_of

    for row in re.findall(r"^\| ([PH]\d+(?:, [PH]\d+)*) \|", GUIDE, re.MULTILINE):
        assert set(row.split(", ")) <= TITLES.keys()
    names = {field.name for field in fields(CacheUnderTest)}
    assert set(re.findall(r"^\| `(\w+)", GUIDE, re.MULTILINE)) == names - {"cache"}
    assert f"Of the {len(checks_of(CacheConformance))} checks" in GUIDE
