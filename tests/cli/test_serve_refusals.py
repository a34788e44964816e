"""`kvpact serve`, typed by a user, refuses what waiting cannot mend before vLLM begins: a line, code 1, no process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvpact.cli.serve import TIME_TO_END, gpus_here, what_copies
from kvpact.memory.limits import total_memory_bytes
from kvpact_command import KVPACT, beside, fake_vllm_in, without_settings

TOO_MUCH = f"{max(900, 2 * total_memory_bytes() >> 30)}GiB"
"""More than this machine has, on any machine."""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_settings(monkeypatch)


def typed(line: str, vllm: Path) -> tuple[int, str, list[str]]:
    """Exit code, output and lines of standard error of a line in a shell; none of its processes is left."""
    environment = beside(vllm) | {"PATH": f"{KVPACT.parent}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen(
        ["bash", "-c", line],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True, start_new_session=True,
    ) as shell:  # fmt: skip
        output, said = shell.communicate(timeout=60)
    with pytest.raises(ProcessLookupError):
        os.killpg(shell.pid, 0)
    return shell.returncode, output, said.splitlines()


def test_h129_more_memory_than_the_machine_has_is_refused_before_vllm_begins(tmp_path: Path) -> None:
    code, output, (said,) = typed(f"kvpact serve my/model --memory {TOO_MUCH} --port 1", fake_vllm_in(tmp_path))
    assert (code, output) == (1, "")
    assert said.startswith(f"kvpact: memory={TOO_MUCH}: this machine or its container has ")
    assert " in all; set `memory` to leave room for the model, such as " in said
    right = said.rpartition(" ")[2]
    code, output, _ = typed(f"kvpact serve my/model --memory {right}", fake_vllm_in(tmp_path / "again"))
    assert code == 7, "vLLM was started"


@pytest.mark.parametrize(
    ("line", "version", "words"),
    [
        ("kvpact serve m --memory lots", "0.32.0", 'kvpact: memory="lots" in the command line: a size such as'),
        (
            "KVPACT_IO_THREADS=0 kvpact serve m",
            "0.32.0",
            'kvpact: io_threads="0" in the environment (KVPACT_IO_THREADS',
        ),
        ("kvpact serve m", "0.29.0", "kvpact: vLLM 0.29.0 is installed, and kvpact serves 0.30 and later"),
        ("kvpact serve m --teir x", "0.32.0", "kvpact: neither kvpact serve nor vllm serve has an option --teir"),
    ],
)
def test_h129_what_waiting_cannot_mend_is_one_line_and_code_1(
    line: str, version: str, words: str, tmp_path: Path
) -> None:
    code, output, (said,) = typed(line, fake_vllm_in(tmp_path, version))
    assert (code, output) == (1, "")
    assert said.startswith(words)


REFUSED_IN_VLLM = """
from pydantic.dataclasses import dataclass
from kvpact.errors import ConfigError
@dataclass
class VllmConfig:
    model: str
    def __post_init__(self):
        raise {error}
def main():
    VllmConfig("m")
"""


def test_h129_what_vllms_configuration_tells_is_one_line_too(tmp_path: Path) -> None:
    """pydantic wraps what the plug-in says while vLLM makes its configuration; every other error stays as it is."""
    vllm = fake_vllm_in(tmp_path)
    main = vllm / "vllm" / "entrypoints" / "cli" / "main.py"
    main.write_text(REFUSED_IN_VLLM.format(error="ConfigError('kvpact: the model is not served')"))
    code, output, said = typed("kvpact serve m", vllm)
    before = [*([what_copies("auto")] if gpus_here() else []), TIME_TO_END]
    assert (code, output, said) == (1, "", [*before, "kvpact: the model is not served"])
    main.write_text(REFUSED_IN_VLLM.format(error="ValueError('no such model')"))
    code, _, said = typed("kvpact serve m", vllm)
    assert code == 1
    assert "Traceback (most recent call last):" in said
    assert any("no such model" in line for line in said)
