"""One concept, one word: docs/glossary.md says what each means and where it is at home."""

from __future__ import annotations

import re

from documents import HOMES, ROOT

GLOSSARY = ROOT / "docs" / "glossary.md"


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its first two lines."""
    section = GLOSSARY.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def test_every_word_of_the_glossary_has_a_meaning_and_a_place() -> None:
    headings = re.findall(r"^## (.+)$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    words = [row for heading in headings for row in rows(heading)]
    assert len(words) > 50
    for word, meaning, where in words:
        assert meaning, word
        files = re.findall(r"`([\w/]+\.py)", where)
        assert [file for file in files if any((home / file).is_file() for home in HOMES)], f"{word}: {where}"
    terms = [word for word, *_ in words]
    assert len(terms) == len(set(terms))
