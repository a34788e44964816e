"""`make gpu`: one line where there is no GPU, and elsewhere all its parts in one file and one table, as they come.

The GPU, torch, pytest, the examination, the engines and the demonstration are stand-ins.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "run_gpu.py"

TORCH = """
from types import SimpleNamespace
__version__ = "2.11.0+cu130"
names = {gpus}
version = SimpleNamespace(cuda={cuda})
cuda = SimpleNamespace(is_available=lambda: bool(names), device_count=lambda: len(names))
cuda.get_device_name = names.__getitem__
"""

PYTEST = """
import os, sys, time
assert sys.argv[1].startswith("tests/worker")
assert "cuda and not fake" in sys.argv
for name in NAMES:
    print(f"tests/worker/test_engines.py::{name} PASSED [ 10%]")
print("tests/worker/test_engines.py::test_b[cuda-one by one] SKIPPED (no device) [100%]", flush=True)
time.sleep(float(os.environ.get("HANGS", "0")))
"""

APP = """
import json, os, sys, time
from pathlib import Path
DOCTOR, DEMO = {status}
def main():
    report = Path(sys.argv[sys.argv.index("--output") + 1])
    if sys.argv[1] == "doctor":
        section = {{"entries": 256, "loads, GB/s": 51.26}}
        report.write_text(json.dumps({{"device": "H200", "sections": {{"block by block, 64 KiB": section}}}}))
        print("a section", flush=True)
        time.sleep(float(os.environ.get("HANGS", "0")))
        sys.exit(DOCTOR)
    phase = {{"name": "cold", "ttft_ms": 20.04, "ttft_ms_quartiles": [19, 21], "cached_tokens": 0,
             "reusable_tokens": 96, "identical": True}}
    report.write_text(json.dumps({{"phases": [phase], "failures": []}}))
    sys.exit(DEMO)
"""

ANSWERS = """
import json, sys
from pathlib import Path
figures = {{"same tokens": 8, "largest log-probability difference": 0.004, "cached tokens": [640], "good": {good}}}
Path(sys.argv[-1]).write_text(json.dumps({{"scenes": {{"eager": {{"hits, alone": figures}}}}}}))
sys.exit(not {good})
"""


class Checkout:
    """A checkout on a machine with two GPUs, torch for CUDA and vLLM, whatever is really here."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.source = directory, directory / "src"
        self.source.mkdir()
        (directory / "scripts").mkdir()
        shutil.copy(SCRIPT, directory / "scripts")
        self.put("torch", TORCH.format(gpus=["NVIDIA H200", "NVIDIA H200"], cuda="'13.0'"))
        self.put("pytest", "NAMES = ['test_a[fake-cuda]', 'test_a[cuda-halves]', 'test_c[cuda]']" + PYTEST)
        self.commands(0, 0)
        self.answers(good=True)
        for package in ("kvpact", "kvpact_testkit"):
            (self.source / package).mkdir(exist_ok=True)
            (self.source / package / "__init__.py").touch()
            shutil.copy(ROOT / "src" / "kvpact" / "__main__.py", self.source / package)
        self.put("vllm", "")

    def put(self, module: str, text: str) -> None:
        path = self.source / (module.replace(".", "/") + ".py")
        for folder in [one for one in path.parents if self.source in one.parents]:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").touch()
        path.write_text(text)

    def commands(self, *status: int) -> None:
        """The exit statuses of `kvpact doctor` and of the demonstration."""
        self.put("kvpact.cli.app", APP.format(status=status))

    def answers(self, *, good: bool) -> None:
        (self.directory / "scripts" / "gpu_answers.py").write_text(ANSWERS.format(good=good))

    def command(self, *arguments: str) -> list[str]:
        script = self.directory / "scripts" / "run_gpu.py"
        return [sys.executable, str(script), "--out", str(self.directory), *arguments]

    def run(self, *arguments: str, hangs: str = "0") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "HANGS": hangs}
        return subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=60, env=environment)

    @property
    def parts_offered(self) -> list[str]:
        found = re.search(r"PART\s+([\w,\s]+); repeatable", self.run("--help").stdout)
        assert found is not None
        return found[1].replace(",", "").split()

    @property
    def parts(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "gpu-results.json").read_text())
        return dict(found["parts"])

    @property
    def table(self) -> str:
        return (self.directory / "gpu-results.md").read_text()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_all_parts_are_in_one_file_and_one_table_and_graphs_come_first(checkout: Checkout) -> None:
    done = checkout.run()
    assert done.returncode == 0, done.stderr
    parts = checkout.parts
    assert list(parts) == ["graphs", "doctor", "suite", "answers", "demo"]
    assert all(part["finished"] for part in parts.values())
    assert (parts["suite"]["passed"], parts["suite"]["passed_on_the_device"], parts["suite"]["skipped"]) == (3, 2, 1)
    assert list(parts["demo"]["ranks"]) == ["1", "2"]
    assert checkout.table in done.stdout
    for row in (
        "NVIDIA H200, NVIDIA H200; torch 2.11.0+cu130",
        "| tests of the copies, graphs | 3 passed, 0 failed, 0 error, 1 skipped; 2 passed on the device | yes |",
        "| block by block, 64 KiB | entries 256, loads, GB/s 51.3 |  |",
        "| eager: hits, alone | same tokens 8, largest log-probability difference 0.004 | yes |",
        "| cold, ranks: 2 | 20.0 ms to the first token (19.0-21.0), 0 of 96 tokens from a cache | identical |",
    ):
        assert row in checkout.table


@pytest.mark.parametrize(
    ("module", "text", "part"),
    [
        ("pytest", "NAMES = ['test_a[fake-cuda]']" + PYTEST, "suite"),  # all is well, but nothing ran on the device
        ("pytest", "NAMES = ['test_a[cuda]']" + PYTEST.replace("PASSED [", "FAILED ["), "graphs"),
        ("pytest", "raise SystemExit(3)", "suite"),
        ("kvpact.cli.app", APP.format(status=(1, 0)), "doctor"),
        ("kvpact.cli.app", "import os; os._exit(1)", "doctor"),
        ("kvpact.cli.app", APP.format(status=(0, 1)), "demo"),
    ],
)
def test_a_part_that_is_not_good_makes_all_of_it_not_good(
    checkout: Checkout, module: str, text: str, part: str
) -> None:
    checkout.put(module, text)
    done = checkout.run("--only", part)
    assert done.returncode == 1, done.stderr
    assert "All good: NO" in done.stdout
    assert [name for name, found in checkout.parts.items() if not found["good"]] == [part]


def test_answers_that_differ_are_not_good(checkout: Checkout) -> None:
    checkout.answers(good=False)
    assert checkout.run("--only", "answers").returncode == 1
    assert "| eager: hits, alone | same tokens 8, largest log-probability difference 0.004 | NO |" in checkout.table


@pytest.mark.parametrize(
    ("part", "row"),
    [
        ("suite", "| tests of the copies, suite | 3 passed, 0 failed, 0 error, 1 skipped; 2 passed on the device |"),
        ("doctor", "| block by block, 64 KiB | entries 256, loads, GB/s 51.3 |  |"),
    ],
)
def test_what_was_found_before_a_kill_is_there(checkout: Checkout, part: str, row: str) -> None:
    environment = {**os.environ, "HANGS": "600"}
    running = subprocess.Popen(
        checkout.command("--only", part), stdout=subprocess.DEVNULL, env=environment, start_new_session=True
    )
    try:
        end = time.monotonic() + 50
        file = checkout.directory / "gpu-results.md"
        while not (file.exists() and row in file.read_text()):
            assert time.monotonic() < end, "nothing was written before the end"
            time.sleep(0.05)
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    assert checkout.parts[part]["finished"] is False
    assert "| NOT FINISHED |" in checkout.table
    assert row in checkout.table


def test_a_part_ends_when_the_time_is_over_and_later_ones_are_not_begun(checkout: Checkout) -> None:
    done = checkout.run("--only", "suite", "--only", "doctor", "--seconds", "4", hangs="600")
    assert done.returncode == 1, done.stderr
    parts = checkout.parts
    assert parts["suite"]["out_of_time"]
    assert parts["suite"]["passed"] == 3
    assert parts["doctor"]["left_out"] == "out of time"
    assert "All good: NO" in checkout.table


def test_without_vllm_engines_are_left_out_and_the_table_says_so(checkout: Checkout) -> None:
    script = checkout.directory / "scripts" / "run_gpu.py"
    script.write_text(script.read_text().replace('find_spec("vllm")', 'find_spec("vllm_that_is_not_there")'))
    done = checkout.run("--only", "answers", "--only", "demo")
    assert done.returncode == 0, done.stderr
    assert "| answers | vLLM cannot be imported here |  |" in done.stdout
    assert "| demo | vLLM cannot be imported here |  |" in done.stdout


def test_the_order_of_work_names_each_part_once(checkout: Checkout) -> None:
    commands = re.findall(r"python3 scripts/run_gpu.py (.*)", (ROOT / "docs" / "gpu.md").read_text())
    assert sorted(re.findall(r"--only (\w+)", " ".join(commands))) == sorted(checkout.parts_offered)
    for command in commands:
        assert re.fullmatch(r"--out \S+( --only \w+)+ --seconds \d+", command)


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        (
            TORCH.format(gpus=[], cuda=None),
            "torch 2.11.0+cu130 is not built for CUDA; ./scripts/setup_venv.sh engine=cuda",
        ),
        (TORCH.format(gpus=[], cuda="'13.0'"), "sees no GPU"),
        ("raise ImportError('no torch')", "has no torch (no torch)"),
    ],
)
def test_where_there_is_no_gpu_one_line_says_so(checkout: Checkout, torch: str, said: str) -> None:
    checkout.put("torch", torch)
    done = checkout.run()
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert said in line
    assert not (checkout.directory / "gpu-results.json").exists()


def test_a_package_that_is_missing_is_named(checkout: Checkout) -> None:
    script = checkout.directory / "scripts" / "run_gpu.py"
    script.write_text(script.read_text().replace('"blake3"', '"blake3_that_is_not_there"'))
    assert "lacks blake3_that_is_not_there; scripts/pack_vllm.py packs" in checkout.run().stderr
