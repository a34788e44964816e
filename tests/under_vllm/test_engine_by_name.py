"""A real engine that names `PactConnector` alone: vLLM's plug-ins tell all of its processes where it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import kvpact
from engines import BLOCK
from kvpact_testkit.demo.engine import CORES, PINNED_ENVIRONMENT, one_core_each

PROGRAM = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        model=sys.argv[1],
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=2048,
        disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "PactConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"memory": "64MiB"},
        },
    )
    tokens = {"prompt_token_ids": [7 + place % 91 for place in range(600)]}
    for _ in range(2):
        (output,) = llm.generate(tokens, SamplingParams(temperature=0, max_tokens=4))
        print("cached", output.num_cached_tokens, "answer", output.outputs[0].token_ids)
        llm.reset_prefix_cache()
"""

ENTRY_POINTS = "[vllm.general_plugins]\nkvpact = kvpact.vllm.plugin:register\n"

pytestmark = [pytest.mark.engine, pytest.mark.proof, pytest.mark.timeout(600)]


def installed(folder: Path) -> Path:
    """What an installation of kvpact leaves beside its package: vLLM looks for plug-ins there."""
    place = folder / f"kvpact-{kvpact.__version__}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvpact\nVersion: {kvpact.__version__}\n")
    (place / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def test_the_name_is_enough(tiny_model: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    path = os.pathsep.join([str(installed(tmp_path / "installed")), str(Path(kvpact.__file__).parents[1])])
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": path, CORES: one_core_each()}
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    done = subprocess.run(
        [sys.executable, program, tiny_model],
        env={**environment, **PINNED_ENVIRONMENT, **small},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    computed, loaded = (line for line in done.stdout.splitlines() if line.startswith("cached"))
    assert computed.split()[1] == "0"
    assert loaded.split()[1] == str(600 // BLOCK * BLOCK)
    assert loaded.partition("answer")[2] == computed.partition("answer")[2]
