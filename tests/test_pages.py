"""What the pages of the repository point to is there: linked files, and names of the code as `file.py:Class.method`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

from documents import HOMES, PACKAGES, ROOT, documents, load_script

OTHERS = ("benchmarks/RESULTS.md", "deploy/README.md", "kit/CHANGELOG.md")
PAGES = [*ROOT.glob("*.md"), *documents()[1:], *(ROOT / name for name in OTHERS)]
PLACES = (*HOMES, ROOT)
"""Where a page's `file.py` may be; `testbeds/file.py`, too."""

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
ANCHORED = re.compile(r"\]\(([^)#\s]*)#([^)\s]+)\)")
NAME = re.compile(r"`([\w/]+\.py)(?::([\w.]+))?`")

QUESTIONS = "## Where would I change ...?"


def links_of(page: Path) -> Iterator[str]:
    """Targets of the page's links that are files."""
    return (target for target in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in target)


@cache
def names_of(path: Path) -> set[str]:
    """Names that a module defines: functions, classes, assigned names; those of a class as `Class.name`."""
    return set(_names(ast.parse(path.read_text(encoding="utf-8")).body, ""))


def _names(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name
            yield from _names(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def elsewhere(name: str) -> list[str]:
    """Where the code has the last part of `name`, for the message of a test that fails."""
    last = name.rpartition(".")[2]
    return [
        f"{path.relative_to(home)}:{found}"
        for home in HOMES
        for path in sorted(home.rglob("*.py"))
        for found in sorted(names_of(path))
        if found.rpartition(".")[2] == last
    ]


def missing_names(text: str) -> list[str]:
    """Names of the code in a page that are not there, each with where it may be now."""
    return [
        f"{path}:{name} (now {', '.join(elsewhere(name)) or 'nowhere'})"
        for path, name in NAME.findall(text)
        if name and not any((home / path).is_file() and name in names_of(home / path) for home in PLACES)
    ]


def test_every_link_to_a_file_leads_to_one() -> None:
    dead = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in links_of(page)
        if not (page.parent / target).exists()
    ]
    assert dead == []
    assert len([target for page in PAGES for target in links_of(page)]) > 40


def test_every_link_to_a_heading_leads_to_one() -> None:
    dead = [
        f"{page.relative_to(ROOT)}: {target}#{anchor}"
        for page in PAGES
        for target, anchor in ANCHORED.findall(page.read_text(encoding="utf-8"))
        if "://" not in target and anchor not in anchors_of(page.parent / target if target else page)
    ]
    assert dead == []


@cache
def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def test_every_table_is_rendered_as_one() -> None:
    """A row that is apart from its table, or has other cells than its head, is shown as text with bars."""
    markdown, broken, tables = MarkdownIt().enable("table"), [], 0
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").split("\n")
        tokens = markdown.parse("\n".join(lines))
        inside = {row for token in tokens if token.type == "table_open" and token.map for row in range(*token.map)}
        code = {row for token in tokens if token.type == "fence" and token.map for row in range(*token.map)}
        tables += sum(token.type == "table_open" for token in tokens)
        widths: dict[int, int] = {}
        for number, line in enumerate(lines):
            if line.startswith("|") and number not in code:
                cells = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line)))
                widths[number] = widths.get(number - 1, cells)
                if number not in inside or cells != widths[number]:
                    broken.append(f"{page.relative_to(ROOT)}:{number + 1}: {line[:60]}")
    assert broken == []
    assert tables > 40


def test_the_chart_shows_the_readmes_own_table() -> None:
    script, readme = load_script("scripts/draw_chart.py"), (ROOT / "README.md").read_text(encoding="utf-8")
    assert script.CHART.read_text(encoding="utf-8") == script.chart(readme), "run python scripts/draw_chart.py"
    assert "docs/first-token.svg" in readme
    rows = re.findall(r"^\| ([^|]+) \| ([\d., and]+ m?s) \|", readme, re.MULTILINE)
    assert [tuple(row) for row in script.table(readme)[1:]] == rows
    assert len(rows) > 5
    assert script.chart(readme.replace("87.8 ms", "97.8 ms")) != script.chart(readme)


def test_every_name_of_the_code_is_in_its_file() -> None:
    missing = {page.name: names for page in PAGES if (names := missing_names(page.read_text(encoding="utf-8")))}
    assert missing == {}


def test_a_name_that_is_not_there_is_found() -> None:
    assert missing_names("`cache/ledger.py:Ledger.commit` `cache/plan.py:TRANSITIONS`") == []
    assert missing_names("`cache/ledger.py:Nobody`") == ["cache/ledger.py:Nobody (now nowhere)"]
    [moved] = missing_names("`cache/jobs.py:TRANSITIONS`")
    assert "cache/plan.py:TRANSITIONS" in moved


def test_each_answer_to_where_would_i_change_is_a_file_and_a_name() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text[text.index(QUESTIONS) :].partition("\n## ")[0], re.MULTILINE)
    rows = rows[1:]  # below the heading
    assert len(rows) >= 20
    for question, answer in rows:
        found = NAME.findall(answer)
        assert found, f"{question}: {answer} names no file"
        assert all(any((home / path).is_file() for home in PLACES) for path, _ in found), f"{question}: {answer}"


def test_code_and_pages_cite_no_document_that_is_not_here() -> None:
    """A page in capitals, `DESIGN` or the like, is one that its reader would not find."""
    texts = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in [*(path for package in PACKAGES for path in package.rglob("*.py")), *PAGES]
    }
    assert [name for name, text in texts.items() if re.search(r"\b(?:DESIGN|HOUSE|HAZARDS|STYLE)\b", text)] == []


def test_the_start_page_names_every_page() -> None:
    start = ROOT / "docs" / "README.md"
    named = {(start.parent / target).resolve() for target in links_of(start)}
    assert [page.name for page in documents()[1:] if page != start and page not in named] == []
    readers = start.read_text(encoding="utf-8").split("\n## ")[1:]
    assert [reader.splitlines()[0] for reader in readers if len(re.findall(r"^\d\. ", reader, re.MULTILINE)) > 8] == []
    assert len(readers) == 5
