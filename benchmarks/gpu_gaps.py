"""On a GPU: what a prompt costs clients who decode, computed, from vLLM's own KV, or loaded by one of three connectors.

Clients decode, each with ten tokens before anything else comes; then prompts come one by one, a fixed time apart. A gap
is the time between the ends of two steps that decode. `gap_ms` are those of all steps; `admit_ms`, `admit_p99_ms` and
`admit_most_ms` those of steps in which a prompt is computed first. `extra_ms` is, per prompt, the sum of what gaps have
over the median gap, from its arrival to that step; `extra_over_local_ms` is less a local hit's of the same engine, or
of kvpact's. `graphs` counts steps by the graph that vLLM says it replayed, "unknown" where it does not say, as on CPUs.
`waited_mib` and `copies` are the most of a step, for kvpact alone: others do not say. With `--steps DIR` each step is a
line there.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.gpu_engines import SUBJECTS, Bench
from benchmarks.needs import require_at_least, require_known
from benchmarks.table import percentile, spread
from kvpact_testkit.demo.engine import EngineProcess

PROMPT = re.compile(r"prompt \d+")
"""A prompt's name, before what vLLM adds to it."""

CLIENT_TOKENS = 128


@dataclass(frozen=True)
class Steps:
    """The steps of one kind of prompts that decode, with arrivals, in order."""

    steps: list[dict[str, Any]]
    arrivals: dict[str, float]

    @classmethod
    def read(cls, folder: Path, since: float, block_bytes: int) -> Steps:
        """Lines that an engine in this folder has written since then, with copies and bytes where it has a timeline."""
        lines = [json.loads(line) for line in (folder / "steps").read_text().splitlines()]
        named = [(PROMPT.match(line["request"]), line) for line in lines if line.get("arrived", 0.0) >= since]
        arrivals = {name[0]: line["arrived"] for name, line in named if name}
        steps = [line for line in lines if line.get("began", 0.0) >= since]
        files = [*folder.glob("timeline/*.jsonl")]
        spans = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        for before, step in pairwise(steps):
            step["gap"] = step["ended"] - before["ended"] if before["decodes"] and step["decodes"] else None
            mine = [span for span in spans if before["ended"] < span["ended"] <= step["ended"]]
            loads = [load for span in mine if span["span"] == "begin" for load in span["loads"]]
            step["waited_bytes"] = sum(blocks * block_bytes for *_, blocks, waits in loads if waits) if files else None
            submitted = [span["copies"] for span in mine if span["span"] == "submit"]
            step["copies"] = sum(submitted) if files else None
        return cls([step for step in steps if step.get("gap") is not None], arrivals)

    def row(self) -> dict[str, Any]:
        """Columns in ms."""
        gaps = [step["gap"] * 1e3 for step in self.steps]
        usual = median(gaps)
        first = {name: number for number, step in enumerate(self.steps) for name in self._admitted(step)}
        admitting = [gaps[number] for number in sorted(set(first.values()))]
        extra = [
            sum(
                gaps[number] - usual
                for number in range(first[name] + 1)
                if self.steps[number]["ended"] > arrived
            )
            for name, arrived in self.arrivals.items()
        ]  # fmt: skip
        row: dict[str, Any] = {"prompts": len(self.arrivals), "steps": len(gaps)} | spread("gap_ms", gaps)
        row |= spread("admit_ms", admitting) | {"admit_p99_ms": round(percentile(admitting, 99), 3)}
        row |= {"admit_most_ms": round(max(admitting), 3), "extra_ms": round(fmean(extra), 3)}
        row |= {"decodes": median(step["decodes"] for step in self.steps)}
        row["graphs"] = dict(Counter(str(step["graph"] or "unknown") for step in self.steps))
        if self.steps[0]["copies"] is not None:
            row["waited_mib"] = round(max(step["waited_bytes"] for step in self.steps) / 2**20, 1)
            row["copies"] = max(step["copies"] for step in self.steps)
        return row

    def _admitted(self, step: dict[str, Any]) -> list[str]:
        return [name[0] for name in map(PROMPT.match, step["admits"]) if name]


@dataclass
class Gaps:
    """A run over the subjects, which share what a local hit costs."""

    bench: Bench
    tokens: int
    prompts: int
    decoding: int
    apart: float
    steps: Path | None
    local_ms: float | None = None

    def of_subject(self, subject: str, *, compiled: bool = False) -> Iterator[dict[str, Any]]:
        """Rows of one engine: for kvpact each kind of prompt, for others loaded ones."""
        life = subject + "-compiled" * compiled
        room = 1 << 12 if self.bench.gpu else 1 << 10
        """Tokens that a client decodes at most."""
        kept = (self.prompts + 2) * (self.tokens + 256)
        kv_tokens = kept + self.decoding * (room + 256)
        longest = max(self.tokens + 64, room)
        asked = self.bench.prompts(self.tokens, self.prompts, self.tokens)
        with self.bench.engine(subject, life, longest, kv_tokens, kept, compiled=compiled) as engine:
            self.bench.warm(engine, self.tokens)
            if subject == "kvpact":
                yield self._row(engine, life, "computed", asked, room)
                yield self._row(engine, life, "local hit", asked, room)
            else:
                engine.generate(asked, max_tokens=1)
            self.bench.forget(engine)
            yield self._row(engine, life, "loaded", asked, room)

    def _row(
        self, engine: EngineProcess, life: str, kind: str, asked: Sequence[Sequence[int]], room: int
    ) -> dict[str, Any]:
        clients = self.bench.prompts(77, self.decoding, CLIENT_TOKENS)
        folder = self.bench.folder / life
        before = [json.loads(line) for line in (folder / "steps").read_text().splitlines()]
        since = max(line.get("ended", 0.0) for line in before)
        outputs = engine.beside_decodes(clients, asked, self.apart, max_tokens=room - CLIENT_TOKENS - 1)
        found = Steps.read(folder, since, engine.block_size * self.bench.token_bytes)
        if self.steps is not None:
            self.steps.mkdir(parents=True, exist_ok=True)
            text = "".join(f"{json.dumps(step)}\n" for step in found.steps)
            (self.steps / f"{life} {kind}.jsonl").write_text(text)
        row: dict[str, Any] = {"what": f"{life}, {kind}", "tokens": self.tokens} | found.row()
        if kind == "local hit":
            self.local_ms = row["extra_ms"]
        elif self.local_ms is not None:
            row["extra_over_local_ms"] = round(row["extra_ms"] - self.local_ms, 3)
        answered = outputs[: len(asked)]
        row |= spread("ttft_ms", [one.token_seconds[0] * 1e3 for one in answered])
        row["cached_tokens"] = min(one.cached_tokens for one in answered)
        if not self.bench.gpu:
            row["note"] = "a simulated device: no result"
        print(row, flush=True)
        return row


def rows(
    tokens: int = 2048,
    prompts: int = 100,
    decoding: int = 16,
    apart_ms: int = 80,
    subjects: tuple[str, ...] = SUBJECTS,
    compiled: bool = False,
    steps: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """A row of each subject and kind; `compiled` adds kvpact under vLLM's default compilation."""
    require_known("--subjects", subjects, SUBJECTS)
    require_at_least("--prompts", 1, (prompts,))
    with tempfile.TemporaryDirectory(prefix="kvpact-gaps-") as name:
        gaps = Gaps(Bench.at(Path(name)), tokens, prompts, decoding, apart_ms / 1e3, steps)
        for subject in subjects:
            yield from gaps.of_subject(subject)
        if compiled:
            yield from gaps.of_subject("kvpact", compiled=True)
