"""`scripts/gpu_answers.py`: what it takes for a difference, and a run on the CPU; what `scripts/run_gpu.py` shows."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from documents import ROOT, load_script
from kvpact_testkit.demo.messages import Output

SCRIPT = ROOT / "scripts" / "gpu_answers.py"
ANSWERS = load_script("scripts/gpu_answers.py")
RUN = load_script("scripts/run_gpu.py")


def said(*positions: dict[int, float], reason: str = "length") -> Output:
    """An answer of the most likely token at each position."""
    tokens = tuple(max(one, key=one.__getitem__) for one in positions)
    return Output(tokens, tuple(tuple(one.items()) for one in positions), reason, 0, 0.0)


ANSWER = said({7: -0.5, 8: -1.5}, {3: -0.2, 4: -2.0})


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (ANSWER, 0.0),
        (said({7: -0.5, 8: -1.25}, {3: -0.2, 4: -2.0}), 0.25),
        (said({7: -0.5, 9: -1.75}, {3: -0.2, 4: -2.0}), 0.0),  # a token that only one names says nothing
        (said({8: -0.4, 7: -0.5}, {1: 0.0}), 1.1),  # the positions after another token are of another text
        (said({1: -0.5}, {3: -0.2}), math.inf),
        (said({7: -0.5, 8: -1.5}, {3: -0.2, 4: -2.0}, reason="abort"), math.inf),
        (said(), math.inf),
    ],
)
def test_a_difference_is_the_largest_up_to_where_tokens_differ(other: Output, difference: float) -> None:
    assert ANSWERS.difference(ANSWER, other) == pytest.approx(difference)
    found = ANSWERS.compare([ANSWER, ANSWER], [ANSWER, other])
    assert found["largest log-probability difference"] == pytest.approx(difference)
    assert found["bit for bit"] == 1 + ANSWER.same_answer(other)


def test_the_log_says_whether_memory_was_pinned_during_a_capture() -> None:
    pinned, capturing = "arena: 32 GiB pinned\n", "Capturing CUDA graphs (PIECEWISE)\n"
    logs = (pinned + capturing, capturing * 2 + pinned, capturing, pinned)
    assert [*map(ANSWERS.pinning_went_on, logs)] == [False, True, True, None]


@pytest.mark.engine
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_cpu_engine_answers_the_same_with_kvpact(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")
    report = tmp_path / "answers.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--only", "eager", "--output", report], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())["scenes"]["eager"]
    assert found["hits, alone"]["bit for bit"] == 8
    assert found["hits while others decode"]["hits"] == 8


# The script that runs all that only a GPU can prove


def test_tests_that_ran_on_the_device_are_told_from_those_of_a_played_one() -> None:
    names = ("test_a[cuda-halves]", "test_a[x-cuda]", "test_c[cuda]", "test_a[fake-cuda]", "test_cuda")
    assert [bool(RUN.ON_THE_DEVICE.search(name)) for name in names] == [True, True, True, False, False]


def test_the_table_says_what_was_found_and_what_did_not_come_to_its_end() -> None:
    suite = {"good": False, "finished": False, "passed": 3, "failed": 1, "passed_on_the_device": 2}
    parts = {"suite": suite, "demo": {**RUN.NO_VLLM, "finished": True}}
    machine = {
        "commit": "",
        "gpus": ["NVIDIA H200"],
        "torch": "2",
        "python": "3",
        "cores": 1,
        "ram_gib": 1,
        "kernel": "6",
    }
    table = [*RUN.table({"good": False, "machine": machine, "parts": parts})]
    assert table[2].endswith("All good: NO.")
    assert table[-2:] == [
        "| tests of the copies, suite | 3 passed, 1 failed; 2 passed on the device | NOT FINISHED |",
        "| demo | vLLM cannot be imported here |  |",
    ]


def test_the_order_of_work_names_each_part_once() -> None:
    commands = re.findall(r"python3 scripts/run_gpu.py (.*)", (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8"))
    assert sorted(re.findall(r"--only (\w+)", " ".join(commands))) == sorted(RUN.PARTS)


@pytest.mark.parametrize("plan", [False, True], ids=["run", "plan"])
def test_where_there_is_no_gpu_one_line_says_so(plan: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="no engine is installed; `make setup` installs one")
    if torch.cuda.is_available():
        pytest.skip("here is one")
    command: list[str | Path] = [sys.executable, ROOT / "scripts" / "run_gpu.py", "--out", tmp_path]
    done = subprocess.run([*command, *["--plan"] * plan], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if plan else 2)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"run_gpu: torch {torch.__version__} ")
    assert not list(tmp_path.iterdir())
    assert [said.split()[0] for said in done.stdout.splitlines()] == ([*RUN.chosen(), "all"] if plan else [])


def test_the_plan_fits_into_its_time_and_the_last_parts_get_what_is_left() -> None:
    assert sum(RUN.PARTS[name].expected_seconds for name in RUN.chosen()) <= RUN.SECONDS
    assert all(part.expected_seconds <= part.most_seconds for part in RUN.PARTS.values())
    assert {*RUN.PARTS} - {*RUN.chosen()} == {*RUN.BY_NAME}
    *parts, total = RUN.planned(None, 100.0)
    assert parts[0].startswith("graphs         35 s expected,   60 s at most: ")
    assert parts[2].startswith("answers        10 s expected,   10 s at most: ")
    assert parts[-1].startswith("restart         0 s expected,    0 s at most: ")
    assert total.startswith("all           100 s expected,  100 s at most")
    assert next(RUN.planned(["demo"], 300.0)).startswith("demo           90 s expected,  300 s at most: ")


def test_rows_of_first_tokens_are_results_as_they_are_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = [{"tokens": 2048, "what": "cold", "ttft_ms": 54.3}, {"what": "16 decode", "p99_ms": 7.9}]
    printed = "loading\n" + "".join(f"{row}\n" for row in said)
    child = RUN.Child
    monkeypatch.setattr(RUN, "Child", lambda until, *arguments: child(until, "-c", f"print({printed!r}, end='')"))
    run = RUN.PARTS["first_token"].run({"has_vllm": True, "gpus": ["NVIDIA H200"]}, time.monotonic() + 60, tmp_path)
    found = [*run]
    assert [(one["good"], len(one["rows"])) for one in found] == [(False, 1), (False, 2), (True, 2)]
    assert {row["gpu"] for row in found[-1]["rows"]} == {"NVIDIA H200"}, "a row names its card"
    assert [*RUN.rows_of("first_token", {"good": True, "finished": True, "rows": said})] == [
        ("first tokens, in turns", "", "yes"),
        ("2048 cold", "ttft_ms 54.3", ""),
        ("16 decode", "p99_ms 7.9", ""),
    ]
