"""The phases of the demonstration: which engine answers which prompt when, so that the times can be compared.

Owns the order of the runs and their readings; `kvpact_testkit.demo.report` judges them. Measures no time itself: it
takes the engine's own time to first token.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from platform import machine
from typing import Any
from urllib.parse import quote

from kvpact.config import load_config
from kvpact.metrics import STEP_SECONDS
from kvpact.vllm.compat.platforms import OUR_CLASSES
from kvpact_testkit.demo.cpu_time import computed, look_at, spent_by_kvpact, spent_on_pages
from kvpact_testkit.demo.engine import EngineProcess, EngineSettings, loading_on_all_cores
from kvpact_testkit.demo.messages import Output
from kvpact_testkit.demo.model import SLOW_SHAPE, ModelShape, describe_model
from kvpact_testkit.demo.text import prompts

COLD = "cold"
LOCAL_HIT = "local prefix hit"
COLD_KVPACT = "cold with kvpact"
WARM_MEMORY = "warm from memory"
WARM_DISK = "warm from disk"
PHASES = (COLD, LOCAL_HIT, COLD_KVPACT, WARM_MEMORY, WARM_DISK)

STEPS = f"{STEP_SECONDS}_sum"
"""The key in kvpact's stats file of its seconds in scheduler steps."""

COUNTS = ("promised", "committed", "loaded", "used")

SHORT = 8
"""Prompts that measure the machine's speed are this many times shorter."""

ATTENTION = 1.6
"""A token of a prompt `SHORT` times as long takes about this many times as long."""

SLOW_SECONDS = 4.0
"""If a cold prompt takes longer, warm-ups are not of full size."""

GPU_SHARE = 0.3
"""Share of a GPU's memory: vLLM does not start where less is free, and two engines are on one GPU at a time."""

SETTLE_TIMEOUT = 20.0
"""Seconds that the cache may take to finish its writes and give back its leases after the last answer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to run. Every round has prompts of its own, so a cold prompt is new to every cache."""

    rounds: int = 2
    last_round_by: float = 80.0
    """Seconds after the start by which a further round must begin; on a slow machine there are fewer."""
    prompts: int = 8
    cold_seconds: float = 60.0
    """Maximum time for a round's cold prompts on both engines; a slow machine gets fewer prompts, at least 2."""
    document_tokens: int = 4096
    group: int = 4
    """Prompts that one engine answers in a row before the other's turn, at most; there are two turns or more."""
    kv_cache_bytes: int = 2 << 30
    """Room in the engine; it must hold one round, or there is no local prefix hit to compare with."""
    memory: str = "4GiB"
    """kvpact's memory; it must hold all rounds."""
    dtype: str = "bfloat16"
    shape: ModelShape = field(default_factory=ModelShape)
    ranks: int = 1
    """Tensor-parallel ranks, each on a core or a GPU of its own."""
    gpu: str = ""
    """The name of the GPU that the engines compute on; "" if they compute on the CPU."""

    @classmethod
    def for_this_machine(cls, **chosen: Any) -> Plan:
        """On processors without AVX-512 in float32, because bfloat16 is emulated there, at a seventh of the speed.

        Keys and values take twice the room then, and the model is less to compute. Several ranks on a CPU wait for each
        other in every layer, so they are asked less, about shorter documents. With a `gpu`, nothing of this.
        """
        fitting: dict[str, Any] = {}
        if chosen.get("gpu"):
            return cls(**chosen)
        if machine() == "x86_64" and "avx512f" not in Path("/proc/cpuinfo").read_text():
            fitting |= {"dtype": "float32", "shape": SLOW_SHAPE, "kv_cache_bytes": 3 << 29, "memory": "2GiB"}
            fitting |= {"rounds": 1, "prompts": 4, "cold_seconds": 40.0}
        if chosen.get("ranks", 1) > 1:
            fitting |= {"rounds": 1, "prompts": 4, "document_tokens": 2048, "cold_seconds": 40.0}
        return cls(**{**fitting, **chosen})

    def engine_arguments(self) -> dict[str, Any]:
        """What both engines get. Each rank has its share of the room for keys and values."""
        arguments: dict[str, Any] = {"kv_cache_memory_bytes": self.kv_cache_bytes // self.ranks, "dtype": self.dtype}
        if self.gpu:
            arguments["gpu_memory_utilization"] = GPU_SHARE
        return arguments | ({"tensor_parallel_size": self.ranks} if self.ranks > 1 else {})

    def prompts_at(self, seconds: float) -> int:
        """Number of prompts in a round if a cold one takes `seconds`."""
        return max(2, min(self.prompts, int(self.cold_seconds / (2 * seconds))))


@dataclass(frozen=True, slots=True)
class Reading:
    """One request: its phase, the number of its prompt over all rounds, the prompt's length in tokens, the answer."""

    phase: str
    prompt: int
    prompt_tokens: int
    output: Output


@dataclass(frozen=True, slots=True)
class ColdCost:
    """CPU seconds for some cold prompts answered with kvpact: the workers' own threads, and kvpact.

    kvpact's are those of its threads, until the cache rests, and what its hooks took of the scheduler's steps by the
    clock; its hooks on a worker's own thread, of microseconds, count as the worker's.
    """

    prompts: float
    kvpact: float
    pages: float = 0.0
    """Part of `kvpact` for pages of memory that it takes from the machine once, whatever is stored there later."""


@dataclass(frozen=True, slots=True)
class Results:
    """The results of the phases: all readings, the engine's block size in tokens, the ledgers' counts and leases left.

    `model` is the shape and number format of the model, `gpu` the name of the GPU or "".
    """

    readings: list[Reading]
    block_size: int
    counts: Mapping[str, int]
    leases_held: int
    model: str
    cold_costs: Sequence[ColdCost]
    gpu: str = ""
    spared_seconds: Sequence[float] = ()
    """Seconds of prefill that kvpact says it has spared, before the restart and after it."""


def kvpact_config(disk: Path, stats_file: Path, memory: str) -> dict[str, Any]:
    """kvpact with a disk large enough for everything that the demonstration stores."""
    settings: dict[str, Any] = {
        "memory": memory,
        "tiers": [f"disk://{quote(str(disk))}?capacity=6GiB"],
        "stats_file": str(stats_file),
    }
    return load_config(settings, {}).kv_transfer_config()


def class_arguments() -> dict[str, str]:
    """kvpact's two classes, as arguments of `vllm.LLM`."""
    return {option.lstrip("-").replace("-", "_"): name for option, name in OUR_CLASSES.items()}


def run_phases(model: Path, text: str, work: Path, plan: Plan, *, say: Callable[[str], None]) -> Results:
    """Run all phases with logs and the disk tier under `work`, an empty directory; `say` is told what happens.

    Raises EngineError if an engine fails; ends all its processes in any case.
    """
    disk = work / "disk"
    disk.mkdir()
    arguments = plan.engine_arguments()

    def with_kvpact(life: int, *, held: bool = False) -> EngineProcess:
        config = kvpact_config(disk, work / f"stats-{life}.json", plan.memory)
        settings = EngineSettings(model, config, {**arguments, **class_arguments()})
        return EngineProcess(settings, work / f"engine-with-kvpact-{life}.log", held=held)

    script = _Script(model, text, plan, say)
    with ExitStack() as engines:
        say("starting an engine without kvpact and one with it")
        plain = EngineProcess(EngineSettings(model, arguments=arguments), work / "engine-without-kvpact.log")
        engines.callback(plain.kill)
        kvpact = with_kvpact(1)
        engines.callback(kvpact.kill)
        with loading_on_all_cores(plain, kvpact):
            block_size = plain.wait_ready().block_size
            kvpact.wait_ready()
        again = with_kvpact(2, held=True)
        engines.callback(again.kill)
        script.first_life(plain, kvpact, again.wait_loaded)
        plain.discard()
        counts = [settle(kvpact)]
        say("stopping the engine with kvpact")
        kvpact.stop()
        drop_page_cache(disk)
        say("starting it again on the same directory")
        script.second_life(again.start())
        counts.append(settle(again))
        again.discard()
    return Results(
        readings=script.readings,
        block_size=block_size,
        counts={name: sum(int(stats.get(f"{name}_tokens", 0)) for stats in counts) for name in COUNTS},
        leases_held=sum(int(stats.get("leases_held", 0)) for stats in counts),
        model=f"{describe_model(model)}, {plan.dtype}",
        cold_costs=script.cold_costs,
        gpu=plan.gpu,
        spared_seconds=[float(stats.get("spared_prefill_seconds", 0.0)) for stats in counts],
    )


class _Script:
    """The prompts of a run and the readings taken so far."""

    def __init__(self, model: Path, text: str, plan: Plan, say: Callable[[str], None]) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        body = tokenizer.encode(text).ids

        def make(reading: str, count: int, share: int = 1) -> list[list[int]]:
            return prompts(tokenizer, body, reading=reading, document_tokens=plan.document_tokens // share, count=count)

        self._plan, self._say = plan, say
        self._started = time.monotonic()
        self._rounds = [
            make(f"reading {number} of {plan.rounds}", plan.prompts) for number in range(1, plan.rounds + 1)
        ]
        self._warm_up, self._fresh = (make(reading, 1)[0] for reading in ("to warm up", "to warm up again"))
        self._short = make("to see how fast it is", 2, SHORT)
        self.readings: list[Reading] = []
        self.cold_costs: list[ColdCost] = []

    def first_life(self, plain: EngineProcess, kvpact: EngineProcess, wait_for_quiet: Callable[[], None]) -> None:
        """Cold prompts on both engines in turns, local prefix hits on one, warm from memory on the other.

        When both are warmed up, and before anything counts, `wait_for_quiet` waits until nothing else computes.
        """
        seconds = plain.generate(self._short)[-1].first_token_seconds * SHORT * ATTENTION
        count = self._plan.prompts_at(seconds)
        self._plan = replace(self._plan, prompts=count, group=max(1, min(self._plan.group, count // 2)))
        self._rounds = [asked[: self._plan.prompts] for asked in self._rounds]
        if seconds > SLOW_SECONDS:
            self._warm_up, self._fresh = self._short
        for engine in (plain, kvpact):
            engine.generate([self._warm_up])
            settle(engine)
            engine.reset_prefix_cache()
            engine.generate([self._warm_up])
            settle(engine)
        wait_for_quiet()
        everything = range(self._plan.prompts)
        turns = [(COLD, plain, kvpact), (COLD_KVPACT, kvpact, plain)]
        for number in range(self._plan.rounds):
            if number and time.monotonic() > self._started + self._plan.last_round_by:
                self._rounds = self._rounds[:number]
                break
            self._say(f"round {number + 1} of {self._plan.rounds}: cold, in turns")
            for start in range(0, self._plan.prompts, self._plan.group):
                for phase, engine, other in turns:
                    with other.frozen():
                        group = everything[start : start + self._plan.group]
                        (self._read if engine is plain else self._read_cold)(phase, engine, number, group)
                turns.reverse()
            self._say(f"round {number + 1} of {self._plan.rounds}: local prefix hits, then warm from memory")
            with kvpact.frozen():
                self._read(LOCAL_HIT, plain, number, everything)
            with plain.frozen():
                kvpact.reset_prefix_cache()
                self._read(WARM_MEMORY, kvpact, number, everything)
                settle(kvpact)

    def second_life(self, kvpact: EngineProcess) -> None:
        """Every prompt once on an engine that has never seen it: after the first load it would come from memory."""
        kvpact.generate([self._fresh, self._warm_up])
        self._say("warm from disk")
        for number in range(len(self._rounds)):
            self._read(WARM_DISK, kvpact, number, range(self._plan.prompts))

    def _read_cold(self, phase: str, engine: EngineProcess, number: int, chosen: Sequence[int]) -> None:
        """Read, and look at what the threads of an engine with kvpact cost, until its cache rests."""
        steps, before = engine.stats().get(STEPS, 0.0), look_at(engine.processes())
        self._read(phase, engine, number, chosen)
        answered = look_at(engine.processes())
        steps = settle(engine).get(STEPS, 0.0) - steps
        rested = look_at(engine.processes())
        cost = spent_by_kvpact(before, rested) + steps
        self.cold_costs.append(ColdCost(computed(before, answered), cost, spent_on_pages(before, rested)))

    def _read(self, phase: str, engine: EngineProcess, number: int, chosen: Sequence[int]) -> None:
        asked = [self._rounds[number][index] for index in chosen]
        for index, prompt, output in zip(chosen, asked, engine.generate(asked), strict=True):
            self.readings.append(Reading(phase, number * self._plan.prompts + index, len(prompt), output))


def settle(engine: EngineProcess) -> dict[str, Any]:
    """Wait until the cache of `engine` is at rest: no lease, no write under way, constant counts; returns those."""
    if engine.settings.kv_transfer_config is None:
        return {}
    deadline = time.monotonic() + SETTLE_TIMEOUT
    before, stats = None, engine.stats()
    while time.monotonic() < deadline:
        busy = any(value for name, value in stats.items() if name.startswith(("leases_held", "queued_write_bytes")))
        if stats == before and not busy:
            break
        time.sleep(0.2)
        before, stats = stats, engine.stats()
    return stats


def drop_page_cache(directory: Path) -> None:
    """Make reads from `directory` go to the disk, not to pages that the writer left in memory."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
