"""Where vLLM's source tree comes from, and how a copy of it gets a patch, without a network."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_source import fetch_source, patched, touched_by

from kvpact.errors import ConfigError

PATCH = """\
diff --git a/vllm/a.py b/vllm/a.py
--- a/vllm/a.py
+++ b/vllm/a.py
@@ -1,2 +1,2 @@
 first = 1
-second = 2
+second = 3
diff --git a/tests/test_a.py b/tests/test_a.py
new file mode 100644
--- /dev/null
+++ b/tests/test_a.py
@@ -0,0 +1 @@
+assert True
"""

FILES = {
    "pyproject.toml": "[project]",
    "vllm/a.py": "first = 1\nsecond = 2\n",
    "tests/conftest.py": "",
    "vllm.egg-info/PKG-INFO": "Version: 1.0.0",
    "csrc/kernel.cu": "not kept",
    "vllm/../../outside.py": "not kept",
}


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A package index that has the source of vllm 1.0.0; the list is of what pip was called with."""
    calls: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> SimpleNamespace:
        calls.append(command)
        if command[-1] != "vllm==1.0.0":
            return SimpleNamespace(returncode=1, stderr="ERROR: No matching distribution found\n")
        with tarfile.open(Path(command[command.index("--dest") + 1], "vllm-1.0.0.tar.gz"), "w:gz") as archive:
            for name, text in FILES.items():
                member = tarfile.TarInfo(f"vllm-1.0.0/{name}")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", pip)
    return calls


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small tree."""
    tree = tmp_path / "source"
    (tree / "vllm").mkdir(parents=True)
    (tree / "vllm" / "a.py").write_text(FILES["vllm/a.py"])
    return tree


def test_the_source_is_fetched_once_and_its_python_files_are_kept(tmp_path: Path, index: list[list[str]]) -> None:
    place = fetch_source("1.0.0", tmp_path / "releases")
    assert fetch_source("1.0.0", tmp_path / "releases") == place
    assert len(index) == 1
    kept = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    assert kept == {"pyproject.toml", "vllm/a.py", "tests/conftest.py", "vllm.egg-info/PKG-INFO"}
    assert [path.name for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(place)] == []


def test_a_failed_download_is_one_clear_error_and_leaves_nothing(tmp_path: Path, index: list[list[str]]) -> None:
    with pytest.raises(ConfigError, match=r"the source of vLLM 9\.9\.9 cannot be downloaded: .*No matching"):
        fetch_source("9.9.9", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_patch_names_the_files_that_it_changes_and_adds(tmp_path: Path) -> None:
    patch = tmp_path / "change.patch"
    patch.write_text(PATCH)
    touched = touched_by(patch)
    assert (touched.changed, touched.added) == (("vllm/a.py",), ("tests/test_a.py",))


def test_a_copy_gets_the_patch_and_the_source_stays_as_it_is(tmp_path: Path, source: Path) -> None:
    patch = tmp_path / "change.patch"
    patch.write_text(PATCH)
    with patched(source, patch) as tree:
        assert (tree / "vllm" / "a.py").read_text() == "first = 1\nsecond = 3\n"
        assert (tree / "tests" / "test_a.py").is_file()
    assert (source / "vllm" / "a.py").read_text() == FILES["vllm/a.py"]
    assert not tree.exists()


def test_a_patch_that_does_not_fit_is_refused(tmp_path: Path, source: Path) -> None:
    patch = tmp_path / "change.patch"
    patch.write_text(PATCH.replace("second = 2", "second = 7"))
    with pytest.raises(ValueError, match="does not apply"), patched(source, patch):
        pass
