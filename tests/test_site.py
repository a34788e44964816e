"""The site made of docs/: every page in its place, no dead link, links to the repository for all else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from documents import ROOT, documents

REPOSITORY = "https://github.com/kvpact/kvpact"
PAGES = documents()[1:]


def built(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """`mkdocs build --strict` in a folder, without what its colours add."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"}
    return subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    done = built(ROOT, place)
    assert done.returncode == 0, done.stderr
    assert " contains " not in done.stderr, "a link that mkdocs does not follow"
    return place


def page_of(site: Path, source: Path) -> str:
    """The HTML that a page of docs/ became."""
    name = source.relative_to(ROOT / "docs").with_suffix("")
    return (site / ("" if name.name == "README" else name) / "index.html").read_text(encoding="utf-8")


def test_each_page_is_there_and_internals_are_apart_from_users_pages(site: Path) -> None:
    assert len(PAGES) > 25
    for source in PAGES:
        html = page_of(site, source)
        [tab] = re.findall(r'md-tabs__item--active">\s*<a [^>]*>\s*([^<]+?)\s*</a>', html)
        assert (tab == "Internals") >= ("internals" in source.parts), source
        assert tab in ("Begin", "Serve", "Operate", "Build", "Internals")


def test_links_out_of_docs_lead_to_files_of_the_repository(site: Path) -> None:
    found = 0
    for source in PAGES:
        for link in re.findall(r'href="([^"]+)"', page_of(site, source)):
            if link.startswith(f"{REPOSITORY}/blob/main/"):
                path = link.removeprefix(f"{REPOSITORY}/blob/main/").partition("#")[0]
                assert (ROOT / path).exists(), f"{source.name}: {link}"
                found += not path.startswith("docs/")
    assert found > 25


def test_the_search_finds_every_page(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    there = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert len(there) == len(PAGES)
    assert any("abort_external_match" in entry["text"] for entry in index["docs"])


def test_lists_and_tables_are_shown_as_on_the_repositorys_own_pages(site: Path) -> None:
    """Markdown has dialects: what one shows as a table or a list another may show as text."""
    markdown = MarkdownIt().enable("table")
    for source in PAGES:
        shown = markdown.render(source.read_text(encoding="utf-8"))
        html = page_of(site, source).partition('<article class="md-content__inner')[2].partition("</article>")[0]
        for tag in ("<table", "<pre", "<ul", "<ol", "<li", "<h2"):
            assert html.count(tag) == shown.count(tag), (source.name, tag)


@pytest.mark.parametrize("text", ["[x](nowhere.md)", "[x](gpu.md#nowhere)"])
def test_a_dead_link_fails_the_build(text: str, tmp_path: Path) -> None:
    for name in ("docs", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with (tmp_path / "docs" / "weights.md").open("a") as page:
        page.write(f"\n{text}\n")
    assert built(tmp_path, tmp_path / "site").returncode == 1
