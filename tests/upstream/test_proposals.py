"""The proposals for vLLM do what their pages say: each patch applies, passes its own tests, and breaks none of vLLM's.

vLLM's tests come with its source distribution and stay out of this project. Which of them are run, and why others
cannot be, is in `upstream_tests.toml`. A run takes about 40 s of one core: one process for each patch.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from upstream_run import Outcomes, choice, run
from vllm_source import fetch_source, patched, touched_by

from documents import ROOT

PROPOSALS = sorted(patch.parent.name for patch in (ROOT / "upstream").glob("*/change.patch"))

CHOICE = choice()

LISTS = [
    pytest.param(CHOICE.proof, marks=pytest.mark.proof, id="proof"),
    pytest.param(CHOICE.soak, marks=pytest.mark.soak, id="soak"),
]
"""Which files of vLLM's own tests."""

NEWER_RULES = "ISC004"
"""Rules of ruff that vLLM's own release of ruff does not have, and its files break."""

pytestmark = [
    pytest.mark.timeout(2400),
    # What vLLM's tests import comes with the engine; it is not imported here.
    pytest.mark.skipif(find_spec("vllm") is None, reason="no engine is installed; `make setup` installs one"),
]


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a tree with a patch in it."""

    own: Outcomes
    """The patch's own tests."""
    upstream: Outcomes
    lint: str
    """What ruff says of the files that the patch touches, by vLLM's own rules; "" if it has nothing to say."""


@pytest.fixture(scope="module")
def source() -> Path:
    """Fetched once for all runs, and kept."""
    return fetch_source()


@pytest.fixture(scope="module", params=LISTS)
def files(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The test files to run."""
    chosen: tuple[str, ...] = request.param
    return chosen


@pytest.fixture(scope="module")
def before(source: Path, files: tuple[str, ...]) -> Outcomes:
    """vLLM as it is."""
    with patched(source, None) as tree:
        return run(tree, files, CHOICE.left_out)


@pytest.fixture(scope="module", params=PROPOSALS)
def after(request: pytest.FixtureRequest, source: Path, files: tuple[str, ...]) -> Iterator[Run]:
    """vLLM with one patch."""
    patch = ROOT / "upstream" / request.param / "change.patch"
    touched = touched_by(patch)
    own = sorted(name for name in touched.added if name.startswith("tests/") and "/test_" in name)
    with patched(source, patch) as tree:
        outcomes = run(tree, [*files, *own], CHOICE.left_out)
        yield Run(outcomes.of(own), outcomes.of(files), _lint(tree, [*touched.changed, *touched.added]))


def _lint(tree: Path, names: list[str]) -> str:
    ruff = [sys.executable, "-m", "ruff"]
    for command in ([*ruff, "check", "--no-cache", "--ignore", NEWER_RULES], [*ruff, "format", "--no-cache", "--diff"]):
        done = subprocess.run([*command, *names], cwd=tree, capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stdout + done.stderr
    return ""


def test_vllms_own_tests_pass_as_they_are(before: Outcomes, files: tuple[str, ...]) -> None:
    """All but those that are listed as not to be run here."""
    assert not str(before)
    run_at_all = {name.partition("::")[0] for name in before.by_name}
    assert run_at_all == set(files) - set(CHOICE.left_out)


def test_each_name_on_the_list_of_tests_not_to_be_run_is_a_tests(before: Outcomes, files: tuple[str, ...]) -> None:
    listed = {name for name in CHOICE.left_out if "::" in name and name.partition("::")[0] in files}
    left_out = before.named("left out")
    assert {name for name in listed if not any(one == name or one.startswith(f"{name}[") for one in left_out)} == set()


def test_a_proposal_passes_its_own_tests(after: Run) -> None:
    assert not str(after.own)
    assert len(after.own.named("passed")) >= 3


def test_a_proposal_breaks_none_of_vllms_tests(before: Outcomes, after: Run) -> None:
    """What passed before passes after; tests that the patch adds to vLLM's files pass too."""
    assert before.named("passed") <= after.upstream.named("passed"), str(after.upstream)
    assert not str(after.upstream)


def test_a_proposal_is_written_by_vllms_rules(after: Run) -> None:
    assert not after.lint
