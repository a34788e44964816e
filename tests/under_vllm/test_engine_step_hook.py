"""`before_update_states` on a real engine, through `worker_cls`, for connectors that have nothing to do with kvpact.

They count nothing: what a step skipped is told and counted by `kvpact.vllm.scheduler`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from step_answers import Seen

from engines import BLOCK, kvpact_transfer_config, prompt
from forked_engine import ForkedEngine
from kvpact_testkit.demo.engine import EngineProcess, EngineSettings
from kvpact_testkit.demo.messages import Output
from polling import until
from scene_host import SceneHost

HERE = Path(__file__).parent
KV_BLOCKS = 10
"""The engine's blocks: two requests of four fit and cannot both grow (the pool keeps one block for itself)."""


class StepEngine:
    """A real engine of two ranks whose connector answers on the worker, and what happened inside of it."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.control = directory
        transfer = {
            "kv_connector": "StepConnector",
            "kv_connector_module_path": "step_connector",
            "kv_role": "kv_both",
        }
        arguments = {
            "worker_cls": "kvpact.vllm.worker.KvpactWorker",
            "scheduler_cls": "kvpact.vllm.scheduler.pact_scheduler",
            "tensor_parallel_size": 2,
            "num_gpu_blocks_override": KV_BLOCKS,
            "max_model_len": 8 * BLOCK,
            "max_num_batched_tokens": 4 * BLOCK,
        }
        environment = {
            "STEP_CONTROL": str(directory),
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        }
        self.process = ForkedEngine(EngineSettings(model, transfer, arguments, environment), directory / "log")

    counted_hits = 0
    """What vLLM added to its counter of external hits for the last question, in tokens."""

    def ask(self, *prompts: list[int], max_tokens: int = 4, faults: str = "", local: bool = False) -> list[Output]:
        """Answers to all prompts in one batch, without the engine's own prefix cache unless `local`."""
        if not local:
            self.process.reset_prefix_cache()
        (self.control / "faults").write_text(faults)
        (self.control / "said").write_text("")
        before = self._hits
        outputs = self.process.generate(prompts, max_tokens=max_tokens, together=True)
        self.counted_hits = self._hits - before
        return outputs

    @property
    def _hits(self) -> int:
        return int(self.process.metrics()["vllm:external_prefix_cache_hits"])

    def said(self, name: str, rank: int = 0) -> list[Any]:
        """What happened under this name since the last question, on one rank where that matters."""
        lines = [json.loads(line) for line in (self.control / "said").read_text().splitlines()]
        return [line[name] for line in lines if name in line and line.get("rank", rank) == rank]


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StepEngine]:
    """One engine for all; ask it prompts of your own."""
    engine = StepEngine(tiny_model, tmp_path_factory.mktemp("step"))
    try:
        engine.process.wait_ready()
        assert len(engine.said("bound")) == 2, "both ranks' connectors are told at start that they will be asked"
        yield engine
    finally:
        engine.process.kill()  # nothing of it is to be kept


def without_decoding(computed: list[int]) -> list[int]:
    """The steps that computed parts of prompts."""
    return [tokens for tokens in computed if tokens > 1]


def test_what_the_worker_supplies_is_not_computed_and_the_answer_is_that_of_a_local_hit(engine: StepEngine) -> None:
    tokens = prompt(901, 3)
    (first,) = engine.ask(tokens)
    assert without_decoding(engine.said("computed")) == [3 * BLOCK + 17]
    (hit,) = engine.ask(tokens)
    assert without_decoding(engine.said("computed")) == [17]
    assert without_decoding(engine.said("computed", rank=1)) == [17]
    assert engine.said("hits") == [[[3 * BLOCK], [3 * BLOCK]]], "both ranks tell the scheduler, once"
    assert (first.cached_tokens, hit.cached_tokens, engine.counted_hits) == (0, 3 * BLOCK, 3 * BLOCK)
    (local,) = engine.ask(tokens, local=True)
    assert (local.cached_tokens, engine.counted_hits) == (3 * BLOCK, 0)
    assert hit.same_answer(local)
    assert hit.tokens == first.tokens


def test_the_answer_depends_on_what_was_supplied(engine: StepEngine) -> None:
    tokens = prompt(902, 3)
    (first,) = engine.ask(tokens)
    (spoilt,) = engine.ask(tokens, faults="spoil")
    assert spoilt.logprobs != first.logprobs, "the supplied blocks were not read"
    (again,) = engine.ask(tokens)
    assert again.tokens == first.tokens


@pytest.mark.parametrize(("claim", "computed"), [(1, 400), (200, 201), (384, 17)])
def test_any_number_of_tokens_can_be_supplied(engine: StepEngine, claim: int, computed: int) -> None:
    tokens = prompt(903, 3)
    (first,) = engine.ask(tokens, faults="off")
    assert without_decoding(engine.said("computed")) == [401]
    (hit,) = engine.ask(tokens, faults=f"claim={claim}")
    assert without_decoding(engine.said("computed")) == [computed]
    assert hit.cached_tokens == engine.counted_hits == 401 - computed
    assert hit.tokens == first.tokens


def test_at_least_one_token_is_computed(engine: StepEngine) -> None:
    tokens = prompt(904, 3, tail=0)
    (first,) = engine.ask(tokens)
    (hit,) = engine.ask(tokens)
    assert engine.said("hits") == [[[3 * BLOCK - 1]] * 2]
    assert set(engine.said("computed")) == {1}
    assert hit.tokens == first.tokens


def test_every_part_of_a_long_prompt_is_served(engine: StepEngine) -> None:
    tokens = prompt(905, 6)
    (first,) = engine.ask(tokens)
    assert without_decoding(engine.said("computed")) == [4 * BLOCK, 2 * BLOCK + 17]
    (hit,) = engine.ask(tokens)
    assert engine.said("hits") == [[[4 * BLOCK - 1]] * 2, [[2 * BLOCK]] * 2]
    assert hit.cached_tokens == engine.counted_hits == 6 * BLOCK - 1
    assert without_decoding(engine.said("computed")) == [17]
    assert hit.tokens == first.tokens


def test_h43_ranks_skip_what_all_of_them_have(engine: StepEngine) -> None:
    tokens = prompt(906, 3)
    (first,) = engine.ask(tokens)
    (hit,) = engine.ask(tokens, faults="second_rank=130")
    assert engine.said("hits") == [[[130], [130]]]
    assert hit.cached_tokens == engine.counted_hits == 130, "of both ranks together once"
    assert without_decoding(engine.said("computed")) == [271]
    assert hit.tokens == first.tokens


def test_h13_a_hook_that_fails_costs_its_hits(engine: StepEngine) -> None:
    tokens = prompt(907, 3)
    (first,) = engine.ask(tokens)
    (again,) = engine.ask(tokens, faults="raise")
    assert without_decoding(engine.said("computed")) == [401]
    assert engine.said("hits") == []
    assert again.cached_tokens == engine.counted_hits == 0
    assert again.same_answer(first)


@pytest.mark.proof
def test_h90_preempted_requests_come_back_and_are_served_again(engine: StepEngine) -> None:
    prompts = [prompt(910 + number, 3, tail=100) for number in range(4)]
    alone = [engine.ask(tokens, max_tokens=60)[0] for tokens in prompts]
    together = engine.ask(*prompts, max_tokens=60)
    assert engine.said("preempted"), "the scene is too easy"
    assert len(engine.said("hits")) > 2
    hits = sum(output.cached_tokens for output in together)
    assert hits == engine.counted_hits
    assert 3 * 3 * BLOCK < hits <= 4 * 3 * BLOCK, "a first part that ends within a block is computed, not supplied"
    for output, expected in zip(together, alone, strict=True):
        assert output.finish_reason == "length"
        assert len(output.tokens) == 60
        assert output.tokens == expected.tokens


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SceneHost]:
    with SceneHost(tmp_path_factory.mktemp("scenes") / "log", ("step_scenes",)) as host:
        yield host


@pytest.fixture
def play(host: SceneHost, tiny_model: Path, tmp_path: Path) -> Callable[..., Seen]:
    """Runs the scene on an engine in one process with these arguments."""

    def run(**arguments: Any) -> Seen:
        seen: Seen = host.run("step_scenes:hits", tiny_model, tmp_path, arguments)
        return seen

    return run


@pytest.mark.parametrize("overlap", [False, True], ids=["one step at a time", "asynchronous scheduling"])
def test_h70_hits_are_told_and_counted_and_after_a_preemption_apart(play: Callable[..., Seen], overlap: bool) -> None:
    seen = play(async_scheduling=overlap)
    assert seen.scheduler == ("KvpactAsyncScheduler" if overlap else "KvpactScheduler")
    assert seen.told == [0, 3 * BLOCK, 3 * BLOCK]
    assert seen.hits == 2 * 3 * BLOCK
    assert seen.hits_by_source == {"external_unspecified": seen.hits}
    assert seen.hits_again == (3 + 12) * BLOCK, "of the two requests that were preempted"
    assert seen.wanted - seen.computed == seen.hits + seen.hits_again
    assert seen.answers[0] == seen.answers[1], "the hits are right"


def test_inside_multi_connector_the_one_with_the_hook_is_asked_and_its_hits_are_counted_once(
    play: Callable[..., Seen],
) -> None:
    here: dict[str, Any] = {"kv_connector_module_path": "step_connector", "kv_role": "kv_both"}
    connectors = [{**here, "kv_connector": "Bystander"}, {**here, "kv_connector": "StepConnector"}]
    extra = {"connectors": connectors}
    seen = play(
        kv_transfer_config={"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    )
    assert seen.told == [0, 3 * BLOCK, 3 * BLOCK]
    assert seen.hits == 2 * 3 * BLOCK
    assert seen.hits_by_source == {"external_unspecified": seen.hits}
    assert seen.hits_again == (3 + 12) * BLOCK, "of the two requests that were preempted"
    assert seen.wanted - seen.computed == seen.hits + seen.hits_again
    assert seen.answers[0] == seen.answers[1], "the hits are right"


def test_on_vllms_own_scheduler_hits_are_neither_told_nor_counted(play: Callable[..., Seen]) -> None:
    """As docs/internals/worker-hook.md says: the connector would have to count them itself."""
    seen = play(scheduler_cls=None)
    assert seen.scheduler == "Scheduler"
    assert seen.told == [0, 0, 0]
    assert seen.hits == seen.hits_again == 0
    assert seen.wanted - seen.computed == (2 * 3 + 3 + 12) * BLOCK
    assert seen.answers[0] == seen.answers[1]


@pytest.mark.parametrize("overlap", [False, True], ids=["one step at a time", "asynchronous scheduling"])
@pytest.mark.parametrize("room", [4 * BLOCK, 16 * BLOCK], ids=["no room", "room"])
def test_what_steps_skipped_is_budget_again_where_more_tokens_fit_than_are_scheduled(
    play: Callable[..., Seen], room: int, overlap: bool
) -> None:
    """One request is served beside a long one that is computed in parts of the step."""
    seen = play(max_num_scheduled_tokens=4 * BLOCK, max_num_batched_tokens=room, async_scheduling=overlap)
    assert max(seen.steps) == 4 * BLOCK + (3 * BLOCK if room > 4 * BLOCK else 0)
    assert seen.told == [0, 3 * BLOCK, 3 * BLOCK]


EXAMPLES = HERE.parents[1] / "examples"


@pytest.mark.soak
def test_vllms_example_connector_works_when_it_is_asked_on_the_worker(
    tiny_model: Path, tmp_path: Path, start_engine: Callable[..., EngineProcess]
) -> None:
    transfer = {
        "kv_connector": "StepExampleConnector",
        "kv_connector_module_path": "step_hook_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "store")},
    }
    engine = start_engine(
        transfer,
        arguments={
            "worker_cls": "kvpact.vllm.worker.KvpactWorker",
            "scheduler_cls": "kvpact.vllm.scheduler.pact_scheduler",
        },
        environment={"PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])},
    )

    def ask(tokens: list[int], local: bool = False) -> Output:
        if not local:
            engine.reset_prefix_cache()
        return engine.generate([tokens])[0]

    tokens = prompt(931, 3)
    first, hit, local = ask(tokens), ask(tokens), ask(tokens, local=True)
    assert first.tokens == hit.tokens
    assert (first.cached_tokens, hit.cached_tokens, local.cached_tokens) == (0, 3 * BLOCK, 3 * BLOCK)
    assert hit.same_answer(local), "the same 17 tokens were computed, behind the same 384"
    files = sorted((tmp_path / "store").glob("*/*.safetensors"))
    assert len(files) == 4, "one file a layer, of one prompt"
    for file in files:
        content = bytearray(file.read_bytes())
        content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
        file.write_bytes(content)
    spoilt = ask(tokens)
    assert spoilt.logprobs != first.logprobs, "the files are not what the answer was made of"


@pytest.mark.soak  # proven on the newest release: test_engine_newest.py
@pytest.mark.both_cores
def test_h70_two_ranks_of_kvpact_find_in_a_shared_tier_what_the_step_is_to_compute(
    tmp_path: Path, start_engine: Callable[..., EngineProcess]
) -> None:
    (tmp_path / "shared").mkdir()
    transfer = kvpact_transfer_config(
        memory="2MiB",  # four blocks: of the first prompt the second one leaves one block
        tiers=[f"dir://{tmp_path}/shared?capacity=1GiB"],
        match_at="step",
        step_deadline="20s",
        stats_file=str(tmp_path / "stats.json"),
    )
    engine = start_engine(
        transfer,
        arguments={
            "worker_cls": "kvpact.vllm.worker.KvpactWorker",
            "scheduler_cls": "kvpact.vllm.scheduler.KvpactScheduler",
            "tensor_parallel_size": 2,
        },
    )

    stored = 0

    def ask(tokens: list[int], local: bool = False) -> Output:
        nonlocal stored
        if not local:  # what is being written keeps its slots, and there are only four
            until(lambda: engine.stats().get('written_blocks{tier="directory"}', 0) == stored, 30.0, every=0.05)
            engine.reset_prefix_cache()
        output = engine.generate([tokens])[0]
        stored += 0 if output.cached_tokens else len(tokens) // BLOCK
        return output

    prompts = [prompt(941, 3), prompt(942, 3)]
    first = [ask(tokens) for tokens in prompts]
    assert [output.cached_tokens for output in first] == [0, 0]
    for _ in range(2):
        for tokens, expected in zip(prompts, first, strict=True):
            hit, local = ask(tokens), ask(tokens, local=True)
            assert hit.cached_tokens == local.cached_tokens == 3 * BLOCK
            assert hit.same_answer(local)
            assert hit.tokens == expected.tokens
    until(lambda: ask(prompt(943, 1)) and engine.stats().get("step_hits") == 4, 30.0)
    stats = engine.stats()
    assert stats["loaded_tokens"] == stats["used_tokens"] == 4 * 3 * BLOCK
    assert stats['read_blocks{tier="directory"}'] == 4 * 2, "the third was in memory"
    assert stats["hook_errors"] == 0
