"""What copies on a device use of vLLM is in each release, by its own sources."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import torch

from kvpact.vllm import device
from kvpact.vllm.device import VllmDevice
from kvpact_testkit.vllm.releases import RELEASES, fetch_release, installed_release


def sources(release: str) -> Path:
    """The release's folder of the package."""
    if release != installed_release():
        return Path(fetch_release(release)) / "vllm"
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def parameters(file: Path, function: str) -> list[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return [one.arg for one in (*node.args.args, *node.args.kwonlyargs)]
    return []


@pytest.mark.parametrize(
    "release", [pytest.param(one, marks=[] if one == installed_release() else pytest.mark.soak) for one in RELEASES]
)
def test_the_copy_call_streams_and_events_are_as_they_are_used(release: str) -> None:
    folder = sources(release)
    offload = folder / "v1" / "kv_offload" / "cpu"
    four = ["src_ptrs", "dst_ptrs", "sizes", "is_src_access_order_any"]
    assert parameters(folder / "_custom_ops.py", "swap_blocks_batch") == four
    kernel = offload / "swap_blocks_triton.py"
    assert parameters(kernel, "swap_blocks_batch")[2:] == ["sizes", "is_src_access_order_any", "bytes_per_chunk"]
    assert all(f"{name} = " in kernel.read_text() for name in ("THRESHOLD_BYTES", "MIN_N"))
    worker = (offload / "gpu_worker.py").read_text()
    for used in (
        "current_platform.Stream()",
        "current_platform.current_stream()",
        "with current_platform.stream(stream)",
        "torch.Event(",
        ".wait_event(",
        "torch.uint64 if current_platform.is_xpu() else torch.int64",
    ):
        assert used in worker, used
    assert (offload / "host_register.py").is_file() is RELEASES[release].pins_host_memory
    assert "cudaHostRegister" in worker or RELEASES[release].pins_host_memory
    runtime = (folder / "distributed" / "device_communicators" / "cuda_wrapper.py").read_text()
    assert "self.lib = " in runtime
    assert parameters(folder / "platforms" / "interface.py", "set_device") == ["cls", "device"]


def test_a_device_says_its_driver_and_what_calls_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error over a wrong copy names both."""
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:16:46 UTC 2025\n")
    monkeypatch.setattr(device, "NVIDIA", driver)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    said = VllmDevice(torch.device("cpu"), 4096).name
    assert said.endswith(f", driver 580.65.06, torch {torch.__version__}, CUDA 13.0, vLLM {installed_release()}")
