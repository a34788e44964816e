"""What of an examination torch does, with a torch.cuda that is played: the calls are there, in the right order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from played_bench import PlayedDriver

from kvpact.torch_cuda.doctor import torch_bench
from kvpact.worker.cuda.driver import AccessOrder


class PlayedCuda:
    """As much of torch.cuda as a bench calls; `said` has what was asked, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.captured: list[str] = []
        self.bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.said.append(name)

    def current_stream(self, device: int) -> Any:
        return SimpleNamespace(cuda_stream=1, synchronize=lambda: self.said.append("stream.synchronize"))

    def ExternalStream(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(cuda_stream=handle)

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        assert enable_timing
        return SimpleNamespace(
            record=lambda stream: self.said.append(f"record {stream.cuda_stream}"),
            synchronize=lambda: self.said.append("event.synchronize"),
            elapsed_time=lambda last: 2.0,
        )

    def CUDAGraph(self) -> Any:  # noqa: N802
        return SimpleNamespace(replay=lambda: self.said.append("replay"))

    @contextlib.contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        self.said.append("capture")
        yield
        self.said.append("captured")

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(multi_processor_count=132, total_memory=1 << 37, major=9, minor=0)


class PlayedTorch:
    """torch, whose tensors are all on the CPU."""

    def __init__(self, cuda: PlayedCuda) -> None:
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        made = getattr(torch, name)
        if name not in ("zeros", "randn", "empty"):
            return made
        return lambda *size, device=None, pin_memory=False, **options: made(*size, **options)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> PlayedCuda:
    played = PlayedCuda()
    monkeypatch.setattr(torch_bench, "torch", PlayedTorch(played))
    monkeypatch.setattr(torch_bench, "FreeDriver", lambda device: PlayedDriver())
    monkeypatch.setattr(torch_bench, "kernel_for", lambda driver: None)
    monkeypatch.setattr(torch_bench, "WIDTH", 8)
    return played


def test_a_bench_does_with_torch_what_it_says(cuda: PlayedCuda) -> None:
    bench = torch_bench.TorchBench(0)
    about = bench.about()
    assert about["gpu"] == "Played"
    assert (about["pci_bus_id"], about["compute_capability"], about["kernel_below_bytes"]) == ("0000:65:00.0", "9.0", 0)
    memory = bench.allocate(64)
    assert (memory.num_bytes, memory.address) == (64, memory.owner.data_ptr())
    assert bench.computing_stream() == 1

    def heard(work: Any) -> list[str]:
        cuda.said.clear()
        work()
        return list(cuda.said)

    replay = bench.decode()
    assert heard(replay) == ["replay"]
    assert heard(bench.capture) == ["capture", "captured", "replay", "stream.synchronize"]
    assert heard(lambda: bench.fill(memory, 7)) == ["_sleep"]
    assert (memory.owner == 7).all()
    for way in ("in", "out"):
        assert heard(lambda way=way: bench.copy_small(way)) == ["stream.synchronize"]
    assert heard(bench.launch) == []
    assert heard(bench.end_section) == ["synchronize", "empty_cache"]
    assert bench.now() <= bench.now()


def test_work_is_timed_between_events_of_its_own_stream_and_the_first_round_is_not_seen(cuda: PlayedCuda) -> None:
    bench = torch_bench.TorchBench(0)
    memory, host = bench.allocate(64), np.ones(64, np.uint8)
    bench.driver.add_device_memory(memory.address, 64)
    bench.driver.register(host.ctypes.data, 64)
    streams: list[int] = []

    def work(stream: int) -> None:
        streams.append(stream)
        one = [np.array([value], np.uint64) for value in (memory.address, host.ctypes.data, 64)]
        bench.driver.copy_batch(*one, AccessOrder.STREAM, stream)

    cuda.said.clear()
    timing = bench.timed(work, 3)
    assert (timing.device, timing.spread) == (0.002, 0.0)
    assert timing.gb_per_s(64) == pytest.approx(64 / 0.002 / 1e9)
    assert timing.call > 0
    [stream] = set(streams)
    assert len(streams) == 4
    assert cuda.said == ["synchronize", f"record {stream}", f"record {stream}", "event.synchronize"] * 4
