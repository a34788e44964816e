"""Locks that connectors of others leave when matches are not taken: vLLM's LMCacheMPConnector in the table of
upstream/rfc.md, others in that of upstream/README.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from documents import ROOT

sys.path.append(str(ROOT / "tests" / "upstream"))
from series import series
from vllm_source import fetch_source, patched

PACT = "kvpact.vllm.scheduler.pact_scheduler"
COLUMNS = ("stock", "class", "with (b)", "with (b) and (c)")

pytestmark = pytest.mark.timeout(900)


def locks_left(scheduler: str = "", *trees: Path, subject: str = "vllm") -> dict[str, int]:
    """What is locked at the end of each scene, in a process of its own; packages in `trees` come first."""
    places = [*map(str, trees), str(ROOT / "testbeds"), *(entry for entry in sys.path if entry)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(places),
        "VLLM_LOGGING_LEVEL": "CRITICAL",
        "VLLM_TARGET_DEVICE": "cpu",
    }
    command = [sys.executable, "-m", "lmcache_locks", subject, *filter(None, [scheduler])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {str(scene): int(chunks) for scene, chunks in json.loads(done.stdout.splitlines()[-1]).items()}


def on_the_page(column: str, page: str = "rfc.md", columns: tuple[str, ...] = COLUMNS) -> dict[str, int]:
    """A column of a page's table."""
    text = (ROOT / "upstream" / page).read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+?) \|" + r" (\d+) \|" * len(columns) + "$", text, re.MULTILINE)
    assert rows
    return {row[0]: int(row[1 + columns.index(column)]) for row in rows}


@pytest.mark.parametrize(("column", "scheduler"), [pytest.param("stock", "", marks=pytest.mark.proof), ("class", PACT)])
def test_locks_are_left_by_a_connector_that_is_not_told(column: str, scheduler: str) -> None:
    """The class changes nothing for a connector that has no way to hear of an end."""
    assert locks_left(scheduler) == on_the_page(column)


@pytest.mark.proof
@pytest.mark.parametrize(("column", "commits"), [("stock", 0), ("with (b)", 2), ("with (b) and (c)", 3)])
def test_the_series_leaves_fewer(column: str, commits: int) -> None:
    """On vLLM 0.33.0 with the first commits of the series."""
    with patched(fetch_source(), *(commit.patch for commit in series()[:commits])) as tree:
        assert locks_left("", tree) == on_the_page(column)


OTHERS = ("lmcache", "simple")
OWN = "0.5.6"


@pytest.mark.soak
@pytest.mark.parametrize("scheduler", ["", PACT])
def test_what_others_leave_is_what_the_page_says(scheduler: str, tmp_path: Path) -> None:
    """LMCache's own connector, from its wheel, and vLLM's SimpleCPUOffloadConnector: under the class as without it."""
    command = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path), f"lmcache=={OWN}"]
    subprocess.run([sys.executable, *command], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "lmcache")
    for subject in OTHERS:
        found = locks_left(scheduler, tmp_path / "lmcache", subject=subject)
        assert found == on_the_page(subject, "README.md", OTHERS), subject
