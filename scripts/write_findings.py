"""Write what the driver finds in vLLM's own connectors into `docs/findings.md`, between its markers."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpact.testkit.results import ConformanceReport, Verdict
from kvpact.testkit.vllm.driver import VllmDriver
from kvpact.testkit.vllm.offloading import FILES

PAGE = Path(__file__).parents[1] / "docs" / "findings.md"
FOLDER = "vllm.distributed.kv_transfer.kv_connector.v1"
SUBJECTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "example": (f"{FOLDER}.example_connector:ExampleConnector", {"shared_storage_path": "{folder}"}),
    "offloading": (f"{FOLDER}.offloading_connector:OffloadingConnector", FILES),
}
"""Marker in the page -> connector and configuration."""
PATIENCE_SECONDS = 3.0


def findings(report: ConformanceReport) -> str:
    """A table of what is broken, each line with its script below the table."""
    counts = ", ".join(f"{sum(check.verdict is verdict for check in report.checks)} {verdict}" for verdict in Verdict)
    lines = [f"{report.engine}: {counts}.", "", "| scenario | broken | what was seen |", "| --- | --- | --- |"]
    for check in report.broken:
        first = check.violations[0]
        seen = first.what.replace("|", "\\|")
        lines.append(f"| `{check.name}` | {', '.join(one.broken for one in check.violations)} | {seen} |")
    for check in report.broken:
        lines += ["", f"<details><summary><code>{check.name}</code>: {check.meaning}</summary>", "", "```text"]
        lines += [*check.script, "", *map(str, check.violations), "```", "", "</details>"]
    return "\n".join(lines)


def main() -> None:
    """Run all scenarios on all subjects and rewrite the page."""
    logging.disable(logging.CRITICAL)
    page = PAGE.read_text(encoding="utf-8")
    for marker, (connector, config) in SUBJECTS.items():
        begin, end = f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->"
        if not re.search(f"{begin}.*{end}", page, re.DOTALL):
            sys.exit(f"{PAGE} has no lines {begin} and {end}")
        text = findings(VllmDriver(connector, config, timeout=PATIENCE_SECONDS).run())
        page = page[: page.index(begin) + len(begin)] + f"\n{text}\n" + page[page.index(end) :]
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
