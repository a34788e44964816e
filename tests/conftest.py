"""Fixtures that all tests share, and which tests one worker runs where there are several."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

# An example's time says more about a busy machine than about the code; pytest-timeout ends what hangs.
settings.register_profile("kvpact", deadline=None)
settings.load_profile("kvpact")

pytest_plugins = ["engines"]

ENGINES = (
    "tests/test_demo.py",
    "tests/testkit/test_conformance_command.py",
    "tests/under_vllm/test_engine_documents.py",
    "tests/under_vllm/test_engine_faults.py",
    "tests/under_vllm/test_engine_fleet.py",
    "tests/under_vllm/test_engine_identity.py",
    "tests/under_vllm/test_engine_limits.py",
    "tests/under_vllm/test_engine_keys.py",
    "tests/under_vllm/test_engine_lives.py",
    "tests/under_vllm/test_engine_start.py",
    "tests/under_vllm/test_engine_step_hook.py",
    "tests/under_vllm/test_engine_weight_files.py",
    "tests/under_vllm/test_engine_weights.py",
    "tests/under_vllm/test_flood.py",
    "tests/under_vllm/test_http_life.py",
    "tests/under_vllm/test_pressure.py",
    "tests/under_vllm/test_store_faults.py",
    "tests/under_vllm/test_tensor_parallel.py",
)
"""Files whose tests start real engines.

One worker runs them, one after another: they share engines, all of which are bound to one core. Meanwhile other workers
run the other files, each in one of them.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines take longest and begin first."""
    for item in items:
        needs_engine = item.get_closest_marker("engine") or "tiny_model" in getattr(item, "fixturenames", ())
        if needs_engine and not item.nodeid.startswith(ENGINES):
            raise pytest.UsageError(f"{item.nodeid} starts an engine; its file must be among ENGINES in {__file__}")
    items.sort(key=lambda item: not item.nodeid.startswith(ENGINES))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadscope`: a worker gets a file, or all engines."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class FilesAndEngines(LoadScopeScheduling):
        """See `ENGINES`."""

        def _split_scope(self, nodeid: str) -> str:
            return "engines" if nodeid.startswith(ENGINES) else nodeid.split("::", 1)[0]

    return FilesAndEngines(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which of the documents' code blocks are run, and why others are not; that test may run elsewhere."""
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        for name, text in report.user_properties:
            if name == "documents" and report.when == "call":
                terminalreporter.section("code blocks of README.md and docs")
                terminalreporter.write_line(str(text))
