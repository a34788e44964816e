"""The proposals for vLLM do what their pages say: each patch applies, passes its own tests, and breaks none of vLLM's.

vLLM's tests come with its source distribution and stay out of this project. Which of them are run, and why others
cannot be, is in `upstream_tests.toml`. A run is one process, of 20 s to 40 s on one core.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

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

pytestmark = [
    pytest.mark.soak,  # neither the patches nor vLLM's release change with kvpact
    pytest.mark.timeout(2400),
    # What vLLM's tests import comes with the engine; it is not imported here.
    pytest.mark.skipif(find_spec("vllm") is None, reason="no engine is installed; `make setup` installs one"),
]


@cache
def before(files: tuple[str, ...]) -> Outcomes:
    """vLLM as it is, which is fetched once for all runs, and kept."""
    with patched(fetch_source(), None) as tree:
        return run(tree, files, CHOICE.left_out)


def after(proposal: str, files: tuple[str, ...]) -> tuple[Outcomes, Outcomes]:
    """vLLM with one patch: the patch's own tests, and vLLM's."""
    patch = ROOT / "upstream" / proposal / "change.patch"
    own = sorted(name for name in touched_by(patch).added if name.startswith("tests/") and "/test_" in name)
    with patched(fetch_source(), patch) as tree:
        outcomes = run(tree, [*files, *own], CHOICE.left_out)
    return outcomes.of(own), outcomes.of(files)


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
    own, theirs = after(proposal, files)
    assert not str(own)
    assert own.named("passed")
    assert before(files).named("passed") <= theirs.named("passed"), str(theirs)
    assert not str(theirs)
