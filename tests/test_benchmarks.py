"""`python -m benchmarks` lists and runs the benchmarks, and says in one line what a user got wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import lifecycle

from documents import ROOT

COMMAND = (sys.executable, "-m", "benchmarks")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


def rows_of(*arguments: str) -> list[dict[str, Any]]:
    """What `--output -` prints on standard output, on which nothing else stands."""
    ended = run(*arguments, "--output", "-")
    assert ended.returncode == 0, ended.stderr
    rows: list[dict[str, Any]] = json.loads(ended.stdout)
    return rows


def test_without_a_name_each_benchmark_is_listed_with_one_line() -> None:
    ended = run()
    assert ended.returncode == 0, ended.stderr
    listed = dict(line.split(maxsplit=1) for line in ended.stdout.splitlines()[2:])
    helpers = {
        "__init__",
        "__main__",
        "cold_costs",
        "e2e_engines",
        "e2e_runs",
        "measured_hooks",
        "needs",
        "offload_specs",
    }
    helpers |= {"gpu_engines", "restart_stores", "scheduler_halves", "serving_engines", "table"}
    assert len(listed) == len({path.stem for path in (ROOT / "benchmarks").glob("*.py")} - helpers)
    assert all(len(line) > 20 for line in listed.values())


def test_make_bench_runs_benchmarks_that_are_there() -> None:
    (names,) = re.findall(r"^BENCHMARKS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(names.split()) <= {line.split()[0] for line in run().stdout.splitlines()[2:]}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nosuch"], "there is no benchmark 'nosuch'"),
        (["lifecycle", "--output", "/nowhere/rows.json"], "--output: /nowhere/rows.json cannot be written"),
        (["lifecycle", "--tokens", "many"], "numbers with commas between them, not 'many'"),
        (["lifecycle", "--subjects", "nobody"], "nobody is not one of kvpact"),
        (["step_time", "--output", "-"], "run it without --output"),
        (["restart", "--peers", "kvpact,nobody"], "nobody is not one of kvpact, example, lmcache, nixl, fs, mooncake"),
    ],
)
def test_what_a_user_got_wrong_is_one_line(arguments: list[str], says: str) -> None:
    pytest.importorskip("vllm")
    ended = run(*arguments)
    assert ended.returncode != 0
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert says in line


def test_a_package_that_is_missing_is_one_line(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['vllm'] = None; from benchmarks.__main__ import main; main(['lifecycle'])"
    ended = subprocess.run([sys.executable, "-c", hidden], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "lifecycle needs the package 'vllm', which is not installed here\n"


def test_lifecycle_without_waiting_requests_leaves_that_case_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr("logging.disable", lambda level: None)
    assert lifecycle.rows(tokens=(), block_sizes=(16,), waiting=(0,)) == []


@pytest.mark.soak  # it runs vLLM's own connectors beside kvpact
def test_lifecycle_says_what_a_prompt_costs_the_schedulers_thread() -> None:
    pytest.importorskip("vllm")
    small = ("--tokens", "1024", "--block-sizes", "16", "--chunks", "512", "--waiting", "10", "--rounds", "1")
    rows = rows_of("lifecycle", *small)
    assert {row["state"] for row in rows} == {"cold", "hit", "restart", "arrivals"}
    for row in rows:
        assert (row["tokens"], row["block_size"]) == (1024, 16)
        positive = ["cpu_ms", "cpu_ms_worst_step", "hash_ms", "engine_hash_ms", "prepare_ms", "order_ms", "report_ms"]
        assert all(row[column] > 0 for column in positive), row
        parts = sum(row[f"{part}_ms"] for part in ("prepare", "order", "report"))
        assert row["cpu_ms"] == pytest.approx(parts, abs=0.001)
        assert row["cpu_ms_worst_step"] <= row["waiting"] * row["cpu_ms"] + 0.001
    assert all(row["over_offloading"] > 0 for row in rows if row["state"] != "restart")


def test_host_pool_finds_wrong_bytes_only_without_leases() -> None:
    storm, without, *look_ups = rows_of("host_pool", "--engines", "2", "--seconds", "2", "--kill")
    assert (storm["wrong"], storm["leases_left"]) == (0, 0)
    assert min(storm["loaded"], storm["kills"], without["wrong"]) > 0
    assert 0 < look_ups[0]["miss_us"] < look_ups[0]["hit_us"] < look_ups[-1]["hit_us"]


def test_neighbours_give_back_the_hits_that_private_memories_lose(tmp_path: Path) -> None:
    cut = Path(__file__).parent / "data" / "conversation_trace_600.jsonl"
    (tmp_path / "mooncake_conversation.jsonl").write_bytes(cut.read_bytes())
    sizes = ("--traces", "mooncake", "--blocks", "2000", "--data", str(tmp_path))
    rows = {(row["memory"], row["routing"]): row for row in rows_of("host_hits", *sizes)}
    assert len(rows) == 7
    for routing in ("random", "skewed"):
        private, neighbours = (rows[memory, routing] for memory in ("private", "neighbours"))
        assert private["neighbours_percent"] == 0 < neighbours["neighbours_percent"]
        assert private["hit_percent"] < neighbours["hit_percent"]


def test_retained_blocks_are_there_after_the_longest_pauses_unless_a_flood_retains_too(tmp_path: Path) -> None:
    cut = (Path(__file__).parent / "data" / "conversation_trace_600.jsonl").read_text().splitlines()
    timed = [json.dumps(json.loads(line) | {"timestamp": 1000 * number}) for number, line in enumerate(cut)]
    (tmp_path / "mooncake_conversation.jsonl").write_text("\n".join(timed))
    small = ("--traces", "chat", "--flood-requests", "200", "--disk-requests", "300", "--data", str(tmp_path))
    plain, retained, below, expected, *floods = rows_of("retained", *small)
    assert min(plain["asking"], retained["lost_blocks"]) > 0
    assert plain["paused_hit"] + 50 < retained["paused_hit"]
    assert 50 <= retained["lost_back"] <= 100
    assert retained["others_fall"] == pytest.approx(plain["others_hit"] - retained["others_hit"], abs=0.011)
    assert ("others_fall" in retained["missed"]) == (retained["others_fall"] > 1)
    assert below["brought"] == 0 < expected["brought"]
    assert below["paused_in_memory"] + 50 < expected["paused_in_memory"]
    assert (expected["brought_unused"], expected["missed"]) == (pytest.approx(0, abs=10), "none")
    loads = ["no flood", "flood, no shares", "flood with retain, no shares", "flood with retain, shares"]
    assert [row["load"] for row in floods] == loads
    assert floods[0]["paused_hit"] >= floods[1]["paused_hit"] > floods[2]["paused_hit"] < floods[3]["paused_hit"]
    assert floods[3]["others_fall"] < floods[2]["others_fall"]


def test_index_says_what_a_block_costs_beside_a_dict_and_what_a_restart_does() -> None:
    small = ("--sizes", "10000,20000", "--classes", "5000", "--restart", "5000", "--foreign", "5000")
    rows = {(row["what"], row["blocks"]): row for row in rows_of("index", *small)}
    assert set(rows) == {
        *((what, blocks) for what in ("index", "index in a memory file") for blocks in (10_000, 20_000)),
        *((what, 5000) for what in ("two classes", "restart, warm", "restart, cold", "foreign slab")),
    }
    for row in (row for (what, _), row in rows.items() if what.startswith("index")):
        assert all(
            row[f"{what}_q1"] <= row[what] <= row[f"{what}_q3"] for what in ("fill_us", "new_us", "dict_fill_us")
        )
        assert row["bytes"] > 0 < row["growth"]
    assert rows["two classes", 5000]["window_us"] > 0
    for what in ("restart, warm", "restart, cold"):
        row = rows[what, 5000]
        assert row["served"] == 5000
        assert min(row["table_read_s"], row["all_read_s"], row["opened_s"]) > 0
    assert rows["foreign slab", 5000]["served"] == 5000


@pytest.mark.proof
@pytest.mark.parametrize(("scenario", "model", "found"), [
    ("turn", "states", ["720 of 1,041", "864 of 1,041", "720 of 1,041"]),
    ("again", "states and windows", ["480 of 615", "480 of 615", "480 of 615"]),
])  # fmt: skip
def test_what_breaks_says_what_each_connector_makes_of_a_scenario(scenario: str, model: str, found: list[str]) -> None:
    pytest.importorskip("vllm")
    names = ("vLLM alone", "kvpact", "simple")
    small = ("--models", model, "--drafts", "mtp", "--connectors", ",".join(names))
    (row,) = rows_of("what_breaks", "--scenarios", scenario, *small)
    assert [row[name] for name in names] == found


def test_a_peer_that_is_not_there_has_a_row_that_says_how_to_get_it(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    absent = ("--peers", "lmcache", "--peer-python", str(tmp_path / "python"))
    (row,) = rows_of("e2e", *absent)
    assert (row["what"], row["state"]) == ("lmcache", "not there")
    (other,) = rows_of("restart", *absent)
    assert other["note"] == f"not there: {row['note']}"
    assert "lmcache==0.5.6" in row["note"]


@pytest.mark.parametrize(
    ("engines", "groups"),
    [
        (8, [["kvpact", "redis", "example", "lmcache", "mooncake"]]),
        (5, [["kvpact", "redis", "example"], ["lmcache", "mooncake"]]),
        (3, [["kvpact", "redis"], ["example"], ["lmcache"], ["mooncake"]]),
    ],
)
def test_engines_are_compared_in_groups_that_memory_has_room_for(engines: int, groups: list[list[str]]) -> None:
    pytest.importorskip("vllm")
    from benchmarks.e2e import PEERS
    from benchmarks.e2e_engines import groups_with_room

    assert groups_with_room(PEERS, engines) == groups
    with pytest.raises(SystemExit, match=r"lmcache: memory is free for 2 engines, it takes 3: compare shorter prompts"):
        groups_with_room(PEERS, 2)
