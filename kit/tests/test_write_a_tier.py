"""The guide for authors of tiers is true: its first tier fails as it says, its second one keeps every promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from documents import ROOT, Reader
from kvpact_testkit.catalogue import TITLES
from kvpact_testkit.tier.conformance import TierConformance

PAGE = "docs/write-a-tier.md"
GUIDE = (ROOT / PAGE).read_text(encoding="utf-8")


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    made = Reader(tmp_path)
    made.write_files(PAGE)
    return made


def suite(reader: Reader, *arguments: str) -> str:
    """What pytest says of the guide's files."""
    return reader.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments).stdout


def test_the_guides_tier_keeps_every_promise(reader: Reader) -> None:
    output = suite(reader, "-rs", "test_file_tier.py")
    passed, skipped = re.findall(r"\d+", output.splitlines()[-1])[:2]
    assert "failed" not in output, output
    assert "error" not in output, output
    assert (int(passed) > 30, int(skipped) < 12) == (True, True), output


def test_the_guides_first_tier_breaks_what_the_guide_says(reader: Reader) -> None:
    claimed = re.search(r"can run (\d+) of the (\d+) checks on it, and (\d+) of those find something", GUIDE)
    assert claimed is not None
    run, checks, failed = (int(number) for number in claimed.groups())
    output = suite(reader, "test_first.py")
    assert f"{failed} failed, {run - failed} passed, {checks - run} skipped" in output, output[-2000:]


def test_the_guides_table_names_what_exists() -> None:
    assert {*re.findall(r"\b[TH]\d+\b", GUIDE)} <= TITLES.keys()
    for name in re.findall(r"^\| `(\w+)", GUIDE, re.MULTILINE):
        assert hasattr(TierConformance, name)
