"""One concept, one word: docs/glossary.md names where each word is at home, and which words are not used any more."""

from __future__ import annotations

import re

import pytest

from documents import ROOT, documents

GLOSSARY = ROOT / "docs" / "glossary.md"
SOURCE = ROOT / "src" / "kvpact"


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its first two lines."""
    section = GLOSSARY.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def banned() -> list[str]:
    """Words and phrases that are not to be used; one that ends with "_" is the beginning of a name."""
    return [word for *_, words in rows("Say, do not say") for word in re.findall(r"`([\w ]+)`", words)]


def uses_of(word: str, text: str) -> int:
    """How often `text` has the word or phrase as whole identifiers, or as the beginning of one; lines may break it."""
    end = "" if word.endswith("_") else r"(?!\w)"
    spaced = word.replace(" ", r"\s+")
    return len(re.findall(rf"(?<!\w){spaced}{end}", text))


TEXTS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.toml"), *documents()]
    if path != GLOSSARY
}


@pytest.mark.parametrize("word", banned())
def test_a_word_that_was_replaced_is_used_nowhere(word: str) -> None:
    assert [name for name, text in TEXTS.items() if uses_of(word, text)] == []


def test_words_are_found_whole() -> None:
    assert len(banned()) > 30
    assert len(TEXTS) > 150
    assert uses_of("Fetch", "Fetch(PrefetchOp) Fetcher") == 1
    assert uses_of("take stock", "They take\n    stock, and mistake stock.") == 1
    assert uses_of("MOST_", "MOST_STEPS = 1; ALMOST_ALL") == 1


def test_every_word_of_the_glossary_has_a_meaning_and_a_place() -> None:
    headings = re.findall(r"^## (.+)$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    words = [row for heading in headings[:-1] for row in rows(heading)]
    assert len(words) > 50
    for word, meaning, where in words:
        assert meaning, word
        assert [file for file in re.findall(r"`([\w/]+\.py)", where) if (SOURCE / file).is_file()], f"{word}: {where}"
    terms = [word for word, *_ in words]
    assert len(terms) == len(set(terms))
