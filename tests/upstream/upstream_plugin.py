"""For the pytest that runs vLLM's own tests: leaves out what cannot run here, and writes down how each test ended.

It is given as the environment variable KVPACT_UPSTREAM_RUN: a JSON file with the tests to leave out (`unrunnable`),
the file for the outcomes (`outcomes`), whether each test finds a device that is played (`on_played_device`), and
whether vLLM's example of a tier is a `PactTier` (`with_pact_tier`).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest

from kvpact_testkit.device.played import PlayedDevice

RUN = json.loads(Path(os.environ["KVPACT_UPSTREAM_RUN"]).read_text())

outcomes: dict[str, list[str]] = {}


collecting = ExitStack()
"""Until the tests are collected."""


def pytest_configure() -> None:
    """Tests that skip themselves where there is no CUDA device do not."""
    if RUN["on_played_device"]:
        import torch
        from vllm.platforms import current_platform

        collecting.enter_context(patch.object(torch.cuda, "is_available", lambda: True))
        for name, instead in (("device_type", "cuda"), ("is_cuda", lambda: True), ("is_cuda_alike", lambda: True)):
            collecting.enter_context(patch.object(current_platform, name, instead, create=True))
    if RUN["with_pact_tier"]:
        sys.path.append(str(Path(__file__).parents[1] / "under_vllm"))
        from pact_as_example import PactAsExample
        from vllm.v1.kv_offload.tiering.example import manager

        collecting.enter_context(patch.object(manager, "ExampleSecondaryTierManager", PactAsExample))


@pytest.fixture(autouse=True)
def played_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """A device of the test's own, whose seed is the test's name; it must have been used as CUDA demands."""
    if not RUN["on_played_device"]:
        yield
        return
    from kvpact_testkit.vllm.played_copies import PlayedPlatform

    device = PlayedDevice(zlib.crc32(request.node.nodeid.encode()))
    with PlayedPlatform(device).installed():
        yield
    assert device.driver.violations == []


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
    collecting.close()
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
