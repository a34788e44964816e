"""`gpu_gaps` on the CPU, over simulated devices: real engines, each kind of prompt, a line for each step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from benchmarks.gpu_engines import SUBJECTS
from benchmarks.gpu_first_token import hit_in_time
from benchmarks.gpu_gaps import Steps, rows

PROMPTS = 2
TOKENS = 300
CACHED = 256
"""Tokens of a prompt in full blocks of the CPU engine."""

COLUMNS = {"gap", "decodes", "tokens", "waited_bytes", "copies", "graph"}


@pytest.mark.engine
@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_prompts_of_each_kind_come_one_by_one_beside_a_client_who_decodes(subject: str, tmp_path: Path) -> None:
    found = list(rows(TOKENS, PROMPTS, decoding=1, apart_ms=20, subjects=(subject,), steps=tmp_path / "steps"))
    kinds = ["computed", "local hit", "loaded"] if subject == "kvpact" else ["loaded"]
    assert [row["what"] for row in found] == [f"{subject}, {kind}" for kind in kinds]
    assert [row["cached_tokens"] for row in found] == [CACHED * (kind != "computed") for kind in kinds]
    for row in found:
        assert row["prompts"] == PROMPTS
        assert row["note"] == "a simulated device: no result"
        assert row["graphs"] == {"unknown": row["steps"]}, "vLLM's CPU runner does not say"
        lines = (tmp_path / "steps" / f"{row['what'].replace(', ', ' ')}.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        assert all(step.keys() >= COLUMNS for step in steps)
        assert all(step["decodes"] == 1 for step in steps)
        assert sum(len(step["admits"]) for step in steps) == PROMPTS
        known = [step["copies"] is not None for step in steps]
        assert all(known) if subject == "kvpact" else not any(known), "others do not say what they copy"
    if subject == "kvpact":
        assert found[2]["copies"] > found[1]["copies"] == 0


def step(ended: float, admits: tuple[str, ...] = (), decodes: int = 2) -> dict[str, object]:
    return {"began": ended - 0.001, "ended": ended, "admits": [*admits], "decodes": decodes, "tokens": 2, "graph": None}


def test_what_a_prompt_costs_others_is_what_gaps_have_over_the_median_from_its_arrival_on(tmp_path: Path) -> None:
    """Of two prompts the second is loaded for a step before it is admitted."""
    ends = [1.00, 1.01, 1.02, 1.05, 1.06, 1.07, 1.09, 1.13, 1.14, 1.15, 1.16]
    admits = {1.05: ("prompt 0-ab",), 1.13: ("prompt 1-cd",)}
    lines = [step(end, admits.get(end, ())) for end in ends]
    lines += [{"arrived": 1.021, "request": "prompt 0-ab"}, {"arrived": 1.071, "request": "prompt 1-cd"}]
    lines += [{"arrived": 0.5, "request": "client 0-ef"}]
    (tmp_path / "steps").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    row = Steps.read(tmp_path, 0.4, 1).row()
    assert (row["prompts"], row["gap_ms"]) == (2, pytest.approx(10.0))
    assert (row["admit_ms"], row["admit_most_ms"]) == (pytest.approx(35.0), pytest.approx(40.0))
    assert row["extra_ms"] == pytest.approx((20.0 + 10.0 + 30.0) / 2, abs=1e-6)


def test_a_hit_in_time_has_a_stage_for_each_call_and_the_devices_own_time() -> None:
    lines = [
        {"arrived": 1.0, "request": "r"},
        {"span": "look-up", "ended": 1.001, "request": "r", "tokens": 32},
        {"span": "admission", "ended": 1.0015, "request": "r", "tokens": 32},
        {"span": "order", "ended": 1.002, "loads": [["r", 2, False]], "admits": []},
        {"span": "submit", "ended": 1.004, "kind": "load", "copies": 2, "bytes": 64},
        {"span": "begin", "ended": 1.0045, "loads": [[7, "r", 2, False]]},
        {"span": "copy", "ended": 1.009, "seconds": 0.003},
        {"span": "seen", "ended": 1.0095, "jobs": [7]},
        {"span": "order", "ended": 1.010, "loads": [], "admits": ["r"]},
        {"ended": 1.016, "admits": ["r"]},
    ]
    found = hit_in_time(lines)
    names = [
        "look-up",
        "admission",
        "order",
        "submit",
        "begin",
        "copy",
        "seen",
        "next schedule",
        "forward",
        "device_ms",
    ]
    assert list(found) == names
    assert sum(list(found.values())[:-1]) == pytest.approx(16.0), "every millisecond has a name"
    assert found["device_ms"] == pytest.approx(3.0)
