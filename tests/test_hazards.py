"""docs/hazards.md is what the catalogue and the tests say, and the catalogue has every id that is cited anywhere."""

from __future__ import annotations

import re
import tomllib

from documents import ROOT, documents, load_script
from kvpact_testkit.catalogue import TITLES

WRITER = load_script("scripts/write_hazards.py")

CITING = ("src", "kit", "testbeds", "tests", "benchmarks", "research", "scripts")


def cited(text: str) -> set[str]:
    """Ids of properties and hazards, by their form. No hazard is called H100 or H200: these are GPUs."""
    return set(re.findall(r"\b(?:P[1-9]\d?|H\d\d|H1[1-9]\d)\b", text))


def test_the_page_is_up_to_date() -> None:
    assert WRITER.PAGE.read_text(encoding="utf-8") == WRITER.page(), "run `python scripts/write_hazards.py`"


def test_every_id_that_is_cited_is_in_the_catalogue() -> None:
    code = [path for folder in CITING for path in (ROOT / folder).rglob("*.py")]
    unknown = {
        str(path.relative_to(ROOT)): ids
        for path in [*code, *documents()]
        if (ids := cited(path.read_text(encoding="utf-8")) - TITLES.keys())
    }
    assert unknown == {}


def test_every_entry_of_the_catalogue_has_a_test_and_no_test_names_another() -> None:
    assert set(WRITER.tests_of()) == set(TITLES)


def test_an_entry_is_one_line_and_they_stand_in_order() -> None:
    entries = tomllib.loads((ROOT / "kit/src/kvpact_testkit/hazards.toml").read_text(encoding="utf-8"))
    assert list(entries) == sorted(entries, key=lambda name: ("PTH".index(name[0]), int(name[1:])))
    assert [title for title in entries.values() if len(title) > 130 or "|" in title or "\n" in title] == []


def test_ids_are_read_from_names_and_decorators() -> None:
    program = '@protects("P1", "H07")\ndef test_a(self): ...\ndef test_h08_h109_b(): ...\ndef h10_c(): ...\n'
    functions = WRITER.ast.parse(program).body
    assert [WRITER.ids_of(function) for function in functions] == [{"P1", "H07"}, {"H08", "H109"}, set()]
