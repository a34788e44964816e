"""On a GPU: time to first token, computed, from vLLM's own KV, or loaded by kvpact or two of vLLM's connectors.

A Llama-3-8B's shape with random weights (`--load-format dummy`), made on the GPU. All engines stand side by side and
take turns. Each prompt is new: computed ("cold"), asked again ("local hit"), asked once more after the engine's own
prefix cache is emptied ("loaded"). `over_local` is the time over the local hit's of the same prompt and engine,
`of_cold` over the cold one's. Then a hit of the shortest prompts in time, from `kvpact.events.timeline`: medians of the
ms until each call has ended since the one before it, and `device_ms`, the device's own time of its copies. Runs on a
CPU, too, to try it.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from benchmarks.gpu_engines import SUBJECTS, Bench
from benchmarks.needs import require_known
from benchmarks.table import spread
from kvpact_testkit.demo.engine import EngineProcess

Asked = tuple[float, int]
"""Milliseconds to the first token, and cached tokens."""


def first_token(engine: EngineProcess, prompt: Sequence[int]) -> Asked:
    """Ask for one token."""
    (output,) = engine.generate([prompt], max_tokens=1)
    return output.first_token_seconds * 1e3, output.cached_tokens


def row_of(tokens: int, what: str, ours: Sequence[Asked], **others: Sequence[Asked]) -> dict[str, Any]:
    """A row, with the time over those of `others`, prompt by prompt; printed as soon as it is there."""
    row: dict[str, Any] = {"tokens": tokens, "what": what} | spread("ttft_ms", [ms for ms, _ in ours])
    for name, other in others.items():
        row |= spread(name, [mine / its for (mine, _), (its, _) in zip(ours, other, strict=True)])
    row["cached_tokens"] = min(cached for _, cached in ours)
    print(row, flush=True)
    return row


def lines_since(folder: Path, since: float) -> list[dict[str, Any]]:
    """Lines of an engine's steps and of its timeline, in the order of their ends."""
    files = [folder / "steps", *folder.glob("timeline/*.jsonl")]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return sorted((line for line in lines if ended(line) >= since), key=ended)


def ended(line: Mapping[str, Any]) -> float:
    """When a call, a step or an arrival was over."""
    return float(line["arrived"] if "arrived" in line else line["ended"])


def hit_in_time(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds of the stages of the one hit in these lines; a stage ends with the call that it is named after."""
    hits = {line["request"] for line in lines if line.get("span") == "admission" and line["tokens"]}
    (name,) = hits
    marks: dict[str, float] = {}
    device = 0.0
    for line in lines:
        span = line.get("span", "")
        if line.get("request") == name:
            marks[span or "arrival"] = ended(line)
        elif span == "order" and any(load[0] == name for load in line["loads"]):
            marks["order"] = ended(line)
        elif span == "begin" and any(load[1] == name for load in line["loads"]):
            marks["begin"] = ended(line)
            jobs = {load[0] for load in line["loads"]}
        elif span == "submit" and line["kind"] == "load":
            marks["submit"] = ended(line)
        elif span == "copy" and "seen" not in marks:
            device += line["seconds"]
            marks["copy"] = ended(line)
        elif span == "seen" and "begin" in marks and jobs & {*line["jobs"]}:
            marks["seen"] = ended(line)
        if span == "order" and name in line["admits"]:
            marks["next schedule"] = ended(line)
        elif not span and name in line.get("admits", ()):
            marks["forward"] = ended(line)
    stages = sorted(marks.items(), key=lambda mark: mark[1])
    found = {what: (at - before) * 1e3 for (_, before), (what, at) in pairwise(stages)}
    return found | {"device_ms": device * 1e3}


def _in_time(folder: Path, tokens: int, begins: Sequence[float]) -> dict[str, Any]:
    lines = lines_since(folder, begins[0])
    hits = [
        hit_in_time([line for line in lines if begin <= ended(line) < end])
        for begin, end in zip(begins, [*begins[1:], float("inf")], strict=True)
    ]
    stages = list(dict.fromkeys(stage for hit in hits for stage in hit))
    row: dict[str, Any] = {"tokens": tokens, "what": "a hit in time, kvpact"}
    row |= {stage: round(median(hit[stage] for hit in hits if stage in hit), 3) for stage in stages}
    print(row, flush=True)
    return row


def rows(
    tokens: tuple[int, ...] = (2048, 8192, 32768), readings: int = 4, subjects: tuple[str, ...] = SUBJECTS
) -> Iterator[dict[str, Any]]:
    """Rows of each length, computed and local hits of the first subject's engine; then a hit in time."""
    require_known("--subjects", subjects, SUBJECTS)
    longest = max(tokens)
    with tempfile.TemporaryDirectory(prefix="kvpact-gpu-") as name, ExitStack() as stack:
        bench = Bench.at(Path(name))
        engines = {
            subject: stack.enter_context(bench.engine(subject, subject, longest + 64, longest + 8192, 2 * longest))
            for subject in subjects
        }
        for engine in engines.values():
            bench.warm(engine, longest)
        begins: list[float] = []
        for length in tokens:
            found: dict[tuple[str, str], list[Asked]] = defaultdict(list)
            for number, prompt in enumerate(bench.prompts(length, readings, length)):
                turn = number % len(subjects)
                for subject in (*subjects[turn:], *subjects[:turn]):
                    engine = engines[subject]
                    for kind in ("cold", "local hit", "loaded"):
                        if kind == "loaded":
                            bench.forget(engine)
                            begins += [monotonic()] if subject == "kvpact" and length == tokens[0] else []
                        found[subject, kind].append(first_token(engine, prompt))
                    bench.forget(engine)
            cold, local = (found[subjects[0], kind] for kind in ("cold", "local hit"))
            yield row_of(length, "cold", cold)
            yield row_of(length, "local hit", local, of_cold=cold)
            for subject in subjects:
                others = {"over_local": found[subject, "local hit"], "of_cold": found[subject, "cold"]}
                yield row_of(length, f"loaded, {subject}", found[subject, "loaded"], **others)
        if begins:
            yield _in_time(bench.folder / "kvpact", tokens[0], begins)
