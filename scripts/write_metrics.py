"""Write `docs/metrics.md`, and the alerts and the dashboard in `deploy`, from the table in `kvpact.metrics`.

`python scripts/write_metrics.py` rewrites the three; tests/test_generated.py fails while one is out of date. Every
query of the page is the alerts' or the dashboard's.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from kvpact.metrics import FAMILIES, PREFIX, Metric

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "metrics.md"
ALERTS = ROOT / "deploy" / "prometheus-alerts.yml"
DASHBOARD = ROOT / "deploy" / "grafana-dashboard.json"


class Query(NamedTuple):
    """A question with its answer in PromQL; `unit` is Grafana's name for it, `legend` names a line by its labels."""

    title: str
    expr: str
    unit: str = "short"
    legend: str = ""
    shows: str = "timeseries"
    """Grafana's kind of panel."""


STAT = "stat"
"""Panel with the last value, and a line behind it."""


class Alert(NamedTuple):
    """`summary` may name labels; `runbook` is one line on what to do."""

    name: str
    expr: str
    wait: str
    severity: str
    summary: str
    runbook: str


def _quantile(name: str, by: str = "") -> str:
    return f"histogram_quantile(0.99, sum by (le{by}) (rate({PREFIX}{name}_seconds_bucket[5m])))"


ROWS = {
    "Hits": (
        Query(
            "Share of prompt tokens that kvpact supplied",
            f"sum(rate({PREFIX}used_tokens_total[5m])) / sum(rate(vllm:prompt_tokens_total[5m]))",
            "percentunit",
            shows=STAT,
        ),
        Query(
            "Share of lookups that hit",
            f"sum(rate({PREFIX}hits_total[5m])) / sum(rate({PREFIX}lookups_total[5m]))",
            "percentunit",
            shows=STAT,
        ),
        Query(
            "Seconds of prefill saved a second",
            f"sum(rate({PREFIX}spared_prefill_seconds_total[5m]))",
            "short",
            shows=STAT,
        ),
        Query(
            "Share of prompt tokens by the tier that had them",
            f"sum by (tier) (rate({PREFIX}used_tokens_from_total[5m])) "
            "/ on () group_left () sum(rate(vllm:prompt_tokens_total[5m]))",
            "percentunit",
            "{{tier}}",
        ),
        Query(
            "Share of prompt tokens that the engine itself had",
            "sum(rate(vllm:prefix_cache_hits_total[5m])) / sum(rate(vllm:prompt_tokens_total[5m]))",
            "percentunit",
        ),
        Query(
            "Misses a second by reason", f"sum by (reason) (rate({PREFIX}misses_total[5m])) > 0", "short", "{{reason}}"
        ),
    ),
    "Time": (
        Query("99 % of lookups in a tier take less than", _quantile("lookup", ", tier"), "s", "{{tier}}"),
        Query("99 % of loads take less than", _quantile("load"), "s"),
        Query("99 % of saves take less than", _quantile("save"), "s"),
        Query("99 % of scheduler steps spend less in kvpact than", _quantile("step"), "s"),
        Query(
            "Share of scheduler steps that spend more than 1 ms in kvpact",
            f"sum(rate({PREFIX}slow_steps_total[5m])) / sum(rate({PREFIX}steps_total[5m]))",
            "percentunit",
        ),
    ),
    "Tiers": (
        Query("Tiers in use", f"min by (tier) ({PREFIX}tier_up)", "short", "{{tier}}", shows=STAT),
        Query(
            "Fill of each tier",
            f"sum by (tier) ({PREFIX}held_blocks) / (sum by (tier) ({PREFIX}capacity_blocks) > 0)",
            "percentunit",
            "{{tier}}",
        ),
        Query("Bytes read a second", f"sum by (tier) (rate({PREFIX}read_bytes_total[5m]))", "Bps", "{{tier}}"),
        Query("Bytes written a second", f"sum by (tier) (rate({PREFIX}written_bytes_total[5m]))", "Bps", "{{tier}}"),
    ),
    "Engines": (
        Query(
            "Engines by version", f"count by (version, block_size) ({PREFIX}info)", "short", "{{version}}", shows=STAT
        ),
    ),
}
"""The dashboard's rows and their panels."""

QUERIES = tuple(query for queries in ROWS.values() for query in queries)

ALERT_RULES = (
    Alert(
        "KvpactTierDown",
        f"min by (job, instance, engine, tier) ({PREFIX}tier_up) == 0",
        "2m",
        "warning",
        "The tier {{ $labels.tier }} of {{ $labels.instance }} is down.",
        "The engine serves without it: its log has the reason, and `kvpact tiers URL` probes the store. Repair the "
        "store: it is used again within seconds; an idle engine's page shows that after its next request.",
    ),
    Alert(
        "KvpactDamagedRecords",
        f"sum by (job, instance, tier) (increase({PREFIX}damaged_records_total[10m])) > 0",
        "0m",
        "warning",
        "Records in the tier {{ $labels.tier }} were damaged; none was served.",
        "`kvpact verify URL` names them; check the medium, who else can write there, and the record key, if "
        "there is one.",
    ),
    Alert(
        "KvpactErrors",
        f"sum by (job, instance, engine) (increase({PREFIX}hook_errors_total[10m])) > 0 "
        f'or sum by (job, instance, engine) (increase({PREFIX}misses_total{{reason="disabled"}}[10m])) > 0 '
        f"or max by (job, instance, engine) ({PREFIX}refuted_copies_total) > 0",
        "0m",
        "critical",
        "kvpact on {{ $labels.instance }} caught an error of its own, or is switched off.",
        "Answers are right, and computed: the engine's log has the error once, with its traceback; report it, and "
        "restart the engine to switch the cache on again.",
    ),
    Alert(
        "KvpactWritesDropped",
        f"sum by (job, instance, tier) (rate({PREFIX}dropped_writes_total[10m])) > 0",
        "10m",
        "warning",
        "Blocks for the tier {{ $labels.tier }} of {{ $labels.instance }} are dropped.",
        "The store is slower than the engine computes, full, or down: check `tier_failures`, raise `write_queue` "
        'or `memory` for peaks, or store less with `"admit": "second-use"`.',
    ),
    Alert(
        "KvpactLeasesHeldAtRest",
        f"{PREFIX}leases_held > 0 and on (job, instance, engine) "
        "(vllm:num_requests_running + vllm:num_requests_waiting) == 0",
        "5m",
        "critical",
        "kvpact on {{ $labels.instance }} holds leases without any request.",
        "These leases keep memory until a restart; there is no other harm. Report it, with kvpact's last lines in the "
        "engine's log.",
    ),
)

HEAD = f"""\
# Metrics

Written by `python scripts/write_metrics.py` from [kvpact/metrics.py](../src/kvpact/metrics.py).
They are on the server's own page, beside vLLM's: `curl -s localhost:8000/metrics | grep kvpact`. For Prometheus:

```yaml
scrape_configs:
  - job_name: vllm
    static_configs:
      - targets: ["localhost:8000"]
rule_files: [prometheus-alerts.yml]
```

- All names begin with `{PREFIX}`, and those of counters end in `_total`. All series have vLLM's labels `model_name` and
  `engine`, the number of a replica.
- `tier` is `memory`, or the option `name=` of the tier's URL, or its kind: `disk`, `directory`, `redis`, `object`,
  `mooncake`, the scheme of another package's tier; the second tier of a kind is `redis-2`. `tier_info` has the URLs.
- `tenant` is a name in [`tenants`](hints.md#shares-of-tenants), or `others`.
- Engines report to their server once before the first request, then at most once a second. Counters are complete. A
  histogram gets up to 32 evenly drawn times a second for each of its series: its quantiles are right, its `_count` is
  too low.
- `lookup_seconds` has lookups in tiers that engines share. A `disk` tier answers from the engine's memory.
- A `PactTier` below [vLLM's offloading](offloading.md#metrics) has some of the metrics by tier.

## All of them
"""


def _rows() -> list[str]:
    lines = []
    for metric in sorted(FAMILIES, key=lambda metric: metric.name):
        labels = ", ".join(f"`{name}`" for name in metric.label_names)
        lines.append(f"| `{_full(metric)}` | {metric.kind} | {metric.unit} | {labels} | {metric.meaning} |")
    return lines


def _full(metric: Metric) -> str:
    return f"{PREFIX}{metric.name}{'_total' if metric.kind == 'counter' else ''}"


def page() -> str:
    """The whole page."""
    lines = [HEAD, "| name | type | unit | labels | meaning |", "|---|---|---|---|---|", *_rows(), "", "## Queries", ""]
    lines += ["The [dashboard](../deploy/grafana-dashboard.json), to import into Grafana, has these.", ""]
    for query in QUERIES:
        lines += [f"{query.title}:", "", "```promql", query.expr, "```", ""]
    lines += ["## Alerts", "", "[deploy/prometheus-alerts.yml](../deploy/prometheus-alerts.yml) has these rules.", ""]
    lines += ["| alert | what to do |", "|---|---|"]
    lines += [f"| `{alert.name}` | {alert.runbook} |" for alert in ALERT_RULES]
    return "\n".join([*lines, ""])


def alerts() -> str:
    """The rules as a file of Prometheus; a YAML string may be written as JSON's."""
    lines = ["groups:", "  - name: kvpact", "    rules:"]
    for alert in ALERT_RULES:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expr)}",
            f"        for: {alert.wait}",
        ]
        lines += ["        labels:", f"          severity: {alert.severity}", "        annotations:"]
        lines += [f"          summary: {json.dumps(alert.summary)}", f"          runbook: {json.dumps(alert.runbook)}"]
    return "\n".join(lines) + "\n"


CHOSEN = '{model_name=~"$model",instance=~"$instance"}'
"""Selector of a series in the dashboard, so that no two models or servers are averaged unseen."""


def _variable(name: str, label: str) -> dict[str, Any]:
    """A choice of the dashboard's: the values of a label of all engines with kvpact, by default all."""
    query = f"label_values({PREFIX}info, {label})"
    chosen = {"includeAll": True, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    return {"name": name, "type": "query", "datasource": SOURCE, "query": query, "refresh": 2, **chosen}


SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _panel(query: Query, place: dict[str, int]) -> dict[str, Any]:
    expr = re.sub(r"vllm:\w+", lambda found: found[0] + CHOSEN, query.expr)
    return {
        "title": query.title,
        "type": query.shows,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": query.unit, "min": 0}, "overrides": []},
        "targets": [{"refId": "A", "datasource": SOURCE, "expr": expr, "legendFormat": query.legend or query.title}],
    }


def dashboard() -> str:
    """What Grafana imports: rows of panels, one for each query; figures are small, and stand before the curves."""
    panels = list[dict[str, Any]]()
    y = 0
    for title, queries in ROWS.items():
        panels.append({"title": title, "type": "row", "collapsed": False, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}})
        y += 1
        for kind, height, wide in ((STAT, 4, 6), ("timeseries", 8, 12)):
            of_kind = [query for query in queries if query.shows == kind]
            across = 24 // wide
            for number, query in enumerate(of_kind):
                place = {"h": height, "w": wide, "x": wide * (number % across), "y": y + height * (number // across)}
                panels.append(_panel(query, place))
            y += height * -(-len(of_kind) // across)
    told = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    whole = {
        "title": "kvpact",
        "uid": "kvpact",
        "schemaVersion": 38,
        "tags": ["kvpact", "vllm"],
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [told, _variable("model", "model_name"), _variable("instance", "instance")]},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }
    return json.dumps(whole, indent=2) + "\n"


WRITTEN = {PAGE: page, ALERTS: alerts, DASHBOARD: dashboard}
"""Each file and what writes it."""

if __name__ == "__main__":
    for path, text in WRITTEN.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text(), encoding="utf-8")
