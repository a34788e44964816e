"""`scripts/release`: both wheels, built and tried in fresh environments, and what an index shows of them."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import metadata

import pytest

import kvpact
import kvpact_testkit
from documents import ROOT


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_both_wheels_are_built_and_work_in_fresh_environments() -> None:
    done = subprocess.run([ROOT / "scripts" / "release"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-4:] == [
        f"kvpact{kit}-{kvpact.__version__}{kind}"
        for kit in ("", "_testkit")
        for kind in ("-py3-none-any.whl", ".tar.gz")
    ]


def test_the_two_distributions_have_one_version_and_a_section_in_each_changelog() -> None:
    assert kvpact.__version__ == kvpact_testkit.__version__
    for name in ("CHANGELOG.md", "kit/CHANGELOG.md"):
        assert re.search(rf"^## {re.escape(kvpact.__version__)}\b", (ROOT / name).read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", ["kvpact", "kvpact-testkit"])
def test_what_an_index_shows_has_links_that_work_there(name: str) -> None:
    shown = metadata(name)
    links = re.findall(r"\]\(([^)]+)\)", str(shown.json["description"]))
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert len(links) > 5 or name != "kvpact"
    assert any(url.startswith("Repository, https://") for url in shown.get_all("Project-URL") or [])
