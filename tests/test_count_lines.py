"""Lines of code and words of pages, as `make lint` prints them, and what they may be."""

from __future__ import annotations

import subprocess
import tomllib
from collections import Counter
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


def test_pages_are_counted_without_figures_and_changelogs(tmp_path: Path) -> None:
    pages = {
        "README.md": "# two words",
        "docs/a.md": "one\ntwo",
        "docs/RESULTS.md": "1",
        "CHANGELOG.md": "1",
        "b.txt": "1",
    }
    (tmp_path / "docs").mkdir()
    for name, text in pages.items():
        (tmp_path / name).write_text(text)
    subprocess.run("git init -q && git add . && echo untracked > other.md", cwd=tmp_path, shell=True, check=True)
    assert COUNTER.words_by_folder(tmp_path) == {"(root)": 3, "docs": 2}


def counted(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str], str]:
    """Run the script; its exit code, its lines by what they are of, and what it complains of."""
    code = COUNTER.main()
    lines = capsys.readouterr().out.splitlines()
    return code, dict(line.split(": ", 1) for line in lines[:5]), "\n".join(lines[5:])


def test_both_distributions_their_tests_and_the_pages_are_counted_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(COUNTER, "lines_of_code", lambda path: 1)  # counting all takes ten seconds
    monkeypatch.setattr(COUNTER, "words_by_folder", lambda root: Counter(docs=2))
    code, lines, complaints = counted(capsys)
    assert (code, complaints) == (0, "")
    assert lines.keys() == {*COUNTER.DISTRIBUTIONS, "pages"}
    assert "memory " in lines["product"]
    assert "engine " in lines["kit"]
    assert "engine " not in lines["product"]
    assert lines["pages"] == "2 words (docs 2)"


def test_more_than_is_allowed_fails_and_says_where_and_what_would_be_right(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(COUNTER, "lines_of_code", lambda path: 1)
    monkeypatch.setattr(COUNTER, "words_by_folder", lambda root: Counter(docs=10**6))
    code, _, complaints = counted(capsys)
    assert code == 1
    assert complaints.startswith("words: 1,000,000, ")
    assert "[tool.kvpact.counts] of pyproject.toml" in complaints
    assert "\n" not in complaints


def test_every_count_has_a_limit() -> None:
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["kvpact"]["counts"]
    assert limits.keys() == {"product", "kit", "tests", "words"}
    assert COUNTER.above_limits(limits, limits) == []
    assert len(COUNTER.above_limits({name: limit + 1 for name, limit in limits.items()}, limits)) == 4
