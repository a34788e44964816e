"""An examination of a device: every section runs on a played one, and a device that does wrong is found out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from played_bench import PlayedBench, PlayedDriver

from kvpact.torch_cuda.doctor import hazards
from kvpact.torch_cuda.doctor.children import TRIALS, child_results
from kvpact.torch_cuda.doctor.examine import SECTIONS, Examination
from kvpact.torch_cuda.doctor.report import lines
from kvpact.torch_cuda.doctor.shapes import Shape
from kvpact.torch_cuda.doctor.workspace import Amounts
from kvpact.worker import round_trip
from kvpact.worker.cuda.driver import CudaError

TINY = Amounts(
    pin_bytes=1 << 16,
    pin_chunks=(1 << 14, 1 << 16),
    load_bytes=1 << 15,
    arena_bytes=1 << 17,
    rounds=2,
    seconds=0.02,
    batches=(64, 5000),
    captures=3,
    small_copies=5,
)
SHAPES = (Shape("LBNHC", 1024, 4), Shape("BLNHC", 1024, 4), Shape("LBNHC", 4096, 4))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("BLOCKS", 4),
        ("BLOCK_BYTES", 4096),
        ("TURNS", 6),
        ("PIECE_BYTES", 8192),
        ("COPY_BYTES", 4096),
    ):
        monkeypatch.setattr(hazards, name, value)
    monkeypatch.setattr(round_trip, "LIMIT_SECONDS", 5.0)


def examination(bench: PlayedBench, file: Path | None = None, told: list[str] | None = None) -> Examination:
    def trial(name: str) -> dict[str, Any]:
        return {"end": "ok", "rows": json.loads(json.dumps(list(TRIALS[name](bench, TINY)))), "error": None}

    return Examination(bench, TINY, SHAPES, trial, file, (told if told is not None else []).append)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What a whole examination of the played device writes. Nothing is asked of it that a real one would not bear."""
    told: list[str] = []
    bench, file = PlayedBench(monkeypatch), tmp_path / "doctor.json"
    whole = examination(bench, file, told)
    whole.run([name for name in SECTIONS if name not in TRIALS])
    assert "captures" not in json.loads(file.read_text())["sections"]
    assert bench.driver.violations == []
    assert bench.driver.pinned_bytes == 0
    document = whole.run(list(TRIALS))
    assert json.loads(file.read_text()) == json.loads(json.dumps(document))
    assert [line.split(":")[0] for line in told] == list(document["sections"]) == list(SECTIONS)
    return document


def test_every_section_is_measured_and_every_line_of_the_report_is_written(found: dict[str, Any]) -> None:
    sections = found["sections"]
    assert [name for name, section in sections.items() if section.get("error")] == []
    assert found["sound"], found["verdicts"]
    assert sections["bus"]["in_gb_per_s"] == pytest.approx(55, rel=0.01)
    assert sections["bus"]["both_at_once_gb_per_s"] == pytest.approx(55, rel=0.01)
    assert [row["pages_taken_before"] for row in sections["pinning"]["by_chunk"]] == [True, True, False, False]
    for row in sections["pinning"]["by_chunk"]:
        assert row["seconds_per_gib"] == pytest.approx(0.1)
        assert row["pinned_chunks"] * row["chunk_bytes"] == TINY.pin_bytes
    rows = {(row["way"], row["what"], row["path"], row["layout"], row["page_bytes"]): row
            for row in sections["bandwidth"]["rows"]}  # fmt: skip
    apart = rows["load", "background", "copy engines", "LBNHC", 1024]
    inside = rows["load", "background", "copy engines", "BLNHC", 1024]
    assert (apart["entry_bytes"], apart["entries"], apart["chosen"]) == (1024, 32, False)
    assert rows["load", "background", "kernel", "LBNHC", 1024]["chosen"]
    assert inside["entry_bytes"] >= 4096
    assert inside["gb_per_s"] > apart["gb_per_s"]
    assert rows["save", "background", "copy engines", "BLNHC", 1024]["chosen"]
    order = sections["order"]
    wrong = [order[name] for name in ("wrong_out_in_stream_order", "wrong_in_in_stream_order", "wrong_in_at_any_time")]
    assert wrong == [0, 0, 0]
    assert order["wrong_out_at_any_time"] > 0, "the played device reads ahead where it may"
    assert sections["start"]["bit_exact"]
    steps = {row["step"]: row for row in sections["computing_thread"]["rows"]}
    assert list(steps) == ["no loads", "submitted at once", "handed over"]
    assert len(sections["beside"]["rows"]) == 2 * len(SHAPES)
    assert all(row["copies_gb_per_s"] >= 0 for row in sections["beside"]["rows"])
    spans = {row["copy"]: row["error_code"] for row in sections["spans"]["rows"]}
    assert spans == {"inside": 0, "across_two": 1, "half_pinned": 1, "not_pinned": 1, "inside, afterwards": 0}
    assert [row["entries"] for row in sections["long_batches"]["rows"]] == [64, 5000]
    as_kvpact, as_default = sections["captures"]["rows"]
    assert (as_kvpact["good_captures"], as_kvpact["capture_error"]) == (3, None)
    assert not [code for code in as_kvpact["calls_by_error_code"] if not code.endswith(": 0")]
    assert as_default["good_captures"] == 0
    assert [code for code in as_default["calls_by_error_code"] if code.endswith(": 900")]
    text = list(lines(found))
    assert "kvpact's copies may be used here" in text
    assert len(text) > 40


class ForgetsFences(PlayedDriver):
    """Streams do not wait for events."""

    def stream_wait(self, stream: int, event: int) -> None:
        pass


class SpoilsBytes(PlayedDriver):
    """A bit of each batch is lost."""

    def launch_copies(self, targets: Any, sources: Any, sizes: Any, order: Any, stream: int) -> None:
        super().launch_copies(targets, sources, sizes, order, stream)
        first = int(targets[0])
        self.launch(lambda: spoil(first), stream)


def spoil(address: int) -> None:
    memory = (np.ctypeslib.ctypes.c_uint8 * 1).from_address(address)
    memory[0] ^= 1


class PinsLittle(PlayedDriver):
    """A container with a limit on locked memory."""

    def register(self, address: int, num_bytes: int) -> None:
        if self.pinned_bytes + num_bytes > 1 << 15:
            raise CudaError("cuMemHostRegister", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
        super().register(address, num_bytes)


@pytest.mark.parametrize(
    ("driver", "section", "said"),
    [
        (ForgetsFences, "order", "fences do not hold: saves read blocks before"),
        (SpoilsBytes, "start", "came back with other bytes"),
    ],
)
def test_a_device_that_does_wrong_is_unsound(
    monkeypatch: pytest.MonkeyPatch, driver: Callable[[], PlayedDriver], section: str, said: str
) -> None:
    document = examination(PlayedBench(monkeypatch, driver())).run([section])
    assert not document["sound"]
    assert any(one["level"] == "unsound" and said in one["text"] for one in document["verdicts"])
    assert list(lines(document))[-1] == "kvpact's copies must not be used here"


def test_a_section_that_fails_is_recorded_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    document = examination(PlayedBench(monkeypatch, PinsLittle())).run(["pinning", "bus", "order"])
    first, second, *_ = document["sections"]["pinning"]["by_chunk"]
    assert (first["pinned_chunks"], second["pinned_chunks"], second["seconds_per_gib"]) == (2, 0, None)
    assert "out of memory" in document["sections"]["bus"]["error"]
    assert document["sections"]["order"]["turns"] == 6
    assert any("raise the limit on locked memory" in one["text"] for one in document["verdicts"])
    assert any(line.startswith("bus: not measured: CudaError") for line in lines(document))


def test_trials_of_a_process_that_dies_or_hangs_are_kept_as_far_as_they_came() -> None:
    says = "import sys, os, time; print('{\"a\": 1}', flush=True); "
    assert child_results(["-c", says], 20) == {"end": "ok", "rows": [{"a": 1}], "error": None}
    died = child_results(["-c", says + "print('oh', file=sys.stderr, flush=True); os._exit(3)"], 20)
    assert died == {"end": "exit status 3", "rows": [{"a": 1}], "error": "oh"}
    hung = child_results(["-c", says + "time.sleep(60)"], 1.5)
    assert (hung["end"], hung["rows"]) == ("hung", [{"a": 1}])
