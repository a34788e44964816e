"""Many prompts that wait at once, memory for few of them, a slow disk below: first tokens and hits, engines in turns.

Random Llama; `prompts` prompts of `tokens` tokens come at once to an engine that runs 16 and has KV memory for 24; its
cache has memory for 8 of them, and all of them on a disk that is read with `disk_mb` MB/s (a control group's limit; it
takes root). A first life computes the prompts, a second one of each engine is measured: before each run its own prefix
cache is emptied and other prompts are read, so that memory holds none of those that come; all other engines stand
still. `p50_s` and `p99_s` are medians over the runs of the first tokens' percentiles within a run; `hits` is the share
of prompt tokens that were not computed, `failed` counts requests without an answer, `dropped` blocks that were not
saved or written for want of room, `leases` those held at rest. `over_first` is the ratio of the median p99 to the first
row's. `--before PATH` is kvpact of another checkout, beside this one over the same disk.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.e2e import Asked, Comparison, in_turns, say
from benchmarks.e2e_engines import WAYS_TO_GET, Configure, Run, Subject
from benchmarks.e2e_runs import BLOCK, WAKE_UP, Prompt, Runner
from benchmarks.needs import find_testbeds
from benchmarks.restart_stores import Life, absent, children, subjects, wait_written
from benchmarks.table import percentile, ratio, spread
from kvpact.config import load_config
from kvpact_testkit.demo.engine import EngineProcess, EngineSettings
from kvpact_testkit.demo.messages import Output
from kvpact_testkit.demo.model import ModelShape, ensure_model
from kvpact_testkit.demo.phases import Plan, drop_page_cache, settle

find_testbeds()

SHAPE = ModelShape(layers=8, hidden=256, heads=4, kv_heads=4, intermediate=768)
RUNNING, IN_MEMORY, IN_ENGINE = 16, 8, 24
"""Requests that the engine runs, and prompts for which its cache and the engine have memory."""
ANSWER_TOKENS = 8
MAX_SECONDS = 1200.0
NOTHING = Asked((), ())


@dataclass(frozen=True, slots=True)
class Kvpact:
    """kvpact of the checkout `tree`, over the folder `disk`."""

    tree: Path
    disk: str
    deadline: str

    def __call__(self, run: Run, stack: ExitStack, folder: Path) -> EngineSettings:
        extra = {
            "memory": f"{IN_MEMORY * run.longest_bytes}B",
            "tiers": [f"disk://{run.folder.parent / self.disk}?capacity=16GiB"],
            "stats_file": str(folder / "stats.json"),
            "prepare_deadline": self.deadline,
        }
        paths = (self.tree / "src", self.tree / "kit" / "src", self.tree / "testbeds")
        settings = run.settings(load_config(extra, {}).kv_transfer_config())
        before = settings.environment["PYTHONPATH"]
        return replace(
            settings, environment={**settings.environment, "PYTHONPATH": os.pathsep.join([*map(str, paths), before])}
        )


def _with_room(start: Configure) -> Configure:
    """With KV memory for the requests that run, and some that are being loaded."""

    def configure(run: Run, stack: ExitStack, folder: Path) -> EngineSettings:
        settings = start(run, stack, folder)
        return replace(
            settings, arguments={**settings.arguments, "kv_cache_memory_bytes": IN_ENGINE * run.longest_bytes}
        )

    return configure


class Load:
    """All runs; `crowd` comes at once, `others` drive it out of memory before."""

    def __init__(self, run: Run, crowd: Sequence[Prompt], others: Sequence[Prompt], stack: ExitStack) -> None:
        self._run, self._crowd, self._others, self._stack = run, crowd, others, stack
        self.runs: dict[str, list[dict[str, float]]] = defaultdict(list)
        self.failures: dict[str, str] = {}
        self.samples = len(crowd)
        """Of each run."""

    def start(self, life: str, subjects: Sequence[Subject]) -> list[Runner]:
        """Those that started; they stand still."""
        run = replace(self._run, folder=self._run.folder / life)
        run.folder.mkdir()
        first = 20 if life == "first" else 40
        lives = Comparison(run, NOTHING, Prompt(512, -1, [*range(first, first + 512)]), 1, self._stack)
        runners = lives.start([replace(each, configure=_with_room(each.configure)) for each in subjects])
        self.failures |= lives.failures
        return runners

    def fill(self, subjects: Sequence[Subject]) -> None:
        """A first life: the prompts are computed, one after the other, and written."""
        for runner in self.start("first", subjects):
            say(f"{runner.name} computes {len(self._crowd) + len(self._others)} prompts")
            with runner.turn() as engine:
                for prompt in (*self._crowd, *self._others):
                    engine.generate([prompt.ids], max_tokens=1)
                settle(engine)
                wait_written(engine, self._run.folder)
            if runner.failure:
                self.failures[runner.name] = runner.failure
            runner.end(in_order=True)

    def measure(self, runners: Sequence[Runner], runs: int, slow: Path) -> None:
        """The crowd comes to each engine in turn."""
        for number in range(runs):
            for runner in in_turns([each for each in runners if not each.failure], number):
                with runner.turn() as engine:
                    for pid in {*engine.processes(), *children()}:
                        slow.write_text(str(pid))
                    found = self._run_once(engine)
                if runner.failure:
                    self.failures[runner.name] = runner.failure
                    continue
                self.runs[runner.name].append(found)
                say(f"run {number + 1}: {runner.name}: {found}")

    def _run_once(self, engine: EngineProcess) -> dict[str, float]:
        engine.generate([WAKE_UP], max_tokens=1)
        engine.generate([prompt.ids for prompt in self._others], max_tokens=1, timeout=MAX_SECONDS)
        settle(engine)
        engine.reset_prefix_cache()
        drop_page_cache(self._run.folder)
        before = settle(engine)
        prompts = [prompt.ids for prompt in self._crowd]
        outputs = engine.generate(prompts, max_tokens=ANSWER_TOKENS, together=True, timeout=MAX_SECONDS)
        after = settle(engine)
        return _found(outputs, sum(map(len, prompts))) | {
            "dropped": sum(_sum(after, name) - _sum(before, name) for name in ("dropped_blocks", "dropped_writes")),
            "leases": _sum(after, "leases_held"),
        }


def _sum(stats: dict[str, Any], name: str) -> float:
    """A metric of kvpact's, over its labels."""
    return sum(
        value for key, value in stats.items() if key.partition("{")[0] == name and isinstance(value, int | float)
    )


def _found(outputs: Sequence[Output], prompt_tokens: int) -> dict[str, float]:
    first = [output.first_token_seconds for output in outputs]
    return {
        "p50": percentile(first, 50),
        "p99": percentile(first, 99),
        "hits": sum(output.cached_tokens for output in outputs) / prompt_tokens,
        "failed": sum(output.finish_reason != "length" for output in outputs),
    }


def row(who: str, runs: Sequence[dict[str, float]], samples: int, first: float) -> dict[str, Any]:
    """One engine's runs; `first` is the median p99 of the first row."""
    found: dict[str, Any] = {"who": who, "runs": len(runs), "samples": samples * len(runs)}
    for name in ("p50", "p99"):
        found |= spread(f"{name}_s", [each[name] for each in runs])
    found |= {"hits": round(median(each["hits"] for each in runs), 3)}
    for name in ("failed", "dropped", "leases"):
        found[name] = round(sum(each[name] for each in runs))
    return found | {"over_first": ratio(found["p99_s"], first or found["p99_s"])}


def rows(
    prompts: int = 64, tokens: int = 2048, runs: int = 5, disk_mb: int = 200, deadline: str = "2s",
    before: Path | None = None, peers: Sequence[str] = ("fs", "lmcache"), peer_python: Path | None = None,
    fork: bool = False,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One row of each engine; `deadline` is kvpact's `prepare_deadline`."""
    from forked_engine import ForkedEngine
    from stalled_disk import disk_held_to
    from tiny_engine import TOKENIZER_TEXT

    source, dtype = random.Random(prompts), Plan.for_this_machine().dtype
    every = [
        Prompt(tokens, number, source.choices(range(16, SHAPE.vocabulary), k=tokens + 24))
        for number in range(prompts + IN_MEMORY)
    ]
    with tempfile.TemporaryDirectory(prefix="kvpact-waiting-") as name, ExitStack() as stack:
        folder = Path(name)
        try:
            slow = stack.enter_context(disk_held_to(folder, disk_mb * 10**6))
        except OSError as error:
            raise SystemExit(f"{folder}: no limit for reads of its disk: {error}: run as root, on a disk") from None
        arguments = {"dtype": dtype, "max_model_len": tokens + 2 * BLOCK, "max_num_batched_tokens": 8192}
        arguments |= {"max_num_seqs": RUNNING, "disable_log_stats": False}
        model, kind = ensure_model(folder, SHAPE, TOKENIZER_TEXT), ForkedEngine if fork else EngineProcess
        longest = every[0].blocks * BLOCK * SHAPE.token_bytes(dtype)
        run = Run(folder, model, arguments, str(peer_python or sys.executable), kind, longest, len(every) * longest)
        load = Load(run, every[:prompts], every[prompts:], stack)
        missing = absent(peers, run.python)
        yield from _rows(load, folder, runs, slow, deadline, before, [peer for peer in peers if peer not in missing])
        for peer in missing:
            yield {"who": peer, "failure": f"not there: {WAYS_TO_GET[peer]}"}


def _peers(peers: Sequence[str], *, first: bool) -> list[Subject]:
    """vLLM's offloading over files and LMCache's server, with host memory for as many prompts in their second life."""
    found = []
    for subject in subjects(peers, Life(first))[1:]:
        share = IN_MEMORY // 2 if subject.peer == "lmcache" else IN_MEMORY  # its server gets twice what it is told

        def configure(
            run: Run, stack: ExitStack, folder: Path, start: Configure = subject.configure, share: int = share
        ) -> EngineSettings:
            return start(replace(run, longest_bytes=share * run.longest_bytes), stack, folder)

        found.append(replace(subject, configure=configure))
    return found


def _rows(
    load: Load, folder: Path, runs: int, slow: Path, deadline: str, before: Path | None, peers: Sequence[str]
) -> Iterator[dict[str, Any]]:
    here = Path(__file__).parents[1]
    first = [Subject("kvpact", "", Kvpact(here, "disk", deadline))]
    second = [Subject("kvpact, before", "", Kvpact(before, "disk-before", deadline))] if before is not None else []
    second += first
    first, second = [*first, *_peers(peers, first=True)], [*second, *_peers(peers, first=False)]
    folder.joinpath("disk").mkdir()
    load.fill(first)
    if before is not None:
        shutil.copytree(folder / "disk", folder / "disk-before")
    load.measure(load.start("second", second), runs, slow)
    reference = 0.0
    for subject in second:
        if found := load.runs.get(subject.name):
            made = row(subject.name, found, load.samples, reference)
            reference = reference or made["p99_s"]
            yield made
        else:
            yield {"who": subject.name, "failure": load.failures.get(subject.name, "not run")}
