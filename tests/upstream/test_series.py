"""The series for vLLM does what its messages say: each commit applies, passes its own tests, and breaks none of vLLM's.

vLLM's tests come with its source distribution and stay out of this project. Which of them are run, and why others
cannot be, is in `upstream_tests.toml`. A run is one process, of 20 s to 60 s on one core.
"""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest
from series import SERIES, Commit, hunks_that_do_not_apply, outcomes_of, series
from upstream_run import Outcomes, choice, run
from vllm_source import fetch_source, patched

from documents import ROOT

COMMITS = series()
NAMES = [commit.patch.stem for commit in COMMITS]
CHOICE = choice()

LINE_LENGTH = 88
"""vLLM's."""

of_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="no engine is installed; `make setup` installs one")


def test_the_commits_are_numbered_and_named_on_the_page() -> None:
    assert [commit.patch.name[:4] for commit in COMMITS] == [f"{number:04d}" for number in range(1, len(COMMITS) + 1)]
    page = (ROOT / "upstream" / "README.md").read_text(encoding="utf-8")
    assert [commit.subject for commit in COMMITS if f"| {commit.subject} |" not in page] == []
    assert {path.name for path in SERIES.iterdir()} == {commit.patch.name for commit in COMMITS}


@pytest.mark.parametrize("commit", COMMITS, ids=NAMES)
def test_a_commit_is_signed_in_vllms_form_and_has_tests(commit: Commit) -> None:
    patch = commit.patch.read_text(encoding="utf-8")
    assert re.search(r"^Signed-off-by: .+ <.+>$", patch, re.MULTILINE)
    assert all(name.startswith(("vllm/", "tests/")) for name in commit.files)
    assert commit.own_tests
    body = patch.partition("\ndiff --git ")[2]
    lines = [line[1:] for line in body.splitlines() if line.startswith("+") and not line.startswith("+++ ")]
    assert [line for line in lines if len(line) > LINE_LENGTH or line != line.rstrip()] == []


def test_the_first_commits_are_as_short_as_they_were_asked_to_be() -> None:
    """Source lines: the counts of loads, LMCache's locks, the end of a match."""
    counts, locks, ends = (commit.added_lines("vllm") for commit in COMMITS[:3])
    assert counts <= 18
    assert locks <= 20
    assert ends <= 120


@of_vllm
@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_all_commits_apply_in_order_and_other_trees_get_the_hunks_named() -> None:
    source = fetch_source()
    with patched(source, *(commit.patch for commit in COMMITS)):
        pass
    assert hunks_that_do_not_apply(source, (), COMMITS[2]), "it needs the second"
    assert hunks_that_do_not_apply(source, COMMITS[:2], COMMITS[2]) == []


@of_vllm
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(len(COMMITS)), ids=NAMES)
def test_a_commit_passes_its_own_tests_and_breaks_none_of_vllms(number: int) -> None:
    """Its own fail without it. What passed before passes after; tests that it adds to vLLM's files pass too."""
    own_before, own, before, after = outcomes_of(fetch_source(), COMMITS[:number], COMMITS[number])
    assert own_before.named("failed"), "its tests do not need it"
    assert not str(own)
    assert own.named("passed")
    assert COMMITS[number].broken(before, after) == set(), str(after)
    assert not str(after)


@of_vllm
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("files", [pytest.param(CHOICE.proof, id="proof"), pytest.param(CHOICE.soak, id="soak")])
def test_vllms_own_tests_pass_as_they_are(files: tuple[str, ...]) -> None:
    """All but those that are listed as not to be run here, and each name on that list is a test's."""
    with patched(fetch_source()) as tree:
        outcomes: Outcomes = run(tree, files, CHOICE.left_out)
    assert not str(outcomes)
    assert {name.partition("::")[0] for name in outcomes.by_name} == set(files) - set(CHOICE.left_out)
    listed = {name for name in CHOICE.left_out if "::" in name and name.partition("::")[0] in files}
    left_out = outcomes.named("left out")
    assert {name for name in listed if not any(one == name or one.startswith(f"{name}[") for one in left_out)} == set()
