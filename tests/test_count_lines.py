"""Lines of code, as `make lint` prints them."""

from __future__ import annotations

from pathlib import Path

import pytest

from documents import ROOT, load_script

COUNTER = load_script("scripts/count_lines.py")

SAMPLE = '''"""A module's
docstring."""

import os  # counts


# a comment
class Sample:
    """A docstring."""

    field = (
        1,
    )
    """An attribute's text counts:
    it is no docstring."""

    async def method(self):
        """A docstring
        of two lines."""
        return """text
        of two lines"""
'''


def test_comments_docstrings_and_empty_lines_are_no_code(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "below" / "sample.py"
    file.parent.mkdir(parents=True)
    file.write_text(SAMPLE)
    (tmp_path / "own.py").write_text("import os\n")
    assert COUNTER.by_folder(tmp_path) == {"folder": 10, "(root)": 1}


def test_the_product_is_counted_apart_from_the_kit_and_the_tests(capsys: pytest.CaptureFixture[str]) -> None:
    COUNTER.main()
    product, kit, tests = capsys.readouterr().out.splitlines()
    assert product.startswith("product: ")
    assert all(f"{folder} " in kit for folder in COUNTER.KIT)
    assert not any(f"{folder} " in product for folder in COUNTER.KIT)
    assert {path.name for path in (ROOT / "src" / "kvpact").iterdir() if path.is_dir()} - {"__pycache__"} == {
        folder.split()[0] for line in (product, kit) for folder in line.partition("(")[2][:-1].split(", ")
    } - {"(root)"}
    assert tests.startswith("tests: ")
