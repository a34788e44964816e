"""vLLM's own connectors run unchanged under kvpact's scheduler class: same questions, same loads, same tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.vllm import scheduler
from kvpact_testkit.results import ConformanceReport, as_text
from kvpact_testkit.vllm import offloading, simple_offloading
from kvpact_testkit.vllm.compat import EngineSettings
from kvpact_testkit.vllm.driver import VllmDriver
from kvpact_testkit.vllm.engine import EngineDied, VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, prompt
from kvpact_testkit.vllm.model_groups import CHUNKED, GEMMA
from kvpact_testkit.vllm.random_ops import act
from kvpact_testkit.vllm.releases import installed_release

SCHEDULER = "kvpact.vllm.scheduler.pact_scheduler"
"""The scheduler class under which they run, and with which vLLM's own is compared."""

VLLM = "vllm.distributed.kv_transfer.kv_connector.v1"


@dataclass(frozen=True)
class Subject:
    """One of vLLM's connectors."""

    connector: str
    config: Mapping[str, Any]
    whole_prompts_only: bool = False
    """It dies when a prompt comes in pieces or comes back: an example, as `docs/internals/findings.md` shows."""

    def transfer(self, folder: Path) -> dict[str, Any]:
        module, _, name = self.connector.partition(":")
        config = {key: str(folder) if value == "{folder}" else value for key, value in self.config.items()}
        return {"kv_connector": name, "kv_connector_module_path": module, "kv_connector_extra_config": config}


SIMPLE = "kvpact_testkit.vllm.simple_offloading:MemcpySimpleCPUOffloadConnector"
SUBJECTS = {
    "example": Subject(f"{VLLM}.example_connector:ExampleConnector", {"shared_storage_path": "{folder}"}, True),
    "offloading": Subject(f"{VLLM}.offloading_connector:OffloadingConnector", offloading.MEMORY),
    "simple, eager": Subject(SIMPLE, simple_offloading.MEMORY),
    "simple, lazy": Subject(SIMPLE, simple_offloading.LAZY),
}


@contextmanager
def engine(subject: Subject, scheduler: str, folder: Path, **settings: Any) -> Iterator[VllmEngine]:
    """The connector under this scheduler, by default vLLM's own; in the end every read was right."""
    folder.mkdir(exist_ok=True)
    shape = EngineSettings(block_size=BLOCK, scheduler=scheduler, **settings)
    started = VllmEngine(shape, subject.transfer(folder), lambda line: None)
    yield started
    assert started.finish()
    assert started.drain()
    assert not started.observed.wrong_slots
    for name in started.requests:
        said, whole = started.observed.outputs[name], started.expected(name)
        assert said == whole[: len(said)]
    assert started.held_blocks == 0
    started.close()


Play = Callable[[VllmEngine], None]


def stored_and_loaded(started: VllmEngine) -> None:
    """Prompts are computed, forgotten by vLLM, and asked for again, one after the other and all at once."""
    for number in range(3):
        started.add(f"first{number}", prompt(number, 6))
        assert started.finish()
    assert started.drain()
    assert started.forget_computed()
    for number in range(3):
        started.add(f"again{number}", prompt(number, 6))
        assert started.finish()
    assert started.drain()
    assert started.forget_computed()
    for number in range(3):
        started.add(f"together{number}", prompt(number, 6), max_tokens=5)
    assert started.finish()


def cancelled_and_delayed(started: VllmEngine) -> None:
    """Requests end while they wait, and while their load or their store is under way."""
    started.add("first", prompt(1, 8))
    assert started.finish()
    assert started.drain()
    assert started.forget_computed()
    started.report_delay = [3]
    for number in range(4):
        started.add(f"r{number}", prompt(1, 8), max_tokens=12)
        started.step()
        started.abort(f"r{number}", during_step=number % 2 == 0)
        started.step(number)
    started.add("last", prompt(1, 8))


def short_of_blocks(started: VllmEngine) -> None:
    """Running requests are preempted, heads of the queue are asked about again and again, and not taken."""
    for number in range(4):
        started.add(f"first{number}", prompt(number, 4), max_tokens=40)
    assert started.finish()
    assert started.observed.preemptions
    started.evict_computed()
    for number in range(6):
        started.add(f"again{number}", prompt(number % 4, 4), max_tokens=40)


def everything_at_once(started: VllmEngine) -> None:
    """Arrivals, cancellations, resets, pauses and delays."""
    for seed in range(1, 120):
        act(started, seed * 7919)
    started.pause(False)


PLAYS: Mapping[str, tuple[Play, Mapping[str, Any]]] = {
    "stored and loaded": (stored_and_loaded, {"num_blocks": 65}),
    "cancelled and delayed": (cancelled_and_delayed, {"num_blocks": 65}),
    "short of blocks": (short_of_blocks, {"num_blocks": 21}),
    "overlapping steps": (everything_at_once, {"num_blocks": 41, "overlap": True, "chunk": 3 * BLOCK}),
    "by priority": (everything_at_once, {"num_blocks": 41, "by_priority": True}),
    "several groups": (stored_and_loaded, {"num_blocks": 101, "groups": GEMMA}),
}
"""Play -> what happens, and the engine's settings."""

OF_WHOLE_PROMPTS = {"stored and loaded", "cancelled and delayed"}
MATRIX = [
    (name, play)
    for name, subject in SUBJECTS.items()
    for play in PLAYS
    if play in OF_WHOLE_PROMPTS or not subject.whole_prompts_only
]


VLLM_DIES = ("offloading", "by priority")
"""In this play vLLM 0.32's OffloadingConnector fails an assertion of its own (`is_store`, at a preemption)."""


def play(subject: Subject, scheduler: str, folder: Path, name: str) -> tuple[Any, ...]:
    """Everything that passes between the scheduler and the connector, what users get, and how the engine ends."""
    happens, settings = PLAYS[name]
    end = "well"
    try:
        with engine(subject, scheduler, folder, **settings) as started:
            observed = started.observed
            happens(started)
    except EngineDied as death:
        end = str(death)
    return (
        end,
        observed.probes,
        observed.commits,
        observed.received,
        observed.outputs,
        observed.finished,
        observed.preemptions,
        observed.steps,
    )


@pytest.mark.parametrize(("name", "what"), MATRIX, ids=str)
def test_the_connector_is_asked_answers_and_loads_as_under_vllms_own_scheduler(
    name: str, what: str, tmp_path: Path
) -> None:
    own = play(SUBJECTS[name], "", tmp_path / "own", what)
    assert play(SUBJECTS[name], SCHEDULER, tmp_path / "ours", what) == own
    end, probes, commits, *_ = own
    assert probes
    if (name, what) != VLLM_DIES:
        assert end == "well"
    if what == "stored and loaded" and "lazy" not in name:
        assert len(commits) >= 6, "each prompt is loaded twice"


def test_the_scheduler_is_the_class_that_is_named_and_vllms_own_without_a_name(tmp_path: Path) -> None:
    for overlap, expected in ((False, scheduler.KvpactScheduler), (True, scheduler.KvpactAsyncScheduler)):
        with engine(SUBJECTS["simple, eager"], SCHEDULER, tmp_path, overlap=overlap) as started:
            assert isinstance(started.scheduler, expected)
        with engine(SUBJECTS["simple, eager"], "", tmp_path, overlap=overlap) as started:
            assert type(started.scheduler).__module__.startswith("vllm.")


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_scheduler_half_is_vllms_own(name: str, tmp_path: Path) -> None:
    """Of the third connector the worker half is replaced, because vLLM's needs a GPU; of the second, the copies."""
    with engine(SUBJECTS[name], SCHEDULER, tmp_path) as started:
        connector = started.connector
        kind = next(one for one in type(connector).__mro__ if one.__module__.startswith("vllm."))
        changed = {
            method for method, _ in inspect.getmembers(type(connector), inspect.isfunction) if method in vars(kind)
        } - {method for method in vars(kind) if getattr(type(connector), method) is getattr(kind, method)}
        assert changed <= {"__init__"}
        if manager := getattr(connector, "scheduler_manager", None):
            assert type(manager).__module__ == "vllm.v1.simple_kv_offload.manager"


SCENARIOS = (
    "stores_and_loads",
    "h01_lookups_that_are_not_committed",
    "h02_repeated_lookups_acquire_nothing",
    "h04_fewer_tokens_are_committed",
    "cancelled_while_blocked",
    "overtaken_by_priority",
    "paused_with_a_promise",
    "preempted_after_a_load",
    "prompt_exceeds_the_step",
    "reports_come_late",
    "h07_cancelled_while_its_load_runs",
    "reset_while_requests_run",
)


def verdicts(report: ConformanceReport) -> dict[str, tuple[str, ...]]:
    """Scenario -> its verdict and the properties that are broken in it."""
    return {one.name: (one.verdict, *(broken.broken for broken in one.violations)) for one in report.checks}


@pytest.mark.parametrize(
    ("name", "scenarios"),
    [
        ("simple, eager", SCENARIOS),
        *(pytest.param(name, SCENARIOS, marks=pytest.mark.proof) for name in ("example", "offloading", "simple, lazy")),
        *(pytest.param(name, None, marks=pytest.mark.soak) for name in ("offloading", "simple, eager")),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else str(value),
)
def test_the_drivers_scenarios_end_alike_under_both_schedulers(name: str, scenarios: Any) -> None:
    subject = SUBJECTS[name]
    own, ours = (
        VllmDriver(subject.connector, subject.config, timeout=10.0, scheduler=one).run(scenarios)
        for one in ("", SCHEDULER)
    )
    assert verdicts(ours) == verdicts(own), as_text(ours)


def test_lazy_offloading_of_vllm_never_rests_where_more_lies_free_than_host_memory_holds(tmp_path: Path) -> None:
    """Each store pushes out another block that is free too. The example `simple_cpu_offload` looks no farther than host
    memory reaches. Reports come two steps late, as from a GPU."""
    with_nine_blocks = Subject(SIMPLE, {**simple_offloading.LAZY, "cpu_bytes_to_use": 9 * 4096})
    started = VllmEngine(EngineSettings(num_blocks=41), with_nine_blocks.transfer(tmp_path), lambda line: None)
    started.report_delay = [2]
    for number in range(6):
        started.add(f"r{number}", prompt(number, 5))
        assert started.finish()
    assert not started.drain(seconds=5.0)
    started.close()


@pytest.mark.skipif(installed_release() >= "0.33", reason="vLLM 0.33 asks host memory for nothing in this case")
def test_vllms_simple_offloading_loads_too_little_of_a_chunk_that_begins_after_a_local_hit(tmp_path: Path) -> None:
    """It counts chunks from the end of the hit, attention counts them from the prompt's first token. The example
    `simple_cpu_offload` counts as attention does: `test_chunks_are_counted_from_the_prompts_first_token_...`."""
    tokens = prompt(1, 11)
    started = VllmEngine(
        EngineSettings(num_blocks=101, groups=CHUNKED), SUBJECTS["simple, eager"].transfer(tmp_path), lambda line: None
    )
    started.add("stored", tokens)
    assert started.finish()
    assert started.drain()
    assert started.forget_computed()
    started.add("head", tokens[: 6 * BLOCK + 3])
    assert started.finish()
    started.add("all", tokens)
    assert started.finish()
    assert {slot.request_id for slot in started.observed.wrong_slots} == {"all"}
    started.close()
