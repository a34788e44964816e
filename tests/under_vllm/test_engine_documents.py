"""Blocks of docs/configuration.md and docs/internals/worker-hook.md that start an engine; the offline example.

Each is run as a reader would run it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import kvpact
from documents import ROOT, block_with, filled_in
from engines import BLOCK
from kvpact_testkit.demo.engine import CORES, PINNED_ENVIRONMENT, one_core_each

ASK = """
    [output] = llm.generate("Is a prompt prefix computed twice?")
    print("answered with", len(output.outputs[0].token_ids), "tokens")
"""
"""What a reader writes below the page's last line."""

pytestmark = [pytest.mark.engine, pytest.mark.both_cores, pytest.mark.timeout(600)]
"""Alone each takes a quarter of the time that it takes beside two engines under load."""


def run_python(directory: Path, *command: str | Path) -> str:
    """What a program says that ends well, run where a reader would."""
    source = str(Path(kvpact.__file__).parents[1])
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": source}
    ran = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env={**os.environ, **PINNED_ENVIRONMENT, CORES: one_core_each(), **small},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran.stdout


@pytest.mark.soak
def test_the_page_on_configuration_starts_an_engine(tiny_model: Path, tmp_path: Path) -> None:
    """And the engine answers."""
    text = filled_in(
        block_with("docs/configuration.md", "llm = LLM(").text, {"MODEL": str(tiny_model), "8GiB": "64MiB"}
    )
    (tmp_path / "program.py").write_text(text + ASK)
    said = run_python(tmp_path, "program.py")
    assert "answered with 16 tokens" in said


@pytest.mark.soak  # proven on the newest release: test_engine_newest.py
def test_the_page_on_the_worker_hook_serves_another_connector(tiny_model: Path) -> None:
    """The second answer was found in files when its step began, is the first one, and vLLM counts what was found."""
    text = filled_in(block_with("docs/internals/worker-hook.md", "examples/step_hook").text, {"MODEL": str(tiny_model)})
    program, *arguments = text.split()
    assert program == "python"
    said = re.findall(r"(.+): (\d+) tokens, (\d+) not computed, answer (.+)", run_python(ROOT, *arguments))
    assert [attempt for attempt, *_ in said] == ["computed", "found in files"]
    (_, tokens, none, first), (_, _, found, second) = said
    assert (int(none), int(found)) == (0, int(tokens) // BLOCK * BLOCK), "files hold whole blocks"
    assert first == second


@pytest.mark.soak
def test_the_second_run_of_the_offline_example_finds_the_first_ones_blocks(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPACT_RECOMPUTE_IF_FASTER", "false")  # a tiny model computes faster than a disk reads
    command = (ROOT / "examples" / "offline.py", tiny_model)
    reused = [
        [int(found[1]) for found in re.finditer(r"(\d+) of \d+ prompt tokens were not", run_python(tmp_path, *command))]
        for _ in range(2)
    ]
    assert reused[0][0] == 0
    assert reused[1] == [reused[1][0]] * 2
    assert reused[1][0] >= 2 * BLOCK
