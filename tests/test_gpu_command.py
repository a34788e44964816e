"""`make gpu`: one line where there is no GPU, and elsewhere all its parts in one file and one table.

The GPU, torch, pytest, the examination and the demonstration are stand-ins.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

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
import sys
from pathlib import Path
assert sys.argv[1:2] == ["tests/worker"]
case = "<testcase classname='tests.worker.test_engines' name='{}'>{}</testcase>"
names = ["test_a[cpu]", "test_a[fake-cuda-halves]", *NAMES]
cases = [case.format(name, "") for name in names] + [case.format("test_b[cuda]", "<skipped/>")]
Path(sys.argv[-1].partition("=")[2]).write_text(f"<testsuite>{''.join(cases)}</testsuite>")
"""

APP = """
import json, sys
from pathlib import Path
DOCTOR, DEMO = {status}
def main():
    report = Path(sys.argv[sys.argv.index("--json") + 1])
    if sys.argv[1] == "doctor":
        section = {{"entries": 256, "loads, GB/s": 51.26}}
        report.write_text(json.dumps({{"sections": {{"block by block, 64 KiB": section}}}}))
        sys.exit(DOCTOR)
    phase = {{"name": "cold", "ttft_ms": 20.04, "ttft_ms_quartiles": [19, 21], "cached_tokens": 0,
             "reusable_tokens": 96, "identical": True}}
    report.write_text(json.dumps({{"phases": [phase], "failures": []}}))
    sys.exit(DEMO)
"""


class Checkout:
    """A checkout on a machine with two GPUs, torch for CUDA and vLLM, whatever is really here."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.source = directory, directory / "src"
        self.source.mkdir()
        (directory / "scripts").mkdir()
        shutil.copy(SCRIPT, directory / "scripts")
        self.put("torch", TORCH.format(gpus=["NVIDIA H200", "NVIDIA H200"], cuda="'13.0'"))
        self.put("pytest", "NAMES = ['test_a[cuda-halves]', 'test_c[cuda]']" + PYTEST)
        self.put("kvpact.cli.app", APP.format(status=(0, 0)))
        shutil.copy(ROOT / "src" / "kvpact" / "__main__.py", self.source / "kvpact")
        self.put("vllm", "")

    def put(self, module: str, text: str) -> None:
        path = self.source / (module.replace(".", "/") + ".py")
        for folder in [one for one in path.parents if self.source in one.parents]:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").touch()
        path.write_text(text)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, self.directory / "scripts" / "run_gpu.py", "--out", self.directory, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )

    @property
    def results(self) -> dict[str, object]:
        found: dict[str, object] = json.loads((self.directory / "gpu-results.json").read_text())
        return found


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_all_parts_are_in_one_file_and_one_table(checkout: Checkout) -> None:
    done = checkout.run()
    assert done.returncode == 0, done.stderr
    parts = checkout.results["parts"]
    assert isinstance(parts, dict)
    assert list(parts) == ["suite", "doctor", "demo"]
    assert (parts["suite"]["passed"], parts["suite"]["passed_on_the_device"], parts["suite"]["skipped"]) == (4, 2, 1)
    assert list(parts["demo"]["ranks"]) == ["1", "2"]
    table = (checkout.directory / "gpu-results.md").read_text()
    assert table in done.stdout
    for row in (
        "NVIDIA H200, NVIDIA H200; torch 2.11.0+cu130",
        "| tests of the copies | 4 passed, 0 failure, 0 error, 1 skipped; 2 passed on the device | yes |",
        "| block by block, 64 KiB | entries 256, loads, GB/s 51.3 |  |",
        "| cold, ranks: 2 | 20.0 ms to the first token (19.0-21.0), 0 of 96 tokens from a cache | identical |",
    ):
        assert row in table


@pytest.mark.parametrize(
    ("module", "text", "part"),
    [
        ("pytest", "NAMES = []" + PYTEST, "suite"),  # all is well, but nothing ran on the device
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
    parts = checkout.results["parts"]
    assert isinstance(parts, dict)
    assert [name for name, found in parts.items() if not found["good"]] == [part]


def test_without_vllm_the_demonstration_is_left_out_and_the_table_says_so(checkout: Checkout) -> None:
    script = checkout.directory / "scripts" / "run_gpu.py"
    script.write_text(script.read_text().replace('find_spec("vllm")', 'find_spec("vllm_that_is_not_there")'))
    done = checkout.run("--only", "demo")
    assert done.returncode == 0, done.stderr
    assert "| demonstration | vLLM cannot be imported here |  |" in done.stdout


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
