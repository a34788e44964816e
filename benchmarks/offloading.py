"""A restarted engine's prompts, read from disk through vLLM's offloading over `PactTier` or `fs`, and by PactConnector.

Random Llama, the same prompts for all, each engine on one core; all but one stand still. One life of each computes the
prompts, a second one, with host memory for the longest of them, reads them: each reading is the disk's. `ttft_ms` is a
prompt from disk, `copy_ms` what of it were copies between host memory and the CPU engine's KV memory by the stand-in
for a device (0 for PactConnector, whose own copies stay in its time), `local_ms` the same prompt from the engine's own
prefix cache, `raw_ms` one plain read of the same bytes past the page cache. `over_raw` is what is left of the first
without the copies over local and raw together; the goal is 1.3. vLLM's `fs` is read twice: "cached" from the page cache
in which its files are after they were written, and from the disk. Answers are compared bit by bit with a local prefix
hit in the engine without a cache.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.e2e import Asked, in_turns, run_of, say
from benchmarks.e2e_engines import KVPACT, KVPACT_AGAIN, NO_CACHE, Run, Subject, disk_folder
from benchmarks.e2e_runs import BLOCK, WAKE_UP, Prompt, RawDisk, Runner, judge, started
from benchmarks.table import spread
from kvpact_testkit.demo.engine import EngineProcess, EngineSettings
from kvpact_testkit.demo.messages import Output
from kvpact_testkit.demo.phases import drop_page_cache

GOAL = 1.3
WARM_UP = Prompt(256, -1, [*range(20, 300)])
WRITTEN_SECONDS = 60.0
MOVED = "vllm:kv_offload_tiering_{}_bytes"


@dataclass(frozen=True, slots=True)
class Offloading:
    """vLLM's OffloadingConnector with one tier; `first` has host memory for all prompts, else for the longest."""

    name: str
    spec: str
    tier: dict[str, Any]
    first: bool

    def __call__(self, run: Run, stack: ExitStack, folder: Path) -> EngineSettings:
        extra = {
            "spec_name": self.spec,
            "spec_module_path": "benchmarks.offload_specs",
            "cpu_bytes_to_use": run.all_bytes + run.longest_bytes if self.first else run.longest_bytes,
            "loads": str(folder / "loads"),
            "secondary_tiers": [
                {key: str(value).format(folder=run.folder / self.name) for key, value in self.tier.items()}
            ],
        }
        transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        return run.settings(transfer)


def subjects(*, first: bool) -> list[Subject]:
    """Those that are compared, in their first life or in their second."""
    pact = {"type": "PactTier", "url": "disk://{folder}?capacity=16GiB"}
    files = {"type": "fs", "root_dir": "{folder}"}
    return [
        KVPACT if first else KVPACT_AGAIN,
        Subject("PactTier", "", Offloading("PactTier", "TimedPactTieringSpec", pact, first)),
        Subject("fs", "", Offloading("fs", "TimedTieringSpec", files, first)),
    ]


@dataclass(frozen=True, slots=True)
class Reading:
    """One prompt, in milliseconds."""

    ttft: float
    copies: float
    local: float
    raw: float
    cached_tokens: int
    verdict: str


def _moved(engine: EngineProcess, what: str) -> float:
    """Bytes that vLLM's offloading has read from its tiers, or written to them."""
    return sum(value for name, value in engine.metrics().items() if name.startswith(MOVED.format(what)))


def _wait_written(engine: EngineProcess, num_bytes: int) -> None:
    until = time.monotonic() + WRITTEN_SECONDS
    while (written := _moved(engine, "write")) < num_bytes:
        if time.monotonic() > until:
            raise SystemExit(f"{written:.0f} of {num_bytes} bytes were written in {WRITTEN_SECONDS:.0f} s")
        time.sleep(0.2)
        engine.generate([WAKE_UP], max_tokens=1)


class Comparison:
    """All readings of a run."""

    def __init__(self, run: Run, prompts: Sequence[Prompt], block_bytes: int, stack: ExitStack) -> None:
        self._run, self._prompts, self._block_bytes, self._stack = run, prompts, block_bytes, stack
        self._references: dict[tuple[int, int], Output] = {}
        self.readings: dict[tuple[int, str], list[Reading]] = defaultdict(list)

    def _start(self, life: str, which: Sequence[Subject]) -> list[Runner]:
        runners: list[Runner] = []
        for subject in which:
            say(f"starting {subject.name}")
            folder = self._run.folder / f"{life}-{len(runners)}"
            folder.mkdir()
            engine = self._run.kind(subject.configure(self._run, self._stack, folder), folder / "log")
            runners.append(Runner(subject.name, subject.source, engine, folder))
            self._stack.callback(runners[-1].end)
            started(runners[-1:], WARM_UP)
        for runner in runners:
            if runner.failure:
                raise SystemExit(f"{runner.name}: {runner.failure}")
        return runners

    def compute(self) -> None:
        """A first life of each, and what answers should be."""
        none, *others = self._start("first", [NO_CACHE, *subjects(first=True)])
        num_bytes = sum(prompt.blocks for prompt in self._prompts) * self._block_bytes
        for prompt in self._prompts:
            say(f"{prompt.tokens} tokens, cold, {prompt.number + 1}")
            for runner in (none, *others):
                with runner.turn() as engine:
                    engine.generate([prompt.ids])
                    if runner is none:
                        self._references[prompt.name] = runner.ask_local(prompt)
        for runner in others:
            if not runner.source:
                with runner.turn() as engine:
                    _wait_written(engine, num_bytes)
        for runner in (none, *others):
            runner.end(in_order=True)

    def read(self, rounds: int) -> None:
        """A second life of each, in turns."""
        runners = self._start("second", subjects(first=False))
        with closing(RawDisk(disk_folder(self._run), [WARM_UP, *self._prompts])) as raw:
            for number in range(rounds):
                say(f"round {number + 1} of {rounds}")
                for at, prompt in enumerate(self._prompts):
                    for runner in in_turns(runners, number + at):
                        raw_ms = raw.seconds(prompt) * 1e3
                        name = runner.name
                        if name == "fs" and number % 2:
                            drop_page_cache(self._run.folder / "fs")
                        elif name == "fs":
                            name = "fs, cached"
                        with runner.turn():
                            self.readings[prompt.tokens, name].append(self._reading(runner, prompt, raw_ms))

    def _reading(self, runner: Runner, prompt: Prompt, raw: float) -> Reading:
        engine, reference = runner.engine, self._references[prompt.name]
        if runner.source:
            warm = runner.ask_warm(prompt, reference)
            return Reading(warm.ttft_ms, 0.0, warm.local_ms, raw, warm.cached_tokens, warm.verdict)
        engine.generate([WAKE_UP], max_tokens=1)
        engine.reset_prefix_cache()
        read, loads = _moved(engine, "read"), self._loads(engine)
        (output,) = engine.generate([prompt.ids])
        copies = sum(self._loads(engine)[len(loads) :]) * 1e3
        local = runner.ask_local(prompt)
        verdict = judge(output, reference)
        expected = output.cached_tokens // BLOCK * self._block_bytes
        if not verdict and _moved(engine, "read") - read < expected:
            verdict = "not all was read from the tier"
        return Reading(
            output.first_token_seconds * 1e3,
            copies,
            local.first_token_seconds * 1e3,
            raw,
            output.cached_tokens,
            verdict,
        )

    def _loads(self, engine: EngineProcess) -> list[float]:
        transfer = engine.settings.kv_transfer_config or {}
        path = Path(transfer["kv_connector_extra_config"]["loads"])
        return [float(line) for line in path.read_text().splitlines()] if path.exists() else []


def row(tokens: int, what: str, readings: Sequence[Reading]) -> dict[str, Any]:
    """Readings of one engine and length."""
    found: dict[str, Any] = {"tokens": tokens, "what": what, "readings": len(readings)}
    for name, values in (
        ("ttft_ms", [one.ttft for one in readings]),
        ("copy_ms", [one.copies for one in readings]),
        ("local_ms", [one.local for one in readings]),
        ("raw_ms", [one.raw for one in readings]),
        ("over_raw", [(one.ttft - one.copies) / (one.local + one.raw) for one in readings]),
    ):
        found |= spread(name, values)
    wrong = [one.verdict for one in readings if one.verdict]
    return found | {
        "goal_of": "over_raw",
        "goal": GOAL,
        "cached_tokens": round(median(one.cached_tokens for one in readings)),
        "answers": f"{len(wrong)} of {len(readings)}: {wrong[0]}" if wrong else "equal",
    }


def rows(
    tokens: tuple[int, ...] = (2048, 8192), prompts: int = 3, rounds: int = 6, fork: bool = False
) -> list[dict[str, Any]]:
    """For each length a row of each engine; `prompts` of each length are read once a round.

    With `fork` engines start three times as fast, and poll less when they have no work: for tests.
    """
    if prompts < 2 or len(tokens) < 1:
        raise SystemExit(f"--prompts: at least 2 of each length, so that one drives out the other, not {prompts}")
    asked = Asked.of(tokens, prompts, prompts).again
    with tempfile.TemporaryDirectory(prefix="kvpact-offloading-") as folder, ExitStack() as stack:
        run, block_bytes = run_of(Path(folder), tokens, asked, sys.executable, fork=fork)
        comparison = Comparison(run, asked, block_bytes, stack)
        comparison.compute()
        comparison.read(rounds)
        return [row(*key, readings) for key, readings in sorted(comparison.readings.items())]
