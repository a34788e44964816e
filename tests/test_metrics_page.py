"""docs/metrics.md, the alerts and the dashboard are what the table of metrics says, and ask for nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from documents import ROOT, load_script
from kvpact.metrics import FAMILIES, PREFIX
from servers.prometheus_server import promtool

WRITER = load_script("scripts/write_metrics.py")

ON_THE_PAGE = {
    f"{PREFIX}{metric.name}{end}"
    for metric in FAMILIES
    for end in {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}[metric.kind]
}
"""What a scraper sees of kvpact's metrics."""


@pytest.mark.parametrize("path", WRITER.WRITTEN, ids=lambda path: path.name)
def test_what_is_written_from_the_table_is_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == WRITER.WRITTEN[path](), "run `python scripts/write_metrics.py`"


def test_every_query_asks_for_metrics_that_there_are() -> None:
    asked = [*WRITER.QUERIES, *WRITER.ALERT_RULES]
    names = {query.expr: set(re.findall(rf"{PREFIX}\w+", query.expr)) for query in asked}
    assert {expr: unknown for expr, found in names.items() if (unknown := found - ON_THE_PAGE)} == {}
    assert sum(map(len, names.values())) > len(asked)


def test_the_dashboard_has_every_query_once_and_no_two_panels_overlap() -> None:
    panels = json.loads(WRITER.DASHBOARD.read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    assert asked == [query.expr for query in WRITER.QUERIES]
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)


def test_prometheus_own_checker_takes_the_rules() -> None:
    said = promtool("check", "rules", str(WRITER.ALERTS))
    assert said.returncode == 0, said.stderr
    assert "5 rules found" in said.stdout


def test_the_packages_of_the_tests_name_prometheus() -> None:
    assert "need_command prometheus prometheus" in (ROOT / "scripts/system_packages.sh").read_text()
