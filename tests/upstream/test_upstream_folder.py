"""The folder `upstream/` is whole: each proposal has a page and a patch, in vLLM's form and with tests of its own."""

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


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_proposal_is_a_page_and_a_patch_for_vllm_with_tests_in_vllms_form(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"change.patch", "README.md"}
    assert f"| `{folder.name}` |" in (UPSTREAM / "README.md").read_text(encoding="utf-8")
    touched = touched_by(folder / "change.patch")
    names = (*touched.changed, *touched.added)
    assert all(name.startswith(("vllm/", "tests/")) for name in names)
    assert any(re.fullmatch(r"tests/.*/test_\w+\.py", name) for name in touched.added)
    patch = (folder / "change.patch").read_text(encoding="utf-8").splitlines()
    lines = [line[1:] for line in patch if line.startswith("+") and not line.startswith("+++ ")]
    assert [line for line in lines if len(line) > LINE_LENGTH or line != line.rstrip()] == []
    assert lines.count("# SPDX-License-Identifier: Apache-2.0") == sum(name.endswith(".py") for name in touched.added)
