"""`make proofs` and what `.ci/run` prints at the end: what failed once counts only if it fails again, alone."""

from __future__ import annotations

import os
import shutil
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
    assert len(request.session.items) == 1, "it is alone the second time"
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
LEAVES_WHEN_ALONE = """
@pytest.mark.proof
def test_leaves_when_alone(request):
    import os
    if len(request.session.items) == 1:
        os._exit(0)
    assert False
"""
CRASHES = """
@pytest.mark.proof
def test_crashes():
    import os, signal
    os.kill(os.getpid(), signal.SIGSEGV)
"""
LEAVES = """
@pytest.mark.proof
def test_leaves():
    import os
    os._exit(0)
"""


def of_both_cores(proof: str) -> str:
    """The same, run in pytest's own process."""
    return proof.replace("@pytest.mark.proof", "@pytest.mark.proof\n@pytest.mark.both_cores")


def run_proofs(directory: Path, *parts: str) -> tuple[int, list[str]]:
    """The exit code and the lines printed for a test file of these parts."""
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n proof\n both_cores\naddopts = -m 'not proof'\n")
    (directory / "test_it.py").write_text("".join(parts))
    done = subprocess.run(
        [sys.executable, SCRIPTS / "run_proofs.py"],
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


@pytest.mark.parametrize("bad", [FAILS_TWICE, ENDS_BADLY, LEAVES_WHEN_ALONE, CRASHES])
def test_a_proof_that_fails_twice_fails(tmp_path: Path, bad: str) -> None:
    code, lines = run_proofs(tmp_path, GOOD, FAILS_ONCE, bad)
    assert code == 1
    assert lines[-1].startswith("1 failed, ")
    assert sum(line.startswith("once more, alone:") for line in lines) == 2


@pytest.mark.parametrize(
    "end", [of_both_cores(CRASHES), of_both_cores(LEAVES), "\nimport a_module_that_is_not_there\n"]
)
def test_a_run_that_does_not_come_to_its_end_fails(tmp_path: Path, end: str) -> None:
    code, lines = run_proofs(tmp_path, GOOD, end)
    assert code == 1
    assert lines[-1].startswith("the proofs could not be run to their end")


def test_no_proofs_at_all_are_a_failure(tmp_path: Path) -> None:
    assert run_proofs(tmp_path, "")[0] == 1


def closing(directory: Path, **logs: str) -> tuple[int, list[str]]:
    for name, text in logs.items():
        (directory / name).write_text(text)
    done = subprocess.run(
        [sys.executable, SCRIPTS / "closing_line.py", *(directory / name for name in logs)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout.splitlines()


TESTS = "tests/test_x.py .. in 3.0s\n===== 2572 passed, 3 skipped, 54 deselected in 754.12s (0:12:34) =====\n"


def test_the_last_line_is_the_sum_of_both_runs(tmp_path: Path) -> None:
    code, lines = closing(tmp_path, tests=TESTS, proofs="1 failed in 3.00s\n20 passed, 2 skipped in 900.50s\n")
    assert code == 0
    assert lines == [
        "tests: 2572 passed, 3 skipped, 54 deselected in 754.12s",
        "proofs: 20 passed, 2 skipped in 900.50s",
        "2592 passed, 5 skipped, 54 deselected in 1654.62s",
    ]


def test_colours_are_no_part_of_it(tmp_path: Path) -> None:
    line = "\x1b[32m== \x1b[1m2 passed\x1b[0m, \x1b[33m1 warning\x1b[0m\x1b[32m in 0.01s\x1b[0m\x1b[32m ==\x1b[0m\n"
    assert closing(tmp_path, tests=line) == (0, ["tests: 2 passed, 1 warning in 0.01s", "2 passed, 1 warning in 0.01s"])


def test_a_failure_of_either_run_is_one_of_both(tmp_path: Path) -> None:
    code, lines = closing(tmp_path, tests=TESTS, proofs="= 1 failed, 20 passed, 2 errors in 900.50s =\n")
    assert code == 1
    assert lines[-1] == "1 failed, 2592 passed, 3 skipped, 54 deselected, 2 error in 1654.62s"


@pytest.mark.parametrize("log", ["make: *** [lint] Error 1\n", "", "no tests ran in 0.01s\n"])
def test_a_run_without_a_closing_line_is_a_failure(tmp_path: Path, log: str) -> None:
    assert closing(tmp_path, tests=TESTS, proofs=log)[0] == 1


NOT_RUN = "[test-3.13] NOT RUN: this machine has no Python 3.13"
"""What `make test-3.13` says then."""

CHECKED = "5 passed in 60.00s"
"""What `make check` says in its own environment, which is made first."""

MAKE = """#!/bin/sh
[ "$1 $KVPACT_VENV" = "check .venv-check" ] && echo "$CHECK" && exit $CHECK_CODE
[ "$1" = test ] && echo "== $TESTS in 700.00s (0:11:40) ==" && exit $TESTS_CODE
[ "$1" = test-3.13 ] && echo "$OTHER" && exit $OTHER_CODE
echo "once more, alone"; echo "$PROOFS in 900.50s"; exit $PROOFS_CODE
"""


@pytest.mark.parametrize(
    ("check", "tests", "other", "proofs", "code", "last"),
    [
        (CHECKED, "2 passed", NOT_RUN, "1 passed", 0, "8 passed in 1660.50s"),
        (CHECKED, "2 passed", "4 passed in 100.00s", "1 passed", 0, "12 passed in 1760.50s"),
        (CHECKED, "2 passed", "1 failed, 4 passed in 100.00s", "1 passed", 1, "1 failed, 12 passed in 1760.50s"),
        (CHECKED, "2 passed", "pip failed", "1 passed", 1, "8 passed, 1 error in 1660.50s"),
        (CHECKED, "1 failed, 2 passed", NOT_RUN, "1 passed", 1, "1 failed, 8 passed in 1660.50s"),
        (CHECKED, "2 passed", NOT_RUN, "1 failed, 1 passed", 1, "1 failed, 8 passed in 1660.50s"),
        (CHECKED, "make: lint failed", NOT_RUN, "1 passed", 1, "6 passed, 1 error in 960.50s"),
        (CHECKED, "2 passed", NOT_RUN, "proofs ended", 1, "7 passed, 1 error in 760.00s"),
        ("1 failed, 4 passed in 60.00s", "2 passed", NOT_RUN, "1 passed", 1, "1 failed, 7 passed in 1660.50s"),
        ("Found 1 error in 1 file", "2 passed", NOT_RUN, "1 passed", 1, "3 passed, 1 error in 1600.50s"),
    ],
)
def test_continuous_integration_runs_all_and_the_last_line_is_of_all_that_ran(
    tmp_path: Path, check: str, tests: str, other: str, proofs: str, code: int, last: str
) -> None:
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    shutil.copytree(REPOSITORY / ".ci", tmp_path / ".ci")
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    for program, script in ((make, MAKE), (tmp_path / "scripts/system_packages.sh", "#!/bin/sh\n")):
        program.write_text(script)
        program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{make.parent}:{os.environ['PATH']}",
        "CHECK": check,
        "CHECK_CODE": str(int(not check[0].isdigit() or "failed" in check)),
        "TESTS": tests,
        "TESTS_CODE": str(int(not tests[0].isdigit() or "failed" in tests)),
        "OTHER": other,
        "OTHER_CODE": str(int(other != NOT_RUN and (not other[0].isdigit() or "failed" in other))),
        "PROOFS": proofs,
        "PROOFS_CODE": str(int(not proofs[0].isdigit() or "failed" in proofs)),
    }
    done = subprocess.run([".ci/run"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (code, last), done.stderr
    assert done.stdout.count(NOT_RUN) == (2 if other == NOT_RUN else 0), (
        "said when it happens, and above the last lines"
    )
