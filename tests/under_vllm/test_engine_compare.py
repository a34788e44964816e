"""`kvpact compare` as a user runs it: real servers, answers that are equal, a restart, flipped bits, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact_testkit.compare.server import mapped_in
from kvpact_testkit.demo.engine import session_members

pytestmark = [pytest.mark.engine, pytest.mark.proof, pytest.mark.timeout(1800)]

SIZES = ("--prompts=20", "--tokens=384", "--turns=1", "--clients=2")
"""11 blocks of 32 tokens of each prompt are asked for again: all but the one with its last token."""


COMPARE = (sys.executable, "-m", "kvpact_testkit", "compare")
OWN_FIGURE = Path(__file__).parents[2] / "scripts" / "own_figure.sh"


def command(model: Path, work: Path, *options: str, program: Sequence[str] = COMPARE) -> list[str]:
    words = [*program, str(model), *SIZES, "--work", str(work), *options]
    return [*words, "--", "--dtype=float32", "--enforce-eager", "--max-model-len=512"]


def children(pid: int) -> set[int]:
    """Processes that this one has started and that still run."""
    words = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return {int(word) for text in words for word in text.split()}


def test_two_subjects_beside_an_engine_without_a_cache(tiny_model: Path, tmp_path: Path) -> None:
    """From wheels, in an environment and with a home of their own."""
    work = tmp_path / "work"
    # A tiny model computes faster than disks read.
    environment = {**os.environ, "KVPACT_RECOMPUTE_IF_FASTER": "false", "VENV": sys.prefix}
    words = command(tiny_model, work, "--subjects=offloading,disk", program=[str(OWN_FIGURE)])
    ran = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert "exit status 0, after installation" in ran.stdout
    found = json.loads((work / "compare.json").read_text())
    none, offloading, disk = found["rows"]
    assert "only supported on CUDA-alike and XPU GPUs" in offloading["failure"]
    assert offloading["failure"] in ran.stdout
    assert found["prompts_left_out"] == 0
    for row in (none, disk):
        assert row["failure"] == ""
        assert (row["alone"], row["differ"]) == ({"judged": 40, "wrong": 0}, {"judged": 20, "wrong": 0})
        assert row["gaps"] > 0
    assert none["served"] == 0.0
    # The engine's own KV memory is for fewer prompts than there are.
    tokens = disk["served"] * found["load"]["request_tokens"]
    assert sum(disk["sources"].values()) == pytest.approx(tokens, rel=0.05)
    assert disk["sources"]["disk"] > 0.3 * tokens
    assert disk["served"] == pytest.approx(disk["estimate"], abs=0.02)
    assert disk["served"] > 0.85
    assert disk["restart_served"] == pytest.approx(352 / 384)
    assert disk["restart_wrong"] == {"judged": 20, "wrong": 0}
    # Every block that is asked for again has a flipped bit: all of it is found, and computed.
    assert disk["flips_asked"] == 20 * 11
    assert (disk["damaged_served"], disk["damaged_wrong"]) == (0.0, {"judged": 20, "wrong": 0})
    assert 0 < disk["disk_bytes"] <= disk["disk_bound"]
    assert found["versions"]["kvpact"]
    assert (work / "compare.svg").read_text().startswith("<svg")
    assert not any((work / "stores").glob("*"))


def test_after_ctrl_c_no_process_and_nothing_in_shared_memory_is_left(tiny_model: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    with (tmp_path / "printed").open("wb") as printed:
        running = subprocess.Popen(
            command(tiny_model, work, "--subjects=disk"), stdout=printed, stderr=printed, start_new_session=True
        )
        sessions: set[int] = set()
        files: set[Path] = set()
        while "no cache: load" not in (tmp_path / "printed").read_text():
            assert running.poll() is None, (tmp_path / "printed").read_text()
            sessions |= children(running.pid)
            files |= {file for session in sessions for file in mapped_in(session_members(session))}
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
    said = (tmp_path / "printed").read_text()
    assert "20 prompts asked alone" in said
    found = json.loads((work / "compare.json").read_text())
    assert found["interrupted"]
    # The row so far: new prompts were asked, the load was not over.
    (none,) = found["rows"]
    assert none["new_ms"]["median"] > 0
    assert none["requests_per_s"] is None
    assert files
    assert sessions
    assert not [name for session in sessions for name in session_members(session).values()]
    assert not [file for file in files if file.exists()]
