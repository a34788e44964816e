"""What our threads take from decodes: four clients' time per output token, without kvpact, with memory, with a disk.

Each round four new prompts arrive at once and are computed in one step; while their answers are decoded, kvpact copies
and writes their KV. The gaps between a client's tokens are timed from the second token on. Engines take turns on one
core, the others stand still. `over_memory` is the ratio of a round's medians, kvpact's with a disk over kvpact's with
memory alone, `over_none` over the engine without a cache; the goal is 1.02, and the same of the 99th percentile over
all rounds.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.e2e import NARROW, WIDE
from benchmarks.e2e_engines import NO_CACHE, Run, Subject
from benchmarks.e2e_runs import BLOCK, Prompt, Runner, started
from benchmarks.needs import find_testbeds, require_vllm
from benchmarks.table import spread
from kvpact.config import load_config
from kvpact_testkit.demo.engine import EngineProcess, EngineSettings
from kvpact_testkit.demo.model import ensure_model
from kvpact_testkit.demo.phases import Plan, kvpact_config, settle

find_testbeds()

CLIENTS = 4

GOAL = 1.02


def _with_memory(run: Run, stack: ExitStack, folder: Path) -> EngineSettings:
    said = {"memory": f"{2 * run.all_bytes}B", "stats_file": str(folder / "stats.json")}
    return run.settings(load_config(said, {}).kv_transfer_config())


def _with_disk(run: Run, stack: ExitStack, folder: Path) -> EngineSettings:
    disk = folder / "disk"
    disk.mkdir()
    return run.settings(kvpact_config(disk, folder / "stats.json", f"{2 * run.all_bytes}B"))


MEMORY = Subject("kvpact, memory", "", _with_memory, "memory")
DISK = Subject("kvpact, disk", "", _with_disk, "memory")


def _gaps(engine: EngineProcess, prompts: Sequence[Sequence[int]], answer: int) -> list[float]:
    """Milliseconds between the tokens of all clients; the first gap may hold the end of the prompts' step."""
    outputs = engine.crowd(prompts, max_tokens=answer, logprobs=0)
    gaps = [(later - sooner) * 1e3 for out in outputs for sooner, later in list(pairwise(out.token_seconds))[1:]]
    settle(engine)
    return gaps


def _measure(runners: Sequence[Runner], tokens: int, answer: int, rounds: int) -> Iterator[dict[str, Any]]:
    gaps: dict[str, list[list[float]]] = {runner.name: [] for runner in runners}
    source = random.Random(7)
    for number in range(rounds):
        prompts = [source.choices(range(16, WIDE.vocabulary), k=tokens) for _ in range(CLIENTS)]
        at = number % len(runners)
        for runner in (*runners[at:], *runners[:at]):
            with runner.turn() as engine:
                gaps[runner.name].append(_gaps(engine, prompts, answer))
            if runner.failure:
                raise RuntimeError(f"{runner.name}: {runner.failure}")
    p99 = {name: quantiles([gap for one in of for gap in one], n=100)[98] for name, of in gaps.items()}
    for name, of in gaps.items():
        row: dict[str, Any] = {"what": name, "rounds": rounds, "gaps": sum(map(len, of))}
        row |= spread("token_ms", [median(one) for one in of]) | {"p99_ms": round(p99[name], 3)}
        for column, other in (("over_none", NO_CACHE.name), ("over_memory", MEMORY.name)):
            if name != other and name != NO_CACHE.name:
                row |= spread(column, [median(one) / median(its) for one, its in zip(of, gaps[other], strict=True)])
                row[f"p99_{column}"] = round(p99[name] / p99[other], 3)
        if name == DISK.name:
            row |= {"goal_of": "over_memory", "goal": GOAL}
        yield row


def rows(tokens: int = 1024, answer: int = 96, rounds: int = 12, fork: bool = False) -> list[dict[str, Any]]:
    """A row of each engine: `tokens` in each prompt, `answer` tokens decoded.

    With `fork` engines start three times as fast, and poll less when they have no work: for tests.
    """
    require_vllm()
    from forked_engine import ForkedEngine
    from tiny_engine import TOKENIZER_TEXT

    dtype = Plan.for_this_machine().dtype
    shape = WIDE if dtype == "bfloat16" else NARROW
    blocks = CLIENTS * (-(-(tokens + answer) // BLOCK) + 1)
    round_bytes = blocks * BLOCK * shape.token_bytes(dtype)
    length = tokens + answer + BLOCK
    arguments = {"dtype": dtype, "max_model_len": length, "max_num_batched_tokens": CLIENTS * length}
    with tempfile.TemporaryDirectory(prefix="kvpact-decodes-") as name, ExitStack() as stack:
        folder = Path(name)
        model = ensure_model(folder, shape, TOKENIZER_TEXT)
        kind = ForkedEngine if fork else EngineProcess
        run = Run(folder, model, arguments, sys.executable, kind, round_bytes, rounds * round_bytes)
        runners = []
        for number, subject in enumerate((NO_CACHE, MEMORY, DISK)):
            own = folder / f"engine-{number}"
            own.mkdir()
            settings = subject.configure(run, stack, own)
            runners.append(Runner(subject.name, subject.source, run.kind(settings, own / "log"), own))
            stack.callback(runners[-1].end)
            started(runners[-1:], Prompt(256, -1, list(range(16, 16 + 256 + 24))))
        return list(_measure(runners, tokens, answer, rounds))
