"""Time to first token of warm prompts in real engines, over a local prefix hit: kvpact's and its peers', interleaved.

Random Llama, the same prompts for all, each engine on one core, its servers on the other; all but one stand still.
"cold": a prompt that nothing knows, its time over that without a cache, what EngineCore's process takes of the CPU,
also beyond the one without a cache, and kvpact's share of the prompt's CPU time (hooks and threads; the goal is 0.01).
EngineCore polls for up to a second while the worker computes, which differs by more than any cache takes; with `--fork`
it polls for 10 ms. "warm": the engine's own prefix cache is emptied, then the prompt comes from the external cache
(`ttft_ms`), then from the engine's own (`local_ms`). `over_local` is the ratio, whose goal is 1.05 from memory.
`raw_ms` is one plain read of the same bytes right before or after, while all engines stand still: preadv past the page
cache, or pipelined redis-py with hiredis; `over_raw` is warm over local and raw together, whose goal is 1.1. "new
process": one that never computed the prompts, with memory for the longest of them, so that each reading is the
store's. Answers are compared bit by bit with a local prefix hit in the engine without a cache.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.e2e_engines import (
    KVPACT,
    KVPACT_AGAIN,
    NO_CACHE,
    OTHERS,
    STORING_CORE,
    WAYS_TO_GET,
    Run,
    Subject,
    disk_folder,
    engines_with_room,
    groups_with_room,
    is_there,
    kvpact_with_redis,
    on_core,
)
from benchmarks.e2e_runs import BLOCK, Cold, Name, Prompt, RawDisk, RawRedis, Runner, Warm, started
from benchmarks.needs import find_testbeds, require_known
from benchmarks.table import spread
from kvpact_testkit.demo.engine import EngineProcess
from kvpact_testkit.demo.messages import Output
from kvpact_testkit.demo.model import ModelShape, ensure_model
from kvpact_testkit.demo.phases import Plan, drop_page_cache

find_testbeds()

PEERS = ("kvpact", "redis", "example", "lmcache", "mooncake")
"""kvpact with memory and a disk, kvpact with Redis, and others."""

SHORTEST = 256
"""Tokens of the shortest prompt: LMCache keeps pieces of that length."""

GOALS = {"memory": ("over_local", 1.05), "disk": ("over_raw", 1.1), "redis": ("over_raw", 1.1)}
"""Where kvpact's warm prompts come from -> the column with a goal, and the goal."""

WIDE = ModelShape(positions=1 << 20)
NARROW = ModelShape(hidden=256, heads=4, kv_heads=4, intermediate=768, positions=1 << 20)
"""For processors without AVX-512, on which the engine computes in float32: both take 32 KiB a token."""


def cold_row(tokens: int, what: str, cold: Sequence[Cold], none: Sequence[Cold] | None) -> dict[str, Any]:
    """Readings of one engine, beside those of the same prompts in the engine without a cache."""
    row: dict[str, Any] = {"tokens": tokens, "what": what, "state": "cold", "readings": len(cold)}
    row |= spread("ttft_ms", [one.ttft_ms for one in cold])
    if none is not None:
        pairs = list(zip(cold, none, strict=True))
        row |= spread("over_no_cache", [one.ttft_ms / other.ttft_ms for one, other in pairs])
        row |= spread("core_cpu_more_ms", [one.core_cpu_ms - other.core_cpu_ms for one, other in pairs])
    row |= spread("core_cpu_ms", [one.core_cpu_ms for one in cold])
    shares = [one.share for one in cold if one.share is not None]
    if shares:
        row |= spread("kvpact_cpu_share", shares) | {"goal_of": "kvpact_cpu_share", "goal": 0.01}
    return row


def warm_row(tokens: int, what: str, source: str, warm: Sequence[Warm]) -> dict[str, Any]:
    """Readings of one engine, each over its own local prefix hit and, from a store, over that and the raw read."""
    row: dict[str, Any] = {"tokens": tokens, "what": what, "state": "warm", "readings": len(warm)}
    row |= spread("ttft_ms", [one.ttft_ms for one in warm]) | spread("local_ms", [one.local_ms for one in warm])
    row |= spread("over_local", [one.ttft_ms / one.local_ms for one in warm])
    raw = [(one, one.raw_ms) for one in warm if one.raw_ms is not None]
    if raw:
        row |= spread("raw_ms", [ms for _, ms in raw])
        row |= spread("over_raw", [one.ttft_ms / (one.local_ms + ms) for one, ms in raw])
    if source in GOALS:
        row["goal_of"], row["goal"] = GOALS[source]
    row["cached_tokens"] = round(median(one.cached_tokens for one in warm))
    wrong = [one.verdict for one in warm if one.verdict]
    row["answers"] = f"{len(wrong)} of {len(warm)}: {wrong[0]}" if wrong else "equal"
    return row


def local_row(tokens: int, hits: Sequence[float]) -> dict[str, Any]:
    """Local prefix hits of the engine without a cache, between the others' turns."""
    return {"tokens": tokens, "what": "no cache", "state": "local hit", "readings": len(hits)} | spread("ttft_ms", hits)


class Comparison:
    """All readings of a run. The engine without a cache comes first among the runners and takes part in all turns."""

    def __init__(self, run: Run, asked: Asked, warm_up: Prompt, rounds: int, stack: ExitStack) -> None:
        self._run, self._asked, self._warm_up, self._rounds, self._stack = run, asked, warm_up, rounds, stack
        self._references: dict[Name, Output] = {}
        self._numbers = count()
        self.cold: dict[tuple[int, str], dict[Name, Cold]] = defaultdict(dict)
        self.warm: dict[tuple[int, str, str], list[Warm]] = defaultdict(list)
        self.local: dict[int, list[float]] = defaultdict(list)
        self.failures: dict[str, str] = {}
        self._names: list[str] = []
        """Of all that were started, in the order of their rows."""

    def start(self, subjects: Sequence[Subject]) -> list[Runner]:
        """Those that started; they stand still. Two at a time, one for each core."""
        runners = []
        self._names += [subject.name for subject in subjects]
        for at in range(0, len(subjects), 2):
            pair = []
            for subject in subjects[at : at + 2]:
                say(f"starting {subject.name}")
                folder = self._run.folder / f"engine-{next(self._numbers)}"
                folder.mkdir()
                try:
                    settings = subject.configure(self._run, self._stack, folder)
                    engine = subject.kind(self._run)(settings, folder / "log")
                    pair.append(Runner(subject.name, subject.source, engine, folder))
                    self._stack.callback(pair[-1].end)
                except RuntimeError as error:
                    self.failures[subject.name] = str(error)
            started(pair, self._warm_up)
            runners += pair
        return self._living(runners)

    def _living(self, runners: Sequence[Runner]) -> list[Runner]:
        failed = {runner.name: runner.failure for runner in runners if runner.failure}
        self.failures |= failed
        if NO_CACHE.name in failed:
            raise SystemExit(f"the engine without a cache: {failed[NO_CACHE.name]}")
        return [runner for runner in runners if not runner.failure]

    def ask_cold(self, runners: Sequence[Runner], redis: RawRedis | None) -> None:
        """Each prompt once by each engine, in turns; the first one's local prefix hit is what answers should be."""
        if redis is not None:
            redis.note(self._warm_up)
        for number, prompt in enumerate((*self._asked.once, *self._asked.again)):
            say(f"{prompt.tokens} tokens, cold, {prompt.number + 1}")
            for runner in in_turns(self._living(runners), number):
                with runner.turn():
                    self.cold[prompt.tokens, runner.name][prompt.name] = runner.ask_cold(prompt)
                    if runner.name == NO_CACHE.name:
                        self._references[prompt.name] = runner.ask_local(prompt)
                    if redis is not None and runner.source == "redis":
                        redis.note(prompt)
        self._living(runners)

    def ask_warm(self, runners: Sequence[Runner], raw: Mapping[str, RawDisk | RawRedis]) -> None:
        """Each prompt once a round by each engine, in turns; raw reads while all engines stand still."""
        for number in range(self._rounds):
            say(f"warm, round {number + 1} of {self._rounds}")
            for at, prompt in enumerate(self._asked.again):
                for runner in in_turns(self._living(runners), number + at):
                    if runner.name == NO_CACHE.name:
                        with runner.turn():
                            self.local[prompt.tokens].append(runner.ask_local(prompt).first_token_seconds * 1e3)
                        continue
                    reader, raw_first = raw.get(runner.source), (number + at) % 2 == 0
                    raw_ms = reader.seconds(prompt) * 1e3 if reader is not None and raw_first else None
                    found = None
                    with runner.turn():
                        found = runner.ask_warm(prompt, self._references[prompt.name])
                    if reader is not None and not raw_first:
                        raw_ms = reader.seconds(prompt) * 1e3
                    if found is not None:
                        self.warm[prompt.tokens, runner.name, runner.source].append(replace(found, raw_ms=raw_ms))
        self._living(runners)

    def written(self) -> list[Prompt]:
        """All prompts in the order in which they were computed."""
        return [self._warm_up, *self._asked.once, *self._asked.again]

    def rows(self, tokens: int) -> Iterator[dict[str, Any]]:
        """For prompts of one length: cold, the local hit, warm."""
        none = self.cold[tokens, NO_CACHE.name]
        for what in self._names:
            if cold := self.cold.get((tokens, what)):
                beside = None if cold is none else [none[name] for name in cold]
                yield cold_row(tokens, what, list(cold.values()), beside)
        yield local_row(tokens, self.local[tokens])
        in_order = sorted(self.warm.items(), key=lambda item: self._names.index(item[0][1]))
        for (length, what, source), warm in in_order:
            if length == tokens:
                yield warm_row(tokens, what, source, warm)


def in_turns(runners: Sequence[Runner], number: int) -> Iterator[Runner]:
    """Another one begins each time."""
    at = number % len(runners)
    yield from (*runners[at:], *runners[:at])


def say(what: str) -> None:
    """What happens, for one who waits."""
    print(what, file=sys.stderr, flush=True)


def _check(tokens: Sequence[int], cold: int, prompts: int, rounds: int, peers: Sequence[str]) -> None:
    require_known("--peers", peers, PEERS)
    if not tokens or min(tokens) < SHORTEST or len(set(tokens)) < len(tokens):
        raise SystemExit(f"--tokens: different lengths of at least {SHORTEST}, not {','.join(map(str, tokens))}")
    if prompts < 2:
        raise SystemExit(f"--prompts: at least 2 of each length, so that one drives out the other, not {prompts}")
    if cold < prompts:
        raise SystemExit(f"--cold: at least --prompts, which is {prompts}, not {cold}")
    if rounds < 1:
        raise SystemExit(f"--rounds: at least 1, not {rounds}")


@dataclass(frozen=True, slots=True)
class Asked:
    """All prompts, different from the first token on: `once` are asked cold alone, and first; `again` also warm."""

    once: Sequence[Prompt]
    again: Sequence[Prompt]

    @classmethod
    def of(cls, tokens: Sequence[int], cold: int, prompts: int) -> Asked:
        """Of each length `cold` prompts, and `prompts` of them again."""
        once = [_prompt(length, number) for length in tokens for number in range(cold - prompts)]
        return cls(once, [_prompt(length, number) for length in tokens for number in range(cold - prompts, cold)])


def _prompt(length: int, number: int) -> Prompt:
    """It has a few tokens more than `length`, as no cache has them."""
    source = random.Random(f"{length} {number}")
    return Prompt(length, number, source.choices(range(16, WIDE.vocabulary), k=length + 24 + number % 8))


def run_of(
    folder: Path, tokens: Sequence[int], prompts: Sequence[Prompt], python: str, *, fork: bool
) -> tuple[Run, int]:
    """What all engines share that read these prompts again, and the bytes of a block."""
    from forked_engine import ForkedEngine
    from tiny_engine import TOKENIZER_TEXT

    dtype = Plan.for_this_machine().dtype
    shape = WIDE if dtype == "bfloat16" else NARROW
    block_bytes = BLOCK * shape.token_bytes(dtype)
    sizes = [prompt.blocks * block_bytes for prompt in prompts]
    length = max(tokens) + 2 * BLOCK
    arguments = {"dtype": dtype, "max_model_len": length, "max_num_batched_tokens": length}
    model = ensure_model(folder, shape, TOKENIZER_TEXT)
    kind = ForkedEngine if fork else EngineProcess
    return Run(folder, model, arguments, python, kind, max(sizes), sum(sizes)), block_bytes


def _compare(
    folder: Path, tokens: Sequence[int], asked: Asked, rounds: int, there: Sequence[str], python: str, *, fork: bool
) -> Iterator[dict[str, Any]]:
    run, block_bytes = run_of(folder, tokens, asked.again, python, fork=fork)
    for number, group in enumerate(groups_with_room(there, engines_with_room(run))):
        part = replace(run, folder=folder / f"group-{number}")
        part.folder.mkdir()
        yield from _compare_group(part, tokens, asked, rounds, group, block_bytes)


def _compare_group(
    run: Run, tokens: Sequence[int], asked: Asked, rounds: int, peers: Sequence[str], block_bytes: int
) -> Iterator[dict[str, Any]]:
    """Those engines, with one of their own without a cache, interleaved."""
    from servers.redis_server import redis_server

    with ExitStack() as stack:
        subjects, redis, again = [NO_CACHE], None, []
        if "kvpact" in peers:
            subjects.append(KVPACT)
            again.append(KVPACT_AGAIN)
        if "redis" in peers:
            with on_core(STORING_CORE):
                server = stack.enter_context(redis_server(run.folder / "redis"))
            redis = RawRedis(stack.enter_context(server.client()), block_bytes)
            subjects.append(kvpact_with_redis(server.address, new=False))
            again.append(kvpact_with_redis(server.address, new=True))
        subjects += [subject for subject in OTHERS if subject.peer in peers]
        comparison = Comparison(run, asked, _prompt(SHORTEST, -1), rounds, stack)
        first = comparison.start(subjects)
        comparison.ask_cold(first, redis)
        for runner in first:
            if runner.source == "redis":
                runner.end(in_order=True)
        comparison.ask_warm([runner for runner in first if runner.source != "redis"], {})
        for runner in first[1:]:
            runner.end(in_order=runner.source == "memory")
        raw: dict[str, RawDisk | RawRedis] = {} if redis is None else {"redis": redis}
        if "kvpact" in peers:
            drop_page_cache(disk_folder(run))
            raw["disk"] = stack.enter_context(closing(RawDisk(disk_folder(run), comparison.written())))
        if again:
            comparison.ask_warm([first[0], *comparison.start(again)], raw)
        for length in tokens:
            yield from comparison.rows(length)
        for name, why in comparison.failures.items():
            yield {"what": name, "state": "failed", "note": why}


def rows(
    tokens: tuple[int, ...] = (1024, 4096, 8192),
    cold: int = 8,
    prompts: int = 2,
    rounds: int = 3,
    peers: tuple[str, ...] = PEERS,
    peer_python: Path | None = None,
    fork: bool = False,
) -> list[dict[str, Any]]:
    """For each length a row of each engine, cold and warm; what is not there, or failed, has a row that says so.

    `cold` prompts of each length are asked cold, and `prompts` of them also warm. Where memory is too little for all
    engines, peers are compared in several groups, each beside an engine without a cache of its own.

    `peer_python` is an interpreter that has vLLM and the packages of peers, by default this one. With
    `fork` engines start three times as fast, and poll less when they have no work: for tests.
    """
    _check(tokens, cold, prompts, rounds, peers)
    if find_spec("vllm") is None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    python = str(peer_python or sys.executable)
    absent = [peer for peer in peers if not is_there(peer, python)]
    there = [peer for peer in PEERS if peer in peers and peer not in absent]
    found: list[dict[str, Any]] = []
    if there:
        asked = Asked.of(tokens, cold, prompts)
        with tempfile.TemporaryDirectory(prefix="kvpact-e2e-") as folder:
            found += _compare(Path(folder), tokens, asked, rounds, there, python, fork=fork)
    return [*found, *({"what": peer, "state": "not there", "note": WAYS_TO_GET[peer]} for peer in absent)]
