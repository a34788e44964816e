"""For the pytest that runs vLLM's own tests: leaves out what cannot run here, and writes down how each test ended.

It is given as the environment variable KVPACT_UPSTREAM_RUN: a JSON file with the tests to leave out (`unrunnable`) and
the file for the outcomes (`outcomes`).
"""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import pytest

RUN = json.loads(Path(os.environ["KVPACT_UPSTREAM_RUN"]).read_text())

outcomes: dict[str, list[str]] = {}


def is_named(nodeid: str, names: list[str]) -> bool:
    """Whether one of the names is the test's, with or without its parameters."""
    return nodeid in names or nodeid.partition("[")[0] in names


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """vLLM's marker: no tear-down of a distributed engine, which takes half a second after each of a thousand tests."""
    left_out = [item for item in items if is_named(item.nodeid, RUN["unrunnable"])]
    for item in left_out:
        outcomes[item.nodeid] = ["left out", ""]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item.nodeid not in outcomes]
    for item in items:
        item.add_marker(pytest.mark.skip_global_cleanup)


def pytest_collection_finish() -> None:
    """What is loaded is loaded: nobody looks through it again."""
    gc.collect()
    gc.freeze()


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported."""
    if report.failed:
        outcomes[report.nodeid] = ["failed", str(report.longrepr)[-2000:]]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A failed tear-down is a failure."""
    if report.when == "call" or not report.passed:
        outcomes[report.nodeid] = [report.outcome, "" if report.passed else str(report.longrepr)[-2000:]]


def pytest_sessionfinish() -> None:
    """Write them down."""
    Path(RUN["outcomes"]).write_text(json.dumps(outcomes))
