"""vLLM's source distribution, which has vLLM's own tests: fetched, and copied with a patch in it.

Nothing of it is built or run by pip, and nothing of it is part of this project.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvpact.errors import ConfigError
from kvpact_testkit.vllm.releases import releases_folder

RELEASE = "0.33.0"

BACKEND = '''"""Answers pip, which asks for a distribution's name before it keeps the file; nothing is built."""
import pathlib


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    folder = pathlib.Path(metadata_directory, "vllm-{release}.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\\nName: vllm\\nVersion: {release}\\n")
    return folder.name
'''
"""A module in the place of setuptools' build backend, which vLLM's distribution names."""

KEPT = re.compile(r"(?:(?:vllm|tests|examples)/.+\.py|pyproject\.toml|vllm\.egg-info/PKG-INFO)")
"""Files of the distribution that are kept, by their names below its folder. In the last vLLM looks up its release."""

HEADER = re.compile(r"^--- (?:a/(?P<changed>\S+)|/dev/null)\n\+\+\+ b/(?P<now>\S+)$", re.MULTILINE)
"""The names of a file in a patch, before and after."""


@dataclass(frozen=True, slots=True)
class Touched:
    """The files of a patch."""

    changed: tuple[str, ...]
    added: tuple[str, ...]


def touched_by(patch: Path) -> Touched:
    """Which files a patch changes, and which it adds."""
    found = list(HEADER.finditer(patch.read_text(encoding="utf-8")))
    changed = tuple(header["changed"] for header in found if header["changed"])
    return Touched(changed, tuple(header["now"] for header in found if not header["changed"]))


def fetch_source(release: str = RELEASE, folder: Path | None = None) -> Path:
    """The root of a release's source tree: its Python files and its tests. It is downloaded if it is missing (47 MB).

    Raises ConfigError if that fails.
    """
    folder = folder or releases_folder()
    place = folder / f"{release}-source"
    if (place / "pyproject.toml").is_file():
        return place
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{release}-source-") as scratch:
        unpacked = Path(scratch, "unpacked")
        _unpack(_download(release, Path(scratch)), unpacked)
        try:
            unpacked.rename(place)
        except OSError:  # another process was faster
            if not (place / "pyproject.toml").is_file():
                raise
    return place


def _download(release: str, scratch: Path) -> Path:
    backend = scratch / "backend" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(BACKEND.format(release=release))
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--dest", str(scratch), f"vllm=={release}"],
        env={**os.environ, "PYTHONPATH": str(backend.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    found = list(scratch.glob("*.tar.gz"))
    if done.returncode or not found:
        said = done.stderr.strip().splitlines()
        raise ConfigError(
            f"the source of vLLM {release} cannot be downloaded: {said[-1] if said else f'pip: {done.returncode}'}"
        )
    return found[0]


def _unpack(distribution: Path, place: Path) -> None:
    """Keep the files that `KEPT` names."""
    with tarfile.open(distribution) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if member.isfile() and KEPT.fullmatch(name) and ".." not in Path(name).parts:
                target = place / name
                target.parent.mkdir(parents=True, exist_ok=True)
                content = archive.extractfile(member)
                assert content is not None
                target.write_bytes(content.read())


@contextmanager
def patched(source: Path, *patches: Path) -> Iterator[Path]:
    """A copy of the tree with the patches in it, in order; other files are links to those of `source`.

    Raises ValueError if a patch does not fit.
    """
    with tempfile.TemporaryDirectory(dir=source.parent, prefix=".patched-", ignore_cleanup_errors=True) as scratch:
        tree = Path(scratch, "vllm")
        shutil.copytree(source, tree, copy_function=os.link)
        for name in {name for patch in patches for name in touched_by(patch).changed}:
            if (source / name).exists():  # else an earlier patch adds it
                (tree / name).unlink()
                (tree / name).write_bytes((source / name).read_bytes())
        for patch in patches:
            said = apply(patch, tree)
            if said:
                raise ValueError(f"{patch.name} does not apply: {said}")
        yield tree


def apply(patch: Path, tree: Path, *options: str) -> str:
    """By git, or by patch where there is no git; no line may have moved. Returns "", or why it does not apply."""
    if shutil.which("git"):
        command = ["git", "apply", *options, str(patch.resolve())]
    else:
        command = ["patch", "--strip=1", "--fuzz=0", "--batch", f"--input={patch.resolve()}"]
    # In a repository git would leave out files that are not below its root.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent), "LC_ALL": "C"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    return (done.stderr or done.stdout or "no reason") if done.returncode else ""
