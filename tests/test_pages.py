"""The pages point to what is there: links, names of the code, tests, lines of the log, reasons, formats."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

from documents import HOMES, PACKAGES, ROOT, documents
from kvpact.identity.keys import KEY_FORMAT
from kvpact.metrics import MissReason
from kvpact.tiers.disk.superblock import SLAB_FORMAT
from kvpact.tiers.objects.packs import PACK_FORMAT
from kvpact.tiers.record import RECORD_FORMAT
from kvpact.vllm.identity import FORMAT

FOLDERS = ("benchmarks", "deploy", "docs", "examples", "kit", "upstream")
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
SOURCES = {path: path.read_text(encoding="utf-8") for package in PACKAGES for path in package.rglob("*.py")}

LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
NAME = re.compile(r"`([\w/]+\.py):([\w.]+)`")


@cache
def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def test_every_link_leads_to_a_file_and_to_a_heading_of_it() -> None:
    dead = []
    for name, text in TEXTS.items():
        for target, anchor in LINK.findall(text):
            there = (ROOT / name).parent / target if target else ROOT / name
            if "://" not in target and not (there.exists() and (not anchor or anchor in anchors_of(there))):
                dead.append(f"{name}: {target}#{anchor}")
    assert dead == []
    assert sum(len(LINK.findall(text)) for text in TEXTS.values()) > 200


def test_the_start_page_names_every_page() -> None:
    start = ROOT / "docs" / "README.md"
    named = {(start.parent / target).resolve() for target, _ in LINK.findall(start.read_text(encoding="utf-8"))}
    assert [page.name for page in documents()[1:] if page not in {*named, start}] == []


@cache
def names_of(path: Path) -> set[str]:
    """Names that a module defines: functions, classes, assigned names; those of a class as `Class.name`."""
    return {*_names(ast.parse(path.read_text(encoding="utf-8")).body, "")} if path.is_file() else set()


def _names(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        match node:
            case ast.ClassDef(name=name):
                yield prefix + name
                yield from _names(node.body, f"{prefix}{name}.")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield prefix + name
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                yield prefix + name


def test_every_name_of_the_code_is_in_its_file() -> None:
    missing = [
        f"{page}: {path}:{name}"
        for page, text in TEXTS.items()
        for path, name in NAME.findall(text)
        if not any(name in names_of(home / path) for home in (*HOMES, ROOT))
    ]
    assert missing == []


def test_every_test_and_scenario_that_a_page_names_is_there() -> None:
    places = [*SOURCES.values()]
    places += [
        path.read_text(encoding="utf-8") for top in ("tests", "kit/tests") for path in (ROOT / top).rglob("*.py")
    ]
    there = {name for text in places for name in re.findall(r"^\s*def (\w+)", text, re.MULTILINE)}
    pages = [page.read_text(encoding="utf-8") for page in documents() if page.name != "hazards.md"]
    named = {name for text in pages for name in re.findall(r"`((?:test|h\d+)_\w+)`", text)}
    assert named - there == set()
    assert len(named) > 30


def test_every_table_is_rendered_as_one() -> None:
    """A row that is apart from its table, or has other cells than its head, is shown as text with bars."""
    markdown, broken = MarkdownIt().enable("table"), []
    for name, text in TEXTS.items():
        tokens = [token for token in markdown.parse(text) if token.map]
        inside = {row for token in tokens if token.type == "table_open" for row in range(*token.map or ())}
        code = {row for token in tokens if token.type == "fence" for row in range(*token.map or ())}
        width = 0
        for number, line in enumerate(text.split("\n")):
            if not line.startswith("|") or number in code:
                width = 0
                continue
            cells = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line)))
            broken += [f"{name}:{number + 1}"] if number not in inside or cells != (width or cells) else []
            width = cells
    assert broken == []


def test_code_and_pages_cite_no_document_that_is_not_here() -> None:
    cited = re.compile(r"\b(?:DESIGN|HOUSE|HAZARDS|STYLE)\b")
    assert [name for name, text in [*SOURCES.items(), *TEXTS.items()] if cited.search(text)] == []


# What operators look up


def rows(page: str, head: str) -> list[list[str]]:
    """The cells of the table whose head begins so, without its first two lines."""
    lines = TEXTS[page][TEXTS[page].index(f"| {head} |") :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_two_pages_count_the_same_findings_of_vllms_offloading() -> None:
    [row] = [row for row in rows("docs/peers.md", "subject") if row[0].startswith("vLLM's `OffloadingConnector`")]
    counts = re.search(
        r"(\d+) kept, (\d+) broken, (\d+) not", TEXTS["docs/internals/findings.md"].split("offloading:begin")[1]
    )
    assert counts is not None
    assert row[3:6] == [*counts.groups()]


def test_formats_have_the_numbers_of_this_release() -> None:
    found = [row[1] for row in rows("docs/operations.md", "what | number now")]
    assert found == [str(each) for each in (KEY_FORMAT, RECORD_FORMAT, SLAB_FORMAT, PACK_FORMAT, FORMAT)]


def test_every_reason_of_a_miss_has_a_row() -> None:
    assert {row[0].strip("`") for row in rows("docs/troubleshooting.md", "reason")} == {*MissReason}


def test_lines_of_the_log_are_quoted_as_they_are() -> None:
    said = [
        node.value
        for source in SOURCES.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    page = TEXTS["docs/troubleshooting.md"]
    quoted = [text.replace('\\"', '"') for text in re.findall(r'`"((?:[^`"\\]|\\")+ (?:[^`"\\]|\\")+)"`', page)]
    assert len(quoted) > 25
    assert [text for text in quoted if not any(text in each for each in said)] == []
