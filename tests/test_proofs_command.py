"""`make proofs` and what `.ci/run` prints at the end: what failed once counts only if it fails again, by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SCRIPTS = REPOSITORY / "scripts"

GOOD = """
import os
import pytest
from pathlib import Path
RUNS = Path(__file__).with_name("runs")

@pytest.mark.proof
def test_good():
    pass

@pytest.mark.proof
@pytest.mark.both_cores
def test_good_with_both_cores(request):
    assert len(request.session.items) == 1
    assert "PYTEST_XDIST_WORKER" not in os.environ, "nothing runs beside it"

def test_no_proof():
    assert False, "never run"
"""
FAILS_ONCE = """
@pytest.mark.proof
@pytest.mark.parametrize("word", ["a word::and another"])
def test_fails_once(word, request):
    RUNS.write_text(RUNS.read_text() + "x" if RUNS.exists() else "x")
    assert RUNS.read_text() != "x"
    assert "PYTEST_XDIST_WORKER" not in os.environ, "nothing runs beside it the second time"
    assert not {"test_good", "test_good_with_both_cores"}.intersection(item.name for item in request.session.items)
"""
FAILS_TWICE = """
@pytest.mark.proof
def test_fails_twice():
    assert False, "as always"
"""
ENDS_BADLY = """
@pytest.fixture
def scene():
    yield
    assert False, "the end of the scene"

@pytest.mark.proof
def test_ends_badly(scene):
    pass
"""
CRASHES = """
@pytest.mark.proof
def test_crashes():
    import os, signal
    os.kill(os.getpid(), signal.SIGSEGV)
"""
TESTS = "tests/test_x.py .. in 3.0s\n===== 2572 passed, 3 skipped in 754.12s (0:12:34) =====\n"


SLOW = """
@pytest.mark.proof
def test_slow():
    import time
    time.sleep(4)
"""


def run_proofs(directory: Path, *parts: str, arguments: tuple[str, ...] = ()) -> tuple[int, list[str]]:
    """The exit code and the lines printed for a test file of these parts."""
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n proof\n both_cores\naddopts = -m 'not proof'\n")
    (directory / "test_it.py").write_text("".join(parts))
    done = subprocess.run(
        [sys.executable, SCRIPTS / "run_proofs.py", *arguments],
        cwd=directory,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_PLUGINS": "xdist.plugin",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_proofs_that_pass_are_run_once(tmp_path: Path) -> None:
    code, lines = run_proofs(tmp_path, GOOD)
    assert code == 0
    assert lines[-1].startswith("2 passed in ")
    assert not any("once more" in line for line in lines)


def test_a_proof_that_fails_once_passes_and_both_runs_are_printed(tmp_path: Path) -> None:
    code, lines = run_proofs(tmp_path, GOOD, FAILS_ONCE)
    assert code == 0
    assert lines[-1].startswith("3 passed in ")
    assert (tmp_path / "runs").read_text() == "xx"
    assert sum("AssertionError" in line for line in lines) > 0, "the first run is printed"
    assert any(line.startswith("once more, alone: test_it.py::test_fails_once") for line in lines)


@pytest.mark.parametrize("bad", [FAILS_TWICE, ENDS_BADLY])
def test_a_proof_that_fails_twice_fails(tmp_path: Path, bad: str) -> None:
    code, lines = run_proofs(tmp_path, GOOD, FAILS_ONCE, bad)
    assert code == 1
    assert lines[-1].startswith("1 failed, ")
    assert sum(line.startswith("once more, alone:") for line in lines) == 1, "those of one file in one run"


def test_a_second_run_that_does_not_come_to_its_end_fails_all_of_its_file(tmp_path: Path) -> None:
    code, lines = run_proofs(tmp_path, GOOD, FAILS_ONCE, CRASHES)
    assert code == 1
    assert lines[-1].startswith("2 failed, 2 passed")


def test_a_run_that_does_not_come_to_its_end_fails(tmp_path: Path) -> None:
    code, lines = run_proofs(tmp_path, GOOD, "\nimport a_module_that_is_not_there\n")
    assert code == 1
    assert lines[-1].startswith("the proofs could not be run to their end")


def test_no_proof_begins_after_its_time_and_those_that_are_left_are_counted(tmp_path: Path) -> None:
    code, lines = run_proofs(tmp_path, GOOD, SLOW, FAILS_TWICE, arguments=("--minutes", "0.0001"))
    assert code == 1, "a run in which nothing passed is not a good one"
    assert lines[-3] == "NOT RUN for want of time: 4 proofs, which are among the skipped"
    assert lines[-1].startswith("4 skipped in ")


def test_a_proof_that_began_in_time_is_judged(tmp_path: Path) -> None:
    """Also in its second run, which comes later."""
    code, lines = run_proofs(tmp_path, GOOD, FAILS_ONCE, FAILS_TWICE, SLOW, arguments=("--minutes", "100"))
    assert code == 1
    assert lines[-1].startswith("1 failed, 4 passed in ")
    assert not any("NOT RUN" in line for line in lines)


def test_no_proofs_at_all_are_a_failure(tmp_path: Path) -> None:
    assert run_proofs(tmp_path, "")[0] == 1


@pytest.mark.parametrize(
    ("logs", "code", "last"),
    [
        ((TESTS, "1 failed in 3.00s\n20 passed in 900.50s\n"), 0, "2592 passed, 3 skipped in 1654.62s"),
        (
            (TESTS, "= 1 failed, 20 passed, 2 errors in 9.50s =\n"),
            1,
            "1 failed, 2592 passed, 3 skipped, 2 error in 763.62s",
        ),
        (("\x1b[32m== \x1b[1m2 passed\x1b[0m\x1b[32m in 0.01s\x1b[0m\x1b[32m ==\x1b[0m\n",), 0, "2 passed in 0.01s"),
        ((TESTS, "make: *** [lint] Error 1\n"), 1, "2572 passed, 3 skipped, 1 error in 754.12s"),
        ((TESTS, "no tests ran in 0.00s\n"), 1, "2572 passed, 3 skipped in 754.12s"),
    ],
    ids=["sum", "failures", "colours", "no closing line", "nothing ran"],
)
def test_the_last_line_is_the_sum_of_all_runs(tmp_path: Path, logs: tuple[str, ...], code: int, last: str) -> None:
    files = [tmp_path / str(number) for number in range(len(logs))]
    for file, log in zip(files, logs, strict=True):
        file.write_text(log)
    done = subprocess.run([sys.executable, SCRIPTS / "closing_line.py", *files], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (code, last)
