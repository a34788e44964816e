"""docs/benchmarks.md and its charts show the rows that are kept in benchmarks/figures, and nothing else."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from documents import ROOT, load_script


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return load_script("scripts/write_benchmarks.py")


def test_the_page_and_the_charts_are_those_of_the_rows(writer: ModuleType) -> None:
    written = writer.written(writer.files())
    outdated = [path.name for path, text in written.items() if path.read_text(encoding="utf-8") != text]
    assert outdated == [], "run `python scripts/write_benchmarks.py`"
    assert {path for path in written if path.suffix == ".svg"} == set(writer.CHARTS.glob("*.svg"))
    page = written[writer.PAGE]
    assert all(f"](charts/{path.name})" in page for path in written if path.suffix == ".svg")


def test_every_row_is_on_the_page_and_each_command_is_a_benchmark(writer: ModuleType) -> None:
    page, files = writer.PAGE.read_text(encoding="utf-8"), writer.files()
    assert "restart" in files
    assert set(files) <= {section.name for section in writer.SECTIONS}
    for section in writer.SECTIONS:
        if section.name in files:
            assert all(str(row[section.subject]) in page for row in files[section.name]["rows"])
            assert (ROOT / "benchmarks" / f"{section.name}.py").exists() or f'NAME = "{section.name}"' in _sources()
        else:
            assert f"## {section.title}\n" not in page


def _sources() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py"))


ROWS: list[dict[str, Any]] = [
    {"what": "kvpact, disk", "restart_over_local": 2.0, "restart_over_local_q1": 1.5, "restart_over_local_q3": 2.5},
    {"what": "a peer", "restart_over_local": 1.25, "hits": 1.0, "wrong": 4},
    {"what": "another peer", "note": "not there: pip install it"},
]


def test_a_peer_that_is_ahead_stands_before_kvpact_in_text_and_chart(writer: ModuleType) -> None:
    written = writer.written({"restart": {"command": "python", "about": "a machine", "rows": ROWS}})
    page, chart = written.pop(writer.PAGE), "".join(written.values())
    assert "- restart over local hit, less is better: a peer 1.25, **kvpact, disk** 2." in page
    assert "| **kvpact, disk** | 2 (1.5 to 2.5) | - | - |" in page
    assert "- another peer: not there: pip install it." in page
    assert chart.index("a peer") < chart.index("kvpact, disk")
    assert re.findall(r'class="(ours|others)" d="M300,\d+ H(\d+)', chart) == [("others", "488"), ("ours", "600")]


def test_another_figure_is_another_page_and_another_chart(writer: ModuleType) -> None:
    before = {"restart": {"command": "python", "about": "a machine", "rows": ROWS}}
    after: dict[str, Any] = copy.deepcopy(before)
    after["restart"]["rows"][1]["restart_over_local"] = 1.5
    texts = [writer.written(each) for each in (before, after)]
    assert texts[0].keys() == texts[1].keys()
    assert all(texts[0][path] != texts[1][path] for path in texts[0])


def test_rows_of_a_benchmark_without_a_section_are_refused(writer: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="tiers has no section; there are restart, multi_turn"):
        writer.take_over("tiers", tmp_path / "rows.json", "quiet")
