"""The workflow of a release is valid, pinned, and has no right that it does not use; its commands need no network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvpact
from documents import ROOT, load_script

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RELEASE: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
JOBS: dict[str, Any] = RELEASE["jobs"]
VERSION = kvpact.__version__
TAG = f"v{VERSION}"
FILES = [f"kvpact{kit}-{VERSION}{kind}" for kit in ("", "_testkit") for kind in ("-py3-none-any.whl", ".tar.gz")]


def run(
    *command: str | Path, cwd: Path = ROOT, path: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of this environment, or of the folder `path` before it."""
    places = [*filter(None, [path, Path(sys.executable).parent]), *os.environ["PATH"].split(":")]
    settings = {**os.environ, **environment, "PATH": ":".join(map(str, places))}
    return subprocess.run(command, cwd=cwd, env=settings, capture_output=True, text=True, check=False)


def judged(*files: Path) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """By GitHub's schema and by zizmor."""
    schema = run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *files)
    return schema, run("zizmor", "--offline", "--no-progress", *files)


def test_githubs_schema_and_zizmor_find_nothing() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]
    for done in judged(*WORKFLOWS):
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_judges_find_what_is_wrong(tmp_path: Path) -> None:
    text = WORKFLOWS[1].read_text()
    (tmp_path / ".github" / "workflows").mkdir(parents=True)
    wrong = tmp_path / ".github" / "workflows" / "wrong.yml"
    wrong.write_text(text.replace("runs-on:", "runs_on:"))
    assert judged(wrong)[0].returncode == 1
    wrong.write_text(re.sub(r"@\w{40} # (v\S+)", r"@\1", text))
    assert "unpinned-uses" in judged(wrong)[1].stdout
    assert judged(wrong)[1].returncode > 0


def test_nothing_is_published_that_was_not_built_and_attested_by_this_run() -> None:
    needs = {name: job.get("needs", []) for name, job in JOBS.items()}
    assert needs["attest"] == "build"
    assert {needs[name] for name in ("index", "image")} == {"attest"}
    assert needs["release"] == ["index", "image"]
    assert RELEASE["permissions"] == {}
    writes = {
        name: {right for right, kind in job["permissions"].items() if kind == "write"} for name, job in JOBS.items()
    }
    assert writes == {
        "build": set(),
        "attest": {"id-token", "attestations"},
        "index": {"id-token"},
        "image": {"packages"},
        "release": {"contents"},
        "site": {"pages", "id-token"},
    }
    assert "secrets." not in str(RELEASE), "no token of anybody's is kept"


def test_both_distributions_are_built_and_pass_the_indexs_check(dist: Path) -> None:
    assert sorted(path.name for path in dist.iterdir()) == sorted(FILES)
    done = run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 4
    said = (ROOT / "scripts" / "release").read_text()
    assert "twine check --strict dist/*" in said


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `scripts/release` leaves in dist/, built with the tools of this environment."""
    place = tmp_path_factory.mktemp("dist")
    for folder in (ROOT, ROOT / "kit"):
        done = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place), folder)
        assert done.returncode == 0, done.stdout + done.stderr
    return place


def test_a_tag_of_another_version_or_without_a_date_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    done = run("scripts/release", "v9.9.9", PYTHON=sys.executable)
    assert (done.returncode, done.stderr) == (1, f"[release] the tag is v9.9.9, and the version {VERSION}\n")
    done = run("scripts/release", TAG, cwd=_copy(tmp_path, "unreleased"), PYTHON=sys.executable)
    assert (done.returncode, done.stderr) == (1, f"[release] CHANGELOG.md has no date for {VERSION}\n")


def test_a_releases_text_has_the_indexs_line_and_the_changes(tmp_path: Path) -> None:
    copy = _copy(tmp_path, "2026-12-01")
    python = tmp_path / "python"
    # It is new enough, counts the figures' age, and makes no environment, so that nothing is built.
    python.write_text(f'#!/bin/sh\ncase "$1" in scripts/*) exec {sys.executable} "$@";; esac\n[ "$1" = -c ]\n')
    python.chmod(0o755)
    measured = _commits(copy, 201)
    old, new = measured[0], measured[1]
    (copy / "README.md").write_text(f"Measured at commit {old}, and commit {new}.\n")
    done = run("scripts/release", TAG, cwd=copy, PYTHON=str(python))
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        f"README's figures of {old} are 201 commits old",
        f"README's figures of {new} are 200 commits old",
    ]
    assert done.stderr == "[release] figures of the README are more than 200 commits old: measure them anew\n"
    (copy / "README.md").write_text("Measured at commit 0123456789.\n")
    assert "0123456789 is not in this clone" in run("scripts/release", TAG, cwd=copy, PYTHON=str(python)).stdout
    (copy / "README.md").write_text(f"Measured at commit {new}.\n")
    done = run("scripts/release", TAG, cwd=copy, PYTHON=str(python))
    assert done.stdout.splitlines()[1:] == [f"[release] building kvpact and kvpact-testkit {VERSION}"], done.stderr
    text = (copy / "build" / "release.md").read_text()
    assert f'pip install "kvpact=={VERSION}" ' in text
    assert "VERSION" not in text
    changes = (ROOT / "CHANGELOG.md").read_text()
    section = changes.partition(f"## {VERSION} ")[2].partition("\n")[2].partition("\n## ")[0]
    assert section.strip() in text
    assert "# Changelog" not in text


def _copy(place: Path, date: str) -> Path:
    """What the script reads of the repository, with this date of the version's sections."""
    scripts = ("scripts/release", "scripts/find_python.sh", "scripts/figures_age.py")
    for name in (".github/release.md", "CHANGELOG.md", "kit/CHANGELOG.md", *scripts):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place / name)
    for name in ("src/kvpact/__init__.py", "kit/src/kvpact_testkit/__init__.py"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place / name)
    for name in ("CHANGELOG.md", "kit/CHANGELOG.md"):
        text = (place / name).read_text()
        (place / name).write_text(re.sub(rf"^## {VERSION} - .*$", f"## {VERSION} - {date}", text, flags=re.MULTILINE))
    return place


def _commits(place: Path, number: int) -> list[str]:
    """Make a repository there with one empty commit, and so many after it; their names, the oldest first."""
    name = "c <c@example.org> 1 +0000"
    stream = "".join(f"commit refs/heads/main\ncommitter {name}\ndata 0\n" for _ in range(number + 1))
    run("git", "init", "-q", "-b", "main", cwd=place)
    done = subprocess.run(["git", "fast-import", "--quiet"], input=stream, cwd=place, text=True, check=True)
    assert done.returncode == 0
    return run("git", "rev-list", "--reverse", "--abbrev-commit", "main", cwd=place).stdout.split()


def test_the_commands_of_image_and_release_find_what_the_build_left(dist: Path, tmp_path: Path) -> None:
    """Docker and GitHub are played: each notes its arguments, and reads the files that they name."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("docker", "gh"):
        (tools / name).write_text(f'#!/bin/sh\necho {name} "$@" >>"$NOTED"\n')
        (tools / name).chmod(0o755)
    work, noted = tmp_path / "work", tmp_path / "noted"
    shutil.copytree(ROOT / "deploy", work / "deploy")
    shutil.copytree(dist, work / "dist")
    settings = {"NOTED": str(noted), "GITHUB_REF_NAME": TAG, "GITHUB_ACTOR": "somebody", "TOKEN": "t", "IMAGE": "r/k"}
    for job in ("image", "release"):
        for step in JOBS[job]["steps"]:
            if "run" in step:
                done = run("bash", "-euo", "pipefail", "-c", step["run"], cwd=work, path=tools, **settings)
                assert done.returncode == 0, done.stderr
    built, _, pushed, released = noted.read_text().splitlines()
    assert built == f"docker build -f deploy/Dockerfile -t r/k:{VERSION} dist"
    assert pushed == f"docker push r/k:{VERSION}"
    assert released.split()[:3] == ["gh", "release", "create"]
    assert {Path(word).name for word in released.split() if word.startswith("dist/")} == {*FILES}
    steps = load_script("scripts/run_dockerfile.py").steps((work / "deploy" / "Dockerfile").read_text())
    [copied] = [rest.split()[0] for instruction, rest in steps if instruction == "COPY"]
    assert [name for name in FILES if fnmatch(name, copied)] == [FILES[0]]


def test_the_readmes_fifth_line_installs_both_from_a_clone(tmp_path: Path) -> None:
    """As it stands, but that the address is this checkout, and nothing is asked of an index."""
    line = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[4]
    assert "https://github.com/kvpact/kvpact" in line
    pip = f"{sys.executable} -m pip install --no-deps --no-index --no-build-isolation --target {tmp_path / 'site'}"
    command = line.strip("`").replace("pip install", pip)
    git = f"git -c url.{ROOT}.insteadOf=https://github.com/kvpact/kvpact clone"
    done = run("bash", "-euc", command.replace("git clone", git), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"kvpact", "kvpact_testkit"} <= {path.name for path in (tmp_path / "site").iterdir()}
