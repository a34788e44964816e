"""A real engine over a device that is played: what its late copies bring back is bit for bit the engine's own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from references import References
from spread import answers_apart

from engines import BLOCK, BLOCK_BY_BLOCK, kvpact_transfer_config, leases_when, prompt
from kvpact_testkit.demo.engine import EngineProcess
from kvpact_testkit.demo.messages import Output
from scene_host import SceneHost

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
BLOCKS = 3
FIRST = 3
"""Jobs of each kind that are checked, where it must be short."""


class Played:
    """Starts such engines, one after the other, over the same disk."""

    def __init__(self, start: Callable[..., EngineProcess], directory: Path, ranks: int) -> None:
        self._start, self._directory, self._ranks = start, directory, ranks
        self.log = directory / "log"
        self.log.mkdir()

    def engine(self, seed: int) -> EngineProcess:
        settings = kvpact_transfer_config(
            memory="16MiB",
            tiers=[f"disk://{self._directory / 'slabs'}?capacity=64MiB"],
            sync_load_budget="16MiB",
            stats_file=str(self._directory / f"stats-{seed}.json"),
        )
        path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        return self._start(
            settings | {"kv_connector": "PlayedConnector", "kv_connector_module_path": "played"},
            arguments={
                **BLOCK_BY_BLOCK,
                "tensor_parallel_size": self._ranks,
                "worker_cls": "kvpact.vllm.worker.KvpactWorker",
            },
            environment={
                "PLAYED_LOG": str(self.log),
                "PLAYED_SEED": str(seed),
                "PLAYED_FIRST": str(FIRST),
                "PYTHONPATH": path,
            },
        )

    @property
    def standing(self) -> str:
        return (self.log / "standing").read_text()


def lines(log: Path, file: str) -> list[str]:
    """That were written there."""
    path = log / file
    return path.read_text().split("\n")[:-1] if path.exists() else []


Right = Callable[[int, Output], bool]
"""Whether the answer to the prompt of this number is what the engine says with as much of it from its own cache."""


def ask(engine: EngineProcess, right: Right, numbers: range, cached: int) -> None:
    """Nothing comes from the engine's own cache, and `cached` tokens from kvpact."""
    for number in numbers:
        engine.reset_prefix_cache()
        (output,) = engine.generate([prompt(7000 + number, BLOCKS)], max_tokens=4)
        assert output.cached_tokens == cached
        assert right(number, output), number


@pytest.mark.soak  # the life of an engine with one group, below, has all of it
def test_answers_from_memory_and_from_disk_are_the_engines_own(
    start_engine: Callable[..., EngineProcess], references: References, tmp_path: Path
) -> None:
    def right(number: int, output: Output) -> bool:
        return references.agree(prompt(7000 + number, BLOCKS), output)

    played = Played(start_engine, tmp_path, 1)
    engine = played.engine(1)
    ask(engine, right, range(6), 0)
    saves = [line for line in lines(played.log, "jobs") if line.startswith("save")]
    assert saves[:FIRST] == ["save 1 checked"] * FIRST
    assert "save 1 believed" in saves
    assert played.standing == "OPEN"
    ask(engine, right, range(6), BLOCKS * BLOCK)
    assert played.standing == "PROVEN"
    loads = [line for line in lines(played.log, "jobs") if "load" in line]
    assert loads[:FIRST] == [f"load {BLOCKS} checked"] * FIRST, "requests wait for the checks of the first loads"
    assert loads[FIRST:] == [f"step load {BLOCKS} checked"] * FIRST, "and later steps for their own"
    ask(engine, right, range(4), BLOCKS * BLOCK)
    assert lines(played.log, "jobs").count(f"step load {BLOCKS} believed") == 4
    ask(engine, right, range(6, 9), 0)
    assert leases_when(engine, "saved_blocks", 9 * BLOCKS) == 0
    engine.stop()
    ask(played.engine(2), right, range(9), BLOCKS * BLOCK)
    assert lines(played.log, "wrong") == []


@pytest.mark.proof
def test_two_ranks_that_sleep_and_are_killed(start_engine: Callable[..., EngineProcess], tmp_path: Path) -> None:
    """They are put to sleep right after an answer, whose blocks are being saved; then their memory is elsewhere."""
    local: dict[int, Output] = {}

    def right(number: int, output: Output) -> bool:
        return output.same_answer(local[number])

    played = Played(start_engine, tmp_path, 2)
    engine = played.engine(5)
    for number in range(5):
        asked = [prompt(7000 + number, BLOCKS)]
        computed, local[number] = (*engine.generate(asked), *engine.generate(asked))
        assert [computed.cached_tokens, local[number].cached_tokens] == [0, BLOCKS * BLOCK]
        assert computed.tokens == local[number].tokens
    ask(engine, right, range(5), BLOCKS * BLOCK)
    assert played.standing == "PROVEN"
    (last,) = engine.generate([prompt(7005, BLOCKS)])
    engine.call("sleep", 1)
    engine.call("wake_up")
    ask(engine, right, range(5), BLOCKS * BLOCK)
    ask(engine, lambda _, output: output.tokens == last.tokens, range(5, 6), BLOCKS * BLOCK)
    assert played.standing == "OPEN", "what is known of copies is known of where the memory was"
    engine.generate([prompt(7006, BLOCKS)])
    ask(engine, right, range(5), BLOCKS * BLOCK)
    assert played.standing == "PROVEN"
    assert {f"load {BLOCKS} checked", f"step load {BLOCKS} checked", f"step load {BLOCKS} believed"} <= set(
        lines(played.log, "jobs")
    )
    assert leases_when(engine, "used_tokens", 16 * BLOCKS * BLOCK) == 0
    engine.kill()
    engine = played.engine(7)
    ask(engine, right, range(5), BLOCKS * BLOCK)
    assert leases_when(engine, "used_tokens", 5 * BLOCKS * BLOCK) == 0
    assert lines(played.log, "wrong") == []


# All that happens to an engine

NOTHING = dict.fromkeys(("leases", "loads", "saves", "protected blocks", "blocks", "errors"), 0)
"""What an engine holds when its last request has ended."""

FEW, MANY = 2, 5
"""Blocks of prompts; see `played_scenes`."""

STEP_LOADS = "3MiB"
"""That a step waits for: `FEW` blocks and no `MANY`."""

ROUNDING = 1e-5
AS_RIGHT, FAR = 4.0, 100.0
"""See `test_pressure`."""


@dataclass(frozen=True)
class Kind:
    """A model, and what an engine on it is."""

    model: str
    """Function of `model_families`; empty for the tiny Llama."""
    blocks: int
    """Of the engine. Two requests whose loads have ended must find one each in every KV cache group: else neither ever
    runs, with any connector."""
    first: int
    """Jobs of each kind that are checked."""
    slot_sizes: int = 1

    @property
    def arguments(self) -> dict[str, Any]:
        lora = {} if self.model else {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
        return {"num_gpu_blocks_override": self.blocks, **lora}


KINDS = {
    "one group": Kind("", 24, first=64),
    "windows": Kind("gemma_like", 25, first=8),
    "windows, slots of two sizes": Kind("gemma_of_two_sizes", 20, first=8, slot_sizes=2),
}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SceneHost]:
    modules = ("company_models", "model_families", "played_scenes")
    with SceneHost(tmp_path_factory.mktemp("played") / "log", modules) as host:
        yield host


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.soak if name == "windows" else pytest.mark.proof, id=name)
        for name, kind in KINDS.items()
    ],
)
def test_whatever_happens_answers_are_the_engines_own(
    host: SceneHost, tiny_model: Path, tmp_path: Path, kind: Kind
) -> None:
    """Cancelled, preempted, reset, asleep, with adapters, started anew; loads of `FEW` blocks are waited for by steps
    where vLLM can be told which blocks failed."""
    model, adapters = tiny_model, []
    if kind.model:
        model = host.run(f"model_families:{kind.model}", tmp_path / "model", tiny_model)
        time.sleep(0.2)  # an engine that begins within a tick of the clock after its files changed cannot trust them
    else:
        adapters = [host.run("company_models:make_adapter", tmp_path / f"{seed}", seed) for seed in (1, 2)]
    life = host.run("played_scenes:life", model, tmp_path, kind.first, STEP_LOADS, adapters, kind.arguments)
    assert lines(tmp_path / "log", "wrong") == []
    assert life.held == NOTHING
    assert life.slot_sizes == kind.slot_sizes

    assert [answer.cached_blocks for answer in life.asked] == [0] * len(life.asked)
    assert life.differing == []
    assert life.standings == ["PROVEN", "OPEN"], "awake, copies prove themselves again"
    jobs = lines(tmp_path / "log", "jobs")
    for job in ("save", "load") if kind.model else ("save", "load", "step load"):
        said = [line.split()[-1] for line in jobs if line.startswith(job)]
        assert said[: kind.first] == ["checked"] * kind.first
        assert "believed" in said

    for seen in life.styles:
        assert seen.blocks == (0, MANY, MANY)
        assert seen.loaded_blocks == MANY
        assert seen.is_right
    assert len({seen.loaded.parts for seen in life.styles}) == len(life.styles)

    assert life.held_by_the_cancelled >= MANY
    assert life.free_again == life.held_by_the_cancelled

    spread = max(ROUNDING, *map(answers_apart, life.alone, life.together))
    assert FAR * AS_RIGHT * spread < min(map(answers_apart, life.alone, life.alone[1:])), "a wrong answer is far away"
    for crowd in life.crowds:
        assert all(answer.cached_blocks for answer in crowd)
        assert max(map(answers_apart, life.alone, crowd)) <= AS_RIGHT * spread
    assert sum(life.preemptions) > 0

    before, under_way, forgotten, stored = life.after_reset
    assert [answer.cached_blocks for answer in life.after_reset] == [MANY, 0, 0, FEW]
    assert under_way.tokens == before.tokens
    assert forgotten == life.asked[0]
    assert forgotten.tokens == stored.tokens

    computed, local, loaded = life.after_sleep
    assert [computed.cached_blocks, local.cached_blocks] == [0, FEW]
    assert loaded == local

    again = host.run("played_scenes:next_life", model, tmp_path, 8, STEP_LOADS, kind.arguments)
    assert [answer.cached_blocks for answer in again.asked] == [FEW] * len(again.asked)
    assert [answer.tokens for answer in again.asked] == [answer.tokens for answer in life.asked[: len(again.asked)]]
    assert again.differing == []
    assert again.counts['read_blocks{tier="disk"}'] >= FEW * len(again.asked)
    assert again.held == NOTHING
    assert lines(tmp_path / "log", "wrong") == []
