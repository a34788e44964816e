"""Write what the driver finds in vLLM's own connectors into `docs/internals/findings.md`, between its markers.

With the name of a connector it prints the steps that lead to each finding instead, of all scenarios or of those named.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpact_testkit.peers.vllm_connector import OFFLOADING, TIMEOUT_SECONDS
from kvpact_testkit.results import ConformanceReport, Verdict, as_text
from kvpact_testkit.vllm.driver import VllmDriver
from kvpact_testkit.vllm.offloading import FILES

PAGE = Path(__file__).parents[1] / "docs" / "internals" / "findings.md"
FOLDER = "vllm.distributed.kv_transfer.kv_connector.v1"
SUBJECTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "example": (f"{FOLDER}.example_connector:ExampleConnector", {"shared_storage_path": "{folder}"}),
    "offloading": (OFFLOADING, FILES),
}
"""Marker in the page -> connector and configuration."""


def run(subject: str, scenarios: Sequence[str] | None = None, timeout: float = TIMEOUT_SECONDS) -> ConformanceReport:
    """All scenarios, or those named, on a connector of `SUBJECTS`. A request may wait `timeout` seconds."""
    connector, config = SUBJECTS[subject]
    return VllmDriver(connector, config, timeout=timeout).run(scenarios)


def shortened(seen: str) -> str:
    """What was seen, without the name of the layer, further places, and the rest of an engine's last error."""
    seen = re.sub(r" \([\w.]+\.attn, rank (\d)\)", r" of rank \1", seen)
    seen = re.sub(r" \(and \d+ more like it\)", "", seen)
    return re.sub(r"(the engine dies: )execute_model raises (\w+):.*", r"\1\2", seen, flags=re.DOTALL)


def findings(report: ConformanceReport) -> str:
    """A table of what is broken."""
    counts = ", ".join(f"{sum(check.verdict is verdict for check in report.checks)} {verdict}" for verdict in Verdict)
    lines = [f"{report.engine}: {counts}.", "", "| scenario | broken | what was seen |", "| --- | --- | --- |"]
    for check in report.broken:
        seen = shortened(check.violations[0].what).replace("|", "\\|")
        lines.append(f"| `{check.name}` | {', '.join(one.broken for one in check.violations)} | {seen} |")
    return "\n".join(lines)


def main(subject: str = "", *scenarios: str) -> None:
    """Print the steps of one subject's findings, or run all scenarios on all subjects and rewrite the page."""
    if subject:
        print(as_text(run(subject, scenarios or None)))
        return
    page = PAGE.read_text(encoding="utf-8")
    for marker in SUBJECTS:
        begin, end = f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->"
        if not re.search(f"{begin}.*{end}", page, re.DOTALL):
            sys.exit(f"{PAGE} has no lines {begin} and {end}")
        page = page[: page.index(begin) + len(begin)] + f"\n{findings(run(marker))}\n" + page[page.index(end) :]
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    main(*sys.argv[1:])
