"""The demonstration on a GPU, which is played: its engines share the GPU, and the output says what is not proven."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kvpact_testkit.demo.gpu import cuda_devices
from kvpact_testkit.demo.messages import Output
from kvpact_testkit.demo.phases import PHASES, ColdCost, Plan, Reading, Results
from kvpact_testkit.demo.report import UNPROVEN_ON_GPUS, judge, show

GPU = "NVIDIA H200"

TORCH = """
from types import SimpleNamespace
version = SimpleNamespace(cuda={cuda})
names = {names}
cuda = SimpleNamespace(device_count=lambda: len(names), get_device_name=names.__getitem__)
"""


def play_torch(directory: Path, monkeypatch: pytest.MonkeyPatch, text: str, release: str = "2.13.0") -> None:
    """A `torch` for the process that is asked, and its release."""
    directory.joinpath("torch.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(directory))
    monkeypatch.setattr("kvpact_testkit.demo.gpu.version", lambda name: release)


def test_a_cuda_build_of_torch_names_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play_torch(tmp_path, monkeypatch, TORCH.format(cuda="'13.0'", names=[GPU, GPU]))
    assert cuda_devices() == [GPU, GPU]


@pytest.mark.parametrize(
    "text",
    [
        TORCH.format(cuda="'13.0'", names=[]),
        TORCH.format(cuda=None, names=["AMD Instinct MI300X"]),
        "raise ImportError('libcudart.so.13: cannot open shared object file')",
    ],
)
def test_without_a_gpu_that_cuda_sees_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    play_torch(tmp_path, monkeypatch, text)
    assert cuda_devices() == []


def test_torchs_cpu_build_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play_torch(tmp_path, monkeypatch, TORCH.format(cuda="'13.0'", names=[GPU]), release="2.13.0+cpu")
    assert cuda_devices() == []

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("kvpact_testkit.demo.gpu.version", missing)
    assert cuda_devices() == []


def test_an_engine_on_a_gpu_shares_it() -> None:
    plan = Plan.for_this_machine(ranks=2, gpu=GPU)
    assert (plan.dtype, plan.document_tokens) == ("bfloat16", Plan().document_tokens), "nothing is as on a CPU"
    assert 2 * plan.engine_arguments()["gpu_memory_utilization"] < 1
    assert "gpu_memory_utilization" not in Plan().engine_arguments()


def test_the_output_says_that_the_copies_on_a_gpu_are_unproven() -> None:
    answer = Output((7,), (((7, -1.5),),), "length", 0, 1.0)
    readings = [Reading(phase, number, 300, answer) for phase in PHASES for number in range(2)]
    counts = dict.fromkeys(("promised", "committed", "loaded", "used"), 0)
    results = Results(readings, 16, counts, 0, "tiny", [ColdCost(0.0, 0.0)], gpu=GPU)

    def shown(results: Results) -> str:
        screen = StringIO()
        show(judge(results), Console(file=screen, width=200))
        return screen.getvalue()

    assert judge(results).cold_cpu_share is None
    assert f"On {GPU}. {UNPROVEN_ON_GPUS}" in shown(results)
    assert "counts no CPU time" in shown(results)
    assert UNPROVEN_ON_GPUS not in shown(replace(results, gpu=""))
