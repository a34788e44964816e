"""Every generated file is what its writer writes, and what the writers read is whole: ids of hazards, queries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from documents import ROOT, documents, load_script
from kvpact.metrics import FAMILIES, PREFIX
from kvpact_testkit.catalogue import TITLES
from servers.prometheus_server import promtool

HAZARDS = load_script("scripts/write_hazards.py")
METRICS = load_script("scripts/write_metrics.py")
CHART = load_script("scripts/draw_chart.py")

CITING = ("src", "kit", "testbeds", "tests", "benchmarks", "research", "scripts")


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return load_script("scripts/write_benchmarks.py")


def written(benchmarks: ModuleType) -> Iterator[tuple[Path, str]]:
    """Each generated file, and its text."""
    yield HAZARDS.PAGE, HAZARDS.page()
    yield CHART.CHART, CHART.chart((ROOT / "README.md").read_text(encoding="utf-8"))
    yield from ((path, text()) for path, text in METRICS.WRITTEN.items())
    yield from benchmarks.written(benchmarks.files()).items()


def test_every_generated_file_is_what_its_writer_writes(benchmarks: ModuleType) -> None:
    found = dict(written(benchmarks))
    stale = [str(path) for path, text in found.items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run scripts/write_hazards.py, write_metrics.py, write_benchmarks.py, draw_chart.py"
    assert {*benchmarks.CHARTS.iterdir()} <= found.keys()


def test_the_readmes_lines_on_gpus_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for how many commits ago it was: that is the number of when they were written."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    lines = load_script("scripts/write_gpu_lines.py")
    assert lines.main(["--check"]) == 0, "run scripts/write_gpu_lines.py"
    other = lines.RESULTS.read_text(encoding="utf-8").replace("| 132.3 (", "| 131.3 (")
    assert "| 32,768 tokens | 1,215 | 46 | 131 | 0.11 |" in lines.section(other)


def cited(text: str) -> set[str]:
    """Ids of properties and hazards, by their form. No hazard is called H100 or H200: these are GPUs."""
    return set(re.findall(r"\b(?:P[1-9]\d?|H\d\d|H1[1-9]\d)\b", text))


def test_every_id_that_is_cited_is_in_the_catalogue_and_has_a_test() -> None:
    code = [path for folder in CITING for path in (ROOT / folder).rglob("*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in (*code, *documents())}
    assert {str(path): ids for path, text in texts.items() if (ids := cited(text) - TITLES.keys())} == {}
    assert HAZARDS.tested() == set(TITLES)


def test_every_query_asks_for_metrics_that_there_are() -> None:
    ends = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
    there = {f"{PREFIX}{metric.name}{end}" for metric in FAMILIES for end in ends[metric.kind]}
    asked = [query.expr for query in (*METRICS.QUERIES, *METRICS.ALERT_RULES)]
    names = [{*re.findall(rf"{PREFIX}\w+", expr)} for expr in asked]
    assert [expr for expr, found in zip(asked, names, strict=True) if not found <= there] == []
    assert sum(map(len, names)) > len(asked)


def test_the_dashboard_has_each_query_in_a_row_for_the_models_and_servers_that_are_chosen() -> None:
    dashboard = json.loads(METRICS.DASHBOARD.read_text())
    kinds = [panel["type"] for panel in dashboard["panels"]]
    assert kinds[0] == "row"
    assert {"row", "stat", "timeseries"} == {*kinds}
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    chosen = '{model_name=~"$model",instance=~"$instance"}'
    assert sorted(expr.replace(chosen, "") for expr in asked) == sorted(query.expr for query in METRICS.QUERIES)
    assert all(expr.count("vllm:") == expr.count(chosen) for expr in asked)
    assert {"model", "instance"} <= {variable["name"] for variable in dashboard["templating"]["list"]}
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = {
        (x, y)
        for one in places
        for x in range(one["x"], one["x"] + one["w"])
        for y in range(one["y"], one["y"] + one["h"])
    }
    assert len(cells) == sum(one["w"] * one["h"] for one in places), "panels overlap"


def test_prometheus_own_checker_takes_the_rules() -> None:
    said = promtool("check", "rules", str(METRICS.ALERTS))
    assert said.returncode == 0, said.stderr
    assert "5 rules found" in said.stdout


ROWS: list[dict[str, Any]] = [
    {"what": "kvpact, disk", "restart_over_local": 2.0, "restart_over_local_q1": 1.5, "restart_over_local_q3": 2.5},
    {"what": "a peer", "restart_over_local": 1.25, "hits": 1.0, "wrong": 4},
    {"what": "another peer", "note": "not there: pip install it"},
]


def test_a_run_that_was_busy_is_in_the_table_and_in_no_chart(benchmarks: ModuleType) -> None:
    files = benchmarks.written(
        {"restart": {"command": "python", "about": "a machine; busy", "charted": False, "rows": ROWS}}
    )
    page = files.pop(benchmarks.PAGE)
    assert "| **kvpact, disk** | 2 (1.5 to 2.5) | - | - |" in page
    assert "![" not in page
    assert files == {}


def test_a_peer_that_is_ahead_stands_before_kvpact_in_the_chart(benchmarks: ModuleType) -> None:
    files = benchmarks.written({"restart": {"command": "python", "about": "a machine", "rows": ROWS}})
    page, chart = files.pop(benchmarks.PAGE), "".join(files.values())
    assert "| **kvpact, disk** | 2 (1.5 to 2.5) | - | - |" in page
    assert "- another peer: not there: pip install it." in page
    assert re.findall(r'class="(ours|others)" d="M300,\d+ H(\d+)', chart) == [("others", "488"), ("ours", "600")]
