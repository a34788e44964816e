"""The proposals for vLLM do what their pages say: each patch applies, passes its own tests, and breaks none of vLLM's.

vLLM's tests come with its source distribution and stay out of this project. Which of them are run, and why others
cannot be, is in `upstream_tests.toml`. A run is one process, of 20 s to 40 s on one core.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from upstream_run import Outcomes, choice, run
from vllm_source import fetch_source, patched, touched_by

from documents import ROOT

PROPOSALS = sorted(patch.parent.name for patch in (ROOT / "upstream").glob("*/change.patch"))

CHOICE = choice()

LISTS = [pytest.param(CHOICE.proof, id="proof"), pytest.param(CHOICE.soak, id="soak")]
"""Which files of vLLM's own tests."""

EACH = [
    pytest.param(files, proposal, id=f"{name}-{proposal}")
    for name, files in (("proof", CHOICE.proof), ("soak", CHOICE.soak))
    for proposal in PROPOSALS
]
"""Which files with which proposal."""

NEWER_RULES = "ISC004"
"""Rules of ruff that vLLM's own release of ruff does not have, and its files break."""

pytestmark = [
    pytest.mark.soak,  # neither the patches nor vLLM's release change with kvpact
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


@cache
def before(files: tuple[str, ...]) -> Outcomes:
    """vLLM as it is, which is fetched once for all runs, and kept."""
    with patched(fetch_source(), None) as tree:
        return run(tree, files, CHOICE.left_out)


@cache
def after(proposal: str, files: tuple[str, ...]) -> Run:
    """vLLM with one patch."""
    patch = ROOT / "upstream" / proposal / "change.patch"
    touched = touched_by(patch)
    own = sorted(name for name in touched.added if name.startswith("tests/") and "/test_" in name)
    with patched(fetch_source(), patch) as tree:
        outcomes = run(tree, [*files, *own], CHOICE.left_out)
        return Run(outcomes.of(own), outcomes.of(files), _lint(tree, [*touched.changed, *touched.added]))


def _lint(tree: Path, names: list[str]) -> str:
    ruff = [sys.executable, "-m", "ruff"]
    for command in ([*ruff, "check", "--no-cache", "--ignore", NEWER_RULES], [*ruff, "format", "--no-cache", "--diff"]):
        done = subprocess.run([*command, *names], cwd=tree, capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stdout + done.stderr
    return ""


@pytest.mark.parametrize("files", LISTS)
def test_vllms_own_tests_pass_as_they_are(files: tuple[str, ...]) -> None:
    """All but those that are listed as not to be run here, and each name on that list is a test's."""
    outcomes = before(files)
    assert not str(outcomes)
    assert {name.partition("::")[0] for name in outcomes.by_name} == set(files) - set(CHOICE.left_out)
    listed = {name for name in CHOICE.left_out if "::" in name and name.partition("::")[0] in files}
    left_out = outcomes.named("left out")
    assert {name for name in listed if not any(one == name or one.startswith(f"{name}[") for one in left_out)} == set()


@pytest.mark.parametrize(("files", "proposal"), EACH)
def test_a_proposal_passes_its_own_tests_and_breaks_none_of_vllms(files: tuple[str, ...], proposal: str) -> None:
    """What passed before passes after; tests that the patch adds to vLLM's files pass too."""
    found = after(proposal, files)
    assert not str(found.own)
    assert found.own.named("passed")
    assert before(files).named("passed") <= found.upstream.named("passed"), str(found.upstream)
    assert not str(found.upstream)


@pytest.mark.parametrize(("files", "proposal"), EACH[: len(PROPOSALS)])
def test_a_proposal_is_written_by_vllms_rules(files: tuple[str, ...], proposal: str) -> None:
    assert not after(proposal, files).lint
