"""The guide for authors of caches is true: its first cache fails as it says, the minimal one keeps the pact."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from documents import ROOT, Reader, block_with
from kvpact_testkit.cache.conformance import CacheConformance, CacheUnderTest
from kvpact_testkit.catalogue import TITLES
from kvpact_testkit.suite import checks_of

PAGE = "docs/write-a-connector.md"
GUIDE = (ROOT / PAGE).read_text(encoding="utf-8")


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    made = Reader(tmp_path)
    made.write_files(PAGE)
    return made


def conformance(reader: Reader, target: str) -> str:
    return reader.run("kvpact", "conformance", target).stdout


@pytest.mark.proof
def test_the_guides_first_cache_breaks_what_the_guide_says(reader: Reader) -> None:
    claimed = re.search(r"Of the (\d+) checks, (\d+) can be run on it and (\d+) of those find something", GUIDE)
    assert claimed is not None
    checks, can_run, broken = (int(number) for number in claimed.groups())
    command = block_with(PAGE, "kvpact conformance first_cache:FirstCache").text.splitlines()[0]
    output = reader.run("sh", "-c", command).stdout
    assert f"{checks} checks: {can_run - broken} kept, {broken} broken, {checks - can_run} not observable" in output
    for block in re.findall(r"```text\n(P.*?)```", GUIDE, re.DOTALL):
        for line in block.splitlines():
            assert line.strip() in output, f"the guide shows {line!r}, which the command does not say"


def test_the_guides_cache_keeps_the_pact(reader: Reader) -> None:
    assert (reader.folder / "minimal_cache.py").read_text() == (ROOT / "examples" / "minimal_cache.py").read_text()
    claimed = re.search(r"nothing broken: (\d+) checks kept, and (\d+) not observable", GUIDE)
    assert claimed is not None
    output = conformance(reader, "minimal_cache:MinimalCache")
    assert f"{claimed[1]} kept, 0 broken, {claimed[2]} not observable" in output


def test_the_guides_examples_run(reader: Reader) -> None:
    (reader.folder / "test_suite.py").write_text(block_with(PAGE, "class TestMinimalCache").text)
    tested = reader.shell("python -m pytest -q -p no:cacheprovider test_suite.py -k 'h04 or h20'").stdout
    assert "passed" in tested, tested
    report = block_with(PAGE, "run_conformance").text.replace("modes=", 'only="h04", modes=')
    assert "my cache on the embedded engine as native, vllm-0.33" in reader.python(report)
    random = block_with(PAGE, "PactMachine").text.replace("20_000", "2_000")
    assert "engine steps, each verified" in reader.python(random)


def test_the_guides_tables_name_what_exists() -> None:
    for row in re.findall(r"^\| ([PH]\d+(?:, [PH]\d+)*) \|", GUIDE, re.MULTILINE):
        assert set(row.split(", ")) <= TITLES.keys()
    names = {field.name for field in fields(CacheUnderTest)}
    assert set(re.findall(r"^\| `(\w+)", GUIDE, re.MULTILINE)) == names - {"cache"}
    assert f"Of the {len(checks_of(CacheConformance))} checks" in GUIDE
