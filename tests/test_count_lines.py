"""Lines of code, as `make lint` prints them."""

from __future__ import annotations

from pathlib import Path

import pytest

from documents import load_script

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


def test_both_distributions_and_their_tests_are_counted_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(COUNTER, "lines_of_code", lambda path: 1)  # counting all takes ten seconds
    COUNTER.main()
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines.keys() == COUNTER.DISTRIBUTIONS.keys()
    assert "memory " in lines["product"]
    assert "engine " in lines["kit"]
    assert "engine " not in lines["product"]
