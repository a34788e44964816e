"""The guide for authors of tiers is true: its first tier fails as it says, its second one keeps every promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import kvpact

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "write-a-tier.md").read_text()
FILES: dict[str, str] = dict(re.findall(r"<!-- (\w+\.py) -->\n```python\n(.*?)```", GUIDE, re.DOTALL))


def run_pytest(directory: Path, *arguments: str) -> str:
    """What pytest says of the guide's files."""
    for name, text in FILES.items():
        (directory / name).write_text(text)
    source = str(Path(kvpact.__file__).parents[1])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": source, "PYTEST_ADDOPTS": ""}
    ran = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    return ran.stdout + ran.stderr


def test_the_guides_tier_keeps_every_promise(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, "-rs", "test_file_tier.py")
    passed, skipped = re.findall(r"\d+", output.splitlines()[-1])[:2]
    assert "failed" not in output, output
    assert "error" not in output, output
    assert (int(passed) > 30, int(skipped) < 12) == (True, True), output
    code = [line for line in FILES["file_tier.py"].splitlines() if line and not line.startswith(("import", "from"))]
    assert len(code) < 85


def test_the_guides_first_tier_breaks_what_the_guide_says(tmp_path: Path) -> None:
    claimed = re.search(r"can run (\d+) of the (\d+) checks on it, and (\d+) of those find something", GUIDE)
    shown = re.search(r"```text\nkvpact_testkit\.results\.Broken: (H23.*?)```", GUIDE, re.DOTALL)
    assert claimed is not None
    assert shown is not None
    run, checks, failed = (int(number) for number in claimed.groups())
    output = run_pytest(tmp_path, "test_first.py")
    assert f"{failed} failed, {run - failed} passed, {checks - run} skipped" in output, output[-2000:]
    for line in shown[1].splitlines():
        assert line.strip() in output, f"the guide shows {line!r}, which pytest does not say"


def test_the_guides_table_names_what_exists() -> None:
    from kvpact_testkit.catalogue import TITLES
    from kvpact_testkit.tier.conformance import TierConformance

    for row in re.findall(r"^\| ([TH]\d+(?:, [TH]\d+)*) \|", GUIDE, re.MULTILINE):
        assert set(row.split(", ")) <= TITLES.keys()
    for name in re.findall(r"^\| `(\w+)", GUIDE, re.MULTILINE):
        assert hasattr(TierConformance, name)
