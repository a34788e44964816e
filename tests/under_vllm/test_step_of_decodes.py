"""Under vLLM's scheduler a step in which requests only decode costs kvpact no call for each of them."""

from __future__ import annotations

import json
import subprocess
import sys

from documents import ROOT


def test_a_step_of_decodes_calls_no_function_for_each_request() -> None:
    """The benchmark's own count, beside the cheapest connector of vLLM."""
    command = (sys.executable, "-m", "benchmarks", "running", "--running", "10,64", "--waiting", "0", "--steps", "4")
    ended = subprocess.run(
        [*command, "--subjects", "kvpact,simple", "--json", "-"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    rows = {(row["who"], row["running"]): row for row in json.loads(ended.stdout)}
    assert {*rows} == {(who, running) for who in ("kvpact", "simple") for running in (10, 64)}
    assert rows["kvpact", 64]["calls"] <= rows["kvpact", 10]["calls"] + 3
    assert rows["kvpact", 64]["calls"] <= 95
    assert rows["kvpact", 64]["calls"] < rows["simple", 64]["calls"] / 3
    assert all(row["hooks_us"] > 0 and row["schedule_us"] > 0 and row["waiting"] == 0 for row in rows.values())
