"""`examples/leasing_connector.py` runs unchanged under kvpact's scheduler class and under vLLM with the series.

Both end the same matches for the same reasons, in the same order: see `leasing_play.py`. No model and no device.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from leasing_play import EVENTS, REQUESTS, Play
from series import series
from vllm_source import RELEASE, fetch_source, patched

from documents import ROOT
from kvpact_testkit.vllm.releases import installed_release, releases_folder

CLASS = "kvpact.vllm.scheduler.pact_scheduler"
BLOCKS = (20, 40)
"""Room for one request, or for three of which two are preempted for the third."""

pytestmark = pytest.mark.timeout(600)


def play(scheduler: str, tree: Path | None = None) -> list[Play]:
    """On the installed vLLM, or on the one in `tree`, with each number of blocks."""
    command = [sys.executable, str(Path(__file__).parent / "leasing_play.py"), scheduler, *map(str, BLOCKS)]
    return [Play(**json.loads(line)) for line in _run(command, tree).splitlines()[-len(BLOCKS) :]]


def _run(command: list[str], tree: Path | None) -> str:
    path = [*([str(tree)] if tree else []), *(str(ROOT / name) for name in ("src", "examples", "tests", "testbeds"))]
    done = subprocess.run(
        command,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path),
            "VLLM_CACHE_ROOT": str(releases_folder() / f"{RELEASE if tree else installed_release()}-cache"),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_TARGET_DEVICE": "cpu",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def assert_kept(found: Play) -> None:
    """Every promise ended, once, for the reason that there was."""
    assert (found.leases, found.plans, found.wrong) == (0, 0, [])
    assert len(found.ends) == found.matches, "each plan ends once"
    reasons = [reason for _, reason in found.ends]
    assert sorted({*reasons}) == ["cancelled", "commit", "not_renewed", "reset", "superseded", "withdrawn"]
    assert len(reasons) - reasons.count("commit") == len(EVENTS), "nothing else ends a match"
    assert reasons.count("commit") == REQUESTS - 3, "of two the user left, and one found nothing"


@pytest.mark.proof
def test_every_promise_ends_under_the_class() -> None:
    for found in play(CLASS):
        assert_kept(found)


@pytest.mark.proof
def test_six_kinds_of_connectors_under_the_series_leave_what_the_page_says() -> None:
    """What they leave on stock vLLM and under the class is in tests/data/silent_reservations.md, and seen there."""
    page = (ROOT / "upstream" / "README.md").read_text(encoding="utf-8")
    runs = (ROOT / "tests" / "data" / "silent_reservations.md").read_text(encoding="utf-8")
    rows = {row[0]: row[1:] for row in re.findall(r"^\| ([^|]+) \| (.+) \| (.+) \| (.+) \|$", page, re.MULTILINE)}
    with patched(fetch_source(), *(commit.patch for commit in series())) as tree:
        left = json.loads(_run([sys.executable, "-m", "leasing_runs"], tree).splitlines()[-1])
    assert len(left) == 6
    for kind, under_series in left.items():
        assert rows[kind][2] == str(under_series), kind
        for scheduler, cell in zip(("vLLM's", "kvpact's class"), rows[kind][:2], strict=True):
            assert re.search(rf"^\| {kind} \| {scheduler} \| 20 \|.* {cell}\b[^|]* \|$", runs, re.MULTILINE), kind


@pytest.mark.proof
def test_every_promise_ends_alike_under_the_series() -> None:
    """On one release of vLLM: with kvpact's class, and patched, with vLLM's own scheduler."""
    source = fetch_source()
    with patched(source, *(commit.patch for commit in series())) as tree:
        under_series = play("", tree)
    for found in under_series:
        assert_kept(found)
    assert under_series == play(CLASS, source)
