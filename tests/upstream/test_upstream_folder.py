"""The folder `upstream/` is whole: each proposal has a patch for vLLM's tree and a page, and the overview names it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from vllm_source import touched_by

from documents import ROOT

UPSTREAM = ROOT / "upstream"

FOLDERS = sorted(path for path in UPSTREAM.iterdir() if path.is_dir())

LINE_LENGTH = 88
"""vLLM's."""


def added_lines(patch: Path) -> list[str]:
    """The lines that a patch adds."""
    lines = patch.read_text(encoding="utf-8").splitlines()
    return [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++ ")]


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest) -> Path:
    """A proposal."""
    chosen: Path = request.param
    return chosen


def test_a_proposal_is_a_patch_and_a_page_and_in_the_overview(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"change.patch", "README.md"}
    assert f"| `{folder.name}` |" in (UPSTREAM / "README.md").read_text(encoding="utf-8")


def test_a_patch_changes_vllm_and_adds_tests_to_it(folder: Path) -> None:
    touched = touched_by(folder / "change.patch")
    assert all(name.startswith(("vllm/", "tests/")) for name in (*touched.changed, *touched.added))
    assert any(name.startswith("vllm/") for name in (*touched.changed, *touched.added))
    assert any(re.fullmatch(r"tests/.*/test_\w+\.py", name) for name in touched.added)


def test_a_patch_is_in_vllms_form(folder: Path) -> None:
    patch = folder / "change.patch"
    lines = added_lines(patch)
    assert [line for line in lines if len(line) > LINE_LENGTH or line != line.rstrip()] == []
    new_python = [name for name in touched_by(patch).added if name.endswith(".py")]
    assert lines.count("# SPDX-License-Identifier: Apache-2.0") == len(new_python)


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in UPSTREAM.rglob("*.md"):
        targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        assert [target for target in targets if "://" not in target and not (page.parent / target).exists()] == []
