"""The short form of the `e2e` benchmark: real engines with and without kvpact, and what stands in its rows."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from documents import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(600)]

WARM = {"kvpact": ("over_local", 1.05), "kvpact, disk, new process": ("over_raw", 1.1)}
"""Who answers warm prompts -> the column that has a goal, and the goal."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("vllm")
    file = tmp_path_factory.mktemp("e2e") / "rows.json"
    short = ("--tokens", "1024", "--cold", "3", "--rounds", "1", "--peers", "kvpact", "--fork")
    command = (sys.executable, "-m", "benchmarks", "e2e", *short, "--output", file)
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return found


def test_every_engine_has_a_row_for_cold_prompts(rows: list[dict[str, Any]]) -> None:
    cold = {row["what"]: row for row in rows if row["state"] == "cold"}
    assert set(cold) == {"no cache", "kvpact"}
    for what, row in cold.items():
        assert (row["tokens"], row["readings"]) == (1024, 3)
        assert row["ttft_ms"] > 0 < row["core_cpu_ms"]
        if what != "no cache":
            assert row["over_no_cache"] > 0 < row["kvpact_cpu_share"] < 1


def test_warm_prompts_came_from_where_they_should_and_were_answered_alike(rows: list[dict[str, Any]]) -> None:
    warm = {row["what"]: row for row in rows if row["state"] == "warm"}
    assert set(warm) == set(WARM)
    for what, row in warm.items():
        assert row["answers"] == "equal", row
        assert (row["tokens"], row["readings"], row["cached_tokens"]) == (1024, 2, 1024)
        assert (row["goal_of"], row["goal"]) == WARM[what]
        assert row[row["goal_of"]] > 0 < row["local_ms"]
    assert len(rows) == len(WARM) + 3, "two for cold prompts, and the local prefix hits"
