"""What the benchmarks over HTTP read from their clients' results, and the rows they make of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from benchmarks import serving_engines, serving_prefix, serving_traces, serving_turns
from benchmarks.e2e_engines import Run
from benchmarks.routers import BLOCK, Prompt, Sizes, read_prompts, simulated
from benchmarks.serving_engines import Load, Round, held, row, serve_command

from kvpact_testkit.demo.engine import EngineProcess, EngineSettings

MIB = 1 << 20


def rounds(*p50: float, hits: float = 0.5, held: dict[str, float] | None = None) -> list[Round]:
    """Rounds of 11 requests each, one of which failed; the other ten were equally fast."""
    return [Round(Load([ms] * 10, 11, 5.0, 1), hits, held or {}) for ms in p50]


def test_bench_serve_is_read_without_the_requests_that_failed() -> None:
    found = {"ttfts": [0.25, 0.0, 0.5], "errors": ["", "no answer", ""], "duration": 4.0}
    assert serving_prefix.load_of(found) == Load([250.0, 500.0], 3, 4.0, 1)


def test_the_multi_turn_benchmark_is_read_by_its_later_turns() -> None:
    stats = [
        {"start_time_ms": 2_000.0, "latency_ms": 3_000.0, "ttft_ms": 70.0, "input_num_turns": 3},
        {"start_time_ms": 1_000.0, "latency_ms": 500.0, "ttft_ms": 900.0, "input_num_turns": 1},
    ]
    log = "Client 0 is done (num_successes=1, num_failures=0)\nClient 1 is done (num_successes=1, num_failures=2)\n"
    assert serving_turns.load_of(stats, log) == Load([70.0], 4, 4.0, 2)


def test_aiperf_is_read_request_by_request() -> None:
    whole = {"metrics": {"time_to_first_token": {"value": 30.0, "unit": "ms"}}, "error": None}
    records: list[dict[str, Any]] = [
        {**whole, "metadata": {"request_start_ns": 1_000_000_000, "request_end_ns": 2_000_000_000}},
        {"error": {"code": 500}, "metadata": {"request_start_ns": 1_500_000_000, "request_end_ns": 3_000_000_000}},
    ]
    assert serving_traces.load_of(records) == Load([30.0], 2, 2.0, 1)


def test_a_cut_of_mooncakes_trace_has_whole_conversations_a_64th_as_long() -> None:
    def line(at: int, *blocks: int) -> dict[str, Any]:
        tokens = 512 * len(blocks) - 200
        return {"timestamp": at, "input_length": tokens, "output_length": 65, "hash_ids": [0, *blocks]}

    lines = [line(0, 7), line(1_000, 1), line(3_000, 1, 2), line(5_000, 8), line(9_000, 1, 2, 3), line(9_500, 8)]
    cut = serving_traces.mooncake_cut(lines, requests=3, seconds=4.0)
    assert [one["hash_ids"] for one in cut] == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert [one["timestamp"] for one in cut] == [0, 1_000, 4_000]
    assert [one["input_length"] for one in cut] == [5, 13, 21]
    assert {one["output_length"] for one in cut} == {2}


def test_a_coding_session_keeps_the_blocks_that_its_prompts_share() -> None:
    def line(trace: str, tokens: int, keep: int, runs: list[list[int]], depth: int = 0) -> dict[str, Any]:
        return {"trace": trace, "t": 64.0, "depth": depth, "in": tokens, "out": 100, "keep": keep, "runs": runs}

    lines = [
        line("short", 64, 0, [[1, 1]]),
        line("session", 64 * 128, 0, [[1, 128]]),
        line("session", 64 * 192, 64, [[500, 128]]),
        line("agents", 64, 0, [[1, 1]]),
        line("agents", 64, 0, [[1, 1]], depth=1),
    ]
    (session,) = serving_traces.weka_cut(lines, sessions=5, requests=2, seconds=2.0)
    assert (session["id"], session["block_size"]) == ("session", 64)
    assert [one["hash_ids"] for one in session["requests"]] == [[64, 128], [64, 563, 627]]
    assert [(one["in"], one["out"], one["t"]) for one in session["requests"]] == [(128, 2, 1.0), (192, 2, 1.0)]
    assert not serving_traces.weka_cut(lines, sessions=5, requests=2, seconds=0.5)


def test_a_row_has_each_rounds_ratio_to_the_engine_with_enough_memory() -> None:
    kept = {"leases_at_rest": 0.0, "memory_bytes": 3.0}
    found = row("kvpact", rounds(20.0, 90.0, held=kept), rounds(10.0, 30.0))
    assert (found["requests"], found["failed"], found["p99_ratio"]) == (22, 2, 2.5)
    assert (found["p50_ms"], found["p50_ms_q1"], found["p50_ms_q3"]) == (55.0, 20.0, 90.0)
    assert (found["requests_per_s"], found["hits"]) == (2.0, 0.5)
    assert kept.items() <= found.items()
    assert "p99_ratio" not in row("kvpact", rounds(20.0), [])


def test_what_kvpact_holds_stands_beside_its_bounds(tmp_path: Path) -> None:
    run = Run(tmp_path, tmp_path, {}, "", EngineProcess, 0, 64 * MIB)
    stats = {"leases_held": 0.0, 'held_blocks{tier="memory"}': 3.0, 'capacity_blocks{tier="memory"}': 4.0}
    assert held({}, tmp_path, run, MIB) == {}
    assert held(stats, tmp_path, run, MIB) == {
        "leases_at_rest": 0.0,
        "memory_bytes": 3 * MIB,
        "memory_bound": 4 * MIB,
    }
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "slab").write_bytes(bytes(2 * MIB))
    with_disk = held(stats, tmp_path, run, MIB)
    assert with_disk["disk_bytes"] >= 2 * MIB
    assert with_disk["disk_bound"] == 128 * MIB


def test_a_server_is_started_as_a_user_does_it(tmp_path: Path) -> None:
    transfer = {"kv_connector": "PactConnector"}
    settings = EngineSettings(tmp_path / "model", transfer, {"enforce_eager": True, "max_num_seqs": 8})
    words = serve_command(settings, tmp_path / "chat.jinja")
    assert words[:6] == [sys.executable, "-P", "-m", "kvpact.cli.vllm_command", "serve", str(tmp_path / "model")]
    assert words[words.index("--max-num-seqs") + 1] == "8"
    assert json.loads(words[words.index("--kv-transfer-config") + 1]) == transfer
    assert "--enforce-eager" in words
    assert not {"--disable-log-stats", "--no-disable-log-stats", "--model"} & set(words)


def test_the_clients_word_when_it_fails_is_its_last_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os; print(os.environ['WORD']); print('why'); raise SystemExit(3)"]
    with pytest.raises(RuntimeError, match="the client ended with 3: why"):
        serving_engines.run_client(command, tmp_path / "log", WORD="seen")
    assert (tmp_path / "log").read_text() == "seen\nwhy\n"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (lambda: serving_prefix.rows(prompts=2, prefixes=3), "--prefixes: 1 to --prompts, which is 2, not 3"),
        (lambda: serving_prefix.rows(peers=("nobody",)), "--peers: nobody is not one of small, kvpact, quarter"),
        (lambda: serving_prefix.rows(rounds=0), "--rounds: at least 1, not 0"),
        (lambda: serving_turns.rows(turns=1), "--turns: at least 2"),
        (lambda: serving_turns.rows(client=Path("/nowhere")), "--client: /nowhere has no benchmark_serving_multi_turn"),
        (lambda: serving_traces.rows(traces=("nothing",)), "--traces: nothing is not one of mooncake, weka"),
        (
            lambda: serving_traces.rows(data=Path("/nowhere"), aiperf_python=Path("python")),
            "--data: /nowhere/mooncake_conversation.jsonl: No such file or directory",
        ),
    ],
)
def test_what_a_user_got_wrong_is_one_line(asked: Callable[[], Any], says: str) -> None:
    with pytest.raises(SystemExit) as ended:
        list(asked())
    assert str(ended.value).startswith(says)


def test_prompts_of_the_trace_share_the_blocks_that_it_names() -> None:
    prompts = read_prompts(40)
    for prompt in prompts:
        assert len(prompt.tokens) > len(prompt.blocks) * BLOCK == prompt.loadable
        alike = next(other for other in prompts if other.blocks[:1] == prompt.blocks[:1])
        assert alike.tokens[:BLOCK] == prompt.tokens[:BLOCK]
    assert len({tuple(prompt.tokens) for prompt in prompts}) == 40


def test_pools_under_round_robin_are_simulated_block_by_block() -> None:
    prompts = [Prompt(blocks, [0] * (2 * BLOCK + 1)) for blocks in ((1, 2), (1, 3), (1, 2))]
    tokens = 3 * (2 * BLOCK + 1)
    assert Sizes.of(prompts) == Sizes(distinct=3, longest=2)
    assert simulated(prompts, 1, 3) == pytest.approx(3 * BLOCK / tokens)
    assert simulated(prompts, 1, 2) == pytest.approx(2 * BLOCK / tokens)
    assert simulated(prompts, 2, 4) == pytest.approx(2 * BLOCK / tokens)
