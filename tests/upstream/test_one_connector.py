"""`examples/leasing_connector.py` runs unchanged under kvpact's scheduler class and under vLLM with the first patch.

Both end the same matches for the same reasons, in the same order: see `leasing_play.py`. No model and no device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from leasing_play import EVENTS, REQUESTS, Play
from vllm_source import RELEASE, fetch_source, patched

from documents import ROOT
from kvpact_testkit.vllm.releases import installed_release, releases_folder

CLASS = "kvpact.vllm.scheduler.pact_scheduler"
PATCH = ROOT / "upstream" / "1-plan-commit-abort" / "change.patch"
BLOCKS = (20, 40)
"""Room for one request, or for three of which two are preempted for the third."""

pytestmark = pytest.mark.timeout(600)


def play(scheduler: str, tree: Path | None = None) -> list[Play]:
    """On the installed vLLM, or on the one in `tree`, with each number of blocks."""
    path = [*([str(tree)] if tree else []), str(ROOT / "src"), str(ROOT / "examples"), str(ROOT / "tests")]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "leasing_play.py"), scheduler, *map(str, BLOCKS)],
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
    return [Play(**json.loads(line)) for line in done.stdout.splitlines()[-len(BLOCKS) :]]


def assert_kept(found: Play) -> None:
    """Every promise ended, once, for the reason that there was."""
    assert (found.leases, found.plans, found.wrong) == (0, 0, [])
    assert len(found.ends) == found.matches, "each plan ends once"
    reasons = [reason for _, reason in found.ends]
    assert sorted({*reasons}) == ["cancelled", "commit", "not_renewed", "reset", "superseded", "withdrawn"]
    assert len(reasons) - reasons.count("commit") == len(EVENTS), "nothing else ends a match"
    assert reasons.count("commit") == REQUESTS - 3, "of two the user left, and one found nothing"


def test_every_promise_ends_under_the_class() -> None:
    for found in play(CLASS):
        assert_kept(found)


@pytest.mark.proof
def test_every_promise_ends_alike_under_the_patch() -> None:
    """On one release of vLLM: with kvpact's class, and patched, with vLLM's own scheduler."""
    source = fetch_source()
    with patched(source, PATCH) as tree:
        under_patch = play("", tree)
    for found in under_patch:
        assert_kept(found)
    assert under_patch == play(CLASS, source)
