"""`scripts/gpu_answers.py`: what it takes for a difference, and a run of it on a real engine, on the CPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from kvpact_testkit.demo.messages import Output

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_answers.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("gpu_answers", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
def test_a_difference_is_the_largest_up_to_where_tokens_differ(
    script: ModuleType, other: Output, difference: float
) -> None:
    assert script.difference(ANSWER, other) == pytest.approx(difference)
    found = script.compare([ANSWER, ANSWER], [ANSWER, other])
    assert found["largest log-probability difference"] == pytest.approx(difference)
    assert found["bit for bit"] == 1 + ANSWER.same_answer(other)


@pytest.mark.parametrize(
    ("log", "went_on"),
    [
        ("arena: 32 GiB pinned\nCapturing CUDA graphs (FULL)", False),
        ("Capturing CUDA graphs (PIECEWISE)\rCapturing CUDA graphs\narena: 32 GiB pinned", True),
        ("Capturing CUDA graphs (PIECEWISE)", True),
        ("arena: 32 GiB pinned", None),
    ],
)
def test_the_log_says_whether_memory_was_pinned_during_a_capture(
    script: ModuleType, log: str, went_on: bool | None
) -> None:
    assert script.pinning_went_on(log) is went_on


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
