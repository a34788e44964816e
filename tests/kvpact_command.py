"""The command `kvpact`, run by tests of it, and a vLLM that says what it was started with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from typer.testing import CliRunner, Result

from kvpact.cli.app import app

KVPACT: Final = Path(sys.executable).with_name("kvpact")
DISK: Final = "disk:///var/cache/kvpact?capacity=200GiB"
SECRET: Final = "redis://user:hunter2@cache:6379/0"
END: Final = ["--shutdown-timeout", "20"]


def without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take kvpact's settings out of the environment."""
    for name in os.environ:
        if name.startswith("KVPACT_"):
            monkeypatch.delenv(name)


def own_sockets(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put sockets of engines into a new folder of this directory, and look nowhere else for them; return the folder."""
    (runtime := directory / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr("kvpact.cache.status_socket.tempfile.gettempdir", lambda: str(runtime))
    return runtime


def kvpact(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refusal(*arguments: object) -> str:
    """The one line that kvpact says no with; `serve` ends then as vLLM does that cannot start, with 1."""
    result = kvpact(*arguments)
    assert result.exit_code == (1 if arguments[0] == "serve" else 2)
    assert result.stdout == ""
    assert result.stderr.startswith("kvpact: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("kvpact: ").rstrip("\n")


def fake_vllm_in(parent: Path, version: str = "") -> Path:
    """A directory with a package `vllm` that prints its arguments and kvpact's environment, and ends with code 7.

    With a version it is an installed distribution. The real one is started, asked and killed in
    under_vllm/test_http_life.py.
    """
    package = parent / "fake" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(
        "import json, os, sys\n"
        "def main():\n"
        "    kept = {name: value for name, value in os.environ.items() if name.startswith('KVPACT_')}\n"
        "    print(json.dumps([os.getpid(), sys.argv, kept]))\n"
        "    sys.exit(7)\n"
    )
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").touch()
    if version:
        metadata = parent / "fake" / "vllm-1.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return parent / "fake"


def beside(fake_vllm: Path) -> dict[str, str]:
    """The environment in which that vLLM is the one that is found."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(fake_vllm), os.environ.get("PYTHONPATH", "")])}


def serve(fake_vllm: Path, *arguments: str, **environment: str) -> tuple[list[str], dict[str, str]]:
    """Run `kvpact serve` for real; what the fake vllm saw."""
    environment = beside(fake_vllm) | environment
    with subprocess.Popen([KVPACT, "serve", *arguments], stdout=subprocess.PIPE, env=environment, text=True) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 7
    pid, [name, *argv], kept = json.loads(output)
    assert pid == process.pid, "vLLM takes the place of kvpact, so that signals reach it"
    assert name == "vllm", "its messages begin with that"
    return argv, kept
