"""The demonstration: its judgement on made-up readings, its texts, and a small run of it on real engines."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from engines import prompt
from kvpact_testkit.demo.engine import (
    CORES,
    EngineError,
    EngineProcess,
    EngineSettings,
    loading_on_all_cores,
    session_members,
)
from kvpact_testkit.demo.messages import Output
from kvpact_testkit.demo.phases import (
    COLD,
    COLD_KVPACT,
    LOCAL_HIT,
    PHASES,
    WARM_DISK,
    WARM_MEMORY,
    ColdCost,
    Plan,
    Reading,
    Results,
    run_phases,
)
from kvpact_testkit.demo.report import judge, show
from kvpact_testkit.demo.text import QUESTIONS, corpus, documents
from polling import until

PROMPT_TOKENS = 300
REUSABLE = 256
SECONDS = {COLD: 1.0, LOCAL_HIT: 0.03, COLD_KVPACT: 1.02, WARM_MEMORY: 0.05, WARM_DISK: 0.1}


def answer(phase: str, *, token: int = 7, logprob: float = -1.5, cached: int | None = None) -> Output:
    is_cold = phase in (COLD, COLD_KVPACT)
    return Output(
        tokens=(token,),
        logprobs=(((token, logprob),),),
        finish_reason="length",
        cached_tokens=(0 if is_cold else REUSABLE) if cached is None else cached,
        first_token_seconds=SECONDS[phase],
    )


def results(*, leases_held: int = 0, used: int = 4 * REUSABLE, spared: float = 9.25, **changed: Output) -> Results:
    """Two prompts through all phases, all well; `changed` replaces the second answer of the phase so named."""
    readings = [
        Reading(
            phase,
            number,
            PROMPT_TOKENS,
            changed.get(phase.replace(" ", "_"), answer(phase)) if number else answer(phase),
        )
        for phase in PHASES
        for number in range(2)
    ]
    most = 4 * REUSABLE
    counts = {"promised": most, "committed": most, "loaded": most, "used": used}
    costs = [ColdCost(prompts=1.5, kvpact=0.01), ColdCost(prompts=0.5, kvpact=0.03, pages=0.01)]
    return Results(
        readings,
        block_size=128,
        counts=counts,
        leases_held=leases_held,
        model="tiny",
        cold_costs=costs,
        spared_seconds=(12.5, spared),
    )


def test_a_run_without_fault_passes_and_names_its_figures() -> None:
    report = judge(results())
    assert report.failures == []
    assert report.identical
    assert report.cold_overhead == pytest.approx(0.02)
    assert report.cold_cpu_share == pytest.approx(0.04 / 2.0)
    by_name = {phase.name: phase for phase in report.phases}
    assert list(by_name) == list(PHASES)
    assert by_name[WARM_MEMORY].speedup == pytest.approx(20)
    assert by_name[WARM_MEMORY].prompt_tokens == 2 * PROMPT_TOKENS
    assert by_name[WARM_MEMORY].reusable_tokens == by_name[WARM_MEMORY].cached_tokens == 2 * REUSABLE


@pytest.mark.parametrize(("seconds", "expected"), [(0.5, 8), (1.7, 8), (6.0, 5), (18.0, 2), (600.0, 2)])
def test_a_slow_machine_answers_fewer_prompts(seconds: float, expected: int) -> None:
    assert Plan().prompts_at(seconds) == expected


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"warm_from_memory": answer(WARM_MEMORY, token=8)}, "warm from memory: answers differ"),
        ({"warm_from_disk": answer(WARM_DISK, logprob=-1.5000001)}, "warm from disk: answers differ"),
        ({"cold_with_kvpact": answer(COLD_KVPACT, logprob=-1.4)}, "cold with kvpact: answers differ"),
        ({"warm_from_disk": answer(WARM_DISK, cached=128)}, "384 of 512 reusable tokens"),
        ({"cold_with_kvpact": answer(COLD_KVPACT, cached=128)}, "so it was not cold"),
        ({"leases_held": 1}, "1 leases are held"),
        ({"used": 4 * REUSABLE + 1}, "none may exceed the one before"),
        ({"used": 4 * REUSABLE - 1}, "the engine skipped"),
        ({"spared": 0.0}, "warm from disk: no second of prefill counts as spared"),
    ],
)
def test_each_fault_fails_the_run(changed: dict[str, Any], complaint: str) -> None:
    report = judge(results(**changed))
    assert len(report.failures) == 1
    assert complaint in report.failures[0]


def test_a_request_that_failed_alike_in_both_phases_is_no_identical_answer() -> None:
    failed = replace_reason(answer(WARM_MEMORY), "error")
    assert not judge(results(warm_from_memory=failed, local_prefix_hit=failed)).identical


def test_several_ranks_share_the_room_and_have_a_core_each(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 5})
    monkeypatch.delenv(CORES, raising=False)
    plan = Plan.for_this_machine(ranks=2)
    arguments = plan.engine_arguments()
    assert arguments["tensor_parallel_size"] == 2
    assert arguments["kv_cache_memory_bytes"] * 2 == plan.kv_cache_bytes
    assert plan.document_tokens < Plan().document_tokens
    two = EngineSettings(tiny_model, arguments=arguments)
    assert two.process_environment()[CORES] == "3|5"
    alone = EngineSettings(tiny_model, arguments=Plan().engine_arguments())
    assert alone.process_environment()[CORES] == "3"
    assert "tensor_parallel_size" not in alone.llm_arguments()
    monkeypatch.setenv(CORES, "7")
    assert [one.process_environment()[CORES] for one in (alone, two)] == ["7", "3|5"], "the user chose for one rank"


def replace_reason(output: Output, reason: str) -> Output:
    return Output(output.tokens, output.logprobs, reason, output.cached_tokens, output.first_token_seconds)


def test_the_report_is_one_json_object_and_one_table() -> None:
    report = judge(results(leases_held=2))
    figures = json.loads(json.dumps(asdict(report)))
    assert {"name", "prompt_tokens", "cached_tokens", "ttft_ms", "speedup"} <= set(figures["phases"][0])
    assert {"cold_overhead", "identical", "leases_held", "promised", "committed", "loaded", "used"} <= set(figures)
    screen = StringIO()
    slow = [
        replace(phase, prompt_tokens=65944, requests=2, ttft_ms=20861.1, ttft_ms_quartiles=(19e3, 22e3))
        for phase in report.phases
    ]
    show(replace(report, phases=slow), Console(file=screen, width=80))
    for shown in (
        *PHASES,
        "32,972",
        "20,861 ms",
        "19,000-22,000",
        "reference",
        "promised 1,024",
        "FAILED  2 leases",
        "takes 1.5% of a cold",
        "and 0.5% to take memory",
        "Prefill spared: 12.5 s, and 9.2 s after the restart.",
    ):
        assert shown in screen.getvalue()


def test_the_package_alone_has_text_enough_for_distinct_documents() -> None:
    text = corpus()
    assert "kvpact" in text
    pieces = list(documents(list(text.encode()), len(QUESTIONS), 12_000))
    assert all(len(piece) == 12_000 for piece in pieces)
    assert len({bytes(piece[:128]) for piece in pieces}) == len(QUESTIONS)


def test_too_short_a_text_is_refused_with_what_it_takes() -> None:
    with pytest.raises(ValueError, match="at least 108, not 50"):
        list(documents(range(50), 8, 100))


@pytest.mark.soak
@pytest.mark.engine
def test_an_engine_held_back_starts_when_told_answers_repeats_itself_and_leaves_nothing_behind(
    tiny_model: Path, tmp_path: Path
) -> None:
    with EngineProcess(EngineSettings(tiny_model), tmp_path / "engine.log", held=True) as engine:
        asked = prompt(1, blocks=3)
        cold, hit, again = (engine.generate([asked])[0] for _ in range(3))
        assert (cold.cached_tokens, hit.cached_tokens, again.cached_tokens) == (0, 384, 384)
        assert hit.same_answer(again)
        assert len(hit.tokens) == len(hit.logprobs) == 4
        assert hit.first_token_seconds > 0
        engine.reset_prefix_cache()
        assert engine.generate([asked])[0].cached_tokens == 0
        assert {"EngineCore", "Worker"} <= {name.partition("::")[2] for name in engine.processes().values()}
        engine.send_prompts([prompt(2, blocks=20)])
        engine.kill()
        assert engine.processes() == {}
        with pytest.raises(EngineError):
            engine.generate([asked])


@pytest.mark.engine
def test_an_engine_held_back_leaves_without_having_started(tiny_model: Path, tmp_path: Path) -> None:
    unused = EngineProcess(EngineSettings(tiny_model), tmp_path / "unused.log", held=True)
    pid = unused.pid
    unused.stop()
    assert session_members(pid) == {}
    assert "EngineCore" not in unused.log.read_text()


def test_a_worker_loads_on_all_cores_and_computes_on_its_own() -> None:
    everywhere = os.sched_getaffinity(0)
    home = {min(everywhere)}
    with subprocess.Popen(["sleep", "60"]) as worker:
        os.sched_setaffinity(worker.pid, home)
        name = "python -c from multiprocessing.spawn import spawn_main"
        engine: Any = SimpleNamespace(processes=lambda: {worker.pid: name})
        with loading_on_all_cores(engine):
            until(lambda: os.sched_getaffinity(worker.pid) == everywhere)
            name = "VLLM::Worker"
            until(lambda: os.sched_getaffinity(worker.pid) == home)
        name = "another life, that ends while it still loads"
        with loading_on_all_cores(engine):
            until(lambda: os.sched_getaffinity(worker.pid) == everywhere)
        assert os.sched_getaffinity(worker.pid) == home
        worker.kill()


@pytest.mark.soak  # in `make test`, test_engine_lives.py sees that nothing is left of killed engines
@pytest.mark.engine
def test_a_killed_parent_leaves_no_engine_behind_not_even_a_frozen_one(tiny_model: Path, tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from kvpact_testkit.demo.engine import EngineProcess, EngineSettings
engine = EngineProcess(EngineSettings(Path({str(tiny_model)!r})), Path({str(tmp_path / "engine.log")!r})).wait_ready()
print(engine.pid, flush=True)
with engine.frozen():
    os.kill(os.getpid(), signal.SIGKILL)
"""
    parent = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    until(lambda: not session_members(int(parent.stdout)))
    assert session_members(int(parent.stdout)) == {}


@pytest.mark.engine
def test_an_engine_that_cannot_start_says_why(start_engine: Callable[..., EngineProcess]) -> None:
    with pytest.raises(EngineError, match="block_size"):
        start_engine(arguments={"block_size": -3})


@pytest.mark.soak  # proven on the newest release: under_vllm/test_engine_newest.py
@pytest.mark.both_cores
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_small_run_on_real_engines_passes(tiny_model: Path, tmp_path: Path) -> None:
    plan = Plan(rounds=1, prompts=2, document_tokens=1024, group=1)
    before = set(Path("/dev/shm").glob("psm_*"))
    report = judge(run_phases(tiny_model, corpus(), tmp_path, plan, say=print))
    left = set(Path("/dev/shm").glob("psm_*")) - before  # vLLM's own; no other engine runs beside this proof
    until(lambda: not any(path.exists() for path in left))
    assert report.failures == []
    assert report.used >= 4 * 1024
    assert report.model.startswith("4 layers x hidden 256")


@pytest.mark.soak
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_small_run_with_two_ranks_passes(tiny_model: Path, tmp_path: Path) -> None:
    plan = Plan(rounds=1, prompts=2, document_tokens=1024, group=1, kv_cache_bytes=1 << 30, ranks=2)
    report = judge(run_phases(tiny_model, corpus(), tmp_path, plan, say=print))
    assert report.failures == []
    assert report.used >= 4 * 1024
