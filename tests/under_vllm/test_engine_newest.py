"""Real engines of the newest supported release: its Python files over the compiled parts of the installed one.

Some of what engines of the installed release go through in `make test`, and proofs that run on the newest alone, as the
soak has them for the installed one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from documents import ROOT, load_script
from kvpact_testkit.vllm.releases import RELEASES, engine_of

NEWEST = list(RELEASES)[-1]

UNDER_VLLM = "tests/under_vllm"
HOOK = f"{UNDER_VLLM}/test_engine_step_hook.py"

pytestmark = [pytest.mark.proof, pytest.mark.engine, pytest.mark.timeout(900)]


def passed_on_newest(folder: Path, *tests: str) -> int:
    """The number of these tests that passed on the newest release; fails if one did not, or was not run."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", f"--basetemp={folder / 'own'}"]
    with engine_of(NEWEST) as environment:
        alone = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
        run = {"cwd": ROOT, "env": alone, "capture_output": True, "text": True}
        version = subprocess.run([sys.executable, "-c", "import vllm; print(vllm.__version__)"], check=True, **run)  # type: ignore[call-overload]
        assert version.stdout.split()[-1] == NEWEST
        done = subprocess.run([*command, *tests], check=False, **run)  # type: ignore[call-overload]
    closing = load_script("scripts/closing_line.py").closing_line(done.stdout)
    assert closing is not None, done.stdout[-3000:] + done.stderr[-3000:]
    counts = {how: number for how, number in closing[0].items() if number and how not in ("warning", "deselected")}
    assert counts.keys() == {"passed"}, done.stdout[-6000:]
    return int(counts["passed"])


def test_an_engine_of_it_loads_from_memory_and_disk_and_skips_what_the_worker_supplies(tmp_path: Path) -> None:
    """Three lives with two kills and damage; the worker hook under several ranks' claims, failures and preemptions."""
    hook = (
        "what_the_worker_supplies_is_not_computed_and_the_answer_is_that_of_a_local_hit",
        "h13_a_hook_that_fails_costs_its_hits",
        "h43_ranks_skip_what_all_of_them_have",
        "h90_preempted_requests_come_back_and_are_served_again",
    )
    files = [f"{HOOK}::test_{name}" for name in hook]
    assert passed_on_newest(tmp_path, f"{UNDER_VLLM}/test_engine_lives.py", *files) == 7 + len(hook)


@pytest.mark.both_cores
def test_the_demonstration_and_the_worker_hook_of_two_ranks_pass_on_it(tmp_path: Path) -> None:
    tests = (
        "kit/tests/demo/test_demo.py::test_a_small_run_on_real_engines_passes",
        f"{UNDER_VLLM}/test_engine_documents.py::test_the_page_on_the_worker_hook_serves_another_connector",
        f"{HOOK}::test_h70_two_ranks_of_kvpact_find_in_a_shared_tier_what_the_step_is_to_compute",
    )
    assert passed_on_newest(tmp_path, *tests) == len(tests)
